"""Rewards of programs: what counts as a program, what passes a test, and programs that cheat."""

from __future__ import annotations

import json
import os
import resource
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.judges.sandbox import Limits, Sandbox, SandboxUnavailable
from grpo_mega.reward.code import code_score, program, same
from grpo_mega.reward.verdict import Verdict
from grpo_mega.types import Prompt, Sample

ADD = [{"stdin": "2 3\n", "stdout": "5\n"}, {"stdin": "40 2\n", "stdout": "42\n"}]
CALL = [{"call": "add", "args": [2, 3], "returns": 5}, {"call": "add", "args": [40, 2], "returns": 42}]
RIGHT = "print(sum(map(int, input().split())))"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    try:
        made = Sandbox(boxes=2)
    except SandboxUnavailable as missing:
        pytest.skip(str(missing))
    yield made
    made.close()


def sample_of(text: str, tests: Any) -> Sample:
    prompt = Prompt("p1", (1,), "", "", "code", {"tests": tests})
    return Sample(prompt, 0, array("i"), array("f"), "stop", ((0, 0),), text)


def fenced(source: str) -> str:
    return f"Here it is.\n```python\n{source}\n```\n"


def score(sandbox: Sandbox, source: str, tests: Any, **arguments: Any) -> Verdict:
    return code_score(sample_of(fenced(source), tests), sandbox=sandbox, **arguments)


def test_a_right_program_passes(sandbox: Sandbox) -> None:
    assert score(sandbox, RIGHT, ADD) == Verdict(1.0, "passed 2 tests")


def test_a_right_function_passes(sandbox: Sandbox) -> None:
    assert score(sandbox, "def add(a, b):\n    return a + b", CALL).value == 1


def test_a_method_is_called_on_an_object(sandbox: Sandbox) -> None:
    source = "class Solution:\n    def add(self, a, b):\n        return a + b"
    assert score(sandbox, source, [{"call": "Solution.add", "args": [2, 3], "returns": 5}]).value == 1


def test_a_called_program_does_not_run_its_main_part(sandbox: Sandbox) -> None:
    source = "def add(a, b):\n    return a + b\nif __name__ == '__main__':\n    raise SystemExit(1)"
    assert score(sandbox, source, CALL).value == 1


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("print(5)", "test 2 of 2: line 1 of the output is '5', not '42'"),
        ("x = 5", "test 1 of 2: line 1 of the output is nothing, not '5'"),
        ("print(5); print(6)", "test 1 of 2: line 2 of the output is '6', not nothing"),
        ("1 / 0", "test 1 of 2: ended with code 1: ZeroDivisionError: division by zero"),
        ("def f(:", "test 1 of 2: ended with code 1: SyntaxError: invalid syntax"),
        (f"{RIGHT}\nimport sys; sys.exit(3)", "test 1 of 2: ended with code 3"),
        (f"{RIGHT}\nimport os, sys; sys.stdout.flush(); os.kill(os.getpid(), 9)", "test 1 of 2: ended with code -9"),
        ("while True: pass", "test 1 of 2: used more than 1 s of CPU time"),
        ("import time; time.sleep(100)", "test 1 of 2: did not end within 1.5 s"),
        ("while True: print('x' * 1000)", "test 1 of 2: wrote more than 1,048,576 bytes"),
        ("x = bytearray(1 << 34)", "test 1 of 2: ended with code 1: MemoryError"),
    ],
)
def test_a_wrong_program_earns_nothing_and_the_reason_says_why(sandbox: Sandbox, source: str, reason: str) -> None:
    limits = Limits(cpu_seconds=1, wall_seconds=1.5 if "sleep" in source else 60)
    assert score(sandbox, source, ADD, limits=limits) == Verdict(0.0, reason)


def test_the_share_of_tests(sandbox: Sandbox) -> None:
    tests = [*ADD, {"stdin": "1 1", "stdout": "2"}, {"stdin": "2 2", "stdout": "4"}]
    verdict = score(sandbox, "print(5)", tests, all_or_nothing=False)
    assert verdict == Verdict(0.25, "test 2 of 4: line 1 of the output is '5', not '42'")


def test_spaces_at_the_ends_of_lines_do_not_count(sandbox: Sandbox) -> None:
    tests = [{"stdin": "", "stdout": "1 2\n3"}]
    assert score(sandbox, "print('1 2  '); print(3); print()", tests).value == 1
    assert score(sandbox, "print('1  2'); print(3)", tests).value == 0
    assert score(sandbox, "print(); print('1 2'); print(3)", tests).value == 0


def test_output_may_be_as_long_as_a_test_expects(sandbox: Sandbox) -> None:
    line = "x" * 99
    tests = [{"stdin": "", "stdout": (line + "\n") * 20_000}, {"call": "f", "args": [], "returns": [line] * 20_000}]
    for test, source in zip(
        tests, (f"print('{line}\\n' * 20_000)", f"def f(): return ['{line}'] * 20_000"), strict=True
    ):
        assert score(sandbox, source, [test]) == Verdict(1.0, "passed 1 tests")
    assert score(sandbox, f"print('{line}\\n' * 60_000)", tests[:1]).reason.endswith("wrote more than 4,065,536 bytes")


@pytest.mark.parametrize(("digits", "value"), [(4_000, 1.0), (6_000, 1.0), (99_999, 1.0), (100_000, 0.0)])
def test_integers_of_many_digits(sandbox: Sandbox, digits: int, value: float) -> None:
    tests = [{"call": "f", "args": [], "returns": -(10**digits)}]
    assert score(sandbox, f"def f(): return -10**{digits}", tests).value == value
    wrong = score(sandbox, f"def f(): return -10**{digits} + 1", tests)
    assert wrong.value == 0
    assert len(wrong.reason) < 300


FROM_PARQUET = [
    {"stdin": "2 3", "stdout": "5", "call": None, "args": None, "returns": None},
    {"stdin": None, "stdout": None, "call": "add", "args": [2, 3], "returns": 5},
    {"stdin": None, "stdout": None, "call": "nothing", "args": [], "returns": None},
]


@pytest.mark.parametrize("tests", [FROM_PARQUET, json.dumps(FROM_PARQUET)])
def test_tests_from_columns_and_from_text(sandbox: Sandbox, tests: Any) -> None:
    source = "def add(a, b): return a + b\ndef nothing(): pass\n"
    assert score(sandbox, source + RIGHT, tests, all_or_nothing=False).value == pytest.approx(1 / 3)
    source += f"if __name__ == '__main__': {RIGHT}"
    assert score(sandbox, source, tests) == Verdict(1.0, "passed 3 tests")


CHEATS = {
    "always equal": "class E(int):\n    __eq__ = lambda s, o: True\nadd = lambda a, b: E(7)",
    "always equal object": "class E:\n    __eq__ = lambda s, o: True\nadd = lambda a, b: E()",
    "exit code 0 without running": "import os; os._exit(0)",
    "exit code 0 in the function": "def add(a, b):\n    raise SystemExit(0)",
    "a changed checker": """
import json, builtins, sys
json.dumps = lambda *a, **k: '5'
sys.modules['grpo_mega'] = builtins
def add(a, b): return 0
""",
    "reading the answers": """
import gc, sys
def add(a, b):
    frame, seen = sys._getframe(), []
    while frame:
        seen.append(repr(frame.f_locals) + repr(frame.f_globals)[:100000])
        frame = frame.f_back
    text = " ".join(seen) + " ".join(repr(o) for o in gc.get_objects() if type(o) in (dict, list, tuple))[:10**7]
    wanted = 2 * "".join(map(chr, (52, 55, 49, 49, 48, 56, 49, 53)))
    return int(wanted) if wanted in text else 0
""",
    "forged answers": """
import os
for number in range(3, 64):
    for text in (b'{"status": 0}', b"ready", b"\\x000", b"true"):
        try: os.write(number, text)
        except OSError: pass
os._exit(0)
""",
    "not a number": "add = lambda a, b: float('nan')",
    "infinity, written by hand": "import os\ndef add(a, b):\n    os.write(3, b'NaN'); os._exit(0)",
    "true for one": "add = lambda a, b: True",
    "text": "add = lambda a, b: '4711081547110815'",
    "deep data": "import os\ndef add(a, b):\n    os.write(3, b'[' * 500000); os._exit(0)",
    "much data": "import os\ndef add(a, b):\n    while True: os.write(3, b'[1,' * 10000)",
    "a huge number": "import os\ndef add(a, b):\n    os.write(3, b'9' * 900000); os._exit(0)",
    "a set": "add = lambda a, b: {4711081547110815}",
}


LONG = 4711081547110815
"""No address in memory has so many of its digits by chance."""


@pytest.mark.parametrize("name", CHEATS)
def test_a_program_that_cheats_earns_nothing(sandbox: Sandbox, name: str) -> None:
    tests = [{"call": "add", "args": [1, 2], "returns": LONG}, {"call": "add", "args": [1, 2], "returns": 1}]
    for test in tests:
        verdict = score(sandbox, CHEATS[name].strip(), [test], limits=Limits(cpu_seconds=5))
        assert verdict.value == 0, verdict
        assert verdict.reason
        assert not verdict.unscorable, "a program must not be able to choose that it is not scored"
    assert score(sandbox, f"add = lambda a, b: {LONG}", tests[:1]).value == 1


def test_the_expected_answer_never_enters_the_box(sandbox: Sandbox) -> None:
    """The program looks for it in all memory of its process, which is a fork of the one that got the request."""
    source = """
import ctypes, gc
def add(a, b):
    word = "".join(map(chr, (115, 101, 99, 114, 101, 116)))
    return sum(repr(o).count(word) for o in gc.get_objects() if isinstance(o, (dict, list, tuple)))
"""
    test = {"call": "add", "args": [1, 2], "returns": "a secret answer"}
    assert "returned 0" in score(sandbox, source.strip(), [test]).reason


def test_what_one_program_leaves_the_next_does_not_see(sandbox: Sandbox) -> None:
    spoil = "import builtins, os\nbuiltins.print = lambda *a: None\nbuiltins.sum = lambda *a: 5\nbuiltins.X = 1"
    one = Sandbox(boxes=1)
    score(one, spoil, ADD)
    assert score(one, RIGHT, ADD).value == 1
    assert score(one, "print(X)", ADD).value == 0
    one.close()


def test_when_no_box_can_be_started_the_sample_is_not_scored(sandbox: Sandbox) -> None:
    """An infrastructure failure is never a zero: here one file can be open at a time, and no more."""
    one = Sandbox(boxes=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)  # the lowest descriptor that is not in use
    os.close(free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))
        verdict = score(one, RIGHT, ADD)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert verdict.unscorable
    assert score(one, RIGHT, ADD).value == 1
    one.close()


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("```python\nx\n```", "x\n"),
        ("```\nx\n```", "x\n"),
        ("~~~py\nx\n~~~", "x\n"),
        ("````python\n```\n````", "```\n"),
        ("<think>\n```python\ny\n```\n</think><answer>```python\nx\n```</answer>", "x\n"),
        ("<think>\n```python\ny\n```\n</think><answer>\n```python\nx\n```\n</answer>", "x\n"),
        ("<think>t</think><answer>print(1)</answer>", "print(1)\n"),
        ("print(1)", None),
        ("```python\nx", None),
        ("```python\nx\n```\n```python\ny\n```", "y\n"),
        ("```python\nx\n```\n```bash\necho\n```\n```\n5\n```", "x\n"),
        ("```\nprint(1)\n```\nIt prints\n```\n1\n```", "print(1)\n"),
        ("<think>\n```python\ny\n</think>\n```python\nx\n```", "x\n"),
        ("1. So:\n   ```python\n   if x:\n       y\n   ```", "if x:\n    y\n"),
        ('```python\nx = """\n    ```\n"""\n```', 'x = """\n    ```\n"""\n'),
        ("```python\nx\n```\n```python\ny", None),
        ("```cpp\nx\n```", None),
        ("<answer>\n```python\nx\n```", None),
        ("<answer></answer>", None),
        ("```python\n```", ""),
    ],
)
def test_the_program_of_a_completion(text: str, source: str | None) -> None:
    assert program(text) == source


def test_the_end_of_thinking_may_be_a_text_of_the_program() -> None:
    source = "print('</think>')\n"
    assert program(f"<think>\nhm\n</think>\n```python\n{source}```") == source


def test_a_strict_program_is_the_only_block() -> None:
    one, two = "```python\nx\n```", "```\ny\n```"
    assert [program(text, strict=True) for text in (one, one + "\n" + two, f"<think>\n{two}\n</think>\n{one}")] == [
        "x\n",
        None,
        None,
    ]


def test_the_program_is_the_block_that_defines_what_the_tests_call() -> None:
    text = "```python\ndef add(a, b):\n    return a + b\n```\nTry it:\n```python\nprint(add(2, 3))\n```"
    assert program(text, {"add"}) == "def add(a, b):\n    return a + b\n"
    assert program(text) == "print(add(2, 3))\n"
    stub = "```\nclass Solution:\n    pass\n```\n```Python3.11\nclass Solution:\n    x = 1\n```\n```python\n```"
    assert program(stub, {"Solution"}) == "class Solution:\n    x = 1\n"


def test_leetcodes_implied_imports_are_there_and_pow_is_the_built_in_one(sandbox: Sandbox) -> None:
    source = "class Solution:\n    def f(self, x: List[int]) -> Optional[int]:\n" + "        return "
    source += (
        "pow(2, 5, 7) + deque(sorted(x))[0] + gcd(4, 6) + bisect.bisect_left(x, 1) + math.floor(pi) + cache(abs)(-2)"
    )
    test = [{"call": "Solution.f", "args": [[1, 2]], "returns": 4 + 1 + 2 + 0 + 3 + 2}]
    assert score(sandbox, source, test).value == 1
    assert score(sandbox, "print(gcd(4, 6))", [{"stdin": "", "stdout": "2"}]).value == 0


def test_looking_for_a_program_takes_no_time_in_hostile_text() -> None:
    for piece in ("\n", " ", "=", "```\n", "x", "~~~", "\t```"):
        program(f"```\n{piece * 100_000}x\n```", {"f"})


@pytest.mark.parametrize(
    ("printed", "expected", "value"),
    [
        ("0.3333333333", "0.333333", 1), ("0.333333", "0.3333333333", 1), ("0.33", "0.333333", 0), ("2", "2.0", 1),
        ("0.3334", "0.333333", 0), ("2.0", "2", 0), ("1e-7", "0.0000001", 1), ("0", "0.000001", 0),
        ("0.5  1", "0.5 1", 0), ("x 0.5000000001", "x 0.5", 1), ("nan", "0.5", 0), ("123456.7", "123456.70001", 1),
        ("-0.5", "0.5", 0),
    ],
)  # fmt: skip
def test_decimals_of_the_output_agree_to_their_rounding(
    sandbox: Sandbox, printed: str, expected: str, value: int
) -> None:
    assert score(sandbox, f"print({printed!r})", [{"stdin": "", "stdout": f"{expected}\n"}]).value == value


@pytest.mark.parametrize(
    "tests",
    [None, [], {}, "x", [1], [{"stdin": "1"}], [{"stdin": 1, "stdout": "1"}], [{"call": "f", "args": 1, "returns": 1}],
     [{"call": "f(", "args": [], "returns": 1}], [{"stdin": "1", "stdout": " \n"}], [*ADD, {"stdin": "", "x": ""}],
     [{"call": "f", "args": [], "returns": None}, {"call": "f", "args": [], "returns": []}], "[1]", "[{]",
     [{"call": "f", "args": None, "returns": 1}], [{"stdin": "1", "stdout": None}], [None]],
)  # fmt: skip
def test_tests_that_are_none_are_refused_by_name(tests: Any) -> None:
    with pytest.raises(ValueError, match=r"prompt 'p1': metadata\['tests'\]"):
        code_score(sample_of(fenced("x"), tests))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(JSON)
def test_data_is_the_same_as_itself_after_its_way_through_json(value: Any) -> None:
    assert same(json.loads(json.dumps(value)), value)


@given(JSON, JSON)
def test_what_is_the_same_looks_the_same(one: Any, other: Any) -> None:
    if same(one, other) and not any(isinstance(part, float) for part in (one, other)):
        assert type(one) is type(other)


@pytest.mark.parametrize(
    ("value", "wanted", "equal"),
    [
        (1, True, False), (True, 1, False), (0, False, False), (0, None, False), ("1", 1, False), (1, "1", False),
        ([1, 2], (1, 2), True), ([1], [1, 2], False), ({"a": 1}, {"a": 1, "b": 2}, False), (2, 2.0, True),
        (0.1 + 0.2, 0.3, True), (0.31, 0.3, False), (10**400, 1.0, False), (1.0, 1, True), (1.5, 1, False),
        (1 / 3, 0.333333, True), (0, 0.000001, False),
        ([], {}, False), ([[True]], [[1]], False), ({"a": [1.0000000001]}, {"a": [1.0]}, True),
    ],
)  # fmt: skip
def test_the_same(value: Any, wanted: Any, equal: bool) -> None:
    assert same(value, wanted) is equal


@pytest.mark.parametrize("all_or_nothing", [True, False])
def test_labelled_programs_are_judged_as_by_hand(sandbox: Sandbox, all_or_nothing: bool) -> None:
    """`programs.jsonl`: how models write programs, where only a right one passes its tests."""
    rows = [json.loads(line) for line in Path(__file__).with_name("programs.jsonl").read_text().splitlines()]
    verdicts = []
    for row in rows:
        limits = Limits(cpu_seconds=1, wall_seconds=0.5 if "sleep" in row["completion"] else 20)
        verdicts.append(code_score(sample_of(row["completion"], row["tests"]), limits, all_or_nothing, sandbox))
    assert len(rows) > 25
    assert [row["note"] for row, v in zip(rows, verdicts, strict=True) if (v.value == 1) != row["right"]] == []

"""The reward of programs: a completion's Python program is run against test cases, in a sandbox.

Only inputs enter the sandbox. What a program prints, or what its function returns, comes out as plain data and is
compared here, where the program is not: whatever it does to the checker in its own process, it cannot reach this one,
and no expected answer is where it could be read.

A prompt's `metadata["tests"]` is a list of tests, all of one kind or mixed:

    {"stdin": "2 3\\n", "stdout": "5\\n"}                    a program that reads and prints
    {"call": "add", "args": [2, 3], "returns": 5}           a function, or a method: "Solution.add"

Standard output is compared line by line, without spaces at the ends of lines and empty lines at the end. Returned data
is compared as JSON: tuples are lists, true is not 1, and a number that the test writes with a decimal point is met to
one part in a million.

The list may be JSON text. Keys whose value is None do not count (Parquet gives every test all keys), but for `returns`
beside a call.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
from dataclasses import replace
from decimal import Decimal
from typing import Any

from grpo_mega.reward.extract import answer_tag
from grpo_mega.reward.verdict import Verdict
from grpo_mega.sandbox import Call, Limits, Outcome, Sandbox
from grpo_mega.types import Sample

RELATIVE, ABSOLUTE = 1e-6, 1e-9
"""How close a returned number must be to one that is written with a decimal point."""
LANGUAGES = ("", "python", "python3", "py")
"""What a fenced block may call its language."""
MOST_DIGITS = 100_000
"""Digits of an integer in a result; reading more takes long."""
SPARE_OUTPUT = 64 << 10
"""Bytes that a program may write besides twice what a test expects."""
SHOWN = 80
"""Characters of a value that a reason shows."""

# Possessive throughout: with backtracking a line of tildes that is no fence takes cubic time, and holds the GIL.
_FENCE = re.compile(r"^ {0,3}(`{3,}+|~{3,}+)[ \t]*+([^\s`]*+)[^\n`]*+$", re.MULTILINE)
_making = threading.Lock()
_sandbox: Sandbox | None = None


def code_score(
    sample: Sample, limits: Limits | None = None, all_or_nothing: bool = True, sandbox: Sandbox | None = None
) -> Verdict:
    """The verdict on a completion's program: 1 when it passes all tests.

    Thread-safe: several programs run at once, as many as the sandbox has boxes.

    Args:
        sample: Its completion has one fenced block of Python, or an answer tag with a program.
        limits: What the program may use in each test. Output is limited to twice what the test expects where that is
            more.
        all_or_nothing: Whether a program that fails a test earns 0; otherwise it earns the share of tests it passes.
            Which tests those are depends on the tests alone: all are run then.
        sandbox: Where it runs; one that all calls of this process share by default.

    Raises:
        ValueError: The prompt's tests are no tests; names the prompt and the test.
        SandboxUnavailable: Nothing on this machine can keep programs in.
    """
    tests = checked_tests(sample)
    source = program(sample.text)
    if source is None:
        return Verdict(0.0, "no program: one fenced block of Python is needed")
    if "\x00" in source:
        return Verdict(0.0, "no program: it has a null character")
    box, passed, first = sandbox or _shared(), 0, ""
    for number, test in enumerate(tests, 1):
        outcome = _run(box, source, test, limits or Limits())
        if outcome.status == "infrastructure":
            return Verdict(0.0, unscorable=f"the sandbox could not run it: {outcome.reason}")
        failure = _failure(outcome, test)
        passed += not failure
        first = first or (failure and f"test {number} of {len(tests)}: {failure}")
        if failure and all_or_nothing:
            return Verdict(0.0, first)
    return Verdict(passed / len(tests), first or f"passed {len(tests)} tests")


def program(text: str) -> str | None:
    """The program in a completion: its only fenced block, looked for in the answer tag where there is one.

    An answer tag without a block is the program itself. None when there is no program, or there are several, or its
    block is not closed or in another language.
    """
    tagged = "<answer>" in text or "</answer>" in text
    scope = answer_tag(text) if tagged else text
    if scope is None:
        return None
    blocks = _blocks(scope)
    if blocks is None or len(blocks) > 1:
        return None
    if blocks:
        language, content = blocks[0]
        return content if language.lower() in LANGUAGES else None
    return scope.strip() + "\n" if tagged and scope.strip() else None


def _blocks(text: str) -> list[tuple[str, str]] | None:
    """(language, content) of every fenced block; None when one is not closed."""
    blocks: list[tuple[str, str]] = []
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence
        elif fence[1].startswith(opened[1]) and not fence[2]:
            blocks.append((opened[2], text[opened.end() + 1 : fence.start()]))
            opened = None
    return blocks if opened is None else None


def checked_tests(sample: Sample) -> list[dict[str, Any]]:
    """The tests of a sample's prompt.

    Raises ValueError, with the prompt's name, when there are none, when one is not a test, or when a program that does
    nothing would pass them all.
    """
    where = f"prompt {sample.prompt.id!r}: metadata['tests']"
    tests = sample.prompt.metadata.get("tests")
    if isinstance(tests, str):
        try:
            tests = _from_json(tests)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: a text must be a list of tests as JSON: {error}") from None
    if not isinstance(tests, list) or not tests:
        raise ValueError(f"{where} must be a list of tests, at least one, not {tests!r:.100}")
    tests = [_without_none(test) for test in tests]
    for number, test in enumerate(tests, 1):
        if not _is_test(test):
            raise ValueError(
                f"{where}, test {number}: {test!r:.200} is no test: "
                'it needs {"stdin": text, "stdout": text} or {"call": name, "args": list, "returns": value}'
            )
    if not any(_expects_something(test) for test in tests):
        raise ValueError(
            f"{where}: a program that does nothing passes all tests: "
            "one must expect some output, or a value that is neither null nor empty"
        )
    return tests


def _without_none(test: Any) -> Any:
    """A test without the keys that only tests of another kind have, which Arrow fills with None."""
    if not isinstance(test, dict):
        return test
    called = test.get("call") is not None
    return {key: value for key, value in test.items() if value is not None or (called and key == "returns")}


def _expects_something(test: dict[str, Any]) -> bool:
    if "call" not in test:
        return bool(_lines(test["stdout"]))
    empty = isinstance(test["returns"], str | list | tuple | dict) and not test["returns"]
    return test["returns"] is not None and not empty


def _is_test(test: Any) -> bool:
    if not isinstance(test, dict):
        return False
    if test.keys() == {"call", "args", "returns"}:
        named = isinstance(test["call"], str) and all(part.isidentifier() for part in test["call"].split("."))
        return named and isinstance(test["args"], list)
    return test.keys() == {"stdin", "stdout"} and all(isinstance(text, str) for text in test.values())


def _run(sandbox: Sandbox, source: str, test: dict[str, Any], limits: Limits) -> Outcome:
    """Runs the program with the input of a test, and nothing else of it."""
    expected = _size(test["returns"]) if "call" in test else len(test["stdout"].encode(errors="surrogatepass"))
    limits = replace(limits, output_bytes=max(limits.output_bytes, 2 * expected + SPARE_OUTPUT))
    if "call" in test:
        return sandbox.python(source, limits=limits, call=Call(test["call"], test["args"]))
    return sandbox.python(source, stdin=test["stdin"].encode(errors="surrogatepass"), limits=limits)


def _size(value: Any) -> int:
    """At least the bytes of data as JSON; a rough figure."""
    if isinstance(value, str):
        return len(json.dumps(value))
    if isinstance(value, dict):
        return 2 + sum(4 + _size(key) + _size(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return 2 + sum(2 + _size(inner) for inner in value)
    return 25 + (value.bit_length() // 3 if isinstance(value, int) else 0)


def _failure(outcome: Outcome, test: dict[str, Any]) -> str:
    """Why a program fails a test, in words; empty when it passes."""
    if outcome.status != "exited":
        return outcome.reason
    if not outcome.succeeded:
        last = outcome.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return f"ended with code {outcome.exit_code}{f': {last:.{SHOWN}}' if last else ''}"
    if "call" in test:
        return _wrong_result(outcome.result, test["returns"])
    got, wanted = _lines(outcome.stdout.decode(errors="replace")), _lines(test["stdout"])
    if got == wanted:
        return ""
    line = next((n for n, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(len(got), len(wanted)))
    shown = [repr(lines[line])[:SHOWN] if line < len(lines) else "nothing" for lines in (got, wanted)]
    return f"line {line + 1} of the output is {shown[0]}, not {shown[1]}"


def _wrong_result(result: bytes, wanted: Any) -> str:
    if not result:
        return "the function did not return"
    try:
        value = _from_json(result)
    except (ValueError, RecursionError):
        return f"what the function returned is not plain data: {result[:SHOWN].decode(errors='replace')}"
    return "" if same(value, wanted) else f"returned {_shown(value)}, not {_shown(wanted)}"


def _shown(value: Any) -> str:
    try:
        return repr(value)[:SHOWN]
    except ValueError:  # Python's limit for digits
        return "data with an integer of thousands of digits"


def _from_json(text: str | bytes) -> Any:
    """Data from JSON; raises ValueError for constants that JSON has not, and for more than `MOST_DIGITS` digits."""
    return json.loads(text, parse_constant=_refuse, parse_int=_integer)


def _integer(digits: str) -> int:
    """The integer. Python's own limit, 4,300 digits, holds for all threads of a process; decimal numbers have none."""
    if len(digits.lstrip("-")) > MOST_DIGITS:
        raise ValueError(f"an integer of more than {MOST_DIGITS:,} digits")
    return int(digits) if len(digits) < 640 else int(Decimal(digits))  # 640: the lowest that the limit can be set to


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def same(value: Any, wanted: Any) -> bool:
    """Whether returned data is what a test wants; both as JSON has them."""
    if isinstance(wanted, bool) or isinstance(value, bool) or wanted is None or isinstance(wanted, str):
        return type(value) is type(wanted) and value == wanted
    if isinstance(wanted, float) and isinstance(value, int | float):
        try:
            return math.isclose(value, wanted, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
        except OverflowError:  # an integer beyond what a float can hold
            return False
    if isinstance(wanted, list | tuple):
        return isinstance(value, list) and len(value) == len(wanted) and all(map(same, value, wanted))
    if isinstance(wanted, dict):
        return (
            isinstance(value, dict) and value.keys() == wanted.keys() and all(same(value[k], wanted[k]) for k in wanted)
        )
    return value == wanted


def _lines(text: str) -> list[str]:
    """The lines of a text, without spaces at their ends and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")] if text.strip() else []


def _shared() -> Sandbox:
    """The sandbox of this process; a fork of it has one of its own."""
    global _sandbox
    with _making:
        if _sandbox is None:
            _sandbox = Sandbox()
        return _sandbox


def _forget() -> None:
    """In a fork of this process, its sandbox is the parent's, and its lock may be held for ever."""
    global _sandbox, _making
    _sandbox, _making = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)

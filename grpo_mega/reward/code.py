"""Reward for code: runs a completion's Python program against test cases in a sandbox.

Only inputs enter the sandbox. A program's output, or the return value of its function, leaves the sandbox as plain data
and is compared in this process. The program can reach neither this process nor the expected answers.

A prompt's `metadata["tests"]` is a list of tests, all of one kind or mixed:

    {"stdin": "2 3\\n", "stdout": "5\\n"}                    a program that reads and prints
    {"call": "add", "args": [2, 3], "returns": 5}           a function, or a method: "Solution.add"

Standard output is compared line by line, without spaces at the ends of lines and empty lines at the end. Return values
are compared as JSON: tuples are lists, true is not 1. A number that the test writes with a decimal point must agree to
one part in a million, or, if it has six decimals or more, to the last of them, rounded.

A function is called after the imports that LeetCode's signatures take for granted (`List`, `deque`, `heappush`, ...).

The list may be JSON text. Keys whose value is None are ignored (Parquet gives every test all keys), except `returns`
next to `call`.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

from grpo_mega.config.schema.terms import CodeOptions
from grpo_mega.errors import InputError
from grpo_mega.judges.sandbox import BoxCall, Limits, Outcome, Sandbox, SandboxUnavailable
from grpo_mega.platform.trace import beside, span
from grpo_mega.reward.extract import END_OF_THINKING, answer_tag, conclusion
from grpo_mega.reward.verdict import Verdict
from grpo_mega.types import Sample

TOLERANCE = 1e-6
"""Largest relative error of a number where the test writes a decimal point."""
IMPLIED_IMPORTS = """
from typing import *
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
import bisect, collections, functools, heapq, itertools, math, typing
del pow  # the built-in one, which takes a modulus
"""
"""What a program whose function is called may use without importing it, as programs for LeetCode do."""
PYTHON = re.compile(r"py(?:thon)?[0-9.]*", re.IGNORECASE)
"""Accepted language tags of a fenced block."""
MOST_DIGITS = 100_000
"""Largest number of digits of an integer in a result, as parsing more takes long."""
SPARE_OUTPUT = 64 << 10
"""Bytes that a program may write in addition to twice the expected output."""
SHOWN = 80
"""Characters of a value shown in a reason."""

# All quantifiers are possessive: with backtracking a line of tildes that is no fence takes cubic time, and holds the
# GIL.
_FENCE = re.compile(r"^([ \t]*+)(`{3,}+|~{3,}+)[ \t]*+([^\s`]*+)[^\n`]*+$", re.MULTILINE)
# What tells a program from an output in a block without a language: a keyword, an assignment or a call.
_STATEMENT = re.compile(
    r"^[ \t]*+(?:def|class|import|from|for|while|if|return|print|with|try)\b|[^=!<>]=[^=]|\w\(", re.MULTILINE
)
_DECIMAL = re.compile(r"[-+]?[0-9]{1,300}\.([0-9]{1,300})")
_NUMBER = re.compile(r"[-+]?(?:[0-9]{1,300}\.?[0-9]{0,300}|\.[0-9]{1,300})(?:[eE][-+]?[0-9]{1,3})?")
_making = threading.Lock()
_sandbox: Sandbox | None = None


def code_score(
    sample: Sample,
    limits: Limits | None = None,
    all_or_nothing: bool = True,
    sandbox: Sandbox | None = None,
    strict: bool = False,
) -> Verdict:
    """Verdict on a completion's program: 1 when it passes all tests.

    Thread-safe: several programs run at once, as many as the sandbox has boxes.

    Args:
        sample: A sample whose completion has a fenced block of Python, or an answer tag with a program.
        limits: Resource limits of each test. The output limit is raised to twice the expected output.
        all_or_nothing: Whether a program that fails a test earns 0; otherwise it earns the share of tests it passes. In
            that case all tests are run.
        sandbox: Sandbox to run in; by default one shared by all calls of this process.
        strict: Whether a completion with more than one fenced block has no program.

    Raises:
        InputError: The prompt's tests are invalid; names the prompt and the test.
        SandboxUnavailable: No containment mechanism works on this machine.
    """
    tests = checked_tests(sample)
    source = program(sample.text, {test["call"].partition(".")[0] for test in tests if "call" in test}, strict)
    if source is None:
        return Verdict(0.0, "no program: a fenced block of Python is needed" + " and no other block" * strict)
    if "\x00" in source:
        return Verdict(0.0, "no program: it has a null character")
    box, passed, first = sandbox or _shared(), 0, ""
    for number, test in enumerate(tests, 1):
        with beside("sandbox", "test", sample=f"{sample.prompt.id} #{sample.index}", number=number) as about:
            outcome = _run(box, source, test, limits or Limits())
            about |= {"status": outcome.status, "process": outcome.box}
        # A program that did not get to run must not count as wrong.
        if outcome.status == "infrastructure":
            return Verdict(0.0, unscorable=f"the sandbox could not run it: {outcome.reason}")
        # The sum of passed tests is kept for partial credit; only the first failure becomes the reason.
        failure = _failure(outcome, test)
        passed += not failure
        first = first or (failure and f"test {number} of {len(tests)}: {failure}")
        if failure and all_or_nothing:
            return Verdict(0.0, first)
    return Verdict(passed / len(tests), first or f"passed {len(tests)} tests")


@dataclass(frozen=True)
class Programs:
    """Scores the programs of completions.

    Attributes:
        options: Resource limits and scoring rule.
        seconds: Wall-clock limit for one test.
        sandbox: Sandbox that runs the programs.
    """

    options: CodeOptions
    seconds: float
    sandbox: Sandbox = field(init=False)

    def __post_init__(self) -> None:
        """Raises InputError when no containment mechanism works on this machine."""
        try:
            sandbox = Sandbox(self.options.boxes or None, run_without_isolation=self.options.run_without_isolation)
        except SandboxUnavailable as error:
            what, fix = f"the sandbox does not work: {error}", "repair the sandbox, or remove the terms"
            raise InputError("reward terms of the kind code", what, fix) from error
        object.__setattr__(self, "sandbox", sandbox)

    def outcomes(self, samples: Sequence[Sample]) -> list[Verdict | Exception]:
        """Verdict for each sample: the share of tests passed, or whether all pass, and the first failure.

        A program that the sandbox could not run leaves its sample without a score. A problem with invalid tests is an
        error.
        """
        with ThreadPoolExecutor(self.sandbox.boxes, "reward worker") as threads:
            return list(threads.map(self._outcome, samples))

    def _outcome(self, sample: Sample) -> Verdict | Exception:
        options = self.options
        limits = Limits(options.cpu_seconds, self.seconds, options.memory_mib << 20)
        try:
            with span("program"):
                return code_score(sample, limits, options.all_or_nothing, self.sandbox, options.strict)
        except ValueError as error:
            return error


def program(text: str, called: Collection[str] = (), strict: bool = False) -> str | None:
    """Program in a completion: the last block of Python after the thoughts, inside the answer tag if there is one.

    Shell commands, outputs and other languages are passed over. Where functions are called, the last block that defines
    one of them is the program; where no block says that it is Python, the last untagged one that looks like it. An
    answer tag without a block is the program itself. Returns None without a program, or if a block is never closed.

    Args:
        text: Completion.
        called: Names of the functions and classes that tests call.
        strict: Whether a completion with several blocks has no program.
    """
    if not strict:
        whole, text = text, conclusion(text)
        # An unclosed block may mean that the last "end of thinking" is a string inside the program: cut at the first.
        if _blocks(text) is None:
            text = END_OF_THINKING.split(whole, maxsplit=1)[-1]
    tagged = "<answer>" in text or "</answer>" in text
    scope = answer_tag(text, strict) if tagged else text
    if scope is None:
        return None
    blocks = _blocks(scope)
    if blocks is None or (strict and len(blocks) > 1):
        return None
    if not blocks:
        return scope.strip() + "\n" if tagged and scope.strip() else None
    python = [content for language, content in blocks if PYTHON.fullmatch(language)]
    untagged = [content for language, content in blocks if not language]
    # An empty block is the program only if there is no other.
    python = [content for content in python if content.strip()] or python
    defines = re.compile(rf"^(?:async +def|def|class) +(?:{'|'.join(map(re.escape, called))})\b", re.MULTILINE)
    # From the most certain sign of a program to the least; the last block of the first kind found is the program.
    for likely in (
        [content for content in python if called and defines.search(content)],
        [content for content in untagged if called and defines.search(content)],
        python,
        [content for content in untagged if _STATEMENT.search(content)],
        untagged,
    ):
        if likely:
            return likely[-1]
    return None


def _blocks(text: str) -> list[tuple[str, str]] | None:
    """(language, content) of every fenced block, less the fence's indentation; None when one is never closed."""
    blocks: list[tuple[str, str]] = []
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence
        # As in CommonMark, the closing fence is at least as long as the opening one and names no language. One that is
        # indented much further belongs to the content.
        elif fence[2].startswith(opened[2]) and not fence[3].strip(".,;:") and len(fence[1]) <= len(opened[1]) + 3:
            lines = text[opened.end() + 1 : fence.start()].splitlines(keepends=True)
            blocks.append((opened[3], "".join(line.removeprefix(opened[1]) for line in lines)))
            opened = None
    return blocks if opened is None else None


def checked_tests(sample: Sample) -> list[dict[str, Any]]:
    """Validated tests of a sample's prompt.

    Raises InputError, with the prompt's name, when there are none, when one is not a test, or when a program that does
    nothing would pass them all.
    """
    where = f"prompt {sample.prompt.id!r}: metadata['tests']"
    tests = sample.prompt.metadata.get("tests")
    if isinstance(tests, str):
        try:
            tests = _from_json(tests)
        except (ValueError, RecursionError) as error:
            raise InputError(where, f"a text that is not JSON: {error}", "write a list of tests") from None
    if not isinstance(tests, list) or not tests:
        raise InputError(where, f"{tests!r:.100} is not a list of tests", "write a list with at least one test")
    # Arrow fills the keys of other kinds of tests with None.
    tests = [
        {k: v for k, v in test.items() if v is not None or (k == "returns" and test.get("call") is not None)}
        if isinstance(test, dict)
        else test
        for test in tests
    ]
    for number, test in enumerate(tests, 1):
        if not _is_test(test):
            fix = 'write {"stdin": text, "stdout": text} or {"call": name, "args": list, "returns": value}'
            raise InputError(f"{where}, test {number}", f"{test!r:.200} is not a test", fix)
    if not any(_expects_something(test) for test in tests):
        fix = "add a test that expects some output, or a value that is neither null nor empty"
        raise InputError(where, "a program that does nothing passes all tests", fix)
    return tests


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
    """Runs the program with the input of a test only, never its expected output."""
    expected = _size(test["returns"]) if "call" in test else len(test["stdout"].encode(errors="surrogatepass"))
    # A right answer must fit, however long the expected output is.
    limits = replace(limits, output_bytes=max(limits.output_bytes, 2 * expected + SPARE_OUTPUT))
    if "call" in test:
        return sandbox.python(source, limits=limits, call=BoxCall(test["call"], test["args"], IMPLIED_IMPORTS))
    return sandbox.python(source, stdin=test["stdin"].encode(errors="surrogatepass"), limits=limits)


def _size(value: Any) -> int:
    """Lower bound on the size of data as JSON, in bytes; approximate."""
    if isinstance(value, str):
        return len(json.dumps(value))
    if isinstance(value, dict):
        return 2 + sum(4 + _size(key) + _size(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return 2 + sum(2 + _size(inner) for inner in value)
    return 25 + (value.bit_length() // 3 if isinstance(value, int) else 0)


def _failure(outcome: Outcome, test: dict[str, Any]) -> str:
    """Why a program fails a test; empty when it passes."""
    if outcome.status != "exited":
        return outcome.reason
    if not outcome.succeeded:
        last = outcome.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return f"ended with code {outcome.exit_code}{f': {last:.{SHOWN}}' if last else ''}"
    if "call" in test:
        if not outcome.result:
            return "the function did not return"
        try:
            value = _from_json(outcome.result)
        except (ValueError, RecursionError):
            return f"what the function returned is not plain data: {outcome.result[:SHOWN].decode(errors='replace')}"
        return "" if same(value, test["returns"]) else f"returned {_shown(value)}, not {_shown(test['returns'])}"
    got, wanted = _lines(outcome.stdout.decode(errors="replace")), _lines(test["stdout"])
    differ = (n for n, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b and not _same_line(a, b))
    # Without a line that differs, the shorter output ends where the other one goes on.
    line = next(differ, min(len(got), len(wanted)))
    if line == len(got) == len(wanted):
        return ""
    shown = [repr(lines[line])[:SHOWN] if line < len(lines) else "nothing" for lines in (got, wanted)]
    return f"line {line + 1} of the output is {shown[0]}, not {shown[1]}"


def _same_line(line: str, wanted: str) -> bool:
    """Whether two lines have the same words, up to the rounding of numbers that the wanted one writes as decimals."""
    words, expected = (re.split(r"(\s+)", text) for text in (line, wanted))
    return len(words) == len(expected) and all(
        word == of or (_DECIMAL.fullmatch(of) and _NUMBER.fullmatch(word) and _close(float(word), of))
        for word, of in zip(words, expected, strict=True)
    )


def _close(value: float, wanted: str) -> bool:
    """Whether a number agrees with a decimal, which may have been rounded when the test was written."""
    # Half a unit of the last place, and a little more because floats hold most decimals only approximately. The bound
    # by `TOLERANCE` keeps a short decimal from accepting a wide range: 0.54 is not 0.5.
    written = _DECIMAL.fullmatch(wanted)
    rounding = 0.5001 * 10.0 ** -len(written[1]) if written else 0.0
    return math.isclose(value, float(wanted), rel_tol=TOLERANCE, abs_tol=min(rounding, TOLERANCE))


def _shown(value: Any) -> str:
    try:
        return repr(value)[:SHOWN]
    # Python refuses to print integers beyond its limit of digits.
    except ValueError:
        return "data with an integer of thousands of digits"


def _from_json(text: str | bytes) -> Any:
    """Parses JSON; raises ValueError for constants outside JSON, and for integers of more than `MOST_DIGITS` digits."""
    return json.loads(text, parse_constant=_refuse, parse_int=_integer)


def _integer(digits: str) -> int:
    """Parses an integer by `decimal`, as Python's own limit of 4,300 digits applies to all threads of a process."""
    if len(digits.lstrip("-")) > MOST_DIGITS:
        raise ValueError(f"an integer of more than {MOST_DIGITS:,} digits")
    # 640 is the lowest value that Python's limit can be set to.
    return int(digits) if len(digits) < 640 else int(Decimal(digits))


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def same(value: Any, wanted: Any) -> bool:
    """Whether returned data equals the test's expectation; both in JSON types."""
    # In Python True equals 1, so types are compared first.
    if isinstance(wanted, bool) or isinstance(value, bool) or wanted is None or isinstance(wanted, str):
        return type(value) is type(wanted) and value == wanted
    if isinstance(wanted, float) and isinstance(value, int | float):
        # An integer may be beyond the range of floats.
        try:
            return _close(float(value), repr(wanted))
        except OverflowError:
            return False
    if isinstance(wanted, list | tuple):
        return isinstance(value, list) and len(value) == len(wanted) and all(map(same, value, wanted))
    if isinstance(wanted, dict):
        return (
            isinstance(value, dict) and value.keys() == wanted.keys() and all(same(value[k], wanted[k]) for k in wanted)
        )
    return value == wanted


def _lines(text: str) -> list[str]:
    """Lines of a text, without trailing spaces and trailing empty lines."""
    return [line.rstrip() for line in text.rstrip().split("\n")] if text.strip() else []


def _shared() -> Sandbox:
    """Sandbox of this process; a fork of it creates its own."""
    global _sandbox
    with _making:
        if _sandbox is None:
            _sandbox = Sandbox()
        return _sandbox


def _forget() -> None:
    """Drops the sandbox in a fork of this process: it belongs to the parent, and its lock may be held forever."""
    global _sandbox, _making
    _sandbox, _making = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)

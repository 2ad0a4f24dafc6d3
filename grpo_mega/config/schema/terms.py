"""Kinds of built-in reward terms, and the options of each, as given in `reward.terms[].options`.

An option without a default is required. `read_options` of the rules checks the values, before anything is built; the
terms themselves are in `grpo_mega/reward/`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from grpo_mega.config.limits import Interval, OneOf
from grpo_mega.errors import InputError

SCRIPTS = (
    *("latin", "cyrillic", "greek", "arabic", "hebrew", "devanagari", "bengali", "tamil", "thai", "georgian"),
    *("armenian", "chinese", "japanese", "korean"),
)


@dataclass(frozen=True)
class NoOptions:
    """Options of kinds that have none, or the defaults of those that have some."""


@dataclass(frozen=True)
class StrictOptions:
    """Options of the kinds accuracy, boxed and stated."""

    strict: bool = False
    """Whether another tag or box anywhere in the completion, in its thoughts too, makes the answer wrong."""


@dataclass(frozen=True)
class FormatOptions:
    """Options of the kind format."""

    template: Annotated[str, OneOf("think_answer", "boxed")] = "think_answer"
    """think_answer (R1-Zero's tags around the whole completion) or boxed (an answer in a box)."""
    strict: bool = False
    """Whether the thoughts may not mention the answer's tag or box either."""


@dataclass(frozen=True)
class ChoiceOptions:
    """Options of the kind multiple_choice."""

    read: Annotated[str, OneOf("text", "tag", "boxed", "stated")] = "text"
    """Place of the answer: text (all that follows the thoughts), or the last answer tag, box, or "Answer: ..."."""
    strict: bool = False
    """Whether another tag, box or stated answer anywhere in the completion leaves it without one."""


@dataclass(frozen=True)
class ReadOptions(ChoiceOptions):
    """Options of the kind countdown: the same, though the whole text is one answer, and has no others to refuse."""

    def __post_init__(self) -> None:
        if self.strict and self.read == "text":
            raise InputError("strict=true", "no effect with read=text, where all text is one answer", "leave it out")


@dataclass(frozen=True)
class ExactOptions(ReadOptions):
    """Options of the kind exact, beside those of `ReadOptions`."""

    ignore_case: bool = False
    """Whether upper and lower case are equal."""


@dataclass(frozen=True)
class RegexOptions(ReadOptions):
    """Options of the kind regex, beside those of `ReadOptions`; `read: text` is the whole completion here."""

    pattern: str = ""
    """Regular expression in Python's syntax; "" for each problem's own, `pattern` in its metadata."""
    whole: bool = False
    """Whether the pattern must match the whole answer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _pattern("pattern", self.pattern)


@dataclass(frozen=True)
class PuzzleOptions(ReadOptions):
    """Options of the kind reasoning_gym, beside those of `ReadOptions`."""

    partial: bool = False
    """Whether a partial score of the task's scorer counts; otherwise it is 0."""


@dataclass(frozen=True)
class LanguageOptions:
    """Options of the kind language."""

    script: Annotated[str, OneOf(*SCRIPTS)]
    """Script; chinese, japanese and korean stand for the scripts that these languages use."""


@dataclass(frozen=True)
class LengthOptions:
    """Options of the kind length."""

    low: int
    """Number of tokens up to which the value is 0."""
    high: int
    """Number of tokens from which the value is 1."""

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise InputError(f"low={self.low}", f"no range up to high={self.high}", "choose 0 <= low < high")


@dataclass(frozen=True)
class OverlongOptions:
    """Options of the kind overlong."""

    limit: int
    """L_max of DAPO's equation 13, in tokens."""
    buffer: int
    """L_cache, the tokens before the limit over which the value falls from 0 to -1."""

    def __post_init__(self) -> None:
        if not 0 < self.buffer <= self.limit:
            raise InputError(f"buffer={self.buffer}", f"not within limit={self.limit}", "choose 0 < buffer <= limit")


@dataclass(frozen=True)
class RepetitionOptions:
    """Options of the kind repetition."""

    size: Annotated[int, Interval("[1, 10000]")] = 20
    """Length of an n-gram, in tokens."""


@dataclass(frozen=True)
class CodeOptions:
    """Options of the kind code."""

    all_or_nothing: bool = True
    """Whether a program that fails a test earns 0 instead of the share of tests that it passes."""
    cpu_seconds: Annotated[int, Interval("[1, 86400]")] = 5
    """CPU time of a program, for each test."""
    memory_mib: Annotated[int, Interval("[64, 1048576]")] = 1024
    """Memory of a process."""
    boxes: Annotated[int, Interval("[0, 10000]")] = 0
    """Programs that a rank runs at once; 0 for its share of the machine's CPUs."""
    run_without_isolation: bool = False
    """Whether programs run with the user's own rights where no sandbox works."""
    strict: bool = False
    """Whether a completion with more than one fenced block has no program."""


@dataclass(frozen=True)
class CommandOptions:
    """Options of the kind command."""

    command: list[str]
    """A program and its arguments."""
    at_once: Annotated[int, Interval("[1, 1000]")] = 4
    """Samples that a rank scores at once, each in a separate process."""

    def __post_init__(self) -> None:
        if not self.command or not self.command[0]:
            fix = "write a program and its arguments, such as [./verify, --strict]"
            raise InputError(f"command={self.command}", "names no program", fix)


@dataclass(frozen=True)
class HttpOptions:
    """Options of the kind http."""

    url: str
    """Address of the service, http:// or https://."""
    batch: Annotated[int, Interval("[1, 100000]")] = 16
    """Samples in a request."""
    at_once: Annotated[int, Interval("[1, 1000]")] = 8
    """Number of concurrent requests of a rank."""
    retries: Annotated[int, Interval("[0, 100]")] = 3
    """Further attempts after one that got no answer."""
    backoff: Annotated[float, Interval("[0, 30]")] = 1.0
    """Seconds before the first retry; doubled for each further one, at most 30."""

    def __post_init__(self) -> None:
        _address(self.url)


@dataclass(frozen=True)
class JudgeOptions:
    """Options of the kind judge."""

    url: str
    """Address of an OpenAI-compatible API, such as http://HOST:30000/v1."""
    model: str
    """Name of the model in the API."""
    rubric: str
    """Question to the model; {prompt}, {answer} and {completion} are replaced by the sample's, {mark} by a mark of it,
    which the score must follow in the last line (docs/rewards.md)."""
    pattern: str = r"(?m)^Score: (-?[0-9]+(?:\.[0-9]+)?)\s*\Z"
    """Regular expression for the score in the reply, with the number as first group; the last match counts. The default
    expects a last line `Score: N`: ask for just that, as other replies leave the sample without a score."""
    low: float = 0.0
    """Lowest score."""
    high: float = 10.0
    """Highest score; a reply with a number out of bounds, or none, leaves the sample without a score."""
    max_tokens: Annotated[int, Interval("[1, 1000000]")] = 1024
    """Longest reply, in tokens."""
    temperature: Annotated[float, Interval("[0, 100]")] = 0.0
    """Sampling temperature of the reply; 0 for greedy."""
    key: str = ""
    """Environment variable with the API's key; "" for none."""
    cache: str = ""
    """Folder of cached replies, shared by ranks and later runs; "" keeps them in memory."""
    at_once: Annotated[int, Interval("[1, 1000]")] = 16
    """Number of concurrent requests of a rank."""
    retries: Annotated[int, Interval("[0, 100]")] = 3
    """Further attempts after one that got no answer."""
    backoff: Annotated[float, Interval("[0, 30]")] = 1.0
    """Seconds before the first retry; doubled for each further one, at most 30."""

    def __post_init__(self) -> None:
        _address(self.url)
        _pattern("pattern", self.pattern)
        if re.compile(self.pattern).groups < 1:
            fix = "write the number as a group, such as Score: ([0-9]+)"
            raise InputError(f"pattern={self.pattern!r}", "has no group", fix)
        if "{completion}" not in self.rubric:
            raise InputError("rubric", "without {completion} all samples would have one score", "add {completion}")
        if not self.low < self.high:
            raise InputError(f"low={self.low}", f"no range up to high={self.high}", "choose low < high")


OPTIONS: dict[str, type] = {
    "accuracy": StrictOptions,
    "boxed": StrictOptions,
    "stated": StrictOptions,
    "format": FormatOptions,
    "last_number": NoOptions,
    "multiple_choice": ChoiceOptions,
    "countdown": ReadOptions,
    "exact": ExactOptions,
    "regex": RegexOptions,
    "reasoning_gym": PuzzleOptions,
    "language": LanguageOptions,
    "length": LengthOptions,
    "overlong": OverlongOptions,
    "repetition": RepetitionOptions,
    "sum_steps": NoOptions,
    "code": CodeOptions,
    "command": CommandOptions,
    "http": HttpOptions,
    "judge": JudgeOptions,
    "environment": NoOptions,
}
"""Kind -> dataclass of its options."""
SCORE_STEPS = ("sum_steps", "command", "http", "environment")
"""Kinds that can score the steps of a completion; functions can too."""


def _address(url: str) -> None:
    if not re.fullmatch(r"https?://[^/\s]+\S*", url):
        raise InputError(f"url={url!r}", "not an address", "write it as http://HOST:PORT/PATH")


def _pattern(name: str, value: str) -> None:
    try:
        re.compile(value)
    except re.error as error:
        raise InputError(f"{name}={value!r}", f"not a regular expression ({error})", "correct the pattern") from None

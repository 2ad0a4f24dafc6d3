"""Kinds of built-in reward terms, and the options of each, as given in `reward.terms[].options`.

An option without a default is required. Values are checked here, before anything is built; the terms themselves are in
`grpo_mega/reward/`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from grpo_mega.errors import InputError

READS = ("text", "tag", "boxed", "stated")
"""Places of a final answer: all that follows the thoughts, the last answer tag, box, or "Answer: ..."."""
TEMPLATES = ("think_answer", "boxed")
SCRIPTS = (
    *("latin", "cyrillic", "greek", "arabic", "hebrew", "devanagari", "bengali", "tamil", "thai", "georgian"),
    *("armenian", "chinese", "japanese", "korean"),
)


@dataclass(frozen=True)
class NoOptions:
    """Options of kinds that have none, or the defaults of those that have some."""


@dataclass(frozen=True)
class StrictOptions:
    """Options of the kinds accuracy, boxed and stated.

    Attributes:
        strict: Whether another tag or box anywhere in the completion, in its thoughts too, makes the answer wrong.
    """

    strict: bool = False


@dataclass(frozen=True)
class FormatOptions:
    """Options of the kind format.

    Attributes:
        template: think_answer (R1-Zero's tags around the whole completion) or boxed (an answer in a box).
        strict: Whether the thoughts may not mention the answer's tag or box either.
    """

    template: str = "think_answer"
    strict: bool = False

    def __post_init__(self) -> None:
        _one_of("template", self.template, TEMPLATES)


@dataclass(frozen=True)
class ChoiceOptions:
    """Options of the kind multiple_choice.

    Attributes:
        read: Place of the answer, see `READS`.
        strict: Whether another tag, box or stated answer anywhere in the completion leaves it without one.
    """

    read: str = "text"
    strict: bool = False

    def __post_init__(self) -> None:
        _one_of("read", self.read, READS)


@dataclass(frozen=True)
class ReadOptions(ChoiceOptions):
    """Options of the kind countdown: the same, though the whole text is one answer, and has no others to refuse."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strict and self.read == "text":
            raise InputError("strict=true", "no effect with read=text, where all text is one answer", "leave it out")


@dataclass(frozen=True)
class ExactOptions(ReadOptions):
    """Options of the kind exact, beside those of `ReadOptions`.

    Attributes:
        ignore_case: Whether upper and lower case are equal.
    """

    ignore_case: bool = False


@dataclass(frozen=True)
class RegexOptions(ReadOptions):
    """Options of the kind regex, beside those of `ReadOptions`; `read: text` is the whole completion here.

    Attributes:
        pattern: Regular expression in Python's syntax; "" for each problem's own, `pattern` in its metadata.
        whole: Whether the pattern must match the whole answer.
    """

    pattern: str = ""
    whole: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _pattern("pattern", self.pattern)


@dataclass(frozen=True)
class PuzzleOptions(ReadOptions):
    """Options of the kind reasoning_gym, beside those of `ReadOptions`.

    Attributes:
        partial: Whether a partial score of the task's scorer counts; otherwise it is 0.
    """

    partial: bool = False


@dataclass(frozen=True)
class LanguageOptions:
    """Options of the kind language.

    Attributes:
        script: A script, see `SCRIPTS`; chinese, japanese and korean stand for the scripts these languages use.
    """

    script: str

    def __post_init__(self) -> None:
        _one_of("script", self.script, SCRIPTS)


@dataclass(frozen=True)
class LengthOptions:
    """Options of the kind length.

    Attributes:
        low: Number of tokens up to which the value is 0.
        high: Number of tokens from which the value is 1.
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise InputError(f"low={self.low}", f"no range up to high={self.high}", "choose 0 <= low < high")


@dataclass(frozen=True)
class OverlongOptions:
    """Options of the kind overlong.

    Attributes:
        limit: L_max of DAPO's equation 13, in tokens.
        buffer: L_cache, the tokens before the limit over which the value falls from 0 to -1.
    """

    limit: int
    buffer: int

    def __post_init__(self) -> None:
        if not 0 < self.buffer <= self.limit:
            raise InputError(f"buffer={self.buffer}", f"not within limit={self.limit}", "choose 0 < buffer <= limit")


@dataclass(frozen=True)
class RepetitionOptions:
    """Options of the kind repetition.

    Attributes:
        size: Length of an n-gram, in tokens.
    """

    size: int = 20

    def __post_init__(self) -> None:
        _within("size", self.size, 1, 10000)


@dataclass(frozen=True)
class CodeOptions:
    """Options of the kind code.

    Attributes:
        all_or_nothing: Whether a program that fails a test earns 0 instead of the share of tests that it passes.
        cpu_seconds: CPU time of a program, for each test.
        memory_mib: Memory of a process.
        boxes: Programs that a rank runs at once; 0 for its share of the machine's CPUs.
        run_without_isolation: Whether programs run with the user's own rights where no sandbox works.
        strict: Whether a completion with more than one fenced block has no program.
    """

    all_or_nothing: bool = True
    cpu_seconds: int = 5
    memory_mib: int = 1024
    boxes: int = 0
    run_without_isolation: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        _within("cpu_seconds", self.cpu_seconds, 1, 86400)
        _within("memory_mib", self.memory_mib, 64, 1 << 20)
        _within("boxes", self.boxes, 0, 10000)


@dataclass(frozen=True)
class CommandOptions:
    """Options of the kind command.

    Attributes:
        command: A program and its arguments.
        at_once: Samples that a rank scores at once, each in a process of its own.
    """

    command: list[str]
    at_once: int = 4

    def __post_init__(self) -> None:
        if not self.command or not self.command[0]:
            fix = "write a program and its arguments, such as [./verify, --strict]"
            raise InputError(f"command={self.command}", "names no program", fix)
        _within("at_once", self.at_once, 1, 1000)


@dataclass(frozen=True)
class HttpOptions:
    """Options of the kind http.

    Attributes:
        url: Address of the service, http:// or https://.
        batch: Number of samples in a request.
        at_once: Number of concurrent requests of a rank.
        retries: Further attempts after one that got no answer.
        backoff: Seconds before the first retry; doubled for each further one, at most 30.
    """

    url: str
    batch: int = 16
    at_once: int = 8
    retries: int = 3
    backoff: float = 1.0

    def __post_init__(self) -> None:
        _service(self.url, self.at_once, self.retries, self.backoff)
        _within("batch", self.batch, 1, 100000)


@dataclass(frozen=True)
class JudgeOptions:
    """Options of the kind judge.

    Attributes:
        url: Address of an OpenAI-compatible API, such as http://HOST:30000/v1.
        model: Name of the model in the API.
        rubric: Question to the model; {prompt}, {answer} and {completion} are replaced by the sample's, {mark} by a
            mark of it, which the score must follow in the last line (docs/rewards.md).
        pattern: Regular expression for the score in the reply, with the number as first group; the last match counts.
            The default expects a last line `Score: N`: ask for just that, as other replies leave the sample without a
            score.
        low: Lowest score.
        high: Highest score; a reply with a number out of bounds, or none, leaves the sample without a score.
        max_tokens: Longest reply, in tokens.
        temperature: Sampling temperature of the reply; 0 for greedy.
        key: Environment variable with the API's key; "" for none.
        cache: Folder of cached replies, shared by ranks and later runs; "" keeps them in memory.
        at_once, retries, backoff: See `HttpOptions`.
    """

    url: str
    model: str
    rubric: str
    pattern: str = r"(?m)^Score: (-?[0-9]+(?:\.[0-9]+)?)\s*\Z"
    low: float = 0.0
    high: float = 10.0
    max_tokens: int = 1024
    temperature: float = 0.0
    key: str = ""
    cache: str = ""
    at_once: int = 16
    retries: int = 3
    backoff: float = 1.0

    def __post_init__(self) -> None:
        _service(self.url, self.at_once, self.retries, self.backoff)
        _pattern("pattern", self.pattern)
        if re.compile(self.pattern).groups < 1:
            fix = "write the number as a group, such as Score: ([0-9]+)"
            raise InputError(f"pattern={self.pattern!r}", "has no group", fix)
        if "{completion}" not in self.rubric:
            raise InputError("rubric", "without {completion} all samples would have one score", "add {completion}")
        if not self.low < self.high:
            raise InputError(f"low={self.low}", f"no range up to high={self.high}", "choose low < high")
        _within("max_tokens", self.max_tokens, 1, 1000000)
        _within("temperature", self.temperature, 0, 100)


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
}
"""Kind -> dataclass of its options."""
SCORE_STEPS = ("sum_steps", "command", "http")
"""Kinds that can score the steps of a completion; functions can too."""


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InputError(f"{name}={value}", "unknown", f"choose one of {', '.join(allowed)}")


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InputError(f"{name}={value}", "out of range", f"choose a value in [{low}, {high}]")


def _service(url: str, at_once: int, retries: int, backoff: float) -> None:
    """Checks the options shared by all services."""
    if not re.fullmatch(r"https?://[^/\s]+\S*", url):
        raise InputError(f"url={url!r}", "not an address", "write it as http://HOST:PORT/PATH")
    _within("at_once", at_once, 1, 1000)
    _within("retries", retries, 0, 100)
    _within("backoff", backoff, 0, 30)


def _pattern(name: str, value: str) -> None:
    try:
        re.compile(value)
    except re.error as error:
        raise InputError(f"{name}={value!r}", f"not a regular expression ({error})", "mend it") from None

"""The kinds of built-in reward terms, and the options of each: what `reward.terms[].options` may hold.

An option without a default must be given. Values are checked here, so that a wrong one is refused before anything is
built; what each kind computes is in `grpo_mega/reward/`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

READS = ("text", "tag", "boxed")
"""Where a final answer stands: the whole completion, its only answer tag, or its only box."""
TEMPLATES = ("think_answer", "boxed")
SCRIPTS = (
    *("latin", "cyrillic", "greek", "arabic", "hebrew", "devanagari", "bengali", "tamil", "thai", "georgian"),
    *("armenian", "chinese", "japanese", "korean"),
)


@dataclass(frozen=True)
class NoOptions:
    """A kind without options."""


@dataclass(frozen=True)
class FormatOptions:
    """Of format.

    Attributes:
        template: think_answer (R1-Zero's tags around the whole completion) or boxed (one box).
    """

    template: str = "think_answer"

    def __post_init__(self) -> None:
        _one_of("template", self.template, TEMPLATES)


@dataclass(frozen=True)
class ReadOptions:
    """Of multiple_choice and countdown.

    Attributes:
        read: Where the answer stands, see `READS`.
    """

    read: str = "text"

    def __post_init__(self) -> None:
        _one_of("read", self.read, READS)


@dataclass(frozen=True)
class ExactOptions:
    """Of exact.

    Attributes:
        read: Where the answer stands, see `READS`.
        ignore_case: Whether capitals count as small letters.
    """

    read: str = "text"
    ignore_case: bool = False

    def __post_init__(self) -> None:
        _one_of("read", self.read, READS)


@dataclass(frozen=True)
class RegexOptions:
    """Of regex.

    Attributes:
        pattern: Python's syntax; "" takes each problem's own, `pattern` in its metadata.
        read: Where the answer stands, see `READS`.
        whole: Whether the pattern must match all of it, not only a part.
    """

    pattern: str = ""
    read: str = "text"
    whole: bool = False

    def __post_init__(self) -> None:
        _one_of("read", self.read, READS)
        _pattern("pattern", self.pattern)


@dataclass(frozen=True)
class PuzzleOptions:
    """Of reasoning_gym.

    Attributes:
        read: Where the answer stands, see `READS`.
        partial: Whether an answer that the task's scorer gives a part of the score earns it; otherwise it earns 0.
    """

    read: str = "text"
    partial: bool = False

    def __post_init__(self) -> None:
        _one_of("read", self.read, READS)


@dataclass(frozen=True)
class LanguageOptions:
    """Of language.

    Attributes:
        script: A script, see `SCRIPTS`; chinese, japanese and korean stand for the scripts these languages use.
    """

    script: str

    def __post_init__(self) -> None:
        _one_of("script", self.script, SCRIPTS)


@dataclass(frozen=True)
class LengthOptions:
    """Of length.

    Attributes:
        low: Tokens of a completion up to which the value is 0.
        high: Tokens from which it is 1.
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise ValueError(f"low={self.low}, high={self.high}: choose 0 <= low < high")


@dataclass(frozen=True)
class OverlongOptions:
    """Of overlong.

    Attributes:
        limit: L_max of DAPO's equation 13, in tokens.
        buffer: L_cache, the tokens before the limit over which the value falls from 0 to -1.
    """

    limit: int
    buffer: int

    def __post_init__(self) -> None:
        if not 0 < self.buffer <= self.limit:
            raise ValueError(f"limit={self.limit}, buffer={self.buffer}: choose 0 < buffer <= limit")


@dataclass(frozen=True)
class RepetitionOptions:
    """Of repetition.

    Attributes:
        size: Tokens of a stretch (the n of n-gram).
    """

    size: int = 20

    def __post_init__(self) -> None:
        _within("size", self.size, 1, 10000)


@dataclass(frozen=True)
class CodeOptions:
    """Of code.

    Attributes:
        all_or_nothing: Whether a program that fails a test earns 0, or the share of tests that it passes.
        cpu_seconds: CPU time of a program, for each test.
        memory_mib: Memory of a process.
        boxes: Programs that a rank runs at once; 0 for its share of the machine's CPUs.
        run_without_isolation: Whether programs run with the user's own rights where no sandbox works.
    """

    all_or_nothing: bool = True
    cpu_seconds: int = 5
    memory_mib: int = 1024
    boxes: int = 0
    run_without_isolation: bool = False

    def __post_init__(self) -> None:
        _within("cpu_seconds", self.cpu_seconds, 1, 86400)
        _within("memory_mib", self.memory_mib, 64, 1 << 20)
        _within("boxes", self.boxes, 0, 10000)


@dataclass(frozen=True)
class CommandOptions:
    """Of command.

    Attributes:
        command: A program and its arguments.
        at_once: Samples that a rank scores at once, each in a process of its own.
    """

    command: list[str]
    at_once: int = 4

    def __post_init__(self) -> None:
        if not self.command or not self.command[0]:
            raise ValueError(f"command={self.command}: write a program and its arguments, such as [./verify, --strict]")
        _within("at_once", self.at_once, 1, 1000)


@dataclass(frozen=True)
class HttpOptions:
    """Of http.

    Attributes:
        url: Where samples are sent, http:// or https://.
        batch: Samples of one request.
        at_once: Requests of a rank at once.
        retries: Further attempts after one that got no answer.
        backoff: Seconds before the first of them; each further one waits twice as long, 30 at most.
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
    """Of judge.

    Attributes:
        url: Of an OpenAI-compatible API, such as http://HOST:30000/v1.
        model: The model's name there.
        rubric: What it is asked; {prompt}, {answer} and {completion} stand for the sample's.
        pattern: Matches the score in its reply, the number being the first group; the last match counts. The default
            wants the last line to be `Score: N`: ask for just that, other replies leave the sample without a score.
        low: Least score.
        high: Greatest score; a reply with another number, or none, leaves the sample without a score.
        max_tokens: Longest reply.
        temperature: Of the reply; 0 for the most likely one.
        key: Environment variable with the API's key; "" for none.
        cache: Folder of the replies, which ranks and later starts share; "" keeps them in memory.
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
            raise ValueError(f"pattern={self.pattern!r}: write the number as a group, such as Score: ([0-9]+)")
        if "{completion}" not in self.rubric:
            raise ValueError("rubric: {completion} is not in it, so all samples would have one score")
        if not self.low < self.high:
            raise ValueError(f"low={self.low}, high={self.high}: choose low < high")
        _within("max_tokens", self.max_tokens, 1, 1000000)
        _within("temperature", self.temperature, 0, 100)


OPTIONS: dict[str, type] = {
    "accuracy": NoOptions,
    "boxed": NoOptions,
    "format": FormatOptions,
    "last_number": NoOptions,
    "multiple_choice": ReadOptions,
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
"""Kind -> its options."""
SCORE_STEPS = ("sum_steps", "command", "http")
"""Kinds that can score the steps of a completion, besides functions."""


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value}: choose one of {', '.join(allowed)}")


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}={value}: choose a value in [{low}, {high}]")


def _service(url: str, at_once: int, retries: int, backoff: float) -> None:
    """Checks what all services have."""
    if not re.fullmatch(r"https?://[^/\s]+\S*", url):
        raise ValueError(f"url={url!r}: write it as http://HOST:PORT/PATH")
    _within("at_once", at_once, 1, 1000)
    _within("retries", retries, 0, 100)
    _within("backoff", backoff, 0, 30)


def _pattern(name: str, value: str) -> None:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{name}={value!r} is no regular expression: {error}") from None

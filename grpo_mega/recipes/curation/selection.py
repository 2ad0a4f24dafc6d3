"""Rejection sampling: selects scored samples to train on.

As in DeepSeek-R1 (arXiv 2501.12948, section 2.3.3). A pool is the folder of an evaluation, whose samples were generated
and scored by `tools/evaluate.py`. It is read line by line: the position of each sample that passes every filter is
recorded, then the chosen ones are copied. Memory: a few hundred bytes for each sample that passes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from operator import ge, le
from pathlib import Path
from typing import Any

from grpo_mega.config.schema.reward import LEARNED
from grpo_mega.data.chat import with_opening
from grpo_mega.data.problems import checked_text
from grpo_mega.errors import InputError
from grpo_mega.evaluate.results import RESULTS, SAMPLES, SETTINGS, Record

NEEDED = {"problem", "task", "index", "prompt", "completion", "tokens", "finish_reason", "reward", "terms"}
"""Required fields of a sample, besides those of its problem."""
THOUGHTS = "<think>"
"""Possible end of the templates of thinking models; the completion then starts inside the thoughts."""
_CONDITION = re.compile(r"\s*(?P<term>[^<>=\s]+)\s*(?P<sign>>=|<=)\s*(?P<value>\S+)\s*")
CHOICES = ("first", "shortest", "highest")
"""Orders of a problem's samples, of which the first ones are chosen: as drawn, by tokens, or by reward."""


@dataclass(frozen=True)
class Condition:
    """Condition on a reward term, such as `accuracy>=1`.

    Attributes:
        term: Name of the term, whose unweighted value counts.
        sign: ">=" or "<=".
        value: The bound.
    """

    term: str
    sign: str
    value: float

    def holds(self, terms: dict[str, float]) -> bool:
        """Whether the terms of a sample satisfy the condition; a sample without the term does not."""
        compare: Callable[[float, float], bool] = ge if self.sign == ">=" else le
        return self.term in terms and compare(terms[self.term], self.value)

    def __str__(self) -> str:
        """The condition as text."""
        return f"{self.term}{self.sign}{repr(self.value).removesuffix('.0')}"


def condition(text: str) -> Condition:
    """Parses a condition such as `language>=0.9`. Raises InputError for other text."""
    match = _CONDITION.fullmatch(text)
    # NaN, which is not equal to itself, stands for text that is no number, and is no bound either.
    try:
        value = float(match["value"]) if match else float("nan")
    except ValueError:
        value = float("nan")
    if match is None or value != value:
        raise InputError(repr(text), "not a condition", "write TERM>=NUMBER or TERM<=NUMBER, such as language>=0.9")
    return Condition(match["term"], match["sign"], value)


@dataclass(frozen=True)
class SampleFilters:
    """Filters of samples, and the number to choose. Completions that were cut never pass.

    Attributes:
        conditions: Conditions on reward terms, each for the tasks that have the term.
        shortest: Smallest number of tokens.
        longest: Largest number of tokens; None for no limit.
        per_problem: Largest number of samples of a problem, over all pools; None for all.
        choose: One of `CHOICES`.
    """

    conditions: tuple[Condition, ...] = ()
    shortest: int = 1
    longest: int | None = None
    per_problem: int | None = None
    choose: str = "first"

    def why_not(self, record: Record, conditions: Sequence[Condition]) -> str | None:
        """Reason for which a sample is rejected, by the first filter that it fails; None when it passes all."""
        if record.get("unscorable"):
            return "could not be scored"
        if record["finish_reason"] != "stop":
            return "did not end by themselves"
        for each in conditions:
            if not each.holds(record["terms"]):
                return f"are not {each}"
        if record["tokens"] < self.shortest:
            return f"have fewer than {self.shortest} tokens"
        if self.longest is not None and record["tokens"] > self.longest:
            return f"have more than {self.longest} tokens"
        # Samples with calls are learned as tokens.
        learnable = record.get("calls") or is_text(record["completion"])
        return None if learnable else "are empty, or hold what no text may"


def is_text(completion: str) -> bool:
    """Whether a completion can be learned: it is not empty, and has only characters that are allowed in text."""
    try:
        checked_text(completion, "completion", "")
    except InputError:
        return False
    return True


@dataclass(frozen=True)
class SamplePool:
    """A finished evaluation, used as a pool of samples.

    Attributes:
        folder: Folder of the evaluation.
        settings: Its settings.json: weights, sampling, reward.
        sha256: Checksum of samples.jsonl.
    """

    folder: Path
    settings: dict[str, Any]
    sha256: str

    def conditions(self, filters: SampleFilters, task: str) -> tuple[Condition, ...]:
        """Conditions on samples of a task: those of the filters about terms that the task has.

        Unless one of them is about the success term, that must be at least 1 if the task has it.

        Raises:
            InputError: There are no conditions for this task.
        """
        reward = self.settings["reward"]
        terms = [term["name"] for term in reward["terms"] if not term.get("tasks") or task in term["tasks"]]
        terms += [LEARNED] if "reward_model" in self.settings else []
        success = Condition(reward["success"], ">=", 1.0)
        conditions = [each for each in filters.conditions if each.term in terms]
        if success.term in terms and all(each.term != success.term for each in conditions):
            conditions.insert(0, success)
        if not conditions:
            raise InputError(
                str(self.folder),
                f"samples of the task {task!r} have no term {success.term!r}, which selects those of other tasks",
                f"give --keep a condition on one of their terms ({', '.join(terms)})",
            )
        return tuple(conditions)


@dataclass(frozen=True)
class Passed:
    """Note of a sample that passed the filters: its position and sort keys."""

    pool: int
    offset: int
    index: int
    tokens: int
    reward: float
    completion: bytes
    """Checksum of the completion."""
    opened: bool
    """Whether the completion continues thoughts that the prompt opened."""


@dataclass
class Selection:
    """Chosen samples, and counts of the others.

    Attributes:
        chosen: The chosen samples, problem after problem.
        problems: Number of problems.
        solved: Number of problems with a chosen sample.
        samples: Number of all samples.
        left_out: {reason: number of samples}.
    """

    chosen: list[Passed] = field(default_factory=list)
    problems: int = 0
    solved: int = 0
    samples: int = 0
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def opened(self) -> int:
        """Number of chosen samples whose completion continues thoughts that the prompt opened."""
        return sum(each.opened for each in self.chosen)

    def lines(self) -> list[str]:
        """Summary of the counts, as lines of text."""
        return [
            f"{self.samples:,} samples of {self.problems:,} problems",
            *(f"  {number:,} {why}" for why, number in self.left_out.items()),
            f"{len(self.chosen):,} samples of {self.solved:,} problems are chosen",
        ]


def open_pool(folder: Path) -> SamplePool:
    """Opens the evaluation in a folder.

    Raises:
        InputError: The folder is not an evaluation, or not finished.
    """
    if not (folder / SETTINGS).is_file():
        fix = f"make one with tools/evaluate.py --out {folder}"
        raise InputError(str(folder), f"not an evaluation folder (no {SETTINGS})", fix)
    if not (folder / RESULTS).is_file():
        raise InputError(str(folder), f"the evaluation is not finished (no {RESULTS})", "run its command again")
    with (folder / SAMPLES).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    settings = json.loads((folder / SETTINGS).read_text())
    if not {"success", "terms"} <= settings.get("reward", {}).keys():
        raise InputError(f"{folder}/{SETTINGS}", "does not have the reward", "give the folder of an evaluation")
    return SamplePool(folder, settings, digest)


def select(pools: Sequence[SamplePool], filters: SampleFilters) -> Selection:
    """Chooses samples, none with the same completion as another one of its problem.

    Problems are the same if their prompts have the same wording, in any pool; see `problem_of`.

    Raises:
        InputError: A pool cannot be used, or nothing passes; gives the counts.
    """
    selection = Selection()
    passed: dict[bytes, list[Passed]] = {}
    check_terms(pools, filters)
    for number, pool in enumerate(pools):
        # Conditions depend on the task only, so they are worked out once for each task of a pool.
        conditions = cache(partial(pool.conditions, filters))
        for offset, record in records_of(pool, episodes=True):
            selection.samples += 1
            of_problem = passed.setdefault(problem_of(record, pool), [])
            if why := filters.why_not(record, conditions(record["task"])):
                selection.left_out[why] += 1
                continue
            of_problem.append(noted(number, offset, record))
    # Samples are chosen once all pools are read, as a problem may occur in several of them. Duplicates are dropped in
    # the chosen order, so that the first of them in this order stays.
    for of_problem in passed.values():
        different: dict[bytes, Passed] = {}
        for each in ordered(of_problem, filters.choose):
            different.setdefault(each.completion, each)
        chosen = list(different.values())[: filters.per_problem]
        selection.chosen += chosen
        selection.solved += bool(chosen)
        selection.left_out["are there already"] += len(of_problem) - len(different)
        selection.left_out[f"are more than {filters.per_problem} of a problem"] += len(different) - len(chosen)
    # Unary plus drops reasons that do not occur.
    selection.left_out = +selection.left_out
    selection.problems = len(passed)
    if not selection.chosen:
        counts = "\n".join(selection.lines()[:-1])
        raise InputError("the pools", "no sample passes", f"loosen the filter that leaves out most:\n{counts}")
    return selection


def problem_of(record: Record, pool: SamplePool) -> bytes:
    """Key of a sample's problem, equal for problems with the same wording, or of an environment with the same id too:
    games may all be asked alike."""
    return _digest(record["asked"], *([record["problem"]] if "environment" in pool.settings else []))


def noted(pool: int, offset: int, record: Record) -> Passed:
    """Note of a sample of pool number `pool`, whose line begins at `offset`."""
    opened = record["prompt"].rstrip().endswith(THOUGHTS) and not record.get("calls")
    completion = _digest(record["completion"])
    return Passed(pool, offset, record["index"], record["tokens"], record["reward"], completion, opened)


def rows(pools: Sequence[SamplePool], selection: Selection, begin: str = "") -> Iterator[dict[str, Any]]:
    """Yields the chosen samples as rows of `sft.path`, each with its origin; `begin` is put before the completions.

    Raises:
        InputError: `begin` is for a sample with calls, which is learned as tokens.
    """
    files = [(pool.folder / SAMPLES).open("rb") for pool in pools]
    try:
        for chosen in selection.chosen:
            pool, file = pools[chosen.pool], files[chosen.pool]
            file.seek(chosen.offset)
            record = json.loads(file.readline())
            pieces: list[dict[str, Any]] = [{}]
            if record.get("calls"):
                if begin:
                    what = f"{pool.folder} has samples with calls, which are learned as the tokens they are"
                    raise InputError(f"--begin {begin!r}", what, "leave it out")
                pieces = [
                    piece | {"vocabulary": pool.settings["vocabulary"], "close": pool.settings["environment"]["close"]}
                    for piece in _pieces(record)
                ]
            for piece in pieces:
                yield {
                    "prompt": with_opening(record["asked"], str(record.get("opening", ""))),
                    "completion": begin + record["completion"],
                    "problem": record["problem"],
                    "task": record["task"],
                    "pool": str(pool.folder),
                    "index": record["index"],
                    "tokens": record["tokens"],
                    "reward": record["reward"],
                    "terms": record["terms"],
                    **piece,
                }
    finally:
        for file in files:
            file.close()


def _pieces(record: Record) -> Iterator[dict[str, Any]]:
    """Tokens of each piece of a sample with calls, as `sft.path` takes them: an agent's chat may begin anew."""
    bounds = [0, *record.get("restarts", ()), len(record["token_ids"])]
    prompt = {"prompt_ids": record["prompt_ids"]} if "prompt_ids" in record else {}
    for begin, end in pairwise(bounds):
        given = [span for span in record["given"] if begin <= span[0] and span[1] <= end]
        first = begin
        if begin:
            # The context that the agent has written.
            (_, first), *given = given
            prompt = {"prompt_ids": record["token_ids"][begin:first]}
        # Nothing was sampled of a piece that no longer had room.
        if first < end:
            shifted = [[start - first, stop - first] for start, stop in given]
            sampled = end - first - sum(stop - start for start, stop in given)
            # The text is that of all pieces, and stands in the row of the first.
            text = {"completion": ""} if begin else {}
            yield {"token_ids": record["token_ids"][first:end], "given": shifted, "tokens": sampled, **text, **prompt}


def check_terms(pools: Sequence[SamplePool], filters: SampleFilters) -> None:
    """Raises InputError when a condition is about a term that a pool's reward does not have."""
    for pool in pools:
        known = [term["name"] for term in pool.settings["reward"]["terms"]]
        known += [LEARNED] if "reward_model" in pool.settings else []
        for each in filters.conditions:
            if each.term not in known:
                raise InputError(
                    f"--keep {each}",
                    f"the reward of {pool.folder} has no such term, only {', '.join(known)}",
                    "evaluate with a reward that has it, with weight 0 if it must not change the reward",
                )


def records_of(pool: SamplePool, episodes: bool = False) -> Iterator[tuple[int, Record]]:
    """Yields (offset of its line, sample) of each sample of a pool.

    Raises:
        InputError: A line is not a sample, has an older format without the problem's wording, or is a sample in which
            an environment has spoken, without `episodes`.
    """
    # Binary, as offsets count bytes and `rows` seeks to them.
    offset = 0
    with (pool.folder / SAMPLES).open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{pool.folder / SAMPLES}:{number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise InputError(where, str(error), "evaluate again, into another folder") from error
            if not isinstance(record, dict) or not _is_asked(record.get("asked")) or NEEDED - record.keys():
                what = "not a sample, or from an older version, which did not store the problems' wording"
                raise InputError(where, what, "evaluate again, into another folder")
            has_tokens = {"token_ids", "given"} <= record.keys() and {
                "vocabulary",
                "environment",
            } <= pool.settings.keys()
            if record.get("calls") and not has_tokens:
                raise InputError(where, "has calls but no token_ids", "evaluate again, into another folder")
            if not episodes and (record.get("calls") or record.get("opening")):
                what = "contains replies of an environment, which a row of text cannot mark"
                raise InputError(where, what, "choose samples of an evaluation with environment.path=null")
            yield offset, record
            offset += len(line)


def _is_asked(asked: Any) -> bool:
    """Whether it is a problem: text, or messages."""
    if isinstance(asked, list):
        return bool(asked) and all(isinstance(one, dict) and isinstance(one.get("content"), str) for one in asked)
    return isinstance(asked, str) and asked != ""


def _digest(*parts: Any) -> bytes:
    return hashlib.sha256(json.dumps(parts).encode()).digest()


def ordered(own: list[Passed], choose: str) -> list[Passed]:
    """A problem's samples in one of the orders of `CHOICES`."""
    # Pool and index break ties, so that the same pools always give the same choice.
    if choose == "shortest":
        return sorted(own, key=lambda one: (one.tokens, one.pool, one.index))
    if choose == "highest":
        return sorted(own, key=lambda one: (-one.reward, one.pool, one.index))
    return own

"""Endless, resumable streams of training prompts: shuffled epochs over each source, mixed exactly by weight.

With a curriculum, problems that the policy sometimes solves appear in every epoch, all others in every n-th. A group
whose answers are all right or all wrong has no advantage (DeepSeekMath, arXiv 2402.03300, section 4.1.2), so its
problem is skipped for some epochs. That order depends on the rewards of earlier groups; its state is in the checkpoint,
and is the same under every layout, as every rank knows every group's scores.
"""

from __future__ import annotations

import functools
import math
import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from grpo_mega.config.schema import DataConfig, SourceConfig
from grpo_mega.data.stored import Stored, prompts_of, sources_of
from grpo_mega.errors import InputError
from grpo_mega.types import Group, Prompt

STATE = "saved prompt order"
"""Name of the saved state in errors."""
_DAMAGED = "resume from another checkpoint"


def stream(stored: Stored, data: DataConfig, seed: int, success: str) -> PromptSource | FrontierSource:
    """Source of training prompts: shuffled epochs over each source, mixed by the sources' weights.

    Args:
        stored: The problems.
        data: Mixture weights, difficulty columns, and the curriculum.
        seed: Seed of the order.
        success: Reward term that a curriculum follows, unless `data.frontier_terms` names others.
    """
    # Generated problems have no source in the configuration and get the defaults.
    configured = dict.fromkeys(stored.train, SourceConfig()) | sources_of(data)
    problems = [prompts_of(of_source) for of_source in stored.train.values()]
    weights = [configured[name].weight or len(of_source) for name, of_source in stored.train.items()]
    parts = shares(weights)
    next_source = mixture(parts)
    draws = [
        shuffled_draws(
            len(of_source),
            seed if len(problems) == 1 else f"{seed}/{name}",
            [problem.difficulty for problem in of_source] if configured[name].difficulty else (),
        )
        for name, of_source in stored.train.items()
    ]
    identity = f"{data.task} seed={seed} {stored.identity}"
    # The weights are part of the identity: resumed with others, a run would skip some problems and repeat others.
    if len(problems) > 1:
        mixed = " ".join(f"{name}={part}" for name, part in zip(stored.train, parts, strict=True))
        identity = f"{identity} shares: {mixed}"
    if data.curriculum == "frontier":
        terms = tuple(data.frontier_terms or [success])
        rule = Rule(terms, data.frontier_low, data.frontier_high, data.frontier_revisit)
        return FrontierSource(problems, draws, next_source, rule, f"{identity} curriculum=frontier")

    return PromptSource(mixed_epochs(problems, draws, next_source), identity)


class PromptSource:
    """Yields the prompts 0, 1, 2, ... of `prompt_at`.

    `prompt_at` is a pure function of the counter, so the order does not depend on the sizes of `take` calls, and
    resuming needs only the counter. `identity` names the stream: loading the state of another stream is an error.
    """

    def __init__(self, prompt_at: Callable[[int], Prompt], identity: str) -> None:
        """Starts at prompt 0."""
        self.prompt_at = prompt_at
        self.identity = identity
        self.cursor = 0

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts."""
        if n < 0:
            raise ValueError(f"cannot take {n} prompts")
        prompts = [self.prompt_at(k) for k in range(self.cursor, self.cursor + n)]
        self.cursor += n
        return prompts

    def learn(self, groups: Iterable[Group]) -> None:
        """Ignores the rewards of a step's groups: this order does not depend on them, unlike `FrontierSource`."""

    def state_dict(self) -> dict[str, Any]:
        """State for `load_state_dict`."""
        return {"cursor": self.cursor, "identity": self.identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`. Raises InputError when it is damaged or belongs to other data."""
        self.cursor = saved_cursor(state, self.identity)


@dataclass(frozen=True)
class Rule:
    """Selects the problems that appear in every epoch.

    Attributes:
        terms: Reward terms; the mean over a group of the first that its task has is the problem's pass rate.
        low: Lowest pass rate, inclusive.
        high: Highest pass rate, inclusive.
        revisit: Period, in epochs, of problems outside these bounds.
    """

    terms: tuple[str, ...]
    low: float
    high: float
    revisit: int


class FrontierSource:
    """Prompt source that draws problems at the policy's frontier more often; see `Rule`.

    The next source is a function of the counter, so the mixture is as exact as without a curriculum. Each source is
    read in shuffled epochs, in which problems are skipped. Memory: 8 bytes for each problem.
    """

    def __init__(
        self,
        sources: Sequence[Sequence[Prompt]],
        draws: Sequence[Callable[[int], tuple[int, int]]],
        next_source: Callable[[int], tuple[int, int]],
        rule: Rule,
        identity: str,
    ) -> None:
        """Starts at the first prompt.

        Args:
            sources: The problems of each source.
            draws: For each source, k -> (epoch, index) of its k-th draw; see `shuffled_draws`.
            next_source: k -> (source, number of its earlier draws) of prompt k; see `mixture`.
            rule: Selects the problems of every epoch.
            identity: Fingerprint of problems and settings; a state with another one is refused.
        """
        self.identity = identity
        self.cursor = 0
        self._sources, self._draws, self._next_source, self._rule = sources, draws, next_source, rule
        # Draws so far from each source, including skipped ones.
        self._positions = [0] * len(sources)
        # NaN stands for a problem that has not been answered yet.
        self._rates = [array("d", [math.nan]) * len(prompts) for prompts in sources]
        self._index = {prompt.id: (s, i) for s, prompts in enumerate(sources) for i, prompt in enumerate(prompts)}

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts."""
        if n < 0:
            raise ValueError(f"cannot take {n} prompts")
        return [self._next() for _ in range(n)]

    def _next(self) -> Prompt:
        source, _ = self._next_source(self.cursor)
        self.cursor += 1
        rule = self._rule
        # Ends within `revisit` epochs, in one of which every problem is due, whatever its pass rate.
        while True:
            epoch, i = self._draws[source](self._positions[source])
            self._positions[source] += 1
            rate = self._rates[source][i]
            # Adding i spreads the revisited problems over the epochs, instead of all of them in every n-th.
            if math.isnan(rate) or rule.low <= rate <= rule.high or (epoch + i) % rule.revisit == 0:
                return in_epoch(self._sources[source][i], epoch)

    def learn(self, groups: Iterable[Group]) -> None:
        """Updates the pass rate of each group's problem: the mean of its task's term over its scored samples."""
        for group in groups:
            terms = [info.score.terms for info in group.infos]
            followed = next((name for name in self._rule.terms if any(name in of_one for of_one in terms)), "")
            passed = [of_one[followed] for of_one in terms if followed in of_one]
            if passed:
                # `in_epoch` has appended the epoch to the id; ids may contain # themselves.
                source, i = self._index[group.prompt.id.rpartition("#")[0]]
                self._rates[source][i] = math.fsum(passed) / len(passed)

    def state_dict(self) -> dict[str, Any]:
        """State for `load_state_dict`: one number for each problem and source."""
        # JSON has no NaN.
        rates = [[None if math.isnan(rate) else rate for rate in of_source] for of_source in self._rates]
        return {"cursor": self.cursor, "identity": self.identity, "positions": [*self._positions], "rates": rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`. Raises InputError when it is damaged or belongs to other data."""
        cursor = saved_cursor(state, self.identity)
        positions, rates = state.get("positions"), state.get("rates")
        sizes = [len(prompts) for prompts in self._sources]
        if not isinstance(positions, list) or not all(type(at) is int and at >= 0 for at in positions):
            raise InputError(f"{STATE}: positions={positions!r}", "not a list of numbers from 0", _DAMAGED)
        if len(positions) != len(sizes):
            raise InputError(f"{STATE}: positions", f"{len(positions)} numbers for {len(sizes)} sources", _DAMAGED)
        self._rates, self._positions, self.cursor = _saved_rates(rates, sizes), [*positions], cursor


def _saved_rates(saved: object, sizes: Sequence[int]) -> list[array[float]]:
    """Pass rates of each source's problems in a saved state, NaN for problems not yet answered."""
    if not isinstance(saved, list) or len(saved) != len(sizes):
        raise InputError(f"{STATE}: rates={saved!r:.100}", f"not a list for each of {len(sizes)} sources", _DAMAGED)
    for source, (rates, size) in enumerate(zip(saved, sizes, strict=True)):
        where = f"{STATE}: rates of source {source + 1}"
        if not isinstance(rates, list) or len(rates) != size:
            raise InputError(f"{where}={rates!r:.100}", f"not a pass rate for each of {size} problems", _DAMAGED)
        for i, rate in enumerate(rates):
            if rate is not None and (
                isinstance(rate, bool) or not isinstance(rate, int | float) or not math.isfinite(rate)
            ):
                raise InputError(f"{where}, problem {i + 1}: {rate!r}", "not a finite number or null", _DAMAGED)
    return [array("d", [math.nan if rate is None else rate for rate in rates]) for rates in saved]


def saved_cursor(state: dict[str, Any], identity: str) -> int:
    """Counter in a saved state. Raises InputError when it is damaged or belongs to other data."""
    cursor, saved = state.get("cursor"), state.get("identity")
    if saved != identity:
        raise InputError(
            STATE,
            f"belongs to {saved!r}, this run reads {identity!r}",
            "restore the data and its settings, or start a new run",
        )
    if not isinstance(cursor, int) or cursor < 0:
        raise InputError(f"{STATE}: cursor={cursor!r}", "not a number from 0", _DAMAGED)
    return cursor


def in_epoch(prompt: Prompt, epoch: int) -> Prompt:
    """The prompt with the epoch appended to its id (`id#epoch`).

    Sampling noise is keyed by the id, and a prompt must not get the same noise in every epoch.
    """
    return replace(prompt, id=f"{prompt.id}#{epoch}")


def mixed_epochs(
    sources: Sequence[Sequence[Prompt]],
    draws: Sequence[Callable[[int], tuple[int, int]]],
    next_source: Callable[[int], tuple[int, int]],
) -> Callable[[int], Prompt]:
    """Returns the function k -> prompt k of a mixture of sources in endless epochs.

    Args:
        sources: The problems of each source.
        draws: For each source, k -> (epoch, index) of its k-th draw; see `shuffled_draws`.
        next_source: k -> (source, number of its earlier draws) of prompt k; see `mixture`.
    """

    def prompt_at(k: int) -> Prompt:
        source, earlier = next_source(k)
        epoch, i = draws[source](earlier)
        return in_epoch(sources[source][i], epoch)

    return prompt_at


def shuffled_draws(count: int, seed: int | str, difficulties: Sequence[float] = ()) -> Callable[[int], tuple[int, int]]:
    """Returns the function k -> (epoch, index below `count`) of draw k: endless epochs, each shuffled anew.

    With difficulties, one per index, the first epoch is sorted by increasing difficulty. Raises ValueError when `count`
    is 0.
    """
    if not count:
        raise ValueError("there are no prompts to draw from")

    # Draws ascend, so one order is in use, and two around the end of an epoch; more would only take memory.
    @functools.lru_cache(maxsize=2)
    def order(epoch: int) -> list[int]:
        shuffled = random.Random(f"{seed}/epoch/{epoch}").sample(range(count), count)
        # The sort is stable, so problems of equal difficulty stay shuffled.
        return sorted(shuffled, key=difficulties.__getitem__) if epoch == 0 and difficulties else shuffled

    def draw(k: int) -> tuple[int, int]:
        epoch, within = divmod(k, count)
        return epoch, order(epoch)[within]

    return draw


def shares(weights: Sequence[float]) -> list[Fraction]:
    """Each weight's share of their sum, as an exact fraction: 0.1 is a tenth."""
    exact = [Fraction(str(weight)) for weight in weights]
    return [weight / sum(exact) for weight in exact]


def mixture(parts: Sequence[Fraction]) -> Callable[[int], tuple[int, int]]:
    """k -> (source, number of earlier draws from it) of draw k, for positive shares that sum to 1.

    The first source has floor(k p) of the first k draws, which spreads its draws evenly (Bresenham's line); the others
    share the rest in the same way. So each source's share of the first k draws is off by fewer draws than there are
    sources, and its draws are numbered 0, 1, 2, ...
    """
    # Exact fractions, as floor(k p) must not depend on rounding.
    left = [sum(parts[i:], Fraction(0)) for i in range(len(parts))]
    of_left = [part / rest for part, rest in zip(parts, left, strict=True)]

    def draw(k: int) -> tuple[int, int]:
        for source, part in enumerate(of_left):
            before = k * part.numerator // part.denominator
            if (k + 1) * part.numerator // part.denominator > before:
                return source, before
            k -= before
        raise AssertionError("the last source takes what is left")

    return draw

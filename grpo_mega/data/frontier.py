"""A curriculum: problems that the policy sometimes solves appear in every epoch, all others in every n-th.

A group whose answers are all right or all wrong has no advantage (DeepSeekMath, arXiv 2402.03300, section 4.1.2), so
its problem is skipped for some epochs. The order depends on the rewards of earlier groups; its state is in the
checkpoint, and is the same under every layout, as every rank knows every group's scores.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_mega.data.source import in_epoch, saved_cursor
from grpo_mega.types import Group, Prompt


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
        self._positions = [0] * len(sources)  # draws so far, including skipped ones
        self._rates = [array("d", [math.nan]) * len(prompts) for prompts in sources]  # NaN: not yet answered
        self._index = {prompt.id: (s, i) for s, prompts in enumerate(sources) for i, prompt in enumerate(prompts)}

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts."""
        if n < 0:
            raise ValueError(f"cannot take {n} prompts")
        return [self._next() for _ in range(n)]

    def _next(self) -> Prompt:
        source, _ = self._next_source(self.cursor)
        self.cursor += 1
        while True:  # ends within `revisit` epochs
            epoch, i = self._draws[source](self._positions[source])
            self._positions[source] += 1
            if self._comes(epoch, i, self._rates[source][i]):
                return in_epoch(self._sources[source][i], epoch)

    def _comes(self, epoch: int, i: int, rate: float) -> bool:
        """Whether problem `i` of a source, with this pass rate, is part of the epoch."""
        rule = self._rule
        return math.isnan(rate) or rule.low <= rate <= rule.high or (epoch + i) % rule.revisit == 0

    def learn(self, groups: Iterable[Group]) -> None:
        """Updates the pass rate of each group's problem: the mean of its task's term over its scored answers."""
        for group in groups:
            terms = [answer.score.terms for answer in group.answers]
            followed = next((name for name in self._rule.terms if any(name in of_one for of_one in terms)), "")
            passed = [of_one[followed] for of_one in terms if followed in of_one]
            if passed:
                source, i = self._index[group.prompt.id.rpartition("#")[0]]
                self._rates[source][i] = math.fsum(passed) / len(passed)

    def state_dict(self) -> dict[str, Any]:
        """State for `load_state_dict`: one number for each problem and source."""
        rates = [[None if math.isnan(rate) else rate for rate in of_it] for of_it in self._rates]
        return {"cursor": self.cursor, "identity": self.identity, "positions": [*self._positions], "rates": rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`. Raises ValueError when it is damaged or belongs to other data."""
        cursor = saved_cursor(state, self.identity)
        positions, rates = state.get("positions"), state.get("rates")
        sizes = [len(prompts) for prompts in self._sources]
        if not isinstance(positions, list) or not all(type(at) is int and at >= 0 for at in positions):
            raise ValueError(f"the saved prompt order has positions {positions!r}; they must be numbers from 0")
        if len(positions) != len(sizes):
            raise ValueError(f"the saved prompt order has {len(positions)} positions for {len(sizes)} sources")
        self._rates, self._positions, self.cursor = _saved_rates(rates, sizes), [*positions], cursor


def _saved_rates(saved: object, sizes: Sequence[int]) -> list[array[float]]:
    """Pass rates of each source's problems in a saved state, NaN for problems not yet answered."""
    if not isinstance(saved, list) or len(saved) != len(sizes):
        raise ValueError(
            f"the saved prompt order has rates {saved!r:.100}; it must have a list for each of {len(sizes)} sources"
        )
    for source, (rates, size) in enumerate(zip(saved, sizes, strict=True)):
        where = f"the saved prompt order, rates of source {source + 1}"
        if not isinstance(rates, list) or len(rates) != size:
            raise ValueError(f"{where}: {rates!r:.100}; there must be a pass rate for each of {size} problems")
        for i, rate in enumerate(rates):
            if rate is not None and (
                isinstance(rate, bool) or not isinstance(rate, int | float) or not math.isfinite(rate)
            ):
                raise ValueError(f"{where}, problem {i + 1}: {rate!r}; a pass rate is a finite number, or null")
    return [array("d", [math.nan if rate is None else rate for rate in rates]) for rates in saved]

"""Columns of the console: which metrics it shows, in which order, and how their values are written.

`metric_table.py` has the names of metrics and their numbers of digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

from grpo_mega.config.schema import REWARD_MODELS, AlgorithmConfig, EnvironmentConfig, RewardConfig, RunConfig
from grpo_mega.config.schema.reward import success_is_share
from grpo_mega.observe.metric_table import find

SECONDS = "time/step"
ROWS = (
    "reward/mean", "reward/accuracy", "reward/format", "rollout/length_mean", "policy/kl", "policy/entropy",
    "policy/clip_fraction", "policy/grad_norm", SECONDS,
)  # fmt: skip
"""Columns of a run that trains a policy."""
ROWS_OF_PAIRS = (
    "reward_model/loss", "reward_model/accuracy", "reward_model/margin", "reward_model/grad_norm", SECONDS,
)  # fmt: skip
"""Columns of a run that trains a reward model."""
ROWS_OF_STEPS = (
    "process_reward_model/loss", "process_reward_model/accuracy", "process_reward_model/grad_norm", SECONDS,
)  # fmt: skip
"""Columns of a run that trains a process reward model."""
ROWS_OF_CALLS = ("environment/calls", "environment/errors")
"""Columns, after the length, of a run with an environment."""
PANEL = (
    "reward/mean", "reward/accuracy", "eval/accuracy", "eval/heldout/accuracy", "reward/format", "rollout/length_mean",
    "rollout/in_flight", "rollout/staleness_mean", *ROWS_OF_CALLS, "policy/kl", "policy/entropy",
    "policy/clip_fraction", "mismatch/mean_abs", "policy/grad_norm", *ROWS_OF_PAIRS[:-1], *ROWS_OF_STEPS[:-1],
    "sft/loss", "sft/grad_norm", "base/loss", "base/grad_norm", SECONDS, "machine/tokens_per_second", "machine/mfu",
    "machine/peak_memory_gb",
)  # fmt: skip
"""Metrics of the panel, the most important first; a step may lack some."""
WIDEST = 8
"""Characters of a value; larger numbers are written in scientific notation."""
ACCURACY = "reward/accuracy"
SCORE = ".3g"
"""Format of the mean of a success term that is not a share: a mean score of 6.25 out of 10 is not an accuracy of 625 %.
"""


class Column(NamedTuple):
    """A metric that the console shows."""

    title: str
    metric: str
    digits: str

    def text(self, metrics: dict[str, float]) -> str:
        """The metric's value as the console shows it; "-" without one."""
        value = metrics.get(self.metric)
        return "-" if value is None else number(value, self.digits)

    @property
    def width(self) -> int:
        """Characters the column takes in a table, the space before it included."""
        return max(len(self.title), WIDEST) + 2


def column(metric: str) -> Column:
    """The column of a metric of the table; the title of an evaluation's accuracy names its problems."""
    known = find(metric)
    assert known is not None, f"the console shows {metric}, which metric_table.py lacks"
    of_split = {"eval/accuracy": "validation", "eval/heldout/accuracy": "held-out"}
    return Column(of_split.get(metric, known.short), metric, known.digits)


TABLE = tuple(column(metric) for metric in ROWS)


def columns_of(
    run: RunConfig, reward: RewardConfig, algorithm: AlgorithmConfig, environment: EnvironmentConfig
) -> list[Column]:
    """The columns of a run's table; entropy replaces the KL column where there is no KL term."""
    if run.trains in REWARD_MODELS:
        return [column(metric) for metric in (ROWS_OF_PAIRS if run.trains == "reward_model" else ROWS_OF_STEPS)]
    available = {f"reward/{term.name}" for term in reward.terms} | {"reward/mean", ACCURACY}
    unused = "policy/entropy" if algorithm.kl_coef else "policy/kl"
    shown = [c for c in TABLE if c.metric != unused and (c.metric in available or not c.metric.startswith("reward/"))]
    if environment.path:
        after = [c.metric for c in shown].index("rollout/length_mean") + 1
        shown[after:after] = [column(metric) for metric in ROWS_OF_CALLS]
    if success_is_share(asdict(reward)):
        return shown
    return [c._replace(title=reward.success, digits=SCORE) if c.metric == ACCURACY else c for c in shown]


def as_shown(shown: Column, columns: Sequence[Column]) -> Column:
    """A column in the words of the table's `columns`: an accuracy that is not a share has the name of its term."""
    score = next((c for c in columns if c.metric == ACCURACY and c.digits == SCORE), None)
    if score is None or not shown.metric.endswith("accuracy"):
        return shown
    return shown._replace(title=shown.title.replace("accuracy", score.title), digits=SCORE)


def number(value: float, digits: str) -> str:
    """The value in its format, in scientific notation when that would be wider than a column."""
    text = format(value, digits)
    return text if len(text) <= WIDEST else f"{value:.1e}"


def label(metric: str) -> str:
    """The name of a metric in a sentence: "length" for "eval/length_mean"."""
    return metric.rpartition("/")[2].removesuffix("_mean").replace("_", " ")


def digits_of(metric: str) -> str:
    """Format of a metric's value in a sentence."""
    # Names with @ are pass@k and its like.
    share = "@" in metric or metric.endswith(("accuracy", "format", "rate", "fraction", "truncated"))
    return ".1%" if share else ".4g"


def mean(values: Sequence[float]) -> float:
    """The mean of any numbers, at least one; fmean raises an error for two of 1e308, and for inf and -inf."""
    return sum(value / len(values) for value in values)


def shorten(text: str, width: int) -> str:
    """Text of at most `width` characters: its beginning and its end, "..." between them."""
    if len(text) <= width:
        return text
    kept = max(width - 3, 0)
    return (text[: kept - kept // 2] + "..." + text[len(text) - kept // 2 :])[: max(width, 0)]

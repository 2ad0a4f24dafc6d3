"""What a step says of itself: metrics, the samples it shows, and warnings when nothing is being learned.

The choice of shown groups depends on seed, step and what every rank knows of the samples, and is the same under every
layout.
Texts come from the ranks that hold the samples, numbers from the replicas that compute them; only those of shown
samples are sent to the main rank.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from statistics import pstdev
from typing import Any

import torch
from torch import Tensor

from grpo_mega.algorithm.mismatch import explained_by_rounding, rollout_mismatch
from grpo_mega.config.schema import Config, RunConfig
from grpo_mega.models.learning_rate import Schedule
from grpo_mega.models.noise import moment_sums, noise_in_batches
from grpo_mega.models.policy import Policy
from grpo_mega.models.topology import Topology
from grpo_mega.observe.samples import rounded, sample_record
from grpo_mega.platform.collectives import on_main_rank
from grpo_mega.run import Metrics
from grpo_mega.stages.learned_reward import HackingAlarm
from grpo_mega.stages.step import StepOptions, correction_metrics, effective_samples
from grpo_mega.types import Batch, Decode, Group, Rollout, SampleInfo, Score, Step

logger = logging.getLogger(__name__)

STEPS_WITHOUT_SIGNAL = 3
"""Number of consecutive steps without any signal before a warning."""


class Watch:
    """Counters over the steps so far, and the warnings that follow from them.

    Attributes:
        tokens: Number of tokens "generated" and "trained".
        steps_without_signal: Number of latest consecutive steps in which no group had two different rewards.
    """

    def __init__(self, config: Config, topology: Topology, reward_model: str = "") -> None:
        """Starts with counters at 0; `reward_model` is the checksum of the scoring reward model, empty without one."""
        self._topology, self._success, self._adam = topology, config.reward.success, config.optimizer
        self._algorithm, self._temperature = config.algorithm, config.rollout.temperature
        self._environment = config.environment.path is not None
        self._outlive_steps = config.rollout.samples_wait
        # Groups do not matter with a critic, and a teacher gives signal whatever the rewards are.
        self._learns_from_groups = config.algorithm.advantage_baseline != "critic" and not config.distill.teacher
        self.tokens = {"generated": 0, "trained": 0}
        self.steps_without_signal = 0
        self.hacking = HackingAlarm(reward_model)
        fp8 = config.rollout.engine == "sglang" and config.rollout.sglang.fp8
        self._rounding = explained_by_rounding(config.model.dtype, fp8)
        self._compared = False

    def count(self, current: Step) -> None:
        """Counts a finished step and its tokens; warns after several steps in which no group had signal."""
        self.tokens["generated"] += sum(info.sampled for group in current.groups for info in group.infos)
        if not self._learns_from_groups:
            return
        self.steps_without_signal = 0 if any(current.signal) else self.steps_without_signal + 1
        if self.steps_without_signal == STEPS_WITHOUT_SIGNAL:
            likely = (
                "the problems are too hard or too easy for the policy, or the answer format was never sampled; look at "
                "samples/"
                if any(group.rewards for group in current.groups)
                else "in the last one no completion could be scored; the warnings above say why"
            )
            logger.warning(
                "no group had two different rewards for %d steps, so nothing was learned from them: %s",
                STEPS_WITHOUT_SIGNAL,
                likely,
            )

    def metrics(self, current: Step, policy: Policy, schedule: Schedule) -> Metrics:
        """Metrics of a step after the updates of the policy; every rank must call it."""
        metrics = step_metrics(current, self._success, self._learns_from_groups)
        if self._algorithm.groups_without_signal == "refill":
            metrics["rollout/refilled"] = len(current.groups) - self._algorithm.prompts_per_step
        if self._environment:
            metrics |= calls(current.groups)
        if self._outlive_steps:
            metrics |= staleness(current)
        metrics |= current.mismatch  # of a step without a batch
        if current.batch is not None:
            metrics |= self.mismatch(current, current.batch, current.batch.old_logprob)
            metrics |= correction_metrics(current.batch, self._algorithm, self._topology)
            if self._outlive_steps:
                left = effective_samples(current.batch, self._algorithm, self._topology)
                metrics["policy/effective_samples"] = left
        if current.updates:
            assert policy.optimizer is not None, "a stage creates it before its first step"
            moments, betas = moment_sums(policy.optimizer), (self._adam.beta1, self._adam.beta2)
            scale = noise_in_batches(*moments, schedule.updates, *betas)
            metrics |= {} if scale is None else {"policy/gradient_noise_scale": scale}
        return metrics

    def evaluated(self, measured: Metrics) -> Metrics:
        """Metrics of an evaluation; warns when a reward model seems to be gamed."""
        return {f"eval/{name}": value for name, value in (measured | self.hacking.heard(measured)).items()}

    def mismatch(self, current: Step, batch: Batch, logprob: Tensor) -> Metrics:
        """Metrics of the difference between the trainer's log-probs [T] and the engine's, over all replicas' batches,
        at the tokens that the step's own version of the weights sampled.

        In the first step after a start, warns when rounding does not explain the difference.
        """
        compared = batch.mask & ~stale(current, batch)
        mismatch = rollout_mismatch(logprob[compared], batch.rollout_logprob[compared], self._topology.replicas)
        # `not <=`, so that NaN warns as well.
        if not self._compared and not mismatch.get("mean_abs", 0.0) <= self._rounding:
            logger.warning(
                "the engine's log-probs differ from the trainer's by %.2g on average and %.2g at most, although both "
                "have the same weights; rounding explains %g: compare their kernels, dtypes and sampling settings",
                mismatch["mean_abs"],
                mismatch["max_abs"],
                self._rounding,
            )
        self._compared = self._compared or bool(mismatch)
        return {f"mismatch/{name}": value for name, value in mismatch.items()}

    def compare(self, current: Step, batch: Batch, policy: Policy) -> None:
        """Measures the mismatch of a step from which nothing is learned, whose samples are all in `batch`."""
        batch = batch.with_(old_logprob=policy.logprobs(batch, self._temperature))
        current.mismatch = self.mismatch(current, batch, batch.old_logprob)
        current.shown = with_old_logprobs(current, batch, self._topology)

    def state_dict(self) -> dict[str, Any]:
        """The counters, for a checkpoint."""
        counters = {"tokens": self.tokens, "steps_without_signal": self.steps_without_signal}
        return counters | {"hacking": self.hacking.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state of `state_dict`."""
        self.tokens, self.steps_without_signal = state["tokens"], state["steps_without_signal"]
        self.hacking.load_state_dict(state["hacking"])


# Metrics of a step and of a run.


def step_metrics(current: Step, success: str, learns_from_groups: bool) -> Metrics:
    """Metrics of a step whose updates are done; `success` names the term that is reported as accuracy."""
    means = {name: average(u[name] for u in current.updates) for name in (current.updates or [{}])[0]}
    updates = {name if "/" in name else f"policy/{name}": mean for name, mean in means.items()}
    groups = {"rollout/groups_with_signal": average(current.signal)} if learns_from_groups else {}
    return rollout_metrics(current.groups, success) | groups | updates


def rollout_metrics(groups: Sequence[Group], success: str) -> Metrics:
    """Rewards and lengths of a step's samples, as `observe/metric_table.py` defines them; `success` names the term that
    is reported as accuracy."""
    infos = [info for group in groups for info in group.infos]
    lengths = sorted(info.sampled for info in infos)
    steps = [len(info.score.steps) for info in infos if info.score.steps]
    # Of each group, the success of the samples that have the term; groups without any do not count.
    judged = [[info.score.terms[success] for info in group.infos if success in info.score.terms] for group in groups]
    judged = [values for values in judged if values]
    unanimous = {
        "rollout/all_right": average(min(values) >= 1 for values in judged),
        "rollout/all_wrong": average(max(values) <= 0 for values in judged),
    } if judged else {}  # fmt: skip
    return {
        **reward_metrics(groups, success),
        "rollout/tokens": sum(lengths),
        "rollout/length_mean": average(lengths),
        "rollout/length_p50": nearest_rank(lengths, 50),
        "rollout/length_p99": nearest_rank(lengths, 99),
        "rollout/length_max": lengths[-1],
        "rollout/truncated": average(info.finish_reason == "length" for info in infos),
        "rollout/repeated": average(info.repeated for info in infos),
        **({"rollout/steps_mean": average(steps)} if steps else {}),
        **unanimous,
    }


def calls(groups: Sequence[Group]) -> Metrics:
    """The environment's part in a step's samples."""
    infos = [info for group in groups for info in group.infos]
    number, length = sum(info.calls for info in infos), sum(info.length for info in infos)
    errors = {"environment/errors": sum(info.errors for info in infos) / number} if number else {}
    given = sum(info.length - info.sampled for info in infos) / length if length else 0.0
    restarts = sum(len(info.restarts) for info in infos) / len(infos)
    begun_anew = {"environment/restarts": restarts} if restarts else {}
    return {"environment/calls": number / len(infos), "environment/given": given} | errors | begun_anew


def staleness(current: Step) -> Metrics:
    """By how many updates the weights that sampled a step's tokens were older than those that learn from them."""
    tokens: Counter[int] = Counter()  # age -> number of sampled tokens
    for info in (info for group in current.groups for info in group.infos):
        for first, version, size in parts_of_versions(info):
            given = sum(max(0, min(end, first + size) - max(begin, first)) for begin, end in info.given)
            tokens[current.version - version] += size - given
    total = tokens.total()
    return {
        "rollout/staleness_mean": sum(age * size for age, size in tokens.items()) / total if total else 0.0,
        "rollout/staleness_max": max(+tokens, default=0),
        "rollout/tokens_newest": tokens[0] / total if total else 1.0,
    }


def parts_of_versions(info: SampleInfo) -> list[tuple[int, int, int]]:
    """(first token, policy version, number of tokens) of each segment of a sample."""
    ends = [*(first for first, _ in info.segments[1:]), info.length]
    return [(first, version, end - first) for (first, version), end in zip(info.segments, ends, strict=True)]


def ages(info: SampleInfo, version: int) -> dict[str, list[int | None]]:
    """{"ages": by how many updates the weights that sampled each token are older than `version`, None for given ones};
    {} for a sample without older tokens."""
    found: list[int | None] = [version - of for _, of, size in parts_of_versions(info) for _ in range(size)]
    for first, end in info.given:
        found[first:end] = [None] * (end - first)
    return {"ages": found} if any(found) else {}


def stale(current: Step, batch: Batch) -> Tensor:
    """[T] True on the batch's tokens that earlier weights than the step's own sampled."""
    infos = [info for group in current.groups for info in group.infos]
    of_earlier = torch.zeros_like(batch.mask)
    starts = (batch.cu_seqlens[:-1] + batch.prompt_lengths).tolist()
    for number, start in zip(batch.numbers.tolist(), starts, strict=True):
        for first, version, size in parts_of_versions(infos[number]):
            if version != current.version:
                of_earlier[start + first : start + first + size] = True
    return of_earlier


def reward_metrics(groups: Sequence[Group], success: str) -> Metrics:
    """Means and standard deviation over scored samples, and the number of unscored ones; by task if there are several.

    Terms that no sample has are left out: those of other tasks, or all when nothing could be scored.
    """
    scores = [(group.prompt.task, info.score) for group in groups for info in group.infos]
    scored = [(task, score) for task, score in scores if not score.unscorable]
    terms = mean_terms([score for _, score in scored])
    rewards = [score.total for _, score in scored]
    totals: dict[str, list[float]] = {}
    for task, score in scored:
        totals.setdefault(task, []).append(score.total)
    tasks = {task for task, _ in scores}
    return {
        **({"reward/mean": average(rewards), "reward/std": pstdev(rewards)} if rewards else {}),
        **{f"reward/{name}": value for name, value in terms.items()},
        **({"reward/accuracy": terms[success]} if success in terms else {}),
        "reward/unscorable": len(scores) - len(scored),
        **{f"reward/{task}/total": average(totals[task]) for task in sorted(totals) if len(tasks) > 1},
    }


def mean_terms(scores: Sequence[Score]) -> Metrics:
    """Mean of every reward term over the samples that have it."""
    values: dict[str, list[float]] = {}
    for score in scores:
        for name, value in score.terms.items():
            values.setdefault(name, []).append(value)
    return {name: average(of_term) for name, of_term in values.items()}


def achieved(before: Metrics, after: Metrics) -> Metrics:
    """Fields of summary.json: held-out metrics before and after training."""
    names = {"accuracy": "held_out_accuracy", "format": "format_rate", "length": "mean_length"}
    moments = {"before": before, "after": after}
    return {f"{names.get(k, k)}_{when}": x for when, metrics in moments.items() for k, x in metrics.items()}


def average(values: Iterable[float]) -> float:
    """The mean of at least one number."""
    values = list(values)
    return sum(values) / len(values)


def nearest_rank(values: Sequence[float], percent: int) -> float:
    """Nearest-rank percentile of sorted values: the smallest that at least `percent` % of them do not exceed."""
    return values[-(-percent * len(values) // 100) - 1]


# Samples that a run writes to samples/: whole groups of a step, with the per-token numbers of the updates.


def chosen_groups(signal: Sequence[bool], run: RunConfig, step: int) -> list[int]:
    """Indices of the groups of a step to show, ascending: drawn at random, preferring groups with signal.

    The draw depends only on the seed, the step and the signal of groups, so a repeated step draws the same.
    """
    order = [*range(len(signal))]
    random.Random(f"{run.seed}/shown/{step}").shuffle(order)
    order.sort(key=lambda group: not signal[group])
    return sorted(order[: run.sample_groups_per_step])


def records_of(rollout: Rollout, chosen: Sequence[int], decode: Decode, version: int) -> list[dict[str, Any]]:
    """Records of all samples of these groups, in their order, in the format of samples/, before any update.

    `version` is that of the policy now: tokens of earlier ones have an age. Every rank must call it, with the same
    groups. The records are on the main rank, the others get [].
    """
    if not chosen:
        return []
    numbers = sample_numbers(rollout.groups, chosen)

    def held_here() -> dict[int, dict[str, Any]]:
        records = {}
        for group, (index, of_group) in enumerate(zip(chosen, numbers, strict=True)):
            for number, info in zip(of_group, rollout.groups[index].infos, strict=True):
                if number in rollout.samples:
                    record = sample_record(rollout.samples[number], info.score, group, decode)
                    records[number] = record | ages(info, version)
        return records

    records = {number: record for of_rank in on_main_rank(held_here) for number, record in of_rank.items()}
    return [records[number] for of_group in numbers for number in of_group] if records else []


def with_numbers(current: Step, options: StepOptions, topology: Topology) -> list[dict[str, Any]]:
    """Records of a finished step, with the advantages and the log-probs under every policy.

    Records of samples that no update computed are unchanged. An advantage is one number per sample, or a list if tokens
    have their own (critic, process supervision, teacher). Every rank must call it; the records are on the main rank.
    """
    batch = current.batch
    if batch is None:
        return current.shown
    columns = {"old_logprobs": batch.old_logprob, "advantages": batch.advantage}
    if batch.new_logprob is not None and batch.new_entropy is not None:
        columns |= {"new_logprobs": batch.new_logprob, "entropies": batch.new_entropy}
    if options.algorithm.kl_coef:
        columns["ref_logprobs"] = batch.ref_logprob
    by_token = options.advantages.by_step or options.advantages.baseline == "critic" or options.taught
    records = []
    for record, values in zip(current.shown, _shown_columns(current, batch, columns, topology), strict=True):
        lists: dict[str, Any] = {name: rounded(of_tokens) for name, of_tokens in values.items()}
        if values and by_token:
            record = {name: value for name, value in record.items() if name != "advantage"}
        elif values:  # all tokens have the same advantage: one number is stored, in the place of the list
            del lists["advantages"]
            # The first token of a completion is always sampled.
            lists = {"advantage": next(iter(values["advantages"]), None)} | lists
        records.append(record | lists)
    return records


def with_old_logprobs(current: Step, batch: Batch, topology: Topology) -> list[dict[str, Any]]:
    """Records of a step without updates, with the log-probs that its mismatch is measured by, from `batch`, which has
    all samples of the step. Every rank must call it; the records are on the main rank."""
    columns = _shown_columns(current, batch, {"old_logprobs": batch.old_logprob}, topology)
    return [
        record | {name: rounded(of_tokens) for name, of_tokens in values.items()}
        for record, values in zip(current.shown, columns, strict=True)
    ]


def sample_numbers(groups: Sequence[Group], chosen: Sequence[int]) -> list[range]:
    """Numbers, in the rollout, of the samples of each chosen group."""
    ends = [*accumulate(len(group.infos) for group in groups)]
    return [range(ends[index] - len(groups[index].infos), ends[index]) for index in chosen]


def _shown_columns(
    current: Step, batch: Batch, columns: Mapping[str, Tensor], topology: Topology
) -> list[dict[str, list[float | None]]]:
    """For each record {column: values at the completion's tokens, None at given ones}, {} for a sample in no replica's
    batch. On the main rank; [] on others, and if nothing is shown."""
    numbers = [number for of_group in sample_numbers(current.groups, current.shown_groups) for number in of_group]
    if not numbers:
        return [{} for _ in current.shown]
    wanted = {*numbers} if topology.is_first_of_replica else set()  # the replica's other ranks have the same batch

    def computed_here() -> dict[int, dict[str, list[float | None]]]:
        starts, prompts, values = batch.cu_seqlens.tolist(), batch.prompt_lengths.tolist(), {}
        for row, number in enumerate(batch.numbers.tolist()):
            if number in wanted:
                tokens = slice(starts[row] + prompts[row], starts[row + 1])
                learned = batch.mask[tokens].tolist()
                values[number] = {
                    name: [value if own else None for value, own in zip(column[tokens].tolist(), learned, strict=True)]
                    for name, column in columns.items()
                }
        return values

    of_sample = {number: values for of_rank in on_main_rank(computed_here) for number, values in of_rank.items()}
    return [of_sample.get(number, {}) for number in numbers] if topology.is_main else []

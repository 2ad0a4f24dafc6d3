"""What the updates of a step of GRPO compute, beside the papers' formulas: batches, gradients, corrections."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import plain_grpo
import torch
from grpo_run import (
    REWARDS,
    WITHOUT_SIGNAL,
    config_of,
    equal,
    generated,
    grpo,
    rows,
    step,
    watched_updates,
)

from grpo_kernels import linear_token_loss
from grpo_mega.algorithm.objective import LossResult
from grpo_mega.config.schema import Config
from grpo_mega.models.topology import Topology
from grpo_mega.run import Run
from grpo_mega.stages.exchange import pack_samples
from grpo_mega.stages.step import (
    StepOptions,
    batch_of_step,
    batch_of_update,
    corrected,
    correction_metrics,
    loss_of,
    step_of,
)
from grpo_mega.types import Batch, Group, MiniBatch, Rollout, SampleInfo, Step


def batches() -> dict[str, Any]:
    """Packing of groups with and without signal, and the mini-batches made of them, by what becomes of the latter."""
    seen: dict[str, Any] = {}
    overrides = ("algorithm.aggregation=token_mean", "algorithm.epochs=2")
    with grpo("batches", *overrides) as built:
        rollout, config = generated(built, REWARDS), config_of("batches", *overrides)
        samples = [*rollout.samples.values()]
        seen["lengths"] = [len(s.token_ids) for s in samples]
        seen["prompt_lengths"] = [len(s.prompt.token_ids) for s in samples]
        seen["expected_tokens"] = [[*s.prompt.token_ids, *s.token_ids] for s in samples]
        for name, without_signal, kl_coef in WITHOUT_SIGNAL:
            algorithm, topology = config.algorithm, built.model.topology
            algorithm.groups_without_signal, algorithm.kl_coef, algorithm.mini_batches = without_signal, kl_coef, 1
            batch = batch_at(rollout, config, topology)
            outcome = {"tokens": rows(batch, batch.tokens), "advantages": rows(batch, batch.advantage)}
            outcome["only_equal"] = batch_at(only(rollout, 1, 3), config, topology) is None
            outcome["nothing_to_do"] = len(step_at(rollout.groups[1:3], config).mini_batches)
            for parts in (1, 3, 12, 16):
                algorithm.mini_batches = parts
                outcome[f"parts_{parts}"] = [
                    {
                        "sequences": [outcome["tokens"].index(row) for row in rows(part, part.tokens)],
                        "dealt": [mini_batch.trained, mini_batch.left_out],
                        "weight": part.weight.double().sum().item(),
                        "tokens": int(part.mask.sum()),
                        "off_mask": part.weight[~part.mask].abs().sum().item(),
                    }
                    for part, mini_batch in updates_of(built, config, rollout)
                ]
            algorithm.mini_batches = 12  # epochs have different numbers of mini-batches with something to compute
            outcome["numbers"] = [batch_at(rollout, config, topology, i).numbers.tolist() for i in range(12)]
            outcome["mini_batches"] = [
                [len(epoch) for epoch in step_at(rollout.groups, config, i).epochs] for i in range(12)
            ]
            seen[name] = outcome
    return seen


def with_steps(rollout: Rollout) -> Rollout:
    """The same, with steps in all groups but the last: in the second they differ although the rewards are equal, in the
    third they do not."""

    def own(number: int, info: SampleInfo) -> tuple[tuple[int, float], ...]:
        middle, reward = (info.length - 1) // 2, info.score.total
        if middle == info.length - 1 or number >= 12:
            return ()
        return ((middle, float(number < 8) * (0.5 + number % 3)), (info.length - 1, reward))

    groups = [
        replace(group, infos=tuple(
            replace(a, score=replace(a.score, steps=own(4 * i + j, a))) for j, a in enumerate(group.infos)))
        for i, group in enumerate(rollout.groups)
    ]  # fmt: skip
    return Rollout(groups, rollout.samples)


def step_at(groups: list[Group], config: Config, number: int = 0) -> Step:
    return step_of(groups, StepOptions.of(config), number)


def batch_at(rollout: Rollout, config: Config, topology: Topology, step: int = 0) -> Batch | None:
    return batch_of_step(rollout, step_at(rollout.groups, config, step), StepOptions.of(config), topology)


def only(rollout: Rollout, first: int, end: int) -> Rollout:
    """The groups from `first` up to `end`."""
    samples = {number - 4 * first: rollout.samples[number] for number in range(4 * first, 4 * end)}
    return Rollout(rollout.groups[first:end], samples)


def updates_of(
    built: Run, config: Config, rollout: Rollout, batch: Batch | None = None
) -> list[tuple[Batch, MiniBatch]]:
    """The batch of each update of a step, with the mini-batch that it is for."""
    options, step = StepOptions.of(config), step_at(rollout.groups, config)
    step.batch = batch or batch_at(rollout, config, built.model.topology)
    return [(batch_of_update(step, numbers, options, 0), numbers) for numbers in step.mini_batches]


def with_given(rollout: Rollout) -> Rollout:
    """The same, in which every second sample was given the tokens in its middle, such as a tool's reply."""

    def span(number: int, length: int) -> tuple[tuple[int, int], ...]:
        return ((length // 3, length - 1),) if number % 2 and length > 3 else ()

    numbers = itertools.count()

    def replied(info: SampleInfo) -> SampleInfo:
        given = span(next(numbers), info.length)
        return replace(info, given=given, calls=len(given))

    groups = [replace(group, infos=tuple(map(replied, group.infos))) for group in rollout.groups]
    samples = {n: replace(s, given=span(n, len(s.token_ids))) for n, s in rollout.samples.items()}
    assert any(sample.given for sample in samples.values())
    return Rollout(groups, samples)


UNSCORED = [(1, None, 1, 0), (1, 1, None, 1), (None, 0, None, None), (5, 0, None, 5)]
"""The like, in which some samples could not be scored."""


def gradients() -> dict[str, dict[str, Any]]:
    """Gradients of a step's mini-batches beside those of the papers' formulas over every sequence with a score."""
    seen = {}
    dense = ["model=tiny_dense", "algorithm.clip_high=0.28", "algorithm.dual_clip=null"]
    given = config_of("gradients", *dense)
    with grpo("gradients", *dense) as built:
        rollouts = {"": generated(built, REWARDS), "unscored, ": generated(built, UNSCORED)}
        rollouts["steps, "] = with_steps(rollouts[""])
        rollouts["given, "] = with_given(rollouts[""])
        rollouts["given steps, "] = with_given(rollouts["steps, "])
        for some, without_signal, objective, aggregation, std, kl_coef, entropy_coef, parts in GRADIENTS:
            algorithm = replace(
                given.algorithm,
                objective=objective,
                aggregation=aggregation,
                advantage_std=std,
                kl_coef=kl_coef,
                entropy_coef=entropy_coef,
                mini_batches=parts,
                groups_without_signal=without_signal,
                supervision="process" if "steps" in some else "outcome",
            )
            config = replace(given, algorithm=algorithm)
            key = f"{some}{without_signal}, {objective}, {aggregation}, kl {kl_coef}, entropy {entropy_coef}, {parts}"
            seen[key] = _gradients(built, config, rollouts[some])
    return seen


GRADIENTS = [
    *(("", "count", "ppo", aggregation, std, kl_coef, 0.0, parts)
      for aggregation, std in (("sequence_mean", "sample"), ("constant", "none"), ("token_mean", "population"))
      for kl_coef in (0.0, 0.2) for parts in (1, 8)),
    ("", "count", "gspo", "sequence_mean", "sample", 0.0, 0.0, 4),
    ("", "count", "gspo", "sequence_mean", "sample", 0.2, 0.0, 4),
    ("", "count", "ppo", "sequence_mean", "sample", 0.0, 0.1, 2),
    *(("unscored, ", without_signal, "ppo", aggregation, "sample", kl_coef, 0.0, 4)
      for without_signal in ("count", "drop") for aggregation in ("sequence_mean", "token_mean")
      for kl_coef in (0.0, 0.2)),
    *(("steps, ", "count", "ppo", aggregation, std, kl_coef, 0.0, 4)
      for aggregation, std in (("sequence_mean", "sample"), ("constant", "none"), ("token_mean", "population"))
      for kl_coef in (0.0, 0.2)),
    ("given, ", "count", "ppo", "sequence_mean", "sample", 0.0, 0.1, 2),
    *((some, "count", objective, aggregation, "sample", 0.2, 0.0, 4)
      for some in ("given, ", "given steps, ") for objective in ("ppo", "gspo")
      for aggregation in ("sequence_mean", "constant", "token_mean")),
]  # fmt: skip


def _gradients(built: Run, config: Config, rollout: Rollout) -> dict[str, Any]:
    # All samples, with log-probs of the policy as those of the rollout.
    everything = pack_samples([*rollout.samples.values()])
    logprob = built.model.logprobs(everything, 1.0)
    shift = torch.sin(torch.arange(len(logprob)))  # so far away that ratios clip and the KL term has a gradient
    old, ref = logprob + 0.4 * shift, logprob - 0.3 * shift.roll(1)
    everything = everything.with_(rollout_logprob=logprob, old_logprob=old, ref_logprob=ref)
    algorithm, longest = config.algorithm, config.rollout.max_new_tokens
    loss = loss_of(algorithm, old_is_current=False)
    batch = batch_at(rollout, config, built.model.topology)
    computed = batch.numbers.tolist()
    known = everything.select(computed)
    groups = [
        group for group in rollout.groups if len({*group.rewards}) > 1 or algorithm.groups_without_signal == "count"
    ]
    counted = [i for i, info in enumerate(rollout.infos)
               if not info.score.unscorable and rollout.groups[i // 4] in groups]  # fmt: skip
    everything = everything.select(counted)
    batch = batch.with_(old_logprob=known.old_logprob, ref_logprob=known.ref_logprob)
    outcome, total = {}, 0.0
    for part_of_step, mini_batch in updates_of(built, config, rollout, batch):
        numbers = (*mini_batch.trained, *mini_batch.left_out)
        rows = [counted.index(i) for i in numbers]
        tokens = [sampled_of(everything)[i] for i in rows]
        part = len(tokens) / len(everything.lengths)
        if algorithm.aggregation == "token_mean":
            part = float(sum(tokens) / everything.mask.sum())
        built.model.gradients(part_of_step, loss, 1.0)
        for name, gradient in built.model.whole_gradients().items():
            outcome[name] = outcome.get(name, 0.0) + part * gradient.double()
        total += part
    by_logprob = plain_grpo.gradient(
        [(group.rewards, [info.sampled for info in group.infos if not info.score.unscorable]) for group in groups],
        *(x[everything.mask] for x in (everything.rollout_logprob, everything.old_logprob, everything.ref_logprob)),
        algorithm,
        longest,
        [[steps_of(info) for info in group.infos] for group in groups] if algorithm.supervision == "process" else None,
    )
    built.model.gradients(*_as_given(everything, by_logprob, algorithm.entropy_coef))
    exact = {name: gradient.double() for name, gradient in built.model.whole_gradients().items()}
    assert exact.keys() == outcome.keys()
    errors = [float((outcome[name] - exact[name]).norm() / exact[name].norm()) for name in exact]
    norm = float(sum(gradient.norm() ** 2 for gradient in exact.values()) ** 0.5)
    return {"error": max(errors), "norm": norm, "computed": len(computed), "shares": total}


def sampled_of(everything: Batch) -> torch.Tensor:
    """[N] number of sampled tokens of each sequence."""
    return torch.segment_reduce(everything.mask.double(), "sum", offsets=everything.cu_seqlens).long()


def steps_of(info: SampleInfo) -> tuple[tuple[int, float], ...]:
    """(sampled tokens before the step's last, reward) of each step: a step that ends with given tokens ends for the
    sampled ones before them."""
    own = [at for at in range(info.length) if not any(first <= at < end for first, end in info.given)]
    steps = info.score.steps or ((info.length - 1, info.score.total),)
    return tuple((sum(at <= last for at in own) - 1, reward) for last, reward in steps)


def _as_given(everything: Batch, by_logprob: torch.Tensor, entropy_coef: float) -> tuple[Batch, Any, float]:
    """Arguments of `Policy.gradients` for a loss with the derivative `by_logprob` in every completion token's log-prob,
    and for an entropy bonus the mean over sequences of the mean over tokens.
    """
    tokens = sampled_of(everything)
    weight = (1.0 / (tokens * len(tokens))).repeat_interleave(everything.lengths) * everything.mask
    given = torch.zeros(len(everything.tokens))
    given[everything.mask] = by_logprob.float()

    def loss(hidden: torch.Tensor, matrix: torch.Tensor, scored: Any, _: Any, **how: Any) -> LossResult:
        def linear(logprob: torch.Tensor, entropy: torch.Tensor, part: slice) -> tuple[torch.Tensor, dict]:
            losses = scored.advantage[part] * logprob - entropy_coef * scored.weight[part] * entropy
            return losses, {"loss": losses, "logprob": logprob}

        total, of = linear_token_loss(hidden, matrix, scored.tokens, linear, **how)
        return LossResult(total, of["loss"], of["logprob"], {})

    return everything.with_(advantage=given, weight=weight), loss, 1.0


def corrections() -> dict[str, Any]:
    """Sequences about which engine and trainer disagree by a known ratio, and a step in which they agree."""
    overrides = ["model=tiny_dense", "algorithm.correction=truncate", "algorithm.correction_level=sequence_mean"]
    overrides += ["algorithm.correction_cap=1.1", "algorithm.rejection_floor=0.8", "algorithm.rejection_cap=1.25"]
    overrides += ["algorithm.entropy_coef=0.1"]  # a sequence that is left out has no entropy term either
    overrides += ["algorithm.aggregation=token_mean"]
    with grpo("corrections", *overrides) as built:
        policy, config = built.model, config_of("corrections", *overrides)
        rollout = generated(built, REWARDS)
        batch = batch_at(rollout, config, policy.topology)
        old, apart = policy.logprobs(batch, 1.0), 0.3 * torch.sin(batch.numbers)
        engine = old - apart.repeat_interleave(batch.lengths)
        batch = corrected(batch.with_(old_logprob=old, rollout_logprob=engine), config.algorithm, policy.topology)
        ((part, _),) = updates_of(built, config, rollout, batch)
        loss = loss_of(config.algorithm, built.stage.skips_old_pass)
        found, with_factors = policy.gradients(part, loss, 1.0), policy.whole_gradients()
        weight = part.weight.masked_fill(part.correction == 0, 0.0)
        by_hand = part.with_(advantage=part.advantage * part.correction, weight=weight, correction=None)
        none = replace(config.algorithm, correction="none", correction_level="token", rejection_floor=0.0)
        policy.gradients(by_hand, loss_of(replace(none, rejection_cap=math.inf), old_is_current=False), 1.0)
        others = policy.whole_gradients()
        return {
            "apart": apart.tolist(),
            "factors": rows(batch, batch.correction),
            "mask": rows(batch, batch.mask.float()),
            "lengths": [int(n) for n in batch.lengths - batch.prompt_lengths],
            "metrics": found.metrics,
            "beyond": correction_metrics(batch, config.algorithm, policy.topology)["policy/corrected"],
            "same": all(torch.equal(with_factors[name], others[name]) for name in others),
            "moves": any(gradient.any() for gradient in others.values()),
            "step": step(built),
        }


def kl_in_rewards() -> dict[str, Any]:
    """Two steps of RLOO with a KL penalty, the second of which has equal rewards."""
    with grpo("kl_in_rewards", "algorithm=rloo", "algorithm.kl_in=reward", "algorithm.kl_coef=0.5") as built:
        updates = watched_updates(built)
        seen: dict[str, Any] = {"steps": [step(built)]}
        equal.touch()
        seen["steps"].append(step(built))
        equal.unlink()
        batch, found = updates[1]
        seen["policy term"] = -(batch.weight * batch.advantage * found.outputs).sum().item()
        seen["loss"] = found.metrics["loss"]
        penalty = torch.where(batch.mask, batch.old_logprob - batch.ref_logprob, 0.0).split(batch.lengths.tolist())
        seen["penalty"] = [0.5 * part.sum().item() for part in penalty]
        seen["advantages"] = [part[-1].item() for part in batch.advantage.split(batch.lengths.tolist())]
    return seen

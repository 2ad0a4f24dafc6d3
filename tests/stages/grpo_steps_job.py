"""One rank that drives real runs of GRPO, piece by piece, and prints what it saw as JSON: {part: observations}.

Usage: grpo_steps_job.py FOLDER [all] ; without `all` it leaves out what takes longest.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import plain_grpo
import stage_state
import step_rewards
import torch
from composed import composed

from grpo_mega import platform
from grpo_mega.config.schema import Config
from grpo_mega.platform.stop import Interrupted, StopRequest

here = platform.start()

from metric_lines import of_steps  # noqa: E402

from grpo_kernels import linear_token_loss  # noqa: E402
from grpo_mega.algorithm.mini_batches import MiniBatch  # noqa: E402
from grpo_mega.algorithm.objective import TokenLosses  # noqa: E402
from grpo_mega.assemble import assemble  # noqa: E402
from grpo_mega.checkpoint.step_in_progress import StepInProgress  # noqa: E402
from grpo_mega.data import build_data  # noqa: E402
from grpo_mega.models.noise import moment_sums, noise_in_batches  # noqa: E402
from grpo_mega.models.topology import leave_layout  # noqa: E402
from grpo_mega.reward.compose import build_reward  # noqa: E402
from grpo_mega.rollout.embedded import EmbeddedEngine  # noqa: E402
from grpo_mega.rollout.producer import generate  # noqa: E402
from grpo_mega.run import Run  # noqa: E402
from grpo_mega.stages.batches import batch_of, make_batch, mini_batches, mini_batches_of_epoch  # noqa: E402
from grpo_mega.stages.corrections import corrected, correction_metrics  # noqa: E402
from grpo_mega.stages.learned_reward import ACCURACY, LEARNED  # noqa: E402
from grpo_mega.stages.loss import loss_of  # noqa: E402
from grpo_mega.stages.packing import pack_samples  # noqa: E402
from grpo_mega.types import Answer, Batch, Group, Rollout, Score  # noqa: E402

SMALL = [
    "experiment=tiny",
    "base=none",
    "layout=single",
    "reward.terms=[{name:own,function:step_rewards:scored},{name:format,weight:0.5}]",
    "reward.success=own",
    "data.validation_size=8",
    "data.test_size=8",
    "algorithm.prompts_per_step=4",
    "algorithm.group_size=4",
    "rollout.max_new_tokens=12",
    "optimizer.warmup_steps=0",
    "run.tensorboard=false",
    "run.steps=9",
]
root = sys.argv[1]
equal, half = Path(root, "equal"), Path(root, "half")
os.environ |= {step_rewards.EQUAL: str(equal), step_rewards.HALF: str(half)}


@contextmanager
def grpo(name: str, *overrides: str) -> Iterator[Run]:
    """A run of GRPO with random weights that has begun, or continues in run directory `name`."""
    os.environ["MASTER_PORT"] = "0"  # any free one, for each job of this process
    platform.join_processes(here)
    config = composed(*SMALL, f"run.root={root}", f"run.name={name}", *overrides)
    with assemble(config, here, build_data(config), build_reward(config.reward)) as built:
        built.enter(built.stages[-1])
        yield built


def generated(built: Run, rewards: list[tuple[float | None, ...]]) -> Rollout:
    """Real groups with given rewards; a sample with None could not be scored."""
    rollouts, prompts = built.stage.rollouts, built.stage.data.test[: len(rewards)]
    samples = generate(rollouts.engine, prompts, 4, rollouts.sampling(0), version=0)
    given = [reward for of_group in rewards for reward in of_group]
    scores = [Score(0.0, {}, unscorable="the judge was away") if r is None else Score(r, {}) for r in given]
    answers = [
        Answer(len(s.token_ids), s.finish_reason, s.segments, score) for s, score in zip(samples, scores, strict=True)
    ]
    groups = [Group(prompt, tuple(answers[4 * i : 4 * i + 4])) for i, prompt in enumerate(prompts)]
    return Rollout(groups, dict(enumerate(samples)))


def with_steps(rollout: Rollout) -> Rollout:
    """The same, with steps in all groups but the last: in the second they differ although the rewards are equal, in the
    third they do not."""

    def own(number: int, answer: Answer) -> tuple[tuple[int, float], ...]:
        middle, reward = (answer.length - 1) // 2, answer.score.total
        if middle == answer.length - 1 or number >= 12:
            return ()
        return ((middle, float(number < 8) * (0.5 + number % 3)), (answer.length - 1, reward))

    groups = [
        replace(group, answers=tuple(
            replace(a, score=replace(a.score, steps=own(4 * i + j, a))) for j, a in enumerate(group.answers)))
        for i, group in enumerate(rollout.groups)
    ]  # fmt: skip
    return Rollout(groups, rollout.samples)


def only(rollout: Rollout, first: int, end: int) -> Rollout:
    """The groups from `first` up to `end`."""
    samples = {number - 4 * first: rollout.samples[number] for number in range(4 * first, 4 * end)}
    return Rollout(rollout.groups[first:end], samples)


def updates_of(
    built: Run, config: Config, rollout: Rollout, batch: Batch | None = None
) -> list[tuple[Batch, MiniBatch]]:
    """The batch of each update of a step, with the mini-batch that it is for."""
    current = StepInProgress(rollout.groups, batch or make_batch(rollout, config, built.model.topology, 0))
    return [(batch_of(current, numbers, config, 0), numbers) for numbers in mini_batches(rollout.groups, config, 0)]


def step(built: Run) -> dict[str, float]:
    record = built.stage.step(built)
    built.step += 1
    return record.metrics


def rows(batch: Batch, vector: torch.Tensor) -> list[list[float]]:
    return [part.tolist() for part in vector.split(batch.lengths.tolist())]


def digest(built: Run) -> str:
    """Of every weight, routing bias, optimizer moment and reference weight."""
    outcome = hashlib.sha256()
    for part in getattr(built.model.optimizer, "chained_optimizers", [built.model.optimizer]):
        moments = part.optimizer.state.values()
        tensors = [t for state in moments for t in state.values() if torch.is_tensor(t)]
        assert tensors, "there are no moments to compare"
        for tensor in tensors:
            outcome.update(tensor.numpy().tobytes())
    held = built.stage.reference.held if built.stage.reference else []
    for model in (built.model.chunks.state_dict(), dict(enumerate(held))):
        for tensor in model.values():
            if torch.is_tensor(tensor):
                outcome.update(tensor.detach().numpy().tobytes())
    return outcome.hexdigest()


REWARDS = [(1, 0, 1, 0), (1, 1, 1, 1), (0, 0, 0, 0), (5, 5, 5, 0)]
"""Of four groups, of which two have no signal."""


def batches() -> dict[str, Any]:
    """Packing of groups with and without signal, and the mini-batches made of them, by what becomes of the latter."""
    seen: dict[str, Any] = {}
    with grpo("batches", "algorithm.aggregation=token_mean", "algorithm.epochs=2") as built:
        rollout = generated(built, REWARDS)
        config, samples = built.stage.config, [*rollout.samples.values()]
        seen["lengths"] = [len(s.token_ids) for s in samples]
        seen["prompt_lengths"] = [len(s.prompt.token_ids) for s in samples]
        seen["expected_tokens"] = [[*s.prompt.token_ids, *s.token_ids] for s in samples]
        for name, without_signal, kl_coef in WITHOUT_SIGNAL:
            algorithm, topology = config.algorithm, built.model.topology
            algorithm.groups_without_signal, algorithm.kl_coef, algorithm.mini_batches = without_signal, kl_coef, 1
            batch = make_batch(rollout, config, topology, 0)
            outcome = {"tokens": rows(batch, batch.tokens), "advantages": rows(batch, batch.advantage)}
            outcome["only_equal"] = make_batch(only(rollout, 1, 3), config, topology, 0) is None
            outcome["nothing_to_do"] = len(mini_batches(rollout.groups[1:3], config, 0))
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
            outcome["numbers"] = [make_batch(rollout, config, topology, i).numbers.tolist() for i in range(12)]
            outcome["mini_batches"] = [
                [len(mini_batches_of_epoch(rollout.groups, config, i, epoch)) for epoch in (0, 1)] for i in range(12)
            ]
            seen[name] = outcome
    return seen


WITHOUT_SIGNAL = (("drop", "drop", 0.1), ("left out", "count", 0.0), ("kl", "count", 0.1))
"""Name, `algorithm.groups_without_signal` and `algorithm.kl_coef` of all that can become of a group without signal."""


UNSCORED = [(1, None, 1, 0), (1, 1, None, 1), (None, 0, None, None), (5, 0, None, 5)]
"""The like, in which some samples could not be scored."""


def gradients() -> dict[str, dict[str, Any]]:
    """Gradients of a step's mini-batches beside those of the papers' formulas over every sequence with a score."""
    seen = {}
    dense = ["model=tiny_dense", "algorithm.clip_high=0.28", "algorithm.dual_clip=null"]
    with grpo("gradients", *dense) as built:
        rollouts = {"": generated(built, REWARDS), "unscored, ": generated(built, UNSCORED)}
        rollouts["steps, "] = with_steps(rollouts[""])
        everything = pack_samples([*rollouts[""].samples.values()])
        logprob = built.model.logprobs(everything, 1.0)
        shift = torch.sin(torch.arange(len(logprob)))  # so far away that ratios clip and the KL term has a gradient
        old, ref = logprob + 0.4 * shift, logprob - 0.3 * shift.roll(1)
        everything = everything.with_(rollout_logprob=logprob, old_logprob=old, ref_logprob=ref)
        for some, without_signal, objective, aggregation, std, kl_coef, entropy_coef, parts in GRADIENTS:
            algorithm = replace(
                built.stage.config.algorithm,
                objective=objective,
                aggregation=aggregation,
                advantage_std=std,
                kl_coef=kl_coef,
                entropy_coef=entropy_coef,
                mini_batches=parts,
                groups_without_signal=without_signal,
                supervision="process" if some == "steps, " else "outcome",
            )
            config = replace(built.stage.config, algorithm=algorithm)
            key = f"{some}{without_signal}, {objective}, {aggregation}, kl {kl_coef}, entropy {entropy_coef}, {parts}"
            seen[key] = _gradients(built, config, rollouts[some], everything)
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
]  # fmt: skip


def _gradients(built: Run, config: Config, rollout: Rollout, everything: Batch) -> dict[str, Any]:
    """`everything`: all samples, with log-probs of the policy as those of the rollout."""
    algorithm, longest = config.algorithm, config.rollout.max_new_tokens
    loss = loss_of(algorithm, on_policy=False)
    batch = make_batch(rollout, config, built.model.topology, 0)
    computed = batch.numbers.tolist()
    known = everything.select(computed)
    groups = [
        group for group in rollout.groups if len({*group.rewards}) > 1 or algorithm.groups_without_signal == "count"
    ]
    counted = [i for i, answer in enumerate(rollout.answers)
               if not answer.score.unscorable and rollout.groups[i // 4] in groups]  # fmt: skip
    everything = everything.select(counted)
    batch = batch.with_(old_logprob=known.old_logprob, ref_logprob=known.ref_logprob)
    outcome, total = {}, 0.0
    for part_of_step, mini_batch in updates_of(built, config, rollout, batch):
        numbers = (*mini_batch.trained, *mini_batch.left_out)
        rows = [counted.index(i) for i in numbers]
        tokens = [everything.lengths[i] - everything.prompt_lengths[i] for i in rows]
        part = len(tokens) / len(everything.lengths)
        if algorithm.aggregation == "token_mean":
            part = float(sum(tokens) / everything.mask.sum())
        built.model.gradients(part_of_step, loss, 1.0)
        for name, gradient in built.model.whole_gradients().items():
            outcome[name] = outcome.get(name, 0.0) + part * gradient.double()
        total += part
    by_logprob = plain_grpo.gradient(
        [
            (group.rewards, [answer.length for answer in group.answers if not answer.score.unscorable])
            for group in groups
        ],
        *(x[everything.mask] for x in (everything.rollout_logprob, everything.old_logprob, everything.ref_logprob)),
        algorithm,
        longest,
        [[a.score.steps or ((a.length - 1, a.score.total),) for a in group.answers] for group in groups]
        if algorithm.supervision == "process"
        else None,
    )
    built.model.gradients(*_as_given(everything, by_logprob, algorithm.entropy_coef))
    exact = {name: gradient.double() for name, gradient in built.model.whole_gradients().items()}
    assert exact.keys() == outcome.keys()
    errors = [float((outcome[name] - exact[name]).norm() / exact[name].norm()) for name in exact]
    norm = float(sum(gradient.norm() ** 2 for gradient in exact.values()) ** 0.5)
    return {"error": max(errors), "norm": norm, "computed": len(computed), "shares": total}


def _as_given(everything: Batch, by_logprob: torch.Tensor, entropy_coef: float) -> tuple[Batch, Any, float]:
    """Arguments of `Policy.gradients` for a loss with the derivative `by_logprob` in every completion token's log-prob,
    and for an entropy bonus the mean over sequences of the mean over tokens.
    """
    tokens = everything.lengths - everything.prompt_lengths
    weight = (1.0 / (tokens * len(tokens))).repeat_interleave(everything.lengths) * everything.mask
    given = torch.zeros(len(everything.tokens))
    given[everything.mask] = by_logprob.float()

    def loss(hidden: torch.Tensor, matrix: torch.Tensor, scored: Any, _: Any, **how: Any) -> TokenLosses:
        def linear(logprob: torch.Tensor, entropy: torch.Tensor, part: slice) -> tuple[torch.Tensor, dict]:
            losses = scored.advantage[part] * logprob - entropy_coef * scored.weight[part] * entropy
            return losses, {"loss": losses, "logprob": logprob}

        total, of = linear_token_loss(hidden, matrix, scored.tokens, linear, **how)
        return TokenLosses(total, of["loss"], of["logprob"], {})

    return everything.with_(advantage=given, weight=weight), loss, 1.0


def equal_rewards() -> dict[str, Any]:
    """Steps without signal, behind one with signal that moved the policy away from its reference."""
    return {name: _equal_rewards(name, *how) for name, *how in WITHOUT_SIGNAL}


def _equal_rewards(name: str, without_signal: str, kl_coef: float) -> dict[str, Any]:
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    seen: dict[str, Any] = {"digests": [], "warnings": [], "metrics": []}
    overrides = [f"algorithm.groups_without_signal={without_signal}", f"algorithm.kl_coef={5 * kl_coef}"]
    with grpo(f"equal_rewards_{name.replace(' ', '_')}", *overrides) as built:
        logging.getLogger("grpo_mega.stages.watch").addHandler(handler)
        seen["signal"] = step(built)
        for _ in range(4):
            seen["digests"].append(digest(built))
            seen["warnings"].append(len(warnings))
            equal.touch()
            seen["metrics"].append(step(built))
        equal.unlink()
        seen["last"] = step(built)
        seen["after"] = digest(built)
        seen["text"] = warnings
        logging.getLogger("grpo_mega.stages.watch").removeHandler(handler)
        seen["tokens"] = built.stage.watch.tokens
    return seen


def continued() -> dict[str, Any]:
    """A step whose groups are half without signal, stopped behind each of its updates, beside one left in peace."""
    return _continued("")


def continued_by_step() -> dict[str, Any]:
    """The like, in which completions earn the same and their steps do not."""
    return _continued("_by_step", "reward.terms=[{name:own,function:step_rewards:stepwise}]", *PROCESS)


def continued_with_others() -> dict[str, Any]:
    """The like, in which other prompts take the place of those whose groups have no signal."""
    return _continued("_with_others", "algorithm.groups_without_signal=refill")


PROCESS = ("algorithm.supervision=process", "algorithm.advantage_std=none")


def _continued(name: str, *more: str) -> dict[str, Any]:
    overrides = ["algorithm.epochs=2", "algorithm.mini_batches=3", "algorithm.aggregation=sequence_mean", *more]
    half.touch()
    with grpo(f"peace{name}", *overrides) as built:
        watched = watched_updates(built)
        metrics = built.stage.step(built).metrics
        expected, updates = digest(built), [outcome.metrics for _, outcome in watched]
        with_signal = metrics["rollout/groups_with_signal"] * built.stage.algorithm.prompts_per_step
        completions = [a[m] for part, _ in watched for a, m in zip(*_by_sample(part), strict=True)]
        within = sum(len(advantages.unique()) > 1 for advantages in completions)
    reports: list[str] = []
    again = None
    for _ in updates:
        with grpo(f"continued{name}", *overrides) as built:
            reports.append(built.where())
            before = [*built.stage.in_progress.updates] if built.stage.in_progress else []
            watched = stopped_after_update(built)
            try:
                built.stage.step(built)
                again = digest(built)
            except Interrupted:
                built.save()
    half.unlink()
    return {
        "with_signal": with_signal,
        "updates": len(updates),
        "within": within,
        "steps": metrics.get("rollout/steps_mean", 0.0),
        "reports": reports,
        "same": again == expected,
        "losses": [*before, *(outcome.metrics for _, outcome in watched)] == updates,
    }


def refilled() -> dict[str, Any]:
    """Steps that draw prompts for groups without signal: in peace, stopped among the first answers, and bounded."""
    how = ("algorithm.groups_without_signal=refill", "algorithm.mini_batches=2")
    half.touch()
    with grpo("refilled", *how) as built:
        numbered = [built.stage.data.train.prompt_at(k) for k in range(40)]
        metrics, drawn, expected = step(built), built.stage.data.train.cursor, digest(built)
    with grpo("refilled_again", *how) as built:
        score = built.stage.rollouts.score
        built.stage.rollouts.score = lambda samples: built.stop._record(signal.SIGTERM, None) or score(samples)
        stopped = None
        try:
            built.stage.step(built)
        except Interrupted:
            stopped = built.stage.data.train.cursor
        built.stage.rollouts.score = score
        built.stop = StopRequest()
        again = step(built), built.stage.data.train.cursor, digest(built)
    equal.touch()
    with grpo("refilled_in_vain", *how, "algorithm.refill_limit=3") as built:
        vain = step(built) | {"drawn": built.stage.data.train.cursor}
    equal.unlink()
    half.unlink()
    has_signal = [sum(prompt.token_ids) % 2 for prompt in numbered]
    first = next(n for n in range(len(has_signal)) if sum(has_signal[:n]) == 4)
    return {
        "metrics": metrics, "drawn": drawn, "expected": first, "stopped": stopped, "vain": vain,
        "same": again == (metrics, drawn, expected),
    }  # fmt: skip


def _by_sample(batch: Batch) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Advantages and mask of each sample."""
    return batch.advantage.split(batch.lengths.tolist()), batch.mask.split(batch.lengths.tolist())


def corrections() -> dict[str, Any]:
    """Sequences about which engine and trainer disagree by a known ratio, and a step in which they agree."""
    overrides = ["model=tiny_dense", "algorithm.correction=truncate", "algorithm.correction_level=sequence_mean"]
    overrides += ["algorithm.correction_cap=1.1", "algorithm.rejection_floor=0.8", "algorithm.rejection_cap=1.25"]
    overrides += ["algorithm.entropy_coef=0.1"]  # a sequence that is left out has no entropy term either
    with grpo("corrections", "algorithm.aggregation=token_mean", *overrides) as built:
        policy, config = built.model, built.stage.config
        rollout = generated(built, REWARDS)
        batch = make_batch(rollout, config, policy.topology, 0)
        old, apart = policy.logprobs(batch, 1.0), 0.3 * torch.sin(batch.numbers)
        engine = old - apart.repeat_interleave(batch.lengths)
        batch = corrected(batch.with_(old_logprob=old, rollout_logprob=engine), config.algorithm, policy.topology)
        current, (mini_batch,) = StepInProgress(rollout.groups, batch), mini_batches(rollout.groups, config, 0)
        part, loss = batch_of(current, mini_batch, config, 0), loss_of(config.algorithm, built.stage.on_policy)
        found, with_factors = policy.gradients(part, loss, 1.0), policy.whole_gradients()
        weight = part.weight.masked_fill(part.correction == 0, 0.0)
        by_hand = part.with_(advantage=part.advantage * part.correction, weight=weight, correction=None)
        none = replace(config.algorithm, correction="none", correction_level="token", rejection_floor=0.0)
        policy.gradients(by_hand, loss_of(replace(none, rejection_cap=math.inf), on_policy=False), 1.0)
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


def stopped_after_update(built: Run) -> list[tuple[Batch, Any]]:
    """Every update brings a signal. Filled as by `watched_updates`."""
    watched, update = watched_updates(built), built.model.update

    def stopped(*arguments: Any) -> Any:
        built.stop.received = "SIGTERM"
        return update(*arguments)

    built.model.update = stopped  # type: ignore[method-assign]
    return watched


def resumed_without_update() -> list[dict[str, Any]]:
    """Checkpoints taken before the optimizer ever moved, plain and sharded, are continued."""
    return [_resumed(f"resumed_{sharded}", f"optimizer.distributed={sharded}") for sharded in ("false", "true")]


def _resumed(name: str, override: str) -> dict[str, Any]:
    equal.touch()
    with grpo(name, override) as built:
        step(built)
        built.save()
    equal.unlink()
    with grpo(name, override) as built:
        return {"step": built.step, "metrics": step(built)}


STATEFUL = (
    *("algorithm.kl_coef=0.1", "optimizer.average_decay=0.9", "optimizer.schedule=linear", "optimizer.lr_floor=0.1"),
    *("data.train_size=64", "data.curriculum=frontier"),
)
"""A run that has all that GRPO can have to save."""


def run_state() -> dict[str, Any]:
    """Generators and the stage through a checkpoint, and a state that was saved with other libraries."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    with grpo("run_state", *STATEFUL) as built:
        fresh = stage_state.held(built.stage.state_dict() | {"before": {}})  # measured when the stage begins
        step(built)
        equal.touch()
        step(built)
        equal.unlink()
        built.stage.watch.evaluated({ACCURACY: 0.5, LEARNED: 0.25})
        built.save()
        before, state = stage_state.held(built.stage), stage_state.held(built.stage.state_dict())
        expected = [random.random(), float(torch.rand(()))]
    with grpo("run_state", *STATEFUL) as built:
        seen: dict[str, Any] = {"expected": expected, "drawn": [random.random(), float(torch.rand(()))]}
        seen["lost"] = stage_state.lost(before, stage_state.held(built.stage))
        seen["unmoved"] = stage_state.unmoved(state, fresh)
        logging.getLogger("grpo_mega.observe.summary").addHandler(handler)
        state = built.state_dict()
        built.load_state_dict(state)
        seen["same versions"] = len(warnings)
        built.load_state_dict(state | {"versions": state["versions"] | {"torch": "1.0", "python": "3.0"}})
    return seen | {"warnings": warnings, "torch": version("torch")}


def on_policy() -> list[dict[str, float]]:
    """Single updates, with warm-up, at a temperature, and with a reference that is refreshed behind step 2."""
    overrides = ["algorithm.kl_coef=0.1", "algorithm.reference_refresh=2", "optimizer.warmup_steps=4", "run.steps=3"]
    overrides += ["rollout.temperature=0.7"]
    with grpo("on_policy", *overrides) as built:
        built.execute()
    return of_steps(Path(root) / "on_policy")


def two_epochs() -> dict[str, Any]:
    """Both updates of a step with two epochs, and the policy versions of samples before and after it."""
    with grpo("two_epochs", "algorithm.epochs=2", "optimizer.lr=1e-2") as built:
        updates, versions = watched_updates(built), [version_of_samples(built)]
        metrics = step(built)
        versions.append(version_of_samples(built))
        (batch, first), (_, second) = updates
        moved = (second.outputs - first.outputs)[batch.mask].double()
        return {
            "first": first.metrics,
            "second": second.metrics,
            "step": metrics,
            "ratio": moved.exp().mean().item(),
            "trained": built.stage.watch.tokens["trained"],
            "completion_tokens": int(batch.mask.sum()),
            "versions": versions,
        }


def version_of_samples(built: Run) -> list[int]:
    """First token and policy version of the only segment of a sample that is drawn now."""
    rollout = built.stage.rollouts.answers(built, built.stage.data.test[:1], 2)
    ((segment,), _) = (answer.segments for answer in rollout.answers)
    return [*segment]


def watched_updates(built: Run) -> list[tuple[Batch, Any]]:
    """A list that will hold every update's mini-batch and result."""
    updates, update = [], built.model.update

    def watched(mini_batch: Batch, *how: Any) -> Any:
        updates.append((mini_batch, update(mini_batch, *how)))
        return updates[-1][1]

    built.model.update = watched  # type: ignore[method-assign]
    return updates


def two_mini_batches() -> dict[str, Any]:
    """A step of two updates, each on half of the samples, and one without signal, both at a temperature."""
    overrides = ["algorithm.mini_batches=2", "algorithm.kl_coef=0.1", "rollout.temperature=0.7", "optimizer.lr=1e-2"]
    with grpo("two_mini_batches", *overrides, "run.sample_groups_per_step=4") as built:
        updates, record = watched_updates(built), built.stage.step(built)
        built.step += 1
        seen: dict[str, Any] = {"step": record.metrics, "updates": [outcome.metrics for _, outcome in updates]}
        seen["shown"] = [[shown["new_logprobs"], shown["entropies"]] for shown in record.shown]
        computed = {}
        for part, found in updates:
            for number, of_sample in zip(part.numbers.tolist(), computed_by(part, found), strict=True):
                computed[number] = of_sample
        seen["computed"] = [computed[number] for number in sorted(computed)]
        adam = built.stage.config.optimizer
        seen["noise after two"] = noise_in_batches(*moment_sums(built.model.optimizer), 2, adam.beta1, adam.beta2)
        batch, second = updates[1]
        moved = (second.outputs - batch.old_logprob)[batch.mask].double()
        seen |= {"ratio": moved.exp().mean().item(), "tokens": [int(batch.mask.sum()) for batch, _ in updates]}
        equal.touch()
        seen["without_signal"] = step(built)
        equal.unlink()
    return seen


def computed_by(part: Batch, found: Any) -> list[list[list[float]]]:
    """Log-probs and entropies of each completion of a mini-batch, as its update has computed them."""
    lengths = part.lengths.tolist()
    columns = (part.mask.split(lengths), found.outputs.split(lengths), found.entropies.split(lengths))
    return [
        [logprobs[mask].tolist(), entropies[mask].tolist()] for mask, logprobs, entropies in zip(*columns, strict=True)
    ]


def stale_engine() -> dict[str, Any]:
    """Two steps with samples of other weights than those that are trained."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    with grpo("stale_engine") as built:
        logging.getLogger("grpo_mega.stages.watch").addHandler(handler)
        engine = built.stage.rollouts.engine
        poll, parameters = engine.poll, [*built.model.chunks.parameters()]

        def stale(*arguments: Any) -> Any:
            with torch.no_grad():
                for parameter in parameters:
                    parameter.mul_(1.1)
                samples = poll(*arguments)
                for parameter in parameters:
                    parameter.div_(1.1)
            return samples

        engine.poll = stale  # type: ignore[method-assign]
        return {"steps": [step(built), step(built)], "warnings": warnings}


def begun() -> dict[str, Any]:
    """A run that was stopped between the updates of its second step, started again as one of a single step."""
    with grpo("begun", "algorithm.epochs=2") as built:
        step(built)
        stopped_after_update(built)
        try:
            step(built)
        except Interrupted:
            built.save()
    with grpo("begun", "algorithm.epochs=2", "run.steps=1") as built:
        where = built.where()
        built.execute()
        left = built.stage.in_progress is not None
        updates = [built.stage.schedule.updates, built.model.updates]
        return {"where": where, "steps": built.step, "updates": updates, "left": left}


def drawing_and_scoring() -> dict[str, Any]:
    """The same prompts in waves of several sizes, and what the reward made of the samples."""
    with grpo("drawing") as built:
        prompts, decode, rollouts = built.stage.data.test, built.stage.data.tokenizer.decode, built.stage.rollouts
        drawn = {}
        for concurrent in (512, 8, 1):
            engine = EmbeddedEngine(built.model, decode, concurrent)
            drawn[concurrent] = generate(engine, prompts, 4, rollouts.sampling(3), version=0)
        again = generate(rollouts.engine, prompts, 4, rollouts.sampling(4), version=0)
        rollout = rollouts.produced(built, "generate", prompts, 4, 3)
        samples, answers = [*rollout.samples.values()], [*rollout.answers]
        return {
            "tokens": {c: [[*s.token_ids] for s in of_size] for c, of_size in drawn.items()},
            "logprobs": {c: [x for s in of_size for x in s.logprobs] for c, of_size in drawn.items()},
            "next_draw": [[*s.token_ids] for s in again],
            "order": [[s.prompt.id, s.index] for s in samples],
            "same": samples == drawn[512],
            "expected_order": [[p.id, i] for p in prompts for i in range(4)],
            "own": [answer.score.terms["own"] for answer in answers],
            "expected_own": [step_rewards.scored(s) for s in drawn[512]],
            "totals": [answer.score.total for answer in answers],
            "format": [answer.score.terms["format"] for answer in answers],
        }


def longer() -> dict[str, Any]:
    """Steps before and after completions may be longer, by a model that knows more tokens than the tokenizer."""
    more = ["rollout.longer_from_step=1", "rollout.longer_max_new_tokens=20", "rollout.stop=[]", "model.vocab_size=64"]
    with grpo("longer", *more, "algorithm.aggregation=constant") as built:
        rollout = generated(built, [(1, 0, 1, 0)])
        seen: dict[str, Any] = {"lengths": [], "denominators": [], "evaluated": [], "samples": []}
        for _ in range(2):
            stage, config = built.stage, built.stage.config
            current = StepInProgress(rollout.groups, make_batch(rollout, config, built.model.topology, built.step))
            (mini_batch,) = mini_batches(rollout.groups, config, built.step)
            part = batch_of(current, mini_batch, config, built.step)
            seen["denominators"].append(1 / part.weight.max().item())
            evaluated = stage.rollouts.evaluate(built, "validation", stage.data.validation, built.step)
            seen["evaluated"].append(evaluated["length"])
            samples = stage.rollouts.answers(built, stage.data.test, 4).samples.values()
            seen["lengths"].append(sorted({len(s.token_ids) for s in samples}))
            seen["samples"] += [[[*s.token_ids], s.text] for s in samples]
            stage.step(built)
            built.step += 1
        seen["tokens"] = built.stage.data.tokenizer.tokens
    try:
        grpo("too_few", "model.vocab_size=25").__enter__()
    except ValueError as error:
        seen["refused"] = str(error)
        leave_layout()
    return seen


def averaged() -> dict[str, Any]:
    """What an evaluation generates when the weights are averaged, and what the average and the policy would."""
    with grpo("averaged", "optimizer.average_decay=0.9", "optimizer.lr=0.05") as built:
        expected = [weight.detach().clone() for weight in built.model.chunks.parameters()]
        for _ in range(2):
            step(built)
            for mean, weight in zip(expected, built.model.chunks.parameters(), strict=True):
                mean.copy_(0.9 * mean + 0.1 * weight.detach())
        rollouts, problems = built.stage.rollouts, built.stage.data.validation
        pairs = [*zip(expected, built.model.chunks.parameters(), strict=True)]
        apart = max(float((mean - weight).abs().max()) for mean, weight in pairs)
        scored: list[Any] = []
        score = rollouts.score
        rollouts.score = lambda samples: scored.append([[*s.token_ids] for s in samples]) or score(samples)
        rollouts.evaluate(built, "validation", problems, 0)
        with rollouts.average.swapped_in():
            off = max(float((mean - weight).abs().max()) for mean, weight in pairs)
            rollouts.produced(built, "evaluate", problems, 1, 0)
        rollouts.produced(built, "evaluate", problems, 1, 0)
        return dict(zip(("evaluated", "of average", "of policy"), scored, strict=True)) | {"apart": apart, "off": off}


if __name__ == "__main__":
    parts = (
        batches,
        gradients,
        corrections,
        kl_in_rewards,
        equal_rewards,
        continued,
        refilled,
        resumed_without_update,
        run_state,
        on_policy,
        two_epochs,
        two_mini_batches,
        stale_engine,
        begun,
        drawing_and_scoring,
        longer,
        averaged,
    )
    if "all" in sys.argv[2:]:
        parts = (*parts, continued_by_step, continued_with_others)
    print(json.dumps({part.__name__: part() for part in parts}))

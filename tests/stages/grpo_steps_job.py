"""One rank that drives real runs of GRPO, piece by piece, and prints what it saw as JSON: {part: observations}.

Usage: grpo_steps_job.py FOLDER [all] ; without `all` it leaves out what takes longest.
"""

from __future__ import annotations

import json
import logging
import random
import signal
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import stage_state
import step_rewards
import torch
from grpo_formulas import batches, corrections, gradients, kl_in_rewards
from grpo_run import (
    WITHOUT_SIGNAL,
    digest,
    equal,
    generated,
    grpo,
    half,
    root,
    step,
    stopped_after_update,
    watched_updates,
)
from metric_lines import of_steps

from grpo_mega.models.noise import moment_sums, noise_in_batches
from grpo_mega.models.topology import leave_layout
from grpo_mega.platform.stop import Interrupted, StopRequest
from grpo_mega.rollout.embedded import EmbeddedEngine
from grpo_mega.rollout.stream import generate
from grpo_mega.run import Run
from grpo_mega.stages.learned_reward import ACCURACY, LEARNED
from grpo_mega.stages.step import batch_of_step, batch_of_update, step_of
from grpo_mega.types import Batch


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
        logging.getLogger("grpo_mega.stages.step_report").addHandler(handler)
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
        logging.getLogger("grpo_mega.stages.step_report").removeHandler(handler)
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
    """Steps that draw prompts for groups without signal: in peace, stopped among the first completions, and bounded."""
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
    rollout = built.stage.rollouts.produced(built, "generate", built.stage.data.test[:1], 2, built.step)
    ((segment,), _) = (info.segments for info in rollout.infos)
    return [*segment]


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
        adam = built.stage.optimizer
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
        logging.getLogger("grpo_mega.stages.step_report").addHandler(handler)
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
        samples, infos = [*rollout.samples.values()], [*rollout.infos]
        return {
            "tokens": {c: [[*s.token_ids] for s in of_size] for c, of_size in drawn.items()},
            "logprobs": {c: [x for s in of_size for x in s.logprobs] for c, of_size in drawn.items()},
            "next_draw": [[*s.token_ids] for s in again],
            "order": [[s.prompt.id, s.index] for s in samples],
            "same": samples == drawn[512],
            "expected_order": [[p.id, i] for p in prompts for i in range(4)],
            "own": [info.score.terms["own"] for info in infos],
            "expected_own": [step_rewards.scored(s) for s in drawn[512]],
            "totals": [info.score.total for info in infos],
            "format": [info.score.terms["format"] for info in infos],
        }


def longer() -> dict[str, Any]:
    """Steps before and after completions may be longer, by a model that knows more tokens than the tokenizer."""
    more = ["rollout.longer_from_step=1", "rollout.longer_max_new_tokens=20", "rollout.stop=[]", "model.vocab_size=64"]
    with grpo("longer", *more, "algorithm.aggregation=constant") as built:
        rollout = generated(built, [(1, 0, 1, 0)])
        seen: dict[str, Any] = {"lengths": [], "denominators": [], "evaluated": [], "samples": []}
        for _ in range(2):
            stage, options = built.stage, built.stage.options
            step = step_of(rollout.groups, options, built.step)
            step.batch = batch_of_step(rollout, step, options, built.model.topology)
            part = batch_of_update(step, *step.mini_batches, options, built.step)
            seen["denominators"].append(1 / part.weight.max().item())
            evaluated = stage.rollouts.evaluate(built, "validation", stage.data.validation, built.step)
            seen["evaluated"].append(evaluated["length"])
            samples = stage.rollouts.produced(built, "generate", stage.data.test, 4, built.step).samples.values()
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

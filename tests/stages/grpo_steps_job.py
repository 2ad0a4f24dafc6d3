"""One rank that drives real runs of GRPO, piece by piece, and prints what it saw as JSON: {part: observations}."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import plain_grpo
import step_rewards
import torch

from grpo_mega import platform
from grpo_mega.config.load import compose_config
from grpo_mega.config.schema import Config
from grpo_mega.platform.stop import Interrupted

here = platform.start()

from metric_lines import of_steps  # noqa: E402

from grpo_kernels import linear_token_loss  # noqa: E402
from grpo_mega.assemble import assemble  # noqa: E402
from grpo_mega.checkpoint.step_in_progress import StepInProgress  # noqa: E402
from grpo_mega.data import build_data  # noqa: E402
from grpo_mega.models.losses import LossFound, grpo_loss  # noqa: E402
from grpo_mega.models.topology import leave_layout  # noqa: E402
from grpo_mega.reward.compose import build_reward  # noqa: E402
from grpo_mega.rollout.embedded import EmbeddedEngine  # noqa: E402
from grpo_mega.run import Run  # noqa: E402
from grpo_mega.stages.batches import make_batch, mini_batches, shares  # noqa: E402
from grpo_mega.types import Batch, Group, pack  # noqa: E402

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
    config = compose_config([*SMALL, f"run.root={root}", f"run.name={name}", *overrides])
    with assemble(config, here, build_data(config), build_reward(config.reward)) as built:
        built.enter(built.stages[-1])
        yield built


def generated(built: Run, rewards: list[tuple[float, ...]]) -> list[Group]:
    """Real groups with given rewards."""
    rollouts = built.stage.rollouts
    samples = rollouts.engine.generate(built.stage.data.test[: len(rewards)], 4, rollouts.sampling(0), version=0)
    return [Group(tuple(samples[4 * i : 4 * i + 4]), r) for i, r in enumerate(rewards)]


def step(built: Run) -> dict[str, float]:
    record = built.stage.step(built)
    built.step += 1
    return record.metrics


def rows(batch: Batch, vector: torch.Tensor) -> list[list[float]]:
    return [part.tolist() for part in vector.split(batch.lengths.tolist())]


def digest(built: Run) -> str:
    """Of every weight, routing bias, optimizer moment and reference weight."""
    found = hashlib.sha256()
    for part in getattr(built.policy.optimizer, "chained_optimizers", [built.policy.optimizer]):
        moments = part.optimizer.state.values()
        tensors = [t for state in moments for t in state.values() if torch.is_tensor(t)]
        assert tensors, "there are no moments to compare"
        for tensor in tensors:
            found.update(tensor.numpy().tobytes())
    held = built.stage.reference.held if built.stage.reference else []
    for model in (built.policy.chunks.state_dict(), dict(enumerate(held))):
        for tensor in model.values():
            if torch.is_tensor(tensor):
                found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()


REWARDS = [(1, 0, 1, 0), (1, 1, 1, 1), (0, 0, 0, 0), (5, 5, 5, 0)]
"""Of four groups, of which two have no signal."""


def batches() -> dict[str, Any]:
    """Packing of groups with and without signal, and the mini-batches made of them, by what becomes of the latter."""
    seen: dict[str, Any] = {}
    with grpo("batches", "algorithm.aggregation=token_mean", "algorithm.epochs=2") as built:
        groups = generated(built, REWARDS)
        config, samples = built.stage.config, [s for group in groups for s in group.samples]
        seen["lengths"] = [len(s.token_ids) for s in samples]
        seen["prompt_lengths"] = [len(s.prompt.token_ids) for s in samples]
        seen["expected_tokens"] = [[*s.prompt.token_ids, *s.token_ids] for s in samples]
        for name, without_signal, kl_coef in WITHOUT_SIGNAL:
            algorithm = config.algorithm
            algorithm.groups_without_signal, algorithm.kl_coef, algorithm.mini_batches = without_signal, kl_coef, 1
            batch = make_batch(groups, algorithm)
            found = {"tokens": rows(batch, batch.tokens), "advantages": rows(batch, batch.advantage)}
            found["only_equal"] = make_batch(groups[1:3], algorithm) is None
            found["nothing_to_do"] = len(shares(groups[1:3], config, 0))
            for parts in (1, 3, 12, 16):
                algorithm.mini_batches = parts
                step = StepInProgress(groups, batch)
                found[f"parts_{parts}"] = [
                    {
                        "sequences": [found["tokens"].index(row) for row in rows(part, part.tokens)],
                        "dealt": [share.trained, share.left_out],
                        "weight": part.weight.double().sum().item(),
                        "tokens": int(part.mask.sum()),
                        "off_mask": part.weight[~part.mask].abs().sum().item(),
                    }
                    for part, share in zip(mini_batches(step, config, 0), shares(groups, config, 0), strict=True)
                ]
            seen[name] = found
    return seen


WITHOUT_SIGNAL = (("drop", "drop", 0.1), ("left out", "count", 0.0), ("kl", "count", 0.1))
"""Name, `algorithm.groups_without_signal` and `algorithm.kl_coef` of all that can become of a group without signal."""


def gradients() -> dict[str, dict[str, Any]]:
    """Gradients of a step's mini-batches beside those of the papers' formulas over every sampled sequence."""
    seen = {}
    dense = ["model=tiny_dense", "algorithm.clip_high=0.28", "algorithm.dual_clip=null"]
    with grpo("gradients", *dense) as built:
        groups = generated(built, REWARDS)
        everything = pack([sample for group in groups for sample in group.samples])
        logprob = built.policy.logprobs(everything, 1.0)
        shift = torch.sin(torch.arange(len(logprob)))  # so far away that ratios clip and the KL term has a gradient
        everything = everything.with_(old_logprob=logprob + 0.4 * shift, ref_logprob=logprob - 0.3 * shift.roll(1))
        for objective, aggregation, std, kl_coef, entropy_coef, parts in GRADIENTS:
            overrides = [f"algorithm.objective={objective}", f"algorithm.aggregation={aggregation}"]
            overrides += [f"algorithm.advantage_std={std}", f"algorithm.kl_coef={kl_coef}"]
            overrides += [f"algorithm.entropy_coef={entropy_coef}", f"algorithm.mini_batches={parts}"]
            config = compose_config([*SMALL, *dense, f"run.root={root}", "run.name=gradients", *overrides])
            key = f"{objective}, {aggregation}, kl {kl_coef}, entropy {entropy_coef}, {parts} mini-batches"
            seen[key] = _gradients(built, config, groups, everything, logprob)
    return seen


GRADIENTS = [
    *(("ppo", aggregation, std, kl_coef, 0.0, parts)
      for aggregation, std in (("sequence_mean", "sample"), ("constant", "none"), ("token_mean", "population"))
      for kl_coef in (0.0, 0.2) for parts in (1, 2, 8)),
    ("gspo", "sequence_mean", "sample", 0.0, 0.0, 4),
    ("gspo", "sequence_mean", "sample", 0.2, 0.0, 4),
    ("ppo", "sequence_mean", "sample", 0.0, 0.1, 2),
]  # fmt: skip


def _gradients(
    built: Run, config: Config, groups: list[Group], everything: Batch, logprob: torch.Tensor
) -> dict[str, Any]:
    algorithm, longest = config.algorithm, config.rollout.max_new_tokens
    loss = grpo_loss(algorithm, on_policy=False)
    batch = make_batch(groups, algorithm)
    computed = [i for i, row in enumerate(rows(everything, everything.tokens)) if row in rows(batch, batch.tokens)]
    known = everything.select(computed)
    step = StepInProgress(groups, batch.with_(old_logprob=known.old_logprob, ref_logprob=known.ref_logprob))
    found, total = {}, 0.0
    for mini_batch, share in zip(mini_batches(step, config, 0), shares(groups, config, 0), strict=True):
        tokens = [everything.lengths[i] - everything.prompt_lengths[i] for i in (*share.trained, *share.left_out)]
        part = len(tokens) / len(everything.lengths)
        if algorithm.aggregation == "token_mean":
            part = float(sum(tokens) / everything.mask.sum())
        built.policy.gradients(mini_batch, loss, 1.0)
        for name, gradient in built.policy.whole_gradients().items():
            found[name] = found.get(name, 0.0) + part * gradient.double()
        total += part
    by_logprob = plain_grpo.gradient(
        [(group.rewards, [len(sample.token_ids) for sample in group.samples]) for group in groups],
        *(x[everything.mask] for x in (logprob, everything.old_logprob, everything.ref_logprob)),
        algorithm,
        longest,
    )
    built.policy.gradients(*_as_given(everything, by_logprob, algorithm.entropy_coef))
    exact = {name: gradient.double() for name, gradient in built.policy.whole_gradients().items()}
    assert exact.keys() == found.keys()
    errors = [float((found[name] - exact[name]).norm() / exact[name].norm()) for name in exact]
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

    def loss(hidden: torch.Tensor, matrix: torch.Tensor, scored: Any, **how: Any) -> LossFound:
        def linear(logprob: torch.Tensor, entropy: torch.Tensor, part: slice) -> tuple[torch.Tensor, dict]:
            losses = scored.advantage[part] * logprob - entropy_coef * scored.weight[part] * entropy
            return losses, {"loss": losses, "logprob": logprob}

        total, of = linear_token_loss(hidden, matrix, scored.tokens, linear, **how)
        return LossFound(total, of["loss"], of["logprob"], {})

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
        step(built)
        seen["after"] = digest(built)
        seen["text"] = warnings
        logging.getLogger("grpo_mega.stages.watch").removeHandler(handler)
        seen["tokens"] = built.stage.tokens
    return seen


def continued() -> dict[str, Any]:
    """A step whose groups are half without signal, stopped behind each of its updates, beside one left in peace."""
    overrides = ["algorithm.epochs=2", "algorithm.mini_batches=3", "algorithm.aggregation=sequence_mean"]
    half.touch()
    with grpo("peace", *overrides) as built:
        watched = watched_updates(built)
        groups = built.stage.step(built).groups
        expected, updates = digest(built), [found.metrics for _, found in watched]
        with_signal = sum(len(set(group.rewards)) > 1 for group in groups)
    places: list[str] = []
    again = None
    for _ in updates:
        with grpo("continued", *overrides) as built:
            places.append(built.where())
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
        "places": places,
        "same": again == expected,
        "losses": [*before, *(found.metrics for _, found in watched)] == updates,
    }


def stopped_after_update(built: Run) -> list[tuple[Batch, Any]]:
    """Every update brings a signal. Filled as by `watched_updates`."""
    watched, update = watched_updates(built), built.policy.update

    def stopped(*arguments: Any) -> Any:
        built.stop.received = "SIGTERM"
        return update(*arguments)

    built.policy.update = stopped  # type: ignore[method-assign]
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


def run_state() -> dict[str, Any]:
    """Generators through a checkpoint, and a state that was saved with other libraries."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    with grpo("run_state") as built:
        built.save()
        expected = [random.random(), float(torch.rand(()))]
    with grpo("run_state") as built:
        seen: dict[str, Any] = {"expected": expected, "drawn": [random.random(), float(torch.rand(()))]}
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
    """Both updates of a step with two epochs."""
    with grpo("two_epochs", "algorithm.epochs=2", "optimizer.lr=1e-2") as built:
        updates = watched_updates(built)
        metrics = step(built)
        (batch, first), (_, second) = updates
        moved = (second.logprob - first.logprob)[batch.mask].double()
        return {
            "first": first.metrics,
            "second": second.metrics,
            "step": metrics,
            "ratio": moved.exp().mean().item(),
            "trained": built.stage.tokens["trained"],
            "completion_tokens": int(batch.mask.sum()),
        }


def watched_updates(built: Run) -> list[tuple[Batch, Any]]:
    """Filled with every update's mini-batch and what it found."""
    updates, update = [], built.policy.update

    def watched(mini_batch: Batch, *how: Any) -> Any:
        updates.append((mini_batch, update(mini_batch, *how)))
        return updates[-1][1]

    built.policy.update = watched  # type: ignore[method-assign]
    return updates


def two_mini_batches() -> dict[str, Any]:
    """A step of two updates, each on half of the samples, and one without signal, both at a temperature."""
    overrides = ["algorithm.mini_batches=2", "algorithm.kl_coef=0.1", "rollout.temperature=0.7", "optimizer.lr=1e-2"]
    with grpo("two_mini_batches", *overrides) as built:
        updates = watched_updates(built)
        seen = {"step": step(built), "updates": [found.metrics for _, found in updates]}
        batch, second = updates[1]
        moved = (second.logprob - batch.old_logprob)[batch.mask].double()
        seen |= {"ratio": moved.exp().mean().item(), "tokens": [int(batch.mask.sum()) for batch, _ in updates]}
        equal.touch()
        seen["without_signal"] = step(built)
        equal.unlink()
    return seen


def stale_engine() -> dict[str, Any]:
    """Two steps with samples of other weights than those that are trained."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    with grpo("stale_engine") as built:
        logging.getLogger("grpo_mega.stages.watch").addHandler(handler)
        engine = built.stage.rollouts.engine
        generate, parameters = engine.generate, [*built.policy.chunks.parameters()]

        def stale(*arguments: Any) -> Any:
            with torch.no_grad():
                for parameter in parameters:
                    parameter.mul_(1.1)
                samples = generate(*arguments)
                for parameter in parameters:
                    parameter.div_(1.1)
            return samples

        engine.generate = stale  # type: ignore[method-assign]
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
        return {"where": where, "steps": built.step, "updates": built.stage.updates, "left": left}


def drawing_and_scoring() -> dict[str, Any]:
    """The same prompts in waves of several sizes, and what the reward made of the samples."""
    with grpo("drawing") as built:
        prompts, decode, rollouts = built.stage.data.test, built.stage.data.tokenizer.decode, built.stage.rollouts
        drawn = {}
        for concurrent in (512, 8, 1):
            engine = EmbeddedEngine(built.policy, decode, concurrent)
            drawn[concurrent] = engine.generate(prompts, 4, rollouts.sampling(0), version=3)
        again = rollouts.engine.generate(prompts, 4, rollouts.sampling(0), version=4)
        groups = rollouts.scored_groups(drawn[512], 4)
        return {
            "tokens": {c: [s.token_ids for s in samples] for c, samples in drawn.items()},
            "logprobs": {c: [x for s in samples for x in s.logprobs] for c, samples in drawn.items()},
            "next_version": [s.token_ids for s in again],
            "order": [[s.prompt.id, s.index] for g in groups for s in g.samples],
            "expected_order": [[p.id, i] for p in prompts for i in range(4)],
            "own": [x for g in groups for x in g.components["own"]],
            "expected_own": [step_rewards.scored(s) for s in drawn[512]],
            "totals": [x for g in groups for x in g.rewards],
            "format": [x for g in groups for x in g.components["format"]],
        }


def longer() -> dict[str, Any]:
    """Steps before and after completions may be longer, by a model that knows more tokens than the tokenizer."""
    more = ["rollout.longer_from_step=1", "rollout.longer_max_new_tokens=20", "rollout.stop=[]", "model.vocab_size=64"]
    with grpo("longer", *more, "algorithm.aggregation=constant") as built:
        group = generated(built, [(1, 0, 1, 0)])
        seen: dict[str, Any] = {"lengths": [], "denominators": [], "evaluated": [], "samples": []}
        for _ in range(2):
            stage, config = built.stage, built.stage.config
            (part,) = mini_batches(StepInProgress(group, make_batch(group, config.algorithm)), config, built.step)
            seen["denominators"].append(1 / part.weight.max().item())
            evaluated = stage.rollouts.evaluate(built, "validation", stage.data.validation, built.step)
            seen["evaluated"].append(evaluated["length"])
            groups = stage.step(built).groups
            samples = [s for group in groups for s in group.samples]
            seen["lengths"].append(sorted({len(s.token_ids) for s in samples}))
            seen["samples"] += [[s.token_ids, s.text] for s in samples]
            built.step += 1
        seen["tokens"] = built.stage.data.tokenizer.tokens
    try:
        grpo("too_few", "model.vocab_size=25").__enter__()
    except ValueError as error:
        seen["refused"] = str(error)
        leave_layout()
    return seen


if __name__ == "__main__":
    parts = (
        batches,
        gradients,
        equal_rewards,
        continued,
        resumed_without_update,
        run_state,
        on_policy,
        two_epochs,
        two_mini_batches,
        stale_engine,
        begun,
        drawing_and_scoring,
        longer,
    )
    print(json.dumps({part.__name__: part() for part in parts}))

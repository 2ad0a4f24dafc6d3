"""One rank that drives real trainers, piece by piece, and prints what it saw as JSON: {part: observations}."""

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

import torch
import trainer_rewards

from grpo_mega import platform
from grpo_mega.config.load import compose_config
from grpo_mega.platform.stop import Interrupted

here = platform.start()

from grpo_mega.assemble import assemble  # noqa: E402
from grpo_mega.data import build_data  # noqa: E402
from grpo_mega.observe.metrics import read_metrics  # noqa: E402
from grpo_mega.policy.topology import leave_layout  # noqa: E402
from grpo_mega.reward.compose import build_reward  # noqa: E402
from grpo_mega.rollout.embedded import EmbeddedEngine  # noqa: E402
from grpo_mega.trainer import Trainer  # noqa: E402
from grpo_mega.types import Batch, Group  # noqa: E402

SMALL = [
    "experiment=tiny",
    "base=none",
    "layout=single",
    "reward.terms=[{name:own,function:trainer_rewards:scored},{name:format,weight:0.5}]",
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


@contextmanager
def trainer(name: str, *overrides: str) -> Iterator[Trainer]:
    """A trainer with random weights that has begun, or continues in run directory `name`."""
    os.environ["MASTER_PORT"] = "0"  # any free one, for each job of this process
    platform.join_processes(here)
    config = compose_config([*SMALL, f"run.root={root}", f"run.name={name}", *overrides])
    with assemble(config, here, build_data(config), build_reward(config.reward)) as built:
        yield built


def generated(built: Trainer, rewards: list[tuple[float, ...]]) -> list[Group]:
    """Real groups with given rewards."""
    samples = built.engine.generate(built.data.test[: len(rewards)], 4, built.sampling(0), version=0)
    return [Group(tuple(samples[4 * i : 4 * i + 4]), r) for i, r in enumerate(rewards)]


def step(built: Trainer) -> dict[str, float]:
    metrics, _ = built.train_step()
    built.end_step()
    return metrics


def rows(batch: Batch, vector: torch.Tensor) -> list[list[float]]:
    return [part.tolist() for part in vector.split(batch.lengths.tolist())]


def digest(built: Trainer) -> str:
    """Of every weight, routing bias, optimizer moment and reference weight."""
    found = hashlib.sha256()
    for part in getattr(built.policy.optimizer, "chained_optimizers", [built.policy.optimizer]):
        moments = part.optimizer.state.values()
        tensors = [t for state in moments for t in state.values() if torch.is_tensor(t)]
        assert tensors, "there are no moments to compare"
        for tensor in tensors:
            found.update(tensor.numpy().tobytes())
    for model in (built.policy.gpt.state_dict(), dict(enumerate(built.reference.held))):
        for tensor in model.values():
            if torch.is_tensor(tensor):
                found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()


def batches() -> dict[str, Any]:
    """Packing of groups with and without signal, and mini-batches of what is left."""
    seen: dict[str, Any] = {}
    with trainer("batches") as built:
        groups = generated(built, [(1, 0, 1, 0), (1, 1, 1, 1), (0, 0, 0, 0), (5, 5, 5, 0)])
        batch = built.make_batch(groups)
        kept = [s for g in (groups[0], groups[3]) for s in g.samples]
        seen["tokens"] = rows(batch, batch.tokens)
        seen["expected_tokens"] = [[*s.prompt.token_ids, *s.token_ids] for s in kept]
        seen["prompt_lengths"] = [len(s.prompt.token_ids) for s in kept]
        seen["advantages"] = rows(batch, batch.advantage)
        seen["only_equal"] = built.make_batch(groups[1:3]) is None

        numbered = batch.with_(advantage=torch.repeat_interleave(batch.lengths).float())
        for parts in (1, 3, 12):
            built.config.algorithm.mini_batches, built.config.algorithm.epochs = parts, 2
            built.config.algorithm.aggregation = "token_mean"
            seen[f"parts_{parts}"] = [
                {
                    "sequences": [int(row[0]) for row in rows(part, part.advantage)],
                    "weight": part.weight.double().sum().item(),
                    "off_mask": part.weight[~part.mask].abs().sum().item(),
                }
                for part in built.mini_batches(numbered)
            ]
    return seen


def equal_rewards() -> dict[str, Any]:
    """Steps without signal, behind one with signal that moved the policy away from its reference."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    seen: dict[str, Any] = {"digests": [], "warnings": [], "metrics": []}
    with trainer("equal_rewards", "algorithm.kl_coef=0.5") as built:
        logging.getLogger("grpo_mega.trainer").addHandler(handler)
        seen["signal"] = step(built)
        for _ in range(4):
            seen["digests"].append(digest(built))
            seen["warnings"].append(len(warnings))
            trainer_rewards.equal = True
            seen["metrics"].append(step(built))
        trainer_rewards.equal = False
        step(built)
        seen["after"] = digest(built)
        seen["text"] = warnings
        logging.getLogger("grpo_mega.trainer").removeHandler(handler)
        seen["tokens"] = built.tokens
    return seen


def resumed_without_update() -> list[dict[str, Any]]:
    """Checkpoints taken before the optimizer ever moved, plain and sharded, are continued."""
    return [_resumed(f"resumed_{sharded}", f"optimizer.distributed={sharded}") for sharded in ("false", "true")]


def _resumed(name: str, override: str) -> dict[str, Any]:
    trainer_rewards.equal = True
    with trainer(name, override) as built:
        step(built)
        built.save()
    trainer_rewards.equal = False
    with trainer(name, override) as built:
        return {"step": built.step, "metrics": step(built)}


def run_state() -> dict[str, Any]:
    """Unfinished samples and generators through a checkpoint, and a state that was saved with other libraries."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    with trainer("run_state") as built:
        built.unfinished = built.engine.generate(built.data.test[:2], 2, built.sampling(0), version=0)
        built.save()
        saved, expected = built.unfinished, [random.random(), float(torch.rand(()))]
    with trainer("run_state") as built:
        seen = {"unfinished": built.unfinished == saved, "samples": len(saved), "expected": expected}
        seen["drawn"] = [random.random(), float(torch.rand(()))]
        logging.getLogger("grpo_mega.observe.summary").addHandler(handler)
        state = built.state_dict()
        built.load_state_dict(state)
        seen["same versions"] = len(warnings)
        built.load_state_dict(state | {"versions": state["versions"] | {"torch": "1.0", "python": "3.0"}})
    return seen | {"warnings": warnings, "torch": version("torch")}


def on_policy() -> list[dict[str, float]]:
    """Single updates, with warm-up and a reference that is refreshed behind step 2."""
    overrides = ["algorithm.kl_coef=0.1", "algorithm.reference_refresh=2", "optimizer.warmup_steps=4", "run.steps=3"]
    with trainer("on_policy", *overrides) as built:
        built.run()
    return read_metrics(Path(root) / "on_policy" / "metrics.jsonl")


def two_epochs() -> dict[str, Any]:
    """Both updates of a step with two epochs."""
    with trainer("two_epochs", "algorithm.epochs=2", "optimizer.lr=1e-2") as built:
        updates, update = [], built.update

        def watched(mini_batch: Batch) -> Any:
            updates.append((mini_batch, update(mini_batch)))
            return updates[-1][1]

        built.update = watched  # type: ignore[method-assign]
        metrics = step(built)
        (batch, first), (_, second) = updates
        moved = (second.logprob - first.logprob)[batch.mask].double()
        return {
            "first": first.metrics,
            "second": second.metrics,
            "step": metrics,
            "ratio": moved.exp().mean().item(),
            "trained": built.tokens["trained"],
            "completion_tokens": int(batch.mask.sum()),
        }


def stale_engine() -> dict[str, Any]:
    """Two steps with samples of other weights than those that are trained."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    with trainer("stale_engine") as built:
        logging.getLogger("grpo_mega.trainer").addHandler(handler)
        generate, parameters = built.engine.generate, [*built.policy.gpt.parameters()]

        def stale(*arguments: Any) -> Any:
            with torch.no_grad():
                for parameter in parameters:
                    parameter.mul_(1.1)
                samples = generate(*arguments)
                for parameter in parameters:
                    parameter.div_(1.1)
            return samples

        built.engine.generate = stale  # type: ignore[method-assign]
        return {"steps": [step(built), step(built)], "warnings": warnings}


def begun() -> dict[str, Any]:
    """A run that was stopped between the updates of its second step, started again as one of a single step."""
    with trainer("begun", "algorithm.epochs=2") as built:
        step(built)
        update = built.update

        def stopped(mini_batch: Batch) -> Any:
            built.stop.received = "SIGTERM"
            return update(mini_batch)

        built.update = stopped  # type: ignore[method-assign]
        try:
            step(built)
        except Interrupted:
            built.save()
    with trainer("begun", "algorithm.epochs=2", "run.steps=1") as built:
        where = built.place()
        built.run()
        return {"where": where, "steps": built.step, "updates": built.updates, "left": built.in_progress is not None}


def drawing_and_scoring() -> dict[str, Any]:
    """The same prompts in waves of several sizes, and what the reward made of the samples."""
    with trainer("drawing") as built:
        prompts, decode = built.data.test, built.data.tokenizer.decode
        drawn = {}
        for concurrent in (512, 8, 1):
            engine = EmbeddedEngine(built.policy, decode, concurrent)
            drawn[concurrent] = engine.generate(prompts, 4, built.sampling(0), version=3)
        again = built.engine.generate(prompts, 4, built.sampling(0), version=4)
        groups = built.score(drawn[512])
        return {
            "tokens": {c: [s.token_ids for s in samples] for c, samples in drawn.items()},
            "logprobs": {c: [x for s in samples for x in s.logprobs] for c, samples in drawn.items()},
            "next_version": [s.token_ids for s in again],
            "order": [[s.prompt.id, s.index] for g in groups for s in g.samples],
            "expected_order": [[p.id, i] for p in prompts for i in range(4)],
            "own": [x for g in groups for x in g.components["own"]],
            "expected_own": [trainer_rewards.scored(s) for s in drawn[512]],
            "totals": [x for g in groups for x in g.rewards],
            "format": [x for g in groups for x in g.components["format"]],
        }


def longer() -> dict[str, Any]:
    """Steps before and after completions may be longer, by a model that knows more tokens than the tokenizer."""
    more = ["rollout.longer_from_step=1", "rollout.longer_max_new_tokens=20", "rollout.stop=[]", "model.vocab_size=64"]
    with trainer("longer", *more, "algorithm.aggregation=constant") as built:
        batch = built.make_batch(generated(built, [(1, 0, 1, 0)]))
        seen: dict[str, Any] = {"lengths": [], "denominators": [], "evaluated": [], "samples": []}
        for _ in range(2):
            (part,) = built.mini_batches(batch)
            seen["denominators"].append(1 / part.weight.max().item())
            seen["evaluated"].append(built.evaluate("validation", built.data.validation, built.step)["length"])
            _, groups = built.train_step()
            samples = [s for group in groups for s in group.samples]
            seen["lengths"].append(sorted({len(s.token_ids) for s in samples}))
            seen["samples"] += [[s.token_ids, s.text] for s in samples]
            built.end_step()
        seen["tokens"] = built.data.tokenizer.tokens
    try:
        trainer("too_few", "model.vocab_size=25").__enter__()
    except ValueError as error:
        seen["refused"] = str(error)
        leave_layout()
    return seen


if __name__ == "__main__":
    parts = (
        batches,
        equal_rewards,
        resumed_without_update,
        run_state,
        on_policy,
        two_epochs,
        stale_engine,
        begun,
        drawing_and_scoring,
        longer,
    )
    print(json.dumps({part.__name__: part() for part in parts}))

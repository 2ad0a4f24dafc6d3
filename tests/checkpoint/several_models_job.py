"""Trains a policy and a critic beside a reference and an average, and saves all four; started by run_ranks.

Usage: several_models_job.py FOLDER ARGUMENT... ; an argument is either of

    train:NAME:LAYOUT:STEPS:HOW   continues FOLDER/NAME at its newest checkpoint until STEPS are done, and saves every
                                  step: waiting, in the background (the next step's updates come before the end, and
                                  what changes with them is not written before), or killed by its own hand while the
                                  last step is being written in the background
    copy:FROM:TO:LAYOUT           loads the checkpoint FOLDER/FROM under a layout and saves what it loaded as FOLDER/TO
    compare:A=B,C=D               prints, for each pair of checkpoints, how many tensors were compared in each folder,
                                  and which of them differ, as JSON
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from limits import limit

from grpo_mega import platform

HERE = platform.start()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.dist_checkpointing import load_plain_tensors  # noqa: E402
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest  # noqa: E402
from squared_error import squared_error  # noqa: E402

from grpo_mega.algorithm.objective import negative_log_likelihood  # noqa: E402
from grpo_mega.checkpoint import checkpoint  # noqa: E402
from grpo_mega.config.schema import LayoutConfig, ModelConfig, MoEConfig, OptimizerConfig  # noqa: E402
from grpo_mega.models.average import AveragedPolicy  # noqa: E402
from grpo_mega.models.policy import Policy  # noqa: E402
from grpo_mega.models.reference import ReferencePolicy  # noqa: E402
from grpo_mega.models.scalar import ScalarModel  # noqa: E402
from grpo_mega.models.topology import join_layout  # noqa: E402
from grpo_mega.types import Batch, pack_tokens  # noqa: E402

MOE = MoEConfig(experts=4, ffn_hidden=16, shared_ffn_hidden=16, first_dense=1)
MODEL = ModelConfig(
    layers=2, hidden=32, heads=4, kv_heads=2, ffn_hidden=48, context=24, init_std=0.2, moe=MOE, dtype="bf16"
)
CRITIC = replace(MODEL, dtype="fp32", layers=4, hidden=16, ffn_hidden=24, moe=replace(MOE, experts=2, top_k=1))
"""Deeper than the policy, and with less of everything else."""
LAYOUTS = {
    "single": LayoutConfig(micro_batch_tokens=40),
    "ep2": LayoutConfig(ep=2, micro_batch_tokens=40),
    "tp2": LayoutConfig(tp=2, sp=True, micro_batch_tokens=40),
    "pp2": LayoutConfig(pp=2, micro_batch_tokens=40),
}
VOCABULARY = 21
FOLDERS = ("weights", "critic", "reference", "average")
Models = tuple[Policy, ScalarModel, ReferencePolicy, AveragedPolicy]


def made(layout: LayoutConfig) -> Models:
    """All of them before the first step; the policy's optimizer is distributed, the critic's is not."""
    topology = join_layout(layout, seed=0)
    policy = Policy(MODEL, layout, VOCABULARY, topology, HERE, OptimizerConfig(distributed=True, overlap=True))
    critic = ScalarModel("critic", CRITIC, layout, VOCABULARY, topology, HERE)
    for seed, model in enumerate((policy, critic)):
        model.initialize(seed)
    reference, average = ReferencePolicy(policy), AveragedPolicy(policy, decay=0.7)
    for model in (policy, critic):
        model.use_optimizer(OptimizerConfig(lr=0.01))
    return policy, critic, reference, average


class Gate:
    """Holds the processes that write what changes with every update until training has gone on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.read, self.write = os.pipe()
        summing = checkpoint.summing

        def held(request: AsyncRequest, path: Path, sums: Any) -> AsyncRequest:
            request = summing(request, path, sums)
            if path.name == "reference" or request.async_fn is None:
                return request
            return request._replace(async_fn=partial(self.wait_and, request.async_fn, path.name))

        patch.setattr(checkpoint, "summing", held)

    def wait_and(self, write: Callable[..., None], name: str, *arguments: Any) -> None:
        opened, _, _ = select.select([self.read], [], [], limit(20))
        if not opened:
            raise RuntimeError(f"{name} is written before training goes on")
        write(*arguments)

    def open(self) -> None:
        os.write(self.write, b"\n")  # which nobody takes

    def shut(self) -> None:
        os.read(self.read, 1)


def batch_of(step: int) -> Batch:
    random = torch.Generator().manual_seed(step)
    tokens = [torch.randint(VOCABULARY, (n,), generator=random).tolist() for n in (7, 20, 2, 11, 5, 16, 3)]
    packed = pack_tokens(tokens, [1] * len(tokens))
    return packed.with_(weight=packed.mask / packed.mask.sum())


def train(folder: Path, layout: LayoutConfig, steps: int, how: str) -> None:
    models = policy, critic, _, average = made(layout)
    newest = checkpoint.newest_whole(folder)
    done = checkpoint.load(newest, models)["step"] if newest else 0
    saving: checkpoint.Saving | None = None
    patch = pytest.MonkeyPatch()
    gate = Gate(patch) if how == "background" else None
    for step in range(done + 1, steps + 1):
        batch = policy.share(batch_of(step))
        policy.update(batch, negative_log_likelihood, lr=0.01)
        average.follow()
        critic.update(batch, squared_error((batch.tokens % 3).float()), lr=0.01)
        if saving:
            finish(saving, gate)
        saving = checkpoint.Saving(
            checkpoint.step_path(folder, step), models, {"step": step}, background=how != "waiting"
        )
        if how == "killed" and step == steps:
            os.kill(os.getpid(), signal.SIGKILL)
    if saving:
        finish(saving, gate)
    patch.undo()


def finish(saving: checkpoint.Saving, gate: Gate | None) -> None:
    if gate:
        gate.open()
    saving.finish()
    if gate:
        gate.shut()


def copy(there: Path, here: Path, layout: LayoutConfig) -> None:
    models = made(layout)
    checkpoint.save(here, models, checkpoint.load(there, models))


def tensors(node: dict, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every floating-point tensor of a nested state, by dotted name."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from tensors(value, f"{name}{key}.")
        elif torch.is_tensor(value) and value.is_floating_point():
            yield f"{name}{key}", value


def difference(a: Path, b: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"compared": {}, "moments": {}, "differ": []}
    for part in FOLDERS:
        ours, theirs = (dict(tensors(load_plain_tensors(str(path / part)))) for path in (a, b))
        assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
        found["compared"][part] = len(ours)
        found["moments"][part] = sum("exp_avg_sq" in name for name in ours)
        found["differ"] += [f"{part}/{name}" for name in ours if not torch.equal(ours[name], theirs[name])]
    return found


def main() -> None:
    platform.join_processes(HERE)  # not above: Megatron's helper for saving imports this file again
    folder = Path(sys.argv[1])
    for argument in sys.argv[2:]:
        what, *rest = argument.split(":")
        if what == "compare":
            pairs = [pair.split("=") for pair in rest[0].split(",")]
            print(json.dumps({f"{a}={b}": difference(folder / a, folder / b) for a, b in pairs}))
            continue
        if what == "train":
            name, layout, steps, how = rest
            train(folder / name, LAYOUTS[layout], int(steps), how)
        else:
            there, here, layout = rest
            copy(folder / there, folder / here, LAYOUTS[layout])
        parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

"""Trains, saves and continues under one layout after another, in one process group; started by run_ranks.

Usage: layout_change_job.py FOLDER ARGUMENT... ; an argument is either of

    NAME:FROM:TO:LAYOUT:OPTIMIZER   loads FOLDER/NAME-FROM-OPTIMIZER (seeded weights when FROM is 0), saves what it
                                    loaded under the same name and "-again", trains steps FROM + 1 to TO, saves every
                                    second one
    compare:A=B,C=D                 prints the distances of these pairs of checkpoints as JSON
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import torch

from grpo_mega import platform

HERE = platform.start()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.dist_checkpointing import load_plain_tensors  # noqa: E402

from grpo_mega.checkpoint import checkpoint  # noqa: E402
from grpo_mega.config.schema import (  # noqa: E402
    LayoutConfig,
    LoRAConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    PartConfig,
    PartsConfig,
    StateConfig,
)
from grpo_mega.models.adapters import B  # noqa: E402
from grpo_mega.models.policy import Policy  # noqa: E402
from grpo_mega.models.shards import named_box, shards  # noqa: E402
from grpo_mega.models.topology import join_layout  # noqa: E402
from grpo_mega.stages.sft import supervised_update  # noqa: E402
from grpo_mega.types import Row  # noqa: E402

MODEL = ModelConfig(
    layers=4,
    hidden=64,
    heads=4,
    kv_heads=2,
    ffn_hidden=128,
    context=64,
    init_std=0.1,
    mtp_layers=1,
    moe=MoEConfig(experts=4, top_k=2, ffn_hidden=32, shared_ffn_hidden=32, first_dense=1),
)
LAYOUTS = {
    "single": LayoutConfig(),
    "tp2pp2": LayoutConfig(tp=2, pp=2, sp=True),
    "ep2dp2": LayoutConfig(ep=2),
    "vpp2": LayoutConfig(pp=2, vpp=2),
    "cp2": LayoutConfig(cp=2),
}
SHARDED = ("distributed", "parts", "adapters", "lean")
LEAN = StateConfig(moments="bf16", on_host=True)
PARTS = {
    "parts": PartsConfig(head=PartConfig(0.5), router=PartConfig(2.0), experts=PartConfig(1.0, 0.1)),
    "frozen": ["embedding", "norms"],
}
VOCAB = 26
SMALL_BUCKETS = 10_000
"""Megatron's own buckets would hold the whole model."""


def documents(step: int) -> list[Row]:
    """Eleven token sequences of different lengths: no layout divides them evenly."""
    generator = torch.Generator().manual_seed(step)
    ids = [torch.randint(3, VOCAB, (9 + i % 5,), generator=generator).tolist() for i in range(11)]
    return [Row(row, ((1, len(row)),)) for row in ids]


def leg(folder: Path, name: str, start: int, end: int, layout: LayoutConfig, optimizer: str) -> None:
    """Steps `start` + 1 to `end` of the story `name` under a layout.

    `optimizer` is plain, distributed, bf16, or a distributed one: parts, with settings of their own for parts of the
    model, adapters, of these alone, or lean, of a bf16 model with moments in bf16 that are kept on the host.
    """
    model, sharded = replace(MODEL, dtype="bf16" if optimizer in ("bf16", "lean") else "fp32"), optimizer in SHARDED
    lora, own = None, PARTS if optimizer == "parts" else {"state": LEAN} if optimizer == "lean" else {}
    if optimizer == "adapters":
        lora = LoRAConfig(rank=4, alpha=4.0)  # a scale of 1: a larger one amplifies rounding
        model = replace(model, moe=replace(MODEL.moe, bias_update_rate=0.0, frozen_bias=True))
    buffers = OptimizerConfig(distributed=sharded, overlap=sharded, frozen=own.get("frozen", []))
    topology = join_layout(layout, seed=0)
    policy = Policy(model, layout, VOCAB, topology, HERE, optimizer=buffers, lora=lora, bucket_size=SMALL_BUCKETS)
    policy.initialize(seed=4)
    for shard in shards(policy.chunks):  # a B of zeros would be nothing but the updates, whose rounding Adam amplifies
        key, box = named_box(shard)
        if key.endswith(B):
            noise = torch.randn(shard.global_shape[shard.prepend_axis_num :], generator=_seeded(crc32(key.encode())))
            shard.data.copy_(0.1 * noise[tuple(slice(*ends) for ends in box)])
    # With Adam's own epsilon, the first update of a weight whose gradient is at rounding level has a random sign.
    policy.use_optimizer(OptimizerConfig(lr=1e-3, eps=1e-5, **own))
    if start:
        found = checkpoint.load(folder / f"{name}-{start}-{optimizer}", [policy])
        assert found == {"step": start}
        checkpoint.save(folder / f"{name}-{start}-{optimizer}-again", [policy], found)
    for step in range(start + 1, end + 1):
        supervised_update(policy, documents(step), lr=1e-3)
        if step % 2 == 0:
            checkpoint.save(folder / f"{name}-{step}-{optimizer}", [policy], {"step": step})
    parallel_state.destroy_model_parallel()


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tensors(node: dict, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every floating-point tensor of a nested state, by dotted name."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from tensors(value, f"{name}{key}.")
        elif torch.is_tensor(value) and value.is_floating_point():
            yield f"{name}{key}", value


def distances(first: Path, second: Path) -> dict[str, float]:
    """Relative L2 distance of every whole tensor, weights and optimizer alike, that two checkpoints hold."""
    a, b = (dict(tensors(load_plain_tensors(str(path / "weights")))) for path in (first, second))
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    pairs = {key: (a[key].double(), b[key].double()) for key in a}
    return {key: float((x - y).norm() / x.norm().clamp(min=1e-30)) for key, (x, y) in pairs.items()}


if __name__ == "__main__":
    platform.join_processes(HERE)  # not above: Megatron's helper for saving imports this file again
    out = Path(sys.argv[1])
    for argument in sys.argv[2:]:
        if argument.startswith("compare:"):
            pairs = [pair.split("=") for pair in argument.split(":")[1].split(",")]
            print(json.dumps({f"{a}={b}": distances(out / a, out / b) for a, b in pairs}))
        else:
            name, start, end, layout, optimizer = argument.split(":")
            leg(out, name, int(start), int(end), LAYOUTS[layout], optimizer)
    torch.distributed.destroy_process_group()

"""Saves and loads a policy whose ranks have parts of Adam's state; started by run_ranks on two ranks.

Usage: own_shards_job.py FOLDER WAY; WAY is ours, or Megatron's, to gather the state on every rank. What was saved is
loaded by both ways. Prints as JSON {save, load: most bytes of memory beyond those before, for each parameter;
differing: parts of the state that were loaded otherwise than they had been}.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from grpo_mega import platform

HERE = platform.start()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402

from grpo_mega.checkpoint import checkpoint  # noqa: E402
from grpo_mega.config.schema import LayoutConfig, ModelConfig, OptimizerConfig  # noqa: E402
from grpo_mega.models.megatron.own_shards import OwnShards  # noqa: E402
from grpo_mega.models.policy import Policy  # noqa: E402
from grpo_mega.models.topology import Topology, join_layout  # noqa: E402

MODEL = ModelConfig(layers=3, hidden=512, heads=8, kv_heads=8, ffn_hidden=2048, context=32, init_std=0.1)
WAYS = {"ours": OwnShards, "megatron": DistributedOptimizer}


def made(topology: Topology, seed: int, way: str) -> Policy:
    """A policy with weights of this seed, and moments that only this rank has of it."""
    policy = Policy(MODEL, LayoutConfig(), 301, topology, HERE, OptimizerConfig(distributed=True))
    policy.initialize(seed)
    policy.use_optimizer(OptimizerConfig(lr=0.01))
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    for name, value in state(policy):
        value.copy_(torch.rand(value.shape, generator=generator) if name != "param" else value)
    for part in policy.optimizer.chained_optimizers:
        part.__class__ = WAYS[way]
    return policy


def state(policy: Policy) -> list[tuple[str, torch.Tensor]]:
    """This rank's part of Adam's state, and of the fp32 weights."""
    found = []
    for part in policy.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for p in group["params"]:
                found += [("param", p.data), *sorted(part.optimizer.state[p].items())]
    return found


def most(work: Callable[[], object]) -> int:
    """Bytes of this process at most during `work`, beyond those before."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _resident("VmRSS")
    work()
    return _resident("VmHWM") - before


def _resident(line: str) -> int:
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(status[line].split()[0])


if __name__ == "__main__":
    platform.join_processes(HERE)
    folder, way = Path(sys.argv[1]), sys.argv[2]
    topology = join_layout(LayoutConfig(), seed=0)
    policy = made(topology, 3, way)
    size = sum(p.numel() for p in policy.chunks.parameters())
    checkpoint.save(folder / "first", [policy], {})  # what is loaded and made once is there then
    outcome = {"save": most(partial(checkpoint.save, folder / way, [policy], {})) / size, "differing": []}
    for reader in WAYS:
        other = made(topology, 11, reader)
        loaded = most(partial(checkpoint.load, folder / way, [other])) / size
        outcome |= {"load": loaded} if reader == way else {}
        same = [torch.equal(a, b) for (_, a), (_, b) in zip(state(policy), state(other), strict=True)]
        outcome["differing"] += [f"{reader}: {number}" for number, equal in enumerate(same) if not equal]
    print(json.dumps(outcome | {"parameters": size}))
    dist.destroy_process_group()

"""Measures the links between the nodes of a job, in pairs of nodes, so that a node with a slow link can be named.

    torchrun --nnodes N --nproc-per-node GPUS links.py --folder DIR     on every node: writes DIR/NODE.link-GPU.json

GPUs with the same number exchange data, because they share a rail of the fabric. Each is measured with several others,
one after the other, and its rate is the best of these, so that a slow partner does not count against it. Like
preflight.py, which judges the rates, it imports nothing of the project. Without GPUs it measures gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

ROUNDS = 3
"""Number of partners that each GPU is measured with."""
SIZE = {"nccl": 256 << 20, "gloo": 4 << 20}
"""Back end -> size of a message in bytes."""
TIMES = 5
"""Number of timed messages, after one for warm-up."""


def partner(node: int, nodes: int, turn: int) -> int | None:
    """Partner of `node` in this turn of a round-robin tournament; None if it sits the turn out.

    The circle method: nodes whose numbers add up to `turn` meet, modulo an odd number; with an even number of nodes,
    the last one meets the node that would meet itself.
    """
    # The circle holds an odd number of nodes. In every turn one of them would meet itself: turn / 2 modulo `circle`,
    # where (circle + 1) / 2 is the inverse of 2.
    circle = nodes - 1 + nodes % 2
    if nodes % 2 == 0 and node == nodes - 1:
        return turn * (circle + 1) // 2 % circle
    other = (turn - node) % circle
    if other != node:
        return other
    return nodes - 1 if nodes % 2 == 0 else None


def link_rate(node: int, nodes: int, gpu: int, gpus: int) -> float:
    """GB/s in each direction between this GPU and its best partner. All ranks call it; rank = node * gpus + gpu."""
    backend = dist.get_backend()
    device = torch.device("cuda", gpu) if backend == "nccl" else torch.device("cpu")
    message = torch.ones(SIZE[backend], dtype=torch.uint8, device=device)
    # A job of one node has no partner, and its rate stays 0.
    rates = [0.0]
    for turn in range(min(ROUNDS, nodes - 1 + nodes % 2)):
        other = partner(node, nodes, turn)
        if other is not None:
            rates.append(_exchange(message, other * gpus + gpu))
    return max(rates)


def _exchange(message: torch.Tensor, other: int) -> float:
    answer, began = torch.empty_like(message), 0.0
    for number in range(1 + TIMES):
        # Sending and receiving are posted as one batch. Posted one after the other, two NCCL ranks that both send first
        # would wait for each other.
        for work in dist.batch_isend_irecv([
            dist.P2POp(dist.isend, message, other), dist.P2POp(dist.irecv, answer, other)
        ]):  # fmt: skip
            work.wait()
        # NCCL's wait() holds up only the stream, not the host, whose clock is read here.
        if message.is_cuda:
            torch.cuda.synchronize(message.device)
        # The first message sets up the connection and is not timed.
        if number == 0:
            began = time.perf_counter()
    return TIMES * message.numel() / (time.perf_counter() - began) / 1e9


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    folder = parser.parse_args().folder
    rank, gpu, gpus = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if torch.cuda.is_available():
        torch.cuda.set_device(gpu)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(seconds=60))
    rate = link_rate(rank // gpus, dist.get_world_size() // gpus, gpu, gpus)
    # The judge looks for files by Slurm's names of the nodes, which may differ from their host names.
    node = os.environ.get("SLURMD_NODENAME", platform.node())
    (folder / f"{node}.link-{gpu}.json").write_text(json.dumps({f"GPU {gpu} link GB/s": rate}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

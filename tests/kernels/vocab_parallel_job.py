"""One rank of a tensor parallel group: every function on its shard of a vocabulary that all ranks can make whole.

Prints one JSON line per vocabulary: for each function, how far this rank is from the unsharded results, which it
computes, too, and a hash of the bits of what has to be the same on all ranks.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from kernel_launches import TWO_LAUNCHES, launches, per_chunk
from torch import Tensor

import grpo_kernels
from grpo_kernels import LossOptions

N, HIDDEN = 144, 12
CU_SEQLENS = torch.tensor([0, 5, 5, 71, 144])
LOSSES = {
    "ppo": LossOptions(dual_clip=2.0, kl_coef=0.1, entropy_coef=0.05),
    "gspo": LossOptions(kind="gspo", clip_low=0.02, clip_high=0.03, kl="k2", kl_coef=0.1),
    "gmpo": LossOptions(kind="gmpo", clip_low=0.2, clip_high=0.2, kl_coef=0.1, kl_unbiased=True),
    "vespo": LossOptions(kind="vespo", kl_coef=0.1, entropy_coef=0.05),
    "sapo": LossOptions(kind="sapo", kl="k1", kl_coef=0.1, kl_unbiased=True, off_policy_mask=0.01),
    "cispo": LossOptions(kind="cispo", entropy_coef=0.05, correction="mask", correction_cap=1.1),
}


class Work:
    """Random inputs of all ranks, this rank's columns of them, and what was found."""

    def __init__(self, vocab_size: int) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        width = -(-vocab_size // (8 * self.ranks)) * 8
        self.columns = slice(self.rank * width, (self.rank + 1) * width)
        self.rows = slice(self.rank * N // self.ranks, (self.rank + 1) * N // self.ranks)
        self.whole: dict[str, Any] = {"vocab_size": vocab_size, "temperature": 0.8}
        self.split = self.whole | {"group": dist.group.WORLD}
        generator = torch.Generator().manual_seed(vocab_size)
        self.hidden = torch.randn(N, HIDDEN, generator=generator)
        self.weight = torch.randn(width * self.ranks, HIDDEN, generator=generator)
        self.weight[vocab_size:] = float("nan")  # padding, which nobody may read
        self.shard = self.weight[self.columns]
        self.logits = self.hidden @ self.weight.t()
        self.ids = torch.randint(0, vocab_size, (N,), generator=generator)
        self.vectors = [torch.randn(N, generator=generator) for _ in range(5)]
        self.found: dict[str, float] = {}
        self.same: list[Tensor] = []

    def compare(self, name: str, shared: list[Tensor], sharded: list[Tensor], expected: list[Tensor]) -> None:
        """`shared` are the same on all ranks, bit for bit; `expected` has both, unsharded."""
        self.same += shared
        pairs = zip(shared + sharded, expected, strict=True)
        self.found[name] = max(float((a - b).detach().abs().max() / b.abs().max().clamp(min=1)) for a, b in pairs)

    def report(self) -> str:
        digest = hashlib.sha256()
        for tensor in self.same:
            digest.update(tensor.detach().contiguous().numpy().tobytes())
        return json.dumps({"found": self.found, "digest": digest.hexdigest()})


def logprobs_of_logits(work: Work) -> None:
    def run(logits: Tensor, how: dict[str, Any]) -> list[Tensor]:
        logits = logits.clone().requires_grad_()
        logprob, entropy = grpo_kernels.fused_logprob(logits, work.ids, **how)
        total = (logprob * work.vectors[0] + entropy * work.vectors[1]).sum()
        return [logprob, entropy, *torch.autograd.grad(total, logits)]

    *shared, gradient = run(work.logits[:, work.columns], work.split)
    *expected, whole = run(work.logits, work.whole)
    work.compare("fused_logprob", shared, [gradient], [*expected, whole[:, work.columns]])


def losses(work: Work, name: str, options: LossOptions) -> None:
    old = grpo_kernels.fused_logprob(work.logits, work.ids, **work.whole)[0] + 0.3 * work.vectors[0]
    vectors = (work.ids, old, old + 0.3 * work.vectors[1], work.vectors[3], work.vectors[4].abs())
    settings = {
        "options": options,
        "rollout_logprob": old + 0.3 * work.vectors[2],
        "cu_seqlens": CU_SEQLENS if options.per_sequence else None,
    }

    def of_logits(logits: Tensor, how: dict[str, Any]) -> list[Tensor]:
        logits = logits.clone().requires_grad_()
        loss, metrics = grpo_kernels.fused_grpo_loss(logits, *vectors, **settings, **how)
        return [loss, *vars(metrics).values(), *torch.autograd.grad(loss, logits)]

    def of_hidden(weight: Tensor, how: dict[str, Any]) -> list[Tensor]:
        inputs = (work.hidden.clone().requires_grad_(), weight.clone().requires_grad_())
        loss, metrics = grpo_kernels.linear_grpo_loss(*inputs, *vectors, chunk=64, **settings, **how)
        return [loss, *vars(metrics).values(), *torch.autograd.grad(loss, inputs)]

    *shared, gradient = of_logits(work.logits[:, work.columns], work.split)
    *expected, whole = of_logits(work.logits, work.whole)
    work.compare(f"fused_grpo_loss {name}", shared, [gradient], [*expected, whole[:, work.columns]])
    *shared, gradient = of_hidden(work.shard, work.split)
    *expected, whole = of_hidden(work.weight, work.whole)
    work.compare(f"linear_grpo_loss {name}", shared, [gradient], [*expected, whole[work.columns]])


def gradients_of_hidden_states(work: Work) -> None:
    """In the three ways there are, by both routes."""

    def by_logprob(hidden: Tensor, weight: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        logprob, _ = grpo_kernels.linear_logprob(hidden, weight, work.ids, **how)
        return (logprob * work.vectors[0]).sum(), logprob

    def by_token_loss(hidden: Tensor, weight: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        def weighted(logprob: Tensor, _: Tensor, part: slice) -> tuple[Tensor, dict[str, Tensor]]:
            return logprob * work.vectors[0][part], {"logprob": logprob}

        loss, extras = grpo_kernels.linear_token_loss(hidden, weight, work.ids, weighted, chunk=64, **how)
        return loss, extras["logprob"]

    def run(function: Callable, hidden: Tensor, weight: Tensor, **how: Any) -> list[Tensor]:
        inputs = (hidden.clone().requires_grad_(), weight.clone().requires_grad_())
        loss, logprob = function(*inputs, **how)
        return [logprob, *torch.autograd.grad(loss, inputs)]

    for function in (by_logprob, by_token_loss):
        logprob, right, whole = run(function, work.hidden, work.weight, **work.whole)
        everything, mine = slice(None), work.rows
        for mode, rows in (("all_reduce", everything), ("reduce_scatter", mine), ("partial", everything)):
            found, hidden, weight = run(function, work.hidden[rows], work.shard, hidden_grad=mode, **work.split)
            if mode == "partial":
                dist.all_reduce(hidden)
            expected = [logprob, right[rows], whole[work.columns]]
            work.compare(f"{function.__name__} {mode}", [found], [hidden, weight], expected)


def launches_of_a_chunk(work: Work) -> None:
    """Two where ranks share the rows, which have to meet in between: asserted here, on every rank."""
    hidden, weight = work.hidden.clone().requires_grad_(), work.shard.clone().requires_grad_()
    with launches() as counted:
        loss, _ = grpo_kernels.linear_grpo_loss(
            hidden, weight, work.ids, None, None, *work.vectors[:2], options=LossOptions(), chunk=64, **work.split
        )
        loss.backward()
    assert per_chunk(counted, -(-N // 64)) == TWO_LAUNCHES, counted


def no_row(work: Work) -> None:
    hidden, weight = work.hidden[:0].clone().requires_grad_(), work.shard.clone().requires_grad_()
    nothing = work.ids[:0]
    loss, _ = grpo_kernels.linear_token_loss(hidden, weight, nothing, lambda a, _, __: (a, {}), **work.split)
    _, gradient = torch.autograd.grad(loss, (hidden, weight))
    work.compare("no row", [loss], [gradient], [torch.zeros(()), torch.zeros_like(gradient)])


def main(vocab_sizes: list[int]) -> None:
    dist.init_process_group("gloo")
    reports = []
    for vocab_size in vocab_sizes:
        work = Work(vocab_size)
        logprobs_of_logits(work)
        for name, options in LOSSES.items():
            losses(work, name, options)
        gradients_of_hidden_states(work)
        launches_of_a_chunk(work)
        no_row(work)
        reports.append(work.report())
    dist.destroy_process_group()
    print(*reports, sep="\n")  # last of all: torch's profiler writes lines of its own


if __name__ == "__main__":
    main([int(size) for size in sys.argv[1:]])

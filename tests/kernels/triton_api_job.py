"""Run by test_kernel_triton_api.py with TRITON_INTERPRET=1, which must be set before anything imports triton."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_launches import LAUNCHES, launches, per_chunk
from torch import Tensor

import grpo_kernels
from grpo_kernels import LossOptions
from grpo_kernels.triton_scale import PROGRAMS, scale_

N, V = 6, 13
OPTIONS = [
    LossOptions(dual_clip=3.0, kl_coef=0.1, entropy_coef=0.1),
    LossOptions(kl="k1", kl_coef=0.1, entropy_coef=-0.1, correction="mask", correction_cap=1.1),
    LossOptions(kind="gspo", clip_low=0.1, clip_high=0.1, correction="mask", correction_cap=1.1),
    LossOptions(kind="cispo", correction="truncate", correction_cap=1.1),
    LossOptions(kind="cispo", kl="k2", kl_coef=0.1, correction="mask", correction_cap=1.1),
]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("on_policy", [False, True])
def test_losses_are_those_of_the_torch_path(options: LossOptions, on_policy: bool) -> None:
    ids = torch.arange(N)
    old = None if on_policy else randn(N, seed=1) - 3
    vectors = (old, randn(N, seed=2) - 3, randn(N, seed=3), randn(N, seed=4).abs())
    settings: dict[str, Any] = {"options": options, "temperature": 0.8, "rollout_logprob": randn(N, seed=5) - 3}
    settings["cu_seqlens"] = torch.tensor([0, 2, N]) if options.kind == "gspo" else None

    def of_logits(backend: str) -> list[Tensor]:
        logits = randn(N + 2, V + 3).requires_grad_()
        loss, metrics = grpo_kernels.fused_grpo_loss(
            logits, ids, *vectors, rows=torch.arange(1, N + 1), vocab_size=V, backend=backend, **settings
        )
        return [loss, *vars(metrics).values(), *torch.autograd.grad(loss, logits)]

    def of_hidden(backend: str) -> list[Tensor]:
        inputs = (randn(N, 4).requires_grad_(), randn(V + 3, 4, seed=9).requires_grad_())
        how: dict[str, Any] = {"vocab_size": V, "chunk": 4, "backend": backend}
        loss, metrics = grpo_kernels.linear_grpo_loss(*inputs, ids, *vectors, **settings, **how)
        found = [loss, *vars(metrics).values(), *torch.autograd.grad(loss, inputs)]
        main_grad = torch.zeros_like(inputs[1])
        how |= {"main_grad": main_grad, "grad_scale": -1.7}
        loss, _ = grpo_kernels.linear_grpo_loss(*inputs, ids, *vectors, **settings, **how)
        return [*found, *torch.autograd.grad(loss * -1.7, inputs[:1]), main_grad]

    same(of_logits("triton"), of_logits("torch"))
    same(of_hidden("triton"), of_hidden("torch"))


@pytest.mark.parametrize("kind", ["ppo", "cispo", "gspo"])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_takes_one_launch_or_two(kind: str, weight_dtype: torch.dtype) -> None:
    count = 200
    hidden, output_weight = randn(count, 4).requires_grad_(), randn(V, 4, seed=9).to(weight_dtype).requires_grad_()
    ends = torch.tensor([0, 50, count]) if kind == "gspo" else None
    vectors = (None, None, randn(count, seed=3), torch.ones(count))
    with launches() as counted:
        loss, _ = grpo_kernels.linear_grpo_loss(
            hidden, output_weight, torch.arange(count) % V, *vectors,
            options=LossOptions(kind=kind), cu_seqlens=ends, chunk=64, backend="triton",
        )  # fmt: skip
        loss.backward()
    assert per_chunk(counted, 4) == LAUNCHES[kind]


def test_log_probs_are_those_of_the_torch_path() -> None:
    def run(backend: str) -> list[Tensor]:
        logits = randn(N, V).requires_grad_()
        logprob, entropy = grpo_kernels.fused_logprob(logits, torch.arange(N), backend=backend)
        by_logits = torch.autograd.grad((logprob * randn(N, seed=1)).sum() + entropy.sum(), logits)
        inputs = (randn(N, 4).requires_grad_(), randn(V, 4, seed=9).requires_grad_())
        logprob, entropy = grpo_kernels.linear_logprob(*inputs, torch.arange(N), chunk=4, backend=backend)
        return [logprob, entropy, *by_logits, *torch.autograd.grad((logprob + entropy).sum(), inputs)]

    same(run("triton"), run("torch"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.0, -2.0])
@pytest.mark.parametrize(("rows", "columns"), [(2, 5000), (PROGRAMS + 5, 3)])
def test_scaling(dtype: torch.dtype, factor: float, rows: int, columns: int) -> None:
    storage = randn(rows, columns + 2).to(dtype)
    expected = storage.clone()
    expected[:, :columns] *= factor
    scale_(storage[:, :columns], torch.tensor(factor))
    assert torch.equal(storage, expected)

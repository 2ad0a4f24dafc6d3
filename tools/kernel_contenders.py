"""The contenders of `bench_kernels.py`: this project's kernels, plain torch, and other libraries' where installed.

A contender runs one operation on a `Problem`. Libraries are imported when they run, so that one that is missing or
broken costs a line in the table and nothing else. Operations:

    logprob           log-prob of each token from given logits
    ppo, gspo         loss and gradient of given logits, with clipped ratio and k3 estimate of the KL divergence
    on-policy         loss and gradient of -A * log-prob: what a cross entropy with weights can do
    linear ppo, linear on-policy
                      the same from hidden states and weight, with the gradients of both
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

import grpo_kernels
from grpo_kernels import LossOptions

CLIP_LOW, CLIP_HIGH, KL_COEF = 0.2, 0.28, 0.04


@dataclass
class Problem:
    """N = sequences * length tokens; the last of each sequence has weight 0, as its next token is unknown.

    Attributes:
        logits: [N, V], may be overwritten by the contender; None for the linear operations.
        hidden, matrix: [N, H] and [V, H] for the linear operations, else None.
        ids, old, ref, advantage, weight: [N]; the advantage is the sequence's.
        sequences: Number of sequences.
    """

    logits: Tensor | None
    hidden: Tensor | None
    matrix: Tensor | None
    ids: Tensor
    old: Tensor
    ref: Tensor
    advantage: Tensor
    weight: Tensor
    sequences: int

    @property
    def length(self) -> int:
        """Number of tokens of a sequence."""
        return len(self.ids) // self.sequences

    def per_sequence(self, vector: Tensor, tokens: int) -> Tensor:
        """[N, ...] -> [sequences, tokens, ...] of the first tokens of each."""
        return vector.view(self.sequences, self.length, *vector.shape[1:])[:, :tokens]

    def fresh(self) -> Problem:
        """A copy with inputs as leaves to differentiate, and the logits in new memory."""
        leaves = {name: getattr(self, name) for name in ("hidden", "matrix") if getattr(self, name) is not None}
        made = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
        if self.logits is not None:
            made["logits"] = self.logits.clone().requires_grad_()
        return replace(self, **made)


@dataclass
class Result:
    """Result of a contender: [N] log-probs, or the gradient of logits or hidden states; None if not computed."""

    logprob: Tensor | None = None
    gradient: Tensor | None = None


@dataclass(frozen=True)
class Contender:
    """An implementation of an operation; `library` must be importable."""

    name: str
    library: str
    operation: str
    run: Callable[[Problem], Result]
    needs_gpu: bool = False


# ------------------------------------------------------------------------------------------------ this project


def options(operation: str) -> LossOptions:
    """Loss of an operation."""
    if "on-policy" in operation:
        return LossOptions()
    kind = "gspo" if operation == "gspo" else "ppo"
    return LossOptions(kind=kind, clip_low=CLIP_LOW, clip_high=CLIP_HIGH, kl="k3", kl_coef=KL_COEF)


def _own_logprob(backend: str) -> Callable[[Problem], Result]:
    def run(p: Problem) -> Result:
        with torch.no_grad():
            return Result(grpo_kernels.fused_logprob(p.logits, p.ids, backend=backend)[0])

    return run


def _own_loss(backend: str, operation: str) -> Callable[[Problem], Result]:
    def run(p: Problem) -> Result:
        of = options(operation)
        step = p.length
        ends = torch.arange(0, len(p.ids) + 1, step, device=p.ids.device) if of.kind == "gspo" else None
        vectors = (p.old if of.kl_coef else None, p.ref if of.kl_coef else None, p.advantage, p.weight)
        common = {"options": of, "cu_seqlens": ends, "backend": backend}
        if p.logits is not None:
            loss, metrics = grpo_kernels.fused_grpo_loss(p.logits, p.ids, *vectors, **common)
            loss.backward()
            return Result(metrics.logprob, p.logits.grad)
        loss, metrics = grpo_kernels.linear_grpo_loss(p.hidden, p.matrix, p.ids, *vectors, **common)
        loss.backward()
        return Result(metrics.logprob, p.hidden.grad)

    return run


def own(backend: str) -> list[Contender]:
    """This project's contenders, with one backend; under "cuda", Triton runs the operations of more than one launch."""
    name, losses = f"grpo_kernels, {backend}", ["ppo", "on-policy", "linear ppo", "linear on-policy"]
    if backend != "cuda":
        losses.append("gspo")
    contenders = [] if backend == "cuda" else [Contender(name, "grpo_kernels", "logprob", _own_logprob(backend))]
    return contenders + [Contender(name, "grpo_kernels", loss, _own_loss(backend, loss)) for loss in losses]


# ------------------------------------------------------------------------------------------------ plain torch


def logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """[N] log-probs in float32."""
    return torch.log_softmax(logits.float(), -1).gather(1, ids[:, None])[:, 0]


def torch_loss(logprob: Tensor, p: Problem, operation: str) -> Tensor:
    """The loss as usually written in torch."""
    if "on-policy" in operation:
        return -(p.weight * p.advantage * logprob).sum()
    log_ratio = logprob - p.old
    if operation == "gspo":
        counted = p.per_sequence(p.weight != 0, p.length)
        mean = (p.per_sequence(log_ratio, p.length) * counted).sum(1) / counted.sum(1)
        log_ratio = mean.repeat_interleave(p.length)
    ratio = log_ratio.exp()
    policy = torch.maximum(-p.advantage * ratio, -p.advantage * ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH))
    d = p.ref - logprob
    return (p.weight * (policy + KL_COEF * (d.exp() - d - 1))).sum()


def _torch_logprob(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Problem], Result]:
    def run(p: Problem) -> Result:
        with torch.no_grad():
            return Result(function(p.logits, p.ids))

    return run


def _torch_loss(operation: str, compiled: bool) -> Callable[[Problem], Result]:
    def run(p: Problem) -> Result:
        function = compiled_logprobs() if compiled else logprobs
        leaf = p.hidden if p.logits is None else p.logits
        logits = p.hidden @ p.matrix.t() if p.logits is None else p.logits
        logprob = function(logits, p.ids)
        torch_loss(logprob, p, operation).backward()
        return Result(logprob.detach(), leaf.grad)

    return run


@cache
def compiled_logprobs() -> Callable[[Tensor, Tensor], Tensor]:
    """`logprobs` through torch.compile."""
    return torch.compile(logprobs)


# ------------------------------------------------------------------------------------------------ other libraries


def _trl_logprob(p: Problem) -> Result:
    from trl.trainer.utils import selective_log_softmax

    with torch.no_grad():
        return Result(selective_log_softmax(p.logits, p.ids))


def _liger_logprob(p: Problem) -> Result:
    from liger_kernel.ops.grpo_loss import fused_selective_log_softmax

    tokens = p.length - 1
    logits = p.per_sequence(p.logits.detach(), p.length)
    logprobs = fused_selective_log_softmax(logits, p.per_sequence(p.ids, tokens).contiguous(), temperature=1.0)
    return Result(torch.nn.functional.pad(logprobs, (0, 1)).flatten())


def _liger_loss(level: str) -> Callable[[Problem], Result]:
    def run(p: Problem) -> Result:
        from liger_kernel.transformers.grpo_loss import triton_grpo_loss

        old, ref, ids, weight = (p.per_sequence(v, p.length - 1).contiguous() for v in (p.old, p.ref, p.ids, p.weight))
        loss, *_ = triton_grpo_loss(
            p.per_sequence(p.logits, p.length), old, ref, ids, p.advantage[:: p.length].contiguous(),
            completion_mask=(weight != 0).long(), temperature=1.0, beta=KL_COEF, eps_low=CLIP_LOW, eps_high=CLIP_HIGH,
            importance_sampling_level=level,
        )  # fmt: skip
        (loss * weight).sum().backward()
        return Result(gradient=p.logits.grad)

    return run


def _liger_linear(p: Problem) -> Result:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    old, ref, ids = (p.per_sequence(v, p.length) for v in (p.old, p.ref, p.ids))
    module = LigerFusedLinearGRPOLoss(beta=KL_COEF, epsilon_low=CLIP_LOW, epsilon_high=CLIP_HIGH, use_ref_model=True)
    hidden = p.per_sequence(p.hidden, p.length)
    # Liger's reduction "dapo" is the mean over tokens with a loss, as the problem's weights are.
    mask = (p.per_sequence(p.weight, p.length) != 0).long()
    advantage = p.advantage[:: p.length].contiguous()
    loss, *_ = module(
        hidden, p.matrix, ids, mask, advantage, ref_per_token_logps=ref, old_per_token_logps=old,
        num_items_in_batch=mask.sum(),
    )  # fmt: skip
    loss.backward()
    return Result(gradient=p.hidden.grad)


def _fla_loss(p: Problem) -> Result:
    from fla.modules.grpo import fused_grpo_loss

    tokens = p.length - 1
    loss = fused_grpo_loss(
        p.per_sequence(p.logits, p.length), p.per_sequence(p.ref, tokens).contiguous(),
        p.per_sequence(p.ids, tokens).contiguous(), p.advantage[:: p.length].contiguous(), beta=0.0, inplace=True,
    )  # fmt: skip
    (loss * p.per_sequence(p.weight, tokens)).sum().backward()
    return Result(gradient=p.logits.grad)


def _megatron_loss(fused: bool) -> Callable[[Problem], Result]:
    def run(p: Problem) -> Result:
        group = _group_of_one(p.logits.device.type)
        from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        # Megatron's cross entropy overwrites its input.
        logits = p.logits.clone()[:, None]
        ids = p.ids[:, None]
        losses = (
            fused_vocab_parallel_cross_entropy(logits, ids, group)
            if fused
            else vocab_parallel_cross_entropy(logits, ids)
        )
        (losses[:, 0] * p.weight * p.advantage).sum().backward()
        return Result(-losses.detach()[:, 0].float(), p.logits.grad)

    return run


@cache
def _group_of_one(device: str) -> Any:
    import torch.distributed as dist
    from megatron.core import parallel_state

    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    return parallel_state.get_tensor_model_parallel_group()


def _cce(p: Problem) -> Result:
    from cut_cross_entropy import linear_cross_entropy

    losses = linear_cross_entropy(p.hidden, p.matrix, p.ids, reduction="none")
    (losses * p.weight * p.advantage).sum().backward()
    return Result(-losses.detach().float(), p.hidden.grad)


RIVALS = [
    Contender("torch", "torch", "logprob", _torch_logprob(logprobs)),
    Contender("torch.compile", "torch", "logprob", _torch_logprob(lambda x, ids: compiled_logprobs()(x, ids))),
    *(Contender("torch", "torch", kind, _torch_loss(kind, False)) for kind in ("ppo", "gspo", "on-policy")),
    *(Contender("torch.compile", "torch", kind, _torch_loss(kind, True)) for kind in ("ppo", "gspo", "on-policy")),
    *(Contender("torch", "torch", kind, _torch_loss(kind, False)) for kind in ("linear ppo", "linear on-policy")),
    *(
        Contender("torch.compile", "torch", kind, _torch_loss(kind, True))
        for kind in ("linear ppo", "linear on-policy")
    ),
    Contender("TRL selective_log_softmax", "trl", "logprob", _trl_logprob),
    Contender("Liger selective_log_softmax", "liger_kernel", "logprob", _liger_logprob, needs_gpu=True),
    Contender("Liger triton_grpo_loss", "liger_kernel", "ppo", _liger_loss("token"), needs_gpu=True),
    Contender("Liger triton_grpo_loss", "liger_kernel", "gspo", _liger_loss("sequence"), needs_gpu=True),
    Contender("Liger chunked GRPO", "liger_kernel", "linear ppo", _liger_linear),
    Contender("fla fused_grpo_loss", "fla", "on-policy", _fla_loss, needs_gpu=True),
    Contender("Megatron cross entropy", "megatron.core", "on-policy", _megatron_loss(fused=False)),
    Contender("Megatron fused cross entropy", "megatron.core", "on-policy", _megatron_loss(fused=True)),
    Contender("cut-cross-entropy", "cut_cross_entropy", "linear on-policy", _cce, needs_gpu=True),
]

"""Megatron's layers where Transformer Engine's fused ones are absent: the same parameters, fewer passes over memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer


class RMSNorm(torch.nn.RMSNorm):
    """Root mean square norm (Zhang and Sennrich, 2019): x / sqrt(mean(x^2) + eps) * weight over the last axis.

    With `layernorm_zero_centered_gamma` it multiplies by 1 + weight, in float32 whatever the precision of x.
    The weight is marked for Megatron to sum its gradient over tensor parallel ranks; Megatron's own wrapper of torch's
    norm refuses sequence parallelism.
    """

    eps: float

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]."""
        weight = 1 + self.weight.float() if self.zero_centered else self.weight
        # On a CPU torch has no fused norm, only a chain of operations.
        if x.dtype is torch.float32 and not x.is_cuda:
            return _RMSNorm.apply(x, weight, self.eps)
        whole = x.float() if self.zero_centered else x
        return F.rms_norm(whole, self.normalized_shape, weight, self.eps).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """`RMSNorm` on a CPU. With r = 1 / sqrt(mean(x^2) + eps): d x = r * g * w - x * r^3 / H * sum(g * w * x)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        weighted = grad * weight
        along = torch.linalg.vecdot(weighted, x)[..., None] * scale.pow(3) / x.shape[-1]
        # Sums, not matrix products: their rounding of a row depends on the number of rows, and is worse with many.
        grad_weight = (grad * x).mul_(scale).flatten(0, -2).sum(0)
        return weighted.mul_(scale).addcmul_(x, along, value=-1), grad_weight, None


class GatedMLP(MLP):
    """Megatron's MLP with SwiGLU (Shazeer, 2020): fc2(silu(a) * b), where a and b are the halves of fc1(x).

    With GELU in place of silu it is GeGLU.
    """

    def forward(self, x: torch.Tensor, per_token_scale: torch.Tensor | None = None, **_: Any) -> Any:
        """[..., H] and, for a routed expert, each token's routing probability [...] -> ([..., H], None)."""
        inner = self.linear_fc1(x)[0]
        if self.config.bias_activation_fusion and self.config.activation_func is F.silu:
            # One kernel, which keeps only a and b for the backward pass.
            inner = bias_swiglu_impl(inner, None)
        elif self.config.activation_func is F.silu:
            inner = _SwiGLU.apply(inner)
        else:
            a, b = inner.chunk(2, -1)
            inner = self.config.activation_func(a) * b
        if per_token_scale is not None:
            inner = (inner * per_token_scale[..., None]).to(inner.dtype)
        return self.linear_fc2(inner)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU in its tanh form (Hendrycks and Gimpel, 2016), elementwise."""
    return F.gelu(x, approximate="tanh")


class _SwiGLU(torch.autograd.Function):
    """silu(a) * b; writes both halves of the gradient in place, without concatenation."""

    @staticmethod
    def forward(ctx: Any, ab: torch.Tensor) -> torch.Tensor:
        a, b = ab.chunk(2, -1)
        gate = F.silu(a)
        ctx.save_for_backward(ab, gate)
        return gate * b

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        ab, gate = ctx.saved_tensors
        a, b = ab.chunk(2, -1)
        grad_ab = torch.empty_like(ab)
        grad_a, grad_b = grad_ab.chunk(2, -1)
        torch.mul(gate, grad, out=grad_b)
        torch.ops.aten.silu_backward.grad_input(grad * b, a, grad_input=grad_a)
        return grad_ab


class _Whole:
    """The forward pass of a linear layer that is not split over ranks: a matrix product and nothing else."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    skip_bias_add: bool

    def forward(self, x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[..., inputs] -> [..., outputs], and the bias where it is left to the caller, as in Megatron."""
        if self.skip_bias_add:
            return F.linear(x, self.weight), self.bias
        return F.linear(x, self.weight, self.bias), None


class WholeColumnLinear(_Whole, ColumnParallelLinear):
    """Megatron's column parallel layer on a tensor parallel group of one."""


class WholeRowLinear(_Whole, RowParallelLinear):
    """Megatron's row parallel layer on a tensor parallel group of one."""


def use_gated_mlps(model: torch.nn.Module) -> None:
    """Changes the class of dense MLPs and routed experts to GatedMLP.

    Shared experts keep theirs: their forward pass overlaps communication.
    """
    modules: Iterable[Any] = model.modules()
    for module in modules:
        # The exact class, because shared experts are a subclass of it.
        if type(module) is MLP:
            module.__class__ = GatedMLP


def use_whole_linears(model: torch.nn.Module) -> None:
    """Changes the class of linear layers that are not split over ranks."""
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if type(module) is ColumnParallelLinear and module.tp_group.size() == 1:
            module.__class__ = WholeColumnLinear
        elif type(module) is RowParallelLinear and module.tp_group.size() == 1:
            module.__class__ = WholeRowLinear


def use_post_norms(gpt: GPTModel) -> None:
    """Gives the last projection of attention and of feed-forward in every layer a `post_norm` of its output.

    As for the norms before a layer, every tensor parallel rank has the complete output, or with sequence parallelism
    the complete output for its own rows.
    """
    for layer in gpt.modules():
        if isinstance(layer, TransformerLayer):
            for projection in (layer.self_attention.linear_proj, layer.mlp.linear_fc2):
                projection.post_norm = RMSNorm(gpt.config, gpt.config.hidden_size, gpt.config.layernorm_epsilon)
                projection.register_forward_hook(_normed)


def _normed(projection: Any, _: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    return projection.post_norm(output[0]), output[1]


def scale_embedding(gpt: GPTModel) -> None:
    """Multiplies the embeddings by sqrt(hidden), rounded to their precision as in the released code."""
    if gpt.pre_process:
        factor = torch.tensor(gpt.config.hidden_size**0.5).to(gpt.config.params_dtype).item()
        gpt.embedding.register_forward_hook(lambda _, __, embedded: embedded * factor)

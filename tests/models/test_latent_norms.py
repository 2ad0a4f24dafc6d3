"""The norms within latent attention have an epsilon of their own, also where they are part of the layer behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

from grpo_mega.models.megatron.latent import LATENT_NORM_EPS, set_latent_norms
from grpo_mega.models.policy import Policy
from grpo_mega.types import Batch

NORM_EPS = 0.05


class NormedLinear(torch.nn.Module):
    """Norm and projection in one layer, with the attribute that Transformer Engine's has."""

    def __init__(self, norm: torch.nn.Module, projection: torch.nn.Module, eps: float) -> None:
        super().__init__()
        self.weight, self.projection, self.eps = norm.weight, projection, eps

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.projection(torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps))


def fuse(policy: Policy) -> int:
    """Puts every latent norm into the projection behind it, with the model's epsilon; how many there are."""
    modules = [module for module in policy.chunks.modules() if isinstance(module, MultiLatentAttention)]
    fused = 0
    for module in modules:
        for norm, projection in (("q_layernorm", "linear_q_up_proj"), ("kv_layernorm", "linear_kv_up_proj")):
            if hasattr(module, projection):
                layer = NormedLinear(getattr(module, norm), getattr(module, projection), NORM_EPS)
                setattr(module, norm, IdentityOp())
                setattr(module, projection, layer)
                fused += 1
    return fused


def test_a_fused_norm_computes_what_one_of_its_own_does(make_policy: Callable[..., Policy], batch: Batch) -> None:
    plain, fused = (make_policy("latent", qk_norm=True, norm_eps=NORM_EPS) for _ in range(2))
    expected = plain.logprobs(batch, 1.0)
    assert fuse(fused) >= 2
    assert (fused.logprobs(batch, 1.0) - expected).abs().max() > 1e-4, "the epsilon must matter here"
    for chunk in fused.chunks:
        set_latent_norms(chunk)
    torch.testing.assert_close(fused.logprobs(batch, 1.0), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("model", ["latent", "tied"])
def test_other_norms_keep_the_model_s(model: str, make_policy: Callable[..., Policy]) -> None:
    policy = make_policy(model, qk_norm=True, norm_eps=NORM_EPS)
    eps = {name: module.eps for name, module in policy.chunks.named_modules() if hasattr(module, "eps")}
    latent = {name for name in eps if model == "latent" and name.endswith(("q_layernorm", "kv_layernorm"))}
    assert {eps[name] for name in latent} <= {LATENT_NORM_EPS}
    assert {value for name, value in eps.items() if name not in latent} == {NORM_EPS}
    assert len(latent) >= (2 if model == "latent" else 0)

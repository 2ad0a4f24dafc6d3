"""What torch holds, to show that nothing in it was replaced. As a script: install() in a process that sees CUDA."""

from __future__ import annotations

import sys

import torch

from grpo_mega.platform import cpu


def contents() -> dict[str, int]:
    """Identity of everything reachable by one name in torch and in the places that platform/cpu.py knows."""
    places = {"torch": torch, "torch.cuda": torch.cuda, "torch.random": torch.random, "torch.Tensor": torch.Tensor}
    return {f"{place}.{name}": id(value) for place, owner in places.items() for name, value in vars(owner).items()}


def main() -> None:
    """Fails when install() touches torch although CUDA is present, or Megatron although Transformer Engine is."""
    torch.cuda.is_available = lambda: True
    before = contents()
    assert cpu.install(transformer_engine=True) is False
    assert contents() == before
    assert not any(name.startswith("megatron") for name in sys.modules)

    from megatron.core.transformer import attention, multi_latent_attention
    from megatron.core.transformer.moe import moe_utils, shared_experts, token_dispatcher

    before = contents()  # to import Megatron imports the compiler, which replaces a few things in torch itself
    assert cpu.install(transformer_engine=False) is True
    assert contents() == before
    assert moe_utils.te_general_gemm is None
    assert not any(module.HAVE_TE for module in (attention, multi_latent_attention, shared_experts))
    assert token_dispatcher.maybe_move_tensor_to_cpu.__module__.startswith("megatron")


if __name__ == "__main__":
    main()

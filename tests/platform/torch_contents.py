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
    """Fails when install() touches anything although CUDA is present."""
    torch.cuda.is_available = lambda: True
    before = contents()
    assert cpu.install() is False
    assert contents() == before
    assert not any(name.startswith("megatron") for name in sys.modules)


if __name__ == "__main__":
    main()

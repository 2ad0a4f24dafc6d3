"""Optional packages: their use in a run, the fallback without them, and how to install them.

docs/clusters.md has the same table; a test compares them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Package:
    """An optional package.

    Attributes:
        name: Name for pip.
        module: Name of the imported module.
        used_for: Use in a run on a GPU; "nothing yet" where no code calls it.
        without: Fallback of a run if it is missing.
        install: Command that installs it.
        bounds: Working versions; empty for any.
        missed: Whether the doctor warns on a GPU when it is missing.
    """

    name: str
    module: str
    used_for: str
    without: str
    install: str
    bounds: str = ""
    missed: bool = True


PACKAGES = (
    Package(
        "nvidia-ml-py",
        "pynvml",
        "measuring what each process holds of a GPU: nodes are checked by it, and engines that share GPUs",
        "a Slurm job calls a node with GPUs unfit, and engines cannot take turns with the trainer",
        "python -m pip install -c constraints-gpu.txt nvidia-ml-py",
    ),
    Package(
        "transformer-engine",
        "transformer_engine.pytorch",
        "linear layers, norms, grouped products of experts, fused routing and Adam",
        "Megatron's own layers and torch's AdamW: slower, much slower with experts, which compute one by one",
        "python -m pip install --no-build-isolation 'transformer-engine[pytorch]>=2.9,<2.12'",
        ">=2.9,<2.12",
    ),
    Package(
        "flash-attn-3",
        "flash_attn_interface",
        "attention in training with layout.attention=flash3, on Hopper GPUs",
        "FlashAttention-2, which is part of torch",
        "see FlashAttention's own instructions: it is built from the folder hopper of its repository",
        missed=False,
    ),
    Package(
        "flash-attn-4",
        "flash_attn.cute",
        "attention in training with layout.attention=flash4",
        "FlashAttention-2, which is part of torch",
        "python -m pip install -c constraints-gpu.txt flash-attn-4",
        missed=False,
    ),
    Package(
        "sglang",
        "sglang",
        "generation with rollout.engine=sglang, as in every experiment for GPUs",
        "rollout.engine=embedded: generation with the training weights, slower",
        "python -m pip install -c constraints-gpu.txt sglang",
    ),
    Package(
        "torch-memory-saver",
        "torch_memory_saver",
        "giving an engine's memory to the trainer and back",
        "engines need GPUs of their own (rollout.sglang.first_gpu)",
        "python -m pip install -c constraints-gpu.txt torch-memory-saver",
    ),
    Package(
        "deep-ep",
        "deep_ep",
        "the exchange of tokens between experts: in training with layout.dispatch=deepep, in engines with the server "
        "argument moe_a2a_backend=deepep",
        "NCCL's exchange, and SGLang's own",
        "see DeepEP's own instructions: it is built for the machine's network",
        missed=False,
    ),
)
"""All optional packages but Apex, which pip does not have: `software.apex`."""

APEX_USE = "Megatron's fused Adam, where Transformer Engine is missing"
"""Use of NVIDIA's Apex in a run."""
APEX_WITHOUT = "Transformer Engine's, or torch's AdamW"
"""Fallback of a run without Apex."""

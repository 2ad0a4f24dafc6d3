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
        "measuring GPU memory by process",
        "Slurm jobs call GPU nodes unfit; engines cannot share GPUs with the trainer",
        "python -m pip install -c constraints-gpu.txt nvidia-ml-py",
    ),
    Package(
        "transformer-engine",
        "transformer_engine.pytorch",
        "linear layers, norms, grouped products of experts, fused routing and Adam",
        "Megatron's layers and torch's AdamW, slower, much slower with experts",
        "python -m pip install --no-build-isolation 'transformer-engine[pytorch]>=2.9,<2.12'",
        ">=2.9,<2.12",
    ),
    Package(
        "flash-attn-3",
        "flash_attn_interface",
        "layout.attention=flash3, on Hopper",
        "FlashAttention-2, which is part of torch",
        "see FlashAttention's own instructions: it is built from the folder hopper of its repository",
        missed=False,
    ),
    Package(
        "flash-attn-4",
        "flash_attn.cute",
        "layout.attention=flash4",
        "FlashAttention-2, which is part of torch",
        "python -m pip install -c constraints-gpu.txt flash-attn-4",
        missed=False,
    ),
    Package(
        "sglang",
        "sglang",
        "rollout.engine=sglang, as in all experiments for GPUs",
        "rollout.engine=embedded, slower",
        "python -m pip install -c constraints-gpu.txt sglang",
    ),
    Package(
        "torch-memory-saver",
        "torch_memory_saver",
        "giving an engine's memory to the trainer and back",
        "engines need separate GPUs (rollout.sglang.first_gpu)",
        "python -m pip install -c constraints-gpu.txt torch-memory-saver",
    ),
    Package(
        "deep-ep",
        "deep_ep",
        "layout.dispatch=deepep; in engines the argument moe_a2a_backend=deepep",
        "NCCL's exchange, and SGLang's",
        "see DeepEP's own instructions: it is built for the machine's network",
        missed=False,
    ),
)
"""All optional packages but Apex, which pip does not have: `software.apex`."""

APEX_USE = "Megatron's fused Adam without Transformer Engine"
"""Use of NVIDIA's Apex in a run."""
APEX_WITHOUT = "torch's AdamW"
"""Fallback of a run without Apex."""

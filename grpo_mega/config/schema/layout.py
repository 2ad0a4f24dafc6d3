"""How processes share the model, and the machines that they run on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LayoutConfig:
    """How the processes share the model. Data parallelism is what is left: world size / (tp * cp * pp)."""

    tp: int = 1
    """Tensor parallel size."""
    pp: int = 1
    """Pipeline parallel size."""
    vpp: int = 1
    """Pieces of the model on every pipeline rank, interleaved (virtual pipeline); needs pp > 1."""
    first_stage_layers: int | None = None
    """Layers of the first pipeline stage; null for as many as every other stage."""
    last_stage_layers: int | None = None
    """Layers of the last pipeline stage, which also computes the loss (DeepSeek-V3: fewer); null for as many as
    every other stage."""
    cp: int = 1
    """Context parallel size: ranks that share every sequence."""
    ep: int = 1
    """Expert parallel size: ranks that share one set of experts; etp * ep divides the ranks of a pipeline stage."""
    etp: int = 1
    """Tensor parallel size inside an expert; 1 keeps each expert whole (DeepSeek-V3)."""
    sp: bool = False
    """Sequence parallelism; needs tp > 1, and Megatron requires it for experts and for latent attention with tp > 1."""
    micro_batch_tokens: int = 16384
    """Most tokens in one micro-batch, prompts of a group counted once, context parallel ranks together."""
    recompute: str = "none"
    """What the backward pass recomputes instead of keeping in memory: none, selective (attention) or full (layers)."""


@dataclass
class ClusterConfig:
    """The machines that an experiment is meant for: what the planner plans for, and how long ranks wait for each other.
    Training uses the processes that torchrun starts."""

    nodes: int | None = None
    """Machines; null for the fewest processes that fit the layout."""
    gpus_per_node: int = 8
    """GPUs of one machine."""
    gpu_memory_mib: int | None = None
    """Memory of one GPU in MiB, as nvidia-smi shows it (H100: 81559, H200: 143771); null gives no verdict."""
    gpu: str | None = None
    """Which GPU it is: h100, h200, h800, h20, a100, b200, gb200 or gb300. The planner's times go by its data sheet;
    null gives none."""
    host_memory_gib: int | None = None
    """Main memory of one machine in GiB; null gives no verdict."""
    timeout_seconds: int = 1800
    """How long a rank waits in a collective for the others before it ends the job. A rank that has read its part of a
    checkpoint waits there, too: it has to be more than the slowest takes. Writing and checking one is not limited."""

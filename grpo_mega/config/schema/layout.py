"""How processes share the model, and the machines that they run on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from grpo_mega.config.limits import Interval, OneOf


@dataclass
class LayoutConfig:
    """How the processes share the model. Data parallelism is what is left: world size / (tp * cp * pp)."""

    tp: Annotated[int, Interval("[1, inf)")] = 1
    """Tensor parallel size."""
    pp: Annotated[int, Interval("[1, inf)")] = 1
    """Pipeline parallel size."""
    vpp: Annotated[int, Interval("[1, inf)")] = 1
    """Pieces of the model on every pipeline rank, interleaved (virtual pipeline); needs pp > 1."""
    first_stage_layers: Annotated[int | None, Interval("[1, inf)")] = None
    """Layers of the first pipeline stage; null for as many as every other stage."""
    last_stage_layers: Annotated[int | None, Interval("[1, inf)")] = None
    """Layers of the last pipeline stage, which also computes the loss (DeepSeek-V3: fewer); null for as many as
    every other stage."""
    cp: Annotated[int, Interval("[1, inf)")] = 1
    """Context parallel size: ranks that share every sequence."""
    ep: Annotated[int, Interval("[1, inf)")] = 1
    """Expert parallel size: ranks that share one set of experts; etp * ep divides the ranks of a pipeline stage."""
    etp: Annotated[int, Interval("[1, inf)")] = 1
    """Tensor parallel size inside an expert; 1 keeps each expert whole (DeepSeek-V3)."""
    sp: bool = False
    """Sequence parallelism; needs tp > 1, and Megatron requires it for experts and for latent attention with tp > 1."""
    micro_batch_tokens: Annotated[int, Interval("[1, inf)")] = 16384
    """Most tokens in one micro-batch, prompts of a group counted once, context parallel ranks together."""
    recompute: Annotated[str, OneOf("none", "selective", "full")] = "none"
    """What the backward pass recomputes instead of keeping in memory: none, selective (attention) or full (layers)."""


@dataclass
class ClusterConfig:
    """The machines that an experiment is meant for: what the planner plans for, and how long ranks wait for each other.
    Training uses the processes that torchrun starts."""

    nodes: Annotated[int | None, Interval("[1, inf)")] = None
    """Machines; null for the fewest processes that fit the layout."""
    gpus_per_node: Annotated[int, Interval("[1, inf)")] = 8
    """GPUs of one machine."""
    gpu_memory_mib: Annotated[int | None, Interval("[1, inf)")] = None
    """Memory of one GPU in MiB, as nvidia-smi shows it (H100: 81559, H200: 143771); null gives no verdict."""
    gpu: Annotated[str | None, OneOf("h100", "h200", "h800", "h20", "a100", "b200", "gb200", "gb300")] = None
    """Which GPU it is; the planner's times go by its data sheet. null: no times."""
    host_memory_gib: Annotated[int | None, Interval("[1, inf)")] = None
    """Main memory of one machine in GiB; null gives no verdict."""
    timeout_seconds: Annotated[
        int, Interval("[60, 604800]", "a minute to a week: busy ranks are late, and a job that hangs has to end")
    ] = 1800
    """How long a rank waits in a collective for the others before it ends the job. A rank that has read its part of a
    checkpoint waits there, too: it has to be more than the slowest takes. Writing and checking one is not limited."""

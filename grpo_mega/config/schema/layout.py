"""Distribution of the model over processes, and the machines that they run on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from grpo_mega.config.limits import Interval, OneOf

DECIDED = ("tp", "pp", "vpp", "first_stage_layers", "last_stage_layers", "cp", "ep", "etp", "sp")
"""Fields of `LayoutConfig` that `auto` decides on; one that is given decides on all."""


@dataclass
class LayoutConfig:
    """Parallel layout of the model. The data parallel size is world size / (tp * cp * pp)."""

    auto: bool = False
    """Choose the layout when the job starts, unless a size below is given: on GPUs the planner's fastest that fits, on
    CPUs the simplest (docs/planner.md). A run that continues on as many processes keeps its layout."""
    chosen_for: Annotated[int | None, Interval("[1, inf)")] = None
    """Processes for which `auto` chose this layout (in a run's config.yaml); null if it was given."""
    tp: Annotated[int, Interval("[1, inf)")] = 1
    """Tensor parallel size."""
    pp: Annotated[int, Interval("[1, inf)")] = 1
    """Pipeline parallel size."""
    vpp: Annotated[int, Interval("[1, inf)")] = 1
    """Virtual pipeline size: interleaved pieces of the model on every pipeline rank; needs pp > 1."""
    first_stage_layers: Annotated[int | None, Interval("[1, inf)")] = None
    """Layers of the first pipeline stage; null for as many as the others."""
    last_stage_layers: Annotated[int | None, Interval("[1, inf)")] = None
    """Layers of the last pipeline stage, which also computes the loss (DeepSeek-V3: fewer); null for as many as the
    others."""
    cp: Annotated[int, Interval("[1, inf)")] = 1
    """Context parallel size: ranks that share every sequence."""
    ep: Annotated[int, Interval("[1, inf)")] = 1
    """Expert parallel size: ranks that share one set of experts; etp * ep divides the ranks of a pipeline stage."""
    etp: Annotated[int, Interval("[1, inf)")] = 1
    """Tensor parallel size inside an expert; 1 keeps each expert whole (DeepSeek-V3)."""
    sp: bool = False
    """Sequence parallelism; needs tp > 1, and Megatron requires it for experts and for latent attention with tp > 1."""
    micro_batch_tokens: Annotated[int, Interval("[1, inf)")] = 16384
    """Most tokens in a micro-batch, over all context parallel ranks; a group's prompt counts once."""
    recompute: Annotated[str, OneOf("none", "selective", "full")] = "none"
    """Activations that the backward pass recomputes: none, selective (attention) or full (layers)."""
    attention: Annotated[str, OneOf("auto", "padded", "torch", "flash3", "flash4")] = "auto"
    """Attention kernel (docs/models.md). padded: torch's fused attention, padded to the longest sequence. torch,
    flash3, flash4: FlashAttention-2 (part of torch), 3 or 4 (packages), in bf16 on a GPU, without padding. auto: torch
    if the model allows it; padded on a CPU."""
    dispatch: Annotated[str, OneOf("alltoall", "deepep")] = "alltoall"
    """How tokens reach experts on other GPUs. alltoall: by NCCL, a copy for every expert. deepep: by that package, a
    copy for every machine; in bf16 on GPUs, with experts kept whole."""
    fp8: bool = False
    """Matrix products of layers in 8 bits, forward and backward, by Transformer Engine's block recipe (DeepSeek-V3,
    arXiv 2412.19437, section 3.3), on H100 or newer; not embedding, output layer, router and attention. Weights stay
    bf16. The trainer's probabilities move away from the engine's: see `algorithm.correction`."""

    @property
    def undecided(self) -> bool:
        """Whether the layout is still to be chosen."""
        given = LayoutConfig()
        return self.auto and self.chosen_for is None and all(getattr(self, n) == getattr(given, n) for n in DECIDED)


@dataclass
class ClusterConfig:
    """The machines of an experiment, for the planner, and the timeout of collectives."""

    nodes: Annotated[int | None, Interval("[1, inf)")] = None
    """Machines; null for the fewest that the layout can use."""
    gpus_per_node: Annotated[int, Interval("[1, inf)")] = 8
    """GPUs of one machine."""
    gpu_memory_mib: Annotated[int | None, Interval("[1, inf)")] = None
    """Memory of one GPU in MiB, as nvidia-smi shows it (H100: 81559, H200: 143771); null for no verdict on whether a
    plan fits."""
    gpu: Annotated[str | None, OneOf("h100", "h200", "h800", "h20", "a100", "b200", "gb200", "gb300")] = None
    """Type of the GPUs, whose data sheet gives the planner's times; null for no times."""
    host_memory_gib: Annotated[int | None, Interval("[1, inf)")] = None
    """Main memory of one machine in GiB; null for no verdict."""
    timeout_seconds: Annotated[
        int, Interval("[60, 604800]", "a minute to a week: busy ranks are late, and a job that hangs has to end")
    ] = 1800
    """How long a collective waits for the slowest rank before the job ends: longer than that rank takes to read its
    part of a checkpoint; writing one is not limited."""

"""The optimizer of the reinforcement learning stage, and the adapters that it may train."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from omegaconf import MISSING

from grpo_mega.config.limits import Interval, OneOf, With

ADAPTED = With("rank", Interval("[1, inf)"))
FALLING = With("schedule", OneOf("linear", "cosine", "wsd"))


@dataclass
class ScheduleConfig:
    """How a stage's learning rate changes after its warm-up."""

    schedule: Annotated[str, OneOf("constant", "linear", "cosine", "wsd")] = "constant"
    """Learning rate after the warm-up: constant; linear or cosine, which decay to `lr_floor`; wsd (warm-up, stable,
    decay), which decays linearly at the end of the stage."""
    decay_steps: Annotated[
        int | None, Interval("[2, inf)", "the first step of a fall is still at the peak"), FALLING
    ] = None
    """Steps of the decay, with and without signal. wsd needs a number; linear and cosine otherwise decay over all steps
    after the warm-up. docs/optimizer.md says how to leave `run.steps` open."""
    lr_floor: Annotated[float, Interval("[0, 1]"), FALLING] = 0.0
    """Learning rate after the decay, as a share of `lr`."""


@dataclass
class PartConfig:
    """Optimizer settings of one part of the model."""

    lr_multiplier: Annotated[float, Interval("(0, inf)")] = 1.0
    """The part's learning rate is `optimizer.lr` times this, throughout the schedule."""
    weight_decay: Annotated[float | None, Interval("[0, 1)")] = None
    """The part's decoupled weight decay; null for `optimizer.weight_decay`. Norms and biases never decay."""


@dataclass
class PartsConfig:
    """The parts of a model; every parameter belongs to one, a bias to its matrix's: embedding (with
    model.tie_embeddings also the output layer), head (the output layer), attention (its projections), mlp (dense MLPs
    and shared experts), experts (routed ones), router (its matrices; for the balancing bias see model.moe), norms
    (also those within attention), predictors (multi-token prediction modules, whole), adapters (see `lora`)."""

    embedding: PartConfig = field(default_factory=PartConfig)
    head: PartConfig = field(default_factory=PartConfig)
    attention: PartConfig = field(default_factory=PartConfig)
    mlp: PartConfig = field(default_factory=PartConfig)
    experts: PartConfig = field(default_factory=PartConfig)
    router: PartConfig = field(default_factory=PartConfig)
    norms: PartConfig = field(default_factory=PartConfig)
    predictors: PartConfig = field(default_factory=PartConfig)
    adapters: PartConfig = field(default_factory=PartConfig)


@dataclass
class StateConfig:
    """How Adam's state is kept, in all stages but a base model's. Needs `optimizer.distributed`."""

    moments: Annotated[str, OneOf("fp32", "bf16")] = "fp32"
    """Type of Adam's moments between updates; they are computed in fp32. With bf16 (DeepSeek-V3, arXiv 2412.19437,
    section 3.3.2) a bf16 model's state takes 8 bytes a parameter, not 12."""
    on_host: bool = False
    """Keep moments and fp32 weights in pinned main memory between updates, each of which copies them to the GPU and
    back (docs/optimizer.md)."""


@dataclass
class OptimizerConfig(ScheduleConfig):
    """AdamW through Megatron's optimizer."""

    lr: Annotated[float, Interval("(0, inf)")] = MISSING
    """Peak learning rate."""
    warmup_steps: Annotated[int, Interval("[0, inf)")] = 0
    """Optimizer updates of linear warm-up."""
    beta1: Annotated[float, Interval("[0, 1)")] = 0.9
    """Decay rate of Adam's first moment."""
    beta2: Annotated[float, Interval("[0, 1)")] = 0.95
    """Decay rate of Adam's second moment."""
    eps: Annotated[float, Interval("(0, inf)")] = 1e-8
    """Adam's epsilon."""
    weight_decay: Annotated[float, Interval("[0, inf)")] = 0.0
    """Decoupled weight decay; with 0, a step without signal moves nothing."""
    parts: PartsConfig = field(default_factory=PartsConfig)
    """Learning rates and weight decay of the parts of the model, in GRPO."""
    frozen: list[str] = field(default_factory=list)
    """Parts of the model, by the names of `parts`, that keep their weights in every stage, without gradients, moments
    or a share of the gradient norm."""
    average_decay: Annotated[float, Interval("[0, 1)")] = 0.0
    """Decay of the exponential moving average of the weights at each update (0.99: about the last 100 updates count); 0
    for no average. Evaluations use it, and tools/export.py --model average writes it; docs/optimizer.md has the memory
    that it takes."""
    clip_grad: Annotated[float, Interval("[0, inf)")] = 1.0
    """Global gradient norm limit; 0 for none."""
    distributed: bool = False
    """Shard optimizer state over data parallel ranks (Megatron's distributed optimizer)."""
    overlap: bool = False
    """Reduce gradients over data parallel ranks during the backward pass; with `distributed`, also gather updated
    parameters during the next forward pass."""
    state: StateConfig = field(default_factory=StateConfig)
    """How Adam's state is kept."""


@dataclass
class LoRAConfig:
    """LoRA (Hu et al., 2021, arXiv 2106.09685): W x becomes W x + alpha / rank * B (A x); only A and B are trained."""

    rank: Annotated[int, Interval("[0, inf)")] = 0
    """Rows of A, columns of B; 0 trains all weights and has no adapters."""
    alpha: Annotated[float, Interval("(0, inf)"), ADAPTED] = 32.0
    """Scale of the adapters' output, which is multiplied by alpha / rank."""
    targets: Annotated[list[str], ADAPTED] = field(default_factory=lambda: ["attention", "mlp", "experts"])
    """Matrices with adapters. attention: its projections, by Hugging Face's names q_proj, k_proj, v_proj and o_proj; of
    latent attention q_proj, or q_a_proj and q_b_proj, kv_a_proj_with_mqa, kv_b_proj and o_proj. mlp: gate_proj, up_proj
    and down_proj of dense layers and of the shared expert. experts: those of every routed expert."""

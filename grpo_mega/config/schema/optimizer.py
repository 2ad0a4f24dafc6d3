"""The optimizer of the reinforcement learning stage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from omegaconf import MISSING

from grpo_mega.config.limits import Interval, OneOf

SCHEDULES = ("constant", "linear", "cosine", "wsd")
AT_THE_PEAK = "the first step of a fall is still at the peak"


@dataclass
class PartConfig:
    """How the optimizer treats one part of the model."""

    lr_multiplier: Annotated[float, Interval("(0, inf)")] = 1.0
    """The part's learning rate is `optimizer.lr` times this, throughout the schedule."""
    weight_decay: Annotated[float | None, Interval("[0, 1)")] = None
    """The part's decoupled weight decay; null for `optimizer.weight_decay`. Norms and biases never decay."""


@dataclass
class PartsConfig:
    """The parts of a model; every parameter belongs to one, biases to their matrix's."""

    embedding: PartConfig = field(default_factory=PartConfig)
    """Vectors of the tokens; with model.tie_embeddings the output layer too, as they are one."""
    head: PartConfig = field(default_factory=PartConfig)
    """The output layer."""
    attention: PartConfig = field(default_factory=PartConfig)
    """Projections of attention."""
    mlp: PartConfig = field(default_factory=PartConfig)
    """Dense MLPs and shared experts."""
    experts: PartConfig = field(default_factory=PartConfig)
    """Routed experts."""
    router: PartConfig = field(default_factory=PartConfig)
    """Routers' matrices; the bias that balances the experts is no parameter, and moves as model.moe says."""
    norms: PartConfig = field(default_factory=PartConfig)
    """Norms, those within attention too."""
    predictors: PartConfig = field(default_factory=PartConfig)
    """Multi-token prediction modules, with all that is in them."""
    adapters: PartConfig = field(default_factory=PartConfig)
    """Adapters, see `lora`."""


@dataclass
class OptimizerConfig:
    """AdamW through Megatron's optimizer."""

    lr: Annotated[float, Interval("(0, inf)")] = MISSING
    """Peak learning rate."""
    warmup_steps: Annotated[int, Interval("[0, inf)")] = 0
    """Optimizer updates of linear warm-up."""
    schedule: Annotated[str, OneOf(*SCHEDULES)] = "constant"
    """What follows the warm-up: constant; linear or cosine, which fall to `lr_floor` from then on; wsd (warm-up,
    stable, decay), which stays at `lr` and falls linearly at the end of the run."""
    decay_steps: Annotated[int | None, Interval("[2, inf)", AT_THE_PEAK)] = None
    """GRPO steps of the fall, with and without signal: the last ones of the run under wsd, which needs a number; null
    under linear and cosine for all that follow the warm-up. A run that may be continued with more `run.steps` needs a
    number, and under wsd a checkpoint from before the fall: run.keep_every keeps some."""
    lr_floor: Annotated[float, Interval("[0, 1]")] = 0.0
    """What is left of `lr` after the fall, as a share of it."""
    beta1: Annotated[float, Interval("[0, 1)")] = 0.9
    """Adam's first moment decay."""
    beta2: Annotated[float, Interval("[0, 1)")] = 0.95
    """Adam's second moment decay."""
    eps: Annotated[float, Interval("(0, inf)")] = 1e-8
    """Adam's epsilon."""
    weight_decay: Annotated[float, Interval("[0, inf)")] = 0.0
    """Decoupled weight decay; with 0, a step without signal moves nothing."""
    parts: PartsConfig = field(default_factory=PartsConfig)
    """Learning rates and weight decay of parts of the model, in GRPO."""
    frozen: list[str] = field(default_factory=list)
    """Parts of the model, by the names of `parts`, that keep their weights in every stage: they have no gradients and
    no moments, and do not count in the gradient norm."""
    average_decay: Annotated[float, Interval("[0, 1)")] = 0.0
    """Share that an average of the weights keeps of itself at each update (0.99: about the last 100 updates count);
    evaluations use it in place of the weights, and tools/export.py --model average writes it. In host memory, four
    bytes for each trained parameter of a rank, and a copy of the weights during an evaluation. 0 for no average."""
    clip_grad: Annotated[float, Interval("[0, inf)")] = 1.0
    """Global gradient norm limit; 0 for none."""
    distributed: bool = False
    """Shard optimizer state over data parallel ranks (Megatron's distributed optimizer)."""
    overlap: bool = False
    """Reduce gradients over data parallel ranks during the backward pass; with `distributed`, also gather the
    updated parameters during the next forward pass."""

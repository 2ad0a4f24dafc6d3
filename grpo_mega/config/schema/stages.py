"""The stages before reinforcement learning: base model and cold start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class BaseConfig:
    """The base model: a plain language model trained on worked problems. Cached by the checksum of this recipe."""

    train: bool = False
    """Train (or take from the cache) a base model before reinforcement learning; otherwise start at `init_from`."""
    max_steps: int = 1200
    """Steps after which the run ends when the gate was not passed."""
    batch_size: int = 64
    """Documents per step."""
    lr: float = 3e-3
    """Learning rate after warm-up."""
    warmup_steps: int = 50
    """Steps of linear warm-up."""
    decay_steps: int = 30
    """Steps of linear decay to 0 after the gate is passed."""
    weight_decay: float = 0.01
    """Decoupled weight decay."""
    tagged: float = 0.1
    """Share of documents in the answer format; 0 for none."""
    direct: float = 0.25
    """Share of the untagged documents that hold the bare answer without working."""
    gate_accuracy: float = 0.9
    """Competence gate: greedy accuracy on untagged working, whose beginning is given, over validation problems."""
    gate_every: int = 50
    """Steps between gate checks."""
    gate_from: int = 150
    """Step of the first gate check."""
    gate_passes: int = 2
    """Checks in a row that must be passed: accuracy jumps about while it rises, and one check may be luck."""
    save_every: int = 500
    """Steps between checkpoints; with 0 there is one only when the run is asked to stop, and at the end."""


@dataclass
class SFTConfig:
    """Cold start: supervised steps before reinforcement learning."""

    path: str | None = None
    """File of rows to learn, one {"messages": [{"role": ..., "content": ...}, ...]} a line (every assistant
    turn is learned; needs data.template=chat) or {"prompt": text or messages, "completion": text}; null for the
    traces in the answer format that data.task=chain_sum makes."""
    steps: int = 0
    """Optimizer updates; 0 for none (R1-Zero)."""
    epochs: int = 0
    """Passes over the rows of `path`, instead of `steps`; 0 to use `steps`."""
    batch_size: int = 64
    """Rows per step."""
    max_tokens: int | None = None
    """Tokens of the longest row of `path`; null for model.context."""
    too_long: str = "refuse"
    """What to do with rows of more than `max_tokens`: refuse (the run does not begin) or cut (drop the last tokens)."""
    lr: float = 1e-3
    """Learning rate after warm-up."""
    warmup_steps: int = 5
    """Steps of linear warm-up; must be below `steps`."""
    schedule: str = "constant"
    """What follows the warm-up: constant, linear, cosine or wsd, as in `optimizer.schedule`."""
    decay_steps: int | None = None
    """Steps of the fall, see `optimizer.decay_steps`; null under linear and cosine for all that follow the warm-up."""
    lr_floor: float = 0.0
    """What is left of `lr` after the fall, as a share of it."""
    weight_decay: float = 0.01
    """Decoupled weight decay."""
    save_every: int = 500
    """Steps between checkpoints; with 0 there is one only when the run is asked to stop, and at the end."""

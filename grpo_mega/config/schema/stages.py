"""The stages beside reinforcement learning: base model, cold start, and the training of a reward model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from grpo_mega.config.limits import Interval, OneOf
from grpo_mega.config.schema.optimizer import AT_THE_PEAK, SCHEDULES


@dataclass
class BaseConfig:
    """The base model: a plain language model trained on worked problems. Cached by the checksum of this recipe."""

    train: bool = False
    """Train (or take from the cache) a base model before reinforcement learning; otherwise start at `init_from`."""
    max_steps: Annotated[int, Interval("[1, inf)")] = 1200
    """Steps after which the run ends when the gate was not passed."""
    batch_size: Annotated[int, Interval("[1, inf)")] = 64
    """Documents per step."""
    lr: Annotated[float, Interval("(0, inf)")] = 3e-3
    """Learning rate after warm-up."""
    warmup_steps: Annotated[int, Interval("[0, inf)")] = 50
    """Steps of linear warm-up."""
    decay_steps: Annotated[int, Interval("[0, inf)")] = 30
    """Steps of linear decay to 0 after the gate is passed."""
    weight_decay: Annotated[float, Interval("[0, inf)")] = 0.01
    """Decoupled weight decay."""
    tagged: Annotated[float, Interval("[0, 1]")] = 0.1
    """Share of documents in the answer format; 0 for none."""
    direct: Annotated[float, Interval("[0, 1]")] = 0.25
    """Share of the untagged documents that hold the bare answer without working."""
    gate_accuracy: Annotated[float, Interval("[0, 1]")] = 0.9
    """Competence gate: greedy accuracy on untagged working, whose beginning is given, over validation problems."""
    gate_every: Annotated[int, Interval("[1, inf)")] = 50
    """Steps between gate checks."""
    gate_from: Annotated[int, Interval("[0, inf)")] = 150
    """Step of the first gate check."""
    gate_passes: Annotated[int, Interval("[1, inf)")] = 2
    """Checks in a row that must be passed: accuracy jumps about while it rises, and one check may be luck."""
    save_every: Annotated[int, Interval("[0, inf)")] = 500
    """Steps between checkpoints; with 0 there is one only when the run is asked to stop, and at the end."""


@dataclass
class SFTConfig:
    """Cold start: supervised steps before reinforcement learning."""

    path: str | None = None
    """File of rows to learn, one {"messages": [{"role": ..., "content": ...}, ...]} a line (every assistant
    turn is learned; needs data.template=chat) or {"prompt": text or messages, "completion": text}; null for the
    traces in the answer format that data.task=chain_sum makes."""
    steps: Annotated[int, Interval("[0, inf)")] = 0
    """Optimizer updates; 0 for none (R1-Zero)."""
    epochs: Annotated[int, Interval("[0, inf)")] = 0
    """Passes over the rows of `path`, instead of `steps`; 0 to use `steps`."""
    batch_size: Annotated[int, Interval("[1, inf)")] = 64
    """Rows per step."""
    max_tokens: Annotated[int | None, Interval("[1, inf)")] = None
    """Tokens of the longest row of `path`; null for model.context."""
    too_long: Annotated[str, OneOf("refuse", "cut")] = "refuse"
    """What to do with rows of more than `max_tokens`: refuse (the run does not begin) or cut (drop the last tokens)."""
    lr: Annotated[float, Interval("(0, inf)")] = 1e-3
    """Learning rate after warm-up."""
    warmup_steps: Annotated[int, Interval("[0, inf)")] = 5
    """Steps of linear warm-up; must be below `steps`."""
    schedule: Annotated[str, OneOf(*SCHEDULES)] = "constant"
    """What follows the warm-up: constant, linear, cosine or wsd, as in `optimizer.schedule`."""
    decay_steps: Annotated[int | None, Interval("[2, inf)", AT_THE_PEAK)] = None
    """Steps of the fall, see `optimizer.decay_steps`; null under linear and cosine for all that follow the warm-up."""
    lr_floor: Annotated[float, Interval("[0, 1]")] = 0.0
    """What is left of `lr` after the fall, as a share of it."""
    weight_decay: Annotated[float, Interval("[0, inf)")] = 0.01
    """Decoupled weight decay."""
    save_every: Annotated[int, Interval("[0, inf)")] = 500
    """Steps between checkpoints; with 0 there is one only when the run is asked to stop, and at the end."""


@dataclass
class PairsConfig:
    """A reward model's training: on pairs of responses of which one is preferred, with `run.trains=reward_model`; on
    answers whose steps have labels, with `process_reward_model`, for which "pairs" below means such answers."""

    path: Any = None
    """File of pairs to learn, or a list of files that are learned as one: {"prompt": text or messages, "chosen": text,
    "rejected": text} a line. For a process reward model: {"prompt": text or messages, "completion": text, "steps": the
    texts of its steps, "labels": for each step a number from 0 (wrong) to 1 (right)}. Other fields are not read."""
    replay_path: Any = None
    """File or files of earlier pairs that are mixed in, so that a reward model which learns new ones keeps what it knew
    (DeepSeekMath, arXiv 2402.03300, section 4.1.4)."""
    replay_share: Annotated[float, Interval("(0, 1)")] = 0.1
    """Share of the pairs that are earlier ones, with `replay_path`."""
    test_path: str | None = None
    """File of held-out pairs."""
    test_size: Annotated[int, Interval("[0, inf)")] = 0
    """Held-out pairs that are taken off `path` instead: all pairs of some prompts, so many pairs at least."""
    epochs: Annotated[int, Interval("[1, inf)")] = 1
    """Passes over the pairs of `path`."""
    batch_size: Annotated[int, Interval("[1, inf)")] = 64
    """Pairs of a step."""
    max_tokens: Annotated[int | None, Interval("[1, inf)")] = None
    """Tokens of the longest prompt with one of its responses; null for model.context. Longer ones are refused."""
    lr: Annotated[float, Interval("(0, inf)")] = 1e-5
    """Learning rate after warm-up."""
    warmup_steps: Annotated[int, Interval("[0, inf)")] = 5
    """Steps of linear warm-up; must be below the number of steps."""
    schedule: Annotated[str, OneOf(*SCHEDULES)] = "constant"
    """What follows the warm-up: constant, linear, cosine or wsd, as in `optimizer.schedule`."""
    decay_steps: Annotated[int | None, Interval("[2, inf)", AT_THE_PEAK)] = None
    """Steps of the fall, see `optimizer.decay_steps`; null under linear and cosine for all that follow the warm-up."""
    lr_floor: Annotated[float, Interval("[0, 1]")] = 0.0
    """What is left of `lr` after the fall, as a share of it."""
    weight_decay: Annotated[float, Interval("[0, inf)")] = 0.01
    """Decoupled weight decay."""
    save_every: Annotated[int, Interval("[0, inf)")] = 500
    """Steps between checkpoints; with 0 there is one only when the run is asked to stop, and at the end."""
    separators: list[str] = field(default_factory=lambda: ["\n"])
    """What divides the steps of an answer, for a process reward model: texts that belong to no step. It keeps them,
    and divides by them what it scores."""


def files_in(paths: Any) -> list[str]:
    """The files that `PairsConfig.path` or `replay_path` names."""
    return [paths] if isinstance(paths, str) else [*paths] if isinstance(paths, list) else []

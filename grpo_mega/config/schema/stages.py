"""Stages other than reinforcement learning: base model, cold start, reward models, distillation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from grpo_mega.config.limits import Interval, IsSet, OneOf, With
from grpo_mega.config.schema.optimizer import ScheduleConfig

OF_FILES = With("path", IsSet())
"""About the rows of a file."""
TAUGHT = With("teacher", IsSet())
Rate = Annotated[float, Interval("(0, inf)")]
Steps = Annotated[int, Interval("[0, inf)")]


@dataclass
class SupervisedConfig:
    """What the supervised stages and the training of a reward model have in common."""

    batch_size: Annotated[int, Interval("[1, inf)")] = 64
    """Documents (base), rows (sft) or pairs per step."""
    lr: Rate = 1e-3
    """Learning rate after warm-up."""
    warmup_steps: Steps = 5
    """Steps of linear warm-up."""
    weight_decay: Annotated[float, Interval("[0, inf)")] = 0.01
    """Decoupled weight decay."""
    save_every: Steps = 500
    """Steps between checkpoints; 0 saves only at a stop and at the end."""


@dataclass
class BaseConfig(SupervisedConfig):
    """The base model: a plain language model trained on worked problems. Cached by the checksum of this recipe."""

    train: bool = False
    """Train (or take from the cache) a base model before reinforcement learning; otherwise start from
    `run.init_from`."""
    max_steps: Annotated[int, Interval("[1, inf)")] = 1200
    """Steps after which the run ends if the gate is not passed."""
    lr: Rate = 3e-3
    warmup_steps: Steps = 50
    decay_steps: Annotated[int, Interval("[0, inf)")] = 30
    """Steps of linear decay to 0 after the gate is passed."""
    tagged: Annotated[float, Interval("[0, 1]")] = 0.1
    """Share of documents in the answer format."""
    direct: Annotated[float, Interval("[0, 1]")] = 0.25
    """Share of the untagged documents with the bare answer, without working."""
    gate_accuracy: Annotated[float, Interval("[0, 1]")] = 0.9
    """Competence gate: greedy accuracy over validation problems, continuing the given beginning of untagged working."""
    gate_every: Annotated[int, Interval("[1, inf)")] = 50
    """Steps between gate checks."""
    gate_from: Annotated[int, Interval("[0, inf)")] = 150
    """Step of the first gate check."""
    gate_passes: Annotated[int, Interval("[1, inf)")] = 2
    """Consecutive checks that must be passed, because accuracy fluctuates."""


@dataclass
class SFTConfig(ScheduleConfig, SupervisedConfig):
    """Cold start: supervised fine-tuning before reinforcement learning."""

    path: str | None = None
    """File of rows to learn, one {"messages": [{"role": ..., "content": ...}, ...]} a line (every assistant turn is
    learned; needs data.template=chat) or {"prompt": text or messages, "completion": text}; null for generated traces of
    data.task=chain_sum."""
    steps: Annotated[int, Interval("[0, inf)")] = 0
    """Optimizer updates; 0 for none (R1-Zero)."""
    epochs: Annotated[int, Interval("[0, inf)"), OF_FILES] = 0
    """Passes over the rows of `path`, instead of `steps`; 0 to use `steps`."""
    max_tokens: Annotated[int | None, Interval("[1, inf)"), OF_FILES] = None
    """Longest row of `path`, in tokens; null for model.context."""
    too_long: Annotated[str, OneOf("refuse", "cut"), OF_FILES] = "refuse"
    """Rows of more than `max_tokens`: refuse (the run does not start) or cut (drop the last tokens)."""


@dataclass
class PairsConfig(ScheduleConfig, SupervisedConfig):
    """Training of a reward model on pairs of completions, one preferred; of a process reward model on completions with
    labelled steps, called "pairs" below."""

    path: Any = None
    """File of pairs to learn, or a list of files: {"prompt": text or messages, "chosen": text, "rejected": text} a
    line. For a process reward model: {"prompt": text or messages, "completion": text, "steps": their texts, "labels":
    for each a number from 0 (wrong) to 1 (right)}. Other fields are ignored."""
    replay_path: Any = None
    """File or files of earlier pairs to mix in, so that new ones do not displace them (DeepSeekMath, arXiv 2402.03300,
    section 4.1.4)."""
    replay_share: Annotated[float, Interval("(0, 1)"), With("replay_path", IsSet())] = 0.1
    """Share of replayed pairs."""
    test_path: str | None = None
    """File of held-out pairs."""
    test_size: Annotated[int, Interval("[0, inf)")] = 0
    """Pairs held out of `path`, at least, in place of `test_path`: all pairs of some prompts."""
    epochs: Annotated[int, Interval("[1, inf)")] = 1
    """Passes over the pairs of `path`."""
    max_tokens: Annotated[int | None, Interval("[1, inf)")] = None
    """Longest prompt with a response, in tokens; null for model.context. Longer ones are refused."""
    lr: Rate = 1e-5
    separators: Annotated[list[str], With("run.trains", OneOf("process_reward_model"))] = field(
        default_factory=lambda: ["\n"]
    )
    """Separators between the steps of a completion; they belong to no step. The model stores them, and splits by them
    when it scores."""


def files_in(paths: Any) -> list[str]:
    """List of the files in `PairsConfig.path` or `replay_path`."""
    return [paths] if isinstance(paths, str) else [*paths] if isinstance(paths, list) else []


@dataclass
class DistillConfig:
    """On-policy distillation: the policy learns from a teacher's log-probs of its own samples, instead of rewards or in
    addition (MiniLLM, arXiv 2306.08543; GKD, arXiv 2306.13649)."""

    teacher: str | None = None
    """A run (its newest checkpoint), a checkpoint, or a Hugging Face folder, of any architecture with the policy's
    tokens; or the address of an SGLang server, http://HOST:PORT, on separate GPUs. Null for no distillation."""
    timeout_seconds: Annotated[float, Interval("(0, inf)"), TAUGHT] = 300.0
    """Time limit for a server to score a sample."""
    coef: Annotated[float, Interval("(0, inf)"), TAUGHT] = 1.0
    """Factor of log(teacher / policy), the advantage of a sampled token: minus the k1 estimate of the reverse KL."""
    reward_coef: Annotated[float, Interval("[0, inf)"), TAUGHT] = 0.0
    """Factor of the algorithm's advantage from rewards, which is added to it; with 0 rewards are only measured."""

    @property
    def served(self) -> bool:
        """Whether the teacher is on a server, so that there are no files of it here."""
        return (self.teacher or "").startswith(("http://", "https://"))

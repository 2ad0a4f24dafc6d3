"""The run: its name, its length and what it writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from omegaconf import MISSING

from grpo_mega.config.limits import Interval, OneOf

TRACKERS = ("wandb", "trackio", "mlflow")
"""Where metrics can be sent."""
REWARD_MODELS = ("reward_model", "process_reward_model")
"""What `run.trains` is for runs that train a reward model."""


@dataclass
class RunConfig:
    """The name of a run, how long it lasts and what it writes."""

    name: str = MISSING
    """The run's directory is `root`/`name`."""
    root: str = "runs"
    """Directory of run directories and cached base models."""
    trains: Annotated[str, OneOf("policy", *REWARD_MODELS)] = "policy"
    """What the run trains: policy (the stages before reinforcement learning, and this), reward_model (which scores
    whole answers) or process_reward_model (which scores their steps); these two learn from `pairs`, and need no
    `run.steps`, `algorithm`, `reward` and `optimizer.lr`, and of `data` the tokenizer and its template."""
    seed: Annotated[int, Interval("[0, 4294967295]", "generators are seeded with 32 bits of it")] = 0
    """Everything random derives from it: weights, data, sampling."""
    steps: Annotated[int, Interval("[0, inf)")] = MISSING
    """GRPO steps; 0 ends the run after the stages before them. A reward model's follow from `pairs`."""
    eval_every: Annotated[int, Interval("[0, inf)")] = 20
    """Steps between evaluations on the validation problems; 0 for never. The held-out test runs first and last. A
    reward model is evaluated on its held-out pairs, then and at the end."""
    save_every: Annotated[int, Interval("[0, inf)")] = 20
    """Steps between checkpoints; 0 saves only the last step."""
    async_save: bool = False
    """Write checkpoints while training continues; one counts when it is complete, a step or more later. Costs memory: a
    copy of the saved state is held until then."""
    keep_checkpoints: Annotated[int, Interval("[1, inf)")] = 2
    """Newest checkpoints kept."""
    keep_every: Annotated[int, Interval("[0, inf)")] = 0
    """Checkpoints of steps divisible by this are kept for good; 0 for none. Those of an earlier stage, such as the cold
    start, go when the next one has saved."""
    export_every: Annotated[int, Interval("[-1, inf)", "-1 exports after the last step only, 0 never")] = 0
    """Steps between exports of the policy as a Hugging Face folder, export/step-NNNNNN of the run directory; the last
    step is exported too. -1 exports that one alone, 0 none. All are kept; one that fails is a warning."""
    print_every: Annotated[int, Interval("[1, inf)")] = 10
    """Steps between rows of the console table."""
    report_every: Annotated[int, Interval("[0, inf)")] = 50
    """Steps between pages about the run (report.html), each written beside training by a process of low priority; 0 for
    none before the end, which always leaves one."""
    sample_groups_per_step: Annotated[int, Interval("[0, inf)")] = 1
    """Groups of answers that every step writes to samples/, whole and with the numbers of each token (50 bytes a token
    or so): drawn by `seed` and step, from those with signal as far as there are such. 0 for none, on the console
    neither."""
    followed_problems: Annotated[int, Interval("[0, inf)")] = 2
    """The first so many validation problems are followed: each evaluation writes its answers to them to samples/. 0
    for none."""
    tensorboard: bool = True
    """Write TensorBoard event files."""
    keep_traces: Annotated[int, Interval("[0, inf)")] = 20
    """Newest steps whose trace is kept in trace/, a file a rank, and up to as many before them; 0 for none. What each
    rank did last is in flight/ in any case. See docs/traces.md."""
    profile_steps: str | None = None
    """Steps of the last stage that torch's profiler follows, FIRST:LAST, such as 3:5, into profile/, a file a rank; it
    slows them down. null for none."""
    trackers: list[str] = field(default_factory=list)
    """Where the metrics of every step are sent besides: wandb, trackio, mlflow, which are installed apart. A process of
    its own sends them; one that fails is a warning. See docs/trackers.md."""
    tracker_project: str = "grpo_mega"
    """The project, or experiment, that the trackers file the run under."""
    prometheus: str | None = None
    """Folder for the newest metrics as a file of Prometheus' node exporter (its --collector.textfile.directory); null
    for none."""
    stop_on: list[str] = field(default_factory=list)
    """Alarms that stop the run, which is saved and ends with exit code 4; [any] for each of them. See `alarms`."""
    init_from: str | None = None
    """Directory to start from when `base.train` is false: a checkpoint, or a Hugging Face model (Llama, Mistral,
    Qwen2.5, Qwen3, Qwen3-MoE, DeepSeek-V3); null starts from random weights. A Hugging Face folder also gives the
    model, unless one is chosen, and the tokenizer."""

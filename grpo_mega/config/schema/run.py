"""The run: its name, length and outputs, its evaluations and alarms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from omegaconf import MISSING

from grpo_mega.config.limits import Interval, OneOf

TRACKERS = ("wandb", "trackio", "mlflow")
"""Services that metrics can be sent to."""
REWARD_MODELS = ("reward_model", "process_reward_model")
"""Values of `run.trains` for runs that train a reward model."""


@dataclass
class RunConfig:
    """Name, length and outputs of a run."""

    name: str = MISSING
    """The run's directory is `root`/`name`."""
    root: str = "runs"
    """Directory of run directories and cached base models."""
    trains: Annotated[str, OneOf("policy", *REWARD_MODELS)] = "policy"
    """policy (by reinforcement learning and the stages before it), reward_model (scores whole completions) or
    process_reward_model (scores their steps). The last two learn from `pairs`; they need no `run.steps`, `algorithm`,
    `reward` or `optimizer.lr`, and of `data` only tokenizer and template."""
    seed: Annotated[int, Interval("[0, 4294967295]", "generators are seeded with 32 bits of it")] = 0
    """Random seed of weights, data and sampling."""
    steps: Annotated[int, Interval("[0, inf)")] = MISSING
    """GRPO steps; 0 ends the run after the earlier stages. Steps of a reward model follow from `pairs`."""
    eval_every: Annotated[int, Interval("[0, inf)")] = 20
    """Steps between evaluations on validation problems (reward models: held-out pairs); 0 for never. The held-out test
    runs before and after training."""
    save_every: Annotated[int, Interval("[0, inf)")] = 20
    """Steps between checkpoints; 0 saves only the last step."""
    async_save: bool = False
    """Write checkpoints in the background; each becomes valid a step or more later, and until then a copy of the state
    stays in memory."""
    keep_checkpoints: Annotated[int, Interval("[1, inf)")] = 2
    """Newest checkpoints to keep."""
    keep_every: Annotated[int, Interval("[0, inf)")] = 0
    """Keep checkpoints of steps divisible by this forever; 0 for none. Those of an earlier stage, such as the cold
    start, are deleted once the next stage has saved."""
    export_every: Annotated[int, Interval("[-1, inf)", "-1 exports after the last step only, 0 never")] = 0
    """Steps between exports of the policy as a Hugging Face folder, export/step-NNNNNN of the run directory, also at
    the end; -1 exports only then, 0 never. All are kept; a failed export is a warning."""
    print_every: Annotated[int, Interval("[1, inf)")] = 10
    """Steps between rows of the console table."""
    report_every: Annotated[int, Interval("[0, inf)")] = 50
    """Steps between reports (report.html), written in the background; 0 for only one at the end."""
    sample_groups_per_step: Annotated[int, Interval("[0, inf)")] = 1
    """Groups that every step writes to samples/, with per-token numbers (about 50 bytes a token): drawn by `seed` and
    step, preferably with signal. 0 for none, also on the console."""
    followed_problems: Annotated[int, Interval("[0, inf)")] = 2
    """Validation problems, the first ones, whose completions each evaluation writes to samples/."""
    tensorboard: bool = True
    """Write TensorBoard event files."""
    keep_traces: Annotated[int, Interval("[0, inf)")] = 20
    """Newest steps whose trace is kept in trace/, one file per rank (docs/traces.md); up to twice as many may exist.
    flight/ always has each rank's last actions."""
    profile_steps: str | None = None
    """Steps of the last stage, such as 3:5 (FIRST:LAST), that torch's profiler records into profile/, one file per
    rank, and slows down."""
    trackers: list[str] = field(default_factory=list)
    """Services that get the metrics of every step: wandb, trackio, mlflow (docs/trackers.md). Install them separately;
    a failure is a warning."""
    tracker_project: str = "grpo_mega"
    """The run's project, or experiment, in the trackers."""
    prometheus: str | None = None
    """Folder for the newest metrics as a file of Prometheus' node exporter (its --collector.textfile.directory)."""
    stop_on: list[str] = field(default_factory=list)
    """Alarms that stop the run, which saves a checkpoint and ends with exit code 4; [any] for all."""
    fork: str | None = None
    """Checkpoint of another run, of the same model and data, which this run continues under its own settings, such as a
    lower optimizer.lr."""
    init_from: str | None = None
    """Checkpoint to start from when `base.train` is false, or Hugging Face folder, which also gives the tokenizer and,
    unless one is chosen, the model; null for random weights."""


@dataclass
class EvalConfig:
    """Sampling of evaluations, during training (run.eval_every) and before and after it."""

    samples: Annotated[int, Interval("[1, 256]")] = 1
    """Completions of each problem; with several, pass@k and maj@k are recorded for k of 2, 4, ... `samples`."""
    temperature: Annotated[float | None, Interval("[0, 1000000]")] = None
    """Sampling temperature, 0 for the likeliest token; null: rollout.temperature."""
    top_p: Annotated[float | None, Interval("(0, 1]")] = None
    """Nucleus sampling; null: rollout.top_p."""


ANY = "any"
"""Word in `run.stop_on` with which every alarm stops the run."""


@dataclass
class AlarmsConfig:
    """The threshold of each alarm; null turns it off. docs/alarms.md has the conditions and what to do."""

    never_right: Annotated[int | None, Interval("[1, 10]")] = 5
    """First steps without a right answer."""
    entropy_collapse: Annotated[float | None, Interval("(0, inf)")] = 0.03
    """Entropy of a token in nats, for a policy that mostly fails."""
    kl_runaway: Annotated[float | None, Interval("(0, inf)")] = 1.0
    """KL divergence of a token in nats, from the reference or the old policy."""
    reward_hacking: Annotated[float | None, Interval("(0, inf)")] = 0.1
    """Fall of the accuracy from its best, while a reward rises."""
    truncation: Annotated[float | None, Interval("[0, 1)")] = 0.25
    """Share of completions that the length limit cuts."""
    repetition: Annotated[float | None, Interval("[0, 1)")] = 0.3
    """Share of a completion that repeats itself."""
    no_signal: Annotated[float | None, Interval("[0, 1)")] = 0.5
    """Share of groups without signal, less those learned."""
    unscorable: Annotated[float | None, Interval("[0, 1)")] = 0.05
    """Share of samples without a score."""
    mismatch: Annotated[float | None, Interval("(0, inf)")] = 0.1
    """Mean difference of log-probs of engine and trainer, in nats."""
    staleness: Annotated[float | None, Interval("(1, inf)")] = 2.0
    """Age of a token, over that in the first steps."""
    correction: Annotated[float | None, Interval("(0, 1)")] = 0.5
    """Share of the tokens that the correction leaves, as an effective sample size."""
    not_finite: Annotated[int | None, Interval("[0, inf)")] = 0
    """Metrics of a step that are infinite or not a number."""
    expert_imbalance: Annotated[float | None, Interval("(1, inf)")] = 4.0
    """Tokens of the busiest expert over the average."""
    slow_phase: Annotated[float | None, Interval("(1, inf)")] = 6.0
    """Seconds of a phase over their median."""
    stragglers: Annotated[float | None, Interval("(1, inf)")] = 1.5
    """Working time of the slowest rank over the median rank's."""
    held_out_falling: Annotated[float | None, Interval("(0, inf)")] = 0.1
    """Fall of the validation accuracy from its best."""

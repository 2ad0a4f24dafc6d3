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
    """Trained model: policy (by reinforcement learning and the stages before it), reward_model (scores whole answers)
    or process_reward_model (scores their steps). The last two learn from `pairs`; they need neither `run.steps`,
    `algorithm`, `reward` nor `optimizer.lr`, and of `data` only the tokenizer and its template."""
    seed: Annotated[int, Interval("[0, 4294967295]", "generators are seeded with 32 bits of it")] = 0
    """Random seed of everything: weights, data, sampling."""
    steps: Annotated[int, Interval("[0, inf)")] = MISSING
    """GRPO steps; 0 ends the run after the earlier stages. Steps of a reward model follow from `pairs`."""
    eval_every: Annotated[int, Interval("[0, inf)")] = 20
    """Steps between evaluations on the validation problems; 0 for never. The held-out test runs before and after
    training. A reward model is evaluated on its held-out pairs, also at the end."""
    save_every: Annotated[int, Interval("[0, inf)")] = 20
    """Steps between checkpoints; 0 saves only the last step."""
    async_save: bool = False
    """Write checkpoints in the background; each becomes valid when it is complete, a step or more later. A copy of the
    saved state is held in memory until then."""
    keep_checkpoints: Annotated[int, Interval("[1, inf)")] = 2
    """Number of newest checkpoints to keep."""
    keep_every: Annotated[int, Interval("[0, inf)")] = 0
    """Checkpoints of steps divisible by this are kept forever; 0 for none. Those of an earlier stage, such as the cold
    start, are removed when the next stage has saved."""
    export_every: Annotated[int, Interval("[-1, inf)", "-1 exports after the last step only, 0 never")] = 0
    """Steps between exports of the policy as a Hugging Face folder, export/step-NNNNNN of the run directory; the last
    step is exported too. -1 exports only the last step, 0 none. All are kept; a failed export is a warning."""
    print_every: Annotated[int, Interval("[1, inf)")] = 10
    """Steps between rows of the console table."""
    report_every: Annotated[int, Interval("[0, inf)")] = 50
    """Steps between reports (report.html), written in the background by a process of low priority; 0 for only one at
    the end."""
    sample_groups_per_step: Annotated[int, Interval("[0, inf)")] = 1
    """Number of groups that every step writes to samples/, with all answers and per-token numbers (about 50 bytes a
    token): drawn by `seed` and step, preferably from groups with signal. 0 for none, also on the console."""
    followed_problems: Annotated[int, Interval("[0, inf)")] = 2
    """Number of validation problems, the first ones, whose answers each evaluation writes to samples/; 0 for none."""
    tensorboard: bool = True
    """Write TensorBoard event files."""
    keep_traces: Annotated[int, Interval("[0, inf)")] = 20
    """Number of newest steps whose trace is kept in trace/, one file per rank; up to twice as many may exist. 0 for
    none. The last actions of each rank are always in flight/. See docs/traces.md."""
    profile_steps: str | None = None
    """Steps of the last stage to profile with torch's profiler, FIRST:LAST, such as 3:5, into profile/, one file per
    rank; profiling slows them down. null for none."""
    trackers: list[str] = field(default_factory=list)
    """Services that get the metrics of every step: wandb, trackio, mlflow, which must be installed separately. A
    separate process sends them; a failure is a warning. See docs/trackers.md."""
    tracker_project: str = "grpo_mega"
    """Project, or experiment, of the run in the trackers."""
    prometheus: str | None = None
    """Folder for the newest metrics as a file of Prometheus' node exporter (its --collector.textfile.directory); null
    for none."""
    stop_on: list[str] = field(default_factory=list)
    """Alarms that stop the run, which saves a checkpoint and ends with exit code 4; [any] for all. See `alarms`."""
    fork: str | None = None
    """Checkpoint of another run, of the same model and data, at which this run continues as that one would have, with
    the settings of this one, such as a lower optimizer.lr; null: from the beginning."""
    init_from: str | None = None
    """Directory to start from when `base.train` is false: a checkpoint, or a Hugging Face model (Llama, Mistral,
    Qwen2.5, Qwen3, Qwen3-MoE, DeepSeek-V3); null starts from random weights. A Hugging Face folder also gives the
    model, unless one is chosen, and the tokenizer."""


@dataclass
class EvalConfig:
    """Sampling of evaluations, during training (run.eval_every) and before and after it."""

    samples: Annotated[int, Interval("[1, 256]")] = 1
    """Number of sampled answers to each problem; with several, pass@k and maj@k are recorded for k of 2, 4, ...
    `samples`."""
    temperature: Annotated[float | None, Interval("[0, 1000000]")] = None
    """Sampling temperature, 0 for the likeliest token; null: rollout.temperature."""
    top_p: Annotated[float | None, Interval("(0, 1]")] = None
    """Nucleus sampling; null: rollout.top_p."""


ANY = "any"
"""Word in `run.stop_on` with which every alarm stops the run."""


@dataclass
class AlarmsConfig:
    """The threshold of each alarm; null turns it off. docs/alarms.md says what each means and what to do then."""

    never_right: Annotated[int | None, Interval("[1, 10]")] = 5
    """Steps, from the first on, without a right answer."""
    entropy_collapse: Annotated[float | None, Interval("(0, inf)")] = 0.03
    """Entropy of a token in nats, mean of 10 steps, below which a policy that mostly fails has stopped exploring."""
    kl_runaway: Annotated[float | None, Interval("(0, inf)")] = 1.0
    """KL divergence of a token in nats, median of 5 steps, from the reference or, within a step, the old policy."""
    reward_hacking: Annotated[float | None, Interval("(0, inf)")] = 0.1
    """Fall of the accuracy from its best, means of 10 steps, while the reward or another term rises by as much."""
    truncation: Annotated[float | None, Interval("[0, 1)")] = 0.25
    """Share of answers that the length limit cuts, mean of 10 steps."""
    repetition: Annotated[float | None, Interval("[0, 1)")] = 0.3
    """Share of an answer's stretches of tokens that came before in it, mean of 10 steps."""
    no_signal: Annotated[float | None, Interval("[0, 1)")] = 0.5
    """Share of groups without signal, mean of 10 steps, without those whose problems the run has learned to solve."""
    unscorable: Annotated[float | None, Interval("[0, 1)")] = 0.05
    """Share of answers without a score, mean of 5 steps."""
    mismatch: Annotated[float | None, Interval("(0, inf)")] = 0.1
    """Difference of log-probabilities of engine and trainer in nats, mean over tokens, median of 5 steps."""
    staleness: Annotated[float | None, Interval("(1, inf)")] = 2.0
    """Age of a token in updates, mean of 10 steps, over the highest of the first 10 steps, or 1 if that was less."""
    correction: Annotated[float | None, Interval("(0, 1)")] = 0.5
    """Share of the tokens that the correction leaves, as an effective sample size, mean of 10 steps; below it, too few.
    """
    not_finite: Annotated[int | None, Interval("[0, inf)")] = 0
    """Metrics of a step that may be infinite or not a number."""
    expert_imbalance: Annotated[float | None, Interval("(1, inf)")] = 4.0
    """Tokens of the busiest expert over those of the average one, median of 10 steps."""
    slow_phase: Annotated[float | None, Interval("(1, inf)")] = 6.0
    """Seconds of a phase over their median, when it took a minute or more."""
    stragglers: Annotated[float | None, Interval("(1, inf)")] = 1.5
    """Working time of the slowest rank over that of the median rank, median of 10 steps, in most of which it is one."""
    held_out_falling: Annotated[float | None, Interval("(0, inf)")] = 0.1
    """Fall of the validation accuracy from its best, in two evaluations in a row, while the training reward rises."""

"""Every metric that a run writes: what it is, in which unit, how it is taken over samples and ranks, which way is good.

Names are those of the lines of metrics.jsonl, of the files of earlier stages and of TensorBoard. `docs/metrics.md` is
made of this table; a test fails when a run writes a name that is not here, or when the document is not the table's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import product

WORDS = {"{term}": r"[A-Za-z]\w*", "{task}": r"[^/]+", "{k}": r"\d+"}
"""Placeholder in a metric's name -> pattern of the names that the configuration or the program puts there."""


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: What follows the prefix of its section; a word of `WORDS` stands for any such name.
        unit: Its unit; "" for a pure number, "share" for one from 0 to 1.
        meaning: Its definition, in one sentence or two.
        taken: What it is averaged over, and how; empty if the section says so.
        good: "up" or "down" where one direction is better; "" where none is, or neither for itself.
        short: What the console and curves.png call it; empty for one that they do not show.
        digits: How the console writes its values, as Python's format().
    """

    name: str
    unit: str
    meaning: str
    taken: str = ""
    good: str = ""
    short: str = ""
    digits: str = ".3g"


@dataclass(frozen=True)
class MetricSection:
    """Metrics whose names begin alike.

    Attributes:
        title: Heading in the document.
        prefixes: What the names begin with; each metric may occur with each of them. The document shows the first.
        about: What the metrics have in common: where they come from, and over what they are taken.
        metrics: The metrics; of several that match a name, the first one counts.
    """

    title: str
    prefixes: tuple[str, ...]
    about: str
    metrics: tuple[Metric, ...]


NATS = "nats"
SHARE = "share"
TOKENS = "tokens"
SECONDS = "s"

REWARD = MetricSection(
    "Rewards",
    ("reward/",),
    "Of the completions that the step learns from and that have a score. A metric that none of them has is absent.",
    (
        Metric("mean", "", "The total reward, the sum of weight * term.", "mean over samples", "up", "reward", ".3f"),
        Metric("std", "", "Deviation of the total rewards; 0 when all are equal.", "sqrt(mean((r - mean(r))^2))"),
        Metric(
            "accuracy", "", "The term that `reward.success` names.", "mean over the samples that have it", "up",
            "accuracy", ".1%",
        ),
        Metric(
            "format", "", "The term of this name, before its weight: 1 for a completion in the requested format.",
            "mean over the samples that have it", "up", "format", ".1%",
        ),
        Metric("unscorable", "samples", "Samples without a score.", "number", "down"),
        Metric("model", "", "The reward model's score, normalised, before its weight.", "mean over samples", "up"),
        Metric("{term}", "", "A term of the reward, before its weight.", "mean over the samples that have it", "up"),
        Metric(
            "{task}/total", "", "The total reward of a task, when there are several.", "mean over its samples", "up"
        ),
    ),
)  # fmt: skip
ROLLOUT = MetricSection(
    "Completions",
    ("rollout/",),
    "Of the completions that the step learns from, with or without a score. Those from `staleness_mean` on exist only "
    "with `rollout.slice_tokens` or `rollout.ahead`.",
    (
        Metric("tokens", TOKENS, "Sampled tokens, end tokens included.", "sum over samples"),
        Metric("length_mean", TOKENS, "Length of a completion.", "mean over samples", "", "length", ".1f"),
        Metric("length_p50", TOKENS, "The median length.", "nearest rank: the ceil(n / 2)-th shortest of n"),
        Metric("length_p99", TOKENS, "One in 100 is longer.", "nearest rank: the ceil(0.99 n)-th shortest of n"),
        Metric("length_max", TOKENS, "The longest completion.", "maximum over samples"),
        Metric("truncated", SHARE, "Completions that the length limit cut.", "share of samples", "down"),
        Metric(
            "repeated", SHARE, "Stretches of 8 tokens that occurred earlier in the completion; near 1 if it goes in "
            "circles.", "mean over samples", "down",
        ),
        Metric("steps_mean", "steps", "Rewarded steps of a completion.", "mean over samples whose steps are scored"),
        Metric(
            "all_right", SHARE, "Groups in which all succeed (`reward.success` is 1 or more): the problem is too easy.",
            "share of the groups that have this term",
        ),
        Metric(
            "all_wrong", SHARE, "Groups in which none succeeds (`reward.success` is 0 or less): the problem is too "
            "hard.", "share of the groups that have this term", "down",
        ),
        Metric(
            "groups_with_signal", SHARE, "Groups with an advantage that is not 0; absent with a critic or a teacher.",
            "share of groups", "up",
        ),
        Metric(
            "refilled", "prompts", "Prompts drawn in place of groups without signal "
            "(`algorithm.groups_without_signal=refill`).", "number of the step",
        ),
        Metric(
            "cached", SHARE, "Tokens that SGLang took from its prefix cache instead of reading them: a prompt for the "
            "next sample of its group, what comes before the next turn or slice.", "share of the tokens given to "
            "engines", "up",
        ),
        Metric(
            "staleness_mean", "updates", "By how many updates the weights that sampled a token are older than those "
            "that learn from it.", "mean over tokens", "", "staleness", ".2f",
        ),
        Metric("staleness_max", "updates", "The same of the oldest token.", "maximum over tokens"),
        Metric(
            "tokens_newest", SHARE, "Tokens sampled by the weights that learn from them.", "share of tokens",
        ),
        Metric(
            "in_flight", "samples", "Samples left for later steps.", "number at the end of the step", "", "in flight",
            ".0f",
        ),
        Metric(
            "waiting", "samples", "Of these, the finished ones, which wait for their group or their step.",
            "number at the end of the step",
        ),
    ),
)  # fmt: skip
UPDATE = (
    Metric(
        "grad_norm", "", "L2 norm of the whole gradient, before it is clipped.", "over all parameters, each once", "",
        "grad norm", ".3f",
    ),
    Metric("lr", "", "Learning rate, of the parts without `lr_multiplier`.", "of the update"),
    Metric(
        "expert_imbalance", "", "Tokens of the busiest expert over those of the average one; 1 is balanced.",
        "maximum over layers", "down",
    ),
)  # fmt: skip
SUPERVISED_LOSS = Metric("loss", NATS, "-log p of a token.", "mean over learned tokens", "down", "loss", ".4f")
LANGUAGE = (
    Metric(
        "entropy",
        NATS,
        "Entropy of the model's distribution at a token.",
        "mean over learned tokens",
        "",
        "entropy",
        ".3f",
    ),
    Metric("mtp_loss", NATS, "Cross entropy of the prediction modules.", "mean over what they predict", "down"),
)
ENVIRONMENT = MetricSection(
    "Calls of an environment",
    ("environment/",),
    "Only with `environment.path`; of the completions that the step learns from, except for the seconds.",
    (
        Metric("calls", "turns", "Turns with a call in a completion; all turns of an agent.", "mean over samples", "",
               "calls", ".2f"),
        Metric("errors", SHARE, "Wrong calls: an unknown tool, arguments that do not fit, or an exception.",
               "share of calls", "down", "call errors", ".1%"),
        Metric("given", SHARE, "Tokens of replies, which are never learned.", "share of tokens"),
        Metric("restarts", "", "How often an agent's chat begins anew in a completion; absent if never.",
               "mean over samples"),
        Metric("seconds", SECONDS, "Time from a call to its reply, calls of evaluations included.", "mean over calls"),
    ),
)  # fmt: skip
POLICY = MetricSection(
    "Updates of the policy",
    ("policy/",),
    "Means over the updates of a step; learned tokens are the sampled ones. Absent when a step learned nothing.",
    (
        Metric("loss", "", "What the update minimised, weight * loss.", "sum over learned tokens"),
        *UPDATE,
        *LANGUAGE,
        Metric(
            "ratio", "", "pi(y_t) / pi_old(y_t), the importance ratio (DeepSeekMath, arXiv 2402.03300, equation 3); "
            "with GSPO and GMPO the sequence's.",
            "mean over learned tokens",
        ),
        Metric(
            "clip_fraction", SHARE, "Tokens beyond a bound, including the dual clip's.", "share of learned tokens", "",
            "clipped", ".1%",
        ),
        Metric("clip_low", SHARE, "Of these, tokens below 1 - `algorithm.clip_low`.", "share of learned tokens"),
        Metric("clip_high", SHARE, "Of these, tokens above 1 + `algorithm.clip_high`.", "share of learned tokens"),
        Metric("approx_kl_old", NATS, "KL(old || policy) by k3: ratio - 1 - log(ratio).", "mean over learned tokens"),
        Metric(
            "kl", NATS, "KL(policy || reference) by `algorithm.kl_estimator`; k3 is r - log r - 1 with r = pi_ref / pi "
            "(arXiv 2402.03300, equation 4). Absent without a KL term.", "mean over learned tokens", "", "kl", ".4f",
        ),
        Metric("correction", "", "Factor of the policy term for the engine's deviation.", "mean over learned tokens"),
        Metric("corrected", SHARE, "Tokens beyond a bound of the correction.", "share of learned tokens", "down"),
        Metric("rejected", SHARE, "Tokens that the correction leaves out.", "share of learned tokens", "down"),
        Metric(
            "effective_samples", SHARE, "(sum w)^2 / (n * sum w^2) with the correction's factor w of n tokens: the "
            "share that it leaves; only with `rollout.slice_tokens` or `rollout.ahead`.",
            "sums over learned tokens of the step", "up",
        ),
        Metric(
            "gradient_noise_scale", "mini-batches", "tr(S) / |G|^2, noise over signal of a gradient (McCandlish et "
            "al., arXiv 1812.06162, equation 2.9); far above 1, larger batches help.", "from Adam's moments",
        ),
    ),
)  # fmt: skip
CRITIC = MetricSection(
    "The critic",
    ("critic/",),
    "Of PPO; taken like the policy's.",
    (
        Metric(
            "loss", "", "(V - R)^2 / 2, the larger of V and V clipped to `critic.clip` around its value before the "
            "step; R is the return (Schulman et al., arXiv 1707.06347).",
            "sum over learned tokens of weight * loss", "down",
        ),
        *UPDATE,
        Metric("value", "", "Future rewards as the critic predicts them.", "mean over learned tokens"),
        Metric(
            "explained_variance", "", "1 - Var(returns - values) / Var(returns), by the values before the step; a "
            "constant has 0.", "variances over the learned tokens of an update", "up",
        ),
    ),
)  # fmt: skip
DISTILL = MetricSection(
    "Distillation",
    ("distill/",),
    "Of all sampled tokens of the step.",
    (
        Metric("reverse_kl", NATS, "log(policy / teacher): KL(policy || teacher) by k1.", "mean over tokens", "down"),
        Metric("teacher_logprob", NATS, "The teacher's log-prob of a token.", "mean over tokens", "up"),
    ),
)
MISMATCH = MetricSection(
    "Engine and trainer",
    ("mismatch/",),
    "d = trainer - engine, log-probs of the sampled tokens of the step; also in steps that learn nothing.",
    (
        Metric("mean_abs", NATS, "|d|.", "mean over tokens", "down", "mismatch", ".2g"),
        Metric("max_abs", NATS, "The largest |d|.", "maximum over tokens", "down"),
        Metric("p50_abs", NATS, "The median of |d|.", "nearest rank", "down"),
        Metric("p90_abs", NATS, "One token in 10 has a larger |d|.", "nearest rank", "down"),
        Metric("p99_abs", NATS, "One token in 100 has a larger |d|.", "nearest rank", "down"),
        Metric("mean_ratio", "", "exp(d), whose expectation is 1.", "mean over tokens"),
        Metric(
            "effective_sample_size", SHARE, "(sum w)^2 / (n * sum w^2) with w = exp(d): the share of n tokens that "
            "importance sampling would leave.", "sums over tokens", "up",
        ),
    ),
)  # fmt: skip
SYNC = MetricSection(
    "Weights on their way to engines",
    ("sync/",),
    "Only with `rollout.engine=sglang`.",
    (
        Metric("bytes", "bytes", "Sent since the last step's line.", "sum, of the main rank"),
        Metric(
            "mean_abs", NATS, "|engine - trainer|, log-probs of a text under the new weights, in steps that verify.",
            "mean over tokens, of the engine that is off most", "down",
        ),
    ),
)  # fmt: skip
EVAL = MetricSection(
    "Evaluations",
    ("eval/", "eval/{task}/", "eval/heldout/", "eval/heldout/{task}/"),
    "Validation problems, every `run.eval_every` steps, in the step's line; held-out problems as `eval/heldout/`, "
    "before the first step and after the last, in separate lines; several tasks also separately. Means over problems "
    "of a problem's mean over `eval.samples` completions ([evaluation.md](evaluation.md)).",
    (
        Metric(
            "accuracy", "", "The term that `reward.success` names; of pairs and steps, as in the sections about "
            "reward models.", "", "up", "accuracy", ".1%",
        ),
        Metric("length", TOKENS, "Length of a completion."),
        Metric("truncated", SHARE, "Completions that the length limit cut; with `eval.samples` above 1.", "", "down"),
        Metric("environment/calls", "turns", "Turns with a call in a completion; only with `environment.path`."),
        Metric("environment/errors", SHARE, "Calls that were wrong.", "problems with calls", "down"),
        Metric("pass@{k}", SHARE, "The best of k completions, unbiased (Chen et al., arXiv 2107.03374).", "", "up"),
        Metric("maj@{k}", SHARE, "The answer that most of k give (Wang et al., arXiv 2203.11171).", "", "up"),
        Metric("rm@{k}", SHARE, "The one of k that the reward model scores highest.", "", "up"),
        Metric("unscorable", "samples", "Completions without a score; absent when all have one.", "number", "down"),
        Metric("hacking", "", "1 if the learned reward rose while success fell, else 0.", "", "down"),
        Metric(
            "loss", NATS, "-log sigmoid(chosen - rejected) of held-out pairs; the cross-entropy of the labels of "
            "held-out steps.", "mean over pairs or steps", "down",
        ),
        Metric("margin", "", "chosen - rejected, scores of held-out pairs.", "mean over pairs", "up"),
        Metric(
            "calibration_error", "", "|confidence - share that is right| of held-out pairs or steps (Guo et al., "
            "arXiv 1706.04599, equation 3).", "10 bins of confidence, weighted by size", "down",
        ),
        Metric("auc", "", "How often a right step has a higher score than a wrong one, ties as half.", "steps", "up"),
        Metric("right", SHARE, "Held-out steps with a label of 1/2 or more, the accuracy of calling all right.",
               "steps"),
        Metric("{term}", "", "A term of the reward, before its weight.", "problems that have it", "up"),
    ),
)  # fmt: skip
SUPERVISED = MetricSection(
    "Supervised steps",
    ("sft/",),
    "In sft.jsonl: one update a step on given completions.",
    (SUPERVISED_LOSS, *UPDATE, *LANGUAGE),
)
BASE = MetricSection(
    "The base model",
    ("base/",),
    "In pretrain.jsonl: the toy's language model, on whole documents.",
    (
        SUPERVISED_LOSS,
        *UPDATE,
        *LANGUAGE,
        Metric(
            "working_accuracy", SHARE, "Of the gate, in steps that check it: right greedy completions of a given "
            "beginning.", "share of the validation problems", "up",
        ),
    ),
)  # fmt: skip
PAIRS = MetricSection(
    "Reward models",
    ("reward_model/",),
    "In metrics.jsonl of a run with `run.trains=reward_model`, of the pairs of an update.",
    (
        Metric(
            "loss", NATS, "-log sigmoid(chosen - rejected) (Ouyang et al., arXiv 2203.02155, equation 1).",
            "mean over pairs", "down", "loss", ".4f",
        ),
        Metric(
            "accuracy", SHARE, "Pairs whose chosen response has the higher score.", "share of pairs", "up", "accuracy",
            ".1%",
        ),
        Metric("margin", "", "chosen - rejected.", "mean over pairs", "up", "margin", ".3f"),
        *UPDATE,
    ),
)  # fmt: skip
STEPS = MetricSection(
    "Process reward models",
    ("process_reward_model/",),
    "In metrics.jsonl of a run with `run.trains=process_reward_model`, of the steps of an update.",
    (
        Metric(
            "loss", NATS, "Cross-entropy of sigmoid(score) with the label.", "mean over steps", "down", "loss", ".4f"
        ),
        Metric(
            "accuracy", SHARE, "Steps whose score has the sign of their label.", "share of steps", "up", "accuracy",
            ".1%",
        ),
        *UPDATE,
    ),
)  # fmt: skip
TIME = MetricSection(
    "Time",
    ("time/",),
    "Wall-clock seconds of the main rank, including its waits for others.",
    (
        Metric(
            "step", SECONDS, "All phases but evaluate, checkpoint and export.", "sum of phases", "down", "seconds",
            ".2f",
        ),
        Metric("generate", SECONDS, "The engine samples.", "", "down"),
        Metric("reward", SECONDS, "Completions are scored, beyond the time in which the engine samples.", "", "down"),
        Metric("reward_model", SECONDS, "A reward model scores or, in its run, learns.", "", "down"),
        Metric("sync", SECONDS, "Weights go to the engine, and the device changes hands.", "", "down"),
        Metric("logprobs", SECONDS, "Batches, and log-probs under old policy and reference.", "", "down"),
        Metric("values", SECONDS, "The critic's values.", "", "down"),
        Metric("teacher", SECONDS, "The teacher's log-probs.", "", "down"),
        Metric("update", SECONDS, "Forward, backward and optimizer of all updates.", "", "down"),
        Metric("evaluate", SECONDS, "An evaluation."),
        Metric("checkpoint", SECONDS, "Checkpoints since the line before."),
        Metric("export", SECONDS, "Exports since the line before."),
        Metric("base", SECONDS, "A step of the base model.", "", "down"),
        Metric("sft", SECONDS, "A supervised step.", "", "down"),
    ),
)  # fmt: skip
MACHINE = MetricSection(
    "The machines",
    ("machine/",),
    "These, too, differ when a run is repeated.",
    (
        Metric(
            "tokens_per_second", "tokens/s", "`rollout/tokens` over `time/step`; absent in a step that a stop "
            "cut in two.",
            "all ranks together", "up", "tokens/s", ",.0f",
        ),
        Metric(
            "tflops", "10^12/s", "Floating point operations of matrix products and attention in the learning models' "
            "forward and backward passes, without recomputation, over the seconds of their phase (`time/update`, "
            "`time/sft`, ...) and over ranks.",
            "mean over ranks", "up", "TFLOP/s", ".3g",
        ),
        Metric(
            "mfu", SHARE, "Model FLOPs utilization (PaLM, arXiv 2204.02311, appendix B): `machine/tflops` over the "
            "GPU's peak. Absent on CPUs, for fp32 models, and on GPUs that `platform/peaks.py` does not list.",
            "mean over ranks", "up", "MFU", ".1%",
        ),
        Metric(
            "straggling", "", "Seconds of a step in which the slowest rank did not wait for others, over the median "
            "rank's. Ranks that wait for each other within a layer (TP, EP, CP) count as one. Absent on one rank.",
            "lower median over ranks", "down",
        ),
        Metric("slowest_rank", "", "The slowest rank.", "number of the rank"),
        Metric(
            "peak_memory_gb", "10^9 bytes", "Peak since the process began: allocated by torch on a GPU, else resident.",
            "maximum over ranks", "down", "memory GB", ".2f",
        ),
    ),
)  # fmt: skip

SECTIONS = (
    REWARD, ROLLOUT, ENVIRONMENT, POLICY, CRITIC, DISTILL, MISMATCH, SYNC, EVAL, SUPERVISED, BASE, PAIRS, STEPS, TIME,
    MACHINE,
)  # fmt: skip


@cache
def find(name: str) -> Metric | None:
    """The table's metric for the name that a run writes; None when the table does not have it."""
    for section in SECTIONS:
        for metric, prefix in product(section.metrics, section.prefixes):
            pattern = re.escape(prefix + metric.name)
            for word, stands_for in WORDS.items():
                pattern = pattern.replace(re.escape(word), stands_for)
            if re.fullmatch(pattern, name):
                return metric
    return None


def unknown(names: Iterable[str]) -> list[str]:
    """The names that the table does not have, in order."""
    return [name for name in names if find(name) is None]

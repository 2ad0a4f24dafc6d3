"""Every metric that a run writes: what it is, in which unit, how it is taken over samples and ranks, which way is good.

Names are those of the lines of metrics.jsonl, of the files of earlier stages and of TensorBoard. `docs/metrics.md` is
made of this table; a test fails when a run writes a name that is not here, or when the document is not the table's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

WORDS = {"{term}": r"[A-Za-z]\w*", "{task}": r"[^/]+", "{k}": r"\d+"}
"""Placeholder in a metric's name -> pattern of the names that the configuration or the program puts there."""


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: What follows the prefix of its room; a word of `WORDS` stands for any such name.
        unit: Its unit; "" for a pure number, "share" for one from 0 to 1.
        meaning: Its definition, in one sentence or two.
        taken: Over what it is taken, and how; empty where the room says so.
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
class Room:
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

REWARD = Room(
    "Rewards",
    ("reward/",),
    "Of the answers that the step learns from, over all that have a score. Every rank has the scores of all, so the "
    "numbers are exact and the same under every layout. A metric that no answer has is absent.",
    (
        Metric("mean", "", "The total reward: the sum of weight * term.", "mean over samples", "up", "reward", ".3f"),
        Metric("std", "", "Deviation of the total rewards; 0 when all are equal.", "sqrt(mean((r - mean(r))^2))"),
        Metric(
            "accuracy", "", "The term that `reward.success` names.", "mean over the samples that have it", "up",
            "accuracy", ".1%",
        ),
        Metric(
            "format", "", "The term of this name, before its weight: as built in, 1 for an answer in the format that "
            "was asked for.", "mean over the samples that have it", "up", "format", ".1%",
        ),
        Metric("unscorable", "samples", "Samples without a score, which count nowhere else here.", "number", "down"),
        Metric("model", "", "The reward model's score, normalised, before its weight.", "mean over samples", "up"),
        Metric("{term}", "", "A term of the reward, before its weight.", "mean over the samples that have it", "up"),
        Metric(
            "{task}/total", "", "The total reward of a task, when there are several.", "mean over its samples", "up"
        ),
    ),
)  # fmt: skip
ROLLOUT = Room(
    "Answers",
    ("rollout/",),
    "Of the answers that the step learns from, those without a score too. Every rank knows the lengths of all, so the "
    "numbers are exact and the same under every layout. A group is the answers to one prompt.",
    (
        Metric("tokens", TOKENS, "Tokens that were sampled, end tokens included.", "sum over samples"),
        Metric("length_mean", TOKENS, "Length of an answer.", "mean over samples", "", "length", ".1f"),
        Metric("length_p50", TOKENS, "The median length.", "nearest rank: the ceil(n / 2)-th shortest of n"),
        Metric("length_p99", TOKENS, "One answer in 100 is longer.", "nearest rank: the ceil(0.99 n)-th shortest of n"),
        Metric("length_max", TOKENS, "The longest answer.", "maximum over samples"),
        Metric("truncated", SHARE, "Answers that the length limit cut.", "share of samples", "down"),
        Metric(
            "repeated", SHARE, "Stretches of 8 tokens of an answer that came before in it; near 1 where answers go in "
            "circles.", "mean over samples", "down",
        ),
        Metric("steps_mean", "steps", "Rewarded steps of an answer.", "mean over samples whose steps are scored"),
        Metric(
            "all_right", SHARE, "Groups in which every answer succeeds: `reward.success` is 1 or more. Problems that "
            "are too easy teach nothing.", "share of the groups in which an answer has this term",
        ),
        Metric(
            "all_wrong", SHARE, "Groups in which no answer succeeds at all: `reward.success` is 0 or less. Problems "
            "that are too hard teach nothing.", "share of the groups in which an answer has this term", "down",
        ),
        Metric(
            "groups_with_signal", SHARE, "Groups with an advantage that is not 0; absent with a critic or a teacher, "
            "where a group is no unit.", "share of groups", "up",
        ),
        Metric(
            "refilled", "prompts", "Prompts that were drawn for groups without signal "
            "(`algorithm.groups_without_signal=refill`).", "number of the step",
        ),
        Metric(
            "staleness_mean", "updates", "By how many updates the weights that sampled a token were older than those "
            "that learn from it; only with `rollout.slice_tokens` or `rollout.ahead`.",
            "mean over tokens of the answers", "", "staleness", ".2f",
        ),
        Metric("staleness_max", "updates", "The same of the oldest token.", "maximum over tokens of the answers"),
        Metric(
            "tokens_newest", SHARE, "Tokens that were sampled by the weights that learn from them, age 0; only with "
            "`rollout.slice_tokens` or `rollout.ahead`.", "share of the tokens of the answers",
        ),
        Metric(
            "in_flight", "samples", "Samples that later steps will take: unfinished, or of groups that wait; only with "
            "`rollout.slice_tokens` or `rollout.ahead`.", "number at the end of the step", "", "in flight", ".0f",
        ),
        Metric(
            "waiting", "samples", "Of these, the finished ones, which wait for others of their group, or for their "
            "step.", "number at the end of the step",
        ),
    ),
)  # fmt: skip
UPDATE = (
    Metric(
        "grad_norm", "", "L2 norm of the whole gradient, before it is clipped.", "over all parameters, each once", "",
        "grad norm", ".3f",
    ),
    Metric("lr", "", "Learning rate of the parts that have none of their own.", "of the update"),
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
ENVIRONMENT = Room(
    "Calls of an environment",
    ("environment/",),
    "Only with `environment.path`. All but the seconds are of the answers that the step learns from, and equal in "
    "every layout.",
    (
        Metric("calls", "calls", "Calls in an answer.", "mean over samples", "", "calls", ".2f"),
        Metric("errors", SHARE, "Calls that were wrong: no such tool, arguments that do not fit, or the tool raised.",
               "share of calls", "down", "call errors", ".1%"),
        Metric("given", SHARE, "Tokens that replies have, which are never learned.", "share of tokens"),
        Metric("seconds", SECONDS, "Time from a call to its reply, calls of evaluations included.", "mean over calls"),
    ),
)  # fmt: skip
POLICY = Room(
    "Updates of the policy",
    ("policy/",),
    "Of the updates of a step, the mean over them. Sums and counts of tokens are added over all micro-batches and "
    "ranks before they are divided, so that each token counts once under every layout, up to rounding. Learned tokens "
    "are those of completions. Absent when nothing was learned in a step.",
    (
        Metric("loss", "", "What the update minimised: weight * loss of each token.", "sum over learned tokens"),
        *UPDATE,
        *LANGUAGE,
        Metric(
            "ratio", "", "pi(y_t) / pi_old(y_t), the importance ratio of the objective (DeepSeekMath, arXiv "
            "2402.03300, equation 3); of the sequence where the objective's is (GSPO, GMPO).",
            "mean over learned tokens",
        ),
        Metric(
            "clip_fraction", SHARE, "Tokens beyond a bound, the dual clip's too.", "share of learned tokens", "",
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
            "effective_samples", SHARE, "(sum w)^2 / (n * sum w^2) with the correction's factor w of each of the n "
            "tokens: the share of them that the correction leaves; only with "
            "`rollout.slice_tokens` or `rollout.ahead`.",
            "sums over learned tokens of the step", "up",
        ),
        Metric(
            "gradient_noise_scale", "mini-batches", "tr(S) / |G|^2, noise over signal of a gradient (McCandlish et "
            "al., arXiv 1812.06162, equation 2.9); far above 1, larger batches would help.", "read off Adam's moments",
        ),
    ),
)  # fmt: skip
CRITIC = Room(
    "The critic",
    ("critic/",),
    "Of PPO: its updates are those of the policy, and taken as these.",
    (
        Metric(
            "loss", "", "(V - R)^2 / 2, the larger one of V and of V within `critic.clip` of that before the step; "
            "R is the return (Schulman et al., arXiv 1707.06347).", "sum over learned tokens of weight * loss", "down",
        ),
        *UPDATE,
        Metric("value", "", "What the critic expects of the rewards to come.", "mean over learned tokens"),
        Metric(
            "explained_variance", "", "1 - Var(returns - values) / Var(returns), by the values before the step; 1 is "
            "always right, 0 no better than a constant.", "variances over the learned tokens of an update", "up",
        ),
    ),
)  # fmt: skip
DISTILL = Room(
    "Distillation",
    ("distill/",),
    "Of all sampled tokens of the step; sums over all ranks in float64 before they are divided.",
    (
        Metric("reverse_kl", NATS, "log(policy / teacher): KL(policy || teacher) by k1.", "mean over tokens", "down"),
        Metric("teacher_logprob", NATS, "The teacher's log-probability of a token.", "mean over tokens", "up"),
    ),
)
MISMATCH = Room(
    "Engine and trainer",
    ("mismatch/",),
    "How far the trainer's log-probabilities of the sampled tokens are from the engine's, with d = trainer - engine: "
    "over all tokens of the batch on all ranks, in float64, and 0 or 1 if both computed alike. A step from which "
    "nothing is learned has them, too.",
    (
        Metric("mean_abs", NATS, "|d|.", "mean over tokens", "down", "mismatch", ".2g"),
        Metric("max_abs", NATS, "The largest |d|.", "maximum over tokens", "down"),
        Metric("p50_abs", NATS, "The median of |d|.", "nearest rank", "down"),
        Metric("p90_abs", NATS, "One token in 10 has a larger |d|.", "nearest rank", "down"),
        Metric("p99_abs", NATS, "One token in 100 has a larger |d|.", "nearest rank", "down"),
        Metric("mean_ratio", "", "exp(d), whose expectation is 1.", "mean over tokens"),
        Metric(
            "effective_sample_size", SHARE, "(sum w)^2 / (n * sum w^2) with w = exp(d): the share of the n tokens that "
            "importance sampling would leave.", "sums over tokens", "up",
        ),
    ),
)  # fmt: skip
SYNC = Room(
    "Weights on their way to engines",
    ("sync/",),
    "With `rollout.engine=sglang` alone.",
    (
        Metric("bytes", "bytes", "What was sent since the last step's line.", "sum, of the main rank"),
        Metric(
            "mean_abs", NATS, "What the engine says of a text with its new weights, and the trainer: |difference| of "
            "log-probabilities. In the steps that verify.", "mean over tokens, of the engine that is off most", "down",
        ),
    ),
)  # fmt: skip
EVAL = Room(
    "Evaluations",
    ("eval/", "eval/{task}/", "eval/heldout/", "eval/heldout/{task}/"),
    "Validation problems, every `run.eval_every` steps, in the line of the step; held-out problems as `eval/heldout/`, "
    "before the first step and after the last, in lines of their own; of each task when there are several. Means over "
    "problems, each of the problem's own mean over its `eval.samples` answers; every rank has all scores, so they are "
    "exact and the same under every layout ([evaluation.md](evaluation.md)).",
    (
        Metric(
            "accuracy", "", "The term that `reward.success` names; of pairs, the share ranked right; of steps, the "
            "share whose score has the sign of their label.", "", "up", "accuracy", ".1%",
        ),
        Metric("length", TOKENS, "Length of an answer."),
        Metric("truncated", SHARE, "Answers that the length limit cut; with several samples a problem.", "", "down"),
        Metric("pass@{k}", SHARE, "The best of k answers, without bias (Chen et al., arXiv 2107.03374).", "", "up"),
        Metric("maj@{k}", SHARE, "The answer that most of k give (Wang et al., arXiv 2203.11171).", "", "up"),
        Metric("rm@{k}", SHARE, "The answer of k that the reward model scores highest, where there is one.", "", "up"),
        Metric("unscorable", "samples", "Answers without a score; absent when all have one.", "number", "down"),
        Metric("hacking", "", "1 when the learned reward rose while success fell, else 0.", "", "down"),
        Metric(
            "loss", NATS, "-log sigmoid(chosen - rejected) of held-out pairs; the cross-entropy of the labels of "
            "held-out steps.", "mean over pairs or steps", "down",
        ),
        Metric("margin", "", "chosen - rejected, scores of held-out pairs.", "mean over pairs", "up"),
        Metric(
            "calibration_error", "", "|confidence - share that is right| of held-out pairs or steps (Guo et al., "
            "arXiv 1706.04599, equation 3).", "10 bins of confidence, each as heavy as what is in it", "down",
        ),
        Metric("auc", "", "How often a right step has a higher score than a wrong one, ties as half.", "steps", "up"),
        Metric("right", SHARE, "Held-out steps whose label is 1/2 or more: what knowing nothing comes to.", "steps"),
        Metric("{term}", "", "A term of the reward, before its weight.", "problems that have it", "up"),
    ),
)  # fmt: skip
SUPERVISED = Room(
    "Supervised steps",
    ("sft/",),
    "In sft.jsonl, one update a step on completions that are given. Each learned token counts once under every layout, "
    "up to rounding.",
    (SUPERVISED_LOSS, *UPDATE, *LANGUAGE),
)
BASE = Room(
    "The base model",
    ("base/",),
    "In pretrain.jsonl, of the toy's language model: whole documents, taken as supervised steps are.",
    (
        SUPERVISED_LOSS,
        *UPDATE,
        *LANGUAGE,
        Metric(
            "working_accuracy", SHARE, "Of the gate, in the steps that check it: greedy answers that are right when "
            "the beginning of the working is given.", "share of the validation problems", "up",
        ),
    ),
)  # fmt: skip
PAIRS = Room(
    "Reward models",
    ("reward_model/",),
    "Of the pairs of an update, in metrics.jsonl of a run with `run.trains=reward_model`: all ranks have the scores of "
    "all pairs, in float64.",
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
STEPS = Room(
    "Process reward models",
    ("process_reward_model/",),
    "Of the steps of an update, in metrics.jsonl of a run with `run.trains=process_reward_model`; each step counts "
    "once under every layout, up to rounding.",
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
TIME = Room(
    "Time",
    ("time/",),
    "Wall seconds of the main rank, which waits for the others wherever they meet. A repeated run has other ones.",
    (
        Metric(
            "step", SECONDS, "All phases but evaluate, checkpoint and export.", "sum of phases", "down", "seconds",
            ".2f",
        ),
        Metric("generate", SECONDS, "The engine samples.", "", "down"),
        Metric("reward", SECONDS, "Answers are scored, without the time in which the engine samples.", "", "down"),
        Metric("reward_model", SECONDS, "A reward model scores; or, in its own run, learns.", "", "down"),
        Metric("sync", SECONDS, "Weights go to the engine, and the device changes hands.", "", "down"),
        Metric("logprobs", SECONDS, "Batches, and log-probabilities under old policy and reference.", "", "down"),
        Metric("values", SECONDS, "The critic's values.", "", "down"),
        Metric("teacher", SECONDS, "The teacher's log-probabilities.", "", "down"),
        Metric("update", SECONDS, "Forward, backward and optimizer of all updates.", "", "down"),
        Metric("evaluate", SECONDS, "An evaluation."),
        Metric("checkpoint", SECONDS, "Checkpoints since the line before: those of the steps before."),
        Metric("export", SECONDS, "Exports since the line before."),
        Metric("base", SECONDS, "A step of the base model.", "", "down"),
        Metric("sft", SECONDS, "A supervised step.", "", "down"),
    ),
)  # fmt: skip
MACHINE = Room(
    "The machines",
    ("machine/",),
    "What else differs when a run is repeated.",
    (
        Metric(
            "tokens_per_second", "tokens/s", "`rollout/tokens` over `time/step`: sampled, scored and learned. Absent "
            "in a step that a stop has cut in two.", "of all ranks together", "up", "tokens/s", ",.0f",
        ),
        Metric(
            "tflops", "10^12/s", "Floating point operations that the models that learn needed for forward and backward "
            "passes, products of matrices and attention, nothing counted that is computed twice; over the seconds of "
            "the phase in which they learn (`time/update`, `time/sft`, ...) and over ranks.",
            "mean over ranks", "up", "TFLOP/s", ".3g",
        ),
        Metric(
            "mfu", SHARE, "Model FLOPs utilization (PaLM, arXiv 2204.02311, appendix B): `machine/tflops` over the "
            "most that the GPU can do. Absent where that is not known: on CPUs, for models in fp32, and on GPUs that "
            "`platform/peaks.py` does not list.", "mean over ranks", "up", "MFU", ".1%",
        ),
        Metric(
            "straggling", "", "Seconds of a step in which the slowest rank did not wait for others, over those of the "
            "median rank; 1 when all are equally fast. Ranks that exchange something in every layer (TP, EP, CP) wait "
            "for each other inside of it, and count as one. Absent on one rank.", "lower median over ranks", "down",
        ),
        Metric("slowest_rank", "", "The rank that this is about.", "number of the rank"),
        Metric(
            "peak_memory_gb", "10^9 bytes", "Peak since the process began: what torch has allocated on a GPU, resident "
            "memory without one.", "maximum over ranks", "down", "memory GB", ".2f",
        ),
    ),
)  # fmt: skip

ROOMS = (
    REWARD, ROLLOUT, ENVIRONMENT, POLICY, CRITIC, DISTILL, MISMATCH, SYNC, EVAL, SUPERVISED, BASE, PAIRS, STEPS, TIME,
    MACHINE,
)  # fmt: skip


@cache
def find(name: str) -> Metric | None:
    """The table's metric for the name that a run writes; None when the table does not have it."""
    for room in ROOMS:
        for metric in room.metrics:
            if any(re.fullmatch(_pattern(prefix + metric.name), name) for prefix in room.prefixes):
                return metric
    return None


def unknown(names: Iterable[str]) -> list[str]:
    """The names that the table does not have, in order."""
    return [name for name in names if find(name) is None]


def _pattern(name: str) -> str:
    pattern = re.escape(name)
    for word, stands_for in WORDS.items():
        pattern = pattern.replace(re.escape(word), stands_for)
    return pattern

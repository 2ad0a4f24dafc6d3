"""Alarms: what the metrics of the latest steps say about a run that goes wrong, and what to do then.

An alarm is a function of the lines of metrics.jsonl and of its threshold (`config/schema/run.py`), so that a run
that continues has the alarms of one that was never stopped. `docs/alarms.md` is made of the table `ALARMS`.

Each looks at several steps, because single ones are noisy, and stays silent until there are that many. What is normal
in a good run is left out: problems that the run has learned to solve have no signal, a policy that solves its problems
may be sure of itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from grpo_mega.config.schema import AlarmsConfig
from grpo_mega.observe.alarm_history import REMEMBERED, WINDOW, History, mean_of

SHORT = 5
"""Number of steps that medians, and alarms that must rise early, look at."""
MOSTLY_SOLVED = 0.5
"""Accuracy above which a low entropy is what learning leads to."""
SLOW = 60.0
"""Seconds below which no phase is slow: what a busy machine does to a short one is noise."""
OCCURRENCES = 5
"""Number of measurements of a phase from which on its median means something."""
NO_TERMS = ("reward/accuracy", "reward/std", "reward/unscorable")
"""Metrics under reward/ that a policy cannot raise by gaming a term."""


class Found(NamedTuple):
    """What an alarm saw when its condition holds."""

    value: float
    """The value that is compared with the threshold."""
    message: str
    """What the alarm saw, in words, with the numbers."""


def never_right(history: History, limits: AlarmsConfig) -> Found | None:
    """No completion of any step so far has been right."""
    # The history keeps as many first steps as the largest threshold that the schema allows.
    steps = len(history.first)
    known = all("reward/accuracy" in line for line in history.first)
    if limits.never_right is None or steps < limits.never_right or history.rewarded or not known:
        return None
    return Found(steps, f"none of the completions of the first {steps} steps was right")


def entropy_collapse(history: History, limits: AlarmsConfig) -> Found | None:
    """The policy's entropy is low, and many of its completions are wrong."""
    entropy, accuracy = history.mean("policy/entropy"), history.mean("reward/accuracy")
    if entropy is None or limits.entropy_collapse is None or entropy >= limits.entropy_collapse:
        return None
    if accuracy is None:
        return Found(entropy, f"the entropy of a token is {entropy:.4f} nats")
    if accuracy >= MOSTLY_SOLVED:
        return None
    return Found(
        entropy, f"the entropy of a token is {entropy:.4f} nats, and {1 - accuracy:.1%} of the completions fail"
    )


def kl_runaway(history: History, limits: AlarmsConfig) -> Found | None:
    """The policy is far from the reference, or has gone far within a step."""
    origins = {"policy/kl": "the reference policy", "policy/approx_kl_old": "the policy before the step"}
    for name, origin in origins.items():
        kl = history.median(name, SHORT)
        if kl is not None and limits.kl_runaway is not None and kl > limits.kl_runaway:
            return Found(kl, f"the KL divergence of a token from {origin} is {kl:.3g} nats")
    return None


def from_to(before: float, now: float) -> str:
    """Two accuracies, in percent, or as plain numbers if either is outside 0 to 1."""
    are_shares = 0 <= min(before, now) <= max(before, now) <= 1
    return f"{before:.1%} to {now:.1%}" if are_shares else f"{before:.3g} to {now:.3g}"


def reward_hacking(history: History, limits: AlarmsConfig) -> Found | None:
    """Rewards rise while accuracy falls, or an evaluation shows that a reward model is being gamed."""
    accuracy, best = history.mean("reward/accuracy"), history.best.get("reward/accuracy")
    if accuracy is None or best is None or limits.reward_hacking is None:
        return None
    fall = best - accuracy
    fallen = f"the accuracy has fallen from {from_to(best, accuracy)}"
    if history.hacking:
        return Found(fall, f"validation problems are solved less often than before, for more learned reward; {fallen}")
    if fall < limits.reward_hacking:
        return None
    # A fall of the accuracy alone is not hacking: the policy must earn something else meanwhile.
    for name, before in history.best.items():
        now = history.mean(name)
        if name not in NO_TERMS and now is not None and now - before >= limits.reward_hacking:
            return Found(fall, f"{fallen}, while {name} has risen from {before:.3g} to {now:.3g}")
    return None


def truncation(history: History, limits: AlarmsConfig) -> Found | None:
    """The length limit cuts completions, which then are judged by what is missing."""
    share = history.mean("rollout/truncated")
    if share is None or limits.truncation is None or share <= limits.truncation:
        return None
    return Found(share, f"the length limit cut {share:.1%} of the completions")


def repetition(history: History, limits: AlarmsConfig) -> Found | None:
    """Completions repeat themselves."""
    share = history.mean("rollout/repeated")
    if share is None or limits.repetition is None or share <= limits.repetition:
        return None
    return Found(share, f"{share:.1%} of a completion repeats what it has said before")


def no_signal(history: History, limits: AlarmsConfig) -> Found | None:
    """Most groups teach nothing, and not because the run has learned their problems."""
    signal = history.mean("rollout/groups_with_signal")
    if signal is None or limits.no_signal is None:
        return None
    right, right_first = history.mean("rollout/all_right") or 0.0, history.of_first("rollout/all_right") or 0.0
    # Groups that the run has learned to solve have no signal either, and are no reason for an alarm.
    share = 1 - signal - max(0.0, right - right_first)
    if share <= limits.no_signal:
        return None
    wrong = history.mean("rollout/all_wrong") or 0.0
    silent = f"{1 - signal:.1%} of the groups have no signal; in {wrong:.1%} of all every completion fails"
    return Found(share, f"{silent}, in {right:.1%} every completion is right")


def unscorable(history: History, limits: AlarmsConfig) -> Found | None:
    """Completions are left out because nothing could score them: some of those of several steps, or all of one."""
    newest = history.recent[-1] if history.recent else {}
    nothing = newest.get("reward/unscorable") and newest.get("reward/mean") is None
    if nothing and limits.unscorable is not None:
        return Found(1.0, "no completion of this step has a score, so nothing was learned from it")
    shares = []
    for line in history.recent:
        # samples = tokens / mean length
        count, tokens, length = map(line.get, ("reward/unscorable", "rollout/tokens", "rollout/length_mean"))
        if count is not None and tokens and length:
            shares.append(min(1.0, max(0.0, count * (length / tokens))))
    share = mean_of(shares[-SHORT:], SHORT)
    if share is None or limits.unscorable is None or share <= limits.unscorable:
        return None
    return Found(share, f"{share:.1%} of the completions have no score")


def mismatch(history: History, limits: AlarmsConfig) -> Found | None:
    """Engine and trainer have different probabilities of the same tokens."""
    difference = history.median("mismatch/mean_abs", SHORT)
    if difference is None or limits.mismatch is None or difference <= limits.mismatch:
        return None
    size = history.median("mismatch/effective_sample_size", SHORT)
    left = "" if size is None else f"; importance sampling would leave {size:.1%} of the tokens"
    return Found(difference, f"log-probabilities of engine and trainer differ by {difference:.3g} nats{left}")


def staleness(history: History, limits: AlarmsConfig) -> Found | None:
    """Tokens are older and older when they are learned: completions need more slices, or wait longer."""
    age = history.mean("rollout/staleness_mean")
    if age is None or limits.staleness is None:
        return None
    # The first samples are young, so not the mean; and what is below an update a token is not old, however it grows.
    first = max(line.get("rollout/staleness_mean") or 0.0 for line in history.first)
    times = age / max(first, 1.0)
    if times <= limits.staleness:
        return None
    return Found(times, f"tokens are {age:.3g} updates old; in the first {WINDOW} steps it was {first:.3g} at most")


def correction(history: History, limits: AlarmsConfig) -> Found | None:
    """The weights that sampled the tokens are so far from those that learn that few tokens count."""
    left = history.mean("policy/effective_samples")
    if left is None or limits.correction is None or left >= limits.correction:
        return None
    corrected = history.mean("policy/corrected")
    beyond = "" if corrected is None else f"; {corrected:.1%} are beyond a bound"
    return Found(left, f"the correction leaves {left:.1%} of the tokens, as an effective sample size{beyond}")


def not_finite(history: History, limits: AlarmsConfig) -> Found | None:
    """A metric of the latest step is infinite or not a number."""
    names = sorted(name for name, value in history.now.items() if value is None)
    if limits.not_finite is None or len(names) <= limits.not_finite:
        return None
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return Found(float(len(names)), f"not finite: {', '.join(names[:5])}{more}")


def expert_imbalance(history: History, limits: AlarmsConfig) -> Found | None:
    """Some experts get most tokens: others learn nothing, and their ranks wait."""
    for name in history.now:
        if not name.endswith("/expert_imbalance"):
            continue
        load = history.median(name, WINDOW)
        if load is not None and limits.expert_imbalance is not None and load > limits.expert_imbalance:
            return Found(load, f"the busiest expert gets {load:.2f} times the tokens of the average one ({name})")
    return None


def slow_phase(history: History, limits: AlarmsConfig) -> Found | None:
    """A phase of the latest step took far longer than usual."""
    for name, seconds in history.now.items():
        if not name.startswith("time/") or name == "time/step" or seconds is None or seconds < SLOW:
            continue
        # The latest step is left out, as it would be compared with itself.
        before = history.latest(name, REMEMBERED)[:-1]
        if limits.slow_phase is None or len(before) < OCCURRENCES or (usual := median(before)) <= 0:
            continue
        times = seconds / usual
        if times > limits.slow_phase:
            phase = name.removeprefix("time/")
            return Found(
                times, f"the phase {phase} took {seconds:.1f} s, {times:.1f} times its median of {usual:.2f} s"
            )
    return None


def stragglers(history: History, limits: AlarmsConfig) -> Found | None:
    """One rank keeps the others waiting, in most steps the same one."""
    both = history.together("machine/straggling", "machine/slowest_rank", WINDOW)
    if len(both) < WINDOW or limits.stragglers is None:
        return None
    times = median(times for times, _ in both)
    if times <= limits.stragglers:
        return None
    rank, steps = Counter(rank for _, rank in both).most_common(1)[0]
    if steps <= WINDOW // 2:
        return None
    return Found(times, f"rank {rank:.0f} works {times:.2f} times as long as the median rank, which waits meanwhile")


def held_out_falling(history: History, limits: AlarmsConfig) -> Found | None:
    """Two evaluations in a row are below the best one, and training reward is above what it was then."""
    best, limit = history.best_evaluation, limits.held_out_falling
    if best is None or limit is None or len(history.evaluations) < 2:
        return None
    falls = [best.accuracy - each.accuracy for each in history.evaluations]
    now = history.evaluations[-1]
    if min(falls) < limit or best.reward is None or now.reward is None or now.reward <= best.reward:
        return None
    return Found(
        min(falls),
        f"the validation accuracy has fallen from {from_to(best.accuracy, now.accuracy)}, while the "
        f"training reward has risen from {best.reward:.3g} to {now.reward:.3g}",
    )


@dataclass(frozen=True)
class Alarm:
    """One alarm.

    Attributes:
        find: Says what was seen if its condition holds after the latest step. The function's name is the alarm's, and
            that of its threshold in the section `alarms` of the configuration.
        condition: The condition, in words.
        means: What it means for a run, and why.
        action: What to do, with the settings to change.
    """

    find: Callable[[History, AlarmsConfig], Found | None]
    condition: str
    means: str
    action: str

    @property
    def name(self) -> str:
        """The alarm's name."""
        return self.find.__name__


ALARMS = (
    Alarm(
        never_right,
        "`reward/accuracy` is 0 in every step so far, as many as the threshold.",
        "The problems are too hard for the model, or right answers are not recognised: another place, another form, "
        "thoughts that never end. The alarm shows three completions, with what was read from each.",
        "Compare the three with what the reward reads (reward.terms, docs/rewards.md) and the prompt asks for "
        "(data.question, --dry-run); if they are wrong, take easier problems or a stronger model.",
    ),
    Alarm(
        entropy_collapse,
        f"`policy/entropy`, mean of {WINDOW} steps, is below the threshold in nats, and `reward/accuracy` is below "
        f"{MOSTLY_SOLVED:.0%}.",
        "The policy repeats nearly the same completion although many fail: groups have no signal, and exploration has "
        "stopped.",
        "Fork from an earlier checkpoint (run.fork) with a lower optimizer.lr, a higher algorithm.clip_high (0.28) or "
        "a small algorithm.entropy_coef (0.001).",
    ),
    Alarm(
        kl_runaway,
        f"`policy/kl` or `policy/approx_kl_old`, median of {SHORT} steps, is above the threshold in nats.",
        "The policy has left the texts on which its rewards and its language were good; it will soon break.",
        "Lower optimizer.lr, raise algorithm.kl_coef, or take fewer updates a step (algorithm.epochs, "
        "algorithm.mini_batches); look at samples/ and go back to a checkpoint before the rise.",
    ),
    Alarm(
        reward_hacking,
        f"`reward/accuracy`, mean of {WINDOW} steps, has fallen by the threshold from its best, while the total or "
        "another term has risen by as much; or `eval/hacking` is 1.",
        "The policy earns rewards for something other than right answers.",
        "Find out what in samples/. Lower the weight of the rising term (reward.terms, reward.model.weight) or make it "
        "harder to please, and go back to the checkpoint with the best accuracy.",
    ),
    Alarm(
        truncation,
        f"`rollout/truncated`, mean of {WINDOW} steps, is above the threshold.",
        "Completions that are cut cannot be right, so the run learns brevity; or generation does not end by itself.",
        "Raise rollout.max_new_tokens; if the texts in samples/ should have ended, check rollout.stop and the prompt's "
        "template.",
    ),
    Alarm(
        repetition,
        f"`rollout/repeated`, mean of {WINDOW} steps, is above the threshold.",
        "Completions go round in circles until the length limit: the policy breaks, or never learned to end.",
        "Fork from a checkpoint before the rise (run.fork) with a lower optimizer.lr or a higher algorithm.kl_coef, or "
        "add a term of kind repetition to reward.terms; if completions should have ended earlier, check rollout.stop.",
    ),
    Alarm(
        no_signal,
        f"1 - `rollout/groups_with_signal`, mean of {WINDOW} steps, less the rise of `rollout/all_right` since the "
        f"first {WINDOW}, is above the threshold.",
        "Rewards within most groups are equal, which costs time and teaches nothing: the problems are too hard or too "
        "easy.",
        "Set data.curriculum=frontier or take other problems, raise algorithm.group_size, or, if the format is never "
        "found, begin with a cold start (sft).",
    ),
    Alarm(
        unscorable,
        f"`reward/unscorable` over the number of samples, mean of {SHORT} steps, is above the threshold; or no sample "
        "of a step has a score.",
        "Generated samples are lost, those that are hard to score perhaps more often.",
        "The warnings in logs/ name term and error: repair the reward function or service, raise "
        "reward.timeout_seconds, or ask a service less at once (at_once of its options).",
    ),
    Alarm(
        mismatch,
        f"`mismatch/mean_abs`, median of {SHORT} steps, is above the threshold in nats.",
        "The engine samples from another policy than the trainer learns: other weights, kernels, precision or "
        "sampling settings. Bad gradients follow.",
        "Compare these settings, set rollout.sglang.verify_every=1, turn rollout.sglang.fp8 off, or correct for it "
        "with algorithm.correction=truncate.",
    ),
    Alarm(
        staleness,
        f"`rollout/staleness_mean`, mean of {WINDOW} steps, is above the threshold times the highest of the first "
        f"{WINDOW} steps, or times 1 update if that was lower.",
        "With slices ([rollout.md](rollout.md)), tokens are learned ever later: completions have become longer and "
        "need more slices, or finished ones wait longer for their groups.",
        "Raise rollout.slice_tokens to about `rollout/length_mean`; if most samples in flight are `rollout/waiting`, "
        "lower rollout.in_flight or set rollout.order=finished. These can be changed in a fork (run.fork).",
    ),
    Alarm(
        correction,
        f"`policy/effective_samples`, mean of {WINDOW} steps, is below the threshold.",
        "With slices, the policy has moved so far since it sampled these tokens that a few of them have most of the "
        "weight: gradients are noisy, and much of what was generated is lost.",
        "Move the policy less in a step by fewer updates (algorithm.epochs, algorithm.mini_batches) or a lower "
        "optimizer.lr; or let fewer steps pass, by larger rollout.slice_tokens and fewer rollout.in_flight.",
    ),
    Alarm(
        not_finite,
        "More metrics of a step than the threshold are infinite or not a number.",
        "Something overflowed or was divided by 0; weights may be next.",
        "Lower optimizer.lr, set optimizer.clip_grad=1, or model.dtype=fp32; go back to a checkpoint before.",
    ),
    Alarm(
        expert_imbalance,
        f"`policy/expert_imbalance`, or that of another model, median of {WINDOW} steps, is above the threshold.",
        "Few experts do the work: the others do not learn, and ranks with idle experts wait for the busy ones.",
        "Raise model.moe.bias_update_rate or model.moe.aux_loss_coef, or lower optimizer.lr.",
    ),
    Alarm(
        slow_phase,
        f"A phase of the step (`time/...`) took longer than the threshold times its median over up to {REMEMBERED} "
        f"steps, and at least {SLOW:.0f} seconds.",
        "Something holds up the run: a slow disk, network, reward service or neighbour, an engine that restarted, or a "
        "rank that is late.",
        "Look into logs/ at this step and at the machines with tools/doctor.py; for rewards, see "
        "reward.timeout_seconds, for checkpoints run.async_save=true.",
    ),
    Alarm(
        stragglers,
        f"`machine/straggling`, median of {WINDOW} steps, is above the threshold, mostly with the same "
        "`machine/slowest_rank`.",
        "One rank keeps all others waiting: its GPU or CPU is slow or hot, its machine has other work, or its rewards "
        "take longer.",
        "Find the rank's machine in its trace (tools/trace.py), and check it with tools/doctor.py; if only this one is "
        "slow, leave it out of the job (sbatch --exclude).",
    ),
    Alarm(
        held_out_falling,
        f"`eval/accuracy` is below its best by the threshold in two evaluations in a row, while `reward/mean`, mean of "
        f"{WINDOW} steps, is higher than then.",
        "The run memorises its training problems, or learns to please their reward, and solves others less often.",
        "Stop and take the checkpoint of the best evaluation; give it more problems, lower optimizer.lr, or raise "
        "algorithm.kl_coef.",
    ),
)
"""All alarms, in the order in which they are checked; each has a threshold in `AlarmsConfig`."""

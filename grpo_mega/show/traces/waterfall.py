"""Where the time of a step goes, from the traces of its ranks: what bounds it, and what would shorten it.

Every moment of a step, on every rank, counts for one part: that of the innermost span, or of the one around it. The
seconds of a part are the mean over ranks, each of which spends the whole step; evaluations are not part of a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

from grpo_mega.platform.trace import WAITS, is_wait_for_one
from grpo_mega.show.traces.trace_files import Event, Interval, RankTrace, steps_of

PARTS = (
    "generation", "tail of generation", "environment", "reward", "weight sync", "training", "pipeline bubble",
    "waiting for other ranks", "other",
)  # fmt: skip
"""Parts of a step, in order."""
APART = "apart"
TAIL = 0.1
"""Share of a step's samples that end last and are the tail: the engine is nearly empty while they are generated."""
ADVICE = {
    "generation": "more or faster engines, more sequences at once (rollout.concurrent_sequences) or shorter "
    "completions (rollout.max_new_tokens) would shorten it",
    "tail of generation": "a few long completions hold up the others: a lower rollout.max_new_tokens, or the overlong "
    "term of rewards, would shorten it",
    "environment": "a faster environment, or more of its calls at once (environment.at_once), would shorten it",
    "reward": "faster reward functions, or more of them at once (at_once, boxes), would shorten it",
    "weight sync": "larger buckets or another way of the weights (rollout.sglang.bucket_bytes, .transport) would "
    "shorten it",
    "training": "more ranks, larger micro-batches (layout.micro_batch_tokens), or fewer epochs and passes of log-probs "
    "would shorten it",
    "pipeline bubble": "more micro-batches (a smaller layout.micro_batch_tokens), layout.vpp, or fewer stages "
    "(layout.pp) would shorten it",
    "waiting for other ranks": "a better balance of the ranks would shorten it: look at the one that waits least",
    "other": "it is outside of all phases: torch's profiler (run.profile_steps) tells what it is",
}
"""Part -> what would shorten a step that spends most of its time in it."""
_OF_NAMES = {
    "step": "other",
    "generate": "generation",
    "environment": "environment",
    "sync": "weight sync", "push": "weight sync", "verify": "weight sync",
    "reward": "reward", "term": "reward", "reward_model": "reward",
    "update": "training", "logprobs": "training", "values": "training", "teacher": "training", "sft": "training",
    "base": "training",
    **dict.fromkeys(WAITS, "waiting for other ranks"),
    "evaluate": APART, "checkpoint": APART, "export": APART,
}  # fmt: skip
"""Span -> its part; sends and receives of the pipeline are bubble; any other span counts for the one around it."""
_TRAINS = ("reward_model", "process_reward_model")
"""Stages in which the phase `reward_model` is training."""


@dataclass(frozen=True)
class Part:
    """A part of a step, with its seconds.

    Attributes:
        name: One of `PARTS`.
        seconds: Median over steps of the mean over ranks.
        share: Median over steps of its share of the step.
    """

    name: str
    seconds: float
    share: float


@dataclass(frozen=True)
class Waterfall:
    """Where the time of steps goes.

    Attributes:
        steps: The steps that were measured.
        ranks: Number of ranks.
        seconds: Median duration of a step, without evaluations.
        parts: The parts that took time, in the order of `PARTS`.
        waits_least: The rank that waited least for others, in most steps.
        clock_error_us: Largest possible difference between the clocks of the ranks, in microseconds.
    """

    steps: list[int]
    ranks: int
    seconds: float
    parts: list[Part]
    waits_least: int
    clock_error_us: float = 0.0

    @property
    def bound(self) -> Part:
        """The part that takes most."""
        return max(self.parts, key=lambda part: part.share)

    @property
    def words(self) -> str:
        """One sentence: what bounds a step, and what would shorten it."""
        part = self.bound
        advice = ADVICE[part.name]
        if part.name == "waiting for other ranks":
            advice = f"{advice}, rank {self.waits_least}"
        return f"A step is bound by {part.name} ({part.share:.0%} of {self.seconds:.3g} s): {advice}."

    def lines(self, width: int = 40) -> list[str]:
        """The waterfall as text: a bar for each part, which begins where the one before ends."""
        whole = sum(part.seconds for part in self.parts) or 1.0
        shown, before = [], 0.0
        for part in self.parts:
            begin, end = (round(width * at / whole) for at in (before, before + part.seconds))
            bar = (" " * begin + ("█" * (end - begin) or "▏")).ljust(width + 1)
            shown.append(f"{part.name:>23} {bar} {part.seconds:8.3f} s {part.share:5.0%}")
            before += part.seconds
        return shown


def waterfall(traces: Sequence[RankTrace], steps: range | None = None) -> Waterfall | None:
    """The waterfall of these steps, or of all steps that every trace has whole; None if there are none."""
    of_ranks = [steps_of(trace) for trace in traces]
    common = set.intersection(*({*found} for found in of_ranks)) if of_ranks else set()
    chosen = sorted(step for step in common if steps is None or step in steps)
    if not chosen:
        return None
    ends = sorted(e["ts"] for trace in traces for e in trace.events if e.get("cat") == "sample" and e["ph"] == "e")
    spent: list[dict[str, float]] = []
    least: Counter[int] = Counter()
    for step in chosen:
        each = [_spent(trace, *found[step]) for trace, found in zip(traces, of_ranks, strict=True)]
        least[min(zip(each, traces, strict=True), key=lambda pair: pair[0]["waiting for other ranks"])[1].rank] += 1
        seconds = {name: mean(of_rank[name] for of_rank in each) / 1e6 for name in PARTS}
        spans = _spans(traces[0], of_ranks[0][step][1])
        generating = [(begin, end) for begin, end, name in spans if name == "generate"]
        # The tail is the end of the step's generation in which only its last samples (`TAIL`) were running.
        own = [end for end in ends if any(since <= end <= until for since, until in generating)]
        last = max(1, round(TAIL * len(own)))
        # It is measured between samples of all ranks, generation as a mean over ranks: only the minimum keeps the rest
        # of generation from being negative.
        tail = min((own[-1] - own[-1 - last]) / 1e6 if len(own) > 1 else 0.0, seconds["generation"])
        spent.append(seconds | {"generation": seconds["generation"] - tail, "tail of generation": tail})
    totals = [sum(seconds.values()) for seconds in spent]
    # Steps that took no time have no shares.
    if not min(totals) > 0:
        return None
    parts = [
        Part(name, median(s[name] for s in spent), median(s[name] / t for s, t in zip(spent, totals, strict=True)))
        for name in PARTS
        if any(seconds[name] > 0 for seconds in spent)
    ]
    error = max(trace.clock_error_us for trace in traces)
    return Waterfall(chosen, len(traces), median(totals), parts, least.most_common(1)[0][0], error)


def waits(name: str) -> bool:
    """Whether a span of this name is a wait for other ranks, or ends with one."""
    return _part(name, "", "") in ("waiting for other ranks", "pipeline bubble")


def _part(name: str, around: str, stage: str) -> str:
    """The part that a span counts for, inside a span of the part `around`."""
    if around == APART:
        return APART
    if name == "reward_model" and stage in _TRAINS:
        return "training"
    if is_wait_for_one(name):
        return "pipeline bubble"
    return _OF_NAMES.get(name, around)


def _spent(trace: RankTrace, stage: str, step: Interval) -> dict[str, float]:
    """Part -> microseconds of a step on a rank; time in nested spans counts for the innermost one."""
    spent = dict.fromkeys((*PARTS, APART), 0.0)
    open_: list[tuple[str, float]] = []  # part, end
    at = step[0]
    for begin, end, name in _spans(trace, step):
        at = _advance(spent, open_, at, begin)
        open_.append((_part(name, open_[-1][0] if open_ else "other", stage), end))
    _advance(spent, open_, at, step[1])
    return spent


def _advance(spent: dict[str, float], open_: list[tuple[str, float]], at: float, until: float) -> float:
    """Counts the time from `at` to `until` for the open spans, and closes those that end; returns `until`."""
    while open_ and open_[-1][1] <= until:
        part, end = open_.pop()
        spent[part] += max(0.0, end - at)
        at = max(at, end)
    if open_:
        spent[open_[-1][0]] += max(0.0, until - at)
    return max(at, until)


def _spans(trace: RankTrace, within: Interval) -> list[tuple[float, float, str]]:
    """(begin, end, name) of the main thread's spans inside an interval, outer ones before inner ones."""
    found, begun = [], list[Event]()
    for event in trace.events:
        if event.get("tid") != 0 or event["ph"] not in "BEX" or not within[0] <= event["ts"] <= within[1]:
            continue
        if event["ph"] == "B":
            begun.append(event)
        elif event["ph"] == "X":
            found.append((event["ts"], event["ts"] + event.get("dur", 0.0), event["name"]))
        elif begun and begun[-1]["name"] == event["name"]:
            found.append((begun.pop()["ts"], event["ts"], event["name"]))
    # Spans are written as they end, so of two spans of equal length the inner one comes first. The sort is stable:
    # reversed before it, the outer one comes first.
    found.reverse()
    return sorted(found, key=lambda span: (span[0], -span[1]))

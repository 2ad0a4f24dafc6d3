"""What the page shows of runs, as plain data for JSON: thinned curves, shortened texts, notes on what is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from grpo_mega.config.schema import Config
from grpo_mega.observe.foreign import finite
from grpo_mega.observe.metric_table import SECTIONS, find
from grpo_mega.observe.summary import how_it_ended
from grpo_mega.show.report import words
from grpo_mega.show.report.machines import CELLS, devices, experts, planned
from grpo_mega.show.report.read import SAMPLES_BUDGET, STAGES, RunData, Samples
from grpo_mega.show.report.thin import thin

CHARACTERS = 20_000
"""Largest number of characters of a text, such as a completion; the page says how many more the file has."""
TOKENS = 4_000
"""Largest number of tokens of a completion for which numbers are shown."""
SHOWN_NOTES = 50
"""Largest number of damaged lines that the page names."""
PER_TOKEN = ("advantages", "ages", "engine_logprobs", "old_logprobs", "new_logprobs", "ref_logprobs", "entropies")
FIRST = (
    "reward/mean", "eval/heldout/accuracy", "eval/accuracy", "reward/accuracy", "rollout/length_mean", "policy/entropy",
    "policy/kl", "policy/clip_fraction", "mismatch/mean_abs", "policy/grad_norm", "rollout/groups_with_signal",
    "machine/tokens_per_second",
)  # fmt: skip
"""The most important metrics, in the order in which the page shows them."""
KNOWN = {
    "prompt_id", "prompt", "answer", "completion", "reward", "terms", "reason", "unscorable", "tokens", "finish_reason",
    "policy_version", "group", "sample", "advantage", "token_texts", "given", "restarts", "calls",
    *PER_TOKEN,
}  # fmt: skip
"""Fields of a sample that are not terms of its reward."""
OF_THE_GROUP = {"baseline": ("mean", "leave_one_out", "optimal"), "std": ("sample", "population", "mean", "none")}
"""Settings with which advantages follow from the group alone, so that the page can compute them again."""
TIME_BARS = 60
"""Number of stacked bars that show a run's time."""

Packed = dict[str, Any]


def pack(runs: Sequence[RunData]) -> Packed:
    """Returns everything that the page shows."""
    share = SAMPLES_BUDGET // len(runs)
    packed = [_run(run, share, CELLS // len(runs)) for run in runs]
    curves = list(dict.fromkeys(name for run in packed for name in run["curves"]))
    flat = [_flat(run.config) for run in runs]
    names = dict.fromkeys(name for settings in flat for name in settings if name not in ("run.name", "run.root"))
    # Each setting with its value in each run.
    rows = [(name, [settings.get(name, "absent") for settings in flat]) for name in names]
    differing = [(name, values) for name, values in rows if len({*values}) > 1]
    return {"runs": packed, "metrics": _explained(curves), "first": [*FIRST], "differing": differing}


def _run(run: RunData, budget: int, cells: int) -> Packed:
    curves, axes = _curves(run)
    summary = {name: value for name, given in run.summary.items() if (value := finite(given)) is not None}
    last = {name: values[-1] for name in FIRST if (values := words.curve(run.metrics, name))}
    # Settings are shown where they differ from the schema's default.
    settings, defaults = _flat(run.config), _flat(_defaults(Config))
    return {
        "name": run.name,
        "headline": words.headline(run),
        "sentences": words.sentences(run),
        "facts": _facts(run),
        "results": summary | last | {"seconds": words.total_seconds(run)},
        "score": None if words.success(run)[0] == "Accuracy" else _plain(words.setting(run.config, "reward.success")),
        "missing": run.missing,
        "damaged": [_cut(note) for note in run.damaged[:SHOWN_NOTES]],
        "damaged_more": max(0, len(run.damaged) - SHOWN_NOTES) + run.damaged_more,
        "settings": [(k, v, defaults.get(k, "required")) for k, v in settings.items() if v != defaults.get(k)],
        "alike": _flat({k: v for k, v in run.config.items() if k != "cluster"}) | dict.fromkeys(_OF_ONE_RUN),
        "seed": _plain(words.setting(run.config, "run.seed")),
        "steps": words.last_step(run.metrics),
        "axes": axes,
        "curves": curves,
        "alarms": [_bounded(alarm) for alarm in run.alarms],
        "samples": _samples(run.samples, budget),
        "followed": _samples(run.followed, budget),
        "advantage": _estimator(run.config),
        "group_size": finite(words.setting(run.config, "algorithm.group_size")),
        "time": _time(run),
        "planned": planned(run),
        "devices": devices(run),
        "experts": experts(run, cells),
    }


# Settings without influence on which runs the page takes for repetitions of each other, drawn as one line with a band.
_OF_ONE_RUN = ("run.seed", "run.name", "run.root")


def _curves(run: RunData) -> tuple[dict[str, Packed], list[list[int]]]:
    """{metric: its curve, with the index of its axis of steps}, and these axes, each once.

    A metric that every stage records, such as time/step, has a curve for each earlier stage: "sft: time/step".
    """
    axes: dict[tuple[int, ...], int] = {}
    found = {}
    for stage, metrics in ((None, run.metrics), *run.stages.items()):
        for name in dict.fromkeys(name for values in metrics.values() for name in values):
            steps = [step for step, values in metrics.items() if name in values]
            curve = thin(steps, [metrics[step][name] for step in steps])
            # Most metrics have a value at every step, so their steps are stored once for all of them.
            axis = axes.setdefault(tuple(curve.steps), len(axes))
            kept = {"mean": _short(curve.mean), "low": _short(curve.low), "high": _short(curve.high)}
            shown = name if stage is None or name.startswith(STAGES[stage].prefix) else f"{stage}: {name}"
            found[shown] = {
                "axis": axis, "count": len(steps), "per_point": curve.per_point, "last_stage": stage is None, **kept,
            }  # fmt: skip
    return found, [list(axis) for axis in axes]


def _recorded(name: str) -> str:
    """The metric's name in its file, from the name of its curve."""
    stage, colon, rest = name.partition(": ")
    return rest if colon and stage in STAGES else name


def _short(values: Sequence[float]) -> list[float]:
    """The values, rounded to seven digits, more than any screen shows."""
    return [float(f"{value:.7g}") for value in values]


def _explained(names: Sequence[str]) -> list[Packed]:
    """Metrics by section, each with its unit, meaning and good direction; metrics without a section come last."""
    found = []
    left = list(names)
    for section in SECTIONS:
        # Prefixes up to their first placeholder.
        heads = tuple({prefix.split("{")[0] for prefix in section.prefixes})
        own = [name for name in left if find(_recorded(name)) in section.metrics and _recorded(name).startswith(heads)]
        chosen = {*own}
        left = [name for name in left if name not in chosen]
        if own:
            found.append({"title": section.title, "about": section.about, "metrics": [_metric(name) for name in own]})
    if left:
        about = "Of another version of this program: docs/metrics.md does not explain them."
        found.append({"title": "Others", "about": about, "metrics": [_metric(name) for name in left]})
    return found


def _metric(name: str) -> Packed:
    metric = find(_recorded(name))
    if metric is None:
        return {"name": name, "unit": "", "meaning": "", "taken": "", "good": ""}
    return {**asdict(metric), "name": name}


def _facts(run: RunData) -> list[tuple[str, str]]:
    """(name, value) of facts about the run: layout, size, versions."""
    status = how_it_ended(run.summary) or "not complete"
    facts = [("Status", status)]
    # None if the command is not known.
    if run.words is not None:
        presets = [word.partition("=")[2] for word in run.words if word.startswith("experiment=")]
        others = " ".join(word for word in run.words if not word.startswith("experiment="))
        facts.append(("Preset", presets[-1] if presets else "none"))
        facts.append(("Other than the preset", _cut(others) or "nothing"))
    facts.append(("Stages", words.chain(run)))
    model = [f"{words.setting(run.config, f'model.{name}')} {name}" for name in ("layers", "hidden")]
    if run.config:
        facts.append(("Model", ", ".join(text for text in model if not text.startswith("None"))))
        estimator = [words.setting(run.config, f"algorithm.advantage_{name}") for name in ("baseline", "std")]
        facts.append(("Advantage", f"baseline {estimator[0]}, divided by {estimator[1]}"))
        facts.append(("Seed", str(words.setting(run.config, "run.seed"))))
    layout = run.summary.get("layout")
    if isinstance(layout, dict):
        sizes = [f"{name.upper()} {size}" for name, size in layout.items() if name in _SIZES]
        facts.append(("Layout", ", ".join(sizes)))
    versions = run.summary.get("versions")
    if isinstance(versions, dict):
        facts.append(("Versions", ", ".join(f"{name} {value}" for name, value in versions.items())))
    return facts


_SIZES = ("tp", "pp", "cp", "ep", "etp", "dp")


def _defaults(section: Any) -> Packed:
    """The defaults of a section of the schema, nested, without required settings."""
    made = section()
    return {
        item.name: _defaults(type(value)) if is_dataclass(value) else value
        for item in fields(made)
        if (value := getattr(made, item.name)) != "???"
    }


def _flat(config: Any, prefix: str = "") -> dict[str, str]:
    """Dotted name -> value as text, for nested settings."""
    if isinstance(config, dict) and config:
        return {
            key: value
            for name, inner in config.items()
            for key, value in _flat(inner, f"{prefix}.{name}" if prefix else str(name)).items()
        }
    return {prefix: _cut(str(config))} if prefix else {}


def _estimator(config: Packed) -> Packed:
    """How the group's rewards become advantages; "why_not" says why the page cannot compute them, if so."""
    algorithm = config.get("algorithm")
    if not isinstance(algorithm, dict):
        return {"why_not": "without config.yaml it is not known how rewards become advantages"}
    baseline, std = (_plain(algorithm.get(f"advantage_{name}")) for name in ("baseline", "std"))
    found = {"baseline": baseline, "std": std, "objective": _plain(algorithm.get("objective"))}
    # None stands for no bound, such as an infinite clip_high.
    found |= {name: finite(algorithm.get(name)) for name in ("clip_low", "clip_high", "dual_clip")}
    # Whatever holds first is shown. The page computes advantages of a group from its rewards alone.
    reasons = {
        "a teacher's log-probabilities decide, token by token (distill.teacher)": words.setting(
            config, "distill.teacher"
        )
        is not None,
        "a critic says what was to be expected, token by token (algorithm.advantage_baseline=critic)": baseline
        == "critic",
        "they depend on all samples of the step (algorithm.advantage_baseline=batch)": baseline == "batch",
        f"they are divided by a deviation over the whole step (algorithm.advantage_std={std})": std
        in ("batch", "batch_rewards"),
        "each term is normalised apart, and their sum over the step (algorithm.terms_apart)": algorithm.get(
            "terms_apart"
        ),
        "the steps of a completion are rewarded, not the completion (algorithm.supervision=process)": algorithm.get(
            "supervision"
        )
        == "process",
        "the KL term lowers the rewards first (algorithm.kl_in=reward)": algorithm.get("kl_in") == "reward"
        and bool(algorithm.get("kl_coef")),
        "this version of the page does not know this estimator": baseline
        not in (*OF_THE_GROUP["baseline"], "critic", "batch")
        or std not in (*OF_THE_GROUP["std"], "batch", "batch_rewards"),
    }
    why = next((reason for reason, holds in reasons.items() if holds), None)
    return found | ({"why_not": why} if why else {})


def _samples(samples: Samples, budget: int) -> Packed:
    """Completions in at most about `budget` bytes, equally divided between steps; at least one group of each step."""
    each = max(1, budget // max(1, len(samples.steps)))
    steps, left_out = [], 0
    for step in samples.steps:
        groups: list[Packed] = []
        spent = 0
        for records in step.groups:
            shared = {name: _cut(str(records[0].get(name, ""))) for name in ("prompt_id", "prompt", "answer")}
            packed = [_sample(record) for record in records]
            spent += sum(map(_size, packed))
            if groups and spent > each:
                left_out += len(step.groups) - len(groups)
                break
            groups.append(shared | {"samples": packed})
        steps.append({"step": step.step, "groups": groups})
    return {"steps": steps, "files": samples.files, "groups_left_out": left_out}


def _sample(record: Packed) -> Packed:
    """A completion as the page shows it, from a record of samples/ of any version."""
    terms = record.get("terms")
    # Earlier versions wrote the terms of the reward as fields of the record.
    own = terms if isinstance(terms, dict) else {name: value for name, value in record.items() if name not in KNOWN}
    scores = {_cut(str(name)): value for name, given in own.items() if (value := finite(given)) is not None}
    found: Packed = {
        "reward": None if record.get("unscorable") else finite(record.get("reward")),
        "terms": scores,
        "tokens": finite(record.get("tokens")),
        "text": _cut(str(record.get("completion", ""))),
    }
    found |= {name: _cut(str(record[name])) for name in ("reason", "unscorable", "finish_reason") if record.get(name)}
    found |= {name: finite(record[name]) for name in ("advantage", "policy_version") if name in record}
    texts = record.get("token_texts")
    if isinstance(texts, list) and texts:
        found["token_texts"] = [_cut(str(text)) for text in texts[:TOKENS]]
        found["tokens_left_out"] = max(0, len(texts) - TOKENS)
        if given := _spans(record.get("given")):
            found["given"] = [[min(bound, TOKENS) for bound in span] for span in given]
        if turns := _turns(record, given, [str(text) for text in texts]):
            found["turns"] = turns
        for name in PER_TOKEN:
            values = record.get(name)
            # Numbers that do not match the tokens one by one cannot be shown beside them.
            if isinstance(values, list) and len(values) == len(texts):
                known = [finite(value) for value in values[:TOKENS]]
                found[name] = [None if value is None else float(f"{value:.5g}") for value in known]
    return found


def _spans(given: Any) -> list[list[int]]:
    """The spans of given tokens of a record; [] for anything else."""
    spans = given if isinstance(given, list) else []
    pairs = [span for span in spans if isinstance(span, list) and [type(bound) for bound in span] == [int, int]]
    return pairs[:TOKENS]


def _turns(record: Mapping[str, Any], given: Sequence[Sequence[int]], texts: Sequence[str]) -> list[list[Any]]:
    """[first token, one past the last, "call", "reply", "error" or "new context"] of the calls of a record and of what
    follows them, in order and disjoint; [] for anything else."""
    found: list[list[Any]] = []
    calls, restarts, begin = record.get("calls"), record.get("restarts"), 0
    anew = restarts if isinstance(restarts, list) else []
    # The last call may have no reply: then it ends the completion.
    ends = [*given, (len(texts), len(texts))]
    for call, (first, end) in zip(calls if isinstance(calls, list) else [], ends, strict=False):
        if not isinstance(call, dict) or not begin < first <= end <= len(texts):
            break
        # A call is the end of its turn: its text, and the token that closes it.
        at, left = first - 1, len(str(call.get("text", "")))
        while at > begin and left > 0:
            at -= 1
            left -= len(texts[at])
        follows = "error" if call.get("error") is True else "new context" if first in anew else "reply"
        found += [[at, first, "call"], [first, end, follows]]
        begin = end
    return [[first, min(end, TOKENS), what] for first, end, what in found if first < min(end, TOKENS)]


def _size(sample: Packed) -> int:
    """Approximate number of bytes of a completion in the page."""
    # About nine characters for a number of five digits with its comma, three for the quotes and the comma of a text.
    numbers = sum(9 * len(sample.get(name, ())) for name in PER_TOKEN)
    return 200 + len(sample["text"]) + numbers + sum(len(text) + 3 for text in sample.get("token_texts", ()))


def _cut(text: str) -> str:
    """The text, or its beginning and the number of characters that are left out."""
    more = len(text) - CHARACTERS
    return text if more <= 0 else f"{text[:CHARACTERS]}… ({more:,} more characters are in the file)"


def _plain(value: Any) -> str | float | None:
    """A setting as JSON has it: None, a number, or else text."""
    return None if value is None else number if (number := finite(value)) is not None else _cut(str(value))


def _bounded(alarm: Packed) -> Packed:
    return {
        str(k)[:100]: _cut(str(v)) if isinstance(v, str) else finite(v) for k, v in alarm.items() if k != "cleared"
    } | {"cleared": bool(alarm.get("cleared"))}


def _time(run: RunData) -> Packed:
    """Seconds by phase, of the last stage and of about `TIME_BARS` stretches of it, and what bounds a step."""
    metrics = run.metrics
    phases = words.phase_seconds(metrics)
    apart = {name: sum(words.curve(metrics, f"time/{name}")) for name in words.NO_PHASES if name != "step"}
    steps = [step for step, values in metrics.items() if any(f"time/{phase}" in values for phase in phases)]
    length = -(-len(steps) // TIME_BARS)
    bars = []
    for start in range(0, len(steps), max(1, length)):
        own = steps[start : start + length]
        seconds = [sum(metrics[step].get(f"time/{phase}", 0.0) for step in own) / len(own) for phase in phases]
        bars.append({"first": own[0], "last": own[-1], "steps": len(own), "seconds": _short(seconds)})
    return {
        "words": words.time_words(phases, run.config, traced=run.waterfall is not None),
        "phases": phases,
        "apart": {name: seconds for name, seconds in apart.items() if seconds},
        "bars": bars,
        "traced": _traced(run),
    }


def _traced(run: RunData) -> Packed | None:
    """The waterfall of the newest steps, from their traces; None without traces."""
    found = run.waterfall
    if found is None:
        return None
    parts = [{"name": part.name, "seconds": part.seconds, "share": part.share} for part in found.parts]
    of = f" of {run.traced}, evenly spread" if found.ranks < run.traced else ""
    about = f"Steps {found.steps[0]} to {found.steps[-1]}, {found.ranks} ranks traced{of}; medians over the steps."
    return {"words": found.words, "about": about, "parts": parts}

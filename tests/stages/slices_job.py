"""Ranks that drive runs of GRPO whose samples outlive steps, and print what they saw as JSON: {part: observations}.

Usage: slices_job.py FOLDER [all] LAYOUT_OVERRIDE...
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import stage_state
import torch
import torch.distributed as dist
from forks import free_port
from grpo_run import config_of, digest, here, step, stopped_after_update

from grpo_mega import platform
from grpo_mega.assemble import assemble
from grpo_mega.colocation.colocation import Colocation
from grpo_mega.config.schema import SGLangConfig
from grpo_mega.data import build_data
from grpo_mega.platform.collectives import from_main_rank
from grpo_mega.platform.stop import Interrupted, StopRequest
from grpo_mega.reward.compose import build_reward
from grpo_mega.rollout.embedded import EmbeddedEngine
from grpo_mega.run import Run
from grpo_mega.stages.exchange import pack_samples
from grpo_mega.types import Rollout, Sample

EVERYTHING, LAYOUT = "all" in sys.argv, [word for word in sys.argv[2:] if word != "all"]
# A random model hardly ever ends its completions: with more tokens that end them, their lengths vary.
STOP = "rollout.stop=['=','7','8']"
CORRECTED = [*LAYOUT, "algorithm.correction=truncate", "optimizer.lr=1e-2", STOP]
LATE = [*CORRECTED, "rollout.slice_tokens=3", "algorithm.epochs=2"]
ONLY_SLICED = ("rollout/staleness_mean", "rollout/staleness_max", "rollout/in_flight", "rollout/waiting")
NEWEST = ("rollout/tokens_newest", "policy/effective_samples")
"""Metrics that only runs with slices have, and that are 1 where no token is older than the step."""


@contextmanager
def grpo(name: str, *overrides: str) -> Iterator[Run]:
    """A run of all ranks with random weights that has begun, or continues in run directory `name`."""
    platform.join_processes(here)
    config = config_of(name, *overrides)
    with assemble(config, here, build_data(config), build_reward(config.reward)) as built:
        built.enter(built.stages[-1])
        yield built
        os.environ["MASTER_PORT"] = str(from_main_rank(free_port))


def everyones(mine: Any) -> list[Any]:
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered


def watched(built: Run) -> list[Rollout]:
    """A list that will hold what the stage's steps are made of, with the samples of all ranks."""
    rollouts, next_rollout = [], built.stage.rollouts.next

    def seen(*arguments: Any) -> Rollout:
        rollout = next_rollout(*arguments)
        samples = {number: s for theirs in everyones(rollout.samples) for number, s in theirs.items()}
        rollouts.append(Rollout(rollout.groups, samples))
        return rollout

    built.stage.rollouts.next = seen
    return rollouts


def by_name(rollouts: list[Rollout]) -> dict[tuple[str, int], Sample]:
    return {(s.prompt.id, s.index): s for rollout in rollouts for s in rollout.samples.values()}


def whole_completions() -> dict[str, Any]:
    """Steps of slices that no completion exceeds, and of none."""
    seen = []
    for name, *more in (("plain",), ("whole", "rollout.slice_tokens=12"), ("longer", "rollout.slice_tokens=40")):
        with grpo(name, *CORRECTED, *more) as built:
            metrics = [step(built) for _ in range(3)]
            built.save()
            stale = {values.pop(key) for values in metrics for key in ONLY_SLICED if key in values}
            newest = [values.pop(key) for values in metrics for key in NEWEST if key in values]
            seen.append((metrics, digest(built), sorted(stale), newest))
    return {
        "same": [one[:2] == seen[0][:2] for one in seen],
        "stale": [one[2] for one in seen],
        "newest": [one[3] for one in seen],
    }


def without_learning() -> dict[str, Any]:
    """Samples under a learning rate that moves nothing: how many with slices have a twin without, and which differ; and
    whether steps take groups in the order in which prompts are drawn."""
    still = [*CORRECTED, "optimizer.lr=1e-30", "model.moe.bias_update_rate=0"]
    with grpo("still", *still) as built:
        rollouts = watched(built)
        for _ in range(4):
            step(built)
        plain = by_name(rollouts)
        drawn = [group.prompt.id for rollout in rollouts for group in rollout.groups]
    found = {}
    sizes = [(1,), (5, "rollout.order=submitted", "rollout.in_flight=7", "rollout.reserve=5")]
    if EVERYTHING:
        sizes += [(3,), (7, "rollout.reserve=9"), (5, "rollout.order=submitted"), (5, "rollout.in_flight=7")]
    for size, *more in sizes:
        name = "-".join(["still", str(size), *more]).replace(".", "_").replace("=", "_")
        with grpo(name, *still, f"rollout.slice_tokens={size}", *more) as built:
            rollouts = watched(built)
            for _ in range(3):
                step(built)
            sliced = by_name(rollouts)
            taken = [group.prompt.id for rollout in rollouts for group in rollout.groups]
        common = plain.keys() & sliced.keys()
        unlike = [one for one in common if plain[one].token_ids != sliced[one].token_ids]
        off = max(abs(x - y) for one in common for x, y in zip(plain[one].logprobs, sliced[one].logprobs, strict=True))
        ordered = taken == drawn[: len(taken)]
        found[name] = {"common": len(common), "unlike": unlike, "off": off, "all": len(sliced), "ordered": ordered}
    return found


def versions() -> dict[str, Any]:
    """How far the log-probs of each segment are from those of the weights with its version, and of the next one."""
    weights: dict[int, list[torch.Tensor]] = {}
    more = ["rollout.in_flight=6", "rollout.reserve=4", "rollout.max_new_tokens=24", "rollout.temperature=0.8"]
    with grpo("versions", *LATE, *more) as built:
        rollouts, metrics = watched(built), []
        for _ in range(4):
            weights[built.model.updates] = [x.detach().clone() for x in tensors_of(built)]
            metrics.append(step(built))
        samples = [*by_name(rollouts).values()]
        own = [off(built, samples, weights, version) for version in weights]
        segments = {len(s.segments) for s in samples}
        ages = [(s.segments[0][1], s.segments[-1][1]) for s in samples if len(s.segments) > 1]
        drift = [max(off(built, samples, {v: weights[max(weights)]}, v) for v in list(weights)[:-1])]
    return {
        "own": max(own), "drift": drift[0], "segments": max(segments), "ages": ages[:3], "bound": max(
            m["rollout/staleness_max"] for m in metrics
        ), "mismatch": max(m["mismatch/max_abs"] for m in metrics if "mismatch/max_abs" in m),
        "in_flight": [m["rollout/in_flight"] for m in metrics],
    }  # fmt: skip


def ahead() -> dict[str, Any]:
    """Slices, or whole completions, that are generated during the updates of the step before."""
    found = {}
    still = [*CORRECTED, "optimizer.lr=1e-30", "model.moe.bias_update_rate=0"]
    for name, *more in [("ahead_sliced", "rollout.slice_tokens=3", "rollout.in_flight=6"), ("ahead_whole",)][
        : 1 + EVERYTHING
    ]:
        taken = []
        for run, on in ((f"{name}_off", "false"), (f"{name}_on", "true")):
            with grpo(run, *still, *more, f"rollout.ahead={on}") as built:
                rollouts = watched(built)
                for _ in range(3):
                    step(built)
                taken.append([{n: (s.prompt.id, s.token_ids) for n, s in of.samples.items()} for of in rollouts])
        weights: dict[int, list[torch.Tensor]] = {}
        with grpo(f"{name}_learning", *CORRECTED, *more, "rollout.ahead=true") as built:
            rollouts, metrics = watched(built), []
            for _ in range(4):
                weights[built.model.updates] = [x.detach().clone() for x in tensors_of(built)]
                metrics.append(step(built))
            own = [off(built, [*by_name(rollouts).values()], weights, version) for version in weights]
        last = [max(s.segments[-1][1] for s in of.samples.values()) for of in rollouts]
        found[name] = {
            "same": taken[0] == taken[1],
            "own": max(own),
            "newest": last,
            "staleness": [m["rollout/staleness_max"] for m in metrics],
            "bound": built.stage.rollouts.slices.most_steps_late(12, False),
            "in_flight": [m["rollout/in_flight"] for m in metrics],
        }
    return found


class Apart(EmbeddedEngine):
    """An engine to which weights are pushed, and which may be busy while the policy is updated."""

    generates_between_polls = True
    late = 0  # samples that it began with older weights than the policy's

    def submit(self, wanted: Any, sampling: Any, version: int) -> None:
        super().submit(wanted, sampling, version)  # refuses another version than that of the weights pushed
        self.late += len(wanted) * (version < self.policy.updates)


def apart() -> dict[str, Any]:
    """What an engine that is busy during the updates is given afterwards, in the same slice, before evaluations."""
    more = ["rollout.ahead=true", "rollout.in_flight=6", "rollout.reserve=4", "run.eval_every=1"]
    with grpo("apart", *LATE, *more) as built:
        rollouts = built.stage.rollouts
        rollouts.engine = engine = Apart(built.model, rollouts._decode, 64)
        place = built.timer, [*range(20)], Path(sys.argv[1], "apart")
        rollouts.access = Colocation(built.model, [], engine, SGLangConfig(), *place)
        metrics = [step(built) for _ in range(3)]
    return {"late": engine.late, "staleness": [m["rollout/staleness_max"] for m in metrics]}


def shown() -> dict[str, Any]:
    """What records and metrics say of the ages of tokens, and what the samples say."""
    with grpo("shown", *LATE, "run.sample_groups_per_step=4", "rollout.in_flight=6") as built:
        rollouts, unlike, aged, newest, waiting = watched(built), [], 0, [], []
        for _ in range(4):
            version = built.model.updates
            record = built.stage.step(built)
            built.step += 1
            samples = by_name(rollouts[-1:])
            ages = {
                name: [version - max(v for first, v in s.segments if first <= at) for at in range(len(s.token_ids))]
                for name, s in samples.items()
            }
            for one in record.shown:
                name = one["prompt_id"], one["sample"]
                if one.get("ages") != (ages[name] if any(ages[name]) else None):
                    unlike.append((name, one.get("ages"), ages[name]))
                if not "".join(one["token_texts"]).startswith(samples[name].text):
                    unlike.append((name, one["token_texts"], samples[name].text))
                aged += len({*ages[name]}) > 1
            of_tokens = [age for of_sample in ages.values() for age in of_sample]
            newest.append((record.metrics["rollout/tokens_newest"], of_tokens.count(0) / len(of_tokens)))
            unfinished = sum(one is not None for group in built.stage.in_flight.groups.values() for one in group.so_far)
            counts = [record.metrics[f"rollout/{kind}"] for kind in ("in_flight", "waiting")]
            waiting.append((*counts, unfinished))
        effective = record.metrics["policy/effective_samples"]
    return {"unlike": unlike, "aged": aged, "newest": newest, "waiting": waiting, "effective": effective}


def tensors_of(built: Run) -> list[torch.Tensor]:
    """Weights and routing biases."""
    return [*built.model.chunks.parameters(), *built.model.chunks.buffers()]


def off(built: Run, samples: list[Sample], weights: dict[int, list[torch.Tensor]], version: int) -> float:
    """Largest difference at the tokens that this version sampled."""
    with torch.no_grad():
        for tensor, value in zip(tensors_of(built), weights[version], strict=True):
            tensor.copy_(value)
    batch, largest = pack_samples(samples), 0.0
    distance = (built.model.logprobs(batch, built.stage.temperature) - batch.rollout_logprob).abs()
    for s, row in zip(samples, distance.split(batch.lengths.tolist()), strict=True):
        ends = [*(first for first, _ in s.segments[1:]), len(s.token_ids)]
        completion = row[len(s.prompt.token_ids) :]
        for (first, of_segment), end in zip(s.segments, ends, strict=True):
            if of_segment == version and end > first:
                largest = max(largest, completion[first:end].max().item())
    return largest


def held(built: Run) -> dict[str, str]:
    """All that the stage holds; of what is in flight also the contents."""
    state = built.stage.in_flight
    # But for the rank that holds a sample, on which nothing depends.
    contents = {
        number: vars(group) | {"infos": [info and replace(info, holder=0) for info in group.infos]}
        for number, group in state.groups.items()
    }
    plain = repr((contents, state.submitted, state.slices, sorted(n for of in everyones([*state.samples]) for n in of)))
    return stage_state.held(built.stage) | {"in flight": plain}


def stopped() -> dict[str, Any]:
    """Runs that are stopped between steps, after an update and in a slice, beside runs left in peace."""
    runs = [("plain",)]
    if EVERYTHING:
        refill = "algorithm.groups_without_signal=refill"
        runs += [
            ("ahead", "rollout.ahead=true"),
            ("refill", refill),
            ("submitted", "rollout.order=submitted", "rollout.reserve=4"),
            ("ppo", "algorithm=ppo", "critic.alone_steps=1"),
            ("curriculum", "data.curriculum=frontier", "data.frontier_high=2", "data.train_size=8"),
            ("adapters", "lora.rank=4", "model.moe.bias_update_rate=0"),
            ("ahead_refill", refill, "rollout.ahead=true", "rollout.slice_tokens=null"),
        ]
    found = {}
    for name, *more in runs:
        with grpo(f"peace_{name}", *LATE, *more) as built:
            metrics = [step(built) for _ in range(4)]
            expected = digest(built), held(built)
        seen = []
        with grpo(f"stopped_{name}", *LATE, *more) as built:
            seen.append(step(built))
            built.save()
        with grpo(f"stopped_{name}", *LATE, *more) as built:
            stopped_after_update(built)
            try:
                built.stage.step(built)
            except Interrupted:
                built.save()
        with grpo(f"stopped_{name}", *LATE, *more) as built:
            seen.append(step(built))
            interrupted(built, built.stage.rollouts.engine, "poll")  # stops at the next poll, or with whole completions
            interrupted(built, built.stage.rollouts, "next")  # stops before the log-probs
            seen.append(step(built))
            built.save()
        with grpo(f"stopped_{name}", *LATE, *more) as built:
            seen.append(step(built))
            again = digest(built), held(built)
        found[name] = {
            "metrics": seen == metrics,
            "digest": again[0] == expected[0],
            "lost": stage_state.lost(expected[1], again[1]),
            "waiting": max(one["rollout/in_flight"] for one in metrics),
        }
    return found


def forked() -> dict[str, Any]:
    """A fork of a run with samples in flight, whose groups and samples are smaller."""
    newest = max(Path(sys.argv[1], "stopped_plain", "checkpoints").glob("step-*"))
    smaller = ["algorithm.group_size=2", "rollout.max_new_tokens=6", f"run.fork={newest}"]
    with grpo("forked", *LATE, *smaller) as built:
        state = built.stage.in_flight
        return {"groups": len(state.groups), "submitted": state.submitted, "longest": step(built)["rollout/length_max"]}


def forked_from_whole_completions() -> dict[str, Any]:
    """A fork with slices of a run without: the draws of what waits after a step, and what the summary counts."""
    checkpoint = Path(sys.argv[1], "plain", "checkpoints", "step-000003")
    with grpo("fork_of_plain", *LATE, "rollout.in_flight=8", f"run.fork={checkpoint}") as built:
        step(built)
        draws = sorted({group.draw for group in built.stage.in_flight.groups.values()})
        waiting = built.stage.rollouts.samples_in_flight()
        built.stage.end(built)
    summary = json.loads(Path(sys.argv[1], "fork_of_plain", "summary.json").read_text())
    return {"draws": draws, "waiting": waiting, "counted": summary["samples_in_flight"]}


def interrupted(built: Run, owner: Any, method: str) -> None:
    """Begins a step, and is asked to stop during the first call of this method."""
    original = getattr(owner, method)

    def asked(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        built.stop.received = "SIGTERM"
        return result

    setattr(owner, method, asked)
    try:
        built.stage.step(built)
        raise AssertionError("it was not interrupted")
    except Interrupted:
        setattr(owner, method, original)
        built.stop = StopRequest()


if __name__ == "__main__":
    parts = (
        whole_completions,
        without_learning,
        versions,
        ahead,
        apart,
        shown,
        stopped,
        forked,
        forked_from_whole_completions,
    )
    found = {part.__name__: part() for part in parts}
    print(json.dumps(found))

"""Ranks that train with an environment, and print what they saw as JSON.

Usage: conversation_job.py FOLDER [all | samples] LAYOUT...
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from forks import free_port
from grpo_run import config_of, digest, here, step, stopped_after_update

from grpo_mega import platform
from grpo_mega.algorithm.step_advantages import process_supervision
from grpo_mega.assemble import assemble
from grpo_mega.data import build_data
from grpo_mega.data.tokenizer import CharTokenizer
from grpo_mega.errors import InputError
from grpo_mega.platform.collectives import from_main_rank
from grpo_mega.platform.stop import Interrupted, StopRequest
from grpo_mega.reward.compose import build_reward
from grpo_mega.rollout.contract import EngineRestarted
from grpo_mega.run import Run
from grpo_mega.stages.rollouts import DirectAccess
from grpo_mega.types import Rollout, Sample

# A random model samples all tokens about equally often: "=" ends a call after some ten tokens.
COUNTER = [
    *(word for word in sys.argv[2:] if word not in ("all", "samples")),
    "environment.path=made_environments:Counter",
    "environment.open='+'",
    "environment.close='='",
    "environment.reply='{reply}<think>'",
    "environment.max_calls=3",
    "reward.terms=[{name:environment}]",
    "reward.success=environment",
    "rollout.max_new_tokens=24",
]
TURNS = ["environment.path=made_environments:Ending", "algorithm.supervision=process"]
FORGETFUL = ["environment.path=agents:forgetful", "environment.max_calls=5"]
TOLD = "environment.path=made_environments:Told"
DROPPED = "environment.keep_thoughts=true"

SLICED = ["rollout.slice_tokens=5", "algorithm.correction=truncate"]


def reply_template(self: CharTokenizer, role: str, close: str, keep_thoughts: bool) -> str:
    """That of a chat template which drops thoughts."""
    if not keep_thoughts:
        raise InputError(f"environment.reply={role}", "drops thoughts", "keep them")
    return "{reply}<think>"


CharTokenizer.reply_template = reply_template
continued = CharTokenizer.continued


def continued_with_thoughts(self: CharTokenizer, messages: Any, end: str, keep_thoughts: bool) -> list[int]:
    """That of a template which writes what stands after the replies of `COUNTER`."""
    return [*continued(self, messages, end, keep_thoughts), *([self.token_id("<think>")] if end else [])]


CharTokenizer.continued = continued_with_thoughts


@contextmanager
def run(name: str, *overrides: str) -> Iterator[Run]:
    platform.join_processes(here)
    config = config_of(name, *COUNTER, *overrides)
    reward = build_reward(config.reward, config.run.seed)
    with assemble(config, here, build_data(config), reward) as built:
        built.enter(built.stages[-1])
        yield built
        os.environ["MASTER_PORT"] = str(from_main_rank(free_port))


def samples_of(built: Run, steps: int) -> tuple[list[Sample], list[dict[str, Any]]]:
    """All samples of some steps, and the metrics of these."""
    rollouts: list[Rollout] = []
    next_rollout = built.stage.rollouts.next

    def seen(*arguments: Any) -> Rollout:
        rollouts.append(next_rollout(*arguments))
        gathered: list = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, rollouts[-1].samples)
        rollouts[-1] = Rollout(rollouts[-1].groups, {n: s for of_rank in gathered for n, s in of_rank.items()})
        held = gathered[dist.get_rank()]
        return Rollout(rollouts[-1].groups, held)

    built.stage.rollouts.next = seen
    metrics = [step(built) for _ in range(steps)]
    return [rollout.samples[number] for rollout in rollouts for number in sorted(rollout.samples)], metrics


def stopped() -> dict[str, Any]:
    """A run that is stopped between steps, in a poll and after an update, beside one left in peace."""
    found = {}
    runs = [("slices", *SLICED, *TURNS, "rollout.order=submitted", "rollout.reserve=4")]
    if "all" in sys.argv:
        runs += [("peace", TOLD), ("ahead", *SLICED, TOLD, "rollout.ahead=true")]
    for name, *more in runs:
        with run(f"{name}_whole", *more) as built:
            metrics = [untimed(step(built)) for _ in range(3)]
            expected = digest(built)
        with run(f"{name}_parts", *more) as built:
            seen = [untimed(step(built))]
            built.save()
        with run(f"{name}_parts", *more) as built:
            stopped_after_update(built)
            try:
                built.stage.step(built)
            except Interrupted:
                built.save()
        with run(f"{name}_parts", *more) as built:
            seen.append(untimed(step(built)))
            stopped_in_poll(built)
            seen.append(untimed(step(built)))
            again = digest(built)
        found[name] = {"metrics": seen == metrics, "digest": again == expected}
    return found


def begun_anew() -> dict[str, Any]:
    """A run with samples in flight that cannot be rebuilt from their calls, and what is left of them after a stop."""
    once = [*SLICED, "environment.replayable=false", "rollout.in_flight=24"]
    with run("once", *once) as built:
        for _ in range(2):
            step(built)
        unfinished = [one for group in built.stage.in_flight.groups.values() for one in group.so_far if one]
        built.save()
    with run("once", *once) as built:
        left = [one for group in built.stage.in_flight.groups.values() for one in group.so_far if one]
        samples, _ = samples_of(built, 2)
    return {
        "logs": logs_of("once"),
        "before": sorted(len(one.calls) for one in unfinished),
        "after": sorted(len(one.calls) for one in left),
        "samples": [shown(sample) for sample in samples],
        "journal": os.path.exists(os.path.join(sys.argv[1], "once", "replies")),
    }


def untimed(metrics: dict[str, Any]) -> dict[str, Any]:
    assert metrics["environment/seconds"] > 0
    return {name: value for name, value in metrics.items() if name != "environment/seconds"}


def stopped_in_poll(built: Run) -> None:
    engine = built.stage.rollouts.engine
    poll = engine.poll

    def asked(*arguments: Any) -> Any:
        built.stop.received = "SIGTERM"
        return poll(*arguments)

    engine.poll = asked
    try:
        built.stage.step(built)
        raise AssertionError("it was not interrupted")
    except Interrupted:
        engine.poll = poll
        built.stop = StopRequest()


def evaluated_by_a_lost_engine(built: Run) -> list[str]:
    """Openings of the groups of an evaluation, for which the engine is lost once."""
    rollouts = built.stage.rollouts

    class Losing(DirectAccess):
        def generate(self, version: int, phase: str, work: Callable[[], Any]) -> Any:
            poll = rollouts.engine.poll

            def lost(*arguments: Any) -> Any:
                rollouts.engine.poll = poll
                with suppress(Interrupted):
                    poll(interrupted=True)
                raise EngineRestarted("gone")

            rollouts.engine.poll = lost
            with suppress(EngineRestarted):
                work()
            return super().generate(version, phase, work)

    rollouts.access = Losing(built.timer)
    rollout = rollouts.produced(built, "evaluate", built.stage.data.validation[:4], 2, built.step)
    return [group.prompt.opening for group in rollout.groups]


def credited(still: list[str]) -> dict[str, Any]:
    """How far advantages of turns, wherever a sample is computed, are from those of all groups in one place."""
    with run("credited", *still, *TURNS) as built:
        current = built.stage.experience(built)
        groups, batch = current.groups, current.batch
        assert batch is not None
        numbers, lengths = batch.numbers.tolist(), batch.lengths.tolist()
        expected = process_supervision(groups, built.stage.options.advantages, numbers)
        columns = zip(batch.advantage.split(lengths), batch.mask.split(lengths), strict=True)
        off = [(column[mask] - one).abs().max().item() for (column, mask), one in zip(columns, expected, strict=True)]
        gathered: list = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (numbers, max(off), max(one.abs().max().item() for one in expected)))
        return {
            "computed": sorted({number for of_rank, *_ in gathered for number in of_rank}),
            "off": max(off for _, off, _ in gathered),
            "largest": max(largest for *_, largest in gathered),
            "steps": [info.score.steps for group in groups for info in group.infos],
            "rewards": [info.score.total for group in groups for info in group.infos],
            "signal": [n for n, signal in enumerate(current.signal) for _ in groups[n].infos if signal],
        }


def logs_of(name: str) -> list[str]:
    """Of every rank of a run."""
    return [path.read_text() for path in sorted(Path(sys.argv[1], name, "logs").glob("*.log"))]


def drawn() -> dict[str, Any]:
    """Runs in which rewards of the environment decide which problems are asked next."""
    found = {}
    for name, *more in (
        ("refill", "algorithm.groups_without_signal=refill", "environment.max_calls=1"),
        ("frontier", "data.curriculum=frontier", "data.frontier_high=1.0", "data.train_size=16"),
    ):
        with run(name, *more, TOLD) as built:
            groups: list[Any] = []
            next_rollout = built.stage.rollouts.next

            def seen(*arguments: Any, next_rollout: Any = next_rollout, groups: list[Any] = groups) -> Rollout:
                rollout = next_rollout(*arguments)
                groups += [[group.prompt.id, group.prompt.opening, group.rewards] for group in rollout.groups]
                return rollout

            built.stage.rollouts.next = seen
            found[name] = {"metrics": [step(built) for _ in range(6)], "groups": groups}
    return found


def shown(sample: Sample) -> dict[str, Any]:
    return {
        "prompt": sample.prompt.id,
        "prompt_ids": sample.prompt.token_ids,
        "asked": (sample.prompt.asked, sample.prompt.opening),
        "index": sample.index,
        "ids": [*sample.token_ids],
        "given": sample.given,
        "restarts": sample.restarts,
        "calls": sample.calls,
        "reason": sample.finish_reason,
        "given_logprobs": sum(abs(sample.logprobs[i]) for first, end in sample.given for i in range(first, end)),
    }


def main() -> None:
    found: dict[str, Any] = {}
    still = ["optimizer.lr=1e-30", "model.moe.bias_update_rate=0"]
    for name, *more in (
        ("whole",),
        ("pieces", *FORGETFUL),
        ("sliced", *SLICED, "rollout.reserve=4"),
        ("sliced_pieces", *SLICED, "rollout.reserve=4", *FORGETFUL),
        ("async", "environment.path=waiting_environments:WaitingCounter"),
        ("agent", "environment.path=agents:count"),
        ("ending", "environment.path=made_environments:Once", "environment.reply=tool", DROPPED),
        ("opened", TOLD),
    ):
        with run(name, *still, *more) as built:
            samples, metrics = samples_of(built, 3)
            tokenizer = built.stage.data.tokenizer
            found[name] = {
                "samples": [shown(sample) | {"text": tokenizer.decode(sample.token_ids)} for sample in samples],
                "mismatch": [m.get("mismatch/max_abs", 0.0) for m in metrics],
                "reward": [m["reward/mean"] for m in metrics],
                "calls": [m["environment/calls"] for m in metrics],
                "errors": [m["environment/errors"] for m in metrics],
                "given": [m["environment/given"] for m in metrics],
                "restarts": [m.get("environment/restarts", 0.0) for m in metrics],
                "tokens": [m["rollout/tokens"] for m in metrics],
                "generated": built.stage.watch.tokens["generated"],
            }
            if name == "opened":
                found["evaluated"] = evaluated_by_a_lost_engine(built)
        if name == "sliced_pieces" and "samples" in sys.argv:
            print(json.dumps(found))
            return
    found |= {"credited": credited(still), "begun_anew": begun_anew(), "stopped": stopped()}
    found |= {"drawn": drawn()} if "all" in sys.argv else {}
    found["logs"] = {name: logs_of(name) for name in ("whole", "ending")}
    try:
        with run("refused", "environment.path=made_environments:Needs"):
            raise AssertionError("it was not refused")
    except InputError as error:
        found["refused"] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

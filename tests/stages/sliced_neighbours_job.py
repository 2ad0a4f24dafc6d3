"""One rank that drives runs whose samples outlive steps, beside each other feature that completions pass through;
prints what it saw as JSON: {part: observations}.

Usage: sliced_neighbours_job.py FOLDER [all] LAYOUT_OVERRIDE...
"""

from __future__ import annotations

import json
from typing import Any

import grpo_run
from grpo_run import digest, step
from slices_job import CORRECTED, EVERYTHING, LATE, NEWEST, ONLY_SLICED, by_name, grpo, held, watched

from grpo_mega.algorithm.step_advantages import groups_with_signal
from grpo_mega.types import Batch

TAUGHT = [f"distill.teacher={grpo_run.root}/teacher"]
CRITIC = ["algorithm=ppo", "critic.alone_steps=1"]
ADAPTERS = ["lora.rank=4", "model.moe.bias_update_rate=0"]
REFRESHED = ["algorithm.kl_coef=0.1", "algorithm.reference_refresh=1"]
NEIGHBOURS = {
    "steps": [
        "reward.terms=[{name:own,function:step_rewards:stepwise}]",
        "algorithm.supervision=process",
        "algorithm.advantage_std=none",
    ],
}
if EVERYTHING:
    NEIGHBOURS |= {
        "critic": CRITIC,
        "curriculum": ["data.curriculum=frontier", "data.frontier_high=2", "data.train_size=8"],
        "waves": ["rollout.concurrent_sequences=4"],
        "teacher": TAUGHT,
        "reference": REFRESHED,
        "kl_in_reward": ["algorithm.kl_coef=0.1", "algorithm.kl_in=reward", "algorithm.advantage_std=none"],
        "sequence": ["algorithm.correction_level=sequence"],
        "adapters": ADAPTERS,
        "average": ["optimizer.average_decay=0.5", "run.eval_every=1"],
        "longer": ["rollout.longer_from_step=1", "rollout.longer_max_new_tokens=20"],
    }


def whole_completions() -> dict[str, bool]:
    """Whether slices that no completion exceeds change nothing."""
    same = {}
    for name, more in NEIGHBOURS.items():
        seen = []
        for slices in ("null", "40"):
            with grpo(f"{name}_{slices}", *CORRECTED, *more, f"rollout.slice_tokens={slices}") as built:
                metrics = [step(built) for _ in range(3)]
                kept = [
                    {key: value for key, value in one.items() if key not in ONLY_SLICED + NEWEST} for one in metrics
                ]
                seen.append((kept, digest(built)))
        same[name] = seen[0] == seen[1]
    return same


def single_update() -> dict[str, Any]:
    """Steps of one update, and the same with a bound beyond all ratios, for which old log-probs are computed before."""
    seen, passes = [], []
    for bound in ("inf", "1e30"):
        more = ["algorithm.epochs=1", "rollout.in_flight=8", f"algorithm.rejection_cap={bound}"]
        with grpo(f"bound_{bound}", *LATE, *more) as built:
            passes.append(built.stage.skips_old_pass)
            seen.append([step(built) for _ in range(4)])
    return {"metrics": seen, "without a pass": passes, "corrected": max(one["policy/corrected"] for one in seen[0])}


def current_weights() -> dict[str, Any]:
    """How far the columns of a step with old tokens are from what the present weights say, and how old these are."""
    found = {}
    features = {"critic": CRITIC, "reference": REFRESHED}
    for name, more in (features | {"teacher": TAUGHT, "adapters": ADAPTERS} if EVERYTHING else features).items():
        with grpo(f"current_{name}", *LATE, *more, "rollout.in_flight=8") as built:
            for _ in range(3):
                step(built)
            stage, batch = built.stage, built.stage.experience(built).batch
            assert batch is not None
            off = {"old": off_by(batch, batch.old_logprob, built.model.logprobs(batch, 1.0))}
            if name == "critic":
                off["value"] = off_by(batch, batch.value, stage.critic.values(batch))
            if name == "teacher":
                taught = stage.teacher.logprobs(batch, 1.0)
                off["teacher"] = off_by(batch, batch.teacher_logprob, taught)
                off["advantage"] = off_by(batch, batch.advantage, taught - batch.old_logprob)
            if name == "reference":
                off["reference"] = off_by(batch, batch.ref_logprob, batch.old_logprob)
            found[name] = {"off": off, "old": off_by(batch, batch.old_logprob, batch.rollout_logprob)}
    return found


def off_by(batch: Batch, column: Any, expected: Any) -> float:
    return (column - expected)[batch.mask].abs().max().item()


def evaluated() -> dict[str, Any]:
    """Runs with evaluations of averaged weights while samples are in flight, and with none."""
    found = {}
    for name, *ahead in [("sliced",), ("ahead", "rollout.ahead=true")][: 1 + EVERYTHING]:
        seen = []
        for every in (1, 0):
            more = ["optimizer.average_decay=0.5", f"run.eval_every={every}", "rollout.in_flight=8", *ahead]
            with grpo(f"{name}_evaluated_{every}", *LATE, *more) as built:
                metrics = [step(built) for _ in range(4)]
                kept = [{key: value for key, value in one.items() if not key.startswith("eval/")} for one in metrics]
                seen.append((kept, digest(built), held(built)["in flight"]))
                assert any(key.startswith("eval/") for one in metrics for key in one) == bool(every)
        waiting = min(one["rollout/in_flight"] for one in metrics)
        found[name] = {"same": seen[0] == seen[1], "waiting": waiting}
    return found


def longer() -> dict[str, Any]:
    """Samples under a limit that rises while they are in flight, beside those of a run that always has it; the learning
    rate moves nothing."""
    still = [*CORRECTED, "optimizer.lr=1e-30", "model.moe.bias_update_rate=0", "rollout.stop=['=']"]
    with grpo("always", *still, "rollout.max_new_tokens=20") as built:
        rollouts = watched(built)
        for _ in range(5):
            step(built)
        always = by_name(rollouts)
    more = ["rollout.slice_tokens=5", "rollout.longer_from_step=3", "rollout.longer_max_new_tokens=20"]
    with grpo("longer", *still, *more, "rollout.in_flight=8") as built:
        rollouts = watched(built)
        for _ in range(5):
            step(built)
        samples = by_name(rollouts)
    common = samples.keys() & always.keys()
    # Version 3 is the first whose tokens may be beyond the twelfth.
    cut = [s for s in samples.values() if s.finish_reason == "length" and len(s.token_ids) < 20]
    beyond = [s for s in samples.values() if len(s.token_ids) > 12]
    return {
        "common": len(common),
        "unlike": [n for n in common if samples[n].token_ids != always[n].token_ids[: len(samples[n].token_ids)]],
        "lengths": sorted({len(s.token_ids) for s in cut}),
        "last token": sorted({s.segments[-1][1] for s in cut}),
        "thirteenth token": sorted({max(version for first, version in s.segments if first <= 12) for s in beyond}),
        "grown": sum(s.segments[0][1] < 3 for s in beyond),
    }


def refilled() -> dict[str, Any]:
    """Steps of which half of the groups have no signal."""
    grpo_run.half.touch()
    with grpo("refilled", *LATE, "algorithm.groups_without_signal=refill", "rollout.in_flight=8") as built:
        rollouts = watched(built)
        metrics = [step(built) for _ in range(5)]
        state = built.stage.in_flight
        signal = [groups_with_signal(rollout.groups, built.stage.options.advantages) for rollout in rollouts]
        taken = [group.prompt.id for rollout in rollouts for group in rollout.groups]
        waiting = [group.prompt.id for group in state.groups.values()]
    grpo_run.half.unlink()
    return {
        "signal": [(sum(of_step), of_step[-1]) for of_step in signal],
        "refilled": [one["rollout/refilled"] for one in metrics],
        "dropped": [of_step.count(False) for of_step in signal],
        "known": len({*taken, *waiting}) == len(taken) + len(waiting) == state.submitted,
    }


if __name__ == "__main__":
    if EVERYTHING:
        with grpo("teacher", *CORRECTED, "model.init_std=0.2") as built:
            built.save()
    parts = (whole_completions, single_update, current_weights, evaluated, longer, refilled)
    print(json.dumps({part.__name__: part() for part in parts}))

"""Run directories made for tests of the report: of any size, and with whole groups whose tokens have numbers."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

Record = dict[str, Any]
ALGORITHM = {
    "advantage_baseline": "mean", "advantage_std": "sample", "terms_apart": False, "supervision": "outcome",
    "kl_in": "loss", "kl_coef": 0.0, "objective": "ppo", "clip_low": 0.2, "clip_high": math.inf, "dual_clip": None,
    "prompts_per_step": 2, "group_size": 4,
}  # fmt: skip


def group(number: int, prompt: str, rewards: Sequence[float | None], texts: Sequence[Sequence[str]]) -> list[Record]:
    """The records of a group, as samples/ has them."""
    chance = random.Random(f"{number} {prompt}")
    records = []
    for index, (reward, tokens) in enumerate(zip(rewards, texts, strict=True)):
        logprobs = [-chance.random() for _ in tokens]
        records.append({
            "group": number, "sample": index, "prompt_id": f"problem {number}", "prompt": prompt, "answer": "5",
            "completion": "".join(tokens), "reward": reward, "terms": {"accuracy": reward or 0.0},
            **({"unscorable": "the service was away"} if reward is None else {}),
            "tokens": len(tokens), "finish_reason": "stop", "policy_version": 3, "advantage": None,
            "token_texts": [*tokens], "engine_logprobs": logprobs, "old_logprobs": [x + 1e-3 for x in logprobs],
            "new_logprobs": [x + 0.1 * chance.random() for x in logprobs], "entropies": [1.0 for _ in tokens],
        })  # fmt: skip
    return records


def lines(records: Sequence[Record]) -> str:
    """The records as JSON Lines."""
    return "".join(json.dumps(record) + "\n" for record in records)


def made_run(
    path: Path,
    steps: int = 8,
    samples: dict[int, list[Record]] | None = None,
    seed: int = 0,
    algorithm: dict[str, Any] | None = None,
    **rooms: dict[str, Any],
) -> Path:
    """A whole run directory of so many steps after three supervised ones, with these samples and settings of rooms."""
    (path / "samples").mkdir(parents=True)
    config = {"run": {"name": path.name, "root": "runs", "seed": seed, "trains": "policy"}}
    config |= {
        "algorithm": ALGORITHM | (algorithm or {}),
        "data": {"task": "sums"},
        "model": {"layers": 2, "hidden": 8},
    }
    config |= {name: {**config.get(name, {}), **settings} for name, settings in rooms.items()}
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    numbers = random.Random(seed)
    records = [
        {"step": 0, "eval/heldout/accuracy": 0.1},
        *({"step": step} | {name: value * (1 + 0.1 * numbers.random()) for name, value in _values(step, steps).items()}
          for step in range(1, steps + 1)),
        {"step": steps, "eval/heldout/accuracy": 0.9},
    ]  # fmt: skip
    (path / "metrics.jsonl").write_text(lines(records))
    supervised = [{"step": step, "sft/loss": 1 / step, "time/sft": 500.0, "time/step": 500.0} for step in (1, 2, 3)]
    (path / "sft.jsonl").write_text(lines(supervised))
    summary = {"status": "completed", "steps": steps, "held_out_accuracy_before": 0.1, "held_out_accuracy_after": 0.9}
    (path / "summary.json").write_text(json.dumps(summary | {"seconds": {"generate": 60.0}}))
    for step, of_step in (samples or {}).items():
        (path / "samples" / f"step-{step:06d}.jsonl").write_text(lines(of_step))
    return path


def with_machines(
    run: Path, phases: Sequence[str] = ("sync", "generate", "update"), experts: int = 4, engine_gb: float = 0.0
) -> Path:
    """Adds to a run what its machines leave: traces of two ranks, in which each step has these phases of a second each,
    with what an engine holds in place of the first measurement of memory, and the loads of experts of two layers, of
    which expert 1 gets busier."""
    (run / "trace").mkdir()
    for rank in (0, 1):
        events: list[Record] = []
        for step in (7, 8):
            begin = 1e6 * (10 * step + rank)
            edges = [(kind, name, begin + 1e6 * (at + ends)) for at, name in enumerate(phases)
                     for ends, kind in enumerate("BE")]  # fmt: skip
            inside = [{"ph": kind, "name": name, "ts": at} for kind, name, at in edges]
            memory = [{"ph": "C", "name": "memory", "ts": at, "args": {"resident GB": at / 1e7}} for _, _, at in edges]
            if engine_gb:
                held = {"trainer GB": 1.0, "engine GB": engine_gb}
                memory[0] = {"ph": "C", "name": "device", "ts": memory[0]["ts"], "args": held}
            first = {"ph": "B", "name": "step", "ts": begin, "args": {"step": step, "stage": "grpo"}}
            last = {"ph": "E", "name": "step", "ts": begin + 1e6 * len(phases)}
            events += [first, *(each for pair in zip(inside, memory, strict=True) for each in pair), last]
        told = "".join(json.dumps(event | {"pid": rank, "tid": 0}) + ",\n" for event in events)
        (run / "trace" / f"rank-{rank:05d}.json").write_text("[\n" + told)
    loads = {step: [1 + step / 8 * (number == 1) for number in range(experts)] for step in range(1, 9)}
    (run / "experts.jsonl").write_text(lines([{"step": n, "loads": {"1": own, "2": own}} for n, own in loads.items()]))
    return run


def _values(step: int, steps: int) -> dict[str, float]:
    done = step / steps
    policy = {"policy/entropy": 1 - done / 2, "policy/grad_norm": 1.0, "policy/clip_fraction": 0.01, "policy/kl": done}
    times = {"time/generate": 2.0, "time/reward": 0.2, "time/update": 1.0, "time/step": 3.2}
    completions = {"rollout/length_mean": 20 + math.sin(step), "rollout/groups_with_signal": 0.5}
    rest = {"reward/accuracy": done, "mismatch/mean_abs": 1e-6, "machine/tokens_per_second": 1e4}
    return {"reward/mean": done} | policy | times | completions | rest

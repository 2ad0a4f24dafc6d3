"""Two ranks whose turns end well, and badly for one reason after the other; prints what was left behind each time.

The engine is the embedded one, so nothing leaves the CPU: whose turn it is, and what is kept when a turn fails, are the
same for all engines. Usage: colocation_job.py FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from grpo_mega import platform

HERE = platform.start()

from grpo_mega.colocation.colocation import Colocation  # noqa: E402
from grpo_mega.config.schema import LayoutConfig, ModelConfig, SGLangConfig, Timeouts  # noqa: E402
from grpo_mega.models.policy import Policy  # noqa: E402
from grpo_mega.models.topology import join_layout, leave_layout  # noqa: E402
from grpo_mega.observe.timer import PhaseTimer  # noqa: E402
from grpo_mega.platform.stop import Interrupted  # noqa: E402
from grpo_mega.rollout.embedded import EmbeddedEngine  # noqa: E402
from grpo_mega.rollout.engine import SamplingParams  # noqa: E402
from grpo_mega.rollout.stream import generate  # noqa: E402
from grpo_mega.types import Prompt, Sample  # noqa: E402

MODEL = ModelConfig(layers=2, hidden=64, heads=4, kv_heads=2, ffn_hidden=128, context=32, init_std=0.1)
CONFIG = SGLangConfig(bucket_bytes=20_000, verify_every=1)
AT_ONCE = 1e-9
"""A limit, in seconds, that is over when somebody looks."""


def main() -> None:
    folder = Path(sys.argv[1])
    platform.join_processes(HERE)
    policy = Policy(MODEL, LayoutConfig(), 26, join_layout(LayoutConfig(), seed=0), HERE)
    policy.initialize(seed=3)
    print("\n" + json.dumps({name: case(policy, folder / name) for name, case in CASES.items()}))
    leave_layout()


def made(policy: Policy, path: Path, **limits: float) -> tuple[Colocation, EmbeddedEngine]:
    if dist.get_rank() == 0:
        (path / "logs").mkdir(parents=True)
    dist.barrier()
    engine, config = EmbeddedEngine(policy, str, 8), replace(CONFIG, timeouts=Timeouts(**limits))
    return Colocation(policy, [], engine, config, PhaseTimer(), [*range(20)], path), engine


def samples(engine: EmbeddedEngine, version: int) -> Callable[[], list[Sample]]:
    sampling = SamplingParams(max_new_tokens=4, stop_ids=(2,))
    return lambda: generate(engine, [Prompt("p", (3, 4), "", "", "")], 2, sampling, version)


def seen(
    colocation: Colocation, engine: EmbeddedEngine, version: int, work: Callable[[], Any], path: Path
) -> dict[str, Any]:
    """What a turn ends with, and the file that it leaves."""
    error, notes = "", []
    try:
        colocation.generate(version, "generate", work)
    except Exception as raised:
        error, notes = f"{type(raised).__name__}: {raised}", getattr(raised, "__notes__", [])
    file = path / "logs" / f"post_mortem-rank-{dist.get_rank()}.json"
    written = json.loads(file.read_text()) if file.exists() else None
    state = {"state": colocation.lease.state.value, "version": engine.version}
    return state | {"error": error, "notes": notes, "file": str(file), "written": written}


def well(policy: Policy, path: Path) -> dict[str, Any]:
    colocation, engine = made(policy, path)
    for version in (1, 2):
        found = seen(colocation, engine, version, samples(engine, version), path)
    return found | {"bytes": colocation.metrics()["sync/bytes"]}


def interrupted(policy: Policy, path: Path) -> dict[str, Any]:
    def work() -> None:
        raise Interrupted

    return seen(*made(policy, path), 1, work, path)


def refused(policy: Policy, path: Path) -> dict[str, Any]:
    """The engine has a later version."""
    colocation, engine = made(policy, path)
    colocation.generate(5, "generate", samples(engine, 5))
    return seen(colocation, engine, 4, samples(engine, 4), path)


def failing(policy: Policy, path: Path) -> dict[str, Any]:
    def work() -> None:
        raise MemoryError("no room")

    return seen(*made(policy, path), 1, work, path)


def slow_push(policy: Policy, path: Path) -> dict[str, Any]:
    return seen(*made(policy, path, engine_loading=AT_ONCE), 1, lambda: None, path)


def slow_return(policy: Policy, path: Path) -> dict[str, Any]:
    colocation, engine = made(policy, path, trainer_acquiring=AT_ONCE)
    return seen(colocation, engine, 1, samples(engine, 1), path)


def nowhere_to_write(policy: Policy, path: Path) -> dict[str, Any]:
    colocation, engine = made(policy, path, engine_loading=AT_ONCE)
    dist.barrier()
    if dist.get_rank() == 0:
        (path / "logs").rmdir()
    dist.barrier()
    return seen(colocation, engine, 1, lambda: None, path)


CASES = {
    case.__name__: case for case in (well, interrupted, refused, failing, slow_push, slow_return, nowhere_to_write)
}

if __name__ == "__main__":
    main()

"""One of the ranks that share, two and two, an engine whose ranks keep half of the experts each; prints what was found.

Usage: expert_parallel_job.py FOLDER OVERRIDE...
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"  # SGLang would give each rank of an engine a NUMA node of its own

sys.path.append(str(Path(__file__).resolve().parents[1] / "rollout"))

from grpo_mega import platform

HERE = platform.start()
platform.join_processes(HERE)

import psutil  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from engine_contract import Bench, move, sampling  # noqa: E402

from grpo_mega.config.load import compose_config  # noqa: E402
from grpo_mega.data import build_data  # noqa: E402
from grpo_mega.models.policy import Policy  # noqa: E402
from grpo_mega.models.topology import join_layout, leave_layout  # noqa: E402
from grpo_mega.rollout.contract import EngineError  # noqa: E402
from grpo_mega.rollout.sglang.engine import SGLangEngine  # noqa: E402
from grpo_mega.rollout.sglang.lifecycle import Engines  # noqa: E402

OVERRIDES = [
    "experiment=tiny_sglang",
    "base=none",
    "layout=ep2",
    "data.validation_size=8",
    "data.test_size=8",
    "rollout.sglang.tp=2",
    "+rollout.sglang.arguments.ep_size=2",
]
OF_THE_SECOND = "model.layers.1.mlp.experts.3.down_proj.weight"
"""What only the second rank is to push."""


def said(work) -> str:
    try:
        work()
    except EngineError as error:
        return str(error)
    return "nothing"


def pushed(bench: Bench, change) -> str:
    """What is said when the buckets are pushed after `change`."""

    def push_all() -> None:
        for bucket in bench.buckets():
            bench.engine.push(change(bucket))
        bench.engine.end_update(bench.version)

    return said(push_all)


def incomplete(bucket: list) -> list:
    return [(name, tensor) for name, tensor in bucket if name != OF_THE_SECOND]


def outdated(bucket: list) -> list:
    return [(name, 0 * tensor if name == OF_THE_SECOND else tensor) for name, tensor in bucket]


def half_outdated(bucket: list) -> list:
    """An attention matrix that is outdated where the second rank pushes it."""
    return [
        (name, 0 * t if dist.get_rank() % 2 and name.endswith("1.self_attn.o_proj.weight") else t) for name, t in bucket
    ]


def found(bench: Bench) -> dict:
    sync = bench.weight_sync()
    sync.send(0)
    expected = sync.expected()
    report = {"right": said(lambda: sync.verify(expected)), "traffic": vars(sync.take_traffic())}
    report["distance"] = bench.distance(bench.samples(sampling()))
    if bench.engine._config.transport == "disk":
        return report
    report |= mistakes(bench, expected, sync.verify)
    return report if bench.engine._config.transport == "shared" else report | lost(bench)


def mistakes(bench: Bench, expected: list[float], verify) -> dict:
    """What is said when each rank pushes its own, and one of them something wrong."""
    engine, report = bench.engine, {}
    engine.begin_update()
    some = next(tensor for bucket in bench.buckets() for name, tensor in bucket if "down_proj" in name)
    report["alien"] = said(lambda: engine.push([(OF_THE_SECOND, some)]))
    report["incomplete"] = pushed(bench, incomplete)
    engine.push([pair for bucket in bench.buckets() for pair in bucket if pair[0] == OF_THE_SECOND])
    engine.end_update(0)
    report["completed"] = said(lambda: verify(expected))
    engine.begin_update()
    report["outdated"] = [pushed(bench, outdated), said(lambda: verify(expected))]
    engine.begin_update()
    report["half outdated"] = [pushed(bench, half_outdated), said(lambda: verify(expected))]
    return report


def lost(bench: Bench) -> dict:
    """What is said when the second of an engine's ranks dies in an update, and how the new engine does."""
    bench.engine.begin_update()
    if dist.get_rank() == 0:
        processes = [psutil.Process(pid) for pid in bench.engine.pids()]
        [p for p in processes if "sglang::scheduler" in " ".join(p.cmdline())][1].kill()
    dist.barrier()
    found = {"lost": pushed(bench, lambda bucket: bucket)}
    bench.push_all()
    return found | {"again": bench.distance(bench.samples(sampling()))}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if dist.get_rank() == 0:
        (folder / "logs").mkdir()
    dist.barrier()
    config = compose_config([*OVERRIDES, *sys.argv[2:]])
    data = build_data(config)
    policy = Policy(config.model, config.layout, data.tokenizer.vocab_size, join_layout(config.layout, 0), HERE)
    policy.initialize(seed=0)
    torch.manual_seed(0)
    move(policy)  # from weights so small that an expert hardly matters
    here = (data.tokenizer.vocab_size, HERE, folder)
    engine = SGLangEngine(Engines(config.model, config.rollout, config.run.seed, *here), data.tokenizer.decode)
    try:
        reports: list = [None] * dist.get_world_size()
        dist.all_gather_object(reports, found(Bench(engine, policy, data.test[:4])))
    finally:
        engine.close()
    leave_layout()
    print(json.dumps(reports))

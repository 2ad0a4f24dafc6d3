"""One of two ranks, each on a node of its own as far as it knows, with an engine each or one over both.

Rank 1 interrupts a generation, then loses what it hosts once; prints what was found.
Usage: two_nodes_job.py FOLDER each|both|together OVERRIDE...
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ["LOCAL_WORLD_SIZE"] = "1"
os.environ["GRPO_MEGA_TEST_NODES_ON_ONE_HOST"] = "1"
os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"  # SGLang would give each rank of an engine a NUMA node of its own

sys.path.append(str(Path(__file__).resolve().parents[1] / "rollout"))

import engine_contract_job  # prepares the platform
import psutil
import torch.distributed as dist
from engine_contract import (
    Bench,
    check_an_interrupted_poll_drops_what_is_under_way,
    sampling,
)
from prefix_cache import missed

from grpo_mega.config.load import compose_config
from grpo_mega.data import build_data
from grpo_mega.models.policy import Policy
from grpo_mega.models.topology import join_layout, leave_layout
from grpo_mega.rollout.contract import EngineRestarted
from grpo_mega.rollout.sglang.engine import SGLangEngine
from grpo_mega.rollout.sglang.lifecycle import Engines

HERE = engine_contract_job.HERE
OVERRIDES = ["experiment=tiny_sglang", "base=none", "layout=single", "data.validation_size=8", "data.test_size=8"]


def distance(bench: Bench) -> float:
    bench.push_all()
    return bench.distance(bench.samples(sampling()))


def lost_while_generating(bench: Bench) -> str:
    """What is said when that happens."""
    kill_what_rank_1_hosts(bench)
    return said(lambda: bench.samples(sampling(max_new_tokens=90, stop_ids=())))


def lost_between_pushes(bench: Bench) -> str:
    """The same, with a session open in every engine; that of rank 0 lives on."""
    mine, buckets = bench.engine.pids(), bench.buckets()
    bench.engine.begin_update()
    bench.engine.push(buckets[0])
    kill_what_rank_1_hosts(bench)
    words = said(lambda: bench.engine.push(buckets[1]))
    assert dist.get_rank() or bench.engine.pids() == mine
    return words


def lost_together(bench: Bench) -> str:
    """Both engines are, and that of rank 1 does not start at once again: it has no time to."""
    engines, usual = bench.engine._engines, bench.engine._engines._start

    def too_short(of_engine: list) -> None:
        engines._start = usual
        engines.config.start_seconds, before = 0.1, engines.config.start_seconds
        try:
            usual(of_engine)
        finally:
            engines.config.start_seconds = before

    if dist.get_rank() == 1:
        engines._start = too_short
    for pid in engines.pids:
        psutil.Process(pid).kill()
    dist.barrier()
    return said(lambda: bench.samples(sampling(max_new_tokens=90, stop_ids=())))


def interrupted(bench: Bench) -> str:
    """What is wrong with an interruption of rank 1 alone; nothing, if all is well."""
    return engine_contract_job.problem(bench, check_an_interrupted_poll_drops_what_is_under_way)


def kill_what_rank_1_hosts(bench: Bench) -> None:
    if dist.get_rank() == 1:
        for pid in bench.engine.pids():
            psutil.Process(pid).kill()
    dist.barrier()


def said(work: Callable[[], object]) -> str:
    try:
        work()
    except EngineRestarted as error:
        return str(error)
    return "nothing"


if __name__ == "__main__":
    folder, how = Path(sys.argv[1]), sys.argv[2]
    ways = {"each": (1, lost_between_pushes), "both": (2, lost_while_generating), "together": (1, lost_together)}
    engine_ranks, lose = ways[how]
    (folder / "logs").mkdir(exist_ok=True)
    engines = [f"rollout.sglang.tp={engine_ranks}", "rollout.sglang.silence_seconds=200"]
    config = compose_config([*OVERRIDES, *engines, *sys.argv[3:]])
    data = build_data(config)
    policy = Policy(config.model, config.layout, data.tokenizer.vocab_size, join_layout(config.layout, 0), HERE)
    policy.initialize(seed=0)
    here = (data.tokenizer.vocab_size, HERE, folder)
    engine = SGLangEngine(Engines(config.model, config.rollout, config.run.seed, *here), data.tokenizer.decode)
    bench = Bench(engine, policy, data.test[:4])
    found = {"first": distance(bench), "missed": missed(bench), "interrupted": interrupted(bench)}
    found |= {"lost": lose(bench), "then": distance(bench)}
    mine = len(engine.pids())
    engine.close()
    left = [p.pid for p in psutil.Process().children(recursive=True) if "sglang.host" in " ".join(p.cmdline())]
    processes: list = [None, None]
    dist.all_gather_object(processes, (mine, len(left)))
    leave_layout()
    print(json.dumps(found | {"processes": processes}))

"""One of two ranks, each on a node of its own as far as it knows, whose engine spans both; prints what was found.

Usage: two_nodes_job.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["LOCAL_WORLD_SIZE"] = "1"
os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"  # SGLang would give each rank of an engine a NUMA node of its own

sys.path.append(str(Path(__file__).resolve().parents[1] / "rollout"))

from grpo_mega import platform

HERE = platform.start()
platform.join_processes(HERE)

import psutil  # noqa: E402
import torch.distributed as dist  # noqa: E402
from engine_contract import Bench, sampling  # noqa: E402

from grpo_mega.config.load import compose_config  # noqa: E402
from grpo_mega.data import build_data  # noqa: E402
from grpo_mega.policy.policy import Policy  # noqa: E402
from grpo_mega.policy.topology import join_layout, leave_layout  # noqa: E402
from grpo_mega.rollout.contract import EngineRestarted  # noqa: E402
from grpo_mega.rollout.sglang_engine import SGLangEngine  # noqa: E402

OVERRIDES = ["experiment=tiny_sglang", "base=none", "layout=dp2", "data.validation_size=8", "data.test_size=8"]


def distance(bench: Bench) -> float:
    bench.push_all()
    return bench.distance(bench.samples(sampling()), 1.0)


def restarted(bench: Bench) -> str:
    """What is said when the part of the engine that rank 1 hosts is killed."""
    if dist.get_rank() == 1:
        for pid in bench.engine.pids():
            psutil.Process(pid).kill()
    dist.barrier()
    try:
        bench.samples(sampling(max_new_tokens=90, stop_ids=()))
    except EngineRestarted as error:
        return str(error)
    return "nothing"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "logs").mkdir(exist_ok=True)
    config = compose_config([*OVERRIDES, "rollout.sglang.tp=2", "rollout.sglang.silence_seconds=200"])
    data = build_data(config)
    policy = Policy(config.model, config.layout, data.tokenizer.vocab_size, join_layout(config.layout, 0), HERE)
    policy.initialize(seed=0)
    engine = SGLangEngine(config, data.tokenizer.vocab_size, HERE, data.tokenizer.decode, folder)
    bench = Bench(engine, policy, data.test[:4])
    found = {"first": distance(bench), "lost": restarted(bench), "then": distance(bench)}
    mine = len(engine.pids())
    engine.close()
    left = [p.pid for p in psutil.Process().children(recursive=True) if "sglang_host" in " ".join(p.cmdline())]
    processes: list = [None, None]
    dist.all_gather_object(processes, (mine, len(left)))
    leave_layout()
    print(json.dumps(found | {"processes": processes}))

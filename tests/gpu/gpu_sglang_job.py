"""A real SGLang engine on a GPU: the contract of all engines, SGLang's own checks, and what the driver sees of it.

Prints {check: what went wrong}. Usage: gpu_sglang_job.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS / "rollout"), str(TESTS / "sglang")]

import engine_contract_job  # noqa: E402  (prepares the platform)
import torch  # noqa: E402
from engine_contract import CHECKS, Bench, sampling  # noqa: E402
from on_cuda import CLOSE  # noqa: E402
from sglang_contract_job import OWN  # noqa: E402

from grpo_mega.colocation.colocation import PATIENCE, TOLERANCE  # noqa: E402
from grpo_mega.colocation.ledger import Ledger, meter  # noqa: E402
from grpo_mega.rollout.contract import TAGS  # noqa: E402
from grpo_mega.rollout.sglang.memory import static_bytes  # noqa: E402

DEVICE = engine_contract_job.HERE.device
ROUNDS = 3


def book(bench: Bench) -> Ledger:
    return Ledger(meter(DEVICE, {"trainer": [os.getpid()], "engine": bench.engine.pids()}))


def check_the_engine_takes_what_was_planned_and_leaves_room(bench: Bench) -> None:
    """Weights and cache are within 2 % of the plan, which contexts that were there explain; a bucket has room."""
    bench.samples(sampling())
    sglang = bench.engine._config
    free, capacity = torch.cuda.mem_get_info(DEVICE)
    held = book(bench).mark("generating").held["engine"]
    assert held > 0, "the driver does not list the engine's processes"
    assert held >= static_bytes(sglang, capacity) - 0.02 * capacity
    assert free > sglang.bucket_bytes


def check_the_driver_sees_what_is_released(bench: Bench) -> None:
    """All of weights and cache comes back, each time, and what the engine keeps does not grow."""
    engine, ledger = bench.engine, book(bench)
    due = int(0.95 * static_bytes(engine._config, torch.cuda.mem_get_info(DEVICE)[1]))
    for _ in range(ROUNDS):
        bench.samples(sampling())
        with ledger.release("engine leaves", {"engine": due, "device": due}, TOLERANCE, PATIENCE):
            engine.release(TAGS)
        ledger.at_rest("engine has left", "engine", TOLERANCE, PATIENCE)
        engine.resume(TAGS)
        bench.push_all()
    assert bench.distance(bench.samples(sampling()), 1.0) < CLOSE


def check_pushes_leave_nothing_behind(bench: Bench) -> None:
    """Buckets that the engine has opened are free for the driver, once it has answered."""
    ledger = book(bench)
    bench.push_all()
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    before = ledger.mark("after a push").held["device"]
    for _ in range(ROUNDS):
        bench.push_all()
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    assert ledger.mark("after more").held["device"] - before < 64 * 2**20


HERE = {name.removeprefix("check_"): check for name, check in globals().items() if name.startswith("check_")}

if __name__ == "__main__":
    bench = engine_contract_job.made(Path(sys.argv[1]), "sglang")
    bench.push_all()
    # SGLang's own come last: they end the engine.
    found = {name: engine_contract_job.problem(bench, check) for name, check in {**CHECKS, **HERE, **OWN}.items()}
    bench.engine.close()
    engine_contract_job.leave_layout()
    print(json.dumps(found))

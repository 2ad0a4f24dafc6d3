"""A real SGLang engine that gets its weights over the network or through the disk; prints {check: what went wrong}.

Usage: transport_job.py FOLDER network|disk
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS / "rollout")]

import engine_contract_job  # noqa: E402  (prepares the platform)
import psutil  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from engine_contract import CHECKS, Bench, move, refused, sampling  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from grpo_mega.rollout.contract import EngineRestarted  # noqa: E402
from grpo_mega.rollout.sglang.transport import described  # noqa: E402

OF_ALL = [
    "pushed_weights_are_used",
    "a_push_needs_a_session",
    "wrong_tensors_are_refused_by_name",
    "released_weights_must_be_pushed_again",
]
"""Of the contract's checks those of weights."""
LARGE = 2**26
"""Bytes that no socket keeps for a peer that does not read them."""


def scheduler(bench: Bench) -> psutil.Process:
    """SGLang's process that computes."""
    processes = [psutil.Process(pid) for pid in bench.engine.pids()]
    return next(p for p in processes if "scheduler" in " ".join(p.cmdline()))


def goes_on(bench: Bench) -> None:
    """The engine that was started anew gets the weights."""
    refused(lambda: bench.samples(sampling()), "push")
    bench.push_all()
    bench.check_log_probs(bench.samples(sampling()))


def check_it_computes_with_what_is_sent(bench: Bench) -> None:
    sync = bench.weight_sync()
    for _ in range(2):
        move(bench.policy)
        bench.version += 1
        sync.send(bench.version)
        sync.verify(sync.expected())
        bench.check_log_probs(bench.samples(sampling()))
    expected = sync.expected()
    move(bench.policy)
    sync.send(bench.version)
    refused(lambda: sync.verify(expected), "differ from the trainer's by")


def check_an_engine_that_dies_in_an_update_gets_the_weights_again(bench: Bench) -> None:
    first, *others = bench.buckets()
    bench.engine.begin_update()
    bench.engine.push(first)
    scheduler(bench).send_signal(signal.SIGKILL)
    with pytest.raises(EngineRestarted, match=r"engine of rank 0 died"):
        end(bench, others)
    goes_on(bench)


def end(bench: Bench, buckets: list) -> None:
    """The rest of an update."""
    for bucket in buckets:
        bench.engine.push(bucket)
    bench.engine.end_update(bench.version)


class Networks:
    """Checks of this transport alone."""

    @staticmethod
    def check_an_engine_that_does_not_take_what_is_sent_is_lost(bench: Bench) -> None:
        engine = bench.engine
        engine.begin_update()
        engine._config.answer_seconds, before = 2.0, engine._config.answer_seconds
        scheduler(bench).send_signal(signal.SIGSTOP)
        bucket = [("model.norm.weight", torch.zeros(LARGE, dtype=torch.uint8))]
        with pytest.raises(EngineRestarted, match="did not answer receive within 2 s"):
            engine._engines.on_owners(lambda: engine._transport.push(bucket, [described(bucket)]))
        engine._config.answer_seconds = before
        goes_on(bench)


class Directories:
    """Checks of this transport alone."""

    @staticmethod
    def check_the_newest_directory_is_whole_and_the_only_one(bench: Bench) -> None:
        folder = bench.engine._engines._path / "engine-weights"
        for _ in range(2):
            move(bench.policy)
            bench.push_all()
            (newest,) = folder.iterdir()
            stored = {name: t for file in newest.glob("*.safetensors") for name, t in load_file(file).items()}
            pushed = {name: tensor for bucket in bench.buckets() for name, tensor in bucket}
            assert stored.keys() == pushed.keys()
            assert all(torch.equal(stored[name], tensor) for name, tensor in pushed.items())
            assert json.loads((newest / "config.json").read_text())["model_type"] == "qwen3_moe"

    @staticmethod
    def check_a_folder_that_cannot_be_written_is_named(bench: Bench) -> None:
        """The last one: a run ends here."""
        folder = bench.engine._engines._path / "engine-weights"
        bench.engine.begin_update()
        folder.rename(folder.with_name("elsewhere"))
        refused(lambda: [bench.engine.push(b) for b in bench.buckets()], "cannot be written", "engine-weights")


def of(holder: object) -> dict:
    return {name.removeprefix("check_"): getattr(holder, name) for name in dir(holder) if name.startswith("check_")}


OWN = {"network": of(Networks), "disk": dict(sorted(of(Directories).items(), reverse=True))}

if __name__ == "__main__":
    folder, transport = sys.argv[1:]
    bench = engine_contract_job.made(Path(folder), "sglang", f"rollout.sglang.transport={transport}")
    bench.push_all()
    checks = {name: CHECKS[name] for name in OF_ALL} | of(sys.modules[__name__]) | OWN[transport]
    found = {name: engine_contract_job.problem(bench, check) for name, check in checks.items()}
    bench.engine.close()
    engine_contract_job.leave_layout()
    print(json.dumps(found))

"""One of the ranks of an embedded engine, which goes through `engine_contract.py`; prints {check: what went wrong}.

Usage: engine_contract_job.py FOLDER OVERRIDE...
"""

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from grpo_mega import platform

HERE = platform.start()
platform.join_processes(HERE)

import pytest  # noqa: E402
import torch.distributed as dist  # noqa: E402
from engine_contract import CHECKS, Bench, refused  # noqa: E402
from on_cuda import TINY  # noqa: E402

from grpo_mega.config.load import compose_config  # noqa: E402
from grpo_mega.data import build_data  # noqa: E402
from grpo_mega.models.policy import Policy  # noqa: E402
from grpo_mega.models.topology import join_layout, leave_layout  # noqa: E402
from grpo_mega.rollout.embedded import EmbeddedEngine  # noqa: E402
from grpo_mega.rollout.sglang.engine import SGLangEngine  # noqa: E402
from grpo_mega.rollout.sglang.lifecycle import Engines  # noqa: E402

MODEL = ["experiment=tiny_sglang", "base=none", "layout=single", "data.validation_size=8", "data.test_size=8"]
MEMORY_SAVER = "+rollout.sglang.arguments.enable_memory_saver=true"


def made(folder: Path, kind: str, *overrides: str) -> Bench:
    config = compose_config(
        [
            *MODEL,
            *TINY,
            f"rollout.engine={kind}",
            *([MEMORY_SAVER, "rollout.sglang.routing_replay=true"] if kind == "sglang" else []),
            *overrides,
        ]
    )
    data = build_data(config)
    decode, vocab_size = data.tokenizer.decode, data.tokenizer.vocab_size
    policy = Policy(config.model, config.layout, vocab_size, join_layout(config.layout, 0), HERE)
    policy.initialize(seed=0)
    if kind == "sglang":
        (folder / "logs").mkdir()
        engines = Engines(config.model, config.rollout, config.run.seed, vocab_size, HERE, folder)
        return Bench(SGLangEngine(engines, decode), policy, data.test[:4])
    # It is asked after every 16 tokens, and makes what is much in several waves.
    return Bench(EmbeddedEngine(policy, decode, concurrent_sequences=24), policy, data.test[:4], long=40, much=5)


def problem(bench: Bench, check: Callable[[Bench], None]) -> str:
    """What a check finds wrong on any rank; nothing, if all is well."""
    wrong = ""
    try:
        check(bench)
    except (Exception, pytest.fail.Exception):  # the other ranks go on as well
        wrong = traceback.format_exc()
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, wrong)
    return "".join(gathered)


def check_a_stale_expert_is_refused(bench: Bench) -> None:
    """An expert with other weights than this rank trains is named; the last check, for its session stays open."""
    bench.engine.begin_update()
    mine = f".experts.{bench.policy.architecture.moe.experts // dist.get_world_size() * dist.get_rank()}."
    bucket, name = next((b, name) for b in bench.buckets() for name, _ in b if mine in name)
    refused(lambda: bench.engine.push([(n, 0 * t if n == name else t) for n, t in bucket]), name, "stale")


if __name__ == "__main__":
    bench = made(Path(sys.argv[1]), "embedded", *sys.argv[2:])
    bench.push_all()
    outcome = {name: problem(bench, check) for name, check in CHECKS.items()}
    outcome["stale expert"] = problem(bench, check_a_stale_expert_is_refused)
    bench.engine.close()
    leave_layout()
    print(json.dumps(outcome))

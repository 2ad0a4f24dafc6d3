"""One rank that makes an engine and puts it through `engine_contract.py`; prints {check: what went wrong} as JSON.

Usage: engine_contract_job.py FOLDER embedded|sglang
"""

import json
import sys
import traceback
from pathlib import Path

from grpo_mega import platform

HERE = platform.start()
platform.join_processes(HERE)

from engine_contract import CHECKS, Bench  # noqa: E402

from grpo_mega.config.load import compose_config  # noqa: E402
from grpo_mega.data import build_data  # noqa: E402
from grpo_mega.policy.policy import Policy  # noqa: E402
from grpo_mega.policy.topology import join_layout, leave_layout  # noqa: E402
from grpo_mega.rollout.embedded import EmbeddedEngine  # noqa: E402
from grpo_mega.rollout.engine import Engine  # noqa: E402
from grpo_mega.rollout.sglang_engine import SGLangEngine  # noqa: E402

MODEL = [
    "experiment=tiny",
    "base=none",
    "layout=single",
    "model.qk_norm=true",
    "model.head_dim=16",
    "model.moe.score=softmax",
    "model.moe.bias_update_rate=0",
    "model.moe.shared_ffn_hidden=0",
    "data.validation_size=8",
    "data.test_size=8",
]
"""experiment=tiny with a Qwen3-MoE."""
MEMORY_SAVER = "+rollout.sglang.arguments.enable_memory_saver=true"


def made(folder: Path, kind: str) -> Bench:
    config = compose_config([*MODEL, f"rollout.engine={kind}", *([MEMORY_SAVER] if kind == "sglang" else [])])
    data = build_data(config)
    decode, vocab_size = data.tokenizer.decode, data.tokenizer.vocab_size
    policy = Policy(config.model, config.layout, vocab_size, join_layout(config.layout, 0), HERE)
    policy.initialize(seed=0)
    engine: Engine = EmbeddedEngine(policy, decode, 512)
    if kind == "sglang":
        (folder / "logs").mkdir()
        engine = SGLangEngine(config, vocab_size, HERE, decode, folder)
    return Bench(engine, policy, data.test[:4])


def problem(bench: Bench, name: str) -> str:
    try:
        CHECKS[name](bench)
    except Exception:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    bench = made(Path(sys.argv[1]), sys.argv[2])
    bench.push_all()
    found = {name: problem(bench, name) for name in CHECKS}
    bench.engine.close()
    leave_layout()
    print(json.dumps(found))

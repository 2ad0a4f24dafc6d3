"""Real Megatron work, on one or two ranks, with some substitutions of grpo_mega/platform/cpu.py left out.

Usage: megatron_work.py "" WORK...         with all substitutions
       megatron_work.py NAME WORK...       without this one
WORK is a function below. Each rank prints as JSON what came of it: {"WORK": result}, or {"WORK": {"error": message,
"at": line of Megatron}}.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from typing import Any

import torch
from torch_contents import contents

from grpo_mega.config.schema import LayoutConfig, ModelConfig, MoEConfig, OptimizerConfig
from grpo_mega.platform import Platform, cpu, join_processes
from grpo_mega.types import pack_tokens

PLATFORM = Platform(torch.device("cpu"), "gloo", transformer_engine=False)
VOCABULARY = 16


def train(**options: Any) -> dict[str, float]:
    """One update of a mixture of experts with balancing bias and a shared expert."""
    from grpo_mega.algorithm.objective import negative_log_likelihood
    from grpo_mega.models.policy import Policy
    from grpo_mega.models.topology import join_layout

    layout = options.pop("layout", LayoutConfig())
    topology = join_layout(layout, seed=1)
    moe = MoEConfig(experts=4, ffn_hidden=16, shared_ffn_hidden=16)
    model = ModelConfig(
        layers=2, hidden=32, heads=4, kv_heads=4, ffn_hidden=32, context=8, init_std=0.1, moe=moe, **options
    )
    policy = Policy(model, layout, VOCABULARY, topology, PLATFORM)
    policy.initialize(seed=1)
    policy.use_optimizer(OptimizerConfig(lr=1e-2))
    sequences = [[(3 * i + t) % VOCABULARY for t in range(4 + i)] for i in range(4)]
    batch = pack_tokens(sequences, [1] * len(sequences))
    batch = policy.share(batch.with_(weight=batch.mask / batch.mask.sum()))
    found = policy.update(batch, negative_log_likelihood, lr=1e-2)
    return {name: round(found.metrics[name], 4) for name in ("loss", "grad_norm")}


def train_bf16() -> dict[str, float]:
    """The same in bf16, with float32 master weights."""
    return train(dtype="bf16")


def train_latent_attention() -> dict[str, float]:
    """The same with multi-head latent attention."""
    return train(attention="mla")


def train_expert_parallel() -> dict[str, float]:
    """The same with the experts spread over two ranks."""
    return train(layout=LayoutConfig(ep=2))


def train_tied_pipeline() -> dict[str, float]:
    """The same in two pipeline stages that share the embedding."""
    return train(layout=LayoutConfig(pp=2), tie_embeddings=True)


def random_streams() -> dict[str, list]:
    """What a tensor parallel rank draws inside its tracked stream and outside of it, by turns, twice."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from grpo_mega.models.topology import join_layout

    join_layout(LayoutConfig(tp=2), seed=1)
    inside, outside = [], []
    for _ in range(2):
        with get_cuda_rng_tracker().fork():
            inside.append(torch.rand(4).tolist())
        outside.append(torch.rand(4).tolist())
    with contextlib.suppress(ZeroDivisionError), get_cuda_rng_tracker().fork():
        raise ZeroDivisionError
    return {"inside": inside, "outside": outside, "after_error": torch.rand(4).tolist()}


def install_again() -> dict[str, Any]:
    """Whether a second install() says it did anything, and what it replaced."""
    before = contents()
    installed = cpu.install()
    return {"installed": installed, "replaced": [name for name, what in contents().items() if before.get(name) != what]}


def compiled_frames() -> int:
    """How many functions torch.compile has looked at in this process."""
    return sum(torch._dynamo.utils.counters["frames"].values())


def failure(error: Exception) -> dict[str, str]:
    """The error, and the innermost line of Megatron that it went through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "megatron/core" in f.filename]
    return {"error": f"{type(error).__name__}: {error}", "at": (frames[-1].line or "") if frames else ""}


def main(left_out: str, works: list[str]) -> None:
    """Does the works one after the other, each with process groups of its own."""
    cpu.install(without={left_out})
    torch.use_deterministic_algorithms(True)
    from megatron.core import parallel_state

    join_processes(PLATFORM)
    done: dict[str, Any] = {}
    for work in works:
        try:
            done[work] = globals()[work]()
        except Exception as error:
            done[work] = failure(error)
        parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    print(json.dumps(done))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

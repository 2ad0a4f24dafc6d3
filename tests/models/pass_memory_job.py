"""Bytes of tensors that a pass over few and over many micro-batches holds at its worst, under a layout of two ranks.

Usage: pass_memory_job.py LAYOUT... ; rank 0 prints {layout: {pass: {number of micro-batches: bytes}}} as JSON. Started
by run_ranks.
"""

import json
import sys

import torch
from live_bytes import LiveBytes

from grpo_mega import platform

HERE = platform.start()
platform.join_processes(HERE)

from megatron.core import parallel_state  # noqa: E402

from grpo_mega.algorithm.objective import negative_log_likelihood  # noqa: E402
from grpo_mega.config.schema import LayoutConfig, ModelConfig, OptimizerConfig  # noqa: E402
from grpo_mega.models.policy import Policy  # noqa: E402
from grpo_mega.models.reference import ReferencePolicy  # noqa: E402
from grpo_mega.models.topology import join_layout  # noqa: E402
from grpo_mega.types import Batch, pack_tokens  # noqa: E402

TOKENS, VOCABULARY = 512, 21
MODEL = ModelConfig(layers=2, hidden=16, heads=2, kv_heads=1, ffn_hidden=16, context=TOKENS, init_std=0.2)
LAYOUTS = {
    "cp2": LayoutConfig(cp=2, micro_batch_tokens=TOKENS),
    "cp2recompute": LayoutConfig(cp=2, recompute="full", micro_batch_tokens=TOKENS),
    "pp2": LayoutConfig(pp=2, micro_batch_tokens=TOKENS),
    "vpp2": LayoutConfig(pp=2, vpp=2, micro_batch_tokens=TOKENS),
}
COUNTS = (8, 24)


def batch(sequences: int) -> Batch:
    """Each as long as a micro-batch may be."""
    random = torch.Generator().manual_seed(5)
    tokens = torch.randint(VOCABULARY, (sequences, TOKENS), generator=random)
    packed = pack_tokens(tokens.tolist(), [TOKENS // 2] * sequences)
    return packed.with_(weight=packed.mask / packed.mask.sum())


def held(layout: LayoutConfig) -> dict[str, dict[int, int]]:
    topology = join_layout(layout, seed=0)
    layers = 2 * layout.pp * layout.vpp
    policy = Policy(ModelConfig(**(vars(MODEL) | {"layers": layers})), layout, VOCABULARY, topology, HERE)
    policy.initialize(seed=0)
    policy.use_optimizer(OptimizerConfig(lr=0.01))
    reference = ReferencePolicy(policy)
    passes = {
        "policy": lambda batch: policy.logprobs(batch, 1.0),
        "reference": lambda batch: reference.logprobs(batch, 1.0),
        "update": lambda batch: policy.update(batch, negative_log_likelihood, lr=0.01),
    }
    outcome: dict[str, dict[int, int]] = {name: {} for name in passes}
    for name, run in passes.items():
        for whole in map(batch, COUNTS):
            with LiveBytes() as inside:
                run(whole)
            outcome[name][len(whole.lengths)] = inside.most
    parallel_state.destroy_model_parallel()
    return outcome


if __name__ == "__main__":
    outcome = {name: held(LAYOUTS[name]) for name in sys.argv[1:]}
    if torch.distributed.get_rank() == 0:
        print(json.dumps(outcome))
    torch.distributed.destroy_process_group()

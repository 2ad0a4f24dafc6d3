"""Updates with a gradient that is broken on one rank, under several layouts of two ranks.

Usage: finite_job.py CASE... ; every rank prints its outcome as JSON. Started by run_ranks.
"""

import json
import sys
from dataclasses import replace

import torch

from grpo_mega import platform

HERE = platform.start()
platform.join_processes(HERE)

from megatron.core import parallel_state  # noqa: E402

from grpo_mega.algorithm.objective import negative_log_likelihood  # noqa: E402
from grpo_mega.config.schema import LayoutConfig, ModelConfig, MoEConfig, OptimizerConfig  # noqa: E402
from grpo_mega.models.policy import Policy  # noqa: E402
from grpo_mega.models.topology import join_layout  # noqa: E402
from grpo_mega.types import pack_tokens  # noqa: E402

VOCABULARY = 21
DENSE = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn_hidden=48, context=24, init_std=0.2)
MOE = replace(DENSE, moe=MoEConfig(experts=4, ffn_hidden=16))
MTP = replace(DENSE, mtp_layers=1, mtp_loss_coef=0.1)
ONE, TP, PP = (
    LayoutConfig(micro_batch_tokens=40),
    LayoutConfig(tp=2, sp=True),
    LayoutConfig(pp=2, micro_batch_tokens=40),
)
EP, CP = LayoutConfig(ep=2, micro_batch_tokens=40), LayoutConfig(cp=2, micro_batch_tokens=40)
CASES = {  # model, layout, distributed optimizer, overlap, what its gradient is multiplied with, part of the parameter
    "dp2": (DENSE, ONE, False, False, float("nan"), "linear_proj.weight"),
    "dp2zero": (DENSE, ONE, True, False, float("nan"), "linear_proj.weight"),
    "dp2overlap": (DENSE, ONE, True, True, float("inf"), "linear_proj.weight"),
    "tp2": (DENSE, TP, False, False, float("nan"), "linear_qkv.weight"),
    "pp2": (DENSE, PP, False, False, float("nan"), "linear_fc2.weight"),
    "ep2zero": (MOE, EP, True, True, float("-inf"), "experts.local_experts.1.linear_fc1.weight"),
    "cp2": (DENSE, CP, False, False, float("nan"), "embedding.word_embeddings.weight"),
    "predictor": (MTP, ONE, False, False, float("nan"), "mtp.layers.0.eh_proj.weight"),
    "overflow": (DENSE, ONE, False, False, 1e30, "linear_proj.weight"),
}


def state(policy: Policy) -> list[torch.Tensor]:
    """Copies of weights and of everything that the optimizer keeps."""
    kept = [p.detach().clone() for p in policy.chunks.parameters()]
    for part in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
        for values in part.optimizer.state.values():
            kept += [x.clone() for x in values.values() if torch.is_tensor(x)]
    return kept


def tried(case: str) -> dict:
    model, layout, distributed, overlap, factor, where = CASES[case]
    buffers = OptimizerConfig(distributed=distributed, overlap=overlap)
    policy = Policy(model, layout, VOCABULARY, join_layout(layout, seed=0), HERE, buffers)
    policy.initialize(seed=0)
    policy.use_optimizer(OptimizerConfig(lr=0.01))
    sequences = [[(3 * i + t) % VOCABULARY for t in range(9 + i)] for i in range(8)]
    batch = pack_tokens(sequences, [1] * len(sequences))
    batch = policy.share(batch.with_(weight=batch.mask / batch.mask.sum()))
    update = lambda: policy.update(batch, negative_log_likelihood, lr=0.01)  # noqa: E731
    update()
    policy.gather_parameters()
    name, parameter = next((n, p) for n, p in policy.chunks.named_parameters() if where in n)
    planted = parameter.register_hook(lambda gradient: gradient * factor) if torch.distributed.get_rank() == 1 else None
    before = state(policy)
    try:
        update()
        message = "accepted"
    except FloatingPointError as error:
        message = str(error)
    policy.gather_parameters()
    changed = sum(not torch.equal(a, b) for a, b in zip(before, state(policy), strict=True))
    if planted:
        planted.remove()
    after = update().metrics["grad_norm"]
    policy.gather_parameters()
    moved = sum(not torch.equal(a, b) for a, b in zip(before, state(policy), strict=True))
    parallel_state.destroy_model_parallel()
    return {"message": message, "name": name, "changed": changed, "after": after, "moved": moved, "kept": len(before)}


if __name__ == "__main__":
    print(json.dumps({case: tried(case) for case in sys.argv[1:]}))
    torch.distributed.destroy_process_group()

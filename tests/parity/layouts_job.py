"""One GRPO step's samples, loss and whole gradients under several layouts, in one process group; started by run_ranks.

Usage: layouts_job.py OUT MODEL:LAYOUT... ; rank 0 writes OUT/MODEL:LAYOUT.pt for each.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from grpo_mega import platform

HERE = platform.start()
platform.join_processes(HERE)

from megatron.core import parallel_state  # noqa: E402

from grpo_mega.algorithm.weights import token_weights  # noqa: E402
from grpo_mega.config.schema import (  # noqa: E402
    AlgorithmConfig,
    LayoutConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    YarnConfig,
)
from grpo_mega.policy.losses import grpo_loss  # noqa: E402
from grpo_mega.policy.policy import Policy  # noqa: E402
from grpo_mega.policy.topology import join_layout  # noqa: E402
from grpo_mega.rollout.embedded import EmbeddedEngine  # noqa: E402
from grpo_mega.rollout.engine import SamplingParams  # noqa: E402
from grpo_mega.types import Prompt, Sample, pack  # noqa: E402

DENSE = ModelConfig(layers=2, hidden=64, heads=4, kv_heads=2, ffn_hidden=128, context=64, init_std=0.1)
MOE = replace(DENSE, moe=MoEConfig(experts=4, top_k=2, ffn_hidden=32, shared_ffn_hidden=32, first_dense=1))
MLA = MLAConfig(16, 16, 8, 8, 8)
MODELS = {
    "dense": DENSE,
    "tied": replace(DENSE, tie_embeddings=True, qk_norm=True),
    "moe": MOE,
    "mla": replace(
        MOE,
        attention="mla",
        kv_heads=4,
        mla=MLA,
        yarn=YarnConfig(factor=4, original_context=16, beta_fast=2, beta_slow=0.1),
    ),
    "padded": replace(
        MOE,
        attention="mla",
        kv_heads=4,
        mla=replace(MLA, q_lora_rank=None),
        vocab_multiple=64,
        moe=replace(MOE.moe, bias_update_rate=0.0, frozen_bias=True),
    ),
    "deepseek": replace(
        MOE, layers=4, attention="mla", kv_heads=4, mla=MLA, moe=replace(MOE.moe, groups=2, group_top_k=1)
    ),
    "mtp": replace(
        MOE,
        layers=4,
        attention="mla",
        kv_heads=4,
        mla=MLA,
        mtp_layers=1,
        mtp_loss_coef=0.1,
        moe=replace(MOE.moe, groups=2, group_top_k=1, aux_loss_coef=0.1),
    ),
    "replayed": replace(MOE, layers=4, mtp_layers=1, mtp_loss_coef=0.1, moe=replace(MOE.moe, aux_loss_coef=0.1)),
    "dense_mtp2": replace(DENSE, mtp_layers=2, mtp_loss_coef=0.5),
    "balanced": replace(MOE, moe=replace(MOE.moe, aux_loss_coef=0.5, z_loss_coef=0.05)),
    "dense_gspo": DENSE,
    "dense_cispo": DENSE,
    "dense_bf16": replace(DENSE, dtype="bf16"),
    "deepseek_bf16": replace(
        MOE, layers=4, attention="mla", kv_heads=4, mla=MLA, moe=replace(MOE.moe, groups=2, group_top_k=1), dtype="bf16"
    ),
}
LAYOUTS = {
    "single": LayoutConfig(),
    "small": LayoutConfig(micro_batch_tokens=70),
    "tp2": LayoutConfig(tp=2),
    "tp2sp": LayoutConfig(tp=2, sp=True),
    "tp4sp": LayoutConfig(tp=4, sp=True),
    "tp2etp2": LayoutConfig(tp=2, sp=True, etp=2),
    "pp2": LayoutConfig(pp=2),
    "pp2small": LayoutConfig(pp=2, micro_batch_tokens=70),
    "vpp2": LayoutConfig(pp=2, vpp=2, micro_batch_tokens=150),
    "pp2uneven": LayoutConfig(pp=2, last_stage_layers=1),
    "tp2vpp2": LayoutConfig(tp=2, pp=2, vpp=2, sp=True),
    "cp2": LayoutConfig(cp=2),
    "cp2small": LayoutConfig(cp=2, micro_batch_tokens=70),
    "cp2one": LayoutConfig(cp=2, micro_batch_tokens=1),
    "vpp2recompute": LayoutConfig(pp=2, vpp=2, recompute="full", micro_batch_tokens=100),
    "cp2tp2": LayoutConfig(cp=2, tp=2, sp=True),
    "cp2pp2": LayoutConfig(cp=2, pp=2),
    "cp2ep2": LayoutConfig(cp=2, ep=2),
    "cp2dp2": LayoutConfig(cp=2),
    "cp4": LayoutConfig(cp=4),
    "dp2zero": LayoutConfig(micro_batch_tokens=100),
    "ep2zero": LayoutConfig(ep=2, micro_batch_tokens=100),
    "tp2dp2zero": LayoutConfig(tp=2, sp=True, micro_batch_tokens=100),
    "vpp2zero": LayoutConfig(pp=2, vpp=2, micro_batch_tokens=100),
    "pp2dp2zero": LayoutConfig(pp=2, micro_batch_tokens=100),
    "cp2zero": LayoutConfig(cp=2),
    "recompute": LayoutConfig(recompute="full", micro_batch_tokens=100),
    "selective": LayoutConfig(recompute="selective"),
    "tp2recompute": LayoutConfig(tp=2, sp=True, recompute="full"),
    "ep2": LayoutConfig(ep=2),
    "dp2": LayoutConfig(micro_batch_tokens=100),
    "tp2ep2": LayoutConfig(tp=2, sp=True, ep=2),
    "tp2pp2": LayoutConfig(tp=2, pp=2, sp=True),
    "tp2dp2": LayoutConfig(tp=2, sp=True),
    "ep2pp2": LayoutConfig(ep=2, pp=2),
    "tp2ep4": LayoutConfig(tp=2, sp=True, ep=4),
    "ep2dp4": LayoutConfig(ep=2),
}
# A large epsilon keeps Adam's first steps smooth: with a small one they hang on the sign of gradients near 0.
OPTIMIZER = OptimizerConfig(lr=0.01, eps=0.01, weight_decay=0.1, clip_grad=0.5)
OPTIMIZERS = {
    "dp2zero": replace(OPTIMIZER, distributed=True),
    "ep2zero": replace(OPTIMIZER, distributed=True, overlap=True),
    "tp2dp2zero": replace(OPTIMIZER, distributed=True, overlap=True),
    "vpp2zero": replace(OPTIMIZER, distributed=True, overlap=True),
    "pp2dp2zero": replace(OPTIMIZER, distributed=True, overlap=True),
    "cp2zero": replace(OPTIMIZER, distributed=True, overlap=True),
}
OBJECTIVE = AlgorithmConfig(clip_low=0.2, clip_high=0.28, dual_clip=3.0, kl_coef=0.1)
OBJECTIVES = {
    "dense_gspo": AlgorithmConfig(objective="gspo", clip_low=0.01, clip_high=0.02, entropy_coef=0.1),
    "dense_cispo": AlgorithmConfig(objective="cispo", kl_coef=0.1, correction="mask", correction_cap=1.1),
}
VOCAB = 26
SAMPLING = SamplingParams(max_new_tokens=24, stop_ids=(2,), temperature=1.2, top_p=0.95, top_k=20, seed=5)


class SmallBuckets(Policy):
    """Megatron's own buckets would hold any of these models."""

    bucket_size = 10_000


def prompts() -> list[Prompt]:
    """Eleven prompts of different lengths: no layout divides them evenly."""
    generator = torch.Generator().manual_seed(0)
    lengths = [3 + i % 5 for i in range(11)]
    ids = [tuple(torch.randint(3, VOCAB, (n,), generator=generator).tolist()) for n in lengths]
    return [Prompt(f"p{i}", tokens, "", "", "") for i, tokens in enumerate(ids)]


def one_step(
    model: ModelConfig, layout: LayoutConfig, optimizer: OptimizerConfig, objective: AlgorithmConfig, replay: bool
) -> dict:
    """Samples, log-probs, loss and gradients of one step from seeded weights, and what two updates change."""
    topology = join_layout(layout, seed=0)
    policy = SmallBuckets(model, layout, VOCAB, topology, HERE, optimizer.distributed, optimizer.overlap)
    policy.initialize(seed=3)
    engine = EmbeddedEngine(policy, str, concurrent_sequences=16)
    samples = engine.generate(prompts(), 3, SAMPLING, version=7)
    trained = made_up(samples) if model.dtype == "bf16" else samples
    if replay:
        trained = routed_at_random(trained, model)
    batch = pack(trained)
    if trained is not samples:
        batch = batch.with_(rollout_logprob=policy.logprobs(batch, SAMPLING.temperature))
    advantage = torch.linspace(-1.5, 1.5, len(samples)).repeat_interleave(batch.lengths)
    weight = token_weights(batch.mask, batch.cu_seqlens, "sequence_mean", 1)
    # The old and reference policies are made up, but the same everywhere: ratios clip and the KL term has a gradient.
    shift = torch.sin(torch.arange(len(batch.tokens)))
    batch = batch.with_(
        advantage=advantage,
        weight=weight,
        old_logprob=batch.rollout_logprob + 0.3 * shift,
        ref_logprob=batch.rollout_logprob - 0.2 * shift,
    )
    loss = grpo_loss(objective, on_policy=False)
    scored = policy.logprobs(batch, SAMPLING.temperature)
    found = policy.gradients(batch, loss, SAMPLING.temperature)
    result = {
        "tokens": [s.token_ids for s in samples],
        "rollout_logprob": batch.rollout_logprob,
        "logprob": scored,
        "sequence_tokens": len(batch.tokens),
        "metrics": found.metrics,
        "gradients": policy.whole_gradients(),
        "parameters": policy.parameters(),
        "expert_loads": found.expert_loads,
    }
    before = policy.whole_weights()
    policy.use_optimizer(optimizer)
    updates = [policy.update(batch, loss, optimizer.lr, SAMPLING.temperature) for _ in range(2)]
    result["grad_norms"] = [update.metrics["grad_norm"] for update in updates]
    after = engine.generate(prompts()[:4], 1, SAMPLING, version=8)  # before anything else looks at the new weights
    result["after"] = {s.token_ids: s.logprobs for s in after}
    result["updates"] = {key: whole - before[key] for key, whole in policy.whole_weights().items()}
    parallel_state.destroy_model_parallel()
    return result


def made_up(samples: list[Sample]) -> list[Sample]:
    """As many samples whose tokens no policy drew: in bf16 a layout's rounding may change what is drawn."""
    generator = torch.Generator().manual_seed(1)
    lengths = [1 + i % SAMPLING.max_new_tokens for i in range(len(samples))]
    drawn = [tuple(torch.randint(3, VOCAB, (n,), generator=generator).tolist()) for n in lengths]
    return [replace(s, token_ids=t, logprobs=(-3.0,) * len(t)) for s, t in zip(samples, drawn, strict=True)]


def routed_at_random(samples: list[Sample], model: ModelConfig) -> list[Sample]:
    """The samples as an engine could have routed them; each sample of a prompt brings other experts."""
    moe, generator = model.moe, torch.Generator().manual_seed(2)
    shape = (model.layers - moe.first_dense, moe.experts)
    drawn = [torch.rand(len(s.prompt.token_ids + s.token_ids) - 1, *shape, generator=generator) for s in samples]
    chosen = [x.argsort(-1)[..., : moe.top_k].to(torch.int16) for x in drawn]
    return [replace(s, experts=experts) for s, experts in zip(samples, chosen, strict=True)]


if __name__ == "__main__":
    out = Path(sys.argv[1])
    for name in sys.argv[2:]:
        model, layout = name.split(":")
        optimizer, objective = OPTIMIZERS.get(layout, OPTIMIZER), OBJECTIVES.get(model, OBJECTIVE)
        step = one_step(MODELS[model], LAYOUTS[layout], optimizer, objective, replay=model == "replayed")
        if torch.distributed.get_rank() == 0:
            torch.save(step, out / f"{name}.pt")
    torch.distributed.destroy_process_group()

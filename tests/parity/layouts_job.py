"""One GRPO step's samples, loss and whole gradients under several layouts, in one process group; started by run_ranks.

Usage: layouts_job.py OUT [MUTATION@]MODEL:LAYOUT... ; rank 0 writes OUT/[MUTATION@]MODEL:LAYOUT.pt for each. A mutation
is a bug of mutations.py, there for its case only.
"""

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mutations import MUTATIONS
from parity_cases import LAYOUTS, LONG, MODELS, OBJECTIVE, OBJECTIVES, optimizer

from grpo_mega import platform

HERE = platform.start()
platform.join_processes(HERE)

from megatron.core import parallel_state  # noqa: E402

from grpo_mega.algorithm.weights import token_weights  # noqa: E402
from grpo_mega.config.schema import ModelConfig  # noqa: E402
from grpo_mega.models.losses import Loss, grpo_loss  # noqa: E402
from grpo_mega.models.megatron.router import PackedRouter  # noqa: E402
from grpo_mega.models.policy import Gradients, Policy  # noqa: E402
from grpo_mega.models.topology import join_layout  # noqa: E402
from grpo_mega.rollout.embedded import EmbeddedEngine  # noqa: E402
from grpo_mega.rollout.engine import SamplingParams  # noqa: E402
from grpo_mega.types import Batch, Prompt, Sample, pack  # noqa: E402

VOCAB = 26
SAMPLES = 3
"""Of every prompt."""
TEMPERATURE = 1.2
SAMPLING = SamplingParams(max_new_tokens=24, stop_ids=(2,), temperature=TEMPERATURE, top_p=0.95, top_k=20, seed=5)
SMALL_BUCKETS = 10_000
"""Megatron's own buckets would hold any of these models."""


def one_step(model_name: str, layout_name: str) -> dict:
    """Samples, log-probs, loss and gradients of one step from seeded weights, and what two updates change."""
    model, layout, adam = MODELS[model_name], LAYOUTS[layout_name], optimizer(layout_name)
    topology = join_layout(layout, seed=0)
    policy = Policy(model, layout, VOCAB, topology, HERE, adam.distributed, adam.overlap, SMALL_BUCKETS)
    policy.initialize(seed=3)
    long = layout_name == "single" or f"{model_name}:{layout_name}" in LONG
    engine = EmbeddedEngine(policy, str, concurrent_sequences=16 if long else 64)
    result = {"parameters": policy.parameters()}
    if model.dtype == "fp32":  # in bf16 a layout's rounding may change what is drawn
        result |= sampled(engine, policy, replace(SAMPLING, max_new_tokens=24 if long else 8))
    batch = made_up_batch(model, replayed=model_name == "replayed")
    loss = grpo_loss(OBJECTIVES.get(model_name, OBJECTIVE), on_policy=False)
    scored = policy.logprobs(batch, TEMPERATURE)
    found = policy.gradients(batch, loss, TEMPERATURE)
    result |= {
        "scored": scored,
        "trained": found.logprob,
        "tokens": len(batch.tokens),
        "metrics": found.metrics,
        "expert_loads": found.expert_loads,
        "gradients": policy.whole_gradients(),
    }
    before = policy.whole_weights()
    policy.use_optimizer(adam)
    updates = [update(policy, batch, loss, adam.lr) for _ in range(2)]
    result["grad_norms"] = [found.metrics["grad_norm"] for found, _ in updates]
    result["bias_off"] = max(off for _, off in updates)
    if model.dtype == "fp32":  # before anything else looks at the new weights
        after = engine.generate(prompts()[:4], 1, replace(SAMPLING, max_new_tokens=4), version=8)
        result["after"] = {s.token_ids: s.logprobs for s in after}
    result["updates"] = {key: whole - before[key] for key, whole in policy.whole_weights().items()}
    return result


def leave_groups() -> None:
    """Ends all process groups but the one of all ranks: the threads of hundreds of them would take their time."""
    torch.distributed.barrier()
    parallel_state.destroy_model_parallel()
    for group in [*torch.distributed.distributed_c10d._world.pg_map]:
        if group is not torch.distributed.group.WORLD:
            torch.distributed.destroy_process_group(group)


def prompts() -> list[Prompt]:
    """Eleven prompts of different lengths: no layout divides them evenly."""
    generator = torch.Generator().manual_seed(0)
    lengths = [3 + i % 5 for i in range(11)]
    ids = [tuple(torch.randint(3, VOCAB, (n,), generator=generator).tolist()) for n in lengths]
    return [Prompt(f"p{i}", tokens, "", "", "") for i, tokens in enumerate(ids)]


def sampled(engine: EmbeddedEngine, policy: Policy, sampling: SamplingParams) -> dict:
    """What the engine draws, its log-probs and the trainer's."""
    samples = engine.generate(prompts(), SAMPLES, sampling, version=7)
    batch = pack(samples)
    return {
        "samples": [s.token_ids for s in samples],
        "longest": sampling.max_new_tokens,
        "rollout_logprob": batch.rollout_logprob,
        "logprob": policy.logprobs(batch, sampling.temperature),
    }


def made_up_batch(model: ModelConfig, replayed: bool) -> Batch:
    """Groups of random completions of 3 to 24 tokens, with everything that an update reads.

    Tokens and the log-probs of the old and the reference policy are made up, so that no layout's rounding is in them:
    those of one that guesses, more or less. Ratios clip on both sides and the KL term has a gradient. No completion is
    shorter than 3: a token's rounding must not weigh more than a thirtieth of a sequence's.
    """
    generator = torch.Generator().manual_seed(1)
    samples = []
    for i, prompt in enumerate(p for p in prompts() for _ in range(SAMPLES)):
        tokens = tuple(torch.randint(3, VOCAB, (3 + 7 * i % 22,), generator=generator).tolist())
        samples.append(Sample(prompt, i % SAMPLES, tokens, (-math.log(VOCAB),) * len(tokens), "length", ((0, 7),), ""))
    if replayed:
        samples = routed_at_random(samples, model)
    batch = pack(samples)
    shift = torch.sin(torch.arange(len(batch.tokens)))
    return batch.with_(
        advantage=torch.linspace(-1.5, 1.5, len(samples)).repeat_interleave(batch.lengths),
        weight=token_weights(batch.mask, batch.cu_seqlens, "sequence_mean", 1),
        old_logprob=batch.rollout_logprob + 0.3 * shift,
        ref_logprob=batch.rollout_logprob - 0.2 * shift,
    )


def routed_at_random(samples: list[Sample], model: ModelConfig) -> list[Sample]:
    """The samples as an engine could have routed them; each sample of a prompt brings other experts."""
    moe, generator = model.moe, torch.Generator().manual_seed(2)
    shape = (model.layers - moe.first_dense, moe.experts)
    drawn = [torch.rand(len(s.prompt.token_ids + s.token_ids) - 1, *shape, generator=generator) for s in samples]
    chosen = [x.argsort(-1)[..., : moe.top_k].to(torch.int16) for x in drawn]
    return [replace(s, experts=experts) for s, experts in zip(samples, chosen, strict=True)]


def update(policy: Policy, batch: Batch, loss: Loss, lr: float) -> tuple[Gradients, float]:
    """An update, and how far from DeepSeek-V3's rule any rank's balancing bias moved: by the load of all ranks."""
    routers = [m for m in policy.chunks.modules() if isinstance(m, PackedRouter) and m.enable_expert_bias]
    before = [router.expert_bias.clone() for router in routers]
    found = policy.update(batch, loss, lr, TEMPERATURE)
    off = torch.zeros(1)
    for router, bias in zip(routers, before, strict=True):
        load = torch.tensor(found.expert_loads[router.layer_number])
        moved = router.config.moe_router_bias_update_rate * (load.mean() - load).sign()
        off = torch.maximum(off, (router.expert_bias - bias - moved).abs().max())
    torch.distributed.all_reduce(off, torch.distributed.ReduceOp.MAX)
    return found, off.item()


if __name__ == "__main__":
    out = Path(sys.argv[1])
    for name in sys.argv[2:]:
        mutation, _, case = name.rpartition("@")
        with pytest.MonkeyPatch.context() as patch:
            if mutation:
                MUTATIONS[mutation].plant(patch)
            step = one_step(*case.split(":"))
        leave_groups()
        if torch.distributed.get_rank() == 0:
            torch.save(step, out / f"{name}.pt")
    torch.distributed.destroy_process_group()

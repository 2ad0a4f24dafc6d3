"""A small model's log-probs, loss, gradients and experts' loads, saved to a file. A process of its own.

Without a REFERENCE: in float32, attention in tables; the weights are rounded to bf16 and saved as well. With one: in
bf16 with its weights, by all that a run in bf16 takes on this device.

Usage: gpu_numbers_job.py MODEL OUT [REFERENCE]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

from grpo_mega import platform

HERE = platform.start()
platform.join_processes(HERE)

import torch  # noqa: E402

from grpo_mega.algorithm.objective import token_wise  # noqa: E402
from grpo_mega.config.schema import LayoutConfig, MLAConfig, ModelConfig, MoEConfig  # noqa: E402
from grpo_mega.models.policy import Policy  # noqa: E402
from grpo_mega.models.shards import named_box, shards  # noqa: E402
from grpo_mega.models.topology import join_layout  # noqa: E402
from grpo_mega.types import Batch, ScoredTokens, pack_tokens  # noqa: E402

VOCABULARY, EXPERTS = 256, 4
DENSE = ModelConfig(
    layers=2, hidden=256, heads=4, kv_heads=2, head_dim=64, ffn_hidden=512, context=512, init_std=0.06, qk_norm=True
)
MOE = replace(DENSE, moe=MoEConfig(experts=EXPERTS, ffn_hidden=128, shared_ffn_hidden=128))
LATENT = replace(
    MOE,
    kv_heads=4,
    qk_norm=False,
    attention="mla",
    mla=MLAConfig(q_lora_rank=64, kv_lora_rank=64, qk_head_dim=128, qk_rope_dim=64, v_head_dim=128),
)
MODELS = {"dense": DENSE, "moe": MOE, "latent": LATENT}
LAYOUT = LayoutConfig(micro_batch_tokens=600)
"""Of which the batch makes several micro-batches: gradients add up."""


def small_batch() -> Batch:
    """A group of three answers to a prompt, one of two, and sequences alone, with random weights and advantages."""
    random = torch.Generator().manual_seed(5)
    prompts = [torch.randint(VOCABULARY, (n,), generator=random).tolist() for n in (150, 33, 7, 64, 1)]
    members = [(0, 90), (1, 200), (0, 129), (2, 60), (0, 14), (1, 128), (3, 180), (4, 300)]
    tokens = [prompts[p] + torch.randint(VOCABULARY, (n,), generator=random).tolist() for p, n in members]
    packed = pack_tokens(tokens, [len(prompts[p]) for p, _ in members])
    shared = torch.tensor([len(prompts[p]) for p, _ in members])
    weight, advantage = torch.rand(2, len(packed.tokens), generator=random)
    return packed.with_(
        prompts=torch.tensor([p for p, _ in members]),
        prompt_lengths=shared,
        weight=weight * packed.mask / packed.mask.sum(),
        advantage=(advantage - 0.5) * packed.mask,
    )


def token_loss(logprob: torch.Tensor, known: ScoredTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return logprob * known.advantage, {}


def prefer_experts(policy: Policy) -> None:
    """Makes the experts of every token clear, so that no rounding changes the choice: two, by the token alone.

    A token's embedding is large in the channels of its experts, and a router looks at these channels.
    """
    tokens = torch.arange(VOCABULARY)
    first = tokens % EXPERTS
    second = (first + 1 + tokens // EXPERTS % (EXPERTS - 1)) % EXPERTS
    for name, parameter in policy.chunks.named_parameters():
        if name.endswith("word_embeddings.weight"):
            parameter.data[tokens, first] = 4.0
            parameter.data[tokens, second] = 2.5
        elif name.endswith("router.weight"):
            parameter.data.copy_(0.1 * torch.eye(EXPERTS, parameter.shape[1]))


def by_name(policy: Policy, of: Callable[[torch.Tensor], torch.Tensor | None]) -> dict[tuple, torch.Tensor]:
    """Parts of whole tensors, under names that are the same whatever the layers are made of."""
    parameters = {id(p) for p in policy.chunks.parameters()}
    found = shards(policy.chunks, lambda p: of(p) if id(p) in parameters else None)
    return {named_box(shard): shard.data for shard in found}


def main(name: str, out: str, reference: str | None = None) -> None:
    model = replace(MODELS[name], dtype="fp32" if reference is None else "bf16")
    layout = replace(LAYOUT, attention="padded" if reference is None else "auto")
    policy = Policy(model, layout, VOCABULARY, join_layout(layout, 0), HERE)
    policy.initialize(seed=0)
    weights = by_name(policy, lambda p: p.data)
    if reference is None:
        if model.moe.experts:
            prefer_experts(policy)
        for part in weights.values():
            part.copy_(part.bfloat16())
    else:
        saved = torch.load(reference)["weights"]
        assert saved.keys() == weights.keys(), saved.keys() ^ weights.keys()
        for key, part in weights.items():
            part.copy_(saved[key])
    batch = small_batch()
    logprobs = policy.logprobs(batch, 1.0)
    result = policy.gradients(batch, token_wise(token_loss))
    gradients = {key: part.float().cpu().clone() for key, part in by_name(policy, lambda p: p.main_grad).items()}
    found = {
        "attention": policy.attention,
        "transformer engine": HERE.transformer_engine,
        "weights": {key: part.cpu().clone() for key, part in weights.items()} if reference is None else {},
        "gradients": gradients,
        "logprobs": logprobs[batch.mask.bool()],
        "of the backward pass": result.outputs[batch.mask.bool()],
        "loads": result.expert_loads,
    }
    torch.save(found, out)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

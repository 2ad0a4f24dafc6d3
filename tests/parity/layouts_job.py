"""One GRPO step's samples, loss and whole gradients under several layouts, in one process group; started by run_ranks.

Usage: layouts_job.py OUT [MUTATION@]MODEL:LAYOUT... ; rank 0 writes OUT/[MUTATION@]MODEL:LAYOUT.pt for each. A mutation
is a bug of mutations.py, there for its case only.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import flash_oracle  # noqa: F401  gives this CPU the kernel of layout.attention=torch
import pytest
import torch
from mutations import MUTATIONS
from parity_cases import LAYOUTS, LONG, LORA, MODELS, OBJECTIVE, OBJECTIVES, WITHOUT_PEFT, optimizer

from grpo_mega import platform

HERE = platform.start()
platform.join_processes(HERE)

from grpo_mega.algorithm.advantage import process_advantages  # noqa: E402
from grpo_mega.algorithm.objective import Loss  # noqa: E402
from grpo_mega.algorithm.weights import token_weights  # noqa: E402
from grpo_mega.config.schema import ModelConfig  # noqa: E402
from grpo_mega.models.adapters import B  # noqa: E402
from grpo_mega.models.megatron.router import PackedRouter  # noqa: E402
from grpo_mega.models.model import Pass  # noqa: E402
from grpo_mega.models.noise import moment_sums  # noqa: E402
from grpo_mega.models.parts import frozen_parts, part_of  # noqa: E402
from grpo_mega.models.policy import Policy  # noqa: E402
from grpo_mega.models.shards import named_box, shards  # noqa: E402
from grpo_mega.models.topology import join_layout, leave_groups  # noqa: E402
from grpo_mega.rollout.embedded import EmbeddedEngine  # noqa: E402
from grpo_mega.rollout.engine import SamplingParams  # noqa: E402
from grpo_mega.rollout.stream import generate  # noqa: E402
from grpo_mega.stages.exchange import pack_samples  # noqa: E402
from grpo_mega.stages.step import loss_of  # noqa: E402
from grpo_mega.types import Batch, Prompt, Sample  # noqa: E402
from grpo_mega.weights.stream import hf_buckets  # noqa: E402

VOCAB = 26
SAMPLES = 3
"""Of every prompt."""
TEMPERATURE = 1.2
SAMPLING = SamplingParams(max_new_tokens=24, stop_ids=(2,), temperature=TEMPERATURE, top_p=0.95, top_k=20, seed=5)
SMALL_BUCKETS = 10_000
"""Megatron's own buckets would hold any of these models."""


def one_step(model_name: str, layout_name: str) -> dict:
    """Samples, log-probs, loss and gradients of one step from seeded weights, and what two updates change."""
    model, layout, adam = MODELS[model_name], LAYOUTS[layout_name], optimizer(model_name, layout_name)
    topology = join_layout(layout, seed=0)
    buffers = {"optimizer": adam, "bucket_size": SMALL_BUCKETS}
    policy = Policy(model, layout, VOCAB, topology, HERE, **buffers, lora=LORA.get(model_name))
    policy.initialize(seed=0)
    train_adapters(policy)
    waves = f"{model_name}:{layout_name}" in LONG
    long = waves or layout_name == "single"
    engine = EmbeddedEngine(policy, str, concurrent_sequences=16 if waves else 64)
    result = {"parameters": policy.parameters()}
    if model.dtype == "fp32":  # in bf16 a layout's rounding may change what is drawn
        result |= sampled(engine, policy, replace(SAMPLING, max_new_tokens=24 if long else 8))
    objective = OBJECTIVES.get(model_name, OBJECTIVE)
    whole = made_up_batch(model, replayed=model_name == "replayed", by_step=objective.supervision == "process")
    batch = policy.share(whole)
    loss = loss_of(objective, old_is_current=False)
    scored = policy.logprobs(batch, TEMPERATURE)
    found = policy.gradients(batch, loss, TEMPERATURE)
    result |= {
        "scored": policy.gathered(scored, batch),
        "trained": policy.gathered(found.outputs, batch),
        "tokens": len(policy.gathered(scored, batch)),
        "metrics": found.metrics,
        "expert_loads": found.expert_loads,
        "gradients": policy.whole_gradients(),
    }
    if policy.lora:
        result["merged"] = dict(pair for bucket in hf_buckets(policy, 10**6) for pair in bucket)
        exported = () if model_name in WITHOUT_PEFT else hf_buckets(policy, 10**6, adapters=True)
        result["adapters"] = dict(pair for bucket in exported for pair in bucket)
    before = policy.whole_weights()
    policy.use_optimizer(adam)
    updates = [update(policy, batch, loss, adam.lr) for _ in range(2)]
    result["norms"] = [found.metrics["grad_norm"] for found, _ in updates]
    result["norms"] += [sum_of_squares**0.5 for sum_of_squares in moment_sums(policy.optimizer)]
    result["bias_off"] = max(off for _, off in updates)
    if model.dtype == "fp32":  # before anything else looks at the new weights
        after = generate(engine, prompts()[:4], 1, replace(SAMPLING, max_new_tokens=4), version=8)
        result["after"] = {tuple(s.token_ids): tuple(s.logprobs) for s in after}
    result["updates"] = {key: whole - before[key] for key, whole in policy.whole_weights().items()}
    kept = frozen_parts(adam.frozen, policy.lora)
    frozen = [key for key in before if part_of(key, model.tie_embeddings) in kept]
    result["frozen_off"] = max((result["updates"][key].abs().max().item() for key in frozen), default=0.0)
    return result


def train_adapters(policy: Policy) -> None:
    """Gives every B values as after some training: with the first ones, 0, no A has a gradient."""
    for shard in shards(policy.chunks):
        name, box = named_box(shard)
        if name.endswith(B):
            generator = torch.Generator().manual_seed(crc32(name.encode()))
            whole = torch.randn(shard.global_shape[shard.prepend_axis_num :], generator=generator) * 0.1
            shard.data.copy_(whole[tuple(slice(*ends) for ends in box)])


def save_each(step: Callable[[str, str], dict]) -> None:
    """What `step` finds in each case of the command line, OUT [MUTATION@]MODEL:LAYOUT...; rank 0 saves OUT/CASE.pt."""
    for name in sys.argv[2:]:
        mutation, _, case = name.rpartition("@")
        with pytest.MonkeyPatch.context() as patch:
            if mutation:
                MUTATIONS[mutation].plant(patch)
            found = step(*case.split(":"))
        leave_groups()
        if torch.distributed.get_rank() == 0:
            torch.save(found, Path(sys.argv[1]) / f"{name}.pt")
    torch.distributed.destroy_process_group()


def prompts() -> list[Prompt]:
    """Eleven prompts of different lengths: no layout divides them evenly."""
    generator = torch.Generator().manual_seed(0)
    lengths = [3 + i % 5 for i in range(11)]
    ids = [tuple(torch.randint(3, VOCAB, (n,), generator=generator).tolist()) for n in lengths]
    return [Prompt(f"p{i}", tokens, "", "", "") for i, tokens in enumerate(ids)]


def sampled(engine: EmbeddedEngine, policy: Policy, sampling: SamplingParams) -> dict:
    """What the engine draws, its log-probs and the trainer's."""
    samples = generate(engine, prompts(), SAMPLES, sampling, version=7)
    batch = policy.share(pack_samples(samples))
    return {
        "samples": [tuple(s.token_ids) for s in samples],
        "longest": sampling.max_new_tokens,
        "rollout_logprob": policy.gathered(batch.rollout_logprob, batch),
        "logprob": policy.gathered(policy.logprobs(batch, sampling.temperature), batch),
    }


def made_up_batch(model: ModelConfig, replayed: bool, by_step: bool = False) -> Batch:
    """Groups of random completions of 3 to 24 tokens, with everything that an update reads.

    Tokens and the log-probs of the old and the reference policy are made up, so that no layout's rounding is in them:
    those of one that guesses, more or less. Some completions were given two parts, as tools' replies are, and one or
    both of these begin a new piece. Ratios clip on both sides and the KL term has a gradient. No completion is shorter
    than 3: a token's rounding must not weigh more than a thirtieth of a sequence's. `by_step`: advantages are those of
    steps, two for every completion.
    """
    generator = torch.Generator().manual_seed(1)
    samples = []
    for i, prompt in enumerate(p for p in prompts() for _ in range(SAMPLES)):
        tokens = tuple(torch.randint(3, VOCAB, (3 + 7 * i % 22,), generator=generator).tolist())
        n = len(tokens)
        given = ((n // 4, n // 3), (n // 2, 2 * n // 3)) if i % 3 == 1 and n > 11 and not by_step else ()
        logprobs = (-math.log(VOCAB),) * len(tokens)
        restarts = ((n // 4,), (n // 2,), (n // 4, n // 2))[i // SAMPLES % 3] if given else ()
        columns = prompt, i % SAMPLES, tokens, logprobs, "length", ((0, 7),), ""
        samples.append(Sample(*columns, given=given, restarts=restarts))
    if replayed:
        samples = routed_at_random(samples, model)
    batch = pack_samples(samples)
    shift = torch.sin(torch.arange(len(batch.tokens)))
    advantage = torch.linspace(-1.5, 1.5, len(samples)).repeat_interleave(batch.lengths)
    if by_step:
        lengths = [len(sample.token_ids) for sample in samples]
        steps = [((n // 2, float(i % 4)), (n - 1, float(i % 3))) for i, n in enumerate(lengths)]
        of_tokens = [
            part for i in range(0, len(samples), SAMPLES)
            for part in process_advantages(steps[i : i + SAMPLES], lengths[i : i + SAMPLES])
        ]  # fmt: skip
        advantage = torch.zeros(len(batch.tokens)).masked_scatter(batch.mask, torch.cat(of_tokens))
    return batch.with_(
        advantage=advantage,
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


def update(policy: Policy, batch: Batch, loss: Loss, lr: float) -> tuple[Pass, float]:
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
    save_each(one_step)

"""Two replicas with the distributed optimizer, overlapped or not, read in every way right after an update.

Usage: overlap_job.py FOLDER ; every rank prints what differs as JSON. Started by run_ranks.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from grpo_mega import platform

HERE = platform.start()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.dist_checkpointing import load_plain_tensors  # noqa: E402

from grpo_mega.algorithm.objective import negative_log_likelihood  # noqa: E402
from grpo_mega.checkpoint import checkpoint  # noqa: E402
from grpo_mega.config.schema import LayoutConfig, ModelConfig, MoEConfig, OptimizerConfig  # noqa: E402
from grpo_mega.models.policy import Policy  # noqa: E402
from grpo_mega.models.reference import ReferencePolicy  # noqa: E402
from grpo_mega.models.topology import Topology, join_layout  # noqa: E402
from grpo_mega.rollout.embedded import EmbeddedEngine  # noqa: E402
from grpo_mega.rollout.engine import SamplingParams  # noqa: E402
from grpo_mega.rollout.stream import generate  # noqa: E402
from grpo_mega.types import Prompt, pack_tokens  # noqa: E402

VOCABULARY = 21
SEPARATE = ModelConfig(
    layers=2, hidden=32, heads=4, kv_heads=2, ffn_hidden=48, context=24, init_std=0.2,
    moe=MoEConfig(experts=4, ffn_hidden=16, shared_ffn_hidden=16, first_dense=1),
)  # fmt: skip
MODELS = {"separate": SEPARATE, "tied": replace(SEPARATE, tie_embeddings=True)}
LAYOUTS = {"dp2": LayoutConfig(micro_batch_tokens=40), "ep2": LayoutConfig(ep=2, micro_batch_tokens=40)}
# Without clipping: the gradient norm is a sum over shards, and buckets of another size cut them elsewhere.
OPTIMIZER = OptimizerConfig(lr=0.02, clip_grad=0)
SMALL_BUCKETS = 2000
"""Parameters; Megatron's own buckets would hold all of these models."""
Tensors = dict[str, torch.Tensor]


def updated(model: str, layout: str, topology: Topology, overlap: bool) -> Policy:
    """A policy right after its second update: the first time round Megatron only counts what is ready when."""
    buffers = {"optimizer": OptimizerConfig(distributed=True, overlap=overlap), "bucket_size": SMALL_BUCKETS}
    policy = Policy(MODELS[model], LAYOUTS[layout], VOCABULARY, topology, HERE, **buffers)
    policy.initialize(seed=0)
    policy.use_optimizer(OPTIMIZER)
    update(policy, 1)
    update(policy, 2)
    return policy


def batch(policy: Policy, number: int):
    generator = torch.Generator().manual_seed(number)
    tokens = [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in (7, 20, 2, 11, 5, 16, 3)]
    packed = pack_tokens(tokens, [1] * len(tokens))
    return policy.share(packed.with_(weight=packed.mask / packed.mask.sum()))


def update(policy: Policy, number: int) -> None:
    policy.update(batch(policy, number), negative_log_likelihood, lr=OPTIMIZER.lr)


def whole(policy: Policy, _: Path) -> Iterator[Tensors]:
    """All weights."""
    yield policy.whole_weights()


def next_gradients(policy: Policy, _: Path) -> Iterator[Tensors]:
    """The whole gradient of a pass, and the weights that it leaves alone."""
    policy.gradients(batch(policy, 3), negative_log_likelihood)
    yield policy.whole_gradients()
    yield policy.whole_weights()


def scored(policy: Policy, _: Path) -> Iterator[Tensors]:
    """Log-probs, then the update behind them."""
    yield {"logprob": policy.logprobs(batch(policy, 3), 0.9)}
    update(policy, 3)
    yield policy.whole_weights()


def generated(policy: Policy, _: Path) -> Iterator[Tensors]:
    """Samples, then the update behind them."""
    prompts = [Prompt(f"p{i}", (3 + i, 5, 7 + i), "", "", "") for i in range(5)]
    sampling = SamplingParams(max_new_tokens=10, stop_ids=(2,), temperature=1.0, top_p=1.0, top_k=0, seed=5)
    for i, sample in enumerate(generate(EmbeddedEngine(policy, str, 8), prompts, 2, sampling, version=1)):
        yield {f"tokens {i}": torch.tensor(sample.token_ids), f"logprob {i}": torch.tensor(sample.logprobs)}
    update(policy, 3)
    yield policy.whole_weights()


def reference(policy: Policy, _: Path) -> Iterator[Tensors]:
    """A reference made, put in place and refreshed, each right after an update."""
    made = ReferencePolicy(policy)
    update(policy, 3)
    yield {"made": made.logprobs(batch(policy, 4), 1.0), "policy": policy.logprobs(batch(policy, 4), 1.0)}
    update(policy, 4)
    made.refresh()
    update(policy, 5)
    yield {"refreshed": made.logprobs(batch(policy, 4), 1.0)}
    yield policy.whole_weights()


def saved(policy: Policy, folder: Path) -> Iterator[Tensors]:
    """Weights and moments as a checkpoint holds them."""
    checkpoint.save(folder, [policy], {})
    yield dict(floats(load_plain_tensors(str(folder / "weights"))))


def loaded(policy: Policy, folder: Path) -> Iterator[Tensors]:
    """Back to a checkpoint right after an update, and on from there."""
    checkpoint.save(folder, [policy], {})
    update(policy, 3)
    checkpoint.load(folder, [policy])
    yield {"logprob": policy.logprobs(batch(policy, 4), 1.0)}
    update(policy, 3)
    checkpoint.load(folder, [policy])
    update(policy, 4)
    yield policy.whole_weights()


def new_optimizer(policy: Policy, _: Path) -> Iterator[Tensors]:
    """Another optimizer right after an update."""
    policy.use_optimizer(OPTIMIZER)
    update(policy, 3)
    yield policy.whole_weights()


def floats(node: dict, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every floating-point tensor of a nested state, by dotted name."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from floats(value, f"{name}{key}.")
        elif torch.is_tensor(value) and value.is_floating_point():
            yield f"{name}{key}", value


def unequal(first: list[Tensors], second: list[Tensors]) -> list[str]:
    """Names of the tensors that are not equal bit for bit; ["nothing"] when there is none to compare."""
    pairs = [(key, a[key], b.get(key)) for a, b in zip(first, second, strict=True) for key in a]
    return [key for key, a, b in pairs if b is None or not torch.equal(a, b)] if pairs else ["nothing"]


def stale(policy: Policy) -> list[str]:
    """Parameters that this rank does not have whole."""
    before = {name: p.detach().clone() for name, p in policy.chunks.named_parameters()}
    policy.gather_parameters()
    return [name for name, p in policy.chunks.named_parameters() if not torch.equal(p, before[name])]


def compare(model: str, layout: str, folder: Path) -> dict:
    """What is not the same with overlap and without, by the way of reading; and that there is something to go wrong."""
    topology = join_layout(LAYOUTS[layout], seed=0)
    outcome = {}
    for read in (whole, next_gradients, scored, generated, reference, saved, loaded, new_optimizer):
        waited, overlapped = (
            list(
                read(updated(model, layout, topology, overlap), folder / f"{read.__name__}-{model}-{layout}-{overlap}")
            )
            for overlap in (False, True)
        )
        outcome[read.__name__] = unequal(waited, overlapped)
    waited, overlapped = (updated(model, layout, topology, overlap) for overlap in (False, True))
    seen = {
        "unequal": outcome,
        "buckets": len(overlapped.ddp_chunks[0].bucket_groups),
        "stale": {"waited": stale(waited), "overlapped": stale(overlapped), "gathered": stale(overlapped)},
    }
    parallel_state.destroy_model_parallel()
    return seen


if __name__ == "__main__":
    platform.join_processes(HERE)  # not above: Megatron's helper for saving imports this file again
    folder, *cases = sys.argv[1:]
    seen = {case: compare(*case.split("-"), Path(folder)) for case in cases}
    torch.distributed.destroy_process_group()
    print(json.dumps(seen))

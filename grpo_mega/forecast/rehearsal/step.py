"""A step as one rank makes it, piece by piece: passes, updates, the engine's turn, a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from grpo_mega.algorithm.objective import Loss
from grpo_mega.checkpoint.model_state import state_to_save, weights_of
from grpo_mega.colocation.offload import TrainerMemory
from grpo_mega.config.rules import ConfigError
from grpo_mega.config.schema import Config
from grpo_mega.forecast.rehearsal.measure import Rehearsal
from grpo_mega.forecast.rehearsal.models import Models, build, build_reward_model
from grpo_mega.forecast.rehearsal.spec import RankSpec
from grpo_mega.forecast.rehearsal.unwritten import UnwrittenHost
from grpo_mega.models.model import Model
from grpo_mega.models.policy import Policy
from grpo_mega.models.reference import ReferencePolicy
from grpo_mega.models.scalar import ClippedSquaredError, cross_entropy, value_itself
from grpo_mega.models.topology import Topology
from grpo_mega.platform import Platform
from grpo_mega.rollout.sglang.arguments import own_experts
from grpo_mega.rollout.sglang.transport import flattened
from grpo_mega.types import Batch, pack_tokens
from grpo_mega.weights.fp8 import quantised_bucket
from grpo_mega.weights.stream import hf_buckets


def step(
    spec: RankSpec, platform: Platform, topology: Topology, loss: Loss, on_policy: bool, rehearsal: Rehearsal
) -> None:
    """Builds the models, and makes two updates in one step. Raises DoesNotFit when memory runs out."""
    config = spec.config
    with rehearsal.phase("build"), about_settings():
        models = build(config, topology, platform)
        rehearsal.memory = TrainerMemory(models.all, suspend_process_groups=False)
    batch = _batch(spec.lengths, [(length + 1) // 2 for length in spec.lengths])
    batch = _passes(config, models, batch, on_policy, rehearsal)
    for number in (1, 2):  # the second finds what the first has left: moments, caches, fragments
        _update(config, models, batch, loss, number, rehearsal)
    if config.rollout.engine == "sglang":
        _turn(config, models.policy, topology.rank, rehearsal)
    _save(models.saved, rehearsal)


def reward_model_step(spec: RankSpec, platform: Platform, topology: Topology, rehearsal: Rehearsal) -> None:
    """Builds the reward model that a run trains, and makes two updates, as its stage does (`stages/reward_model.py`,
    `stages/process_reward_model.py`). Raises DoesNotFit when memory runs out."""
    config = spec.config
    of_steps = config.run.trains == "process_reward_model"
    with rehearsal.phase("build"), about_settings():
        model = build_reward_model(config, topology, platform)
        rehearsal.memory = TrainerMemory([model], suspend_process_groups=False)
    batch = _batch(spec.lengths, [length - 1 for length in spec.lengths])
    batch = batch.with_(returns=torch.ones(len(batch.tokens)))
    for number in (1, 2):
        if not of_steps:  # the preference loss is of two responses, whose scores come first
            with rehearsal.phase(f"scores, update {number}"):
                model.values(batch)
        with rehearsal.phase(f"gradients, update {number}"):
            gradients = model.gradients(batch, cross_entropy if of_steps else value_itself)
        with rehearsal.phase(f"optimizer, update {number}"):
            model.apply(gradients, config.pairs.lr)
    _save([model], rehearsal)


@contextmanager
def about_settings() -> Iterator[None]:
    """Makes a ValueError, of models that cannot be built as they are set, a ConfigError."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _passes(config: Config, models: Models, batch: Batch, on_policy: bool, rehearsal: Rehearsal) -> Batch:
    """The passes before the updates, in the order of the stages; the batch with what the updates read."""
    policy, temperature = models.policy, config.rollout.temperature
    if models.scorer:
        with rehearsal.phase("scores"):
            models.scorer.values(batch)
    if models.reference:
        with rehearsal.phase("reference log-probs"):
            models.reference.logprobs(batch, temperature)
    if not on_policy:
        with rehearsal.phase("old log-probs"):
            policy.logprobs(batch, temperature)
    if models.teacher:
        with rehearsal.phase("teacher log-probs"):
            models.teacher.logprobs(batch, temperature)
    if models.critic:
        with rehearsal.phase("values"):
            batch = batch.with_(value=models.critic.values(batch), returns=torch.ones(len(batch.tokens)))
    return batch


def _update(config: Config, models: Models, batch: Batch, loss: Loss, number: int, rehearsal: Rehearsal) -> None:
    policy, critic = models.policy, models.critic
    with rehearsal.phase(f"gradients, update {number}"):
        gradients = policy.gradients(batch, loss, config.rollout.temperature)
    with rehearsal.phase(f"optimizer, update {number}"):
        policy.apply(gradients, lr=config.optimizer.lr)
    if critic:
        with rehearsal.phase(f"critic, update {number}"):
            critic.update(batch, ClippedSquaredError(config.critic.clip), config.critic.lr)


def _turn(config: Config, policy: Policy, rank: int, rehearsal: Rehearsal) -> None:
    """The engine's turn, as `colocation/turns.py` gives it."""
    memory = rehearsal.memory
    assert memory, "models are built"
    with rehearsal.phase("all but weights leave"):
        memory.offload(keep_weights=True)
    with rehearsal.phase("weights to the engine"):
        _push(config, policy, rank)
    with rehearsal.phase("weights leave"):
        memory.offload()
    with rehearsal.phase("trainer returns"):
        memory.onload()


def _push(config: Config, policy: Policy, rank: int) -> None:
    """All weights in buckets, each in one piece, as `colocation/sync.py` and the engine's transport make them."""
    sglang = config.rollout.sglang
    policy.gather_parameters()
    for bucket in hf_buckets(
        policy, sglang.bucket_bytes, own_experts(sglang, config.model.moe.experts, rank % sglang.tp)
    ):
        offered = flattened(quantised_bucket(bucket) if sglang.fp8 else bucket)
        del bucket, offered


def _save(models: Sequence[Model | ReferencePolicy], rehearsal: Rehearsal) -> None:
    """A checkpoint of each model up to its files: copies of what this rank writes."""
    for model in models:
        copies = None
        with rehearsal.phase(f"checkpoint, {model.role}"), UnwrittenHost():
            if isinstance(model, ReferencePolicy):
                with model.saved():
                    copies = _copied(weights_of(model.policy))
            else:
                copies = _copied(state_to_save(model))
        del copies  # which the phase has counted


def _copied(state: dict[str, Any]) -> Any:
    """What the state holds on the host, and copies of what this rank writes of it, as Megatron's writer makes them."""
    apply_factories(state)
    tensors = [item for item in nested_values(state) if isinstance(item, ShardedTensor) and item.data is not None]
    written = [(None, _owned(item.data.detach())) for item in tensors if is_main_replica(item.replica_id)]
    return state, FileSystemWriterAsync.preload_tensors([("", "", ([], written))])


def _owned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of a part of a larger one on the host, as Megatron's `prepare_write_data` makes it."""
    is_part = tensor.untyped_storage().nbytes() != tensor.nbytes
    return tensor.clone() if is_part and tensor.device.type == "cpu" else tensor


def _batch(lengths: Sequence[int], first: Sequence[int]) -> Batch:
    """Sequences of these lengths, learned from their token of the number `first` on."""
    batch = pack_tokens([[0] * length for length in lengths], first)
    ones = torch.ones(len(batch.tokens))
    return batch.with_(advantage=ones, weight=batch.mask / batch.mask.sum())

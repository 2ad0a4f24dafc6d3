"""Rehearses a step as one rank of a job, piece by piece: passes, updates, the engine's turn, a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from grpo_mega.algorithm.objective import Loss
from grpo_mega.checkpoint.model_state import state_to_save, weights_of
from grpo_mega.colocation.offload import TrainerMemory
from grpo_mega.config.schema import REWARD_MODELS, Config, SGLangConfig
from grpo_mega.config.trained_model import read_reward_model, read_teacher
from grpo_mega.errors import InputError
from grpo_mega.forecast.planning.plan import planned_vocabulary
from grpo_mega.forecast.rehearsal import stand_ins, world
from grpo_mega.forecast.rehearsal.measure import DoesNotFit, Rehearsal
from grpo_mega.forecast.rehearsal.spec import RankSpec
from grpo_mega.forecast.rehearsal.stand_ins import UnwrittenHost
from grpo_mega.models.model import Model
from grpo_mega.models.policy import Policy
from grpo_mega.models.reference import ReferencePolicy, Teacher
from grpo_mega.models.scalar import REWARD_MODEL, ClippedSquaredError, ScalarModel, cross_entropy, value_itself
from grpo_mega.models.topology import Topology
from grpo_mega.platform import Platform
from grpo_mega.rollout.sglang.arguments import own_experts
from grpo_mega.rollout.sglang.transport import flattened
from grpo_mega.types import Batch, pack_tokens
from grpo_mega.weights.fp8 import quantised_bucket
from grpo_mega.weights.stream import hf_buckets


def rehearse(spec: RankSpec, platform: Platform, loss: Loss, skips_old_pass: bool) -> dict[str, Any]:
    """Runs one step as the rank that `spec` names, on the null GPU; returns measurements as JSON values.

    Args:
        spec: The rank and its sequences.
        platform: The platform of this process, whose device is the null GPU.
        loss: The loss of a policy's update.
        skips_old_pass: Whether the old policy's log-probs need no pass.

    Raises:
        InputError: The models cannot be built with these settings.
    """
    config = spec.config
    topology = world.join_alone(config.layout, spec.rank, spec.world_size, config.run.seed)
    stand_ins.apply(spec)
    rehearsal = Rehearsal()
    with suppress(DoesNotFit):
        if config.run.trains in REWARD_MODELS:
            reward_model_step(spec, platform, topology, rehearsal)
        else:
            policy_step(spec, platform, topology, loss, skips_old_pass, rehearsal)
    return {
        "rank": spec.rank,
        "stage": topology.pp_rank,
        "sequences": spec.sequences,
        "lengths": list(spec.lengths),
        "imbalance": spec.imbalance,
        "transformer_engine": platform.transformer_engine,
        "taken": spec.taken,
        "capacity": spec.capacity,
        "phases": rehearsal.phases,
        "failure": rehearsal.failure,
        "stand_ins": {stand_in.name: stand_in.reason for stand_in in stand_ins.STAND_INS},
    }


def policy_step(
    spec: RankSpec, platform: Platform, topology: Topology, loss: Loss, skips_old_pass: bool, rehearsal: Rehearsal
) -> None:
    """Builds the models and makes two updates in one step. Raises DoesNotFit when memory runs out."""
    config = spec.config
    temperature = config.rollout.temperature
    with rehearsal.phase("build"), about_settings():
        models = build(config, topology, platform)
        # Null groups hold no NCCL memory that could be given back.
        rehearsal.memory = TrainerMemory(models.all, suspend_process_groups=False)
    policy, critic = models.policy, models.critic
    # Half of each sequence is its prompt.
    batch = _batch(spec.lengths, [(length + 1) // 2 for length in spec.lengths])
    batch = _passes(models, batch, temperature, skips_old_pass, rehearsal)
    # The second update runs with what the first one leaves: Adam's moments, caches, fragments.
    for number in (1, 2):
        with rehearsal.phase(f"gradients, update {number}"):
            gradients = policy.gradients(batch, loss, temperature)
        with rehearsal.phase(f"optimizer, update {number}"):
            policy.apply(gradients, lr=config.optimizer.lr)
        if critic:
            with rehearsal.phase(f"critic, update {number}"):
                critic.update(batch, ClippedSquaredError(config.critic.clip), config.critic.lr)
    if config.rollout.engine == "sglang":
        _turn(policy, config.rollout.sglang, config.model.moe.experts, topology.rank, rehearsal)
    _save(models.saved, rehearsal)


def reward_model_step(spec: RankSpec, platform: Platform, topology: Topology, rehearsal: Rehearsal) -> None:
    """Builds the reward model that a run trains and makes two updates, as `stages/reward_model.py` and
    `stages/process_reward_model.py` do. Raises DoesNotFit when memory runs out."""
    config = spec.config
    of_steps = config.run.trains == "process_reward_model"
    with rehearsal.phase("build"), about_settings():
        settings = config.optimizer
        here = (config.layout, planned_vocabulary(config.model, config.data), topology, platform)
        model = ScalarModel(REWARD_MODEL, config.model, *here, optimizer=settings)
        model.use_optimizer(settings)
        rehearsal.memory = TrainerMemory([model], suspend_process_groups=False)
    # The score of a sequence is the value of its last token.
    batch = _batch(spec.lengths, [length - 1 for length in spec.lengths])
    batch = batch.with_(returns=torch.ones(len(batch.tokens)))
    for number in (1, 2):
        # The preference loss compares two responses, so a pass computes their scores first.
        if not of_steps:
            with rehearsal.phase(f"scores, update {number}"):
                model.values(batch)
        with rehearsal.phase(f"gradients, update {number}"):
            gradients = model.gradients(batch, cross_entropy if of_steps else value_itself)
        with rehearsal.phase(f"optimizer, update {number}"):
            model.apply(gradients, config.pairs.lr)
    _save([model], rehearsal)


@contextmanager
def about_settings() -> Iterator[None]:
    """Turns a ValueError of models that cannot be built into an InputError."""
    try:
        yield
    except InputError:
        raise
    except ValueError as error:
        raise InputError("settings", str(error), "change them") from error


def _passes(models: Models, batch: Batch, temperature: float, skips_old_pass: bool, rehearsal: Rehearsal) -> Batch:
    """Makes the passes before the updates, in the order of the stages; returns the batch with what updates read."""
    if models.scorer:
        with rehearsal.phase("scores"):
            models.scorer.values(batch)
    if models.reference:
        with rehearsal.phase("reference log-probs"):
            models.reference.logprobs(batch, temperature)
    if not skips_old_pass:
        with rehearsal.phase("old log-probs"):
            models.policy.logprobs(batch, temperature)
    if models.teacher:
        with rehearsal.phase("teacher log-probs"):
            models.teacher.logprobs(batch, temperature)
    if models.critic:
        with rehearsal.phase("values"):
            batch = batch.with_(value=models.critic.values(batch), returns=torch.ones(len(batch.tokens)))
    return batch


def _turn(policy: Policy, sglang: SGLangConfig, experts: int, rank: int, rehearsal: Rehearsal) -> None:
    """The engine's turn, as in `colocation/colocation.py`: all weights leave in buckets, each in one piece."""
    memory = rehearsal.memory
    assert memory, "models are built"
    # Weights stay on the GPU until the engine has them, as the trainer sends them from there.
    with rehearsal.phase("all but weights leave"):
        memory.offload(keep_weights=True)
    with rehearsal.phase("weights to the engine"):
        # With overlap, an update leaves the gathering of its parameters to the next forward pass, which does not come
        # first here.
        policy.gather_parameters()
        for bucket in hf_buckets(policy, sglang.bucket_bytes, own_experts(sglang, experts, rank % sglang.tp)):
            offered = flattened(quantised_bucket(bucket) if sglang.fp8 else bucket)
            # Freed before the next bucket is made, as the transport does.
            del bucket, offered
    with rehearsal.phase("weights leave"):
        memory.offload()
    with rehearsal.phase("trainer returns"):
        memory.onload()


def _save(models: Sequence[Model | ReferencePolicy], rehearsal: Rehearsal) -> None:
    """Prepares a checkpoint of each model up to its files: makes the copies that this rank would write."""
    for model in models:
        copies = None
        with rehearsal.phase(f"checkpoint, {model.role}"), UnwrittenHost():
            if isinstance(model, ReferencePolicy):
                with model.saved():
                    copies = _copied(weights_of(model.policy))
            else:
                copies = _copied(state_to_save(model))
        # Counted by the phase; the next model's copies must not come on top of them.
        del copies


def _copied(state: dict[str, Any]) -> Any:
    """The state, and copies of what this rank writes of it, as Megatron's writer makes them."""
    # Factories split tensors into those that are written, such as the halves of a gated layer's first matrix.
    apply_factories(state)
    tensors = [item for item in nested_values(state) if isinstance(item, ShardedTensor) and item.data is not None]
    written = []
    for item in tensors:
        if is_main_replica(item.replica_id):
            tensor = item.data.detach()
            # Megatron's `prepare_write_data` copies a part of a larger tensor on the host.
            if tensor.device.type == "cpu" and tensor.untyped_storage().nbytes() != tensor.nbytes:
                tensor = tensor.clone()
            written.append((None, tensor))
    return state, FileSystemWriterAsync.preload_tensors([("", "", ([], written))])


def _batch(lengths: Sequence[int], first: Sequence[int]) -> Batch:
    """Sequences of these lengths, each learned from its token number `first` on."""
    batch = pack_tokens([[0] * length for length in lengths], first)
    ones = torch.ones(len(batch.tokens))
    return batch.with_(advantage=ones, weight=batch.mask / batch.mask.sum())


@dataclass(frozen=True)
class Models:
    """The policy, and the models that the run needs beside it."""

    policy: Policy
    reference: ReferencePolicy | None
    critic: ScalarModel | None
    scorer: ScalarModel | None
    teacher: Teacher | None

    @property
    def all(self) -> list[Model | ReferencePolicy]:
        """All models of the run, the policy first."""
        models = (self.policy, self.critic, self.reference, self.scorer, self.teacher)
        return [model for model in models if model is not None]

    @property
    def saved(self) -> list[Model | ReferencePolicy]:
        """The models that checkpoints hold."""
        return [model for model in (self.policy, self.critic, self.reference) if model is not None]


def build(config: Config, topology: Topology, platform: Platform) -> Models:
    """Builds this rank's part of all models, with optimizers, as `assemble.py` does; their weights are never written.

    Raises:
        InputError: The files of a teacher or a reward model lack its architecture, or a package that the settings name
            is not installed.
    """
    vocab_size, settings = planned_vocabulary(config.model, config.data), config.optimizer
    here = (topology, platform)
    policy = Policy(config.model, config.layout, vocab_size, *here, optimizer=settings, lora=config.lora)
    reference = ReferencePolicy(policy) if config.algorithm.kl_coef else None
    policy.use_optimizer(settings)
    critic = scorer = teacher = None
    if config.algorithm.advantage_baseline == "critic":
        critic = ScalarModel("critic", config.model, config.layout, vocab_size, *here, optimizer=settings, before=True)
        critic.use_optimizer(settings)
    if config.reward.model.path is not None:
        model = read_reward_model(config.reward, config.model) or config.model
        size = model.vocab_size or vocab_size
        scorer = ScalarModel(REWARD_MODEL, model, config.layout, size, *here, optimizer=None)
    if taught := read_teacher(config.distill, config.model):
        teacher = Teacher(taught.model, config.layout, taught.model.vocab_size or vocab_size, *here)
    return Models(policy, reference, critic, scorer, teacher)

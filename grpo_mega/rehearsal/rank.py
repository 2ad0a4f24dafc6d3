"""Runs the pieces of a step as one rank of a job, and measures each: `rehearse`."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from grpo_mega.algorithm.objective import Loss
from grpo_mega.colocation.offload import TrainerMemory
from grpo_mega.models.microbatch import MicroBatches
from grpo_mega.models.policy import Policy
from grpo_mega.models.reference import ReferencePolicy
from grpo_mega.models.topology import Topology
from grpo_mega.platform import Platform
from grpo_mega.rehearsal import stand_ins, world
from grpo_mega.rehearsal.curve import recorded
from grpo_mega.rehearsal.device import Books, Waits, frame_in_words
from grpo_mega.rehearsal.spec import RankSpec
from grpo_mega.types import Batch, pack_tokens

SHOWN_WAITS = 12
"""Places of waits that are reported for each phase."""


class DoesNotFit(Exception):
    """torch's allocator found no memory: this phase and those after it were not rehearsed."""


class Rehearsal:
    """Measures phases one after the other.

    Attributes:
        phases: A row of numbers for each, in bytes and events.
        failure: Where memory ran out: phase, place and torch's message; None when it did not.
        memory: Of the models that there are, whose bytes each phase has by owner.
    """

    def __init__(self) -> None:
        self.phases: list[dict[str, Any]] = []
        self.failure: dict[str, str] | None = None
        self.memory: TrainerMemory | None = None
        self._waits = Waits()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts what happens within. Raises DoesNotFit when memory runs out."""
        before, began = Books.read(), time.monotonic()
        torch.cuda.reset_peak_memory_stats()
        self._waits.taken()
        world.taken()
        curve: list[int] = []
        try:
            with recorded(curve):
                yield
        except torch.OutOfMemoryError as error:
            self.failure = {"phase": name, "owner": _owner(error), "message": str(error).split(" If reserved")[0]}
        measured = Books.read().since(before)
        places = self._waits.taken()
        self.phases.append(
            {"name": name, "seconds": round(time.monotonic() - began, 2)}
            | _memory()
            | measured
            | {"collectives": world.taken(), "places": dict([*places.items()][:SHOWN_WAITS])}
            | {"curve": curve, "held": self.memory.held() if self.memory else {}}
        )
        if self.failure:
            raise DoesNotFit


def _memory() -> dict[str, int]:
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
    }


def _owner(error: BaseException) -> str:
    """Who asked for the memory: the innermost caller outside of torch."""
    frames = traceback.extract_tb(error.__traceback__)
    named = (frame_in_words(frame.filename, frame.lineno, frame.name) for frame in reversed(frames))
    return next(filter(None, named), "torch's autograd")


def rehearse(spec: RankSpec, platform: Platform, loss: Loss, on_policy: bool) -> dict[str, Any]:
    """The phases of one step as the rank that `spec` names, on the null GPU: numbers that JSON can hold.

    Args:
        spec: The rank and its sequences.
        platform: Of this process, whose device is the null GPU.
        loss: Of an update.
        on_policy: Whether a step has one update, which needs no log-probs before it.
    """
    config = spec.config
    topology = world.join_alone(config.layout, spec.rank, spec.world_size, config.run.seed)
    stand_ins.apply(spec)
    rehearsal = Rehearsal()
    with suppress(DoesNotFit):
        _step(spec, platform, topology, loss, on_policy, rehearsal)
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


def _step(
    spec: RankSpec, platform: Platform, topology: Topology, loss: Loss, on_policy: bool, rehearsal: Rehearsal
) -> None:
    config, temperature = spec.config, spec.config.rollout.temperature
    with rehearsal.phase("build"):
        policy = Policy(
            config.model,
            config.layout,
            config.model.vocab_size or 0,
            topology,
            platform,
            distributed_optimizer=config.optimizer.distributed,
            overlap=config.optimizer.overlap,
            frozen=config.optimizer.frozen,
            lora=config.lora,
        )
        reference = ReferencePolicy(policy) if config.algorithm.kl_coef else None
        policy.use_optimizer(config.optimizer)
        rehearsal.memory = TrainerMemory([policy, *([reference] if reference else [])], suspend_process_groups=False)
    batch = _batch(spec)
    micros = policy._micro_batches(batch, config.model.mtp_layers)
    if reference:
        with rehearsal.phase("reference log-probs"):
            _expect(micros, topology, config.layout.sp, backward=False)
            reference.logprobs(batch, temperature)
    if not on_policy:
        with rehearsal.phase("old log-probs"):
            _expect(micros, topology, config.layout.sp, backward=False)
            policy.logprobs(batch, temperature)
    for number in (1, 2):  # the second finds what the first has left: moments, caches, fragments
        with rehearsal.phase(f"gradients, update {number}"):
            _expect(micros, topology, config.layout.sp, backward=True)
            gradients = policy.gradients(batch, loss, temperature)
        with rehearsal.phase(f"optimizer, update {number}"):
            policy.apply(gradients, lr=config.optimizer.lr)
    if config.rollout.engine == "sglang":
        _turn(rehearsal.memory, rehearsal)


def _turn(memory: TrainerMemory, rehearsal: Rehearsal) -> None:
    """The engine's turn, as `colocation/turns.py` gives it."""
    with rehearsal.phase("all but weights leave"):
        memory.offload(keep_weights=True)
    with rehearsal.phase("weights leave"):
        memory.offload()
    with rehearsal.phase("trainer returns"):
        memory.onload()


def _batch(spec: RankSpec) -> Batch:
    """Sequences of these lengths; the second half of each is learned."""
    sequences = [[0] * length for length in spec.lengths]
    batch = pack_tokens(sequences, [(length + 1) // 2 for length in spec.lengths])
    ones = torch.ones(len(batch.tokens))
    return batch.with_(advantage=ones, weight=batch.mask / batch.mask.sum())


def _expect(micros: MicroBatches, topology: Topology, sequence_parallel: bool, backward: bool) -> None:
    """Tells the stand-in for neighbouring stages how many rows each micro-batch has on this rank."""
    multiple = topology.row_multiple * topology.cp_size
    lengths = micros.batch.lengths
    rows = []
    for sequences in micros.plan:
        tokens = int(lengths[sequences].sum()) if sequences else 0
        padded = max(-(-tokens // multiple), 1) * multiple
        rows.append(padded // topology.cp_size // (topology.tp_size if sequence_parallel else 1))
    for queue in (stand_ins.rows_coming, stand_ins.rows_returning):
        queue.clear()
        queue.extend(rows)
    if not backward:
        stand_ins.rows_returning.clear()

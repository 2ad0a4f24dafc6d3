"""Turns of trainer and engine on shared devices: offload the trainer, push weights, generate, release the engine.

On a GPU the order keeps peak memory low: first everything that only training needs is offloaded; the engine allocates
its weights and they are pushed; then the trainer's weights are offloaded, and only then the engine allocates its cache.
On a CPU, and on separate GPUs (`rollout.sglang.first_gpu`), both stay in memory; only turns and memory are recorded.

A turn that fails writes logs/post_mortem-rank-N.json in the run directory, which its error names.
"""

from __future__ import annotations

import json
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from grpo_mega.colocation.lease import Lease, Owner, State
from grpo_mega.colocation.ledger import Ledger, meter
from grpo_mega.colocation.offload import TrainerMemory
from grpo_mega.colocation.sync import WeightSync
from grpo_mega.config.schema import SGLangConfig
from grpo_mega.models.model import Model
from grpo_mega.models.policy import Policy
from grpo_mega.models.reference import ReferencePolicy
from grpo_mega.observe.timer import PhaseTimer
from grpo_mega.platform.files import write_atomic
from grpo_mega.platform.stop import Interrupted
from grpo_mega.rollout.contract import TAGS, EngineError, EngineRestarted
from grpo_mega.rollout.engine import Engine
from grpo_mega.rollout.sglang.arguments import suspends, take_turns

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

TOLERANCE = 512 * 2**20
"""Bytes of a device that a process may keep of the memory it must release, and by which its memory at rest may grow:
libraries load kernels and allocate workspaces on first use."""
PATIENCE = 30.0
"""Seconds within which freed memory must be reported as free."""


class Colocation:
    """Turns of trainer and engine on this rank's device, and the transitions between them: the `EngineAccess` of an
    engine that holds a copy of the weights."""

    def __init__(
        self,
        policy: Policy,
        others: Sequence[Model | ReferencePolicy],
        engine: Engine,
        config: SGLangConfig,
        timer: PhaseTimer,
        text: Sequence[int],
        path: Path,
    ) -> None:
        """Starts with the trainer's turn.

        `others` are the models that are offloaded together with the policy; `text` is used to verify weights of
        engines, see `WeightSync`; `path` is the run directory.
        """
        device = policy.platform.device
        self._engine, self._timer = engine, timer
        self._weights = WeightSync(policy, engine, config.bucket_bytes, config.verify_every, text, config.fp8)
        self._verified: float | None = None
        self._outdated = False
        self._memory: TrainerMemory | None = None
        if take_turns(config, policy.platform):
            self._memory = TrainerMemory([policy, *others], suspends(config))
            if config.suspend_process_groups and not suspends(config):
                logger.warning(
                    "what NCCL holds stays on the GPUs while the engines have them: torch %s with NCCL %s cannot give "
                    "it back; torch 2.12 with NCCL 2.29.7 can",
                    torch.__version__,
                    ".".join(map(str, torch.cuda.nccl.version())),
                )
        self._file = path / "logs" / f"post_mortem-rank-{dist.get_rank()}.json"
        self.ledger = Ledger(lambda: meter(device, {"trainer": [os.getpid()], "engine": engine.pids()})())
        self.lease = Lease(config.timeouts, time.monotonic)

    def generate(self, version: int, phase: str, work: Callable[[], Result]) -> Result:
        """Runs `work` on the engine with the weights of `version`, as the timer's `phase`; then restores the trainer.
        An engine that is generating keeps the weights that it has.

        Changing turns is the phase "sync". An engine that is lost meanwhile gets new weights, and `work` is repeated.

        Raises:
            LeaseError: A state lasted too long.
            MemoryNotReturned: The trainer or the engine kept memory that the other needs.
            EngineError: An engine failed for good; see `Engine`.
            Interrupted: `work` was interrupted.
        """
        while True:
            try:
                with self._recorded(), self._timer("sync"):
                    self._to_engine(version)
                with self._timer(phase), self._recorded():
                    result = work()
            except EngineRestarted as lost:
                self._forfeit(lost)
                self._back()
            except (EngineError, Interrupted):
                # Raised on all ranks, which therefore restore the trainer, and its process groups, together. Any other
                # error may have hit one rank alone: waiting for the others would hang, so the run ends instead.
                self._back()
                raise
            else:
                self._back()
                return result

    def _back(self) -> None:
        with self._recorded(), self._timer("sync"):
            self._to_trainer()

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Context that writes a post-mortem when an error is about to end the run."""
        try:
            yield
        # The run survives these two, so there is nothing to explain.
        except (EngineRestarted, Interrupted):
            raise
        except Exception as error:
            record = {"error": "".join(traceback.format_exception(error))} | self.post_mortem()
            try:
                write_atomic(self._file, json.dumps(record, indent=1))
            except OSError as failure:
                error.add_note(f"its post-mortem could not be written: {failure}")
            else:
                error.add_note(f"whose turn it was, and who held how much memory: {self._file}")
            raise

    def _forfeit(self, lost: EngineRestarted) -> None:
        logger.warning("%s\nit was restarted, and generates the samples that are missing", lost)
        self.lease.forfeit("it was lost")
        self.ledger.forget("engine")
        self._weights.start_anew()

    def outdate(self) -> None:
        """Marks the engine's weights as outdated, to be pushed before the next work even with the same version."""
        self._outdated = True

    def metrics(self) -> dict[str, float]:
        """Bytes moved since the last call, and the result of the weight check if there was one, for the log."""
        verified, self._verified = self._verified, None
        checked = {} if verified is None else {"sync/mean_abs": verified}
        return {"sync/bytes": self._weights.take_traffic().bytes, **checked}

    def post_mortem(self) -> dict[str, Any]:
        """Owner of the device, last transitions, and memory of each holder."""
        return self.lease.post_mortem() | {"memory": self.ledger.table().splitlines()}

    def _to_engine(self, version: int) -> None:
        self.ledger.mark("trainer's turn ends")
        self.lease.to(State.TRAINER_RELEASING)
        # In this order the peak is the larger of trainer and engine, plus one copy of the weights: while they are
        # pushed, both hold them, and neither the optimizer nor the KV cache is on the device.
        self._leave(keep_weights=True)
        self.lease.to(State.ENGINE_RESUMING_WEIGHTS)
        if self._memory:
            self._engine.resume(["weights"])
        self.lease.to(State.ENGINE_LOADING)
        expected = None
        # An engine that is still generating keeps the weights that it has.
        if not self._engine.busy and (self._engine.version != version or self._outdated):
            self._weights.send(version, self.lease.check)
            self._outdated = False
            expected = self._weights.expected()
        self._leave(keep_weights=False)
        self.lease.to(State.ENGINE_RESUMING_CACHE)
        if self._memory:
            self._engine.resume(["kv_cache", "cuda_graph"])
        self.lease.to(State.GENERATING)
        # Only now the engine has a cache to compute log-probs with; the trainer's were computed before it left.
        if expected:
            self._verified = self._weights.verify(expected)

    def _leave(self, keep_weights: bool) -> None:
        """Offloads the trainer, or the rest of it; checks with torch and the driver that its memory was released.

        CUDA's own memory stays, and the amount that NCCL can release is unknown, so neither is checked.
        """
        if self._memory is None:
            return
        due = self._memory.leaving(keep_weights)
        everywhere = dict.fromkeys(("allocated", "reserved", "device"), due)
        with self.ledger.release("trainer leaves", everywhere, TOLERANCE, PATIENCE):
            self._memory.offload(keep_weights)

    def _to_trainer(self) -> None:
        """Returns the device to the trainer, from any state of the engine's turn."""
        if self.lease.state is State.TRAINING:
            return
        self.ledger.mark("engine's turn ends")
        if self.lease.owner is Owner.ENGINE:
            self._engine_leaves()
        if self._memory and self._memory.away:
            self._memory.onload()
        self.lease.to(State.TRAINING)

    def _engine_leaves(self) -> None:
        """Releases the engine's memory and gives the device to the trainer."""
        if self.lease.state is not State.GENERATING:
            self.lease.forfeit("it failed before it could generate")
            return
        self.lease.to(State.ENGINE_RELEASING)
        try:
            if self._memory:
                self._engine.release([*TAGS])
        except EngineRestarted as lost:  # the new engine holds nothing, and the samples are complete
            self._forfeit(lost)
            return
        if self._memory:
            self.ledger.at_rest("engine has left", "engine", TOLERANCE, PATIENCE)
        self.lease.to(State.TRAINER_ACQUIRING)

"""Life cycle of a job's SGLang engines: started, called by their owners, restarted when one is lost.

Every rank takes part in every call. When work fails on one rank, all ranks raise the error, so that no rank is left
waiting in a collective; when the failures are lost engines, these are restarted first.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from grpo_mega.config.schema import ModelConfig, RolloutConfig
from grpo_mega.platform import Platform, trace
from grpo_mega.platform.files import write_atomic
from grpo_mega.rollout.contract import TAGS, Contract, EngineError, EngineRestarted
from grpo_mega.rollout.sglang.arguments import (
    attention_copies,
    check_platform,
    environment,
    expected_weights,
    free_port,
    model_config,
    own_address,
    own_experts,
    server_arguments,
    take_turns,
)
from grpo_mega.rollout.sglang.memory import mem_fraction_static
from grpo_mega.rollout.sglang.process import EngineLost, EngineProcess
from grpo_mega.rollout.sglang.ranks import ranks_of_engines
from grpo_mega.rollout.sglang.requests import ROW
from grpo_mega.rollout.sglang.transport import Disk, Network, Shared, Transport

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Engines:
    """All engines of a job, seen from one rank, which shares one of them with the ranks of its group.

    Attributes:
        model, config: Settings of the model and of SGLang.
        ranks: The ranks that share each engine, host its processes and own it.
        transport: Transport of weights to this rank's engine.
        contract: State of the engines; a restart resets it.
        process: Engine process that this rank hosts; None on a rank that hosts none.
        pids: Process ids of this rank's engine on this node.
    """

    def __init__(
        self, model: ModelConfig, rollout: RolloutConfig, seed: int, vocab_size: int, platform: Platform, path: Path
    ) -> None:
        """Starts all engines, without weights; on a GPU shared with the trainer their memory is released at once.

        Args:
            model, rollout: Sections of the run's configuration.
            seed: The run's seed.
            vocab_size: Vocabulary size of the tokenizer.
            platform: Platform of the trainer.
            path: The run directory: engine logs go to logs/, model directories to engine-N/.

        Raises:
            InputError: The model has no Hugging Face equivalent, an engine would have a part of a node, or there are
                not enough GPUs.
            EngineError: An engine did not start.
        """
        sglang = rollout.sglang
        check_platform(rollout, platform)
        self.model, self.config, self._platform, self._path = model, sglang, platform, path
        # Who takes part, and how weights travel. The process groups are created by all ranks together.
        self.ranks = ranks_of_engines(sglang.tp)
        description = model_config(model, sglang.fp8, vocab_size)
        self.transport = self._make_transport(description, model.moe.experts)
        expected = expected_weights(model, sglang.fp8, vocab_size, self.transport.experts_of)
        self.contract = Contract(lambda: expected, has_weights=False)
        folder = path / f"engine-{self.ranks.engine}"
        if self.ranks.owns:
            folder.mkdir(exist_ok=True)
            write_atomic(folder / "config.json", json.dumps(description, indent=1))
        # Different for every engine of a run, and for runs of different seeds with equally many engines.
        of_engine = seed * len(self.ranks.members) + self.ranks.engine
        self._arguments = server_arguments(sglang, model.dtype, platform, folder, of_engine)
        self._arguments |= {"nnodes": self.ranks.nodes, "node_rank": self.ranks.node}
        self.process: EngineProcess | None = None
        self._connected = False
        self.pids: list[int] = []
        self._restarts = 0
        # Memory that an engine does not hold outside its turn, and so not after its start either.
        self._at_rest = TAGS if take_turns(sglang, platform) else ()
        self._start_engines(own_engine=True)

    def close(self) -> None:
        """Ends the processes hosted by this rank; ranks may call it at different times."""
        self.transport.close()
        if self.process:
            self.process.end()
            self.process = None
        self.pids = []

    def ask(self, method: str, **arguments: Any) -> Any:
        """Sends a request to the engine and returns its answer; for owners of an engine. See `EngineProcess.ask`."""
        return self._ask_within(self.config.answer_seconds, method, **arguments)

    def _ask_within(self, seconds: float, method: str, **arguments: Any) -> Any:
        assert self.process, "the engine is closed"
        with trace.beside(ROW, method):
            return self.process.ask(method, seconds, **arguments)

    def on_owners(self, work: Callable[[], Result]) -> list[Result | None]:
        """Runs `work` on ranks that own an engine; returns the results by rank, None for others.

        Raises:
            EngineError, EngineRestarted: `work` failed on some rank; see `raise_together`.
        """
        return self._on_some(self.ranks.owns, work)

    def on_all(self, work: Callable[[], Result]) -> list[Result | None]:
        """Runs `work` on every rank; returns the results by rank.

        Raises:
            EngineError, EngineRestarted: `work` failed on some rank; see `raise_together`.
        """
        return self._on_some(True, work)

    def raise_together(self, failure: EngineError | None) -> None:
        """Raises the failures of all ranks on every rank; returns when there are none.

        Raises:
            EngineRestarted: On every rank. All failures were lost engines, which have been restarted.
            EngineError: On every rank. There was another failure, or engines were lost too often.
        """
        self._gather(None, failure)

    def _on_some(self, runs_here: bool, work: Callable[[], Result]) -> list[Result | None]:
        """Runs `work` on ranks that pass `runs_here`; returns the results by rank, None for others."""
        return self._gather(*(attempt(work) if runs_here else (None, None)))

    def _gather(self, result: Result, failure: EngineError | None) -> list[Result]:
        """Gathers the results of all ranks, by rank; raises on all when one has a failure, see `raise_together`."""
        gathered = self.ranks.gather((result, failure))
        self._restart_and_raise([failure for _, failure in gathered])
        return [result for result, _ in gathered]

    def _restart_and_raise(self, failures: Sequence[EngineError | None]) -> None:
        """Raises the failures of all ranks, if any; restarts engines first if all failures are lost engines."""
        raised = [failure for failure in failures if failure]
        if not raised:
            return
        # Several ranks may report the same failure.
        message = "\n".join(dict.fromkeys(map(str, raised)))
        # A refusal would be repeated by a new engine, so only losses are answered by a restart.
        if not all(isinstance(failure, EngineLost) for failure in raised):
            raise EngineError(message)
        # Every rank has gathered the same failures, so all count alike and give up together.
        self._restarts += 1
        if self._restarts > self.config.restarts:
            raise EngineError(f"{message}\nit was lost more than rollout.sglang.restarts={self.config.restarts} times")
        self._start_engines(own_engine=any(failures[rank] for rank in self.ranks.of_engine))
        raise EngineRestarted(message)

    def _start_engines(self, own_engine: bool) -> None:
        """Starts engines, without weights; every rank must call it.

        An engine that is lost while it starts is started once more: `_gather` calls this again, `restarts` times at
        most. `own_engine` says whether this rank's engine is among those to start.
        """
        if own_engine:
            # Only one part of the engine may have died; those on other nodes are still running.
            self.close()
            self._connected = False
            # Reset now rather than at the end: should another engine fail to start, this method runs again, and
            # `_release_held` must not release memory that this engine has released at its start.
            self.contract.reset(self._at_rest)
        # Every rank waits here for all others, so that all see the config.json that the engine's owner has written.
        conditions = self.on_all(self._start_conditions)
        of_engine = [conditions[rank] for rank in self.ranks.of_engine]
        self._on_some(self.ranks.hosts, lambda: self._start(of_engine) if own_engine else self._release_held())
        pids = self._on_some(self.ranks.hosts, lambda: self.process.facts["pids"] if self.process else [])
        self.pids = pids[self.ranks.host] or []
        # Connects the transports. `own_engine` does not tell which need it: an engine that was restarted in an attempt
        # that failed because of another one is not connected either.
        unconnected = not self._connected
        addresses = self._on_some(self.ranks.owns and unconnected, self.transport.opened)
        self._on_some(unconnected, lambda: self._connect(addresses[self.ranks.of_engine[0]]))
        self.contract.reset(self._at_rest)

    def _connect(self, address: Any) -> None:
        self.transport.connect(address)
        self._connected = True

    def _start_conditions(self) -> dict[str, Any]:
        """What an engine's start depends on: a free port where its parts can meet, and free GPU memory.

        SGLang by itself chooses a port seconds before it listens there, and another program may take it meanwhile.
        """
        conditions: dict[str, Any] = {}
        if self.ranks.owns:
            conditions["port"] = free_port()
            conditions["host"] = own_address() if self.ranks.nodes > 1 else "127.0.0.1"
        if take_turns(self.config, self._platform) and "mem_fraction_static" not in self.config.arguments:
            # Blocks that torch's allocator caches would count as used.
            torch.cuda.empty_cache()
            conditions["memory"] = torch.cuda.mem_get_info(self._platform.device)
        return conditions

    def _common_arguments(self, of_engine: list[Any]) -> dict[str, Any]:
        """Server arguments that all parts of an engine must share; its fullest GPU decides for all.

        `of_engine` has the `_start_conditions` of each of the engine's ranks.
        """
        port = of_engine[0]["port"]
        arguments: dict[str, Any] = {"nccl_port": port}
        # Data parallel attention needs ports on one node as well; without an address all engines would use the same.
        if self.ranks.nodes > 1 or attention_copies(self.config) > 1:
            arguments = {"dist_init_addr": f"{of_engine[0]['host']}:{port}"}
        if "memory" in of_engine[0]:
            free, capacity = map(min, zip(*(conditions["memory"] for conditions in of_engine), strict=True))
            arguments["mem_fraction_static"] = mem_fraction_static(self.config, free, capacity)
        return arguments

    def _start(self, of_engine: list[Any]) -> None:
        """Starts the part of the engine that this rank hosts; `of_engine` as in `_common_arguments`."""
        ranks = self.ranks.of_engine
        first, last = ranks[0], ranks[-1]
        name = f"engine-{self.ranks.engine}" + (f"-node-{self.ranks.node}" if self.ranks.node else "")
        with trace.beside(ROW, "start"):
            self.process = EngineProcess(
                f"the SGLang engine of rank{f's {first} to {last}' if last > first else f' {first}'}",
                self._arguments | self._common_arguments(of_engine),
                self._path / "logs" / f"{name}.log",
                environment(self.config, self._platform),
                self.config.start_seconds,
            )
        if self.ranks.owns and self._at_rest:
            self.ask("release", tags=[*self._at_rest])

    def _release_held(self) -> None:
        """Releases the memory that the engine still holds and must not hold at rest."""
        held = [tag for tag in self._at_rest if tag not in self.contract.released]
        if self.ranks.owns and held:
            self.ask("release", tags=held)

    def _make_transport(self, description: dict[str, Any], number_of_experts: int) -> Transport:
        """Creates the transport of weights from this rank to its engine, whose config.json is `description`."""
        ranks, tp = self.ranks, self.config.tp
        experts = [own_experts(self.config, number_of_experts, rank) for rank in range(tp)]
        if self.config.transport == "network":
            seconds = self.config.answer_seconds
            return Network(self.ask, experts[ranks.engine_rank], self._platform, ranks.engine_rank, tp, seconds)
        if self.config.transport == "disk":
            # One request makes the engine read the whole model, for which `answer_seconds` would be too short.
            ask = partial(self._ask_within, self.config.timeouts.engine_loading)
            folder, writes = self._path / "engine-weights", dist.get_rank() == 0
            return Disk(ask, ranks.owns, writes, folder, description, experts)
        return Shared(self.ask, ranks.owns, experts[ranks.engine_rank])


def attempt(work: Callable[[], Result]) -> tuple[Result | None, EngineError | None]:
    """(the result of `work`, None), or (None, its error) for `Engines.raise_together`."""
    try:
        return work(), None
    except EngineError as error:
        return None, error
    # Any other error is also shared, because it has hit this rank alone: raised here, it would leave all others waiting
    # in the collective that follows.
    except Exception as error:
        logger.exception("the engine's rank failed")
        return None, EngineError(f"rank {dist.get_rank()}: {type(error).__name__}: {error}")

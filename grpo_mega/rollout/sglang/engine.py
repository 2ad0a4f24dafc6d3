"""Generation in SGLang engines: each serves a group of ranks, and together they share out the prompts.

`rollout.sglang.tp` consecutive ranks form a group, of a node or of several whole ones. The first of them on each node
hosts the engine's process there (`process.py`), the first of all owns the engine and talks to it, the others
take part in the collectives only. All ranks stay together: what one engine refuses, or that it was lost, is raised on
every rank.

The log-probs that SGLang returns are those under the softmax of logits / temperature before top-k and top-p, as
`Sample` wants them; SGLANG_RETURN_ORIGINAL_LOGPROB would change that and is turned off. SGLang cannot take our noise: a
sample comes again only with the server argument enable_deterministic_inference, on the same hardware and release.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from grpo_mega.config.schema import Config
from grpo_mega.platform import Platform
from grpo_mega.platform.stop import Interrupted
from grpo_mega.rollout.completions import Completion, check, from_all_ranks, routed
from grpo_mega.rollout.contract import TAGS, Contract, EngineError, EngineRestarted
from grpo_mega.rollout.engine import SamplingParams, by_prompt, without_stop
from grpo_mega.rollout.pool import Pool, Wanted
from grpo_mega.rollout.producer import generate
from grpo_mega.rollout.sampling import prompt_key
from grpo_mega.rollout.sglang.arguments import (
    attention_copies,
    check_platform,
    environment,
    expected_weights,
    free_address,
    model_config,
    own_address,
    own_experts,
    server_arguments,
    take_turns,
    write_model,
)
from grpo_mega.rollout.sglang.generation import Generation
from grpo_mega.rollout.sglang.memory import mem_fraction_static
from grpo_mega.rollout.sglang.process import EngineLost, EngineProcess
from grpo_mega.rollout.sglang.ranks import ranks_of_engines
from grpo_mega.rollout.sglang.transport import Bucket, Disk, Network, Shared, Transport
from grpo_mega.types import Prompt, Sample
from grpo_mega.weights import fp8

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

SECONDS_PER_POLL = 0.25
"""How long a poll waits for samples, at most."""


class SGLangEngine:
    """SGLang engines of a whole job; see `Engine`."""

    def __init__(
        self, config: Config, vocab_size: int, platform: Platform, decode: Callable[[Sequence[int]], str], path: Path
    ) -> None:
        """Starts the engines, without weights; on a GPU their memory is released at once.

        Args:
            config: The run's configuration.
            vocab_size: The tokenizer's.
            platform: Where the trainer computes.
            decode: Turns token ids into text.
            path: The run directory: the engines' logs go into its logs/, what they start from into engine-N/.

        Raises:
            ValueError: No Hugging Face model describes this one, an engine would have a part of a node, or there are
                not the GPUs.
            EngineError: An engine did not start.
        """
        check_platform(config, platform)
        self._config, self._platform, self._decode, self._path = config.rollout.sglang, platform, decode, path
        self._run = config
        self._ranks = ranks_of_engines(self._config.tp)
        self._transport = self._make_transport(config, vocab_size)
        self.experts_of = self._transport.experts_of
        expected = expected_weights(config, vocab_size, self.experts_of)
        self._contract = Contract(lambda: expected, has_weights=False)
        folder = path / f"engine-{self._ranks.engine}"
        if self._ranks.owns:
            write_model(folder, config, vocab_size)
        self._arguments = server_arguments(config, platform, folder, self._ranks.engine, len(self._ranks.members))
        self._arguments |= {"nnodes": self._ranks.nodes, "node_rank": self._ranks.node}
        self._process: EngineProcess | None = None
        self._connected = False
        self._pids: list[int] = []
        self._restarts = 0
        self._at_rest = TAGS if take_turns(config.rollout.sglang, platform) else ()
        self._submitted = self._prompts = 0
        self._under_way: dict[int, tuple[Prompt, int, int]] = {}  # number -> prompt, index, version
        self._generation: Generation | None = None  # while samples are under way
        self._aborted = self._failing = False
        self._kept: tuple[Any, Pool] | None = None  # what `generate` was asked for, and what it had, when it was lost
        self._start_engines(mine=True)

    @property
    def version(self) -> int | None:
        """Policy version of the weights that the engines have; None before the first push, or when they are gone."""
        return self._contract.version

    def pids(self) -> list[int]:
        """The processes of its engine on this node."""
        return [*self._pids]

    @property
    def busy(self) -> bool:
        """Whether samples are under way."""
        return self._contract.busy

    def submit(self, wanted: Sequence[Wanted], sampling: SamplingParams, version: int) -> None:
        """Has the engines generate these samples, prompt by prompt in turn; see `Engine`."""
        idle = not self.busy
        self._contract.submit(version, len(wanted))
        if idle:
            self._aborted, self._failing, self._prompts = False, False, 0
            limits = self._config.silence_seconds, self._config.answer_seconds
            self._generation = Generation(self._process, self._completion, *limits)
        requests: dict[int, dict[str, Any]] = {}
        for group in by_prompt(wanted):
            mine = self._ranks.owns and self._prompts % len(self._ranks.members) == self._ranks.engine
            for prompt, index in group:
                self._under_way[self._submitted] = (prompt, index, version)
                if mine:
                    requests[self._submitted] = self._request(prompt, index, sampling, version)
                self._submitted += 1
            self._prompts += 1
        if self._generation and not self._failing:  # else they are dropped when the failure is raised
            self._generation.send(requests)

    def poll(self, interrupted: bool = False) -> list[Sample]:
        """Waits a moment for the engines, and brings what has arrived at any rank to all of them; see `Engine`.

        Raises:
            Interrupted: `interrupted` held on some rank; all requests were aborted.
            EngineRestarted: An engine was lost. Raised when the others have finished what they were sent.
            EngineError: It was lost too often, or failed otherwise.
        """
        self._contract.poll()
        try:
            finished = self._finished(interrupted)
        except BaseException:
            self._under_way.clear()
            self._contract.drop()
            raise
        samples = [_sample(*self._under_way.pop(number), finished[number]) for number in sorted(finished)]
        self._contract.hand_out(len(samples))
        return samples

    def abort(self) -> None:
        """Ends all that is under way, at the next poll; see `Engine`."""
        self._aborted = True

    def generate(
        self,
        prompts: list[Prompt],
        group_size: int,
        sampling: SamplingParams,
        version: int,
        interrupted: Callable[[], bool] | None = None,
    ) -> list[Sample]:
        """`group_size` samples of every prompt, prompt by prompt; the same list on every rank.

        Raises:
            Interrupted: `interrupted` held on some rank; all requests were aborted.
            EngineRestarted: An engine was lost; push, and ask for the same again. What was finished is kept.
            EngineError: It was lost too often, or failed otherwise.
        """
        asked = ([prompt.id for prompt in prompts], group_size, sampling, version)
        pool = self._kept[1] if self._kept and self._kept[0] == asked else Pool(group_size, prompts)
        try:
            samples = generate(self, pool, sampling, version, interrupted)
        except EngineRestarted:
            self._kept = (asked, pool)
            raise
        self._kept = None
        return samples

    def scores(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """Log-prob of every token but the first, as each of the engines, and each rank of its attention, sees it."""
        copies = attention_copies(self._config)
        self._contract.scores()
        found = self._on_owners(lambda: self._ask("score", token_ids=[*token_ids], copies=copies))
        return {
            f"engine {number}" + (f" (attention rank {copy})" if copies > 1 else ""): logprobs
            for number, of_engine in enumerate(of_engine for of_engine in found if of_engine is not None)
            for copy, logprobs in enumerate(of_engine)
        }

    def begin_update(self) -> None:
        """Opens a session in which all weights are replaced."""
        self._contract.begin_update()
        self._on_owners(self._transport.begin)

    def push(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Replaces some weights, of the routed experts those that are this rank's; they may be dropped afterwards."""
        if self._config.fp8:
            bucket = fp8.quantised_bucket(bucket)
        refusal = _refusal(lambda: self._contract.check_push(bucket))
        gathered: list = [None] * self._config.tp
        with self._transport.offered([] if refusal else bucket) as mine:
            dist.all_gather_object(gathered, (refusal, mine), group=self._ranks.group)
            self._on_all(lambda: self._push(bucket, gathered))
        self._contract.push(bucket)

    def end_update(self, version: int) -> None:
        """Closes the session; what was cached with the old weights is forgotten."""
        self._on_all(lambda: self._contract.check_end_update(version))
        self._on_owners(self._transport.complete)
        self._on_owners(self._transport.end)
        self._contract.end_update(version)

    def release(self, tags: Collection[str]) -> None:
        """Gives memory back; without the server argument enable_memory_saver SGLang keeps it."""
        self._contract.release(tags)
        self._on_owners(lambda: self._ask("release", tags=[*tags]))

    def resume(self, tags: Collection[str]) -> None:
        """Takes released memory again."""
        self._contract.resume(tags)
        self._on_owners(lambda: self._ask("resume", tags=[*tags]))

    def close(self) -> None:
        """Ends what this rank hosts; ranks may call it whenever they like."""
        self._transport.close()
        if self._process:
            self._process.end()
            self._process = None
        self._pids = []

    def _finished(self, interrupted: bool) -> dict[int, Completion]:
        """What has arrived at any rank, once this rank has waited a moment for its engine; number -> completion."""
        assert self._generation, "samples are under way"
        generation, aborted = self._generation, self._aborted
        if aborted:
            self._aborted = False
        generation.listen(SECONDS_PER_POLL)
        given_up, ended, arrived, at_work, self._failing = self._ranks.any(
            [
                interrupted,
                aborted or generation.refused,
                bool(generation.finished),
                generation.at_work,
                generation.failure is not None,
            ]
        )
        if given_up or ended:
            generation.abort()
        if given_up:
            while self._ranks.any([generation.at_work])[0]:
                generation.listen(SECONDS_PER_POLL)
            raise Interrupted
        if self._failing and not (arrived or at_work):
            self._gather(None, generation.failure)
        if not arrived:
            return {}
        mine, generation.finished = generation.finished, {}
        return from_all_ranks(mine, self._ranks.everyone)

    def _make_transport(self, config: Config, vocab_size: int) -> Transport:
        """How weights reach the engine of this group from this rank."""
        place, experts = self._ranks.place, [own_experts(config, rank) for rank in range(self._config.tp)]
        if self._config.transport == "network":
            seconds = self._config.answer_seconds
            return Network(self._ask, experts[place], self._platform, place, self._config.tp, seconds)
        if self._config.transport == "disk":
            ask = partial(self._ask_within, self._config.timeouts.engine_loading)  # one request reads the whole model
            folder, writes = self._path / "engine-weights", dist.get_rank() == 0
            return Disk(ask, self._ranks.owns, writes, folder, model_config(config, vocab_size), experts)
        return Shared(self._ask, self._ranks.owns, experts[place])

    def _push(self, bucket: Bucket, gathered: list[tuple[EngineError | None, Any]]) -> None:
        """A bucket to the engine, unless one of its ranks refuses."""
        for refusal, _ in gathered:
            if refusal:
                raise refusal
        self._transport.push(bucket, [offer for _, offer in gathered])

    def _start_engines(self, mine: bool) -> None:
        """Starts engines, without weights; every rank must call it.

        An engine that is lost while it starts is started once more, by a call of this from `_gather`; `restarts` bounds
        that. `mine`: whether the engine of this rank's group is among those to start.
        """
        if mine:
            self.close()  # of an engine that was lost on another node
            self._connected = False
            self._contract.start_anew(self._at_rest)  # now: should another one fail, this one is not released twice
        # Every rank waits here for all others, so that what the first rank has written is there for all.
        conditions = self._on_all(self._start_conditions)
        of_group = [conditions[rank] for rank in self._ranks.mine]
        self._on_some(self._ranks.hosts, lambda: self._start(of_group) if mine else self._release_held())
        pids = self._on_some(self._ranks.hosts, lambda: self._process.facts["pids"] if self._process else [])
        self._pids = pids[self._ranks.hosting] or []
        alone = not self._connected  # also when it was lost with another one, which did not start
        opened = self._on_some(self._ranks.owns and alone, self._transport.opened)
        self._on_some(alone, lambda: self._connect(opened[self._ranks.mine[0]]))
        self._contract.start_anew(self._at_rest)

    def _connect(self, where: Any) -> None:
        self._transport.connect(where)
        self._connected = True

    def _start_conditions(self) -> dict[str, Any]:
        """What the start of an engine depends on: where its parts can meet, if it is this rank's, and free GPU memory.

        Data parallel attention meets on ports on one node, too, and those are the same for all engines if not given.
        """
        conditions: dict[str, Any] = {}
        if self._ranks.owns and (self._ranks.nodes > 1 or attention_copies(self._config) > 1):
            conditions["address"] = free_address(own_address() if self._ranks.nodes > 1 else "127.0.0.1")
        if take_turns(self._config, self._platform) and "mem_fraction_static" not in self._config.arguments:
            torch.cuda.empty_cache()
            conditions["memory"] = torch.cuda.mem_get_info(self._platform.device)
        return conditions

    def _agreed(self, of_group: list[Any]) -> dict[str, Any]:
        """Server arguments that all parts of an engine must have alike; its fullest GPU decides for all."""
        arguments: dict[str, Any] = {}
        if "address" in of_group[0]:
            arguments["dist_init_addr"] = of_group[0]["address"]
        if "memory" in of_group[0]:
            free, capacity = map(min, zip(*(conditions["memory"] for conditions in of_group), strict=True))
            arguments["mem_fraction_static"] = mem_fraction_static(self._run, free, capacity)
        return arguments

    def _start(self, of_group: list[Any]) -> None:
        """Starts the part of the engine that this rank hosts."""
        ranks = self._ranks.mine
        first, last = ranks[0], ranks[-1]
        name = f"engine-{self._ranks.engine}" + (f"-node-{self._ranks.node}" if self._ranks.node else "")
        self._process = EngineProcess(
            f"the SGLang engine of rank{f's {first} to {last}' if last > first else f' {first}'}",
            self._arguments | self._agreed(of_group),
            self._path / "logs" / f"{name}.log",
            environment(self._config, self._platform),
            self._config.start_seconds,
        )
        if self._ranks.owns and self._at_rest:
            self._ask("release", tags=[*self._at_rest])

    def _release_held(self) -> None:
        """Releases the memory that the engine still holds and would not hold at rest."""
        held = [tag for tag in self._at_rest if tag not in self._contract.released]
        if self._ranks.owns and held:
            self._ask("release", tags=held)

    def _ask(self, method: str, **arguments: Any) -> Any:
        return self._ask_within(self._config.answer_seconds, method, **arguments)

    def _ask_within(self, seconds: float, method: str, **arguments: Any) -> Any:
        assert self._process, "the engine is closed"
        return self._process.ask(method, seconds, **arguments)

    def _on_owners(self, work: Callable[[], Result]) -> list[Result | None]:
        """The result of `work` on every rank that owns an engine, None elsewhere; fails on all ranks when one fails."""
        return self._on_some(self._ranks.owns, work)

    def _on_all(self, work: Callable[[], Result]) -> list[Result | None]:
        """The result of `work` on every rank; fails on all ranks when one fails."""
        return self._on_some(True, work)

    def _on_some(self, here: bool, work: Callable[[], Result]) -> list[Result | None]:
        """The result of `work` on every rank that calls this with `here`, None elsewhere; every rank must call it.

        When it fails on one rank it fails on all, so that no rank is left waiting; see `_gather`.
        """
        result, failure = None, None
        if here:
            try:
                result = work()
            except EngineError as error:
                failure = error
            except Exception as error:
                logger.exception("the engine's rank failed")
                failure = EngineError(f"rank {dist.get_rank()}: {type(error).__name__}: {error}")
        return self._gather(result, failure)

    def _gather(self, mine: Result, failure: EngineError | None) -> list[Result]:
        """What every rank has, by rank; every rank must call it.

        When one has a failure it is raised on all, and engines that were lost are started anew before.
        """
        everyone = self._ranks.gather((mine, failure))
        self._restart_and_raise([failure for _, failure in everyone])
        return [theirs for theirs, _ in everyone]

    def _restart_and_raise(self, failures: Sequence[EngineError | None]) -> None:
        """Starts lost engines anew, if all failures are such, then raises what went wrong, if something did."""
        raised = [failure for failure in failures if failure]
        if not raised:
            return
        message = "\n".join(dict.fromkeys(map(str, raised)))  # of several ranks that say the same, one
        if not all(isinstance(failure, EngineLost) for failure in raised):
            raise EngineError(message)
        self._restarts += 1
        if self._restarts > self._config.restarts:
            raise EngineError(f"{message}\nit was lost more than rollout.sglang.restarts={self._config.restarts} times")
        self._start_engines(mine=any(failures[rank] for rank in self._ranks.mine))
        raise EngineRestarted(message)

    def _request(self, prompt: Prompt, index: int, sampling: SamplingParams, version: int) -> dict[str, Any]:
        """SGLang's arguments for one sample."""
        parameters = {
            "max_new_tokens": min(sampling.max_new_tokens, self._run.model.context - len(prompt.token_ids)),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "stop_token_ids": [*sampling.stop_ids],
            # Read in SGLang's deterministic mode only, which would make all samples of a prompt the same without it.
            "sampling_seed": prompt_key(f"{sampling.seed} {version} {prompt.id} {index}") & 0x7FFFFFFF,
        }
        experts = {"return_routed_experts": True} if self._config.routing_replay else {}
        return {"input_ids": [*prompt.token_ids], "sampling_params": parameters, **experts}

    def _completion(
        self, number: int, token_ids: list[int], logprobs: list[float], reason: str, experts: np.ndarray | None
    ) -> Completion:
        """What SGLang says of the sample of this number, checked.

        Raises:
            EngineError: It cannot be trained on.
        """
        check(token_ids, logprobs)
        text, chosen = self._decode(without_stop(token_ids, reason)), None
        unknown = reason == "abort" and experts is None  # it had been given up, and waited to be computed anew
        if self._config.routing_replay and token_ids and not unknown:
            prompt, *_ = self._under_way[number]
            chosen = routed(experts, len(prompt.token_ids) + len(token_ids) - 1, self._run.model)
        return Completion(tuple(token_ids), tuple(logprobs), reason, text, chosen)


def _sample(prompt: Prompt, index: int, version: int, completion: Completion) -> Sample:
    """The sample of a prompt that is this completion."""
    tokens, logprobs, reason, text, experts = completion
    return Sample(prompt, index, tokens, logprobs, reason, ((0, version),), text, experts)


def _refusal(check: Callable[[], None]) -> EngineError | None:
    """What `check` refuses, for the other ranks."""
    try:
        check()
    except EngineError as error:
        return error
    return None

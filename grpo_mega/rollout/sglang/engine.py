"""SGLang engines of a job: each serves a group of ranks, and the prompts are split between engines.

`rollout.sglang.tp` consecutive ranks form a group, of one node or of several whole ones. The first of them on each node
hosts the engine's process there (`process.py`), the first of all owns the engine and talks to it (`lifecycle.py`). The
owner distributes finished samples round-robin over the ranks of the group, which hold them. All ranks stay in step: a
refusal or loss of one engine is raised on every rank.

The log-probs that SGLang returns are those under the softmax of logits / temperature before top-k and top-p, as
`Sample` requires; SGLANG_RETURN_ORIGINAL_LOGPROB would change that and is turned off. SGLang cannot use the noise of
`sampling.py`: a sample is reproducible only with the server argument enable_deterministic_inference, on the same
hardware and release.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist

from grpo_mega.platform.stop import Interrupted
from grpo_mega.rollout.contract import EngineError
from grpo_mega.rollout.engine import SLICE, Finished, Places, SamplingParams, Wanted, by_prompt, round_robin
from grpo_mega.rollout.sampling import prompt_key
from grpo_mega.rollout.sglang.arguments import attention_copies
from grpo_mega.rollout.sglang.lifecycle import Engines, attempt
from grpo_mega.rollout.sglang.requests import Generation, SGLangCompletion, check, routed
from grpo_mega.types import Sample
from grpo_mega.weights import fp8

SECONDS_PER_POLL = 0.25
"""Longest wait for samples in one poll, in seconds."""


class SGLangEngine:
    """The SGLang engines of a job; see `Engine`."""

    generates_between_polls = True

    def __init__(self, engines: Engines, decode: Callable[[Sequence[int]], str]) -> None:
        """Generates with these engines, and closes them with itself; `decode` turns token ids into text."""
        self._engines, self._model, self._config, self._decode = engines, engines.model, engines.config, decode
        self._ranks, self._contract = self._engines.ranks, self._engines.contract
        self._transport = self._engines.transport
        self.experts_of = self._transport.experts_of
        self._submitted = 0
        # Samples of this rank's engine, by number: the sample, its version, and the number of further tokens that
        # finish it. All ranks of an engine number its samples alike, because the owner scatters completions by number.
        self._under_way: dict[int, tuple[Wanted, int, int]] = {}
        self._places = Places(len(self._ranks.members))
        # Tokens before the samples that this rank has received, and how many of them were cached.
        self._read = self._cached = 0
        # Number of samples of this rank's engine that its ranks have received. The round-robin goes on from poll to
        # poll, so that ranks hold equally many even where a poll brings one sample.
        self._distributed = 0
        # Set while samples are under way.
        self._generation: Generation | None = None
        self._failing = False

    @property
    def version(self) -> int | None:
        """Policy version of the engines' weights; None before the first push, or after their release."""
        return self._contract.version

    def pids(self) -> list[int]:
        """Process ids of this rank's engine on this node."""
        return [*self._engines.pids]

    @property
    def busy(self) -> bool:
        """Whether samples are under way."""
        return self._contract.busy

    def submit(self, wanted: Sequence[Wanted], sampling: SamplingParams, version: int) -> None:
        """Submits samples to the engines, by `Places`; see `Engine`."""
        idle = not self.busy
        self._contract.submit(version, len(wanted))
        if idle:
            self._failing = False
            self._places.begin()
            limits = self._config.silence_seconds, self._config.answer_seconds
            self._generation = Generation(self._engines.process, *limits)
        requests: dict[int, dict[str, Any]] = {}
        for group in by_prompt(wanted):
            for one in group if self._places.place(group) == self._ranks.engine else ():
                now, left = one.limits(sampling.max_new_tokens, self._model.context)
                self._under_way[self._submitted] = (one, version, left)
                if self._ranks.owns:
                    requests[self._submitted] = self._request(one, now, sampling)
                self._submitted += 1
        # After a failure they are not sent: `poll` drops them when it raises the failure.
        if self._generation and not self._failing:
            self._generation.send(requests)

    def poll(self, interrupted: bool = False) -> Finished:
        """Waits briefly for the engines and distributes arrived samples over the ranks of each; see `Engine`.

        Raises:
            Interrupted: `interrupted` held on some rank; all requests were aborted.
            EngineRestarted: An engine was lost. Raised once the others have finished their samples.
            EngineError: An engine was lost too often, sent an unusable completion, or failed otherwise.
        """
        self._contract.poll()
        try:
            finished = self._finished(interrupted)
        # As promised by `Engine.poll`, no sample is under way after any error.
        except BaseException:
            self._under_way.clear()
            self._contract.drop()
            raise
        self._contract.hand_out(finished.everywhere)
        return finished

    def scores(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """Log-prob of every token but the first, by each engine and each rank of its data parallel attention."""
        copies = attention_copies(self._config)
        self._contract.scores()
        answers = self._engines.on_owners(lambda: self._engines.ask("score", token_ids=[*token_ids], copies=copies))
        return {
            f"engine {number}" + (f" (attention rank {copy})" if copies > 1 else ""): logprobs
            for number, of_engine in enumerate(of_engine for of_engine in answers if of_engine is not None)
            for copy, logprobs in enumerate(of_engine)
        }

    def begin_update(self) -> None:
        """Opens a session in which all weights are replaced."""
        self._contract.begin_update()
        self._engines.on_owners(self._transport.begin)

    def push(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Replaces weights, of routed experts only this rank's (`experts_of`); the tensors may be freed afterwards."""
        # Before the check, because the contract expects what the engine gets: fp8 matrices and their scales.
        if self._config.fp8:
            bucket = fp8.quantised_bucket(bucket)
        # A rank that raised its refusal here would leave the engine's other ranks waiting in the collective below; it
        # shares the refusal instead, and all ranks raise it.
        refusal = None
        try:
            self._contract.check_push(bucket)
        except EngineError as error:
            refusal = error
        gathered: list = [None] * self._config.tp

        def send() -> None:
            for refused, _ in gathered:
                if refused:
                    raise refused
            self._transport.push(bucket, [offered for _, offered in gathered])

        with self._transport.offered([] if refusal else bucket) as offer:
            dist.all_gather_object(gathered, (refusal, offer), group=self._ranks.group)
            self._engines.on_all(send)
        self._contract.push(bucket)

    def end_update(self, version: int) -> None:
        """Closes the update session; KV caches made with the old weights are emptied."""
        self._engines.on_all(lambda: self._contract.check_end_update(version))
        # Each line ends with a collective of all ranks. So no engine starts to read a directory (`transport.Disk`)
        # before it has its final name.
        self._engines.on_owners(self._transport.complete)
        self._engines.on_owners(self._transport.end)
        self._places.forget()
        self._contract.end_update(version)

    def release(self, tags: Collection[str]) -> None:
        """Releases memory; without the server argument enable_memory_saver SGLang keeps it."""
        self._contract.release(tags)
        self._engines.on_owners(lambda: self._engines.ask("release", tags=[*tags]))

    def resume(self, tags: Collection[str]) -> None:
        """Resumes released memory."""
        self._contract.resume(tags)
        self._engines.on_owners(lambda: self._engines.ask("resume", tags=[*tags]))

    def metrics(self) -> dict[str, float]:
        """Share of the tokens before the samples that prefix caches held; every rank must call it."""
        read, cached = self._ranks.sum([self._read, self._cached])
        self._read = self._cached = 0
        return {"rollout/cached": cached / read} if read else {}

    def close(self) -> None:
        """Ends the processes hosted by this rank; ranks may call it at different times."""
        self._engines.close()

    def _finished(self, interrupted: bool) -> Finished:
        """Waits briefly for this rank's engine, and returns the rank's share of the samples that have arrived."""
        assert self._generation, "samples are under way"
        generation = self._generation
        generation.listen(SECONDS_PER_POLL)
        # All decisions below follow from these sums, which are equal on every rank, and so all ranks take the same
        # branches and meet in the same collectives. One all-reduce carries everything that a poll has to agree on.
        given_up, ended, arrived, at_work, failing = self._ranks.sum(
            [
                interrupted,
                generation.refused,
                len(generation.finished),
                generation.at_work,
                generation.failure is not None,
            ]
        )
        self._failing = bool(failing)
        if given_up or ended:
            generation.abort()
        if given_up:
            self._end(generation)
            raise Interrupted
        # The failure waits until the sound engines have handed out their samples: callers keep those, and only the
        # others are generated again.
        if self._failing and not (arrived or at_work):
            self._engines.raise_together(generation.failure)
        return Finished(self._received(generation) if arrived else [], arrived)

    def _received(self, generation: Generation) -> list[Sample]:
        """This rank's share of the samples that its engine has finished; every rank must call it.

        Raises:
            EngineError: On every rank, when one received an unusable completion; all samples under way are dropped.
        """
        finished, generation.finished = generation.finished, {}
        ended, size = sorted(finished), self._config.tp
        of_ranks = [round_robin(ended, rank, size, self._distributed) for rank in range(size)]
        self._distributed += len(ended)
        numbers, completions = self._ranks.from_owner(
            [(ended, {number: finished[number] for number in of_rank}) for of_rank in of_ranks]
        )
        wanted = {number: self._under_way.pop(number) for number in numbers}
        samples, failure = attempt(
            lambda: [self._sample(*wanted[number], completion) for number, completion in completions.items()]
        )
        if any(self._ranks.sum([failure is not None])):
            # The engines themselves are sound and are not restarted, so what they are doing must be ended.
            self._end(generation)
            self._engines.raise_together(failure)
        return samples or []

    def _end(self, generation: Generation) -> None:
        """Ends the generation of all engines."""
        # Completions of this generation must not reach the next one, hence the wait for the last answer.
        generation.abort()
        while any(self._ranks.sum([generation.at_work])):
            generation.listen(SECONDS_PER_POLL)

    def _request(self, wanted: Wanted, most: int, sampling: SamplingParams) -> dict[str, Any]:
        """SGLang's request arguments for one sample; at most `most` tokens are sampled now."""
        draw = sampling.draw if wanted.draw is None else wanted.draw
        parameters = {
            "max_new_tokens": most,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            # SGLang's value for all tokens is -1.
            "top_k": sampling.top_k or -1,
            "stop_token_ids": [*sampling.stop_ids],
            # Used only in SGLang's deterministic mode, which without a seed would make all samples of a prompt equal.
            "sampling_seed": prompt_key(f"{sampling.seed} {draw} {wanted.prompt.id} {wanted.index}") & 0x7FFFFFFF,
        }
        experts = {"return_routed_experts": True} if self._config.routing_replay else {}
        return {"input_ids": wanted.prefix, "sampling_params": parameters, **experts}

    def _sample(self, wanted: Wanted, version: int, left: int, completion: SGLangCompletion) -> Sample:
        """Makes a sample of a completion; the sample is finished once it has `left` further tokens.

        Raises:
            EngineError: The completion cannot be trained on.
        """
        token_ids, logprobs, reason, engine_experts, cached = completion
        check(token_ids, logprobs)
        self._read, self._cached = self._read + len(wanted.prefix), self._cached + cached
        # SGLang knows only the limit of this request, not how long the sample may become in all.
        if reason == "length" and len(token_ids) < left:
            reason = SLICE
        experts = None
        # SGLang returns no experts of a request that it had preempted and not yet resumed when it was aborted.
        unknown = reason == "abort" and engine_experts is None
        if self._config.routing_replay and token_ids and not unknown:
            experts = routed(engine_experts, len(wanted.prefix) + len(token_ids) - 1, self._model)
        return wanted.sample(token_ids, logprobs, reason, version, self._decode, experts)

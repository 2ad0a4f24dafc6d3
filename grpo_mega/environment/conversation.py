"""Conversation: the turns between the policy and an environment, seen from a rank.

A sample that ends with a call gets the environment's reply as given tokens, and goes on. Token ids are only appended:
what the model saw is what it learns from. Environments run in guarded processes (`reward/user_functions.py`), each of
which answers one call at a time.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import fmean

from grpo_mega.config.schema import EnvironmentConfig
from grpo_mega.data.tokenizer import Tokenizer
from grpo_mega.environment.episode import episode_of
from grpo_mega.platform.collectives import from_all_ranks
from grpo_mega.reward.user_functions import UserFunction, UserFunctions
from grpo_mega.rollout.engine import TURN
from grpo_mega.types import Call, Sample, Score

CUT = " ... "
"""What stands for the middle of a reply that was too long."""


class Conversation:
    """Turns of samples with the environment of a run.

    Attributes:
        stop_id: Token that ends a call.
    """

    def __init__(self, config: EnvironmentConfig, tokenizer: Tokenizer, context: int, seed: int) -> None:
        """Starts the processes, in each of which the environment is imported.

        Args:
            config: The environment.
            tokenizer: Encodes replies.
            context: Largest number of tokens of a sample with its prompt.
            seed: The run's seed.

        Raises:
            InputError: The environment cannot be used, or the settings do not fit the tokenizer.
        """
        self._config, self._tokenizer, self._context, self._seed = config, tokenizer, context, seed
        self.stop_id = tokenizer.token_id(config.close)
        tokenizer.reply("", config.reply)  # refused now, and not in the middle of a step
        # Each process is started, and used, by one thread alone: it ends with the thread that has started it.
        self._threads = [ThreadPoolExecutor(1, "environment") for _ in range(config.at_once)]
        self._workers = [thread.submit(_worker, config, seed).result() for thread in self._threads]
        self._failed: dict[int, str] = {}
        self._seconds: list[float] = []

    def close(self) -> None:
        """Ends the processes."""
        for worker in self._workers:
            worker.close()
        for thread in self._threads:
            thread.shutdown()

    def go_on(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples, of which those that ended with a call have the environment's reply, and the reason `TURN`.

        Calls run at once, those of one episode always in the same process.
        """
        pending = [
            self._threads[self._number(sample)].submit(self._answered, sample) if self._asks(sample) else sample
            for sample in samples
        ]
        return [one if isinstance(one, Sample) else one.result() for one in pending]

    def metrics(self) -> dict[str, float]:
        """Mean seconds of the calls since the last time, over all ranks; every rank must call it."""
        own, self._seconds = self._seconds, []
        seconds = [one for of_rank in from_all_ranks(lambda: own) for one in of_rank]
        return {"environment/seconds": fmean(seconds)} if seconds else {}

    def scores(self, score: Callable[[Sequence[Sample]], Sequence[Score]], samples: Sequence[Sample]) -> list[Score]:
        """Scores of finished samples; one whose environment failed has none."""
        failed = [self._failed.pop(sample.number, "") for sample in samples]
        found = iter(score([sample for sample, why in zip(samples, failed, strict=True) if not why]))
        return [Score(0.0, {}, unscorable=why) if why else next(found) for why in failed]

    def _asks(self, sample: Sample) -> bool:
        return sample.finish_reason == "stop" and sample.token_ids[-1] == self.stop_id

    def _number(self, sample: Sample) -> int:
        """Number of the process that answers the calls of a sample."""
        digest = hashlib.sha256(f"{sample.prompt.id} {sample.index}".encode(errors="backslashreplace")).digest()
        return digest[0] % len(self._workers)

    def _answered(self, sample: Sample) -> Sample:
        """The sample with the reply to its last call; finished if it has no room for more."""
        if len(sample.calls) >= self._config.max_calls:
            return replace(sample, finish_reason="length")
        call = self._call(sample)
        texts = [*(earlier.text for earlier in sample.calls), call]
        began = time.monotonic()
        try:
            worker = self._workers[self._number(sample)]
            reply = worker.value("environment", *episode_of(sample, self._seed), texts)
        # The machine failed, or the environment ended its process: neither is the model's fault.
        except RuntimeError as error:
            self._failed[sample.number] = f"environment: {error}"
            return replace(sample, finish_reason="abort")
        self._seconds.append(time.monotonic() - began)
        ids = self._encoded(reply["text"])
        first, end = len(sample.token_ids), len(sample.token_ids) + len(ids)
        if len(sample.prompt.token_ids) + end >= self._context:
            return replace(sample, finish_reason="length")
        return replace(
            sample,
            token_ids=sample.token_ids + array("i", ids),
            logprobs=sample.logprobs + array("f", bytes(4 * len(ids))),
            finish_reason=TURN,
            given=(*sample.given, (first, end)),
            calls=(*sample.calls, Call(call, reply["error"])),
        )

    def _call(self, sample: Sample) -> str:
        """Content of the call that ends a sample: what follows the last beginning of a call in this turn."""
        begin = sample.given[-1][1] if sample.given else 0
        text, opened = self._tokenizer.decode(sample.token_ids[begin:-1]), self._config.open
        return text.rpartition(opened)[2] if opened else text

    def _encoded(self, text: str) -> list[int]:
        # JSON lets through lone surrogates, which no tokenizer takes.
        text = text.encode(errors="replace").decode()
        ids, most = self._tokenizer.reply(text, "{reply}"), self._config.max_reply_tokens
        if len(ids) > most:
            head, tail = ids[: most // 2], ids[len(ids) - (most - most // 2) :]
            text = self._tokenizer.decode(head) + CUT + self._tokenizer.decode(tail)
        return self._tokenizer.reply(text, self._config.reply)


def _worker(config: EnvironmentConfig, seed: int) -> UserFunctions:
    function = UserFunction("grpo_mega.environment.episode:answer", {"path": str(config.path)})
    return UserFunctions({"environment": function}, seed, config.seconds, restart=True)

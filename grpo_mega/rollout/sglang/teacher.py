"""A teacher on an SGLang server with separate GPUs, which returns log-probs of texts.

The server's native interface (`/generate` with `return_logprob`) takes token ids and answers with the (log-prob, token
id, text) of each. Model, layout and precision are chosen when the server is started; its tokens must be the policy's.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

import torch

from grpo_mega.errors import InputError
from grpo_mega.models.topology import Topology
from grpo_mega.platform.collectives import from_main_rank, succeed_together
from grpo_mega.rollout.sglang.arguments import SPARE_POSITIONS
from grpo_mega.types import Batch

AT_ONCE = 32
"""Concurrent requests of a rank; the server queues those of all ranks."""
ATTEMPTS = 3
"""Number of times that an unanswered request is sent, in all."""
SHOWN = 200
"""Characters of an answer shown in an error."""
# urllib would obey http_proxy in the environment and send requests for a server of the cluster to the proxy.
WITHOUT_PROXIES = build_opener(ProxyHandler({}))


class ServedTeacher:
    """Teacher of on-policy distillation on an SGLang server.

    Attributes:
        checksum: Identity of its model, as given by the server.
    """

    def __init__(self, server: TeacherServer, checksum: str, topology: Topology) -> None:
        """The teacher on `server`, whose model has this `checksum`, for the ranks of a layout."""
        self.checksum = checksum
        self._server, self._topology = server, topology

    def logprobs(self, batch: Batch, temperature: float) -> torch.Tensor:
        """[T] float32 log-probs of the replica's masked-in tokens, 0 elsewhere; every rank must call it.

        Raises:
            RuntimeError, ValueError: On every rank. The server did not answer, or its answer is invalid.
        """
        assert temperature == 1, "config/rules/stages.py refuses others"
        logprobs = torch.zeros(len(batch.tokens))

        # One rank of each replica asks, since all have the same batch. The others join `succeed_together` anyway, so
        # that a server that fails one replica ends the work of all.
        def ask() -> None:
            if self._topology.is_first_of_replica:
                sequences = [ids.tolist() for ids in batch.tokens.split(batch.in_pieces().lengths.tolist())]
                with ThreadPoolExecutor(AT_ONCE) as pool:
                    scores = [score for of_one in pool.map(self._server.score, sequences) for score in of_one]
                logprobs.copy_(torch.where(batch.mask, torch.tensor(scores), 0.0))

        succeed_together(ask)
        return self._topology.from_first_of_replica(logprobs)


@dataclass(frozen=True)
class TeacherServer:
    """Client of an SGLang server.

    Attributes:
        url: Address of the server, http://HOST:PORT.
        seconds: Time limit of a request.
        vocab_size: Number of tokens that the policy samples from.
    """

    url: str
    seconds: float
    vocab_size: int

    def check(self, longest: int, decode: Callable[[Sequence[int]], str]) -> str:
        """Checks that the server can teach; returns the identity of its model. Every rank must call it.

        Requests the log-probs of a sequence as long as the run's longest, with tokens spread evenly over the
        vocabulary, and compares their spelling.

        Args:
            longest: Number of tokens in the longest sequence of the run.
            decode: Text of tokens by the policy's tokenizer, empty for one that it does not have.

        Raises:
            InputError: On every rank. There is no SGLang server, it cannot score sequences of this length or all tokens
                of the vocabulary, or its tokens differ; names the first token that does.
        """
        identity = from_main_rank(lambda: self._identity(longest, decode))
        if isinstance(identity, InputError):
            raise identity
        return identity

    def score(self, ids: list[int]) -> list[float]:
        """Log-prob of every token of a sequence; 0 for the first, which nothing predicts.

        Raises:
            RuntimeError, ValueError: The server did not answer, or its answer is invalid.
        """
        scores = [0.0, *(logprob for logprob, *_ in self._token_logprobs(ids, spelled=False)[1:])]
        if not all(isinstance(score, int | float) and math.isfinite(score) for score in scores):
            raise ValueError(f"{self.url} gives a token of a sample no log-prob, or one that is not finite")
        return scores

    def _identity(self, longest: int, decode: Callable[[Sequence[int]], str]) -> str | InputError:
        """Identity of the server's model, or the reason why it cannot be the teacher."""
        where, last = f"distill.teacher={self.url}", self.vocab_size - 1
        # Tokens 0 to `last` - 1 evenly, then `last` itself, to see whether the server has all of the policy's tokens.
        ids = [position * (last - 1) // max(1, longest - 2) for position in range(longest - 1)]
        try:
            info = self._ask("/model_info", None)
            spelled = self._token_logprobs([*ids, last], spelled=True)
        except RuntimeError as error:
            return InputError(where, str(error), "start SGLang there")
        except ValueError as error:
            return InputError(
                where,
                f"{error}; it must be SGLang, have the policy's {self.vocab_size} tokens, and score sequences of "
                f"model.context={longest}",
                f"start it with a context of at least {longest + SPARE_POSITIONS} tokens, or lower model.context",
            )
        for _, token, text in spelled:
            # Spaces are not compared, because some tokenizers drop those of a token that is decoded alone.
            if str(text).strip() != (here := decode([token])).strip():
                return InputError(
                    where,
                    f"its tokens differ from the policy's: {token} is {text!r} there and {here!r} here",
                    "serve a model with the same tokens, and with its tokenizer",
                )
        # The server reports no checksum of its weights: a resumed run compares these fields instead.
        named = {name: info.get(name) for name in ("model_path", "weight_version")}
        return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()

    def _token_logprobs(self, ids: list[int], spelled: bool) -> list[Any]:
        """[log-prob, token id, text or null] of every token of a sequence.

        SGLang takes the last token of its model, and any beyond, for the placeholder of an image, and shows it as token
        0, with the log-prob of the last token.
        """
        content = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "return_text_in_logprobs": spelled,
        }
        answer = self._ask("/generate", content)
        # The ids in the answer are compared with those sent, so that no log-prob is taken for that of another token.
        try:
            logprobs = answer["meta_info"]["input_token_logprobs"]
            shown = [one[1] for one in logprobs]
            last = self.vocab_size - 1
            same = shown == ids or shown == [0 if token == last else token for token in ids]
        except (KeyError, TypeError, IndexError):
            same = False
        if not same:
            raise ValueError(f"its answer has no log-probs of the tokens: {json.dumps(answer)[:SHOWN]}")
        return logprobs

    def _ask(self, path: str, content: dict[str, Any] | None) -> dict[str, Any]:
        """Sends a request; returns the JSON answer.

        Raises:
            ValueError: The server refuses the request, or its answer is not a JSON object.
            RuntimeError: The server does not answer any attempt.
        """
        body = None if content is None else json.dumps(content).encode()
        request = Request(self.url.rstrip("/") + path, body, {"Content-Type": "application/json"})
        why = ""
        for _ in range(ATTEMPTS):
            try:
                with WITHOUT_PROXIES.open(request, timeout=self.seconds) as response:
                    answer = json.loads(response.read())
                if not isinstance(answer, dict):
                    raise ValueError(f"the answer of {self.url}{path} is not a JSON object: {str(answer)[:SHOWN]}")
                return answer
            except HTTPError as error:
                why = f"status {error.code}: {error.read(SHOWN).decode(errors='replace')}"
                # The request itself is wrong, and sending it again would not help; a 5xx may pass.
                if error.code < 500:
                    raise ValueError(f"{self.url}{path} answered {why}") from None
            except (URLError, OSError, HTTPException) as error:
                why = f"{type(error).__name__}: {error}"
        raise RuntimeError(f"{self.url}{path} did not answer {ATTEMPTS} requests ({why})")

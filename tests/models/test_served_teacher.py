"""A teacher that is a server: its log-probs are at their tokens, and what it cannot be is named."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Thread

import pytest
import torch
from small_models import VOCABULARY
from teaching_server import TeachingServer, logprob, teaching

from grpo_mega.data.tokenizer import CharTokenizer
from grpo_mega.models.topology import Topology
from grpo_mega.rollout.sglang.teacher import ServedTeacher, TeacherServer
from grpo_mega.types import Batch

CHARS = CharTokenizer()


@pytest.fixture
def server() -> Iterator[TeachingServer]:
    with teaching(CHARS) as server:
        yield server


def asking(url: str, seconds: float = 30, vocab_size: int = CHARS.vocab_size) -> TeacherServer:
    return TeacherServer(url, seconds, vocab_size)


def checked(server: TeacherServer, longest: int = 40) -> str:
    return server.check(longest, CHARS.decode)


def teacher(server: TeachingServer, topology: Topology) -> ServedTeacher:
    """One with the tokens of `batch`."""
    server.vocab_size = VOCABULARY
    return ServedTeacher(asking(f"{server.url}/", vocab_size=VOCABULARY), "", topology)


def test_every_masked_in_token_has_the_log_prob_that_the_server_gives_it(
    server: TeachingServer, topology: Topology, batch: Batch
) -> None:
    found = teacher(server, topology).logprobs(batch, 1.0)
    tokens, starts = batch.tokens.tolist(), set(batch.cu_seqlens.tolist())
    expected = [
        logprob(tokens[i - 1], token) if mask and i not in starts else 0.0
        for i, (token, mask) in enumerate(zip(tokens, batch.mask.tolist(), strict=True))
    ]
    assert found.tolist() == pytest.approx(expected)
    assert found.dtype == torch.float32
    parts = [ids.tolist() for ids in batch.tokens.split(batch.lengths.tolist())]
    assert sorted(server.asked) == sorted(parts), "each sequence by itself, once"


def test_each_piece_of_a_sequence_is_asked_for_by_itself(
    server: TeachingServer, topology: Topology, batch: Batch
) -> None:
    restarts = torch.zeros_like(batch.mask)
    restarts[batch.cu_seqlens[1] + 9] = True
    in_pieces = batch.with_(restarts=restarts, mask=batch.mask & ~restarts)
    found = teacher(server, topology).logprobs(in_pieces, 1.0)
    asked = [ids.tolist() for ids in batch.tokens.split([7, 9, 11, *batch.lengths.tolist()[2:]])]
    assert sorted(server.asked) == sorted(asked)
    whole = teacher(server, topology).logprobs(batch, 1.0)
    assert torch.equal(found, whole.masked_fill(restarts, 0.0))


def test_a_request_without_an_answer_is_repeated_and_then_an_error(
    server: TeachingServer, topology: Topology, batch: Batch
) -> None:
    one = batch.select([1])
    server.failures = [503, 500]
    assert teacher(server, topology).logprobs(one, 1.0)[one.mask].max() < 0
    server.failures = [503] * 3
    with pytest.raises(RuntimeError, match=r"did not answer 3 requests .status 503: .*busy"):
        teacher(server, topology).logprobs(one, 1.0)
    server.failures = [400]
    with pytest.raises((RuntimeError, ValueError), match="/generate answered status 400"):
        teacher(server, topology).logprobs(one, 1.0)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"text": "yes"}, "its answer has no log-probs of the tokens: "),
        ({"meta_info": {"input_token_logprobs": [[None, 5, None]]}}, "its answer has no log-probs of the tokens"),
        ({"meta_info": {"input_token_logprobs": None}}, "its answer has no log-probs of the tokens"),
    ],
)
def test_what_is_no_answer_of_sglang_s_is_named(
    server: TeachingServer, topology: Topology, batch: Batch, answer: dict, said: str
) -> None:
    server.answer = answer
    with pytest.raises((RuntimeError, ValueError), match=said):
        teacher(server, topology).logprobs(batch.select([1]), 1.0)
    with pytest.raises(ValueError, match=said):
        checked(asking(server.url))


@pytest.mark.parametrize("wrong", ["null", "NaN"])
def test_a_token_without_a_finite_log_prob_is_an_error(server: TeachingServer, topology: Topology, wrong: str) -> None:
    value = None if wrong == "null" else float("nan")
    server.answer = {"meta_info": {"input_token_logprobs": [[None, 1, None], [value, 2, None]]}}
    with pytest.raises(ValueError, match="gives a token of a sample no log-prob, or one that is not finite"):
        asking(server.url).score([1, 2])


def test_models_are_told_apart_and_other_tokens_are_refused(server: TeachingServer, topology: Topology) -> None:
    asked = asking(server.url)
    first = checked(asked)
    assert checked(asked) == first
    server.model = "models/Another"
    assert checked(asked) != first
    server.decode = lambda ids: CHARS.decode(ids).replace("7", "?")
    with pytest.raises(ValueError, match=r"its tokens differ from the policy's: 14 is '.' there and '7' here"):
        checked(asked)


@pytest.mark.parametrize("longest", [2, 13, CHARS.vocab_size, 100])
def test_it_is_asked_once_for_a_sequence_as_long_as_any_of_tokens_all_over_the_vocabulary(
    server: TeachingServer, topology: Topology, longest: int
) -> None:
    checked(asking(server.url), longest)
    (ids,) = server.asked
    assert len(ids) == longest
    assert (ids[0], ids[-1]) == (0, CHARS.vocab_size - 1)
    assert longest < CHARS.vocab_size or set(ids) == set(range(CHARS.vocab_size))


def test_a_server_of_shorter_sequences_or_fewer_tokens_is_refused(server: TeachingServer, topology: Topology) -> None:
    server.failures = [400]
    with pytest.raises(ValueError, match=r"status 400: .*context of at least 48 tokens, or lower model\.context"):
        checked(asking(server.url))
    one_more = CHARS.vocab_size + 1
    with pytest.raises(ValueError, match=rf"its answer has no log-probs.* have the policy's {one_more} tokens"):
        checked(asking(server.url, vocab_size=one_more))


def test_the_last_token_which_sglang_shows_as_another_has_its_log_prob_and_no_other_token_may_be_shown_so(
    server: TeachingServer, topology: Topology
) -> None:
    last = CHARS.vocab_size - 1
    assert asking(server.url).score([1, last, 5, last]) == [0.0, logprob(1, last), logprob(last, 5), logprob(5, last)]
    server.vocab_size += 1  # now its own last token is one that the policy lacks
    assert asking(server.url).score([1, last]) == [0.0, logprob(1, last)]
    server.vocab_size -= 2
    with pytest.raises(ValueError, match="its answer has no log-probs"):
        asking(server.url).score([1, last - 1])


def test_where_nobody_answers_it_is_said(topology: Topology) -> None:
    with socket.socket() as silent:  # has the port, so that nobody else does, and does not listen
        silent.bind(("127.0.0.1", 0))
        with pytest.raises(ValueError, match=r"distill.teacher=http://127.* did not answer .*start SGLang there"):
            checked(asking(f"http://127.0.0.1:{silent.getsockname()[1]}", 5))


class NoHTTP(BaseRequestHandler):
    """Answers as a server of another kind does."""

    def handle(self) -> None:
        self.request.recv(100)
        self.request.sendall(b"220 mail.example ready\r\n")


def test_an_address_of_something_else_is_named(topology: Topology) -> None:
    with ThreadingTCPServer(("127.0.0.1", 0), NoHTTP) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        for port in (server.server_address[1], "port"):
            with pytest.raises(ValueError, match=rf"distill.teacher=http://127.0.0.1:{port}: .* did not answer"):
                checked(asking(f"http://127.0.0.1:{port}", 5))
        server.shutdown()

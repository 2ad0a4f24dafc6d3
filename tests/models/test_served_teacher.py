"""A teacher that is a server: its log-probs are at their tokens, and what it cannot be is named."""

from __future__ import annotations

from collections.abc import Iterator
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Thread

import pytest
import torch
from teaching_server import TeachingServer, logprob, teaching

from grpo_mega.data.tokenizer import CharTokenizer
from grpo_mega.models.topology import Topology
from grpo_mega.rollout.sglang.teacher import ServedTeacher, TeacherServer
from grpo_mega.types import Batch

CHARS = CharTokenizer()


@pytest.fixture
def server() -> Iterator[TeachingServer]:
    with teaching(CHARS.decode) as server:
        yield server


def teacher(server: TeachingServer, topology: Topology) -> ServedTeacher:
    return ServedTeacher(TeacherServer(f"{server.url}/", 30), "", topology)


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


def test_a_request_without_an_answer_is_repeated_and_then_an_error(
    server: TeachingServer, topology: Topology, batch: Batch
) -> None:
    one = batch.select([1])
    server.failures = [503, 500]
    assert teacher(server, topology).logprobs(one, 1.0)[one.mask].max() < 0
    server.failures = [503] * 3
    with pytest.raises(RuntimeError, match=r"gave no answer to 3 requests .status 503: .*busy"):
        teacher(server, topology).logprobs(one, 1.0)
    server.failures = [400]
    with pytest.raises((RuntimeError, ValueError), match="/generate answered status 400"):
        teacher(server, topology).logprobs(one, 1.0)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"text": "yes"}, "answered with no log-probs of the tokens: "),
        ({"meta_info": {"input_token_logprobs": [[None, 5, None]]}}, "answered with no log-probs of the tokens"),
        ({"meta_info": {"input_token_logprobs": None}}, "answered with no log-probs of the tokens"),
    ],
)
def test_what_is_no_answer_of_sglang_s_is_named(
    server: TeachingServer, topology: Topology, batch: Batch, answer: dict, said: str
) -> None:
    server.answer = answer
    with pytest.raises((RuntimeError, ValueError), match=said):
        teacher(server, topology).logprobs(batch.select([1]), 1.0)
    with pytest.raises(ValueError, match=said):
        TeacherServer(server.url, 30).check(CHARS.vocab_size, CHARS.decode)


@pytest.mark.parametrize("wrong", ["null", "NaN"])
def test_a_token_without_a_finite_log_prob_is_an_error(server: TeachingServer, topology: Topology, wrong: str) -> None:
    value = None if wrong == "null" else float("nan")
    server.answer = {"meta_info": {"input_token_logprobs": [[None, 1, None], [value, 2, None]]}}
    with pytest.raises(ValueError, match="gives a token of a sample no log-prob, or one that is not finite"):
        TeacherServer(server.url, 30).score([1, 2])


def test_models_are_told_apart_and_other_tokens_are_refused(server: TeachingServer, topology: Topology) -> None:
    def checked() -> str:
        return TeacherServer(server.url, 30).check(CHARS.vocab_size, CHARS.decode)

    first = checked()
    assert checked() == first
    server.model = "models/Another"
    assert checked() != first
    server.decode = lambda ids: CHARS.decode(ids).replace("7", "?")
    with pytest.raises(ValueError, match=r"has other tokens than the policy: 14 is '.' there and '7' here"):
        checked()


def test_where_nobody_answers_it_is_said(topology: Topology) -> None:
    with teaching(CHARS.decode) as server:
        address = server.url
    with pytest.raises(ValueError, match=r"distill.teacher=http://127.* gave no answer .*is SGLang running there"):
        TeacherServer(address, 5).check(CHARS.vocab_size, CHARS.decode)


class NoHTTP(BaseRequestHandler):
    """Answers as a server of another kind does."""

    def handle(self) -> None:
        self.request.recv(100)
        self.request.sendall(b"220 mail.example ready\r\n")


def test_an_address_of_something_else_is_named(topology: Topology) -> None:
    with ThreadingTCPServer(("127.0.0.1", 0), NoHTTP) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        for port in (server.server_address[1], "port"):
            with pytest.raises(ValueError, match=rf"distill.teacher=http://127.0.0.1:{port}: .* gave no answer"):
                TeacherServer(f"http://127.0.0.1:{port}", 5).check(CHARS.vocab_size, CHARS.decode)
        server.shutdown()

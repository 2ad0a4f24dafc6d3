"""Samples with tokens that the policy was given: they are computed, and neither learned nor counted."""

from __future__ import annotations

from array import array
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.config.schema import AlgorithmConfig
from grpo_mega.observe.samples import sample_record
from grpo_mega.platform import start

start()  # before megatron.core is imported

from grpo_mega.stages.exchange import pack_samples  # noqa: E402
from grpo_mega.stages.ppo import token_rewards  # noqa: E402
from grpo_mega.types import Call, Prompt, Sample, Score, sampled_spans  # noqa: E402


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """Of up to 12 tokens, each sampled or given; two spans of one kind never touch. Some given ones begin a piece."""
    own = draw(st.lists(st.booleans(), max_size=12))
    spans = [at for at, is_own in enumerate(own) if not is_own]
    bounds = [(at, at + 1) for at in spans]
    merged: list[tuple[int, int]] = []
    for first, end in bounds:
        if merged and merged[-1][1] == first:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((first, end))
    tokens = array("i", draw(st.lists(st.integers(1, 9), min_size=len(own), max_size=len(own))))
    logprobs = array("f", [-1.0 - at if is_own else 0.0 for at, is_own in enumerate(own)])
    prompt = Prompt("p", (*draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)),), "", "", "")
    calls = tuple(Call("1+1", error) for _, error in zip(merged, own, strict=False))
    restarts = tuple(first for first, _ in merged if first and draw(st.booleans()))
    columns = prompt, 0, tokens, logprobs, "stop", ((0, 0),), ""
    return Sample(*columns, given=(*merged,), calls=calls, restarts=restarts)


def own_tokens(sample: Sample) -> list[int]:
    """Indices of the sampled tokens, one by one."""
    return [at for at in range(len(sample.token_ids)) if not any(a <= at < b for a, b in sample.given)]


@given(samples())
def test_what_lies_between_given_spans_is_sampled(sample: Sample) -> None:
    spans = sampled_spans(len(sample.token_ids), sample.given)
    assert [at for first, end in spans for at in range(first, end)] == own_tokens(sample)


@given(st.lists(samples(), min_size=1, max_size=4))
def test_sampled_tokens_are_learned_with_their_log_probs_and_given_ones_are_not(drawn: list[Sample]) -> None:
    batch = pack_samples(drawn)
    starts = batch.cu_seqlens.tolist()
    for row, sample in enumerate(drawn):
        prompt, at = len(sample.prompt.token_ids), slice(starts[row], starts[row + 1])
        assert batch.tokens[at].tolist() == [*sample.prompt.token_ids, *sample.token_ids]
        assert batch.mask[at].nonzero()[:, 0].tolist() == [prompt + token for token in own_tokens(sample)]
        assert batch.rollout_logprob[at].tolist() == [0.0] * prompt + [*sample.logprobs]


@given(st.lists(samples(), min_size=1, max_size=4))
def test_a_batch_in_pieces_has_each_of_them_once(drawn: list[Sample]) -> None:
    batch = pack_samples(drawn)
    assert (batch.restarts is None) == (not any(sample.restarts for sample in drawn))
    pieces, numbers, prompts = [], [], []
    for number, sample in enumerate(drawn):
        bounds = [0, *sample.restarts, len(sample.token_ids)]
        parts = [sample.token_ids[first:end].tolist() for first, end in pairwise(bounds)]
        pieces += [[*sample.prompt.token_ids, *parts[0]], *parts[1:]]
        numbers += [number] * len(parts)
        prompts += [len(sample.prompt.token_ids), *[0] * (len(parts) - 1)]
    assert batch.pieces.tolist() == [1 + len(sample.restarts) for sample in drawn]
    apart = batch.in_pieces()
    assert [part.tolist() for part in apart.tokens.split(apart.lengths.tolist())] == pieces
    assert (apart.numbers.tolist(), apart.prompt_lengths.tolist()) == (numbers, prompts)
    alone = [prompt for prompt, length in zip(apart.prompts.tolist(), prompts, strict=True) if not length]
    assert len({*alone, *batch.prompts.tolist()}) == len(alone) + len({*batch.prompts.tolist()})
    assert apart.in_pieces() is apart


@given(st.lists(samples(), min_size=1, max_size=4))
def test_a_reward_is_earned_by_the_last_sampled_token(drawn: list[Sample]) -> None:
    batch = pack_samples(drawn)
    rewards = token_rewards(batch, [10.0 + number for number in range(len(drawn))], AlgorithmConfig())
    expected = torch.zeros(len(batch.tokens))
    for number, (start_of, sample) in enumerate(zip(batch.cu_seqlens.tolist(), drawn, strict=False)):
        if own := own_tokens(sample):
            expected[start_of + len(sample.prompt.token_ids) + own[-1]] = 10.0 + number
    assert torch.equal(rewards * batch.mask, expected)


@given(samples())
def test_records_have_no_numbers_for_given_tokens(sample: Sample) -> None:
    record: dict[str, Any] = sample_record(sample, Score(1.0, {}), 0, decode=lambda ids: "".join(map(str, ids)))
    own = own_tokens(sample)
    assert len(record["engine_logprobs"]) == len(record["token_texts"]) == len(sample.token_ids)
    assert [at for at, value in enumerate(record["engine_logprobs"]) if value is not None] == own
    assert record.get("given", ()) == sample.given
    assert record.get("restarts", ()) == sample.restarts
    assert record["tokens"] == len(own)
    assert [Call(**call) for call in record.get("calls", ())] == [*sample.calls]


def test_only_what_the_policy_repeats_itself_counts_as_repeated() -> None:
    looping = Sample(
        Prompt("p", (1,), "", "", ""), 0, array("i", [1, 2, 1, 2, 1, 2]), array("f"), "stop", ((0, 0),), ""
    )
    assert looping.repeated(2) == 0.6
    assert replace(looping, given=((2, 6),)).repeated(2) == 0.0
    assert replace(looping, given=((2, 4),)).repeated(2) == 0.5

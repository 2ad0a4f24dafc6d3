"""Packed attention against attention written out in float64, sequence by sequence and token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.transformer_config import TransformerConfig

from grpo_mega.models.megatron.attention import PackedAttention
from grpo_mega.models.megatron.packed import KVCache, PackedTokens

KV_HEADS, CHANNELS, VALUE_CHANNELS = 2, 8, 6
SCALE = 0.3

ragged = st.lists(st.integers(1, 9), min_size=1, max_size=6)
multiples = st.integers(1, 4)
head_ratios = st.integers(1, 3)
seeds = st.integers(0, 2**31)


windows = st.none() | st.integers(1, 10)
with_sinks = st.booleans()


def core_attention(heads: int, window: int | None = None, has_sinks: bool = False) -> PackedAttention:
    config = TransformerConfig(num_layers=1, hidden_size=heads * CHANNELS, num_attention_heads=heads)
    attention = PackedAttention(config, layer_number=1, softmax_scale=SCALE, window=window)
    attention.softmax_offset = torch.nn.Parameter(torch.linspace(-2, 3, heads)) if has_sinks else None
    return attention


def random_qkv(tokens: int, ratio: int, seed: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = ((KV_HEADS * ratio, CHANNELS), (KV_HEADS, CHANNELS), (KV_HEADS, VALUE_CHANNELS))
    return [torch.randn(tokens, *shape, generator=random) for shape in shapes]


def naive(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The last tokens of one sequence, as many as there are queries, look at what came before them, or at a window.

    The sink of a head is one more logit of the softmax.
    """
    query, key, value = query.double(), key.double(), value.double()
    out = []
    for head in range(query.shape[1]):
        kv = head * key.shape[1] // query.shape[1]
        for row in range(len(query)):
            seen = len(key) - len(query) + row + 1
            first = max(0, seen - window) if window else 0
            logits = key[first:seen, kv] @ query[row, head] * SCALE
            sink = [] if sinks is None else [sinks.double()[head : head + 1]]
            probs = torch.cat([logits, *sink]).softmax(0)[: seen - first]
            out.append(probs @ value[first:seen, kv])
    return torch.stack(out).unflatten(0, (query.shape[1], len(query))).transpose(0, 1).flatten(1)


@settings(deadline=None, max_examples=40)
@given(ragged, multiples, head_ratios, windows, with_sinks, seeds)
def test_output_and_gradients_equal_attention_in_each_sequence_alone(
    lengths: list[int], multiple: int, ratio: int, window: int | None, has_sinks: bool, seed: int
) -> None:
    tokens = sum(lengths)
    packed = PackedTokens.of_sequences(torch.tensor(lengths), multiple)
    real = [x.requires_grad_() for x in random_qkv(tokens, ratio, seed)]
    attention = core_attention(KV_HEADS * ratio, window, has_sinks)
    sinks = attention.softmax_offset
    sequences = zip(*(x.split(lengths) for x in real), strict=True)
    expected = torch.cat([naive(*parts, window, sinks) for parts in sequences])
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(seed))
    inputs = [*real, *attention.parameters()]
    expected_grads = torch.autograd.grad(expected, inputs, upstream.double())

    padding = [x.new_full((packed.padding, *x.shape[1:]), float("nan")).requires_grad_() for x in real]
    padded = [torch.cat(both) for both in zip(real, padding, strict=True)]
    out = attention(*padded, None, packed_seq_params=packed)
    torch.testing.assert_close(out[:tokens].double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(out[tokens:], torch.zeros(packed.padding, KV_HEADS * ratio * VALUE_CHANNELS))

    # The rows behind the real ones receive a gradient from above, and pass none on.
    above = torch.cat([upstream, torch.ones(packed.padding, upstream.shape[1])])
    grads = torch.autograd.grad(out, [*inputs, *padding], above)
    for grad, expected_grad in zip(grads[: len(inputs)], expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, atol=1e-5, rtol=1e-5)
    for grad in grads[len(inputs) :]:
        assert torch.equal(grad, torch.zeros_like(grad))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), min_size=1, max_size=6), multiples, seeds)
def test_a_shared_prompt_gives_what_its_copies_give(members: list[tuple[int, int]], multiple: int, seed: int) -> None:
    """Output and gradients with prompts in the row once equal those with a copy of the prompt in every sequence."""
    prompt_lengths = torch.tensor([[1, 3, 4][prompt] for prompt, _ in members])
    lengths = prompt_lengths + torch.tensor([completion for _, completion in members])
    prompts = torch.tensor([prompt for prompt, _ in members])
    shared = PackedTokens.of_sequences(lengths, multiple, prompts=prompts, prompt_lengths=prompt_lengths)
    apart = PackedTokens.of_sequences(lengths, 1)
    assert len(shared.owners) == sum(n for _, n in members) + sum({p: [1, 3, 4][p] for p, _ in members}.values())
    assert shared.positions[shared.rows].tolist() == apart.positions.tolist()
    attention = core_attention(KV_HEADS)
    once = [x.requires_grad_() for x in random_qkv(len(shared.positions), 1, seed)]
    copied = [x[shared.rows] for x in once]
    expected = attention(*copied, None, packed_seq_params=apart)
    out = attention(*once, None, packed_seq_params=shared)[shared.rows]
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(seed))
    grads, expected_grads = (torch.autograd.grad(o, once, upstream) for o in (out, expected))
    torch.testing.assert_close(grads, expected_grads, atol=1e-5, rtol=1e-5)


@settings(deadline=None, max_examples=40)
@given(st.data(), ragged, multiples, head_ratios, windows, with_sinks, seeds)
def test_decoding_with_a_cache_equals_attention_over_the_whole_history(
    data: st.DataObject, lengths: list[int], multiple: int, ratio: int, window: int | None, has_sinks: bool, seed: int
) -> None:
    """Prompts of ragged lengths, then one token per sequence; rows are repeated, reordered and dropped on the way.

    A row that does not advance overwrites its own last place, as a sequence that has ended does.
    """
    steps = 5
    attention = core_attention(KV_HEADS * ratio, window, has_sinks)
    cache = KVCache(capacity=max(lengths) + steps)
    query, key, value = random_qkv(sum(lengths), ratio, seed)
    prompts = PackedTokens.of_sequences(torch.tensor(lengths), 1, cache)
    attention(query, key, value, None, packed_seq_params=prompts)
    histories = list(zip(key.split(lengths), value.split(lengths), strict=True))
    positions = torch.tensor(lengths)

    for step in range(steps):
        rows = data.draw(st.lists(st.sampled_from(range(len(histories))), min_size=1, max_size=7), label="kept rows")
        cache.keep(torch.tensor(rows))
        histories, positions = [histories[row] for row in rows], positions[rows]
        packed = PackedTokens.one_each(positions, multiple, cache)
        query, key, value = random_qkv(len(positions), ratio, seed + step + 1)
        padded = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, packed.padding), value=1e3) for x in (query, key, value)]
        out = attention(*padded, None, packed_seq_params=packed)
        now = [
            (torch.cat([k[:p], key[i : i + 1]]), torch.cat([v[:p], value[i : i + 1]]))
            for i, ((k, v), p) in enumerate(zip(histories, positions.tolist(), strict=True))
        ]
        sinks = attention.softmax_offset
        expected = torch.cat([naive(query[i : i + 1], k, v, window, sinks) for i, (k, v) in enumerate(now)])
        torch.testing.assert_close(out[: len(rows)].double(), expected, atol=1e-5, rtol=1e-5)
        assert not out[len(rows) :].any()
        histories = now
        advance = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)), label="advance")
        positions = positions + torch.tensor(advance)


@given(ragged, st.integers(1, 9))
def test_whole_sequences_are_described(lengths: list[int], multiple: int) -> None:
    packed = PackedTokens.of_sequences(torch.tensor(lengths), multiple)
    total = sum(lengths) + packed.padding
    assert total % multiple == 0
    assert packed.padding < multiple
    assert packed.positions.tolist() == [p for n in lengths for p in range(n)] + [0] * packed.padding
    assert packed.rows.tolist() == packed.owners.tolist() == list(range(sum(lengths)))
    assert packed.cells.tolist() == [i * max(lengths) + p for i, n in enumerate(lengths) for p in range(n)]
    assert packed.sequence.tolist() == [i for i, n in enumerate(lengths) for _ in range(n)]
    assert packed.table[packed.cells].tolist() == packed.rows.tolist()
    assert packed.copies.tolist() == [1] * sum(lengths) + [0] * packed.padding
    assert (packed.sequences, packed.longest) == (len(lengths), max(lengths))
    # Megatron's rotary embedding takes frequencies per token when it sees one sequence of all tokens.
    assert packed.cu_seqlens_q.tolist() == packed.cu_seqlens_kv.tolist() == [0, total]


@pytest.mark.parametrize("multiple", [1, 4])
def test_a_batch_without_a_sequence_is_padding_only(multiple: int) -> None:
    cache = KVCache(capacity=8)
    empty = torch.tensor([], dtype=torch.int64)
    for packed in (PackedTokens.of_sequences(empty, multiple, cache), PackedTokens.one_each(empty, multiple, cache)):
        assert (packed.sequences, packed.longest, packed.padding) == (0, 0, multiple)
        out = core_attention(2 * KV_HEADS)(*random_qkv(multiple, 2, seed=0), None, packed_seq_params=packed)
        assert torch.equal(out, torch.zeros(multiple, 2 * KV_HEADS * VALUE_CHANNELS))
        cache.keep(empty)


def test_sinks_have_a_gradient_of_zero_in_a_batch_without_a_sequence() -> None:
    """Megatron waits for one of every parameter in every micro-batch."""
    attention = core_attention(KV_HEADS, has_sinks=True)
    packed = PackedTokens.of_sequences(torch.tensor([], dtype=torch.int64), 2)
    attention(*random_qkv(2, 1, seed=0), None, packed_seq_params=packed).sum().backward()
    sinks = attention.softmax_offset
    assert sinks is not None
    assert torch.equal(sinks.grad, torch.zeros(KV_HEADS))


@pytest.mark.parametrize(("positions", "multiple", "padding"), [([4], 1, 0), ([4], 3, 2), ([4, 0, 2], 3, 0)])
def test_one_token_each_is_described(positions: list[int], multiple: int, padding: int) -> None:
    packed = PackedTokens.one_each(torch.tensor(positions), multiple, KVCache(capacity=5))
    assert packed.decoding
    assert packed.positions.tolist() == positions + [0] * padding
    assert packed.rows.tolist() == list(range(len(positions)))
    assert (packed.sequences, packed.longest, packed.padding) == (len(positions), 5, padding)


def test_anything_but_packed_tokens_is_refused() -> None:
    with pytest.raises(TypeError, match="PackedTokens"):
        core_attention(KV_HEADS)(*random_qkv(3, 1, seed=0), None)

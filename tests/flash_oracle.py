"""Flash attention in plain torch, for CPUs: what torch's own operators compute on a GPU, in float64 and one by one.

Of bf16 it rounds what kernels round before a product: probabilities, and the gradients of logits.

Importing it gives `_flash_attention_forward` and `_flash_attention_backward` a CPU kernel, as torch itself puts
FlashAttention-3 and 4 in their place for CUDA. So everything above the kernel runs here as it does there. What a kernel
may assume is checked of every call, beyond what those on a GPU check themselves.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.library import Library
from torch.nn.attention import current_flash_attention_impl

Tensor = torch.Tensor

LIBRARY = Library("aten", "IMPL")


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    most_queries: int,
    most_keys: int,
    dropout: float,
    causal: bool,
    debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    assert not any((dropout, debug_mask, *others.values()))
    assert isinstance(scale, float)
    window = _checked_window(causal, window_size_left, window_size_right)
    _check(query, key, value, query_starts, key_starts, most_queries, most_keys)
    out = query.new_full((*query.shape[:2], value.shape[2]), torch.nan)
    lse = torch.full((query.shape[1], len(query)), torch.nan, dtype=_lse_dtype(query))
    for rows, keys in _sequences(query_starts, key_starts):
        logits = _logits(query[rows], key[keys], scale, causal, window)
        probs = _factor(logits.softmax(-1), query)
        out[rows] = torch.einsum("hqk,khc->qhc", probs, _of_every_head(value[keys], query)).to(out.dtype)
        lse[:, rows] = logits.logsumexp(-1).to(lse.dtype)
    assert all(x.isfinite().all() for x in (out, lse)), "a query without a key, or a row in no sequence"
    none = torch.empty(0)
    return out, lse, none, none, none


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    most_queries: int,
    most_keys: int,
    dropout: float,
    causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Dao (2023), algorithm 2: from the output and the log-sum-exp that it is given, whatever they are of."""
    assert not dropout
    assert rng_state.dtype is torch.uint64
    assert isinstance(scale, float)
    window = _checked_window(causal, window_size_left, window_size_right)
    _check(query, key, value, query_starts, key_starts, most_queries, most_keys)
    assert grad.dtype == out.dtype == query.dtype
    assert grad.shape == out.shape == (*query.shape[:2], value.shape[2])
    assert lse.shape == (query.shape[1], len(query))
    assert lse.dtype is _lse_dtype(query)
    assert lse.is_contiguous()
    to_query, to_key, to_value = (torch.full_like(x, torch.nan) for x in (query, key, value))
    for rows, keys in _sequences(query_starts, key_starts):
        probs = (_logits(query[rows], key[keys], scale, causal, window) - lse[:, rows, None].double()).exp()
        above = grad[rows].double()
        products = torch.einsum("qhc,khc->hqk", above, _of_every_head(value[keys], query))
        to_logits = probs * (products - (above * out[rows].double()).sum(-1).T[..., None]) * scale
        to_logits, probs = _factor(to_logits, query), _factor(probs, query)
        to_query[rows] = torch.einsum("hqk,khc->qhc", to_logits, _of_every_head(key[keys], query)).to(query.dtype)
        of_heads = torch.einsum("hqk,qhc->khc", to_logits, query[rows].double())
        to_key[keys] = _of_kv_heads(of_heads, key).to(key.dtype)
        to_value[keys] = _of_kv_heads(torch.einsum("hqk,qhc->khc", probs, above), value).to(value.dtype)
    assert all(x.isfinite().all() for x in (to_query, to_key, to_value)), "a key in no sequence"
    return to_query, to_key, to_value


def _logits(query: Tensor, key: Tensor, scale: float, causal: bool, window: int | None) -> Tensor:
    """[heads, queries, keys]; causal masks are aligned at the bottom right."""
    logits = torch.einsum("qhc,khc->hqk", query.double(), _of_every_head(key, query)) * scale
    if not causal:
        return logits
    last = torch.arange(len(query))[:, None] + len(key) - len(query)
    keys = torch.arange(len(key))
    seen = (keys <= last) if window is None else (keys <= last) & (keys >= last - window)
    return logits.masked_fill(~seen, -torch.inf)


def _check(
    query: Tensor, key: Tensor, value: Tensor, query_starts: Tensor, key_starts: Tensor, queries: int, keys: int
) -> None:
    assert query.dtype == key.dtype == value.dtype
    assert query.dim() == key.dim() == value.dim() == 3
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert key.shape[:2] == value.shape[:2]
    assert key.shape[2] == query.shape[2]
    if current_flash_attention_impl() is None:
        assert key.shape == value.shape, "FlashAttention-2 has one size of heads"
    assert query.shape[2] in range(8, 257, 8)
    assert value.shape[2] in range(8, 257, 8)
    assert query.shape[1] % key.shape[1] == 0
    for starts, rows, most in ((query_starts, query, queries), (key_starts, key, keys)):
        assert starts.dtype is torch.int32
        assert starts.is_contiguous()
        assert (int(starts[0]), int(starts[-1])) == (0, len(rows))
        lengths = starts.diff()
        assert (lengths > 0).all()
        assert lengths.max() <= most <= max(2, int(lengths.max()))
    assert len(query_starts) == len(key_starts) > 1
    assert queries > 1, "FlashAttention-2 gives the log-sum-exp of single queries in another order"


def _checked_window(causal: bool, left: int | None, right: int | None) -> int | None:
    """How many keys before its own a query sees; None for all."""
    assert (left is None) == (right is None)
    if left is None:
        return None
    assert causal
    assert left >= 0 == right
    return left


def _sequences(query_starts: Tensor, key_starts: Tensor) -> Iterator[tuple[slice, slice]]:
    queries, keys = query_starts.tolist(), key_starts.tolist()
    for sequence in range(len(queries) - 1):
        yield slice(*queries[sequence : sequence + 2]), slice(*keys[sequence : sequence + 2])


def _factor(x: Tensor, query: Tensor) -> Tensor:
    """As tensor cores take it: in bf16, if queries are."""
    return x.bfloat16().double() if query.dtype is torch.bfloat16 else x


def _of_every_head(x: Tensor, query: Tensor) -> Tensor:
    return x.double().repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def _of_kv_heads(x: Tensor, like: Tensor) -> Tensor:
    return x.unflatten(1, (like.shape[1], -1)).sum(2)


def _lse_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype is torch.float64 else torch.float32


LIBRARY.impl("_flash_attention_forward", _forward, "CPU")
LIBRARY.impl("_flash_attention_backward", _backward, "CPU")

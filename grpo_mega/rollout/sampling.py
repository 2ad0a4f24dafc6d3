"""Counter-based sampling: the next token is a pure function of the logits and of counters.

A token's noise is a hash of (seed, draw, prompt, sample, position) and the vocabulary index, so it does not depend on
the rest of the batch, the engine or the layout. Integer arithmetic wraps around in two's complement on every device.
"""

from __future__ import annotations

import math
from hashlib import blake2b

import torch
from torch import Tensor

# Stafford's mix 13, the finaliser of SplitMix64, with its golden-ratio increment; written as signed integers.
_GAMMA_64, _MIX_64 = -0x61C8864680B583EB, (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
# Two-round 32-bit hash "lowbias32" (github.com/skeeto/hash-prospector), with 2^32 / golden ratio as increment.
_GAMMA_32, _MIX_32 = -0x61C88647, (0x7FEB352D, -0x7B935975)
# Slightly below 2^-31, so that the largest 31-bit integer, which rounds up to 2^31 in float32, stays below 1.
_UNIT = 2.0**-31 * (1 - 2.0**-24)


def prompt_key(prompt_id: str) -> int:
    """63-bit hash of a prompt's id, the same in every process and on every machine."""
    return int.from_bytes(blake2b(prompt_id.encode(), digest_size=8).digest(), "big") >> 1


def draw_key(seed: int, draw: int) -> int:
    """63-bit hash of the run's seed and the number of the draw in the run."""
    # "version" is historical: with another word every run would draw other samples.
    return prompt_key(f"seed {seed} version {draw}")


def gumbel_noise(keys: Tensor, sample_indices: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise for the next token of B sequences; every row is a function of its own counters.

    Values are -log(-log(1 - u)) of a 31-bit uniform number u, whose resolution is finest where the largest values come
    from: they reach 22, enough for tokens of probability 1e-9 to win now and then.

    Args:
        keys: [B] int64, `prompt_key` of each sequence's prompt, xor the `draw_key` of its draw; is overwritten.
        sample_indices: [B] integers below 2^31, index of the sequence among the prompt's samples.
        positions: [B] integers below 2^32, index of the token in its completion.
        vocab: Vocabulary size V.

    Returns:
        [B, V] float32 on the device of `keys`, always finite.

    Raises:
        ValueError: The three vectors differ in shape.
    """
    if not keys.shape == sample_indices.shape == positions.shape:
        shapes = [list(x.shape) for x in (keys, sample_indices, positions)]
        raise ValueError(f"keys, sample_indices and positions must have one shape [B], got {shapes}")
    # The n-th output of SplitMix64 is a mix of seed + n * increment, so any of them can be computed without those
    # before it. The bounds of the arguments make n unique: the sample is its upper half, the position its lower.
    sequence = _mix_64(keys)
    counter = (sample_indices.long() << 32) + positions
    return _gumbel(_random_bits(_mix_64(sequence + counter * _GAMMA_64), vocab))


def sample_tokens(
    logits: Tensor, noise: Tensor | None, *, temperature: float, top_k: int, top_p: float
) -> tuple[Tensor, Tensor]:
    """Samples one token per row with the Gumbel-max trick.

    Top-k and top-p both select from the full distribution and their sets are intersected, as in SGLang; of equally
    likely tokens the lower index comes first. Columns that are -inf are never sampled.

    Args:
        logits: [B, V].
        noise: [B, V] from `gumbel_noise`; None when `temperature` is 0.
        temperature: Logits are divided by it; 0 takes the likeliest token and scores it at temperature 1.
        top_k: Sample among the k likeliest tokens; 0 for all.
        top_p: Sample among the smallest set of likeliest tokens whose probability reaches this; 1 for all.

    Returns:
        Tokens [B] int64, and their natural-log probabilities [B] float32 under the full softmax of
        logits / temperature, before top-k and top-p.

    Raises:
        ValueError: An argument is out of range, `noise` is missing, superfluous or of a different shape, or a row of
            `logits` is not a distribution (NaN, +inf, or -inf in every column).
    """
    _require_sampling_arguments(logits, noise, temperature, top_k, top_p)
    logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    # The token with the largest log-prob plus Gumbel noise is distributed like the softmax.
    scores = logprobs if noise is None else logprobs + noise
    if noise is not None and (top_k > 0 or top_p < 1):
        scores = scores.masked_fill(~_likeliest(logprobs, top_k, top_p), -math.inf)
    tokens = scores.argmax(dim=-1)
    chosen = logprobs.gather(-1, tokens[:, None]).squeeze(-1)
    # log_softmax turns an invalid row into NaN, so looking at one number per row is enough.
    if not chosen.isfinite().all():
        rows = (~chosen.isfinite()).nonzero().flatten().tolist()
        raise ValueError(f"logits of rows {rows} hold NaN or +inf, or are -inf everywhere; check the weights")
    return tokens, chosen


def _likeliest(logprobs: Tensor, top_k: int, top_p: float) -> Tensor:
    """[B, V] bool: tokens kept by top-k and top-p."""
    # Stable, so that of equally likely tokens the one with the lower index is kept on every device.
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if top_k > 0:
        keep[:, top_k:] = False
    if top_p < 1:
        # In float64, because the rounding errors of the sum grow with the vocabulary. A token is kept as long as the
        # likelier ones do not reach `top_p`, and so the likeliest always is.
        probability = ordered.double().exp()
        keep &= probability.cumsum(-1) - probability < top_p
    return torch.empty_like(keep).scatter_(-1, order, keep)


def _require_sampling_arguments(
    logits: Tensor, noise: Tensor | None, temperature: float, top_k: int, top_p: float
) -> None:
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature is {temperature}; use 0 for greedy or a positive number")
    if (noise is None) != (temperature == 0):
        raise ValueError(f"temperature is {temperature}; noise is needed above 0 and must be None at 0 (greedy)")
    if noise is not None and noise.shape != logits.shape:
        raise ValueError(f"noise has shape {list(noise.shape)}, logits {list(logits.shape)}; they must be equal")
    if top_k < 0:
        raise ValueError(f"top_k is {top_k}; use 0 for all tokens or a positive number")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; use a number in (0, 1], 1 for all tokens")


def _random_bits(keys: Tensor, vocab: int) -> Tensor:
    """[B, V] int32, 31 random bits for every key [B] and vocabulary index.

    Half of the 64-bit key enters before each round. In place and in 32 bits: this runs over the whole vocabulary for
    every sampled token, and is bound by memory traffic.
    """
    first, second = keys.int()[:, None], (keys >> 32).int()[:, None]
    bits = torch.arange(vocab, dtype=torch.int32, device=keys.device) * _GAMMA_32 + first
    _xorshift_(bits, 16).mul_(_MIX_32[0])
    _xorshift_(bits, 15).bitwise_xor_(second).mul_(_MIX_32[1])
    return _xorshift_(bits, 16).bitwise_and_(0x7FFFFFFF)


def _gumbel(bits: Tensor) -> Tensor:
    """-log(-log(1 - u)) in float32, for u = bits / 2^31 in the open interval (0, 1)."""
    uniform = bits.float().add_(0.5).mul_(_UNIT)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix_64(x: Tensor) -> Tensor:
    """Bijective mixing function of 64-bit integers with random-looking output; overwrites and returns `x`."""
    _xorshift_(x, 30).mul_(_MIX_64[0])
    _xorshift_(x, 27).mul_(_MIX_64[1])
    return _xorshift_(x, 31)


def _xorshift_(x: Tensor, shift: int) -> Tensor:
    """x ^= x >>> shift. torch shifts signed integers arithmetically; the mask clears the copies of the sign bit."""
    width = 8 * x.element_size()
    return x.bitwise_xor_((x >> shift).bitwise_and_((1 << (width - shift)) - 1))

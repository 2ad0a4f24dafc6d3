"""Rotary embeddings (RoPE: Su et al., 2021) of packed tokens: each token is rotated by its position in its sequence.

`rotate` is for grouped-query attention, where the core attention calls it. Latent attention rotates inside Megatron's
own module, before the core attention; there `use_packed_rotary` makes Megatron gather the angles by position.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

from grpo_mega.config.schema import Llama3RopeConfig, YarnConfig
from grpo_mega.models.megatron.packed import PackedTokens


def cos_sin(
    positions: torch.Tensor,
    channels: int,
    base: float,
    llama3: Llama3RopeConfig | None = None,
    yarn: YarnConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T] positions -> cosine and sine [T, 1, channels / 2] of every angle, for `rotate`.

    With `yarn` both are longer than those of an angle, so that logits become larger (`YarnConfig.mscale`).
    """
    frequencies = base ** -(torch.arange(0, channels, 2, dtype=torch.float32, device=positions.device) / channels)
    length = 1.0
    if llama3 is not None and llama3.factor > 1:
        frequencies = stretched(frequencies, llama3)
    if yarn is not None and yarn.factor > 1:
        frequencies = slowed_down(frequencies, base, yarn)
        length = 0.1 * yarn.mscale * math.log(yarn.factor) + 1
    angles = (positions[:, None].float() * frequencies)[:, None]
    return angles.cos() * length, angles.sin() * length


def stretched(frequencies: torch.Tensor, llama3: Llama3RopeConfig) -> torch.Tensor:
    """Changes the frequencies of plain rotary positions, in radians per token, to those of Llama 3.1.

    A share between 0 and 1 of each frequency is kept, the rest is slowed down. The share grows evenly with how
    often the channel turns within the original context, from `low_freq_factor` to `high_freq_factor` times.
    """
    low, high = llama3.low_freq_factor, llama3.high_freq_factor
    turns = frequencies * llama3.original_context / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (kept + (1 - kept) / llama3.factor) * frequencies


def slowed_down(frequencies: torch.Tensor, base: float, yarn: YarnConfig) -> torch.Tensor:
    """Changes the frequencies of plain rotary positions, [channels / 2] radians per token, to those of YaRN.

    See Peng et al., 2023, section 3.2.

    A share between 0 and 1 of each frequency is kept, the rest is slowed down. The share falls evenly with the
    number of the pair, from 1 where it turns `beta_fast` times within the original context to 0 where it turns
    `beta_slow` times; with `truncate` these two are whole numbers.
    """
    pairs = len(frequencies)

    def number(turns: float) -> float:
        """Number of the pair of channels that turns `turns` times within the original context."""
        return pairs * math.log(yarn.original_context / (turns * 2 * math.pi)) / math.log(base)

    first, last = number(yarn.beta_fast), number(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    # The upper bound is in channels where one in pairs would be expected, as in YaRN's own code; so is the 0.001, which
    # avoids a division by 0.
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    wide = last - first if last != first else 0.001
    kept = 1 - ((torch.arange(pairs, dtype=torch.float32, device=frequencies.device) - first) / wide).clamp(0, 1)
    return (kept + (1 - kept) / yarn.factor) * frequencies


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first c channels of [T, heads, channels]; cosine and sine are [T, 1, c / 2].

    Channel i is paired with i + c / 2, as in Megatron and Llama's weights. The channels after the first c stay.
    """
    return _Rotate.apply(x, cos, sin)


class _Rotate(torch.autograd.Function):
    """(a, b) -> (a cos - b sin, b cos + a sin), without concatenation; the gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, direction=1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, direction=-1), None, None


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: int) -> torch.Tensor:
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    turned, channels = torch.empty_like(x), 2 * cos.shape[-1]
    turned[..., channels:] = x[..., channels:]
    (a, b), (turned_a, turned_b) = x[..., :channels].chunk(2, -1), turned[..., :channels].chunk(2, -1)
    torch.mul(a, cos, out=turned_a).addcmul_(b, sin, value=-direction)
    torch.mul(b, cos, out=turned_b).addcmul_(a, sin, value=direction)
    return turned


class PackedRotaryEmbedding(RotaryEmbedding):
    """RoPE whose rows follow `PackedTokens.positions`.

    Megatron passes the result of `get_rotary_seq_len` to `forward`, and so positions can take the place of a length.
    """

    table: torch.Tensor

    def get_rotary_seq_len(self, inference_context: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[T'] positions, from the `PackedTokens` among Megatron's arguments."""
        packed = next(x for x in (*args, *kwargs.values()) if isinstance(x, PackedTokens))
        return packed.positions

    def forward(self, positions: torch.Tensor, **_: Any) -> torch.Tensor:
        """[T'] positions of this rank's rows -> angles [T', 1, 1, channels], as Megatron expects them.

        With context parallelism Megatron expects the angles of all ranks' rows, and takes this rank's two parts out of
        them; the other parts, which it never reads, are copies.
        """
        angles = self.table.index_select(0, positions)
        group = parallel_state.get_context_parallel_group()
        if group.size() == 1:
            return angles
        front, back = angles.chunk(2)
        # Megatron takes parts `rank` and 2 * size - 1 - `rank`.
        parts = [front] * 2 * group.size()
        parts[2 * group.size() - 1 - group.rank()] = back
        return torch.cat(parts)


class PackedYarnEmbedding(PackedRotaryEmbedding):
    """RoPE with YaRN's frequencies, whose rows follow `PackedTokens.positions`.

    Megatron also expects a factor on sine and cosine, which is always 1 here.
    """

    def forward(self, positions: torch.Tensor, **arguments: Any) -> Any:
        """[T'] positions of this rank's rows -> angles [T', 1, 1, channels] and the factor."""
        return super().forward(positions, **arguments), 1.0


def use_packed_rotary(model: torch.nn.Module, context: int) -> None:
    """Makes every rotary embedding of the model, all of one class, follow packed positions below `context`."""
    table = None
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if isinstance(module, RotaryEmbedding):
            if type(module) not in _PACKED:
                raise TypeError(f"{type(module)} is not supported: its angles would not restart with each sequence")
            # One table for all layers, each of which has a rotary module.
            if table is None:
                angles = module.get_emb(context)  # [context, 1, 1, channels]; YaRN's come with a factor
                table = angles[0] if isinstance(angles, tuple) else angles
            module.__class__ = _PACKED[type(module)]
            module.table = table


def make_no_yarn_tables() -> None:
    """Keeps layers with YaRN from computing sines and cosines of all positions, which nothing reads here."""
    # Replaced on the class, because the constructor already makes the tables.
    YarnRotaryEmbedding._set_cos_sin_cache = lambda *_, **__: None


_PACKED = {RotaryEmbedding: PackedRotaryEmbedding, YarnRotaryEmbedding: PackedYarnEmbedding}

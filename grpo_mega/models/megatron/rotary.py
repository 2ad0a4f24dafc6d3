"""Rotary positions (RoPE: Su et al., 2021) of packed tokens: each token turns by its own place in its sequence.

`rotate` serves grouped-query attention, from within the core attention. Latent attention rotates inside Megatron's own
module, before keys meet the core: there, `use_packed_rotary` makes Megatron gather the angles by position.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

from grpo_mega.models.megatron.packed import PackedTokens


def cos_sin(positions: torch.Tensor, channels: int, base: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[T] positions -> cosine and sine [T, 1, channels / 2] of every angle, for `rotate`."""
    frequencies = base ** -(torch.arange(0, channels, 2, dtype=torch.float32, device=positions.device) / channels)
    angles = (positions[:, None].float() * frequencies)[:, None]
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[T, heads, channels], channel i paired with channel i + channels / 2 as in Megatron and in Llama's weights."""
    return _Rotate.apply(x, cos, sin)


class _Rotate(torch.autograd.Function):
    """(a, b) -> (a cos - b sin, b cos + a sin); the gradient turns back. Written in place, without concatenation."""

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
    turned = torch.empty_like(x)
    (a, b), (turned_a, turned_b) = x.chunk(2, -1), turned.chunk(2, -1)
    torch.mul(a, cos, out=turned_a).addcmul_(b, sin, value=-direction)
    torch.mul(b, cos, out=turned_b).addcmul_(a, sin, value=direction)
    return turned


class PackedRotaryEmbedding(RotaryEmbedding):
    """RoPE whose rows follow `PackedTokens.positions`.

    Megatron hands `get_rotary_seq_len`'s result to `forward`; the positions travel along that way.
    """

    table: torch.Tensor

    def get_rotary_seq_len(self, inference_context: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[T] positions, found among Megatron's arguments."""
        packed = next(x for x in (*args, *kwargs.values()) if isinstance(x, PackedTokens))
        return packed.positions

    def forward(self, positions: torch.Tensor, **_: Any) -> torch.Tensor:
        """[T'] positions of this rank's rows -> angles [T', 1, 1, channels], as Megatron expects them.

        With context parallelism it is handed the angles of all ranks' rows and takes this rank's two parts out of them;
        the others are never read.
        """
        angles = self.table.index_select(0, positions)
        group = parallel_state.get_context_parallel_group()
        if group.size() == 1:
            return angles
        front, back = angles.chunk(2)
        parts = [front] * 2 * group.size()
        parts[2 * group.size() - 1 - group.rank()] = back
        return torch.cat(parts)


class PackedYarnEmbedding(PackedRotaryEmbedding):
    """The same with YaRN's frequencies. Megatron also expects a factor on sine and cosine, which is always 1 here."""

    def forward(self, positions: torch.Tensor, **arguments: Any) -> Any:
        """[T'] positions of this rank's rows -> angles [T', 1, 1, channels] and the factor."""
        return super().forward(positions, **arguments), 1.0


def use_packed_rotary(model: torch.nn.Module, context: int) -> None:
    """Makes every rotary embedding of the model, all of one kind, read packed positions below `context`."""
    table = None
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if isinstance(module, RotaryEmbedding):
            if type(module) not in _PACKED:
                raise TypeError(f"{type(module)} is not supported: its angles would not restart with each sequence")
            table = _angles(module, context) if table is None else table
            module.__class__ = _PACKED[type(module)]
            module.table = table


_PACKED = {RotaryEmbedding: PackedRotaryEmbedding, YarnRotaryEmbedding: PackedYarnEmbedding}


def _angles(module: Any, context: int) -> torch.Tensor:
    """[context, 1, 1, channels] as Megatron makes them; YaRN comes with a factor."""
    angles = module.get_emb(context)
    return angles[0] if isinstance(angles, tuple) else angles

"""Attention in `bench_kernels.py`: a layer of a preset over a group of completions, by each kernel that is installed.

As a run has it: the prompt is in the row once, the completions differ in length, and `layout.attention` names what
computes them. Importing this prepares the platform of training, so the tool does it after everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl

from grpo_mega import platform

# Must come before megatron.core is imported.
platform.start()

from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from grpo_mega.config.schema import LayoutConfig, ModelConfig  # noqa: E402
from grpo_mega.models.megatron.attention import PackedAttention  # noqa: E402
from grpo_mega.models.megatron.packed import PackedTokens  # noqa: E402
from grpo_mega.models.megatron.varlen import PACKAGES, choose, is_installed  # noqa: E402


@dataclass(frozen=True)
class Shape:
    """A layer's attention: heads of queries, of keys and values, channels of each; tokens of prompt and completions."""

    model: str
    heads: int
    kv_heads: int
    keys: int
    values: int
    prompt: int
    completions: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Rows of hidden states; the prompt counts once."""
        return self.prompt + sum(self.completions)

    @property
    def numbers(self) -> list[int]:
        """For the table: tokens, heads, heads of keys, channels of keys and of values."""
        return [self.tokens, self.heads, self.kv_heads, self.keys, self.values]

    def operations(self, gradients: bool) -> int:
        """Fewest operations for products of queries with keys that they see: two products forward, five backward."""
        triangles = sum(n * (n + 1) // 2 for n in (self.prompt, *self.completions))
        pairs = self.heads * (triangles + self.prompt * sum(self.completions))
        return 2 * pairs * ((4 * self.keys + 3 * self.values) if gradients else self.keys + self.values)


COMPLETIONS = (3000, 2100, 1500, 1100, 800, 600, 400, 250)
GPU_SHAPES = [
    Shape("deepseekmath_7b", 32, 32, 128, 128, 512, COMPLETIONS),
    Shape("qwen3_30b_a3b", 32, 4, 128, 128, 512, COMPLETIONS),
    Shape("deepseek_v3, tensor parallel 8", 16, 16, 192, 128, 512, COMPLETIONS),
]
CPU_SHAPES = [
    replace(shape, heads=8, kv_heads=8 * shape.kv_heads // shape.heads, prompt=32, completions=(190, 130, 90, 30))
    for shape in GPU_SHAPES
]


def kernels(device: torch.device) -> list[str]:
    """Values of `layout.attention` to compare: what is not installed, or not made for this GPU, is left out."""
    if device.type == "cpu":
        return ["padded"]
    capability = torch.cuda.get_device_capability(device)[0]
    others = [name for name, (*_, made_for) in PACKAGES.items() if capability in made_for and is_installed(name)]
    return ["padded", "torch", *others]


@contextmanager
def chosen(name: str, device: torch.device) -> Iterator[None]:
    """Context in which torch's operators run this kernel; afterwards they run torch's own again."""
    choose(LayoutConfig(attention=name), ModelConfig(dtype="bf16"), device)
    try:
        yield
    finally:
        if current_flash_attention_impl() is not None:
            restore_flash_attention_impl()


def prepared(
    name: str, shape: Shape, dtype: torch.dtype, device: torch.device, gradients: bool
) -> Callable[[], list[Tensor]]:
    """A pass of the layer over fixed queries, keys and values, all with a gradient or none."""
    sequences = len(shape.completions)
    prompts = torch.zeros(sequences, dtype=torch.int64)
    lengths = shape.prompt + torch.tensor(shape.completions)
    of = {"prompts": prompts, "prompt_lengths": torch.full_like(lengths, shape.prompt), "table": name == "padded"}
    packed = PackedTokens.of_sequences(lengths, 1, **of).to(device)
    random = torch.Generator().manual_seed(0)
    sizes = ((shape.heads, shape.keys), (shape.kv_heads, shape.keys), (shape.kv_heads, shape.values))
    leaves = [torch.randn(shape.tokens, *size, generator=random).to(device, dtype) for size in sizes]
    above = torch.randn(shape.tokens, shape.heads * shape.values, generator=random).to(device, dtype)
    config = TransformerConfig(num_layers=1, hidden_size=shape.heads, num_attention_heads=shape.heads)
    attention = PackedAttention(config, layer_number=1)

    def run() -> list[Tensor]:
        inputs = [leaf.detach().requires_grad_(gradients) for leaf in leaves]
        out = attention(*inputs, None, packed_seq_params=packed)
        return [out, *(torch.autograd.grad(out, inputs, above) if gradients else ())]

    return run

"""Attention of a run by each kernel that is installed, in bf16, against a table in float64 on the CPU.

As many roundings apart as lie on the way to each result (attention_cases.py), which tests/models/test_varlen.py checks
with a kernel in plain torch that rounds where these do.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attention_cases import HEADS, KINDS, ROWS, check_in_bf16, check_ranks_in_bf16
from flash_oracle import LIBRARY
from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl

from grpo_mega.config.schema import LayoutConfig, ModelConfig
from grpo_mega.models.megatron.varlen import PACKAGES, choose, is_installed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
assert LIBRARY  # computes in float64 on the CPU what context parallel ranks are compared with
CUDA = torch.device("cuda")


@pytest.fixture(scope="module", params=["torch", *PACKAGES])
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """A value of `layout.attention`, chosen as a model chooses it."""
    if request.param in PACKAGES:
        _, module, made_for = PACKAGES[request.param]
        if not is_installed(request.param):
            pytest.skip(f"{module} is not installed")
        if torch.cuda.get_device_capability()[0] not in made_for:
            pytest.skip(f"{request.param} is not for this GPU")
    chosen = choose(LayoutConfig(attention=request.param), ModelConfig(dtype="bf16"), CUDA)
    assert current_flash_attention_impl() == (PACKAGES[chosen][0] if chosen in PACKAGES else None)
    yield chosen
    if chosen in PACKAGES:
        restore_flash_attention_impl()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("members", ROWS)
def test_outputs_and_gradients(kernel: str, members: str, heads: str, kind: str) -> None:
    if kernel == "flash4" and "window" in kind:
        pytest.skip("layout.attention=flash4 has no windows")
    check_in_bf16(members, heads, kind, CUDA)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", ["DeepSeekMath", "Qwen3", "DeepSeek-V3"])
def test_context_parallel_ranks(kernel: str, heads: str, kind: str) -> None:
    """Queries that begin in the middle of their sequence: causal masks aligned at the bottom right."""
    if kernel == "flash4" and "window" in kind:
        pytest.skip("layout.attention=flash4 has no windows")
    check_ranks_in_bf16("groups and others", heads, kind, 2, CUDA)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("members", ROWS)
def test_padded(members: str, heads: str, kind: str) -> None:
    """torch's fused attention in tables, as for fp32 and in the embedded engine."""
    check_in_bf16(members, heads, kind, CUDA, table=True)

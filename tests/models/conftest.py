"""One rank of Megatron inside the pytest process, joined and left once per test file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

# Before all that imports megatron.core.
from small_models import MODELS, PLATFORM, VOCABULARY

from grpo_mega.config.schema import LayoutConfig, LoRAConfig, OptimizerConfig
from grpo_mega.models.policy import Policy
from grpo_mega.models.topology import Topology, join_layout, leave_layout
from grpo_mega.platform import join_processes
from grpo_mega.types import Batch, pack_tokens

MakePolicy = Callable[..., Policy]


@pytest.fixture(scope="module")
def topology() -> Iterator[Topology]:
    """The layout of a lone process; the environment that joining it reads is left as it was."""
    with pytest.MonkeyPatch.context() as environment:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_DEVICE_MAX_CONNECTIONS"):
            environment.setenv(name, "")
            environment.delenv(name)
        join_processes(PLATFORM)
    yield join_layout(LayoutConfig(), seed=1)
    leave_layout()


@pytest.fixture(scope="module")
def make_policy(topology: Topology) -> MakePolicy:
    """Builds a policy of one of MODELS with the same random weights every time."""

    def make(
        model: str = "dense",
        micro_batch_tokens: int = 16384,
        vocabulary: int = VOCABULARY,
        frozen: Sequence[str] = (),
        lora: LoRAConfig | None = None,
        **changes: Any,
    ) -> Policy:
        layout, sizes = LayoutConfig(micro_batch_tokens=micro_batch_tokens), replace(MODELS[model], **changes)
        policy = Policy(sizes, layout, vocabulary, topology, PLATFORM, OptimizerConfig(frozen=[*frozen]), lora)
        policy.initialize(seed=0)
        return policy

    return make


@pytest.fixture(scope="session")
def batch() -> Batch:
    """Nine sequences of 2 to 20 tokens with prompts, random weights and advantages."""
    random = torch.Generator().manual_seed(5)
    lengths = [7, 20, 2, 11, 5, 5, 16, 3, 9]
    tokens = [torch.randint(VOCABULARY, (n,), generator=random).tolist() for n in lengths]
    packed = pack_tokens(tokens, [1, 6, 1, 4, 2, 4, 1, 2, 8])
    weight, advantage = torch.rand(2, sum(lengths), generator=random)
    return packed.with_(weight=weight * packed.mask / 50, advantage=(advantage - 0.5) * packed.mask)

"""Samples are packed with all that an update reads, and a prompt is the same in all of its samples."""

from __future__ import annotations

from array import array

import torch

from grpo_mega.stages.packing import pack_samples
from grpo_mega.types import Prompt, Sample


def sample(prompt: Prompt, tokens: list[int], experts: torch.Tensor | None) -> Sample:
    logprobs = array("f", [-token / 8 for token in tokens])
    return Sample(prompt, 0, array("i", tokens), logprobs, "stop", ((0, 0),), "", experts)


def routed(first: int, tokens: int) -> torch.Tensor:
    """Experts first, first + 1, ... of so many tokens, in the only MoE layer."""
    return torch.arange(first, first + tokens, dtype=torch.int16).view(tokens, 1, 1)


def test_a_prompt_is_routed_as_in_its_first_sample_and_completions_as_they_were_sampled() -> None:
    """A prompt may be computed once for all its samples. No token follows the last one, whose experts are unknown."""
    prompts = [Prompt("a", (5, 6), "", "", ""), Prompt("b", (7,), "", "", "")]
    batch = pack_samples(
        [
            sample(prompts[0], [8], None),
            sample(prompts[0], [8, 9], routed(10, 3)),
            sample(prompts[0], [9, 8, 3], routed(20, 4)),
            sample(prompts[1], [4], routed(30, 1)),
        ]
    )
    assert batch.experts is not None
    by_sample = [part.flatten().tolist() for part in batch.experts.split(batch.lengths.tolist())]
    assert by_sample == [[-1, -1, -1], [10, 11, 12, -1], [10, 11, 22, 23, -1], [30, -1]]
    assert batch.prompts.tolist() == [0, 0, 0, 1]
    assert batch.prompt_lengths.tolist() == [2, 2, 2, 1]
    assert batch.tokens.tolist() == [5, 6, 8, 5, 6, 8, 9, 5, 6, 9, 8, 3, 7, 4]
    assert batch.rollout_logprob[batch.mask].tolist() == [-x / 8 for x in (8, 8, 9, 9, 8, 3, 4)]

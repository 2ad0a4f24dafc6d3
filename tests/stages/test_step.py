"""The loss that a configuration describes, wherever its correction is computed; how samples are packed."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
import torch
from composed import composed

from grpo_kernels.options import KINDS
from grpo_mega.algorithm.correction import correction_factors
from grpo_mega.config.schema import AlgorithmConfig
from grpo_mega.stages.exchange import pack_samples
from grpo_mega.stages.step import StepOptions, correction_of, loss_of
from grpo_mega.types import Prompt, Sample, ScoredTokens


def loss_and_gradient(algorithm: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Of three sequences, in two of which the engine is far from the trainer at one token alone."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 5, generator=generator).requires_grad_()
    ids, cu_seqlens = torch.arange(9) % 5, torch.tensor([0, 3, 5, 9])
    logprob = hidden.detach().log_softmax(-1).gather(1, ids[:, None])[:, 0]
    old = logprob - torch.tensor([0.1, -0.1, 0.05, 0.1, 0.0, -0.2, 0.1, 0.0, 0.1])
    # The mean of rollout - logprob is 0.6, 0.0 and 0.3; without the token far away 0.0, 0.0 and -0.03.
    rollout = old + torch.tensor([0.1, 1.7, 0.05, 0.1, 0.0, -0.2, 0.1, 1.3, 0.0])
    scored = ScoredTokens(
        index=torch.arange(9),
        cu_seqlens=cu_seqlens,
        tokens=ids,
        mask=torch.ones(9, dtype=torch.bool),
        weight=torch.full((9,), 1 / 9),
        advantage=torch.tensor([-1.0, -1.0, -1.0, -0.5, -0.5, 2.0, 2.0, 2.0, 2.0]),
        rollout_logprob=rollout,
        old_logprob=old,
        ref_logprob=logprob - 0.3,
    )
    if options := correction_of(algorithm):
        scored = replace(scored, correction=correction_factors(old - rollout, scored.mask, cu_seqlens, options))
    losses = loss_of(algorithm, old_is_current=False)(hidden, torch.eye(5), scored)
    return losses.total.detach(), torch.autograd.grad(losses.total, hidden)[0]


@pytest.mark.parametrize("correction", ["none", "truncate", "mask"])
@pytest.mark.parametrize("off_policy_mask", [None, 0.1])
@pytest.mark.parametrize("objective", KINDS)
def test_a_bound_that_rejects_no_sequence_changes_nothing(
    objective: str, off_policy_mask: float | None, correction: str
) -> None:
    """With the bound the correction is computed before the updates, without it in the loss."""
    settings = {"objective": objective, "off_policy_mask": off_policy_mask, "correction": correction, "kl_coef": 0.1}
    loss, gradient = loss_and_gradient(AlgorithmConfig(correction_floor=0.5, **settings))
    same_loss, same_gradient = loss_and_gradient(AlgorithmConfig(correction_floor=0.5, rejection_cap=1e6, **settings))
    assert gradient.any()
    torch.testing.assert_close(same_loss, loss, atol=1e-7, rtol=1e-6)
    torch.testing.assert_close(same_gradient, gradient, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize(
    ("words", "skips"),
    [
        ([], True),
        (["algorithm.correction=truncate"], True),
        (["algorithm.mini_batches=2"], False),
        (["algorithm.epochs=2"], False),
        (["algorithm.correction=truncate", "algorithm.correction_level=sequence"], False),
        (["algorithm.rejection_cap=2"], False),
        (["algorithm.kl_in=reward", "algorithm.kl_coef=0.1", "algorithm.advantage_std=none"], False),
        (["algorithm=ppo", "algorithm.mini_batches=1"], False),
    ],
)
def test_a_step_of_one_update_saves_the_pass_of_the_old_policy_unless_something_needs_it(
    words: list[str], skips: bool
) -> None:
    assert StepOptions.of(composed("experiment=tiny", *words)).skips_old_pass == skips


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


def test_a_prompt_is_routed_as_in_the_first_sample_of_which_that_is_known() -> None:
    """Of a sample in pieces the engine returns the experts of the last one."""
    prompt, unread = Prompt("a", (5, 6), "", "", ""), torch.full((3, 1, 1), -1, dtype=torch.int16)
    pieces = sample(prompt, [8, 9, 9], torch.cat([unread, routed(10, 1)]))
    pieces = replace(pieces, given=((1, 2),), restarts=(1,))
    batch = pack_samples([pieces, sample(prompt, [8, 9], routed(20, 3))])
    assert batch.experts is not None
    by_sample = [part.flatten().tolist() for part in batch.experts.split(batch.lengths.tolist())]
    assert by_sample == [[20, 21, -1, 10, -1], [20, 21, 22, -1]]

"""How finished samples are distributed over ranks; samples that go on."""

from __future__ import annotations

from array import array

import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.rollout.engine import Wanted, round_robin
from grpo_mega.types import Prompt, Sample


@given(st.integers(1, 5), st.lists(st.integers(0, 7), max_size=6))
def test_ranks_take_turns_over_several_calls(ranks: int, sizes: list[int]) -> None:
    """Each item falls to one rank, the next one to the next rank, also when that is in another call."""
    distributed = 0
    holders: list[int] = []
    for size in sizes:
        parts = [round_robin(range(size), rank, ranks, distributed) for rank in range(ranks)]
        holders += [next(rank for rank, part in enumerate(parts) if item in part) for item in range(size)]
        assert sum(map(len, parts)) == size
        distributed += size
    assert holders == [item % ranks for item in range(distributed)]


def going_on(sample: Sample | None, tokens: list[int], version: int, experts: list[int]) -> Sample:
    """The sample with further tokens; the engine has sent all but the last to these experts."""
    ids, logprobs = array("i", tokens), array("f", [-1.0] * len(tokens))
    routed = torch.tensor(experts).view(-1, 1, 1)
    return Wanted(Prompt("p", (1,), "", "", ""), 0, sample).sample(ids, logprobs, "abort", version, str, routed)


def test_tokens_that_are_read_again_keep_the_experts_that_sampled_them() -> None:
    """Rounding may send them to others, as the batch is another one."""
    sample = going_on(going_on(None, [5, 6], 3, [10, 11]), [7], 3, [20, 21, 22])
    assert sample.experts is not None
    assert sample.experts.flatten().tolist() == [10, 11, 22]


def test_a_sample_that_was_ended_before_its_next_token_has_none_of_that_version() -> None:
    sample = going_on(None, [5, 6], 3, [10, 11])
    assert going_on(sample, [], 4, [10, 11]).segments == ((0, 3),)
    assert going_on(sample, [7], 4, [10, 11, 12]).segments == ((0, 3), (2, 4))

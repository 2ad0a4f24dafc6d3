"""Engines that are simulated: tokens are kept, equal lengths are a formula, and no work takes less time than less."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega import platform

platform.start()

from grpo_mega.errors import InputError  # noqa: E402
from grpo_mega.forecast.planning.generation import Decoder, SimulatedEngine, completion_lengths, draws, simulate  # noqa: E402

ROOM = 1e9
MANY = 10_000
lengths = st.lists(st.integers(1, 300), min_size=1, max_size=40)
decoders = st.builds(
    Decoder,
    dense=st.floats(1e8, 1e10),
    experts=st.floats(0, 5e10),
    chosen=st.sampled_from([0.0, 1 / 32, 1 / 4]),
    per_key=st.floats(1e3, 1e5),
    caches=st.sampled_from([1, 4]),
    memory=st.just(2e12),
    per_sequence=st.just(0.0),
    fixed=st.floats(1e-4, 1e-2),
    message=st.floats(0, 1e-5),
    prompt_token=st.floats(0, 1e-6),
    accepted=st.sampled_from([1.0, 1.8]),
)


def one_by_one(decoder: Decoder, completions: Sequence[int], prompt: int) -> float:
    """Seconds of completions that all begin at once, a step after the other."""
    seconds, step = len(completions) * prompt * decoder.prompt_token, 0
    while running := [n for n in completions if n > step]:
        held = len(running) * (prompt + step + 0.5)
        seconds += decoder.step(len(running), held)
        step += 1
    return seconds


@given(decoders, lengths, st.integers(0, 100), st.integers(1, 50), st.sampled_from([400.0, 450.0, 3000.0, ROOM]))
def test_every_token_is_sampled_whatever_the_room(
    decoder: Decoder, completions: list[int], prompt: int, most: int, room: float
) -> None:
    """Also of completions that lose their cache on the way, and begin again where they were."""
    done = simulate(decoder, completions, prompt, room, most)
    assert done.tokens == sum(completions)
    assert len(done.ends) == len(completions)
    assert done.ends == sorted(done.ends)
    assert done.ends[-1] == done.seconds
    assert done.most <= most
    assert done.waves >= 1
    if room == ROOM:
        assert done.evicted == 0


@given(decoders, lengths, st.integers(0, 100))
def test_events_take_as_long_as_steps_one_by_one(decoder: Decoder, completions: list[int], prompt: int) -> None:
    plain = Decoder(**(vars(decoder) | {"accepted": 1.0}))
    assert simulate(plain, completions, prompt, ROOM, MANY).seconds == pytest.approx(
        one_by_one(plain, completions, prompt)
    )


@given(decoders, st.integers(1, 300), st.integers(1, 40), st.integers(0, 100))
def test_equal_lengths_are_a_formula(decoder: Decoder, completion: int, count: int, prompt: int) -> None:
    """Every step has all of them, and half of their tokens on average: steps x step, and the prompts."""
    expected = completion / decoder.accepted * decoder.step(count, count * (prompt + completion / 2))
    expected += count * prompt * decoder.prompt_token
    assert simulate(decoder, [completion] * count, prompt, ROOM, MANY).seconds == pytest.approx(expected)


@given(decoders, lengths, st.integers(1, 300), st.integers(0, 39))
def test_more_tokens_are_never_faster(decoder: Decoder, completions: list[int], more: int, which: int) -> None:
    before = simulate(decoder, completions, 10, ROOM, MANY).seconds
    longer = [n + more * (number == which % len(completions)) for number, n in enumerate(completions)]
    for other in (longer, [*completions, more]):
        assert simulate(decoder, other, 10, ROOM, MANY).seconds >= before * (1 - 1e-9)


@given(decoders, lengths, st.data())
def test_completions_that_go_on_read_what_they_have_and_sample_the_rest(
    decoder: Decoder, completions: list[int], data: st.DataObject
) -> None:
    begun = [data.draw(st.integers(0, completion - 1)) for completion in completions]
    engine = SimulatedEngine(decoder, 10, ROOM, MANY)
    for completion, tokens in zip(completions, begun, strict=True):
        engine.submit(completion, tokens)
    while engine.busy:
        engine.next_ended()
    done = engine.result
    assert (done.tokens, done.read) == (sum(completions) - sum(begun), 10 * len(completions) + sum(begun))
    if len({*begun}) == 1:
        rest = simulate(decoder, [completion - begun[0] for completion in completions], 10 + begun[0], ROOM, MANY)
        assert done.seconds == pytest.approx(rest.seconds)


@given(decoders, st.integers(2, 200), st.integers(2, 20), st.integers(1, 5))
def test_completions_that_do_not_run_at_once_take_their_turns(
    decoder: Decoder, completion: int, most: int, waves: int
) -> None:
    done = simulate(decoder, [completion] * most * waves, 10, ROOM, most)
    one = simulate(decoder, [completion] * most, 10, ROOM, most)
    assert done.waves == pytest.approx(waves)
    assert done.seconds == pytest.approx(waves * one.seconds)


@given(decoders, lengths, st.integers(1, 40), st.integers(1, 5))
def test_refilled_groups_begin_when_the_one_that_they_replace_has_ended(
    decoder: Decoder, completions: list[int], first: int, size: int
) -> None:
    first = min(first, len(completions))
    after = draws(completions, first, size)
    assert sorted(number for numbers in after.values() for number in numbers) == [*range(first, len(completions))]
    assert all(old < new for old, numbers in after.items() for new in numbers)
    done = simulate(decoder, completions, 10, ROOM, MANY, after)
    assert done.tokens == sum(completions)
    assert done.ends[-1] >= simulate(decoder, completions, 10, ROOM, MANY).ends[-1] * (1 - 1e-9)


def test_a_chain_of_refilled_groups_is_generated_one_after_the_other() -> None:
    decoder = Decoder(5e9, 0.0, 0.0, 0.0, 1, 2e12, 0.0, 5e-3, 0.0, 0.0)
    completions = [30, 50, 20, 70, 10, 10]
    assert draws(completions, 2, 2) == {1: range(2, 4), 3: range(4, 6)}
    done = simulate(decoder, completions, 10, ROOM, MANY, draws(completions, 2, 2))
    assert done.seconds == pytest.approx((50 + 70 + 10) * decoder.step(1, 0))


def test_groups_that_are_replaced_are_spread_over_all() -> None:
    """Of eight groups and two in their place the first and the sixth: also one that is a replacement itself may be."""
    assert draws([1] * 10, 8, 1) == {0: range(8, 9), 5: range(9, 10)}
    assert draws([3, 1, 1, 2, 9], 4, 2) == {0: range(4, 5)}


def test_a_cache_that_is_too_small_costs_time_and_evicts() -> None:
    decoder = Decoder(5e9, 0.0, 0.0, 1e5, 1, 2e12, 0.0, 5e-3, 0.0, 1e-5)
    completions = completion_lengths(64, 1500, 6000)
    ample, tight = (simulate(decoder, completions, 100, room, MANY) for room in (ROOM, 20_000))
    assert ample.evicted == 0 < tight.evicted
    assert tight.seconds > ample.seconds
    with pytest.raises(InputError, match="KV cache holds 5,000 tokens"):
        simulate(decoder, completions, 100, 5000, MANY)


@given(st.integers(1, 2000), st.floats(0.02, 1.0), st.integers(50, 60_000))
def test_lengths_have_the_mean_that_is_asked_for_and_none_is_too_long(count: int, share: float, longest: int) -> None:
    mean = max(1.0, share * longest)
    drawn = completion_lengths(count, mean, longest)
    assert len(drawn) == count
    assert 1 <= min(drawn) <= max(drawn) <= longest
    assert sum(drawn) / count == pytest.approx(mean, rel=0.02, abs=0.6)
    assert drawn == completion_lengths(count, mean, longest)


def test_parts_of_the_lengths_are_alike() -> None:
    """Engines get every k-th, mini-batches a stretch: each has long ones and short ones."""
    drawn = completion_lengths(8192, 5000, 32768)
    parts = [drawn[number::16] for number in range(16)] + [drawn[at : at + 512] for at in range(0, 8192, 512)]
    assert max(drawn) == 32768
    for part in parts:
        assert sum(part) / len(part) == pytest.approx(5000, rel=0.1)


def test_a_mean_beyond_the_longest_is_refused() -> None:
    with pytest.raises(InputError, match="longest allowed, 100"):
        completion_lengths(4, 101, 100)

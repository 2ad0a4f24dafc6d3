"""Counter-based noise is a function of its counters and looks random; sampling follows the exact distribution."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_mega.rollout.sampling import _gumbel, draw_key, gumbel_noise, prompt_key, sample_tokens

COUNTERS = ("seed", "draw", "prompt", "sample", "position")


def noise_of(seed: int, draw: int, prompts: Tensor, *counters: object) -> Tensor:
    """Noise of prompts in one draw."""
    return gumbel_noise(prompts ^ draw_key(seed, draw), *counters)


def noise_over(counter: str, vocab: int, rows: int = 256) -> Tensor:
    """[rows, vocab] noise where one counter runs from 0 and the others stay where they are."""
    run, still = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
    prompts = torch.full((rows,), prompt_key("one"))
    if counter in ("seed", "draw"):
        each = [(i, 5) if counter == "seed" else (3, i) for i in range(rows)]
        return torch.cat([noise_of(*pair, prompts[:1], still[:1], still[:1], vocab) for pair in each])
    if counter == "prompt":
        prompts = torch.tensor([prompt_key(f"sum-{i}") for i in range(rows)])
    sample, position = (run if counter == name else still for name in ("sample", "position"))
    return noise_of(3, 5, prompts, sample, position, vocab)


def uniforms(noise: Tensor) -> Tensor:
    return torch.exp(-torch.exp(-noise.double()))


def chi_square_of(counts: Tensor, probability: Tensor) -> float:
    """Pearson's statistic, in standard deviations from its mean."""
    expected = probability.double() * counts.sum()
    statistic = ((counts - expected).square() / expected).sum().item()
    return (statistic - (len(counts) - 1)) / math.sqrt(2 * (len(counts) - 1))


def chi_square(cells: Tensor, n: int) -> float:
    """The same for cells 0 to n - 1 that should be equally likely."""
    return chi_square_of(torch.bincount(cells.flatten(), minlength=n), torch.full((n,), 1 / n))


def test_prompt_key_is_fixed_and_has_63_bits() -> None:
    assert prompt_key("sum-1") == 8472697388685793102
    keys = {prompt_key(f"sum-{i}") for i in range(5000)}
    assert len(keys) == 5000
    assert min(keys) >= 0
    assert 2**62 < max(keys) < 2**63


def reference_uniform(seed: int, draw: int, prompt: int, sample: int, position: int, column: int) -> float:
    """The number behind one value, in unsigned Python integers: SplitMix64 makes the row's key, lowbias32 the value."""

    def mix_64(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    sequence = mix_64(prompt ^ prompt_key(f"seed {seed} version {draw}"))
    key = mix_64((sequence + (sample * 2**32 + position) * 0x9E3779B97F4A7C15) % 2**64)
    x = (column * 0x9E3779B9 + key) % 2**32
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15 ^ key >> 32) * 0x846CA68B % 2**32
    return ((x ^ x >> 16) % 2**31 + 0.5) / 2**31


@given(st.integers(), st.integers(0), st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1), st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_noise_equals_the_published_hashes(seed: int, draw: int, prompt: int, sample: int, position: int) -> None:
    row = noise_of(seed, draw, *torch.tensor([[prompt], [sample], [position]]), 9)[0]
    expected = [reference_uniform(seed, draw, prompt, sample, position, column) for column in range(9)]
    uniform = -torch.expm1(-torch.exp(-row.double()))
    torch.testing.assert_close(uniform, torch.tensor(expected).double(), atol=0, rtol=1e-5)


@pytest.mark.parametrize("counter", COUNTERS)
def test_uniform_along_every_counter(counter: str) -> None:
    u = uniforms(noise_over(counter, vocab=512))
    assert u.min() > 0
    assert u.max() < 1
    assert abs(chi_square((u * 1000).long(), 1000)) < 4
    assert abs(chi_square((u * 2**20).long() % 256, 256)) < 4


@pytest.mark.parametrize("counter", COUNTERS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 0), (2, 0), (16, 0), (0, 1), (0, 2), (0, 32), (0, 256), (1, 1)])
def test_neighbours_are_independent(counter: str, rows: int, columns: int) -> None:
    """Values a few steps apart along a counter, along the vocabulary or along both: joint chi-square, correlation."""
    u = uniforms(noise_over(counter, vocab=512))
    here, there = u[: len(u) - rows, : 512 - columns], u[rows:, columns:]
    assert abs(chi_square((here * 32).long() * 32 + (there * 32).long(), 1024)) < 4
    z = ((here - 0.5) * (there - 0.5)).mean().item() * 12 * math.sqrt(here.numel())
    assert abs(z) < 4


@pytest.mark.parametrize("counter", COUNTERS)
def test_all_pairs_of_rows_and_of_columns_are_uncorrelated(counter: str) -> None:
    u = (uniforms(noise_over(counter, vocab=512)) - 0.5) * math.sqrt(12)
    for matrix in (u, u.T):
        n, length = matrix.shape
        z = (matrix @ matrix.T)[*torch.triu_indices(n, n, 1)] / math.sqrt(length)
        assert z.abs().max() < 6.5
        assert z.std().item() == pytest.approx(1, abs=0.02)


def test_counters_are_not_interchangeable() -> None:
    """Swapping counters or moving a count from one to another gives other noise."""
    samples, positions = torch.cartesian_prod(torch.arange(6), torch.arange(6)).T
    prompts = torch.full((36,), prompt_key("one"))
    rows = [noise_of(seed, draw, prompts, samples, positions, 4) for seed in range(6) for draw in range(6)]
    assert len(torch.cat(rows).unique(dim=0)) == 6**4


def test_gumbel_moments_and_tail() -> None:
    noise = noise_over("position", vocab=4096).double()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.005)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.01)
    assert 11 < noise.max() < 23  # log of a million draws is 13.9


def test_the_most_extreme_random_bits_stay_finite() -> None:
    bits = torch.tensor([0, 1, 2**31 - 65, 2**31 - 64, 2**31 - 1], dtype=torch.int32)
    noise = _gumbel(bits)
    assert noise.isfinite().all()
    assert noise.tolist() == sorted(noise.tolist(), reverse=True)
    assert noise[0].item() == pytest.approx(math.log(2**32), rel=1e-6)


any_counters = st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1), st.integers(0, 2**32 - 1))


@given(st.lists(any_counters, min_size=1, max_size=9), st.integers(), st.integers(0), st.integers(1, 200), st.data())
@settings(max_examples=60)
def test_a_row_depends_on_its_own_counters_only(
    counters: list[tuple[int, int, int]], seed: int, draw: int, vocab: int, data: st.DataObject
) -> None:
    batch = torch.tensor(counters)
    together = noise_of(seed, draw, *batch.T, vocab)
    assert together.dtype == torch.float32
    assert together.isfinite().all()
    for i in range(len(batch)):
        assert torch.equal(noise_of(seed, draw, *batch[i : i + 1].T, vocab)[0], together[i])
    order = torch.tensor(data.draw(st.permutations(range(len(batch)))))
    assert torch.equal(noise_of(seed, draw, *batch[order].T, vocab), together[order])
    shorter = data.draw(st.integers(1, vocab))
    assert torch.equal(noise_of(seed, draw, *batch.T, shorter), together[:, :shorter])


def test_noise_leaves_its_arguments_alone_and_refuses_other_shapes() -> None:
    keys, samples, positions = torch.tensor([7, 8]), torch.tensor([1, 2]), torch.tensor([3, 4])
    noise_of(0, 0, keys, samples, positions, 8)
    assert [keys.tolist(), samples.tolist(), positions.tolist()] == [[7, 8], [1, 2], [3, 4]]
    with pytest.raises(ValueError, match="one shape"):
        noise_of(0, 0, keys, samples[:1], positions, 8)


def draw(logits: Tensor, n: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """How often each token is sampled in n draws from one row of logits."""
    keys, still = torch.full((n,), prompt_key("draw")), torch.zeros(n, dtype=torch.int64)
    noise = noise_of(11, 0, keys, still, torch.arange(n), len(logits))
    tokens, _ = sample_tokens(logits.expand(n, -1), noise, temperature=temperature, top_k=top_k, top_p=top_p)
    return torch.bincount(tokens, minlength=len(logits))


LOGITS = torch.tensor([1.5, -0.3, 0.2, 2.1, -2.0, 0.0, 0.9, -1.1])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_samples_follow_the_softmax(temperature: float) -> None:
    counts = draw(LOGITS, 50_000, temperature=temperature)
    assert chi_square_of(counts, torch.softmax(LOGITS / temperature, -1)) < 4


def test_a_long_flat_tail_is_sampled_as_often_as_it_should_be() -> None:
    """One token of half the mass and 20,000 that share the rest."""
    logits = torch.cat([torch.tensor([math.log(20_000.0)]), torch.zeros(20_000)])
    counts = draw(logits, 300)
    assert abs(counts[0].item() - 150) < 4 * math.sqrt(75)


def test_truncated_samples_follow_the_renormalised_softmax() -> None:
    probability = torch.softmax(LOGITS, -1)
    likeliest = torch.tensor([3, 0, 6, 2])
    for kept, options in (
        (likeliest[:3], {"top_k": 3}),
        (likeliest, {"top_p": 0.87}),
        (likeliest[:2], {"top_k": 2, "top_p": 0.87}),
    ):
        counts = draw(LOGITS, 20_000, **options)
        assert counts.nonzero().flatten().tolist() == sorted(kept.tolist())
        assert chi_square_of(counts[kept], probability[kept] / probability[kept].sum()) < 4


distributions = st.lists(st.integers(-8, 8), min_size=1, max_size=12)


@given(distributions, st.integers(0, 14), st.integers(1, 64), st.floats(0.3, 3))
@settings(max_examples=100)
def test_support_of_top_k_and_top_p(row: list[int], top_k: int, top_p_64: int, temperature: float) -> None:
    """Strong noise on one column at a time shows exactly which columns can be sampled."""
    top_p, n = top_p_64 / 64, len(row)
    logits = torch.tensor(row, dtype=torch.float32)
    probability = torch.softmax(logits.double() / temperature, -1).tolist()
    ranked = sorted(range(n), key=lambda i: -row[i])  # Python's sort is stable as well
    sums = [math.fsum(probability[i] for i in ranked[:k]) for k in range(n)]
    near = any(abs(s - top_p) < 1e-5 for s in sums)  # rounding decides there
    expected = {i for k, i in enumerate(ranked) if (top_k == 0 or k < top_k) and (top_p == 1 or sums[k] < top_p)}
    noise = 1e4 * torch.eye(n)
    tokens, logprobs = sample_tokens(logits.expand(n, -1), noise, temperature=temperature, top_k=top_k, top_p=top_p)
    got = {i for i in range(n) if tokens[i] == i}
    assert ranked[0] in got
    assert near or got == expected
    torch.testing.assert_close(logprobs, torch.log_softmax(logits / temperature, -1)[tokens])


def test_ties_keep_the_lower_index() -> None:
    tokens, _ = sample_tokens(torch.zeros(6, 6), 1e4 * torch.eye(6), temperature=1.0, top_k=2, top_p=1.0)
    assert tokens.tolist() == [0, 1, 0, 0, 0, 0]
    assert sample_tokens(torch.zeros(1, 6), None, temperature=0, top_k=0, top_p=1)[0].tolist() == [0]


@pytest.mark.parametrize(("options", "sorts"), [({"top_k": 0, "top_p": 1.0}, 0), ({"top_k": 2, "top_p": 0.9}, 1)])
def test_nothing_is_sorted_without_top_k_and_top_p(options: dict, sorts: int) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        sample_tokens(LOGITS[None], torch.zeros(1, 8), temperature=1.0, **options)
    assert sum(event.name == "aten::sort" for event in profile.events()) == sorts


@given(seed=st.integers(0, 1000), temperature=st.floats(0.1, 5), scale=st.sampled_from([1.0, 30.0, 1000.0]))
@settings(max_examples=40)
def test_logprobs_are_those_of_the_full_tempered_softmax(seed: int, temperature: float, scale: float) -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(seed)) * scale
    noise = noise_of(seed, 0, torch.arange(5), torch.arange(5), torch.arange(5), 40)
    for top_k, top_p in ((0, 1.0), (3, 0.5)):
        tokens, logprobs = sample_tokens(logits, noise, temperature=temperature, top_k=top_k, top_p=top_p)
        expected = torch.log_softmax(logits.double() / temperature, -1)
        assert tokens.dtype == torch.int64
        assert logprobs.dtype == torch.float32
        expected = expected.gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=1e-6 * scale)


def test_greedy_takes_the_likeliest_and_scores_it_untempered() -> None:
    logits = torch.stack([LOGITS, LOGITS.flip(0)]).bfloat16()
    tokens, logprobs = sample_tokens(logits, None, temperature=0, top_k=0, top_p=1.0)
    assert tokens.tolist() == [3, 4]
    torch.testing.assert_close(logprobs, torch.log_softmax(logits.float(), -1).amax(-1))


def test_impossible_columns_are_never_sampled() -> None:
    logits = LOGITS.clone()
    logits[[3, 5]] = -math.inf
    for options in ({}, {"top_k": 7}, {"top_p": 0.999999}):
        counts = draw(logits, 3000, temperature=3.0, **options)
        assert counts[[3, 5]].tolist() == [0, 0]
        assert (counts > 0).sum() == 6
    noise = torch.zeros(1, 8)
    noise[0, 3] = 1e30
    tokens, logprobs = sample_tokens(logits[None], noise, temperature=1.0, top_k=0, top_p=1.0)
    assert tokens.tolist() == [0]
    assert logprobs.isfinite().all()


@pytest.mark.parametrize("bad", [[math.nan, 0, 0], [math.inf, 0, 0], [-math.inf] * 3, [math.nan, -math.inf, -math.inf]])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (1, 1.0), (0, 0.5)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_no_distribution_are_refused(
    bad: list[float], top_k: int, top_p: float, temperature: float
) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], bad, [0.0, 1.0, 2.0]])
    noise = torch.zeros(3, 3) if temperature else None
    with pytest.raises(ValueError, match=r"logits of rows \[1\]"):
        sample_tokens(logits, noise, temperature=temperature, top_k=top_k, top_p=top_p)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": 0.0}, "must be None at 0"),
        ({"noise": None}, "noise is needed"),
        ({"noise": torch.zeros(1, 3)}, "noise has shape"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_p": math.nan}, "top_p is nan"),
    ],
)
def test_bad_arguments_are_refused(change: dict, message: str) -> None:
    arguments = {"noise": torch.zeros(2, 3), "temperature": 1.0, "top_k": 0, "top_p": 1.0, **change}
    with pytest.raises(ValueError, match=message):
        sample_tokens(torch.zeros(2, 3), **arguments)

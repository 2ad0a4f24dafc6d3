"""Log-probs and losses from hidden states: right, chunked, connected to the graph, and small."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_launches import LAUNCHES, TWO_LAUNCHES, launches, per_chunk
from largest_tensor import LargestTensor
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import grpo_kernels
from grpo_kernels import LossOptions

PerToken = dict[str, Tensor]
PADDING = 3


def inputs(count: int, vocab_size: int, size: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """[n, H] hidden states and [V + padding, H] weight, both asking for a gradient, and [n] ids."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, size, generator=generator)
    weight = torch.randn(vocab_size + PADDING, size, generator=generator) / math.sqrt(size)
    weight[vocab_size:] = torch.nan
    ids = torch.randint(0, vocab_size, (count,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), ids


def exact(
    hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """float64 log-probs, entropies, and gradients of sum(a * logprob + b * entropy) without padding."""
    doubles = [value.detach().double().requires_grad_() for value in (hidden, weight[: len(weight) - PADDING])]
    log_p = (doubles[0] @ doubles[1].t() / temperature).log_softmax(-1)
    logprob, entropy = log_p.gather(1, ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    gradients = torch.autograd.grad((logprob * a + entropy * b).sum(), doubles)
    return logprob.detach(), entropy.detach(), *gradients


def weighted(a: Tensor, b: Tensor) -> Callable[[Tensor, Tensor, slice], tuple[Tensor, PerToken]]:
    """A token loss that is linear in log-prob and entropy."""
    return lambda logprob, entropy, part: (logprob * a[part] + entropy * b[part], {"p": logprob.exp(), "h": entropy})


@settings(deadline=None)
@given(
    st.integers(0, 200),
    st.integers(1, 50),
    st.sampled_from([1, 8, 33]),
    st.sampled_from([1.0, 0.5]),
    st.sampled_from([1, 128, None]),
    st.booleans(),
)
def test_both_routes_equal_log_softmax(
    count: int, vocab_size: int, size: int, temperature: float, chunk: int | None, with_entropy: bool
) -> None:
    hidden, weight, ids = inputs(count, vocab_size, size)
    a, b = torch.linspace(-1, 1, count), torch.linspace(1, -2, count) * with_entropy
    right = exact(hidden, weight, ids, temperature, a, b)
    how: dict[str, Any] = {"temperature": temperature, "vocab_size": vocab_size, "chunk": chunk}
    logprob, entropy = grpo_kernels.linear_logprob(hidden, weight, ids, **how)
    total = (logprob * a).sum() + (entropy * b).sum() * with_entropy
    recomputed = torch.autograd.grad(total, (hidden, weight))
    loss, extras = grpo_kernels.linear_token_loss(hidden, weight, ids, weighted(a, b), **how)
    premade = torch.autograd.grad(loss, (hidden, weight))
    assert torch.equal(extras["p"], logprob.detach().exp())
    assert torch.equal(extras["h"], entropy.detach())
    for found in ((logprob, entropy, *recomputed), (logprob, entropy, *premade)):
        for value, expected in zip(found, right, strict=True):
            torch.testing.assert_close(value[: len(expected)].double(), expected, atol=2e-5, rtol=1e-5)
        assert not found[-1][vocab_size:].any(), "padding has a gradient"
    assert loss.item() == pytest.approx(float((right[0] * a + right[1] * b).sum()), abs=1e-4)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 400), st.integers(1, 300), st.integers(1, 130), st.sampled_from(["ppo", "gspo"]), st.booleans())
def test_no_bit_of_a_result_depends_on_the_chunk(count: int, vocab_size: int, size: int, kind: str, bf16: bool) -> None:
    hidden, weight, ids = inputs(count, vocab_size, size)
    if bf16:
        weight = weight.detach().bfloat16().requires_grad_()
    vectors = torch.randn(4, count, generator=torch.Generator().manual_seed(1)) - 2
    cu_seqlens = torch.tensor([0, count // 3, count]) if kind == "gspo" else None
    options = LossOptions(kind=kind, kl_coef=0.1, entropy_coef=0.1)

    def run(chunk: int | None) -> list[Tensor]:
        how: dict[str, Any] = {"temperature": 0.7, "chunk": chunk, "vocab_size": vocab_size}
        logprob, entropy = grpo_kernels.linear_logprob(hidden, weight, ids, **how)
        loss, metrics = grpo_kernels.linear_grpo_loss(
            hidden, weight, ids, *vectors, options=options, cu_seqlens=cu_seqlens, **how
        )
        recomputed = torch.autograd.grad((logprob * entropy).sum(), (hidden, weight))
        premade = torch.autograd.grad(loss, (hidden, weight))
        return [logprob, entropy, loss, *vars(metrics).values(), *recomputed, *premade]

    whole = run(10_000)
    for chunk in (1, 65, 256, None):
        for found, expected in zip(run(chunk), whole, strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("correction", ["none", pytest.param("truncate", marks=pytest.mark.long), "mask"])
@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("kind", ["ppo", "cispo", "gspo"])
def test_a_chunk_takes_one_launch_or_two(kind: str, old: bool, correction: str) -> None:
    """One without a gradient, too; under gspo only the statistics then."""
    hidden, weight, ids = inputs(300, 9, 4)
    vectors = (-torch.ones(300) if old else None, -torch.ones(300), torch.ones(300), torch.ones(300))
    settings: dict[str, Any] = {
        "options": LossOptions(kind=kind, kl_coef=0.1, entropy_coef=0.1, correction=correction),
        "rollout_logprob": -torch.ones(300),
        "cu_seqlens": torch.tensor([0, 100, 300]) if kind == "gspo" else None,
        "vocab_size": 9,
        "chunk": 64,
    }
    with launches() as trained:
        loss, _ = grpo_kernels.linear_grpo_loss(hidden, weight, ids, *vectors, **settings)
        loss.backward()
    with launches() as scored, torch.no_grad():
        grpo_kernels.linear_grpo_loss(hidden, weight, ids, *vectors, **settings)
    assert per_chunk(trained, 5) == LAUNCHES[kind]
    assert per_chunk(scored, 5) == ({"row_stats": 1} if kind == "gspo" else LAUNCHES[kind])


def test_a_loss_of_one_s_own_takes_two_launches() -> None:
    hidden, weight, ids = inputs(300, 9, 4)
    with launches() as counted:
        loss, _ = grpo_kernels.linear_token_loss(
            hidden, weight, ids, weighted(torch.ones(300), torch.ones(300)), vocab_size=9, chunk=128
        )
        loss.backward()
    assert per_chunk(counted, 3) == TWO_LAUNCHES


@pytest.mark.parametrize("kind", ["ppo", "cispo", "gspo"])
def test_the_gradient_of_a_grpo_loss_goes_straight_into_main_grad(kind: str) -> None:
    hidden, weight, ids = inputs(200, 30, 16)
    vectors = [*(torch.randn(3, 200, generator=torch.Generator().manual_seed(1)) - 3), torch.linspace(0, 1, 200)]
    settings: dict[str, Any] = {
        "options": LossOptions(kind=kind, kl_coef=0.1, entropy_coef=0.1),
        "cu_seqlens": torch.tensor([0, 50, 200]) if kind == "gspo" else None,
        "vocab_size": 30,
    }
    plain, _ = grpo_kernels.linear_grpo_loss(hidden, weight, ids, *vectors, **settings)
    by_hidden, by_weight = torch.autograd.grad(plain * -2.5, (hidden, weight))
    main_grad = torch.ones_like(weight)
    for _ in range(2):  # two micro-batches
        loss, found = grpo_kernels.linear_grpo_loss(
            hidden, weight, ids, *vectors, **settings, main_grad=main_grad, grad_scale=-2.5, chunk=64
        )
        (loss * -2.5).backward()
        assert torch.equal(loss, plain), "the factor of the gradient is in the loss"
        assert torch.equal(found.loss.sum(), loss)
    assert weight.grad is None
    torch.testing.assert_close(hidden.grad, 2 * by_hidden)
    torch.testing.assert_close(main_grad, 1 + 2 * by_weight, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("function", ["linear_logprob", "linear_token_loss", "linear_grpo_loss"])
def test_logits_of_two_chunks_never_are_there(function: str) -> None:
    """Nothing of a chunk is left when the next one's logits are made; `weighted` is called between two of them."""
    hidden, weight, ids = inputs(640, 4000, 2)
    ones, size = torch.ones(640), 64 * 4000 * 4
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        if function == "linear_logprob":
            logprob, entropy = grpo_kernels.linear_logprob(hidden, weight, ids, vocab_size=4000, chunk=64)
            loss = (logprob + entropy).sum()
        elif function == "linear_token_loss":
            loss, _ = grpo_kernels.linear_token_loss(
                hidden, weight, ids, weighted(ones, ones), vocab_size=4000, chunk=64
            )
        else:
            loss, _ = grpo_kernels.linear_grpo_loss(
                hidden, weight, ids, None, None, ones, ones, options=LossOptions(), vocab_size=4000, chunk=64
            )
        loss.backward()
    alive = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]" and abs(event.nbytes()) == size:
            alive += 1 if event.nbytes() > 0 else -1
            most = max(most, alive)
    assert most == 1


@pytest.mark.parametrize("function", ["linear_logprob", "linear_token_loss", "linear_grpo_loss"])
def test_tokens_times_vocabulary_is_never_there(function: str) -> None:
    hidden, weight, ids = inputs(2000, 500, 4)
    ones = torch.ones(2000)
    with LargestTensor() as seen:
        if function == "linear_logprob":
            logprob, entropy = grpo_kernels.linear_logprob(hidden, weight, ids, vocab_size=500, chunk=128)
            loss = (logprob + entropy).sum()
        elif function == "linear_token_loss":
            loss, _ = grpo_kernels.linear_token_loss(
                hidden, weight, ids, weighted(ones, ones), vocab_size=500, chunk=128
            )
        else:
            loss, _ = grpo_kernels.linear_grpo_loss(
                hidden,
                weight,
                ids,
                -ones,
                -ones,
                ones,
                ones,
                options=LossOptions(kl_coef=0.1),
                vocab_size=500,
                chunk=128,
            )
        loss.backward()
    assert seen.elements == 128 * 500


@pytest.mark.parametrize("count", [0, 5])
@pytest.mark.parametrize("wanted", ["hidden", "weight"])
def test_a_gradient_nobody_wants_is_not_made(count: int, wanted: str) -> None:
    hidden, weight, ids = inputs(count, 9, 4)
    (weight if wanted == "hidden" else hidden).requires_grad_(False)
    a = torch.ones(count)
    loss, _ = grpo_kernels.linear_token_loss(hidden, weight, ids, weighted(a, a), vocab_size=9)
    logprob, entropy = grpo_kernels.linear_logprob(hidden, weight, ids, vocab_size=9)
    asked, other = (hidden, weight) if wanted == "hidden" else (weight, hidden)
    for total in (loss, (logprob + entropy).sum()):
        total.backward()
        assert asked.grad is not None
        assert asked.grad.any() == (count > 0)
        assert other.grad is None
        asked.grad = None


def test_nothing_is_kept_without_a_gradient() -> None:
    hidden, weight, ids = inputs(5, 9, 4)
    with torch.no_grad():
        logprob, entropy = grpo_kernels.linear_logprob(hidden, weight, ids, vocab_size=9)
        loss, extras = grpo_kernels.linear_token_loss(
            hidden, weight, ids, weighted(torch.ones(5), torch.ones(5)), vocab_size=9
        )
    assert not any(value.requires_grad for value in (logprob, entropy, loss, *extras.values()))
    torch.testing.assert_close(loss, (logprob + entropy).sum())


@pytest.mark.parametrize("logits_dtype", [torch.float32, torch.bfloat16])
def test_a_bf16_weight_and_the_float32_hidden_states_megatron_hands_out(logits_dtype: torch.dtype) -> None:
    """Log-probs are those of the rounded hidden states; with float32 logits nothing else is rounded."""
    hidden, weight, ids = inputs(80, 30, 16)
    weight = weight.detach().bfloat16().requires_grad_()
    a, b = torch.linspace(-1, 1, 80), torch.linspace(1, -1, 80)
    right = exact(hidden.detach().bfloat16(), weight, ids, 1.0, a, b)
    how: dict[str, Any] = {"vocab_size": 30, "chunk": 64, "logits_dtype": logits_dtype}
    logprob, entropy = grpo_kernels.linear_logprob(hidden, weight, ids, **how)
    recomputed = torch.autograd.grad((logprob * a + entropy * b).sum(), (hidden, weight))
    loss, _ = grpo_kernels.linear_token_loss(hidden, weight, ids, weighted(a, b), **how)
    near = 1e-5 if logits_dtype == torch.float32 else 0.05
    torch.testing.assert_close(logprob.double(), right[0], atol=near, rtol=0.0)
    for by_hidden, by_weight in (recomputed, torch.autograd.grad(loss, (hidden, weight))):
        assert (by_hidden.dtype, by_weight.dtype) == (torch.float32, torch.bfloat16)
        torch.testing.assert_close(by_hidden.double(), right[2], atol=near, rtol=near)
        torch.testing.assert_close(by_weight[:30].double(), right[3], atol=max(near, 0.01), rtol=2**-7)


def test_the_weight_s_gradient_goes_straight_into_main_grad() -> None:
    hidden, weight, ids = inputs(200, 30, 16)
    a = torch.linspace(-1, 1, 200)
    loss, _ = grpo_kernels.linear_token_loss(hidden, weight, ids, weighted(a, a), vocab_size=30)
    by_hidden, by_weight = torch.autograd.grad(loss * 2.5, (hidden, weight))
    main_grad = torch.ones_like(weight)
    for _ in range(2):  # two micro-batches
        loss, _ = grpo_kernels.linear_token_loss(
            hidden, weight, ids, weighted(a, a), vocab_size=30, main_grad=main_grad, grad_scale=2.5, chunk=64
        )
        (loss * 2.5).backward()
    assert weight.grad is None
    torch.testing.assert_close(hidden.grad, 2 * by_hidden)
    torch.testing.assert_close(main_grad, 1 + 2 * by_weight, atol=1e-5, rtol=1e-5)


def test_another_factor_than_main_grad_holds_is_refused() -> None:
    hidden, weight, ids = inputs(5, 9, 4)
    a = torch.ones(5)
    loss, _ = grpo_kernels.linear_token_loss(
        hidden, weight, ids, weighted(a, a), vocab_size=9, main_grad=torch.zeros_like(weight), grad_scale=2.0
    )
    with pytest.raises(ValueError, match=r"grad_scale=2\.0.*3\.0"):
        (loss * 3).backward()


def test_a_loss_may_use_only_what_it_likes() -> None:
    """The entropy alone, a constant, or a number of its own for tokens whose gradient then is 0."""
    hidden, weight, ids = inputs(6, 9, 4)
    right = exact(hidden, weight, ids, 1.0, torch.zeros(6), torch.ones(6))

    def gradient(loss: Callable) -> Tensor:
        total, _ = grpo_kernels.linear_token_loss(hidden, weight, ids, lambda *given: (loss(*given), {}), vocab_size=9)
        return torch.autograd.grad(total, hidden)[0]

    torch.testing.assert_close(gradient(lambda _, entropy, __: entropy).double(), right[2], atol=1e-6, rtol=1e-5)
    assert not gradient(lambda logprob, _, __: torch.ones_like(logprob)).any()


def test_a_loss_of_the_wrong_shape_is_refused() -> None:
    hidden, weight, ids = inputs(6, 9, 4)
    with pytest.raises(ValueError, match=r"token_loss returned losses of shape \[\] for 6 tokens"):
        grpo_kernels.linear_token_loss(hidden, weight, ids, lambda logprob, _, __: (logprob.sum(), {}), vocab_size=9)


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_hidden_states_that_do_not_count_may_hold_anything(kind: str, broken: float) -> None:
    hidden, weight, ids = inputs(3, 9, 4)
    counts = torch.tensor([1.0, 0.0, 1.0])
    cu_seqlens = torch.tensor([0, 2, 3]) if kind == "gspo" else None

    def gradients() -> list[Tensor]:
        how: dict[str, Any] = {"vocab_size": 9}
        logprob, entropy = grpo_kernels.linear_logprob(hidden, weight, ids, **how)
        options = LossOptions(kind=kind, entropy_coef=0.1)
        loss, _ = grpo_kernels.linear_grpo_loss(
            hidden, weight, ids, None, None, counts, counts, options=options, cu_seqlens=cu_seqlens, **how
        )
        plain, _ = grpo_kernels.linear_token_loss(
            hidden, weight, ids, lambda p, _, at: (torch.where(counts[at] == 0, 0, p), {}), **how
        )
        return [
            g
            for x in ((logprob + entropy)[[0, 2]].sum(), loss, plain)
            for g in torch.autograd.grad(x, (hidden, weight))
        ]

    expected = gradients()
    with torch.no_grad():
        hidden[1] = broken
    for found, right in zip(gradients(), expected, strict=True):
        assert torch.equal(found, right)

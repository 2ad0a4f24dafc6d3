"""Log-probs, entropies and gradients of the output layer against torch.log_softmax in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from largest_tensor import LargestTensor

from grpo_mega.algorithm.objective import negative_log_likelihood
from grpo_mega.models.heads import LogProbHead
from grpo_mega.models.policy import Policy
from grpo_mega.types import pack_tokens

COLUMNS = 32  # of conftest's policies, which have hidden states of this width as well

rows_of_logits = st.lists(
    st.lists(st.floats(-50, 50, width=32), min_size=COLUMNS, max_size=COLUMNS), min_size=1, max_size=4
)
offsets = st.sampled_from([0.0, 1e4, -1e4])
spreads = st.sampled_from([1.0, 1e-3, 200.0])
temperatures = st.sampled_from([1.0, 0.3, 2.5])


@pytest.fixture(scope="module")
def head(make_policy: Callable[..., Policy]) -> LogProbHead:
    """An output layer whose logits are the hidden states it is given, over a vocabulary that needs padding."""
    layer = make_policy("dense").head
    assert 0 < layer.vocab_size < COLUMNS
    layer(torch.zeros(1, 1, COLUMNS))  # as in the model's forward pass
    with torch.no_grad():
        layer.weight.copy_(torch.eye(COLUMNS))
    return layer


@settings(deadline=None)
@given(rows_of_logits, offsets, spreads, temperatures, st.data())
def test_values_and_gradient_equal_log_softmax(
    head: LogProbHead, rows: list[list[float]], offset: float, spread: float, temperature: float, data: st.DataObject
) -> None:
    logits = (torch.tensor(rows) * spread + offset).requires_grad_()
    token = st.integers(0, head.vocab_size - 1)
    targets = torch.tensor(data.draw(st.lists(token, min_size=len(rows), max_size=len(rows)), label="targets"))
    logprob, entropy = head.logprob(logits, targets, temperature)
    upstream = torch.randn(len(rows), generator=torch.Generator().manual_seed(len(rows)))
    (grad,) = torch.autograd.grad(logprob, logits, upstream)

    scaled = (logits.detach().double() / temperature)[:, : head.vocab_size].requires_grad_()
    reference = scaled.log_softmax(-1)
    picked = reference.gather(-1, targets[:, None])[:, 0]
    (expected_grad,) = torch.autograd.grad(picked, scaled, upstream.double())
    torch.testing.assert_close(logprob.double(), picked, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), -(reference.exp() * reference).sum(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        grad[:, : head.vocab_size].double(), expected_grad / temperature, atol=1e-6 / temperature, rtol=1e-5
    )
    assert not grad[:, head.vocab_size :].any(), "padding columns must not get a gradient"


def test_padding_columns_have_probability_zero_however_large(head: LogProbHead) -> None:
    logits = torch.zeros(1, COLUMNS)
    logits[:, head.vocab_size :] = 1e30
    logprob, entropy = head.logprob(logits, torch.tensor([0]), temperature=1.0)
    expected = torch.tensor([float(head.vocab_size)]).log()
    torch.testing.assert_close(-logprob, expected)
    torch.testing.assert_close(entropy, expected)
    assert head.full_logits(logits).tolist() == [[0.0] * head.vocab_size]


def test_no_row_at_all(head: LogProbHead) -> None:
    logits = torch.zeros(0, COLUMNS, requires_grad=True)
    logprob, entropy = head.logprob(logits, torch.zeros(0, dtype=torch.int64), temperature=1.0)
    assert logprob.shape == entropy.shape == (0,)
    assert torch.autograd.grad(logprob.sum(), logits)[0].shape == (0, COLUMNS)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_logit_is_not_hidden(head: LogProbHead, broken: float) -> None:
    logits = torch.zeros(2, COLUMNS)
    logits[1, 3] = broken
    logprob, _ = head.logprob(logits, torch.tensor([0, 0]), temperature=1.0)
    assert torch.isfinite(logprob).tolist() == [True, False]


@pytest.mark.parametrize("model", ["dense", "tied"])
def test_gradients_of_hidden_states_and_of_the_weight_that_is_used(
    model: str, make_policy: Callable[..., Policy]
) -> None:
    policy = make_policy(model)
    weight = dict(policy.chunks.last.named_parameters())[
        "embedding.word_embeddings.weight" if model == "tied" else "output_layer.weight"
    ]
    policy.head(torch.zeros(1, 1, COLUMNS), weight if model == "tied" else None)
    hidden = torch.randn(5, COLUMNS, generator=torch.Generator().manual_seed(1), requires_grad=True)
    targets = torch.arange(5)
    outcome = torch.autograd.grad(policy.head.logprob(hidden, targets, 0.7)[0].sum(), [hidden, weight])

    exact = [hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    logits = exact[0] @ exact[1][: policy.head.vocab_size].t() / 0.7
    expected = torch.autograd.grad(logits.log_softmax(-1)[torch.arange(5), targets].sum(), exact)
    for grad, expected_grad in zip(outcome, expected, strict=True):
        torch.testing.assert_close(grad.double(), expected_grad, atol=1e-5, rtol=1e-5)


def test_logits_of_all_tokens_never_exist(make_policy: Callable[..., Policy]) -> None:
    tokens, vocabulary = 4000, 5000
    batch = pack_tokens([range(20)] * (tokens // 20), [1] * (tokens // 20))
    policy = make_policy("dense", vocabulary=vocabulary)
    with LargestTensor() as training:
        policy.gradients(batch, negative_log_likelihood)
    with LargestTensor() as scoring:
        policy.logprobs(batch, 1.0)
    assert max(training.elements, scoring.elements) < tokens * vocabulary / 20

"""One rank: what a batch gives depends on its sequences alone, gradients are those of the loss, nothing is silent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from grpo_kernels import LossOptions, reference
from grpo_mega.algorithm.objective import negative_log_likelihood, token_wise
from grpo_mega.config.schema import AlgorithmConfig, MoEConfig, OptimizerConfig
from grpo_mega.models.megatron.packed import PackedTokens
from grpo_mega.models.model import Pass
from grpo_mega.models.policy import Policy
from grpo_mega.models.shards import gather_whole
from grpo_mega.stages.exchange import pack_samples
from grpo_mega.stages.step import loss_of
from grpo_mega.types import Batch, Prompt, Sample, ScoredTokens

MakePolicy = Callable[..., Policy]
VOCABULARY = 21
MODELS = ["dense", "moe", "latent", "tied"]
PARITY, WORST = 1e-6, 5e-6  # all gradients together, the worst parameter's; docs/parity.md


def token_loss(logprob: torch.Tensor, known: ScoredTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Not linear in the log-prob, and different for every token."""
    return logprob.exp() * known.advantage + logprob.square() / (1 + known.tokens), {"confidence": logprob.detach()}


LOSS = token_wise(token_loss)


def full_gradient(policy: Policy) -> torch.Tensor:
    """Every parameter's gradient in one vector."""
    return torch.cat([g.flatten() for g in gradients_by_name(policy).values()])


def gradients_by_name(policy: Policy) -> dict[str, torch.Tensor]:
    return gather_whole(policy.chunks, lambda p: getattr(p, "main_grad", None))


def relative_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def assert_same(outcome: Pass, expected: Pass) -> None:
    assert outcome.metrics.keys() == expected.metrics.keys()
    assert outcome.metrics.keys() - {"expert_imbalance"} == {"loss", "entropy", "confidence"}
    for name, value in outcome.metrics.items():
        assert value == pytest.approx(expected.metrics[name], rel=PARITY)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("budget", [1, 23, 40])
def test_the_size_of_micro_batches_changes_nothing(
    model: str, budget: int, make_policy: MakePolicy, batch: Batch
) -> None:
    whole, cut = make_policy(model), make_policy(model, micro_batch_tokens=budget)
    expected, outcome = whole.gradients(batch, LOSS, 0.8), cut.gradients(batch, LOSS, 0.8)
    assert_same(outcome, expected)
    torch.testing.assert_close(outcome.outputs, expected.outputs, atol=1e-5, rtol=1e-6)
    assert relative_distance(full_gradient(cut), full_gradient(whole)) < PARITY
    theirs = gradients_by_name(whole)
    for name, ours in gradients_by_name(cut).items():
        assert relative_distance(ours, theirs[name]) < WORST, name


@pytest.mark.parametrize("model", MODELS)
def test_computing_a_prompt_once_for_its_group_changes_nothing(model: str, make_policy: MakePolicy) -> None:
    prompts, random = [(4, 5, 6), (7, 8), (4, 5)], torch.Generator().manual_seed(1)
    members = [prompts[i] for i in (0, 1, 0, 2, 0, 1)]
    samples = [
        sample(prompt, tuple(torch.randint(VOCABULARY, (n,), generator=random).tolist()))
        for prompt, n in zip(members, (3, 5, 1, 4, 6, 2), strict=True)
    ]
    shared = pack_samples(samples)
    shared = shared.with_(weight=shared.mask / 20, advantage=torch.rand(len(shared.tokens), generator=random))
    apart = shared.with_(prompts=torch.arange(6), prompt_lengths=torch.zeros(6, dtype=torch.int64))
    once, copied = make_policy(model), make_policy(model)
    outcome, expected = once.gradients(shared, LOSS), copied.gradients(apart, LOSS)
    assert_same(outcome, expected)
    torch.testing.assert_close(outcome.outputs, expected.outputs, atol=1e-5, rtol=1e-6)
    assert relative_distance(full_gradient(once), full_gradient(copied)) < PARITY
    # The balancing bias has followed the tokens of every sequence.
    for name, buffer in once.chunks.named_buffers():
        assert torch.equal(buffer, copied.chunks.get_buffer(name)), name


def sample(prompt: tuple[int, ...], completion: tuple[int, ...]) -> Sample:
    logprobs = (-1.0,) * len(completion)
    return Sample(Prompt(str(prompt), prompt, "", "", ""), 0, completion, logprobs, "stop", ((0, 0),), "")


@pytest.mark.parametrize("model", MODELS)
def test_the_order_of_sequences_changes_nothing(model: str, make_policy: MakePolicy, batch: Batch) -> None:
    order = [4, 8, 0, 2, 7, 1, 6, 3, 5]
    shuffled = batch.select(order)
    first, second = (make_policy(model, micro_batch_tokens=30) for _ in range(2))
    expected, outcome = first.gradients(batch, LOSS), second.gradients(shuffled, LOSS)
    assert_same(outcome, expected)
    in_order = torch.cat([expected.outputs.split(batch.lengths.tolist())[i] for i in order])
    torch.testing.assert_close(outcome.outputs, in_order, atol=1e-5, rtol=1e-6)
    assert relative_distance(full_gradient(second), full_gradient(first)) < PARITY


@pytest.mark.parametrize("model", MODELS)
def test_the_loss_is_the_weighted_sum_and_the_gradient_its_slope(
    model: str, make_policy: MakePolicy, batch: Batch
) -> None:
    """A short walk along the gradient, too short to change an expert: the loss must rise by its squared length."""
    policy = make_policy(model, micro_batch_tokens=30)
    everything = ScoredTokens.of(batch, torch.arange(len(batch.tokens)), None)

    def loss() -> float:
        token_losses, _ = token_loss(policy.logprobs(batch, 1.0).double(), everything)
        return (batch.weight * token_losses).sum().item()

    outcome = policy.gradients(batch, LOSS)
    assert outcome.metrics["loss"] == pytest.approx(loss(), rel=1e-5)
    slopes = {name: p.main_grad.clone() for name, p in policy.chunks.named_parameters()}
    squared = sum(g.double().square().sum().item() for g in slopes.values())
    step = 5e-4 / squared**0.5

    def walk(size: float) -> None:
        with torch.no_grad():
            for name, p in policy.chunks.named_parameters():
                p.add_(slopes[name], alpha=size)

    walk(step)
    above = loss()
    walk(-2 * step)
    assert (above - loss()) / (2 * step) == pytest.approx(squared, rel=1e-2)


@pytest.mark.parametrize("model", MODELS)
def test_a_token_knows_only_what_is_before_it_in_its_sequence(
    model: str, make_policy: MakePolicy, batch: Batch
) -> None:
    """From the middle of sequence 6 on, every token is another one; so is every other sequence of the batch."""
    policy = make_policy(model, micro_batch_tokens=64)
    start, end = batch.cu_seqlens[6:8].tolist()
    middle = (start + end) // 2
    other = (batch.tokens + 1) % policy.head.vocab_size
    other[start:middle] = batch.tokens[start:middle]
    before, after = policy.logprobs(batch, 1.0), policy.logprobs(batch.with_(tokens=other), 1.0)
    torch.testing.assert_close(after[start:middle], before[start:middle], atol=1e-5, rtol=0)
    assert (after[middle:end] != before[middle:end]).all()


def test_log_probs_are_those_of_the_update_and_zero_off_the_mask(make_policy: MakePolicy, batch: Batch) -> None:
    policy = make_policy("moe", micro_batch_tokens=30)
    alone = policy.logprobs(batch, 0.7)
    assert torch.equal(alone, policy.gradients(batch, LOSS, 0.7).outputs)
    assert (alone[batch.mask] < 0).all()
    assert not alone[~batch.mask].any()


@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("objective", ["ppo", "gspo", "cispo"])
def test_every_setting_of_the_algorithm_is_in_the_loss(
    objective: str, on_policy: bool, make_policy: MakePolicy, batch: Batch
) -> None:
    """Against the float64 formulas; no two settings are alike, and all of them act."""
    config = AlgorithmConfig(
        objective=objective,
        clip_low=0.11,
        clip_high=0.07,
        dual_clip=None if objective == "cispo" else 1.3,
        kl_coef=0.17,
        kl_estimator="k2",
        entropy_coef=0.13,
        correction="truncate",
        correction_cap=1.05,
    )
    policy = make_policy("dense", micro_batch_tokens=30)
    logprob, shift = policy.logprobs(batch, 1.0), torch.sin(torch.arange(len(batch.tokens)))
    lists = batch.with_(
        old_logprob=logprob + 0.5 * shift, ref_logprob=logprob - 0.3 * shift, rollout_logprob=logprob + 0.4 * shift
    )
    outcome = policy.gradients(lists, loss_of(config, on_policy))
    scored, rows = ScoredTokens.of(lists, batch.mask.nonzero()[:, 0], None), []
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        packed = PackedTokens.of_sequences(torch.tensor([int(end - start)]), 1)
        with torch.no_grad():
            hidden = policy.hidden_states(batch.tokens[start:end], packed)
        rows.append(policy.head.full_logits(hidden).roll(1, 0))
    lengths = torch.stack([part.sum() for part in batch.mask.split(batch.lengths.tolist())])
    expected = reference.grpo_loss(
        torch.cat(rows)[batch.mask],
        scored.tokens,
        None if on_policy else scored.old_logprob,
        scored.ref_logprob,
        scored.advantage,
        scored.weight,
        options=LossOptions(
            kind=objective,
            clip_low=0.11,
            clip_high=0.07,
            dual_clip=config.dual_clip,
            kl="k2",
            kl_coef=0.17,
            entropy_coef=0.13,
            correction="truncate",
            correction_cap=1.05,
        ),
        rollout_logprob=scored.rollout_logprob,
        cu_seqlens=torch.cat([torch.tensor([0]), lengths.cumsum(0)]) if objective == "gspo" else None,
    )
    assert outcome.metrics["loss"] == pytest.approx(expected.loss.sum().item(), rel=1e-5)
    c = (scored.rollout_logprob * -1 + (expected.logprob if on_policy else scored.old_logprob)).exp()
    assert outcome.metrics["corrected"] == pytest.approx((c > 1.05).double().mean().item())
    assert 0 < outcome.metrics["corrected"] < 1


def test_bf16_is_close_to_fp32(make_policy: MakePolicy, batch: Batch) -> None:
    exact, rounded = make_policy("moe"), make_policy("moe", dtype="bf16")
    assert {p.dtype for p in rounded.chunks.parameters()} >= {torch.bfloat16}
    for policy in (rounded, exact):
        policy.gradients(batch, LOSS)
    difference = rounded.logprobs(batch, 1.0) - exact.logprobs(batch, 1.0)
    assert 0 < difference.abs().mean() < 0.05
    assert relative_distance(full_gradient(rounded), full_gradient(exact)) < 0.2


def test_the_output_layer_s_gradient_is_not_rounded_to_bf16(make_policy: MakePolicy, batch: Batch) -> None:
    policy = make_policy("dense", dtype="bf16")
    policy.gradients(batch, LOSS)
    gradient = policy.head.weight.main_grad
    assert gradient.any()
    assert (gradient != gradient.bfloat16()).any()


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("budget", [1, 30, 1000])
def test_a_loss_that_is_not_finite_names_sequence_and_token(
    broken: float, budget: int, make_policy: MakePolicy, batch: Batch
) -> None:
    place = int(batch.cu_seqlens[6]) + 5
    marked = batch.with_(old_logprob=torch.zeros_like(batch.weight).index_fill(0, torch.tensor([place]), 1.0))

    def explode(logprob: torch.Tensor, known: ScoredTokens) -> tuple[torch.Tensor, dict]:
        return torch.where(known.old_logprob == 1.0, broken, logprob), {}

    with pytest.raises(FloatingPointError, match=f"token 5 of sequence 6 of the batch is {broken}"):
        make_policy("dense", micro_batch_tokens=budget).gradients(marked, token_wise(explode))


def test_a_broken_weight_does_not_pass_in_silence(make_policy: MakePolicy, batch: Batch) -> None:
    policy = make_policy("dense")
    with torch.no_grad():
        policy.head.weight[3, 3] = float("nan")
    with pytest.raises(FloatingPointError, match=r"token \d+ of sequence \d+ of the batch is nan"):
        policy.gradients(batch, LOSS)


def test_scoring_a_first_token_is_refused(make_policy: MakePolicy, batch: Batch) -> None:
    mask = batch.mask.clone()
    mask[batch.cu_seqlens[3]] = True
    policy = make_policy("dense")
    for use in (lambda b: policy.gradients(b, LOSS), lambda b: policy.logprobs(b, 1.0)):
        with pytest.raises(ValueError, match="first token of a sequence"):
            use(batch.with_(mask=mask))


@pytest.mark.parametrize("model", MODELS)
def test_weights_of_zero_move_nothing(model: str, make_policy: MakePolicy, batch: Batch) -> None:
    """Not to the last bit; weights other than zero move every parameter."""
    policy = make_policy(model, micro_batch_tokens=30)
    policy.use_optimizer(OptimizerConfig(lr=0.1))
    before = [p.detach().clone() for p in policy.chunks.parameters()]
    outcome = policy.update(batch.with_(weight=torch.zeros_like(batch.weight)), LOSS, lr=0.1)
    assert outcome.metrics["grad_norm"] == 0.0
    assert outcome.metrics["loss"] == 0.0
    assert not full_gradient(policy).any()
    assert all(torch.equal(p, q) for p, q in zip(policy.chunks.parameters(), before, strict=True))
    policy.update(batch, LOSS, lr=0.1)
    assert not any(torch.equal(p, q) for p, q in zip(policy.chunks.parameters(), before, strict=True))


@pytest.mark.parametrize("model", ["dense", "latent"])
def test_no_gradient_is_left_over(model: str, make_policy: MakePolicy, batch: Batch) -> None:
    """Updates with a learning rate of 0 and bare gradients, in any order, find the same gradient every time."""
    policy = make_policy(model, micro_batch_tokens=30, **({} if model == "dense" else {"moe": MoEConfig()}))
    policy.use_optimizer(OptimizerConfig(lr=0.0, clip_grad=0.0))
    policy.gradients(batch, LOSS)
    expected = full_gradient(policy).clone()
    for update in (False, True, True, False, True):
        if update:
            policy.update(batch, LOSS, lr=0.0)
        else:
            policy.gradients(batch, LOSS)
        assert torch.equal(full_gradient(policy), expected)


def test_a_batch_without_a_sequence_gives_no_gradient(make_policy: MakePolicy, batch: Batch) -> None:
    policy = make_policy("moe")
    nothing = batch.select([])
    assert policy.logprobs(nothing, 1.0).shape == (0,)
    assert policy.gradients(nothing, LOSS).metrics["loss"] == 0.0
    assert not full_gradient(policy).any()


def test_updates_lower_the_loss_and_report_the_norm_before_clipping(make_policy: MakePolicy, batch: Batch) -> None:
    policy = make_policy("moe", micro_batch_tokens=30)
    policy.use_optimizer(OptimizerConfig(lr=1.0, clip_grad=1e-3))
    outcome = [policy.update(batch, negative_log_likelihood, lr=1e-2) for _ in range(5)]
    losses = [f.metrics["loss"] for f in outcome]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.8 * losses[0]
    assert all(f.metrics["grad_norm"] > 0.01 and f.metrics["lr"] == 1e-2 for f in outcome)


@pytest.mark.parametrize("bias_update_rate", [0.0, 1e-3])
def test_expert_loads_are_of_this_pass_and_count_every_token(
    bias_update_rate: float, make_policy: MakePolicy, batch: Batch
) -> None:
    policy = make_policy("moe", moe=MoEConfig(experts=4, top_k=2, ffn_hidden=16, bias_update_rate=bias_update_rate))
    policy.gradients(batch, LOSS)
    policy.logprobs(batch, 1.0)
    outcome = policy.gradients(batch, LOSS)
    assert {layer: sum(load) for layer, load in outcome.expert_loads.items()} == dict.fromkeys(
        (1, 2), 2 * len(batch.tokens)
    )
    assert outcome.metrics["expert_imbalance"] == max(
        max(load) * 4 / sum(load) for load in outcome.expert_loads.values()
    )
    assert make_policy("dense").gradients(batch, LOSS).expert_loads == {}

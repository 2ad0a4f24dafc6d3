"""Samples in several pieces: each piece is computed as a sequence of its own, and the sample is counted once."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from small_models import MODELS

from grpo_mega.algorithm.objective import token_wise
from grpo_mega.algorithm.weights import token_weights
from grpo_mega.config.schema import AlgorithmConfig, LayoutConfig
from grpo_mega.models.policy import Policy
from grpo_mega.models.scalar import REWARD_MODEL, ScalarModel
from grpo_mega.models.shards import gather_whole
from grpo_mega.models.topology import Topology
from grpo_mega.rollout.embedded import EmbeddedEngine
from grpo_mega.rollout.engine import SamplingParams, Wanted
from grpo_mega.stages.exchange import pack_samples
from grpo_mega.stages.step import loss_of
from grpo_mega.types import Batch, Prompt, Sample, ScoredTokens

MakePolicy = Callable[..., Policy]
VOCABULARY = 21
PROMPTS = [(4, 5, 6, 7, 8), (9,)]
MADE = [
    (0, 6, ()),
    (0, 12, ((2, 5), (8, 10))),
    (1, 9, ((3, 4),)),
    (0, 7, ((1, 3),)),
    (1, 5, ()),
    (0, 9, ((3, 5), (6, 7))),
]
"""Of each sample its prompt, its length, and the given spans at which its further pieces begin."""
PARITY = 1e-6


def samples() -> list[Sample]:
    random = torch.Generator().manual_seed(1)
    made = []
    for prompt, n, given in MADE:
        tokens = array("i", torch.randint(VOCABULARY, (n,), generator=random).tolist())
        own = Prompt(f"p{prompt}", PROMPTS[prompt], "", "", "")
        restarts = tuple(first for first, _ in given)
        columns = own, 0, tokens, array("f", [-1.0] * n), "stop", ((0, 0),), ""
        made.append(Sample(*columns, given=given, restarts=restarts))
    return made


@pytest.fixture
def batch() -> Batch:
    packed = pack_samples(samples())
    random = torch.Generator().manual_seed(2)
    weight, advantage = torch.rand(2, len(packed.tokens), generator=random)
    return packed.with_(weight=packed.mask * weight / 30, advantage=advantage - 0.5)


def apart(batch: Batch) -> Batch:
    """The same tokens, with every piece as a sequence that shares nothing."""
    bounds, start = [0], 0
    for sample in samples():
        prompt = len(sample.prompt.token_ids)
        bounds += [start + prompt + restart for restart in sample.restarts]
        start += prompt + len(sample.token_ids)
        bounds.append(start)
    numbers = torch.arange(len(bounds) - 1)
    ends = torch.tensor(bounds)
    return batch.with_(
        cu_seqlens=ends, numbers=numbers, prompts=numbers, prompt_lengths=torch.zeros_like(numbers), restarts=None
    )


@token_wise
def curved(logprob: torch.Tensor, known: ScoredTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Not linear in the log-prob, and different for every token."""
    return logprob.exp() * known.advantage + logprob.square() / (1 + known.tokens), {}


@token_wise
def linear(logprob: torch.Tensor, known: ScoredTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return logprob * known.advantage, {}


def assert_same_gradients(policy: Policy, other: Policy) -> None:
    ours, theirs = (gather_whole(p.chunks, lambda x: getattr(x, "main_grad", None)) for p in (policy, other))
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        off = (gradient.double() - theirs[name].double()).norm() / theirs[name].double().norm()
        assert off < 5 * PARITY, name
    first, second = (torch.cat([x.flatten() for x in each.values()]).double() for each in (ours, theirs))
    assert (first - second).norm() / second.norm() < PARITY


@pytest.mark.parametrize("budget", [1, 40, 16384])
@pytest.mark.parametrize("model", MODELS)
def test_pieces_are_computed_as_sequences_of_their_own(
    model: str, budget: int, make_policy: MakePolicy, batch: Batch
) -> None:
    """Beside samples that share the prompt of the first piece, which is still computed once."""
    together, alone = make_policy(model, micro_batch_tokens=budget), make_policy(model)
    torch.testing.assert_close(together.logprobs(batch, 0.7), alone.logprobs(apart(batch), 0.7), atol=1e-6, rtol=1e-6)
    outcome, expected = together.gradients(batch, curved, 0.7), alone.gradients(apart(batch), curved, 0.7)
    torch.testing.assert_close(outcome.outputs, expected.outputs, atol=1e-6, rtol=1e-6)
    assert outcome.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=PARITY)
    assert_same_gradients(together, alone)
    assert together.flops == alone.flops
    assert (together.logprobs(batch.with_(restarts=None), 0.7) - outcome.outputs).abs().max() > 0.1


def test_balance_and_drafts_are_those_of_the_pieces(make_policy: MakePolicy, batch: Batch) -> None:
    """The mean over sequences of the experts' balance; prediction modules read nothing beyond their piece."""
    balanced = replace(MODELS["moe"].moe, aux_loss_coef=0.5)
    together, alone = (make_policy("moe", moe=balanced, mtp_layers=2, mtp_loss_coef=3.0) for _ in range(2))
    outcome, expected = together.gradients(batch, curved), alone.gradients(apart(batch), curved)
    assert outcome.metrics["mtp_loss"] == pytest.approx(expected.metrics["mtp_loss"], rel=PARITY)
    assert_same_gradients(together, alone)


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "constant"])
@pytest.mark.parametrize("budget", [1, 16384])
def test_a_sample_is_counted_once(budget: int, aggregation: str, make_policy: MakePolicy, batch: Batch) -> None:
    """GSPO's ratio is that of all its sampled tokens, and so are denominators; the formula in plain torch."""
    policy, formula = make_policy("dense", micro_batch_tokens=budget), make_policy("dense")
    old = policy.logprobs(batch, 1.0) + 0.2 * torch.sin(torch.arange(len(batch.tokens)))
    weighed = batch.with_(old_logprob=old, weight=token_weights(batch.mask, batch.cu_seqlens, aggregation, 12))
    outcome = policy.gradients(weighed, loss_of(AlgorithmConfig(objective="gspo", clip_low=9.0, clip_high=9.0), False))
    logprob = formula.logprobs(apart(batch), 1.0).requires_grad_()
    loss, start, n = torch.zeros(()), 0, len(MADE)
    total = sum(sample.sampled for sample in samples())
    for sample in samples():
        length = len(sample.prompt.token_ids) + len(sample.token_ids)
        own = start + batch.mask[start : start + length].nonzero()[:, 0]
        ratio = (logprob - old)[own].mean().exp()
        size = {"sequence_mean": n * len(own), "token_mean": total, "constant": n * 12}[aggregation]
        loss = loss - (ratio * batch.advantage[own]).sum() / size
        start += length
    loss.backward()
    assert outcome.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert logprob.grad is not None
    formula.gradients(apart(batch).with_(weight=batch.mask.float(), advantage=logprob.grad), linear)
    assert_same_gradients(policy, formula)


def test_scoring_the_first_token_of_a_piece_is_refused(make_policy: MakePolicy, batch: Batch) -> None:
    assert batch.restarts is not None
    policy = make_policy("dense")
    with pytest.raises(ValueError, match="first token of a sequence or piece"):
        policy.gradients(batch.with_(mask=batch.mask | batch.restarts), curved)


def test_a_token_that_breaks_a_loss_is_counted_from_the_beginning_of_its_sample(
    make_policy: MakePolicy, batch: Batch
) -> None:
    last = int(batch.cu_seqlens[2]) - 1
    broken = batch.with_(advantage=batch.advantage.index_fill(0, torch.tensor([last]), float("nan")))
    with pytest.raises(FloatingPointError, match=f"token {5 + 12 - 1} of sequence 1 of the batch is nan"):
        make_policy("dense").gradients(broken, curved)


def test_a_reward_model_reads_the_last_piece(topology: Topology, make_policy: MakePolicy, batch: Batch) -> None:
    platform = make_policy("dense").platform
    model = ScalarModel(REWARD_MODEL, MODELS["dense"], LayoutConfig(), VOCABULARY, topology, platform, optimizer=None)
    model.initialize(seed=3)
    pieces = model.scores(apart(batch), len(MADE) + sum(len(given) for *_, given in MADE))
    last, at = [], -1
    for *_, given in MADE:
        at += 1 + len(given)
        last.append(at)
    torch.testing.assert_close(model.scores(batch, len(MADE)), pieces[last], atol=1e-6, rtol=1e-6)


def test_the_embedded_engine_goes_on_after_the_last_piece_alone(make_policy: MakePolicy) -> None:
    policy = make_policy("dense")
    greedy = SamplingParams(max_new_tokens=20, stop_ids=(), temperature=0.0)
    found, others = [], []
    for sample in samples():
        if sample.restarts:
            piece = (*sample.token_ids[sample.restarts[-1] :],)
            anew = Wanted(Prompt("piece", piece, "", "", ""), 0, most=4)
            found.append(generated(policy, Wanted(sample.prompt, 0, sample, most=4), greedy))
            others.append(generated(policy, anew, greedy))
            assert found[-1].restarts == sample.restarts
            assert found[-1].token_ids[:-4] == sample.token_ids
    assert [sample.token_ids[-4:] for sample in found] == [sample.token_ids for sample in others]
    logprobs = torch.tensor([[*sample.logprobs[-4:]] for sample in found])
    torch.testing.assert_close(logprobs, torch.tensor([[*sample.logprobs] for sample in others]), atol=1e-6, rtol=1e-6)
    of_trainer = policy.logprobs(pack_samples(found), 1.0)
    sizes = [len(sample.prompt.token_ids) + len(sample.token_ids) for sample in found]
    trained = torch.stack([part[-4:] for part in of_trainer.split(sizes)])
    torch.testing.assert_close(logprobs, trained, atol=1e-5, rtol=1e-5)


def generated(policy: Policy, wanted: Wanted, sampling: SamplingParams) -> Sample:
    engine = EmbeddedEngine(policy, str, concurrent_sequences=4)
    engine.submit([wanted], sampling, version=0)
    (sample,) = engine.poll().samples
    return sample

"""What both engines promise, as checks of one engine; `engine_contract_job.py` makes it and calls them.

Checks depend on each other in one thing only: each leaves an engine that can generate.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from on_cuda import CLOSE

from grpo_mega.colocation.sync import WeightSync
from grpo_mega.models.policy import Policy
from grpo_mega.platform.stop import Interrupted
from grpo_mega.rollout.contract import TAGS, EngineError
from grpo_mega.rollout.engine import SLICE, Engine, SamplingParams, Wanted
from grpo_mega.rollout.stream import generate
from grpo_mega.stages.exchange import pack_samples
from grpo_mega.types import Prompt, Sample
from grpo_mega.weights.stream import hf_buckets

STOP = 2
BUDGET = 20_000
LONG = 90


@dataclass
class Bench:
    """An engine, the policy whose weights it gets, and what both are tried with.

    Attributes:
        long: Tokens of a completion that takes several questions whether to go on.
        much: How often all prompts are asked for what is not done when the second question comes.
    """

    engine: Engine
    policy: Policy
    prompts: list[Prompt]
    long: int = LONG
    much: int = 40
    version: int = 0

    def buckets(self) -> list[list[tuple[str, torch.Tensor]]]:
        return [*hf_buckets(self.policy, BUDGET, self.engine.experts_of)]

    def push_all(self) -> None:
        self.version += 1
        if self.engine._contract.released == {*TAGS}:  # as an engine starts on a GPU
            self.engine.resume(TAGS)
        self.engine.begin_update()
        for bucket in self.buckets():
            self.engine.push(bucket)
        self.engine.end_update(self.version)

    def weight_sync(self, verify_every: int = 1) -> WeightSync:
        text = [token for prompt in self.prompts * 9 for token in prompt.token_ids]
        return WeightSync(self.policy, self.engine, BUDGET, verify_every, text)

    def samples(self, sampling: SamplingParams, times: int = 1, **arguments):
        return generate(self.engine, self.prompts * times, 3, sampling, self.version, **arguments)

    def distance(self, samples, temperature: float = 1.0) -> float:
        """How far the engine's log-probs are from the policy's, at most.

        Both send tokens to the same experts, if the engine says to which it did: among many tokens one may have two
        experts whose scores are equal but for rounding.
        """
        batch = pack_samples(samples)
        mine = self.policy.logprobs(batch, temperature)
        return (mine - batch.rollout_logprob)[batch.mask].abs().max().item()

    def check_log_probs(self, samples, temperature: float = 1.0) -> None:
        distance = self.distance(samples, temperature)
        assert distance < CLOSE, f"{distance:.1e} between engine and policy at temperature {temperature:g}"


def sampling(**changes) -> SamplingParams:
    return replace(SamplingParams(max_new_tokens=20, stop_ids=(STOP,)), **changes)


def refused(work: Callable[[], object], *words: str) -> None:
    """`work` is refused, with all of these words."""
    with pytest.raises(EngineError) as refusal:
        work()
    missing = [word for word in words if word not in str(refusal.value)]
    assert not missing, f"{missing} not in: {refusal.value}"


def move(policy: Policy) -> None:
    """Other weights, as training would leave them."""
    with torch.no_grad():
        for parameter in policy.chunks.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))


def check_samples_differ(bench: Bench) -> None:
    """Under fresh weights, where all tokens are about equally likely."""
    samples = bench.samples(sampling())
    assert len({tuple(s.token_ids) for s in samples}) == len(samples)
    assert {s.finish_reason for s in samples} == {"stop", "length"}


def check_samples_are_complete_and_in_order(bench: Bench) -> None:
    samples = bench.samples(sampling())
    assert [(s.prompt.id, s.index) for s in samples] == [(p.id, i) for p in bench.prompts for i in range(3)]
    for s in samples:
        assert len(s.token_ids) == len(s.logprobs) > 0
        assert (s.token_ids.typecode, s.logprobs.typecode) == ("i", "f")
        assert s.segments == ((0, bench.version),)
        assert s.policy_version == bench.version
        assert (STOP in s.token_ids) == (s.finish_reason == "stop")
        assert s.token_ids[-1] == STOP or len(s.token_ids) == 20
    assert {s.finish_reason for s in samples} <= {"stop", "length"}


def check_log_probs_are_the_policys(bench: Bench) -> None:
    for changes in (
        {},
        {"temperature": 0.6},
        {"temperature": 1.4, "top_k": 3},
        {"temperature": 0.8, "top_p": 0.5},
        {"top_k": 5, "top_p": 0.7},
    ):
        how = sampling(**changes)
        bench.check_log_probs(bench.samples(how), how.temperature)


def check_top_k_cuts_off(bench: Bench) -> None:
    samples = bench.samples(sampling(top_k=1))
    assert len({(s.prompt.id, tuple(s.token_ids)) for s in samples}) == len(bench.prompts)


def check_greedy_takes_the_likeliest(bench: Bench) -> None:
    greedy = bench.samples(sampling().greedy())
    assert len({(s.prompt.id, tuple(s.token_ids)) for s in greedy}) == len(bench.prompts)
    bench.check_log_probs(greedy)


def check_the_context_is_the_limit(bench: Bench) -> None:
    longest = bench.samples(sampling(max_new_tokens=10**6, stop_ids=()))
    assert {len(s.prompt.token_ids) + len(s.token_ids) for s in longest} == {bench.policy.context}
    assert {s.finish_reason for s in longest} == {"length"}


def check_scores_are_the_policys(bench: Bench) -> None:
    ids = [1, 5, 9, 3, 3, 20]
    prompt = replace(bench.prompts[0], token_ids=(ids[0],))
    sample = Sample(prompt, 0, array("i", ids[1:]), array("f", [0.0] * 5), "stop", ((0, 0),), "")
    expected = bench.policy.logprobs(pack_samples([sample]), 1.0)[1:]
    outcome = bench.engine.scores(ids)
    assert outcome
    for scores in outcome.values():
        assert (torch.tensor(scores) - expected).abs().max() < CLOSE


def check_pushed_weights_are_used(bench: Bench) -> None:
    move(bench.policy)
    bench.push_all()
    assert bench.engine.version == bench.version
    bench.check_log_probs(bench.samples(sampling()))


def check_a_push_needs_a_session(bench: Bench) -> None:
    refused(lambda: bench.engine.push(bench.buckets()[0]), "begin_update")
    refused(lambda: bench.engine.end_update(9), "begin_update")
    assert bench.samples(sampling())


def check_wrong_tensors_are_refused_by_name(bench: Bench) -> None:
    engine, buckets = bench.engine, bench.buckets()
    name, tensor = buckets[0][0]
    engine.begin_update()
    refused(engine.begin_update, "open already")
    refused(lambda: engine.push([(name + "s", tensor)]), name + "s", "did you mean", name)
    refused(lambda: engine.push([("model.layers.0.mlp.experts.gate_up_proj", tensor)]), "gate_up_proj")
    refused(lambda: engine.push([(name, tensor[1:])]), name, str(list(tensor.shape)), str(list(tensor[1:].shape)))
    refused(lambda: engine.push([(name, tensor.half())]), name, "float16", str(tensor.dtype).removeprefix("torch."))
    refused(lambda: engine.push([(name, tensor), (name, tensor)]), name, "more than once")
    refused(lambda: bench.samples(sampling()), "open")
    for bucket in buckets[:-1]:
        engine.push(bucket)
    refused(lambda: engine.push(buckets[0]), name, "already pushed")
    refused(lambda: engine.end_update(bench.version), buckets[-1][0][0], "not pushed")
    engine.push(buckets[-1])
    refused(lambda: engine.end_update(bench.version - 1), "stale")
    engine.end_update(bench.version)
    bench.check_log_probs(bench.samples(sampling()))


def check_another_version_is_refused(bench: Bench) -> None:
    refused(lambda: generate(bench.engine, bench.prompts, 2, sampling(), bench.version + 1), str(bench.version + 1))
    refused(lambda: generate(bench.engine, bench.prompts, 2, sampling(), bench.version - 1), str(bench.version - 1))


def check_released_memory_is_not_used(bench: Bench) -> None:
    engine = bench.engine
    before = bench.samples(sampling().greedy())
    engine.release(["kv_cache"])
    refused(lambda: bench.samples(sampling()), "kv_cache", "resume")
    refused(lambda: engine.release(["kv_cache"]), "released already")
    refused(lambda: engine.resume(["weights"]), "weights", "was not released")
    refused(lambda: engine.release(["optimizer"]), "optimizer", "weights")
    engine.resume(["kv_cache"])
    assert [s.token_ids for s in bench.samples(sampling().greedy())] == [s.token_ids for s in before]


def check_released_weights_must_be_pushed_again(bench: Bench) -> None:
    engine = bench.engine
    engine.release(["weights", "kv_cache", "cuda_graph"])
    refused(engine.begin_update, "weights", "resume")
    engine.resume(["weights"])
    assert engine.version is None
    bench.push_all()
    engine.resume(["kv_cache", "cuda_graph"])
    bench.check_log_probs(bench.samples(sampling()))
    engine.release(["weights"])
    engine.resume(["weights"])
    refused(lambda: bench.samples(sampling()), "push")
    bench.push_all()
    bench.check_log_probs(bench.samples(sampling()))


def check_nothing_is_released_or_pushed_while_generating(bench: Bench) -> None:
    calls: list[bool] = []

    def meddle() -> bool:
        refused(lambda: bench.engine.release(["kv_cache"]), "generating", "poll")
        refused(bench.engine.begin_update, "generating")
        refused(lambda: bench.samples(sampling()), "generating")
        refused(lambda: bench.engine.scores([1, 2]), "generating")
        calls.append(True)
        return False

    samples = bench.samples(sampling(max_new_tokens=bench.long, stop_ids=()), interrupted=meddle)
    assert calls
    assert all(len(s.token_ids) == bench.long for s in samples)


def check_an_interruption_is_raised_and_leaves_a_sound_engine(bench: Bench) -> None:
    with pytest.raises(Interrupted):
        bench.samples(sampling(max_new_tokens=bench.long, stop_ids=()), interrupted=lambda: True)
    check_samples_are_complete_and_in_order(bench)


def wanted(bench: Bench, times: int = 1) -> list[Wanted]:
    return [Wanted(prompt, index) for prompt in bench.prompts * times for index in range(3)]


def polled(bench: Bench) -> list[Sample]:
    """What one poll brings to all ranks, rank after rank; all of them know how many that are."""
    finished = bench.engine.poll()
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (finished.everywhere, finished.samples))
    samples = [s for _, theirs in gathered for s in theirs]
    assert {everywhere for everywhere, _ in gathered} == {len(samples)}
    return samples


def polled_until_idle(bench: Bench) -> list[list[Sample]]:
    """What each poll brings until nothing is under way."""
    polls = []
    while bench.engine.busy:
        polls.append(polled(bench))
    return polls


def check_samples_are_handed_out_as_they_finish_each_once(bench: Bench) -> None:
    """Short ones before long ones are done, on one rank each; all in all, those that `generate` brings."""
    how = sampling(max_new_tokens=bench.long, stop_ids=(2, 3, 4, 5)).greedy()
    assert not bench.engine.busy
    bench.engine.submit(wanted(bench, bench.much), how, bench.version)
    assert bench.engine.busy
    polls = polled_until_idle(bench)
    assert sum(map(bool, polls)) > 1, "all came at once"
    outcome = sorted((s.prompt.id, s.index, tuple(s.token_ids)) for poll in polls for s in poll)
    assert outcome == sorted((s.prompt.id, s.index, tuple(s.token_ids)) for s in bench.samples(how, bench.much))
    refused(bench.engine.poll, "no sample is under way")


def check_ranks_share_the_samples_evenly(bench: Bench) -> None:
    """Of prompts with one sample each, too; each of so many prompts goes to another replica or engine."""
    for group_size in (1, 3):
        few = [Wanted(prompt, index) for prompt in bench.prompts for index in range(group_size)]
        bench.engine.submit(few, sampling(), bench.version)
        mine = []
        while bench.engine.busy:
            mine += bench.engine.poll().samples
        held: list = [None] * dist.get_world_size()
        dist.all_gather_object(held, [(s.prompt.id, s.index) for s in mine])
        assert Counter(one for theirs in held for one in theirs) == Counter((one.prompt.id, one.index) for one in few)
        assert {len(theirs) for theirs in held} == {len(few) // len(held)}


def check_more_is_submitted_while_samples_are_under_way(bench: Bench) -> None:
    """Also some of a prompt's samples only; each is sampled as it was asked for."""
    long, short = sampling(max_new_tokens=bench.long, stop_ids=()), sampling(max_new_tokens=7, stop_ids=())
    first, second = wanted(bench, bench.much), wanted(bench)[1:-1]
    bench.engine.submit(first, long, bench.version)
    samples = polled(bench)
    bench.engine.submit(second, short, bench.version)
    samples += [s for poll in polled_until_idle(bench) for s in poll]
    for tokens, of in ((bench.long, first), (7, second)):
        outcome = sorted((s.prompt.id, s.index) for s in samples if len(s.token_ids) == tokens)
        assert outcome == sorted((one.prompt.id, one.index) for one in of)
    assert len(samples) == len(first) + len(second)
    bench.check_log_probs(samples)


def in_slices(bench: Bench, how: SamplingParams, size: int) -> list[Sample]:
    """All samples to their end, in slices of so many tokens; each slice is submitted as another draw."""
    waiting, ended = [replace(one, most=size, draw=how.draw) for one in wanted(bench)], []
    for number in range(how.max_new_tokens):
        bench.engine.submit(waiting, replace(how, draw=how.draw + number), bench.version)
        samples = sorted((s for poll in polled_until_idle(bench) for s in poll), key=lambda s: (s.prompt.id, s.index))
        assert len(samples) == len(waiting)
        unfinished = [s for s in samples if s.finish_reason == SLICE]
        assert {len(s.token_ids) for s in unfinished} <= {(number + 1) * size}
        ended += [s for s in samples if s.finish_reason != SLICE]
        waiting = [Wanted(s.prompt, s.index, s, size, how.draw) for s in unfinished]
        if not waiting:
            break
    return sorted(ended, key=lambda s: (s.prompt.id, s.index))


def check_a_sample_goes_on_where_it_was_left(bench: Bench) -> None:
    """With the tokens, the reason and the text that it would have had in one piece."""
    whole_ones = [sampling().greedy()]
    if not bench.engine.generates_between_polls:  # the noise of SGLang is its own
        whole_ones.append(sampling(draw=3))
    for how in whole_ones:
        whole = sorted(bench.samples(how), key=lambda s: (s.prompt.id, s.index))
        for size in (1, 7, 20, 64):
            sliced = in_slices(bench, how, size)
            for one, other in zip(sliced, whole, strict=True):
                assert replace(one, logprobs=other.logprobs) == other, size
            bench.check_log_probs(sliced, how.temperature or 1.0)


def check_each_part_of_a_sample_is_of_the_weights_that_sampled_it(bench: Bench) -> None:
    how, old = sampling(max_new_tokens=12, stop_ids=()), bench.version
    bench.engine.submit([replace(one, most=5) for one in wanted(bench)], how, old)
    begun = sorted((s for poll in polled_until_idle(bench) for s in poll), key=lambda s: (s.prompt.id, s.index))
    assert {(s.finish_reason, s.segments, len(s.token_ids)) for s in begun} == {(SLICE, ((0, old),), 5)}
    bench.check_log_probs(begun)
    move(bench.policy)
    bench.push_all()
    bench.engine.submit([Wanted(s.prompt, s.index, s, draw=how.draw) for s in begun], how, bench.version)
    ended = sorted((s for poll in polled_until_idle(bench) for s in poll), key=lambda s: (s.prompt.id, s.index))
    parts = ((0, old), (5, bench.version))
    assert {(s.finish_reason, s.segments, len(s.token_ids)) for s in ended} == {("length", parts, 12)}
    for before, after in zip(begun, ended, strict=True):
        assert after.token_ids[:5] == before.token_ids
        assert after.logprobs[:5] == before.logprobs
    # So that the new part alone is compared; the experts of the old part are those of the old weights.
    new = [replace(s, given=((0, 5),), experts=None) for s in ended]
    bench.check_log_probs(new)


def check_an_interrupted_poll_drops_what_is_under_way(bench: Bench) -> None:
    bench.engine.submit(wanted(bench, bench.much), sampling(max_new_tokens=bench.long, stop_ids=()), bench.version)
    bench.engine.poll()
    with pytest.raises(Interrupted):
        bench.engine.poll(interrupted=dist.get_rank() == dist.get_world_size() - 1)
    assert not bench.engine.busy
    refused(bench.engine.poll, "no sample is under way")
    check_samples_are_complete_and_in_order(bench)


CHECKS = {name.removeprefix("check_"): check for name, check in globals().items() if name.startswith("check_")}

"""One rank of a job whose samples move from who holds them to who computes them; prints {layout: what was seen}.

Usage: exchange_job.py FOLDER
"""

from __future__ import annotations

import json
import math
import sys
from array import array
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import plain_grpo
import torch
import torch.distributed as dist
from composed import composed

from grpo_mega import platform

HERE = platform.start()
platform.join_processes(HERE)

from megatron.core import parallel_state  # noqa: E402

from grpo_mega.checkpoint import integrity, step_in_progress  # noqa: E402
from grpo_mega.config.schema import AlgorithmConfig, Config, LayoutConfig  # noqa: E402
from grpo_mega.data.tokenizer import CharTokenizer  # noqa: E402
from grpo_mega.models.microbatch import gathered  # noqa: E402
from grpo_mega.models.scalar import REWARD_MODEL, ScalarModel  # noqa: E402
from grpo_mega.models.topology import Topology, join_layout  # noqa: E402
from grpo_mega.stages.exchange import ExchangeOptions, pack_samples  # noqa: E402
from grpo_mega.stages.learned_reward import LearnedReward, ScoresOf, StepScores, WholeScores  # noqa: E402
from grpo_mega.stages.reward_model import Scale  # noqa: E402
from grpo_mega.stages.step import (  # noqa: E402
    StepOptions,
    batch_of_all,
    batch_of_step,
    batch_of_update,
    corrected,
    correction_metrics,
    effective_samples,
    penalised,
    step_of,
)
from grpo_mega.stages.step_report import Watch  # noqa: E402
from grpo_mega.types import NOBODY, Batch, Group, Prompt, Rollout, Sample, SampleInfo, Score  # noqa: E402

LAYOUTS = {
    "dp4": LayoutConfig(micro_batch_tokens=64),
    "dp2pp2": LayoutConfig(pp=2, micro_batch_tokens=64),
    "dp2tp2": LayoutConfig(tp=2, micro_batch_tokens=64),
    "dp2cp2": LayoutConfig(cp=2, micro_batch_tokens=64),
    "dp1": LayoutConfig(tp=2, pp=2, micro_batch_tokens=64),
}
GROUPS, SIZE = 7, 4
UNSCORED = (9, 24, 25, 27)
"""Samples that could not be scored: one of a group, and all but one of another."""
EXPERTS = (3, 2)
"""MoE layers, and experts of each token."""
VOCABULARY = CharTokenizer()
SEPARATORS = ["+", "</answer>"]
SEPARATOR_IDS = [VOCABULARY.token_id(separator) for separator in SEPARATORS]


CORRECTED = AlgorithmConfig(
    correction="truncate", correction_level="sequence_mean", rejection_cap=1.05, correction_normalized=True
)
"""What is normalised over the batch, without some of its sequences."""


def settings(layout: LayoutConfig, *overrides: str) -> Config:
    config = composed("experiment=tiny", "algorithm.mini_batches=3", "algorithm.epochs=2", *overrides)
    model = replace(config.model, layers=4, moe=replace(config.model.moe, first_dense=1, top_k=2))
    sglang = replace(config.rollout.sglang, routing_replay=True)
    return replace(config, layout=layout, model=model, rollout=replace(config.rollout, engine="sglang", sglang=sglang))


def samples() -> list[Sample]:
    """Of prompts of which two are the same; some samples are empty, or do not know their experts."""
    random = torch.Generator().manual_seed(1)

    def drawn(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=random)

    made = []
    for group in range(GROUPS):
        tokens = (5, 6, 7) if group in (2, 4) else tuple(drawn(3, 20, 1 + group).tolist())
        prompt = Prompt(f"p{group}", tokens, "", "", "")
        for index in range(SIZE):
            length = 0 if (group, index) == (3, 1) else int(drawn(1, 30, 1))
            logprobs = array("f", (-torch.rand(length, generator=random)).tolist())
            chosen = drawn(0, 16, len(tokens) + length - 1, *EXPERTS).to(torch.int16)
            experts = None if (group, index) in ((3, 1), (5, 0)) else chosen
            ids, reason = array("i", drawn(3, 20, length).tolist()), "abort" if experts is None else "stop"
            given = ((length // 4, length // 2), (length // 2 + 1, length - 1)) if index == 2 and length > 7 else ()
            restarts = (given[1][0],) if given and group % 2 else ()
            if restarts:
                chosen[: len(tokens) + restarts[0]] = -1
            columns = prompt, index, ids, logprobs, reason, ((0, 1),), "", experts, given
            made.append(Sample(*columns, restarts=restarts))
    return made


def rollout_of(everyone: list[Sample]) -> Rollout:
    """Each sample is held by one rank; one rank holds none, one most of them."""
    holders = [(i * i) % 7 % 3 for i in range(len(everyone))]
    rewards = [1.0 if i // SIZE == 1 else float(i % 3) for i in range(len(everyone))]  # one group without signal
    infos = [
        SampleInfo(len(s.token_ids), s.finish_reason, s.segments, score_of(i, rewards[i]), holders[i], given=s.given)
        for i, s in enumerate(everyone)
    ]
    infos = [replace(info, restarts=s.restarts) for info, s in zip(infos, everyone, strict=True)]
    groups = [Group(everyone[i].prompt, tuple(infos[i : i + SIZE])) for i in range(0, len(everyone), SIZE)]
    return Rollout(groups, {i: s for i, s in enumerate(everyone) if holders[i] == dist.get_rank()})


def score_of(number: int, reward: float) -> Score:
    """The reward of a sample, unless it is one of `UNSCORED`."""
    return Score(0.0, {}, unscorable="away") if number in UNSCORED else Score(reward, {"own": reward})


def misrouted(config: Config, topology: Topology) -> list[int]:
    """Samples whose prompt is not shared with just those that the same weights read last, or has none of their
    experts."""
    made = [replace(s, segments=((0, 5 + i % 3), (1, i % 2))) for i, s in enumerate(samples())]
    keys = [(s.prompt.token_ids, s.segments[-1]) for s in made]
    batch = batch_of_all(rollout_of(made), exchange_of(config), topology)
    numbers, prompts = batch.numbers.tolist(), batch.prompts.tolist()
    off = []
    for row, number in enumerate(numbers):
        start, size = batch.cu_seqlens[row], batch.prompt_lengths[row]
        shared = [n for n, prompt in zip(numbers, prompts, strict=True) if prompt == prompts[row]]
        alike = [n for n, key in enumerate(keys) if key == keys[number]]
        theirs = [experts[:size] for n in alike if (experts := made[n].experts) is not None]
        routed = any(torch.equal(batch.experts[start : start + size], experts) for experts in theirs)
        if shared != [n for n in numbers if n in alike] or not (routed or made[number].experts is None):
            off.append(number)
    return off


def unequal(batch: Batch, expected: Batch, topology: Topology) -> list[str]:
    """Columns of which this replica has other numbers than the batch on one rank."""
    rows = {int(number): row for row, number in enumerate(expected.numbers)}
    here = expected.select([rows[int(number)] for number in batch.numbers])
    if batch.restarts is None:
        batch = batch.with_(restarts=torch.zeros_like(batch.mask))
    columns = here.columns() | {"cu_seqlens": here.cu_seqlens, "prompt_lengths": here.prompt_lengths}
    off = [
        name for name, column in columns.items() if name != "experts" and not torch.equal(column, getattr(batch, name))
    ]
    same = batch.prompts[:, None] == batch.prompts
    prompts = [
        tuple(batch.tokens[s : s + n].tolist()) for s, n in zip(batch.cu_seqlens, batch.prompt_lengths, strict=False)
    ]
    if same.tolist() != [[a == b for b in prompts] for a in prompts]:
        off.append("prompts")
    # A prompt's experts are those of its first sample on this replica.
    places = torch.arange(len(batch.tokens)) - batch.cu_seqlens[:-1].repeat_interleave(batch.lengths)
    completions = places >= batch.prompt_lengths.repeat_interleave(batch.lengths)
    if not torch.equal(batch.experts[completions], here.experts[completions]):
        off.append("experts")
    return off


def exchange_of(config: Config) -> ExchangeOptions:
    return ExchangeOptions.of(config.layout, config.model, config.rollout)


def batch_in_step_5(rollout: Rollout, config: Config, topology: Topology) -> Batch:
    options = StepOptions.of(config)
    batch = batch_of_step(rollout, step_of(rollout.groups, options, 5), options, topology)
    assert batch is not None, "some group has signal"
    return batch


def penalties(rollout: Rollout, whole: Batch, config: Config, topology: Topology) -> list[list[float]]:
    """Advantages of rewards with a KL penalty, token by token; and as plain Python has them, sample by sample."""
    config = replace(config, algorithm=replace(config.algorithm, kl_in="reward", kl_coef=0.1))
    batch, options = batch_in_step_5(rollout, config, topology), StepOptions.of(config)
    batch = batch.with_(old_logprob=torch.cos(batch.tokens.float()), ref_logprob=torch.sin(batch.tokens.float()))
    found = gathered(penalised(batch, rollout.groups, options, topology).advantage, batch, topology)
    apart = (torch.cos(whole.tokens.float()) - torch.sin(whole.tokens.float())).double() * whole.mask
    of_sample = [0.1 * part.sum().item() for part in apart.split(whole.lengths.tolist())]
    expected: list[float] = []
    for number, group in enumerate(rollout.groups):
        rewards = {i: info.score.total - of_sample[i] for i, info in enumerate(group.infos, SIZE * number)
                   if i not in UNSCORED}  # fmt: skip
        expected += plain_grpo.group_advantages((*rewards.values(),), "sample") if len(rewards) > 1 else [0.0]
    return [
        found.tolist(),
        expected,
        whole.select([i for i in range(len(of_sample)) if i not in UNSCORED]).lengths.tolist(),
    ]


def with_steps(rollout: Rollout) -> list[Group]:
    """The samples with two steps each; some have none, which count as one."""

    def stepwise(number: int, info: SampleInfo) -> SampleInfo:
        if info.score.unscorable or info.length < 2 or number % 5 == 4:
            return info
        steps = ((info.length // 2 - 1, float(number % 4)), (info.length - 1, float(number % 5)))
        return replace(info, score=replace(info.score, steps=steps))

    return [
        replace(group, infos=tuple(stepwise(SIZE * i + j, a) for j, a in enumerate(group.infos)))
        for i, group in enumerate(rollout.groups)
    ]


def by_step(rollout: Rollout, config: Config, topology: Topology) -> list[Any]:
    """Advantages of tokens when steps are rewarded; and as plain Python has them."""
    config = replace(config, algorithm=replace(config.algorithm, supervision="process"))
    groups = with_steps(rollout)
    batch = batch_in_step_5(replace(rollout, groups=groups), config, topology)
    found = gathered(batch.advantage, batch, topology).tolist()
    expected: list[float] = []
    for group in groups:
        scored = [a for a in group.infos if not a.score.unscorable]
        steps = [a.score.steps or ((max(0, a.length - 1), a.score.total),) for a in scored]
        lengths = [a.length for a in scored]
        if len(scored) > 1:
            for info, of_tokens in zip(scored, plain_grpo.step_advantages(steps, lengths, "sample"), strict=True):
                expected += [a for at, a in enumerate(of_tokens.tolist()) if is_sampled(info, at)]
    return [[advantage for advantage in found if advantage], [advantage for advantage in expected if advantage]]


def is_sampled(info: SampleInfo | Sample, at: int) -> bool:
    return not any(first <= at < end for first, end in info.given)


def learned(rollout: Rollout, whole: Batch, layout: LayoutConfig, topology: Topology) -> dict[str, Any]:
    """[total, terms, steps] of each sample with a reward model's scores, which replicas compute of unequally many; and
    as plain Python has them."""
    model_words = ["reward.model.path=liked", "reward.model.weight=0.5", "reward.model.from_step=3"]
    config = settings(layout, "reward.terms=[{name:own,function:a:b}]", "reward.success=own", *model_words)
    rollout, everyone = replace(rollout, groups=with_steps(rollout)), samples()
    model = ScalarModel(REWARD_MODEL, config.model, layout, VOCABULARY.vocab_size, topology, HERE, optimizer=None)
    model.initialize(seed=3)
    values = [part.tolist() for part in model.values(whole).double().split(whole.lengths.tolist())]

    def reward(supervision: str, scores: ScoresOf) -> LearnedReward:
        return LearnedReward(config.reward, supervision == "process", exchange_of(config), topology, scores, "")

    def scored(by: LearnedReward) -> list[list[Any]]:
        return [[a.score.total, a.score.terms, [*a.score.steps]] for a in by.added(rollout).infos]

    whole_scores, expected_whole = WholeScores(model, Scale(0.25, 4.0)), []
    step_scores, expected_steps = StepScores(model, SEPARATORS, "product", VOCABULARY.decode), []
    for sample, info, of_sample in zip(everyone, rollout.infos, values, strict=True):
        score, prompt = info.score, len(sample.prompt.token_ids)
        value = (of_sample[-1] - 0.25) / 4
        right = {end: 1 / (1 + math.exp(-of_sample[prompt + end])) for end in plain_ends(sample)}
        product = math.prod(right.values()) if right else 0.0
        if score.unscorable:
            expected_whole.append([0.0, {}, []])
            expected_steps.append([0.0, {}, []])
            continue
        expected_whole.append([score.total + value / 2, {"own": score.total, "model": value}, [*score.steps]])
        rewards = dict(score.steps) or {max(0, info.length - 1): score.total}
        rewards |= {end: rewards.get(end, 0.0) + each / 2 for end, each in right.items()}
        terms = {"own": score.total, "model": product}
        expected_steps.append([score.total + product / 2, terms, sorted(rewards.items())])
    result: dict[str, Any] = {
        "whole": [scored(reward("outcome", whole_scores)), expected_whole],
        "steps": [scored(reward("process", step_scores)), expected_steps],
        "due": [reward("outcome", whole_scores).is_due(step) for step in range(5)],
        "held": topology.of_every_replica([len(batch_of_all(rollout, exchange_of(config), topology).numbers)]),
        "ended": sum(s.token_ids[-2] in SEPARATOR_IDS and s.token_ids[-1] not in SEPARATOR_IDS
                     for s in everyone if s.finish_reason == "stop" and len(s.token_ids) > 1),
    }  # fmt: skip
    for weight in model.chunks.parameters():
        weight.data.fill_(math.nan)
    for name, by in (("whole", reward("outcome", whole_scores)), ("steps", reward("process", step_scores))):
        try:
            by.added(rollout)
        except FloatingPointError as error:
            result[f"{name} refused"] = str(error)
    return result


def plain_ends(sample: Sample) -> list[int]:
    """Index in the completion of the last token of each step that ends with a sampled token; the stop token belongs to
    the last one."""
    spelled = sample.token_ids[:-1] if sample.finish_reason == "stop" else sample.token_ids
    cuts = [-1, *(i for i, token in enumerate(spelled) if token in SEPARATOR_IDS), len(spelled)]
    ends = [end - 1 for start, end in pairwise(cuts) if end - start > 1]
    ends = [*ends[:-1], len(sample.token_ids) - 1] if len(sample.token_ids) else []
    return [end for end in ends if is_sampled(sample, end)]


def without_holders(groups: list[Group]) -> list[Group]:
    """The groups as ranks of another layout know them."""
    return [replace(group, infos=tuple(replace(a, holder=NOBODY) for a in group.infos)) for group in groups]


def everywhere(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    theirs: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(theirs, mine, group=group)
    return theirs


def seen_under(name: str, folder: Path) -> dict[str, Any]:
    """What a layout does with the samples, and what it makes of the steps that layouts before it have saved."""
    topology, config = join_layout(LAYOUTS[name], seed=0), settings(LAYOUTS[name])
    rollout, whole = rollout_of(samples()), pack_samples(samples())
    batch = batch_in_step_5(rollout, config, topology)
    of_all = batch_of_all(rollout, exchange_of(config), topology)
    result: dict[str, Any] = {"off": unequal(of_all, whole, topology)}
    result["misrouted"] = misrouted(config, topology)
    model = parallel_state.get_model_parallel_group()
    result["alike"] = all(
        theirs == everywhere(batch.numbers.tolist(), model)[0] for theirs in everywhere(batch.numbers.tolist(), model)
    )
    replicas = everywhere(batch.numbers.tolist(), topology.replicas) if topology.replicas else [batch.numbers.tolist()]
    result["numbers"] = sorted(number for replica in replicas for number in replica)
    result["advantage"] = gathered(batch.advantage, batch, topology).tolist()
    result["by_step"] = by_step(rollout, config, topology)
    options = StepOptions.of(config)
    step = step_of(rollout.groups, options, 5, version=1)
    step.batch = batch
    parts = [batch_of_update(step, part, options, 5) for part in step.mini_batches]
    result["weights"] = [gathered(part.weight, part, topology).tolist() for part in parts]
    result["loads"] = [topology.of_every_replica([len(part.tokens)]) for part in parts]
    shift = of_all.rollout_logprob + 0.1 * torch.sin(of_all.tokens.float())
    result["mismatch"] = Watch(config, topology).mismatch(step, of_all, shift)
    result["apart"] = (0.1 * torch.sin(whole.tokens.float()).abs())[whole.mask].tolist()
    drawn = torch.sin(batch.tokens + batch.numbers.repeat_interleave(batch.lengths))
    batch = batch.with_(ref_logprob=drawn, old_logprob=batch.rollout_logprob + 0.5 * drawn)
    batch = corrected(batch, CORRECTED, topology)
    result["correction"] = gathered(batch.correction, batch, topology).tolist()
    result["corrected"] = correction_metrics(batch, replace(CORRECTED, correction_cap=1.01), topology)
    by_token = batch.with_(correction=None)
    log_ratio = batch.old_logprob - batch.rollout_logprob
    result["factors"] = [gathered(one, batch, topology).tolist() for one in (batch.mask.float(), log_ratio)]
    result["effective"] = [effective_samples(one, CORRECTED, topology) for one in (batch, by_token)]
    result["penalised"] = penalties(rollout, whole, config, topology)
    result["learned"] = learned(rollout, whole, LAYOUTS[name], topology) if name == "dp4" else {}
    step = replace(step, batch=batch, shown=[{"a": 1}], updates=[{"loss": 0.5}])
    trained = whole.select(result["numbers"]).with_(
        **{name: gathered(getattr(batch, name), batch, topology)
           for name in ("advantage", "ref_logprob", "old_logprob", "correction")}
    )  # fmt: skip
    mine = folder / name
    if dist.get_rank() == 0:
        mine.mkdir()
    dist.barrier()
    step_in_progress.save(mine, step, topology)
    integrity.seal(mine)
    for saved in sorted(path for path in folder.iterdir()):
        back = step_in_progress.load(saved, topology)
        assert back.groups == without_holders(step.groups)
        assert (back.signal, back.epochs) == (step.signal, step.epochs)
        assert (back.shown, back.updates) == (step.shown if topology.is_main else [], step.updates)
        mine_again = back.batch.numbers.tolist()
        replicas = everywhere(mine_again, topology.replicas) if topology.replicas else [mine_again]
        numbers = sorted(number for replica in replicas for number in replica)
        result.setdefault("loaded", {})[saved.name] = [unequal(back.batch, trained, topology), numbers]
        if saved == mine:
            before, after = (
                {name: column for name, column in vars(one).items() if column is not None}
                for one in (batch, back.batch)
            )
            result["same"] = before.keys() == after.keys() and all(
                torch.equal(before[name], after[name]) for name in before
            )
    parallel_state.destroy_model_parallel()
    return result


if __name__ == "__main__":
    results = {name: seen_under(name, Path(sys.argv[1])) for name in LAYOUTS}
    everyone = everywhere(results)
    if dist.get_rank() == 0:
        print(json.dumps(everyone))
    dist.destroy_process_group()

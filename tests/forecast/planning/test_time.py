"""Phases are those that the stages make, more work never takes less time, and only lengths that differ have a tail."""

from __future__ import annotations

from dataclasses import replace

import pytest
from composed import composed
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mega import platform

platform.start()

from grpo_mega.config.limits import limits_of  # noqa: E402
from grpo_mega.config.schema import ClusterConfig, Config  # noqa: E402
from grpo_mega.errors import InputError  # noqa: E402
from grpo_mega.forecast.planning.hardware import GPUS, RATES, Rates, machines_of  # noqa: E402
from grpo_mega.forecast.planning.hours import assumptions_of, bound, warnings_of  # noqa: E402
from grpo_mega.forecast.planning.memory import Trainer  # noqa: E402
from grpo_mega.forecast.planning.search import job_for, ranked  # noqa: E402
from grpo_mega.forecast.planning.time import Assumed, Job, StepTime, generate, run_time, step_time  # noqa: E402
from grpo_mega.forecast.planning.training_time import (  # noqa: E402
    Micro,
    Parts,
    Sequences,
    layer_backward,
    layer_forward,
    micro_batches,
    passes,
)

ROOM = 1e9
SMALL = ["experiment=deepseekmath_7b", "algorithm.prompts_per_step=8", "algorithm.group_size=16"]
EXPERTS = ["experiment=qwen3_30b_a3b", "algorithm.prompts_per_step=32", "algorithm.mini_batches=2"]
NARROW = [*EXPERTS, "algorithm.correction=truncate", "layout.fp8=true"]


def planned(words: list[str]) -> Job:
    return job_for(composed(*words))


def stepped(words: list[str], assumed: Assumed = Assumed(), room: float = ROOM) -> StepTime:  # noqa: B008 (frozen)
    job = planned(words)
    return step_time(job, room, job.config.rollout.max_new_tokens, assumed)


def assumptions(config: Config, assumed: Assumed) -> list[str]:
    return assumptions_of(config.model, config.layout, config.algorithm, assumed)


def names(words: list[str]) -> list[str]:
    return [phase.name for phase in stepped(words).phases]


@pytest.mark.parametrize(
    ("words", "between"),
    [
        (["algorithm.kl_coef=0", "algorithm.mini_batches=1"], ["updates"]),
        (["algorithm.kl_coef=0.1", "algorithm.mini_batches=1"], ["log-probs of the reference policy", "updates"]),
        (["algorithm.kl_coef=0", "algorithm.mini_batches=2"], ["log-probs of the old policy", "updates"]),
        (
            ["algorithm=ppo", "algorithm.kl_coef=0", "algorithm.kl_in=loss"],
            ["values of the critic", "log-probs of the old policy", "updates", "updates of the critic"],
        ),
    ],
)
def test_phases_are_those_of_the_stages(words: list[str], between: list[str]) -> None:
    assert names([*SMALL, *words]) == ["generation", *between, "weights to the engines", "offload"]


def test_engines_of_their_own_offload_nothing_and_the_embedded_one_gets_no_weights() -> None:
    assert "offload" not in names([*SMALL, "rollout.sglang.first_gpu=8", "rollout.sglang.transport=network"])
    assert names([*SMALL, "rollout.engine=embedded"])[-1] == "updates"


@pytest.mark.parametrize(("completion", "epochs"), [(10, 8), (900, 1)])
def test_what_is_generated_ahead_takes_time_only_beyond_the_training(completion: int, epochs: int) -> None:
    assumed = Assumed(completion=completion)
    apart = [*SMALL, "rollout.sglang.first_gpu=8", "rollout.sglang.transport=network"]
    apart += ["rollout.max_new_tokens=1000", "algorithm.correction=truncate", f"algorithm.epochs={epochs}"]
    (plain,), (ahead,) = (
        run_time(planned([*apart, f"rollout.ahead={word}"]), ROOM, assumed) for word in ("false", "true")
    )
    generation, *others = (phase.seconds for phase in plain.phases)
    trained, pushed = sum(others[:-1]), others[-1]
    assert (generation > trained) == (completion == 900)
    assert ahead.seconds == pytest.approx(max(generation, trained) + pushed)
    embedded = [*SMALL, "rollout.engine=embedded", "algorithm.correction=truncate", "rollout.max_new_tokens=1000"]
    one, other = (run_time(planned([*embedded, f"rollout.ahead={word}"]), ROOM, assumed) for word in ("0", "1"))
    assert one[0].seconds == other[0].seconds


def test_a_search_knows_what_is_generated_ahead() -> None:
    apart = [*SMALL, "rollout.sglang.first_gpu=8", "rollout.sglang.transport=network"]
    apart += ["algorithm.correction=truncate", "algorithm.epochs=4"]
    plain, ahead = (
        {
            (layout.tp, layout.pp, layout.cp): each
            for each in ranked(composed(*apart, f"rollout.ahead={word}"), Assumed(completion=20), ["none"], True)
            for layout in [each.config.layout]
        }
        for word in ("false", "true")
    )
    assert plain.keys() == ahead.keys()
    hidden = set()
    for layout, each in plain.items():
        generation, *training = (phase.seconds for phase in each.phases)
        assert ahead[layout].seconds == pytest.approx(max(generation, sum(training)))
        hidden.add(generation < sum(training))
    hides = [sum(phase.seconds for phase in each.phases[1:]) for each in ahead.values() if each.phases[0].seconds]
    assert hides == sorted(hides), (
        "of steps that are as long as their generation, those with the shortest training first"
    )
    assert hidden == {False, True}, "layouts whose training hides all of the generation, and others"


def test_a_run_with_longer_completions_later_has_two_kinds_of_steps() -> None:
    later = ["rollout.longer_from_step=10", "rollout.longer_max_new_tokens=2000", "rollout.max_new_tokens=1000"]
    first, second = run_time(planned([*SMALL, *later, "run.steps=40"]), ROOM, Assumed(completion=250))
    assert (first.steps, first.longest, first.completion) == (10, 1000, 250)
    assert (second.steps, second.longest, second.completion) == (30, 2000, 500)
    assert second.seconds > first.seconds


@settings(max_examples=20, deadline=None)
@given(st.integers(20, 900), st.integers(1, 124))
def test_longer_completions_never_take_less_time_to_generate(mean: int, more: int) -> None:
    shorter, longer = (stepped(SMALL, Assumed(completion)) for completion in (mean, mean + more))
    assert longer.tokens >= shorter.tokens
    assert longer.phases[0].seconds >= shorter.phases[0].seconds


@given(st.lists(st.tuples(st.integers(1, 16384), st.integers(1, 8192)), min_size=1, max_size=40), st.integers(1, 4096))
def test_micro_batches_with_more_tokens_never_take_less_time(sizes: list[tuple[int, int]], more: int) -> None:
    """Nor one micro-batch more; lengths that pack better may take less, as there are fewer of them then."""
    job = planned(EXPERTS)
    micros = sorted((Micro(*size) for size in sizes), key=lambda micro: -micro.tokens)
    larger = [Micro(micro.tokens + more, micro.keys) for micro in micros]
    least, *others = (
        passes(job.trainer, job.roles[0].stages, each, job.machines, training=True).seconds
        for each in (micros, larger, [Micro(micros[0].tokens, more), *micros])
    )
    assert min(others) >= least * (1 - 1e-9)


def test_only_lengths_that_differ_have_a_tail_and_more_gpus_do_not_shorten_it() -> None:
    job = planned(EXPERTS)
    level = generate(job, [4000] * 512, 200, ROOM)
    assert level.slowest.seconds == level.level
    completions = [16384, *[3500] * 510, 16384]
    skewed = generate(job, completions, 200, ROOM)
    assert skewed.slowest.seconds > 1.5 * skewed.level
    twice = generate(replace(job, machines=replace(job.machines, gpus=2 * job.machines.gpus)), completions, 200, ROOM)
    assert twice.alone == skewed.alone
    assert twice.slowest.seconds >= twice.alone


REFILL = [*SMALL, "algorithm.groups_without_signal=refill", "algorithm.refill_limit=3"]


@pytest.mark.parametrize(
    ("signal", "rule", "drawn", "learned"),
    [
        (0.5, "count", 8, 8),
        (0.5, "drop", 8, 4),
        (0.0, "drop", 8, 1),
        (1.0, "refill", 8, 8),
        (0.5, "refill", 16, 8),
        (8 / 11, "refill", 11, 8),
        (0.25, "refill", 24, 6),  # three times as many at most
        (0.0, "refill", 24, 1),
    ],
)
def test_groups_that_are_drawn_and_learned_from(signal: float, rule: str, drawn: int, learned: int) -> None:
    config = composed(*REFILL)
    config.algorithm.groups_without_signal = rule
    assumed = Assumed(500, 200, signal)
    assert assumed.groups(config.algorithm) == (drawn, learned)
    completions, kept = assumed.completions(config.algorithm, config.rollout, 1024)
    assert (len(completions), len(kept)) == (16 * drawn, 16 * learned)


def test_no_refilled_completion_is_left_out_where_there_are_more_engines_than_completions() -> None:
    job = planned(REFILL)
    job.config.algorithm.prompts_per_step, job.config.algorithm.group_size = 1, 2
    completions = [100] * 6
    rollout = generate(replace(job, machines=replace(job.machines, gpus=64)), completions, 200, ROOM)
    assert rollout.slowest.tokens == 300


@pytest.mark.parametrize("signal", [-0.1, 1.1, float("nan")])
def test_a_share_of_groups_is_between_0_and_1(signal: float) -> None:
    with pytest.raises(InputError) as error:
        Assumed(500, 200, signal).groups(composed(*REFILL).algorithm)
    assert error.value.where == f"--signal {signal:g}"


@pytest.mark.parametrize(
    ("rule", "signal", "words"),
    [
        ("count", 1.0, ""),
        ("drop", 1.0, "groups_without_signal=drop"),
        ("refill", 1.0, "groups_without_signal=refill"),
        ("refill", 0.5, ""),
        ("refill", 0.25, "algorithm.refill_limit=3 is reached: a step draws 24 prompts and learns from 6"),
    ],
)
def test_what_is_taken_for_granted_of_groups_is_said(rule: str, signal: float, words: str) -> None:
    config = composed(*REFILL)
    config.algorithm.groups_without_signal = rule
    said = assumptions(config, Assumed(500, 200, signal))
    assert len(said) == bool(words)
    assert words in "".join(said)


def test_experts_that_gain_less_from_8_bits_than_is_planned_are_warned_of() -> None:
    config = composed(*EXPERTS)
    config.layout.fp8 = True
    for width, warned in ((768, 1), (2048, 0)):
        config.model.moe.ffn_hidden = width
        said = [line for line in assumptions(config, Assumed()) if line.startswith("layout.fp8=true may gain less")]
        assert len(said) == warned
        assert all("experts here have 768 channels" in line for line in said)


def test_prompts_that_replace_others_are_generated_after_them_and_not_learned_from_twice() -> None:
    plain, refilled = (stepped(REFILL, Assumed(500, signal=signal)) for signal in (1.0, 0.5))
    assert (plain.groups, refilled.groups) == (8, 16)
    assert refilled.tokens == pytest.approx(2 * plain.tokens, rel=0.05)
    generation, *others = ((a.seconds, b.seconds) for a, b in zip(plain.phases, refilled.phases, strict=True))
    assert 1.5 * generation[0] < generation[1] < 2.5 * generation[0]  # one completion after the other, of any length
    for before, after in others:
        assert after == pytest.approx(before, rel=0.1)


def test_what_bounds_a_step_is_said_and_a_tail_and_an_overflow_are_warned_of() -> None:
    long = stepped(EXPERTS, Assumed(completion=1000))
    assert bound(long).startswith("generation, ")
    assert any("more GPUs do not shorten" in line for line in warnings_of(long))
    short = stepped([*EXPERTS, "rollout.max_new_tokens=64"], Assumed(completion=60))
    assert not warnings_of(short)
    tight = stepped(EXPERTS, Assumed(completion=4000), room=60_000)
    assert any(line.startswith("the KV cache overflows: ") for line in warnings_of(tight))
    assert tight.rollout.evicted > 0 == long.rollout.evicted


@pytest.mark.parametrize("experts", [False, True])
def test_adapters_save_gradients_of_weights_and_recomputation_costs_a_forward_pass(experts: bool) -> None:
    job = planned(EXPERTS)
    trainer = job.trainer
    forward = layer_forward(trainer, experts, 1e6, Micro(16384, 2000), job.machines)
    full = layer_backward(trainer, forward)
    trainer.layout.recompute = "none"
    none = layer_backward(trainer, forward)
    again = forward | ({"waits for the host": 0.0} if experts else {})  # they are not repeated
    assert {name: full[name] - none[name] for name in full} == pytest.approx(again)
    trainer.lora.rank = 8
    adapted = layer_backward(trainer, forward)
    assert none["matrix products"] - adapted["matrix products"] == pytest.approx(forward["matrix products"])
    assert sum(adapted.values()) < sum(none.values())


def test_a_pipeline_has_the_bubble_of_1f1b_and_pieces_divide_it() -> None:
    micros = [Micro(8192, 2000)] * 8
    bubble = {}
    for pieces in (1, 2):
        words = ["experiment=qwen3_30b_a3b", "layout.pp=4", f"layout.vpp={pieces}", "cluster.nodes=8"]
        job = planned(words)
        slots = passes(job.trainer, job.roles[0].stages, micros, job.machines, training=True)
        bubble[pieces] = slots.parts["bubble"] / (slots.seconds - slots.parts["bubble"])
    assert bubble == pytest.approx({1: 3 / 8, 2: 3 / 16})


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=60), st.integers(1, 4))
def test_micro_batches_have_every_token_once(lengths: list[int], replicas: int) -> None:
    """Of one replica exactly; of several at least their share, as slots wait for the fullest."""
    given_tokens = 1
    work = Sequences(
        tuple(n + given_tokens for n in lengths), tuple(range(len(lengths))), (given_tokens,) * len(lengths)
    )
    slots = micro_batches(Trainer.of(composed(*SMALL)), work, replicas)
    total, tokens = sum(micro.tokens for micro in slots), sum(work.lengths)
    assert total == pytest.approx(tokens) if replicas == 1 else total >= tokens / replicas
    looked_at = sum(micro.tokens * micro.keys for micro in slots)
    if replicas == 1:
        assert looked_at == pytest.approx(sum((n + given_tokens) ** 2 / 2 for n in lengths))


def test_every_gpu_that_may_be_named_has_a_data_sheet() -> None:
    assert GPUS.keys() == {*limits_of(ClusterConfig)["gpu"].choices}
    assert machines_of(composed("experiment=tiny").cluster, 8) is None


def test_hidden_exchange_and_faster_rates_save_what_they_say() -> None:
    job = planned(EXPERTS)

    def forward(rates: Rates) -> Parts:
        return layer_forward(job.trainer, True, 1e6, Micro(16384, 2000), replace(job.machines, rates=rates))

    plain, hidden, half = (
        forward(rates) for rates in (RATES, replace(RATES, hidden=1.0), replace(RATES, matmul=RATES.matmul / 2))
    )
    assert plain["exchange of experts"] > 0 == hidden["exchange of experts"]
    assert half["matrix products"] == pytest.approx(2 * plain["matrix products"])


@pytest.mark.parametrize(
    ("inputs", "published"), [(512, 590e12), (1536, 990e12), (2048, 1099e12), (7168, 1304e12), (16384, 1358e12)]
)
def test_products_in_8_bits_slow_down_with_fewer_inputs_as_published(inputs: int, published: float) -> None:
    """DeepGEMM's table of 2025-02 for an H800, 4,096 rows or more."""
    assert 1420e12 * inputs / (inputs + RATES.depth) == pytest.approx(published, rel=0.05)


def gain_of_8_bits(width: int, etp: int) -> float:
    """How many times as fast routed experts are in 8 bits, where all matrices have `width` inputs."""
    seconds = []
    for words in (EXPERTS, NARROW):
        job = planned(words)
        job.config.model.hidden = job.config.model.moe.ffn_hidden = width
        job.config.layout.etp = etp
        seconds.append(layer_forward(job.trainer, True, 0, Micro(16_384, 4_000), job.machines)["routed experts"])
    return seconds[0] / seconds[1]


def test_wide_products_gain_twice_from_8_bits_and_narrow_ones_less() -> None:
    gains = [gain_of_8_bits(width, etp=1) for width in (10**9, 2048, 1536)]
    assert gains == pytest.approx([2, 2 * 2398 / 2748, 2 * 1886 / 2236])


def test_ranks_that_share_experts_have_fewer_inputs_and_gain_less_from_8_bits() -> None:
    """Of an expert's three matrices the last is split by its inputs: a rank of two has half of them."""
    halved = 2 * (3 + 4 * RATES.depth / 2 / 2048) / (3 + 4 * RATES.depth / 2048)
    assert gain_of_8_bits(2048, etp=2) == pytest.approx(halved)


def test_in_8_bits_products_take_less_time_and_what_they_read_is_written_in_8_bits() -> None:
    """Attention, and what else is computed in 16 bits, takes as long; weights are not narrowed in the backward pass."""
    micro, held = Micro(16_384, 4_000), 1e8
    job, narrow = planned(EXPERTS), planned(NARROW).trainer
    usual, machines = job.trainer, job.machines
    before, after = (layer_forward(trainer, True, held, micro, machines) for trainer in (usual, narrow))
    for products in ("matrix products", "routed experts"):
        assert before[products] / 2 < after[products] < 0.7 * before[products]
    assert 0 < after["tensor parallel"] == pytest.approx(0.75 * before["tensor parallel"])
    same = before.keys() - {"matrix products", "routed experts", "tensor parallel"}
    assert {name: after[name] for name in same} == {name: before[name] for name in same}
    model, tokens, bandwidth = usual.model, 16_384 / usual.layout.cp / usual.layout.tp, machines.gpu.memory * 0.75
    queries = model.heads * (model.head_dim or 0)
    read = 3 * model.hidden + queries + 1.3 * model.moe.top_k * (2 * model.hidden + model.moe.ffn_hidden)
    assert after["to 8 bits"] == pytest.approx(4 * tokens * read / bandwidth)
    projections = model.hidden * (2 * queries + 2 * model.kv_heads * (model.head_dim or 0)) / usual.layout.tp
    assert after["weights to 8 bits"] == pytest.approx(4 * (projections + held) / bandwidth)
    backward = layer_backward(replace(narrow, layout=replace(narrow.layout, recompute="none")), after)
    assert (backward["weights to 8 bits"], backward["to 8 bits"]) == (0, after["to 8 bits"])


def test_in_8_bits_the_host_launches_more() -> None:
    """Where launches alone take time, passes take as much longer as there are more of them."""
    job, narrow = planned(EXPERTS), planned(NARROW)
    slow = replace(job.machines, rates=replace(RATES, launch=10.0))
    before, after = (
        passes(each.trainer, job.roles[0].stages, [Micro(64, 32)], slow, training=True) for each in (job, narrow)
    )
    assert after.seconds == pytest.approx(RATES.narrowed * before.seconds)

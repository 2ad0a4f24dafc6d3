"""What SGLang engines are started with, on machines with GPUs and without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from composed import composed
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.config.schema import Config
from grpo_mega.errors import InputError
from grpo_mega.platform import Platform, start

CPU = start()  # before megatron.core is imported
GPU = Platform(torch.device("cuda", 3), "nccl", transformer_engine=False)

from grpo_mega.rollout.contract import Contract  # noqa: E402
from grpo_mega.rollout.sglang.arguments import (  # noqa: E402
    check_platform,
    environment,
    expected_weights,
    model_config,
    own_experts,
    server_arguments,
    take_turns,
)
from grpo_mega.weights import fp8  # noqa: E402
from grpo_mega.weights.names import entries  # noqa: E402

VOCAB = 26


def configured(*overrides: str, **arguments: object) -> Config:
    config = composed("experiment=tiny_sglang", "layout=single", *overrides)
    config.rollout.sglang.arguments = arguments
    return config


def arguments_of(config: Config, platform: Platform, folder: Path) -> dict[str, object]:
    return server_arguments(config.rollout.sglang, config.model.dtype, platform, folder, seed=0)


@given(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 2), (8, 4)]))
def test_the_ranks_of_an_engine_split_the_experts(sizes: tuple[int, int]) -> None:
    """As SGLang has it: with tp 4 and ep_size 2, the first two ranks keep the first half."""
    tp, ep = sizes
    config = configured(ep_size=ep)
    config.rollout.sglang.tp = tp
    kept = [own_experts(config.rollout.sglang, 4, rank) or range(4) for rank in range(tp)]
    assert [numbers.start for numbers in kept] == [rank * ep // tp * 4 // ep for rank in range(tp)]
    assert {len(numbers) for numbers in kept} == {4 // ep}


@pytest.mark.parametrize(
    "arguments",
    [
        {"ep_num_redundant_experts": 2},
        {"enable_eplb": True},
        {"init_expert_location": "elsewhere.json"},
        {"moe_dp_size": 2},
        {"ep_size": 3},
    ],
)
def test_where_experts_may_be_anywhere_all_are_sent(arguments: dict[str, object]) -> None:
    config = configured(**{"ep_size": 4, **arguments})
    config.rollout.sglang.tp = 4
    assert own_experts(config.rollout.sglang, 4, 1) is None
    assert expected_weights(config.model, False, VOCAB, None).keys() == {e.name for e in entries(config.model, VOCAB)}


@pytest.mark.parametrize("experts", [None, range(1, 3)])
def test_in_fp8_the_engine_expects_what_the_trainer_quantises(experts: range | None) -> None:
    config = configured("model.dtype=bf16", "model.moe.ffn_hidden=128")
    made = [
        (entry.name, torch.ones(entry.shape, dtype=entry.dtype))
        for entry in entries(config.model, VOCAB)
        if experts is None or entry.expert is None or entry.expert in experts
    ]
    contract = Contract(lambda: expected_weights(config.model, True, VOCAB, experts), has_weights=False)
    contract.begin_update()
    contract.push(fp8.quantised_bucket(made))
    contract.end_update(0)
    assert fp8.is_fp8(model_config(config.model, True, VOCAB)["quantization_config"])
    assert "quantization_config" not in model_config(config.model, False, VOCAB)


def test_an_engine_on_the_trainers_gpu_gives_its_memory_back(tmp_path) -> None:
    config = configured()
    given = arguments_of(config, GPU, tmp_path)
    assert take_turns(config.rollout.sglang, GPU)
    assert (given["base_gpu_id"], given["enable_memory_saver"]) == (3, True)
    assert given["disable_prefill_cuda_graph"], "SGLang does not start with both"
    assert not take_turns(config.rollout, CPU)


def test_an_engine_on_a_gpu_of_its_own_stays_there(tmp_path) -> None:
    config = configured("rollout.sglang.first_gpu=4", "rollout.sglang.transport=network")
    given = arguments_of(config, GPU, tmp_path)
    assert not take_turns(config.rollout.sglang, GPU)
    assert given["base_gpu_id"] == 7
    assert "enable_memory_saver" not in given


@pytest.mark.parametrize("platform", [CPU, GPU])
def test_the_overlapped_scheduler_is_off_unless_asked_for(platform: Platform, tmp_path) -> None:
    own = configured(disable_overlap_schedule=False)
    assert arguments_of(configured(), platform, tmp_path)["disable_overlap_schedule"] is True
    assert arguments_of(own, platform, tmp_path)["disable_overlap_schedule"] is False


def test_sglangs_watchdog_leaves_a_silent_engine_to_the_limit_of_the_configuration(tmp_path) -> None:
    config = configured()
    limit = arguments_of(config, CPU, tmp_path)["watchdog_timeout"]
    assert limit > 100 * config.rollout.sglang.silence_seconds


@pytest.mark.parametrize(
    ("overrides", "platform", "field", "words"),
    [
        (["rollout.ahead=true", "algorithm.correction=mask"], GPU, "rollout.ahead", "set rollout.sglang.first_gpu"),
        (["rollout.sglang.transport=network"], GPU, "rollout.sglang.transport", "set rollout.sglang.first_gpu"),
        (["rollout.sglang.first_gpu=1", "rollout.sglang.transport=disk"], GPU, "rollout.sglang.first_gpu", "of 0 GPUs"),
        (["rollout.sglang.first_gpu=1", "rollout.sglang.transport=disk"], CPU, "rollout.sglang.first_gpu", "no GPUs"),
        (
            ["rollout.sglang.fp8=true", "model.dtype=bf16", "model.moe.ffn_hidden=128"],
            CPU,
            "rollout.sglang.fp8",
            "no GPUs",
        ),
    ],
)
def test_what_a_machine_cannot_do_is_refused(overrides: list[str], platform: Platform, field: str, words: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("counts the GPUs of a machine that has none")
    with pytest.raises(InputError, match=words) as refused:
        check_platform(configured(*overrides).rollout, platform)
    assert refused.value.field == field


def test_what_works_everywhere_is_accepted() -> None:
    for platform in (CPU, GPU):
        check_platform(configured().rollout, platform)
        check_platform(configured("rollout.sglang.transport=disk").rollout, platform)
    check_platform(configured("rollout.sglang.transport=network").rollout, CPU)


@pytest.mark.parametrize("transport", ["shared", "network"])
def test_nccl_registers_nothing_under_graphs_whose_memory_comes_and_goes(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the user's environment says otherwise: a graph that is replayed on what was mapped before can hang."""
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")
    sglang = configured(f"rollout.sglang.transport={transport}").rollout.sglang
    assert environment(sglang, GPU)["NCCL_GRAPH_REGISTER"] == "0"

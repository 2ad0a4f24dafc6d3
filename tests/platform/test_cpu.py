"""Every substitution of platform/cpu.py is needed: without it, real Megatron work fails where its reason says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from limits import limit
from ranks import run_ranks

from grpo_mega.platform import cpu

HERE = Path(__file__).parent
TRAININGS = ["train", "train_bf16", "train_latent_attention", "train_expert_parallel", "train_tied_pipeline"]

NEEDED_FOR = {
    # name: (work that fails without it, ranks, what the error says or the line of Megatron that raised it)
    "current_device": ("train", 1, "device=torch.cuda.current_device()"),
    "factories": ("train", 1, "torch.tensor([1.0], dtype=torch.float, device='cuda')"),
    "tensor_cuda": ("train_tied_pipeline", 2, "weight.data.cuda()"),
    "tensor_type": ("train", 1, "param.grad.type() == 'torch.cuda.FloatTensor'"),
    "streams": ("train", 1, "torch.cuda.Stream()"),
    "rng": ("train", 1, "= torch.cuda.get_rng_state()"),
    "rng_tracker": ("random_streams", 2, "torch.cuda.random.get_rng_state("),
    "te_gemm": ("train", 1, "name 'te_general_gemm' is not defined"),
    "splits_to_host": ("train_expert_parallel", 2, "(): incompatible function arguments"),
    "have_te": ("train_latent_attention", 1, "isinstance() arg 2 must be a type"),
}

Outcome = list[dict[str, Any]]


def work(left_out: str, ranks: int, works: list[str]) -> Outcome:
    """What every rank reports, see megatron_work.py."""
    outputs = run_ranks(HERE / "megatron_work.py", ranks, [left_out, *works], cold=True)
    return [json.loads(output.splitlines()[-1]) for output in outputs]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """By the substitution that was left out; under "" what happens with all of them. Machines without a compiler."""
    with pytest.MonkeyPatch.context() as environment:  # one after the other: forks.py is for one thread
        environment.setenv("CUDA_VISIBLE_DEVICES", "")
        environment.setenv("CXX", "no-such-compiler")
        environment.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        found = {name: work(name, ranks, [job]) for name, (job, ranks, _) in NEEDED_FOR.items()}
        everything = work("", 2, [*TRAININGS, "random_streams", "compiled_frames", "install_again"])
        return found | {"": everything}


def test_every_substitution_is_put_to_the_test() -> None:
    assert list(NEEDED_FOR) == [s.name for s in cpu.SUBSTITUTIONS]


@pytest.mark.long
@pytest.mark.parametrize("name", NEEDED_FOR)
def test_work_fails_without(name: str, outcomes: dict[str, Outcome]) -> None:
    job, ranks, sign = NEEDED_FOR[name]
    assert len(outcomes[name]) == ranks
    for rank in outcomes[name]:
        assert set(rank[job]) == {"error", "at"}, f"{job} did not fail without {name}: {rank[job]}"
        assert sign in rank[job]["error"] + rank[job]["at"]


@pytest.mark.long
@pytest.mark.parametrize("job", TRAININGS)
def test_training_works_with_all_and_without_a_compiler(job: str, outcomes: dict[str, Outcome]) -> None:
    first, second = (rank[job] for rank in outcomes[""])
    assert first == second
    # A fresh model guesses: its loss is near log(vocabulary size), or a little above with a tied output layer, which
    # makes the token likelier that was just read. And an update has a gradient.
    tolerance = 0.3 if "tied" in job else 0.2
    assert first["loss"] == pytest.approx(torch.tensor(16.0).log().item(), rel=tolerance)
    assert first["grad_norm"] > 0.1


@pytest.mark.long
def test_experts_may_be_spread_over_ranks_without_a_difference(outcomes: dict[str, Outcome]) -> None:
    assert outcomes[""][0]["train_expert_parallel"] == outcomes[""][0]["train"]


@pytest.mark.long
def test_nothing_is_compiled(outcomes: dict[str, Outcome]) -> None:
    assert [rank["compiled_frames"] for rank in outcomes[""]] == [0, 0]


@pytest.mark.long
def test_tensor_parallel_ranks_draw_from_their_own_streams(outcomes: dict[str, Outcome]) -> None:
    streams = [rank["random_streams"] for rank in outcomes[""]]
    for rank, drawn in enumerate(streams):
        own = torch.Generator().manual_seed(1 + 2718 + rank)  # model_parallel_cuda_manual_seed's documented offset
        shared = torch.Generator().manual_seed(1)
        assert drawn["inside"] == [torch.rand(4, generator=own).tolist() for _ in range(2)]
        assert drawn["outside"] == [torch.rand(4, generator=shared).tolist() for _ in range(2)]
        assert drawn["after_error"] == torch.rand(4, generator=shared).tolist()
    assert streams[0]["inside"] != streams[1]["inside"]


@pytest.mark.long
def test_install_twice_is_a_no_op(outcomes: dict[str, Outcome]) -> None:
    assert outcomes[""][0]["install_again"] == {"installed": False, "replaced": []}


def test_factories_still_follow_a_device_context() -> None:
    """As transformers builds its models."""
    cpu.install()
    with torch.device("meta"):
        made = [torch.zeros(2), torch.ones(2), torch.tensor(2), torch.empty(2), torch.full((2,), 1), torch.arange(2)]
    assert {tensor.device.type for tensor in made} == {"meta"}


def test_nothing_is_replaced_where_cuda_is_present_but_what_mends_megatron_without_transformer_engine() -> None:
    assert [s.name for s in cpu.SUBSTITUTIONS if s.on_gpu_too] == ["te_gemm", "have_te"]
    run_ranks(HERE / "torch_contents.py", 1, [], cold=True)


@pytest.mark.long
def test_megatron_is_imported_without_the_compiler_which_takes_seconds() -> None:
    program = (
        "from grpo_mega import platform; platform.start(); import grpo_mega.assemble, torch, sys;"
        "print('torch._dynamo' in sys.modules, torch.compile.__module__, torch.are_deterministic_algorithms_enabled())"
    )
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    made = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=limit(120)
    )
    assert made.stdout == "False torch True\n", made.stderr

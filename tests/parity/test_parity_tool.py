"""tools/parity.py: layouts that agree pass; a wrong normalisation, bad input and a failing run each end in its code."""

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from forks import run_python
from limits import limit
from ranks import REPOSITORY

TOOL = REPOSITORY / "tools" / "parity.py"
SPOILED = f"""
import sys
sys.path[:0] = [{str(TOOL.parent)!r}, {str(Path(__file__).parent)!r}]
import parity
from mutations import MUTATIONS
from pytest import MonkeyPatch

join_processes = parity.platform.join_processes

def and_spoil(here):  # Megatron may be imported from here on
    join_processes(here)
    MUTATIONS[BUG].plant(MonkeyPatch())

parity.platform.join_processes = and_spoil
parity.main()
"""


@dataclass
class Ended:
    codes: list[int]
    out: str
    err: str

    def lines(self, start: str) -> list[str]:
        return [line for line in self.out.splitlines() if line.startswith(start)]


def torchrun(*arguments) -> Ended:
    """Two ranks; torchrun itself ends with 1 whatever they end with, and reports their codes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    job = subprocess.run(
        [*command, *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=limit(900),
    )
    codes = [0] * 2 if job.returncode == 0 else [int(c) for c in re.findall(r"exitcode\s+: (-?\d+)", job.stderr)]
    return Ended(codes, job.stdout, job.stderr)


@pytest.mark.long
def test_a_layout_of_a_correct_trainer_agrees():
    ended = torchrun(TOOL, "--steps", "1", "model=tiny_mla_moe", "model.layers=2", "model.qk_norm=true", "layout=ep2")
    assert ended.codes == [0, 0], ended
    assert len(re.findall(r" pass\b", ended.out)) >= 7, ended.out
    assert "FAIL" not in ended.out


@pytest.mark.long
def test_every_layout_of_a_correct_trainer_agrees():
    ended = torchrun(TOOL, "--all", "--steps", "2", "model=tiny_mla_moe", "model.layers=2", "model.qk_norm=true")
    assert ended.codes == [0, 0], ended
    passed = ended.lines("pass ")
    assert not ended.lines("FAIL")
    assert ended.out.splitlines()[-1] == f"{len(passed)} layouts agree with one rank, 0 do not"
    for layout in ("layout=single, dp 2", "tp=2 layout.sp=true, dp 1", "pp=2, dp 1", "ep=2, dp 2", "distributed=true"):
        assert any(layout in line for line in passed), (layout, ended.out)
    assert any("layout.ep=8: " in line and "experts=4: not divisible" in line for line in ended.lines("left out"))


def spoiled(folder: Path, bug: str, *arguments: str) -> Ended:
    """One step of a layout with a bug of mutations.py; the run on one process is without it."""
    program = folder / "spoiled.py"
    program.write_text(SPOILED.replace("BUG", repr(bug)))
    return torchrun(program, "--steps", "1", "model.layers=2", *arguments)


@pytest.mark.long
def test_a_wrong_normalisation_fails_and_names_the_first_tensor(tmp_path):
    ended = spoiled(tmp_path, "loss_divided_by_replicas", "model=tiny_dense")
    assert ended.codes == [1, 1], ended
    assert re.search(r"^gradient, all .* 5\.0e-01 .* FAIL$", ended.out, re.MULTILINE), ended.out
    assert re.search(r"^loss .* pass$", ended.out, re.MULTILINE), ended.out
    assert "first tensor that differs: embedding.word_embeddings.weight (gradient of step 1)" in ended.out


@pytest.mark.long
def test_latent_norms_that_are_not_summed_fail_though_loss_and_log_probs_agree(tmp_path):
    ended = spoiled(tmp_path, "latent_norms_not_summed", "model=tiny_mla_moe", "model.qk_norm=true", "layout=tp2")
    assert ended.codes == [1, 1], ended
    assert re.search(r"^gradient, worst .* FAIL .*self_attention\.(q|kv)_layernorm\.weight$", ended.out, re.MULTILINE)
    assert re.search(r"^loss .* pass$", ended.out, re.MULTILINE), ended.out
    assert re.search(r"^log-probs .* pass$", ended.out, re.MULTILINE), ended.out


@pytest.mark.long
def test_a_field_that_does_not_exist_is_refused():
    ended = torchrun(TOOL, "model.nonsense=1")
    assert ended.codes == [2, 2], ended
    assert ended.err.count("error: model.nonsense: not a setting") == 1, ended.err


def test_a_layout_that_does_not_fit_is_refused():
    job = run_python(TOOL, "layout=tp2_pp2")
    assert job.returncode == 2, job
    assert "error: the configuration cannot run" in job.stderr
    assert "the world size 1: not divisible" in job.stderr


@pytest.mark.long
def test_a_run_on_one_process_that_fails_ends_every_rank():
    ended = torchrun(TOOL, "model=tiny_dense", "model.layers=1", "optimizer.lr=1e30")
    assert ended.codes == [1, 1], ended
    assert re.search(r"(RuntimeError|FloatingPointError): .*nan", ended.err), ended.err
    assert "the run on one process ended with exit code 1; its error is above" in ended.err


@pytest.fixture(scope="module")
def parity():
    spec = importlib.util.spec_from_file_location("parity", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules["parity"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class TestComparison:
    @staticmethod
    def rows(parity, mine):
        other = {"embedding.a": torch.ones(2), "decoder.layers.0.b": torch.ones(2), "output_layer.c": torch.ones(2)}
        return parity.tensor_rows("gradient", 1, {**other, **mine}, other, parity.TOLERANCES["fp32"])

    def test_equal_tensors_pass(self, parity):
        assert all(row.passed for row in self.rows(parity, {}))

    def test_first_and_worst_tensor(self, parity):
        spoiled = {"output_layer.c": torch.ones(2) * 3, "decoder.layers.0.b": torch.ones(2) * 1.1}
        together, worst = self.rows(parity, spoiled)
        assert not together.passed
        assert (worst.tensor, worst.first) == ("output_layer.c", "decoder.layers.0.b")
        assert worst.difference == pytest.approx(2)

    def test_a_small_error_of_one_tensor_is_seen_beside_a_large_one(self, parity):
        other = {"embedding.a": torch.full((4,), 1e6), "output_layer.c": torch.ones(4)}
        mine = {**other, "output_layer.c": torch.ones(4) * 1.001}
        together, worst = parity.tensor_rows("gradient", 1, mine, other, parity.TOLERANCES["fp32"])
        assert together.passed
        assert not worst.passed
        assert "output_layer.c" in parity.summary([together, worst])

    @pytest.mark.parametrize("bad", [torch.full((2,), float("nan")), torch.ones(3), torch.tensor([1.0, float("inf")])])
    def test_what_is_no_number_or_of_another_shape_fails(self, parity, bad):
        assert [row.passed for row in self.rows(parity, {"decoder.layers.0.b": bad})] == [False, False]

    def test_a_tensor_that_only_one_side_has_fails(self, parity):
        assert [row.passed for row in self.rows(parity, {"decoder.layers.1.b": torch.ones(2)})] == [False, False]

    def test_tensors_without_a_gradient(self, parity):
        zero = torch.zeros(2)
        assert parity.distance(zero, zero) == 0
        assert parity.distance(zero + 1e-30, zero) == float("inf")

    def test_layers_come_apart_in_the_order_of_the_model(self, parity):
        tensors = {
            "output_layer.weight": torch.ones(1),
            "decoder.layers.10.mlp.router.weight": torch.ones(1),
            "decoder.layers.10.self_attention.linear_qkv.weight": torch.ones(1),
            "decoder.layers.mlp.linear_fc1.weight": torch.arange(2),
            "decoder.final_layernorm.weight": torch.ones(1),
            "embedding.word_embeddings.weight": torch.ones(1),
        }
        apart = parity.by_layer(tensors)
        assert list(apart) == [
            "embedding.word_embeddings.weight",
            "decoder.layers.0.mlp.linear_fc1.weight",
            "decoder.layers.1.mlp.linear_fc1.weight",
            "decoder.layers.10.self_attention.linear_qkv.weight",
            "decoder.layers.10.mlp.router.weight",
            "decoder.final_layernorm.weight",
            "output_layer.weight",
        ]
        assert apart["decoder.layers.1.mlp.linear_fc1.weight"] == 1

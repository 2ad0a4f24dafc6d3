"""Layout changes nothing for a model with a scalar head either: values, gradients and updates equal one process's."""

from pathlib import Path

import pytest
import torch
from parity_cases import expert_layers, model_of, one_process
from parity_runs import LIMITS, distances, farthest, largest, relative
from ranks import run_ranks

JOB = Path(__file__).with_name("scalar_job.py")
CASES = {
    1: "dense:small moe:recompute",
    2: "tied:tp2 dense:tp2sp mla:tp2sp mtp:pp2small moe:ep2 mla:cp2 dense:cp2zero deepseek:vpp2recompute",
    4: "moe:tp2pp2 deepseek:tp2vpp2 dense:cp2tp2",
}
COMPARED = [case for cases in CASES.values() for case in cases.split()]
EXACT = LIMITS["fp32"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("scalar")
    ones = sorted({one_process(case) for case in COMPARED})
    for size, cases in CASES.items():
        run_ranks(JOB, size, [str(out), *(ones if size == 1 else []), *cases.split()])
    return {case: torch.load(out / f"{case}.pt") for case in [*ones, *COMPARED]}


@pytest.mark.parametrize("case", COMPARED)
class TestAsOnOneProcess:
    def test_values(self, found, case):
        mine, one = found[case], found[one_process(case)]
        assert mine["values"].dtype is torch.float32
        assert farthest(mine["values"], one["values"]) <= EXACT["log-probs"]
        assert farthest(mine["trained"], one["values"] * one["mask"]) <= EXACT["log-probs, scoring and update"]

    def test_loss_and_the_gradient_of_every_parameter(self, found, case):
        mine, one = found[case], found[one_process(case)]
        off = {name: relative(mine["metrics"][name], value) for name, value in one["metrics"].items()}
        assert largest(off)[0] <= EXACT["loss and metrics"], off
        together, each = distances(mine["gradients"], one["gradients"])
        assert together <= EXACT["gradients"]
        assert largest(each)[0] <= EXACT["worst gradient"], largest(each)
        assert max(map(relative, mine["norms"], one["norms"])) <= EXACT["gradient norms"]

    def test_updates(self, found, case):
        mine, one = found[case], found[one_process(case)]
        together, each = distances(mine["updates"], one["updates"])
        assert together <= EXACT["updates"]
        assert largest(each)[0] <= EXACT["worst update"], largest(each)
        assert farthest(mine["after"], one["after"]) <= EXACT["log-probs after the updates"]

    def test_what_is_built(self, found, case):
        """One head of one row, no output layer and no prediction module; every expert layer counts every token."""
        mine, model = found[case], model_of(case)
        assert mine["parameters"] == found[one_process(case)]["parameters"]
        assert mine["gradients"]["scalar_head.weight"].shape == (1, model.hidden)
        assert not any(key.startswith(("output_layer.", "mtp.")) for key in mine["gradients"])
        layers = expert_layers(model) - (model.mtp_layers if model.moe.experts else 0)
        assert list(mine["loads"].values()) == [2 * len(mine["values"])] * layers


@pytest.mark.parametrize("case", sorted({one_process(case) for case in COMPARED}))
def test_what_is_compared_has_something_to_show(found, case):
    one = found[case]
    assert all(gradient.any() for gradient in one["gradients"].values())
    assert all(one["updates"][key].any() for key in one["gradients"])
    assert one["values"].std() > 0.05
    assert (one["after"] - one["values"]).abs().mean() > 0.01

"""Layout changes nothing for a model with a scalar head either: values, gradients and updates equal one process's."""

from pathlib import Path

import pytest
import torch
from parity_cases import expert_layers, model_of, one_process
from parity_runs import LIMITS, assert_close, farthest, found_by, largest, relative

JOB = Path(__file__).with_name("scalar_job.py")
CASES = {
    1: "dense:small moe:recompute",
    2: "tied:tp2 dense:tp2sp mla:tp2sp mtp:pp2small moe:ep2 mla:cp2 dense:cp2zero deepseek:vpp2recompute tied:dp2zero",
    4: "moe:tp2pp2 deepseek:tp2vpp2 dense:cp2tp2",
}
SIZES = {case: size for size, cases in CASES.items() for case in cases.split()}
CORE = [
    "dense:small",
    "tied:tp2",
    "mtp:pp2small",
    "moe:ep2",
    "dense:cp2zero",
    "moe:tp2pp2",
]
"""Cases of `make test`."""
COMPARED = [pytest.param(case, marks=() if case in CORE else pytest.mark.long) for case in SIZES]
ONE_PROCESS = sorted({one_process(case) for case in CORE})
EXACT = LIMITS["fp32"]


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """What the selected tests are about, and no other case."""
    return found_by(JOB, SIZES, request, tmp_path_factory.mktemp("scalar"))


@pytest.mark.parametrize("case", COMPARED)
class TestAsOnOneProcess:
    def test_values(self, found, case):
        mine, one = found[case], found[one_process(case)]
        assert mine["values"].dtype is torch.float32
        assert farthest(mine["values"], one["values"]) <= EXACT["log-probs"]
        assert farthest(mine["trained"], one["values"] * one["mask"]) <= EXACT["log-probs, scoring and update"]
        assert farthest(mine["frozen"], one["values"]) <= EXACT["log-probs"]

    def test_loss_and_the_gradient_of_every_parameter(self, found, case):
        mine, one = found[case], found[one_process(case)]
        off = {name: relative(mine["metrics"][name], value) for name, value in one["metrics"].items()}
        assert largest(off)[0] <= EXACT["loss and metrics"], off
        assert_close(mine, one, "gradients")
        assert max(map(relative, mine["norms"], one["norms"])) <= EXACT["gradient norms"]

    def test_updates(self, found, case):
        mine, one = found[case], found[one_process(case)]
        assert_close(mine, one, "updates")
        assert farthest(mine["after"], one["after"]) <= EXACT["log-probs after the updates"]

    def test_what_is_built(self, found, case):
        """One head of one row, no output layer and no prediction module; every expert layer counts every token."""
        mine, model = found[case], model_of(case)
        assert mine["parameters"] == found[one_process(case)]["parameters"]
        assert mine["gradients"]["scalar_head.weight"].shape == (1, model.hidden)
        assert not any(key.startswith(("output_layer.", "mtp.")) for key in mine["gradients"])
        layers = expert_layers(model) - (model.mtp_layers if model.moe.experts else 0)
        assert list(mine["loads"].values()) == [2 * len(mine["values"])] * layers


@pytest.mark.parametrize("case", ONE_PROCESS)
def test_what_is_compared_has_something_to_show(found, case):
    one = found[case]
    assert all(gradient.any() for gradient in one["gradients"].values())
    assert all(one["updates"][key].any() for key in one["gradients"])
    assert one["values"].std() > 0.05
    assert (one["after"] - one["values"]).abs().mean() > 0.01

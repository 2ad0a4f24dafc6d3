"""Layout changes nothing for a reward model that learns pairs: scores, gradients and updates equal one process's."""

from pathlib import Path
from statistics import fmean, pstdev

import pytest
import torch
from parity_cases import one_process
from parity_runs import LIMITS, assert_close, farthest, found_by, largest, relative

JOB = Path(__file__).with_name("preference_job.py")
CASES = {
    1: "dense:small",
    2: "dense:tp2sp dense:cp2zero moe:ep2 tied:pp2 mtp:pp2small mla:cp2 tied:dp2zero",
    4: "moe:tp2pp2 deepseek:tp2vpp2",
}
SIZES = {case: size for size, cases in CASES.items() for case in cases.split()}
CORE = ["dense:small", "tied:dp2zero", "moe:ep2"]
"""Cases of `make test`."""
COMPARED = [pytest.param(case, marks=() if case in CORE else pytest.mark.long) for case in SIZES]
ONE_PROCESS = sorted({one_process(case) for case in CORE})
EXACT = LIMITS["fp32"]


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """What the selected tests are about, and no other case."""
    return found_by(JOB, SIZES, request, tmp_path_factory.mktemp("preference"))


@pytest.mark.parametrize("case", COMPARED)
class TestAsOnOneProcess:
    def test_scores(self, found, case):
        mine, one = found[case], found[one_process(case)]
        assert farthest(mine["scores"], one["scores"]) <= EXACT["log-probs"]
        assert farthest(mine["in parts"], one["scores"]) <= EXACT["log-probs"]

    def test_loss_and_the_gradient_of_every_parameter(self, found, case):
        mine, one = found[case], found[one_process(case)]
        off = {name: relative(mine["metrics"][name], value) for name, value in one["metrics"].items()}
        assert off.pop("margin") * 0.05 <= EXACT["log-probs"], "a difference of scores is as far off as these"
        assert largest(off)[0] <= EXACT["loss and metrics"], off
        assert_close(mine, one, "gradients")
        assert max(map(relative, mine["norms"], one["norms"])) <= EXACT["gradient norms"]

    def test_updates(self, found, case):
        mine, one = found[case], found[one_process(case)]
        assert_close(mine, one, "updates")
        off = {name: relative(mine["after"][name], value) for name, value in one["after"].items()}
        assert off.pop("margin") * 0.05 <= EXACT["log-probs after the updates"]
        assert largest(off)[0] <= 10 * EXACT["loss and metrics"], off
        scores = mine["scores after"].flatten().tolist()
        scale = {"mean": fmean(scores), "std": pstdev(scores)}
        for name, number in scale.items():
            assert relative(mine["scale"][name], number) <= 10 * EXACT["loss and metrics"]
        assert relative(mine["scale"]["std"], one["scale"]["std"]) <= 10 * EXACT["loss and metrics"]


@pytest.mark.parametrize("case", ONE_PROCESS)
def test_the_gradient_is_that_of_the_loss_of_each_pair_alone(found, case):
    """Responses computed one by one, each with the derivative of its own pair's term of the loss."""
    one = found[case]
    assert_close(one, {"gradients": one["expected"]}, "gradients")


@pytest.mark.parametrize("case", ONE_PROCESS)
def test_what_a_pair_shares_leaves_each_response_the_token_that_is_scored(found, case):
    """Even where one response goes on after the other's end."""
    shared, lengths = found[case]["shared"], found[case]["lengths"]
    assert torch.equal(shared[:, 0], shared[:, 1])
    left = (lengths - shared).amin(dim=1)
    assert left.min() == 1
    assert left.max() > 1


@pytest.mark.parametrize("case", ONE_PROCESS)
def test_what_is_compared_has_something_to_show(found, case):
    one = found[case]
    assert all(gradient.any() for gradient in one["gradients"].values())
    chosen, rejected = one["scores"]
    assert 0 < (chosen > rejected).double().mean() < 1
    assert (chosen - rejected).abs().min() > 0.001
    assert one["after"]["loss"] < one["metrics"]["loss"]

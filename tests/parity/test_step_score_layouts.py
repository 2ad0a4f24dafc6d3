"""Layout changes nothing for a process reward model: scores, gradients and updates equal one process's."""

from pathlib import Path

import pytest
from parity_cases import one_process
from parity_runs import LIMITS, assert_close, farthest, found_by, largest, relative

JOB = Path(__file__).with_name("step_scores_job.py")
CASES = {
    1: "dense:small",
    2: "dense:tp2sp dense:cp2zero moe:ep2 tied:pp2 mtp:pp2small mla:cp2 tied:dp2zero",
    4: "moe:tp2pp2 deepseek:tp2vpp2",
}
SIZES = {case: size for size, cases in CASES.items() for case in cases.split()}
CORE = ["dense:small", "tied:dp2zero"]
"""Cases of `make test`."""
COMPARED = [pytest.param(case, marks=() if case in CORE else pytest.mark.long) for case in SIZES]
ONE_PROCESS = sorted({one_process(case) for case in CORE})
EXACT = LIMITS["fp32"]


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """What the selected tests are about, and no other case."""
    return found_by(JOB, SIZES, request, tmp_path_factory.mktemp("steps"))


@pytest.mark.parametrize("case", COMPARED)
class TestAsOnOneProcess:
    def test_scores(self, found, case):
        mine, one = found[case], found[one_process(case)]
        assert farthest(mine["scores"], one["scores"]) <= EXACT["log-probs"]
        assert farthest(mine["in parts"], one["scores"]) <= EXACT["log-probs"]

    def test_loss_and_the_gradient_of_every_parameter(self, found, case):
        mine, one = found[case], found[one_process(case)]
        off = {name: relative(mine["metrics"][name], value) for name, value in one["metrics"].items()}
        assert largest(off)[0] <= EXACT["loss and metrics"], off
        assert_close(mine, one, "gradients")
        assert max(map(relative, mine["norms"], one["norms"])) <= EXACT["gradient norms"]

    def test_updates(self, found, case):
        mine, one = found[case], found[one_process(case)]
        assert_close(mine, one, "updates")
        off = {name: relative(mine["after"][name], value) for name, value in one["after"].items()}
        assert largest(off)[0] <= 10 * EXACT["loss and metrics"], off


@pytest.mark.parametrize("case", ONE_PROCESS)
def test_the_gradient_is_that_of_the_loss_of_each_answer_alone(found, case):
    one = found[case]
    assert_close(one, {"gradients": one["expected"]}, "gradients")


@pytest.mark.parametrize("case", ONE_PROCESS)
def test_what_is_learned_is_what_is_measured(found, case):
    """The metrics of an update and those of held-out completions, computed in another way, agree; and updates help."""
    one = found[case]
    for name in ("loss", "accuracy"):
        assert relative(one["metrics"][name], one["said"][name]) <= EXACT["loss and metrics"]
    assert one["after"]["loss"] < one["said"]["loss"]
    assert all(gradient.any() for gradient in one["gradients"].values())

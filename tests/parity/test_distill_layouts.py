"""Layout changes nothing for on-policy distillation, nor for supervised steps: the teacher's log-probs and updates are
those of one process."""

from pathlib import Path

import pytest
from parity_cases import one_process
from parity_runs import LIMITS, assert_close, distances, farthest, found_by, largest, relative

JOB = Path(__file__).with_name("distill_job.py")
CASES = {
    1: "dense:small",
    2: "dense:tp2sp dense:pp2small dense:dp2zero dense:cp2zero dense:ep2 moe:ep2 moe:tp2sp tied:cp2small tied:pp2",
    4: "moe:tp2pp2 deepseek:tp2vpp2",
}
SIZES = {case: size for size, cases in CASES.items() for case in cases.split()}
CORE = ["dense:small", "dense:pp2small", "dense:ep2"]
"""Cases of `make test`."""
COMPARED = [pytest.param(case, marks=() if case in CORE else pytest.mark.long) for case in SIZES]
EXACT = LIMITS["fp32"]


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """What the selected tests are about, and no other case."""
    return found_by(JOB, SIZES, request, tmp_path_factory.mktemp("distill"))


@pytest.mark.parametrize("case", COMPARED)
def test_the_teacher_and_two_updates_are_those_of_one_process(found, case):
    mine, one = found[case], found[one_process(case)]
    for name in ("teacher", "advantage", "rewarded"):
        assert farthest(mine[name], one[name]) <= EXACT["log-probs"], name
    assert mine["kl"] == pytest.approx(one["kl"], abs=EXACT["log-probs"])
    for own, others in zip(mine["metrics"], one["metrics"], strict=True):
        off = {name: relative(own[name], value) for name, value in others.items()}
        assert largest(off)[0] <= 10 * EXACT["loss and metrics"], off
    for quantity in ("gradients", "updates"):
        assert_close(mine, one, quantity)
    assert mine["still"], "nothing moves the teacher"


@pytest.mark.parametrize("case", COMPARED)
def test_a_policy_that_is_its_teacher_has_nothing_to_learn(found, case):
    """But for rounding: the same weights lie elsewhere in memory, which decides how sums are cut."""
    own, other = found[case]["own"], found[case]
    assert own["kl"]["distill/reverse_kl"] == pytest.approx(0, abs=1e-6)
    assert own["kl"]["distill/teacher_logprob"] < -1
    assert own["gradient"] < 1e-4 * other["metrics"][1]["grad_norm"]


@pytest.mark.parametrize("case", COMPARED)
def test_a_supervised_update_is_that_of_one_process(found, case):
    """Its loss is the mean over all learned tokens, of which replicas have different numbers."""
    mine, one = found[case], found[one_process(case)]
    assert mine["supervised"]["loss"] == pytest.approx(mine["supervised loss"], rel=1e-5)
    off = {name: relative(mine["supervised"][name], value) for name, value in one["supervised"].items()}
    assert largest(off)[0] <= 10 * EXACT["loss and metrics"], off
    together, each = distances(mine["supervised updates"], one["supervised updates"])
    assert together <= EXACT["updates"]
    assert largest(each)[0] <= EXACT["worst update"], largest(each)


@pytest.mark.parametrize("case", [case for case in CORE if "ep2" in case])
def test_replicas_have_unequal_shares(found, case):
    """Equal ones would hide a mean over replicas where one over tokens or sequences is meant."""
    (sequences, tokens), (other_sequences, other_tokens) = found[case]["shares"]
    assert sequences != other_sequences
    assert tokens != other_tokens
    ((learned,), (other_learned,)) = found[case]["supervised shares"]
    assert max(learned, other_learned) > 1.5 * min(learned, other_learned)


@pytest.mark.parametrize("case", sorted({one_process(case) for case in CORE}))
def test_what_is_compared_has_something_to_show(found, case):
    """Advantages of both signs that differ within a completion, none outside, and rewards that change them."""
    seen = found[case]
    mask, advantage = seen["mask"], seen["advantage"]
    assert not advantage[~mask].any()
    assert advantage[mask].min() < -0.1 < 0.1 < advantage[mask].max()
    assert seen["kl"]["distill/reverse_kl"] != 0
    assert (seen["rewarded"] - 2 * advantage)[mask].abs().max() > 0.1
    assert seen["metrics"][1]["grad_norm"] > 0.01

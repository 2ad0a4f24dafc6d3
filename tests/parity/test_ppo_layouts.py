"""Layout changes nothing for PPO's critic: values, advantages, returns and updates equal one process's."""

from pathlib import Path

import pytest
from parity_cases import one_process
from parity_runs import LIMITS, distances, farthest, found_by, largest, relative

JOB = Path(__file__).with_name("ppo_job.py")
CASES = {
    1: "dense:small",
    2: "dense:tp2sp dense:cp2zero dense:dp2 moe:ep2 tied:pp2 mtp:pp2small mla:cp2 tied:dp2zero",
    4: "moe:tp2pp2 deepseek:tp2vpp2",
}
SIZES = {case: size for size, cases in CASES.items() for case in cases.split()}
CORE = ["dense:small", "dense:tp2sp", "dense:cp2zero", "dense:dp2"]
"""Cases of `make test`."""
COMPARED = [pytest.param(case, marks=() if case in CORE else pytest.mark.long) for case in SIZES]
EXACT = LIMITS["fp32"]


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """What the selected tests are about, and no other case."""
    return found_by(JOB, SIZES, request, tmp_path_factory.mktemp("ppo"))


@pytest.mark.parametrize("case", COMPARED)
def test_values_advantages_and_updates_are_those_of_one_process(found, case):
    mine, one = found[case], found[one_process(case)]
    for ours, theirs in zip(mine["steps"], one["steps"], strict=True):
        for name in ("value", "advantage", "returns"):
            assert farthest(ours[name], theirs[name]) <= EXACT["log-probs after the updates"], name
        assert ours["explained"] == pytest.approx(theirs["explained"], rel=1e-4)
        for own, others in zip(ours["metrics"], theirs["metrics"], strict=True):
            off = {name: relative(own[name], value) for name, value in others.items()}
            assert largest(off)[0] <= 10 * EXACT["loss and metrics"], off
    together, each = distances(mine["weights"], one["weights"])
    assert together <= EXACT["updates"]
    assert largest(each)[0] <= EXACT["worst update"], largest(each)


@pytest.mark.parametrize("case", ["dense:dp2"])
def test_replicas_have_unequal_shares(found, case):
    """Equal ones would hide what is whitened, or averaged, by each replica alone."""
    (sequences, tokens), (other_sequences, other_tokens) = found[case]["shares"]
    assert sequences != other_sequences
    assert tokens != other_tokens


@pytest.mark.parametrize("case", sorted({one_process(case) for case in CORE}))
def test_what_is_compared_has_something_to_show(found, case):
    """First values of 0, then others; whitened advantages; some values clipped, some not; nothing outside the mask."""
    first, second = found[case]["steps"]
    mask = found[case]["mask"]
    assert not first["value"].any()
    assert second["value"][mask].std() > 0.01
    for step in (first, second):
        assert not step["advantage"][~mask].any()
        assert float(step["advantage"][mask].mean()) == pytest.approx(0, abs=1e-5)
        assert float(step["advantage"][mask].std()) == pytest.approx(1, abs=1e-4)
        clipped = step["moved"][mask].abs() > 0.02
        assert clipped.any()
        assert not clipped.all()
    assert first["explained"][0] == 0 < second["explained"][0]

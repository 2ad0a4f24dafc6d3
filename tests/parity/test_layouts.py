"""Layout changes nothing: samples, log-probs, loss, gradients and updates of a GRPO step equal those of one process."""

import re

import pytest
from parity_cases import COMPARED, CORE, LONG, expert_layers, model_of, one_process
from parity_runs import differences, limits, run_cases
from ranks import REPOSITORY

CORE_PROCESS = {one_process(case) for case in CORE}
ONE_PROCESS = sorted({one_process(case) for case in COMPARED})


def marked(case, *values):
    """A parameter set; it is left out of `make test` unless the case is one of its core."""
    return pytest.param(case, *values, marks=() if case in CORE or case in CORE_PROCESS else pytest.mark.long)


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """What the selected tests are about, and no other case."""
    here = [item for item in request.session.items if item.path == request.path and "found" in item.fixturenames]
    return run_cases([item.callspec.params["case"] for item in here], tmp_path_factory.mktemp("steps"))


@pytest.mark.parametrize(
    ("case", "quantity"), [marked(case, quantity) for case in COMPARED for quantity in limits(case)]
)
def test_as_on_one_process(found, case, quantity):
    off, where = differences(found[case], found[one_process(case)])[quantity]
    assert off <= limits(case)[quantity], where


@pytest.mark.parametrize("case", [marked(case) for case in ONE_PROCESS if expert_layers(model_of(case))])
def test_every_token_of_every_sequence_counts_for_its_experts_and_nothing_else_does(found, case):
    loads = found[case]["expert_loads"].values()
    chosen = model_of(case).moe.top_k * found[case]["tokens"]
    assert [sum(load) for load in loads] == [chosen] * expert_layers(model_of(case))


@pytest.mark.parametrize("case", [marked(case) for case in ONE_PROCESS])
def test_what_is_compared_has_something_to_show(found, case):
    """Ratios clip on both sides, every parameter has a gradient and moves, completions are long and of many lengths."""
    one = found[case]
    if "vespo" in case:  # it has no bounds
        assert abs(one["metrics"]["ratio"] - 1) > 0.1, one["metrics"]
    else:
        assert all(0.02 < one["metrics"][name] < 0.6 for name in ("clip_low", "clip_high")), one["metrics"]
    assert all(gradient.any() for gradient in one["gradients"].values())
    if model_of(case).dtype == "fp32":
        assert all(one["updates"][key].any() for key in one["gradients"])
        assert len({len(tokens) for tokens in one["samples"]}) > 5
        assert max(map(len, one["samples"])) == 24


def test_long_completions_are_among_what_is_compared():
    assert {*LONG, *CORE} <= set(COMPARED)


def test_documents_say_how_many_cases_there_are():
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]
    number = re.compile(r"(\d+)\s+(?:combinations\s+of\s+model\s+and\s+layout|cases \()")
    told = {count for page in pages for count in number.findall(page.read_text())}
    assert told == {str(len(COMPARED))}

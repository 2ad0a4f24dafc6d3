"""Bugs that are planted on purpose are noticed: what tests/parity/test_layouts.py compares is enough to see them."""

import pytest
from mutations import MUTATIONS
from parity_runs import excesses, run_cases

pytestmark = pytest.mark.long
PLANTED = [f"{name}@{case}" for name, mutation in MUTATIONS.items() for case in mutation.cases]


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """Every selected case with its bug, and then without."""
    planted = [item.callspec.params["planted"] for item in request.session.items if item.path == request.path]
    cases = [name.partition("@")[2] for name in planted]
    return run_cases([*planted, *cases], tmp_path_factory.mktemp("planted"))


@pytest.mark.parametrize("planted", PLANTED)
def test_planted_bug_is_noticed(found, planted):
    assert excesses(found, planted)
    assert not excesses(found, planted.partition("@")[2])

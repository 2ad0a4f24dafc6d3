"""What the planner says adapters add to a rank's memory is what a rank on a CPU holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import results, run_ranks

MODELS = ("dense", "attention", "experts", "shared", "latent", "latent_direct")


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.long)], ids=["one", "tp2"])
def ranks(request: pytest.FixtureRequest) -> int:
    """Tensor parallel ones, with sequence parallelism."""
    return request.param


@pytest.fixture(scope="module")
def found(ranks: int) -> dict[str, Any]:
    return results(run_ranks(Path(__file__).with_name("adapted_memory_job.py"), ranks, []))


def test_activations_that_wait_for_their_backward_pass(found: dict[str, Any], ranks: int) -> None:
    """Of each token and each row of A, to the byte."""
    for name in MODELS:
        if name.startswith("latent") and ranks > 1:  # whose small projections are whole on every rank of GPUs alone
            continue
        of_model = found[name]["activations"]
        assert of_model["measured"] == pytest.approx(of_model["planned"]), name


def test_weights_with_adapters_in_them_on_their_way(found: dict[str, Any], ranks: int) -> None:
    """At most what is planned, which holds for any bucket; on one rank not much less."""
    for name in MODELS:
        of_model = found[name]["merged"]
        assert of_model["measured"] <= of_model["planned"], name
        assert ranks > 1 or of_model["measured"] >= 0.25 * of_model["planned"], name

"""A run that is continued under other layouts stays within the parity tolerance of one that never moved."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from ranks import results, run_ranks
from train_jobs import Job, differing, numbers, samples

pytestmark = pytest.mark.long

JOB = Path(__file__).with_name("layout_change_job.py")
OPTIMIZERS = ("plain", "distributed", "parts", "adapters")
ROUNDED = ("bf16", "lean")
"""Optimizers whose runs stay together only until the first rounding that differs."""
TOLERANCE = 5e-6
"""Relative L2 distance of any one tensor: that of a single parameter's gradient in tests/parity."""


@pytest.fixture(scope="module")
def distances(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """Two steps each on TP2 x PP2, EP2 x DP2, one rank, and TP2 x PP2 again; and eight steps on one rank.

    Another story leaves behind step 2 for interleaved stages and context parallelism, and comes back to TP2 x PP2.
    """
    folder = str(tmp_path_factory.mktemp("layouts"))
    every = (*OPTIMIZERS, *ROUNDED)
    run_ranks(JOB, 4, [folder, *(f"moved:{leg}:{o}" for o in every for leg in ("0:2:tp2pp2", "2:4:ep2dp2"))])
    stayed = [f"stayed:0:8:single:{o}" for o in OPTIMIZERS]
    run_ranks(JOB, 1, [folder, *(f"moved:4:6:single:{o}" for o in every), *stayed])
    pairs = [f"moved-{step}-{o}=moved-{step}-{o}-again" for step in (2, 4, 6) for o in every]
    pairs += [f"stayed-{step}-{o}=moved-{step}-{o}" for step in (2, 4, 6, 8) for o in OPTIMIZERS]
    for o in OPTIMIZERS:
        shutil.copytree(f"{folder}/moved-2-{o}", f"{folder}/wound-2-{o}")
    pairs += [f"wound-{step}-{o}=wound-{step}-{o}-again" for step in (2, 4, 6) for o in OPTIMIZERS]
    pairs += [f"stayed-{step}-{o}=wound-{step}-{o}" for step in (4, 6, 8) for o in OPTIMIZERS]
    back = [f"moved:6:8:tp2pp2:{o}" for o in every]
    back += [f"wound:{leg}:{o}" for leg in ("2:4:vpp2", "4:6:cp2", "6:8:tp2pp2") for o in OPTIMIZERS]
    return results(run_ranks(JOB, 4, [folder, *back, f"compare:{','.join(pairs)}"]))


@pytest.mark.parametrize(
    ("story", "optimizer"), [*(("moved", o) for o in (*OPTIMIZERS, *ROUNDED)), *(("wound", o) for o in OPTIMIZERS)]
)
@pytest.mark.parametrize("step", [2, 4, 6])
def test_weights_and_moments_are_loaded_bit_for_bit(distances, story, optimizer, step):
    found = distances[f"{story}-{step}-{optimizer}={story}-{step}-{optimizer}-again"]
    assert any("exp_avg_sq" in name and "experts" in name for name in found)
    assert set(found.values()) == {0.0}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("story", "step"), [*(("moved", step) for step in (2, 4, 6, 8)), *(("wound", step) for step in (4, 6, 8))]
)
def test_every_tensor_stays_with_the_run_that_never_moved(distances, story, optimizer, step):
    found = distances[f"stayed-{step}-{optimizer}={story}-{step}-{optimizer}"]
    assert any("exp_avg." in name for name in found)
    assert {name: distance for name, distance in found.items() if distance > TOLERANCE} == {}


@pytest.fixture(scope="module")
def continued(finished) -> dict[str, Path]:
    """The run of two ranks, continued from its third step on two and on one."""
    paths = {}
    for name, ranks in (("ep2", 2), ("single", 0)):
        paths[name] = finished.path.with_name(f"continued-{name}")
        shutil.copytree(finished.path, paths[name])
        # The copy is another run by name only.
        identity = paths[name] / "run.json"
        identity.write_text(identity.read_text().replace('"first"', f'"{paths[name].name}"'))
        overrides = [*finished.overrides, f"layout={name}", f"run.name={paths[name].name}", "run.steps=5"]
        ended = Job(finished.root, overrides, ranks=ranks).finish()
        assert ended.code == 0, ended
        assert "continuing after step 3" in ended.stderr
    return paths


def test_a_run_directory_is_continued_by_another_number_of_processes(continued):
    there, here = numbers(continued["ep2"]), numbers(continued["single"])
    assert [line["step"] for line in here] == [1, 2, 3, 4, 5]
    assert here[:3] == there[:3]
    for a, b in zip(here[3:], there[3:], strict=True):
        assert b["policy/grad_norm"] > 0
        # Differences at rounding level are known here in absolute terms only: a loss may be 0.
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
    assert differing(*(samples(path) for path in continued.values()), by=1e-4) == {}

"""Two steps at once are one step, an end, and one more, bit for bit, on TP2 x PP2 with sequence parallelism.

The model has a prediction module: its copy of the embedding on the last stage and its moments come back too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from metric_lines import held_out
from train_jobs import SMALL, Job, contents, numbers, rewarded_by, saved, without_seconds

pytestmark = pytest.mark.long

OVERRIDES = [
    *SMALL,
    "layout=tp2_pp2",
    "model.mtp_layers=1",
    rewarded_by("varied"),
    "algorithm.kl_coef=0.05",
    "algorithm.mini_batches=2",
    "optimizer.warmup_steps=3",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The run at once, and the one in two parts."""
    root = tmp_path_factory.mktemp("two-parts")
    for name, steps in (("at-once", 2), ("in-parts", 1), ("in-parts", 2)):
        ended = Job(root, [*OVERRIDES, f"run.name={name}", f"run.steps={steps}"], ranks=4).finish()
        assert ended.code == 0, ended
    assert "continuing after step 1" in ended.stderr
    return root / "runs" / "at-once", root / "runs" / "in-parts"


def test_checkpoints_are_the_same_in_every_bit(runs):
    expected, found = (saved(path / "checkpoints" / "step-000002") for path in runs)
    assert {"weights", "reference", "random", "state"} <= {name.split("/")[0] for name in expected}
    assert found == expected


def test_metrics_samples_and_summary_are_the_same(runs):
    expected, found = (numbers(path) for path in runs)
    assert all(line["policy/grad_norm"] > 0 and line["policy/mtp_loss"] > 0 for line in expected)
    assert found == expected
    assert [line["step"] for line in held_out(runs[1])] == [0, 2], "the end of the first part is none"
    assert held_out(runs[1]) == held_out(runs[0])
    assert contents(runs[1] / "samples") == contents(runs[0] / "samples")
    assert without_seconds(runs[1] / "summary.json") == without_seconds(runs[0] / "summary.json")

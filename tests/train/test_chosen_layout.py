"""Jobs under torchrun that name no layout choose one, say which, write it down, and continue with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from metric_lines import of_steps
from train_jobs import SMALL, Job

RUN = [*SMALL, "layout=auto", "run.eval_every=0", "run.save_every=1"]


def layout_of(root: Path) -> dict[str, Any]:
    return yaml.safe_load((root / "runs" / "tiny" / "config.yaml").read_text())["layout"]


def ended(root: Path, ranks: int, *words: str, code: int = 0) -> str:
    done = Job(root, [*RUN, *words], ranks, cold=code != 0).finish()  # torchrun ends the ranks that wait for another
    assert done.code == code, done.stderr
    return done.stdout + done.stderr


@pytest.mark.long
def test_a_job_chooses_for_its_processes_and_goes_on_with_it(tmp_path: Path) -> None:
    said = ended(tmp_path, 2, "run.steps=1")
    assert (
        said.count("layout=auto: dp 2 x ep 2, the simplest on CPUs; choose another with layout=NAME or layout.*") == 1
    )
    first = layout_of(tmp_path)
    assert (first["auto"], first["chosen_for"], first["tp"], first["ep"]) == (False, 2, 1, 2)
    said = ended(tmp_path, 2, "run.steps=2")
    assert said.count("layout=auto: dp 2 x ep 2, as the run has begun") == 1
    assert layout_of(tmp_path) == first
    said = ended(tmp_path, 1, "run.steps=3")
    assert "layout=auto: one rank, the simplest on CPUs" in said
    assert layout_of(tmp_path) == first | {"chosen_for": 1, "ep": 1}
    assert [step["step"] for step in of_steps(tmp_path / "runs" / "tiny")] == [1, 2, 3]


@pytest.mark.long
def test_processes_that_prompts_cannot_be_shared_by_share_the_layers(tmp_path: Path) -> None:
    said = ended(tmp_path, 4, "run.steps=1", "model=tiny_dense", "algorithm.prompts_per_step=2")
    assert "layout=auto: dp 2 x tp 2, the simplest on CPUs" in said
    assert layout_of(tmp_path)["sp"]


@pytest.mark.long
def test_processes_that_no_layout_divides_are_refused_before_the_run_has_a_name(tmp_path: Path) -> None:
    said = ended(tmp_path, 3, "run.steps=1", code=1)
    # By one rank, and by torchrun when it ends.
    assert said.count("algorithm.prompts_per_step=8: not divisible by the data parallel size 3") == 2
    assert "choose 6 or 9" in said
    assert not (tmp_path / "runs" / "tiny").exists()

"""Sample files: one per step, readable line by line whatever the text."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mega.observe.samples import write_samples


@settings(max_examples=25, deadline=None)
@given(texts=st.lists(st.text(), max_size=4))
def test_any_text_survives_one_record_a_line(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    run = tmp_path_factory.mktemp("run")
    records = [{"completion": text + "\ud800\u2028\n", "reward": 1.2} for text in texts]
    path = write_samples(run, 10, records)
    assert path == run / "samples" / "step-000010.jsonl"
    assert [json.loads(line) for line in path.read_text().splitlines()] == records


def test_a_step_that_runs_again_replaces_its_file(tmp_path: Path) -> None:
    write_samples(tmp_path, 3, [{"reward": 0.0}, {"reward": 1.0}])
    path = write_samples(tmp_path, 3, [{"reward": 0.5}])
    assert path.read_text() == '{"reward": 0.5}\n'
    assert [file.name for file in path.parent.iterdir()] == ["step-000003.jsonl"]


@pytest.mark.parametrize("value", [math.nan, object()])
def test_what_json_cannot_hold_is_named_and_nothing_is_written(tmp_path: Path, value: object) -> None:
    with pytest.raises(ValueError, match="sample 1 of step 4"):
        write_samples(tmp_path, 4, [{"reward": 1.0}, {"reward": value}])
    assert list((tmp_path / "samples").iterdir()) == []

"""Run directories: one experiment, one live process, clear refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mega.observe.run_dir import open_run_dir

IDENTITY = {"model.layers": 2, "optimizer.lr": 3e-4, "data.task": "chain_sum"}

HOLDER = """
import pathlib, sys
from grpo_mega.observe.run_dir import open_run_dir
open_run_dir(pathlib.Path(sys.argv[1]), "", identity={})
print("held", flush=True)
sys.stdin.read()
"""


def open_and_close(path: Path, identity: dict[str, Any], config: str = "run: {}\n") -> None:
    open_run_dir(path, config, identity=identity).close()


def test_a_new_run_gets_its_folders_and_config(tmp_path: Path) -> None:
    run = open_run_dir(tmp_path / "deep" / "tiny", "run: {name: tiny}\n", identity=IDENTITY)
    assert (run.path / "config.yaml").read_text() == "run: {name: tiny}\n"
    assert {entry.name for entry in run.path.iterdir() if entry.is_dir()} == {"samples", "checkpoints", "logs"}
    run.close()


def test_the_same_experiment_continues_with_its_new_config(tmp_path: Path) -> None:
    open_and_close(tmp_path / "tiny", IDENTITY, "steps: 10\n")
    (tmp_path / "tiny" / "metrics.jsonl").write_text('{"step": 1}\n')
    open_and_close(tmp_path / "tiny", IDENTITY, "steps: 20\n")
    assert (tmp_path / "tiny" / "config.yaml").read_text() == "steps: 20\n"
    assert (tmp_path / "tiny" / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_another_experiment_is_refused_with_every_differing_key(tmp_path: Path) -> None:
    open_and_close(tmp_path / "tiny", IDENTITY, "old\n")
    other = {"model.layers": 4, "optimizer.lr": 3e-4, "model.hidden": 64}
    with pytest.raises(ValueError, match="belongs to another experiment") as refused:
        open_run_dir(tmp_path / "tiny", "new\n", identity=other)
    lines = str(refused.value).splitlines()
    assert lines[1:4] == [
        '  data.task: "chain_sum" there, absent now',
        "  model.hidden: absent there, 64 now",
        "  model.layers: 2 there, 4 now",
    ]
    assert "choose another run.name or delete the directory" in lines[-1]
    assert "optimizer.lr" not in str(refused.value)
    assert (tmp_path / "tiny" / "config.yaml").read_text() == "old\n"


def test_a_refusal_does_not_keep_the_lock(tmp_path: Path) -> None:
    open_and_close(tmp_path / "tiny", IDENTITY)
    with pytest.raises(ValueError, match="another experiment"):
        open_run_dir(tmp_path / "tiny", "", identity={})
    open_and_close(tmp_path / "tiny", IDENTITY)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=25, deadline=None)
@given(identity=st.dictionaries(st.text(), json_values, max_size=4))
def test_any_identity_equals_itself_after_the_round_trip(
    tmp_path_factory: pytest.TempPathFactory, identity: dict[str, Any]
) -> None:
    path = tmp_path_factory.mktemp("runs") / "tiny"
    open_and_close(path, identity)
    open_and_close(path, identity)


def test_tuples_and_lists_are_the_same_value(tmp_path: Path) -> None:
    open_and_close(tmp_path / "tiny", {"stop": ("<eos>",)})
    open_and_close(tmp_path / "tiny", {"stop": ["<eos>"]})


def test_a_foreign_directory_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match=r"not a run directory .* thesis\.txt"):
        open_run_dir(tmp_path, "", identity=IDENTITY)
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tiny").write_text("")
    with pytest.raises(ValueError, match="is not a directory"):
        open_run_dir(tmp_path / "tiny", "", identity=IDENTITY)


def test_a_creation_that_was_cut_short_is_taken_up(tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_text("pid 1 on elsewhere\n")
    (tmp_path / ".run.json.tmp").write_text('{"model.lay')
    open_and_close(tmp_path, IDENTITY)
    assert json.loads((tmp_path / "run.json").read_text()) == IDENTITY


@pytest.mark.parametrize("damage", ["", "[1, 2]", '{"model.layers": '])
def test_a_damaged_identity_is_named(tmp_path: Path, damage: str) -> None:
    open_and_close(tmp_path, IDENTITY)
    (tmp_path / "run.json").write_text(damage)
    with pytest.raises(ValueError, match=r"run\.json .*delete the directory"):
        open_run_dir(tmp_path, "", identity=IDENTITY)


def test_a_directory_in_use_is_refused_until_its_process_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "tiny"
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=rf"in use by pid {holder.pid} on "):
            open_run_dir(path, "", identity={})
        holder.send_signal(signal.SIGKILL)
    open_and_close(path, {})

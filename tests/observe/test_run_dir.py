"""Run directories: one experiment, one live process, clear refusals."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mega.config.load import compose_config, identity, to_yaml
from grpo_mega.config.schema import Config
from grpo_mega.errors import InputError
from grpo_mega.observe.run_dir import check_run_dir, open_run_dir

IDENTITY = {"model.layers": 2, "optimizer.lr": 3e-4, "data.task": "chain_sum"}

HOLDER = """
import pathlib, sys
from grpo_mega.observe.run_dir import open_run_dir
open_run_dir(pathlib.Path(sys.argv[1]), "", identity={})
print("held", flush=True)
sys.stdin.read()
"""


def with_a_step(path: Path, identity: dict[str, Any], config: str = "run: {}\n") -> Path:
    """A run directory with a result."""
    open_and_close(path, identity, config)
    (path / "metrics.jsonl").write_text('{"step": 1}\n')
    return path


def open_and_close(path: Path, identity: dict[str, Any], config: str = "run: {}\n") -> None:
    open_run_dir(path, config, identity=identity).close()


def test_a_new_run_gets_its_folders_and_config(tmp_path: Path) -> None:
    words = ["experiment=tiny", "reward.terms=[{name: x}]"]
    run = open_run_dir(tmp_path / "deep" / "tiny", "run: {name: tiny}\n", identity=IDENTITY, words=words)
    assert json.loads((run.path / "words.json").read_text()) == words
    assert (run.path / "config.yaml").read_text() == "run: {name: tiny}\n"
    assert {entry.name for entry in run.path.iterdir() if entry.is_dir()} == {"samples", "checkpoints", "logs"}
    run.close()


def test_the_same_experiment_continues_with_its_new_config(tmp_path: Path) -> None:
    open_and_close(tmp_path / "tiny", IDENTITY, "steps: 10\n")
    (tmp_path / "tiny" / "metrics.jsonl").write_text('{"step": 1}\n')
    open_and_close(tmp_path / "tiny", IDENTITY, "steps: 20\n")
    assert (tmp_path / "tiny" / "config.yaml").read_text() == "steps: 20\n"
    assert (tmp_path / "tiny" / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_run_that_an_earlier_release_began_has_the_defaults_of_what_has_come_since(tmp_path: Path) -> None:
    wanted = IDENTITY | {"data.train_size": None, "optimizer.state.moments": "fp32"}
    with_a_step(tmp_path / "tiny", IDENTITY, "old\n")
    open_run_dir(tmp_path / "tiny", "new\n", identity=wanted)
    with_a_step(tmp_path / "other", IDENTITY, "old\n")
    with pytest.raises(InputError) as refused:
        open_run_dir(tmp_path / "other", "new\n", identity=wanted | {"optimizer.state.moments": "bf16"})
    assert refused.value.what.splitlines()[1:] == ['  optimizer.state.moments: "fp32" there, "bf16" now']


def test_another_experiment_is_refused_with_every_differing_key(tmp_path: Path) -> None:
    with_a_step(tmp_path / "tiny", IDENTITY, "old\n")
    other = {"model.layers": 4, "optimizer.lr": 3e-4, "model.hidden": 64}
    with pytest.raises(InputError) as refused:
        open_run_dir(tmp_path / "tiny", "new\n", identity=other)
    assert refused.value.where == str(tmp_path / "tiny")
    assert refused.value.what.splitlines()[1:] == [
        '  data.task: "chain_sum" there, absent now',
        "  model.hidden: absent there, 64 now",
        "  model.layers: 2 there, 4 now",
    ]
    assert "run.name=NEW run.fork=CHECKPOINT" in refused.value.fix
    assert (tmp_path / "tiny" / "config.yaml").read_text() == "old\n"


def test_a_refusal_does_not_keep_the_lock(tmp_path: Path) -> None:
    with_a_step(tmp_path / "tiny", IDENTITY)
    with pytest.raises(InputError, match="another experiment"):
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
    with pytest.raises(InputError) as refused:
        open_run_dir(tmp_path, "", identity=IDENTITY)
    assert refused.value.where == str(tmp_path)
    assert "thesis.txt" in refused.value.what
    assert os.listdir(tmp_path) == ["thesis.txt"]


@pytest.mark.parametrize("place", ["below_a_file", "proc", "name"])
def test_a_place_where_nothing_can_be_made_is_bad_input(tmp_path: Path, place: str) -> None:
    """Even for root, who may write into folders that others may not."""
    (tmp_path / "file").write_text("")
    places = {"below_a_file": tmp_path / "file" / "tiny", "proc": Path("/proc/tiny"), "name": tmp_path / ("x" * 300)}
    path = places[place]
    with pytest.raises(InputError) as refused:
        open_run_dir(path, "", identity=IDENTITY)
    assert str(path) in refused.value.where
    assert "run.root" in refused.value.fix


def test_a_disk_that_fails_is_no_bad_input(tmp_path: Path) -> None:
    """It may have room the next time: a launcher is to try again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            open_run_dir(tmp_path / "tiny", "run: {}\n", identity=IDENTITY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tiny").write_text("")
    with pytest.raises(InputError) as refused:
        open_run_dir(tmp_path / "tiny", "", identity=IDENTITY)
    assert refused.value.where == str(tmp_path / "tiny")


def test_a_creation_that_was_cut_short_is_taken_up(tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_text("pid 1 on elsewhere\n")
    (tmp_path / ".run.json.tmp").write_text('{"model.lay')
    open_and_close(tmp_path, IDENTITY)
    assert json.loads((tmp_path / "run.json").read_text()) == IDENTITY


def test_a_directory_without_results_goes_to_whoever_asks(tmp_path: Path) -> None:
    open_and_close(tmp_path, IDENTITY, "old\n")
    (tmp_path / "checkpoints" / ".step-000001.tmp").mkdir()  # of a save that was killed
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/heldout/accuracy": 0.5}\n')
    check_run_dir(tmp_path, identity={"model.layers": 4})
    open_and_close(tmp_path, {"model.layers": 4}, "new\n")
    assert json.loads((tmp_path / "run.json").read_text()) == {"model.layers": 4}
    assert (tmp_path / "config.yaml").read_text() == "new\n"
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    for refuse in (check_run_dir, lambda path, identity: open_run_dir(path, "", identity=identity)):
        with pytest.raises(InputError, match=r"model\.layers: 4 there, absent now"):
            refuse(tmp_path, identity={})


@pytest.fixture(scope="module")
def config() -> Config:
    return compose_config(["experiment=tiny", "run.name=tiny"])


LOST = {"gone": None, "empty": "", "list": "[1, 2]", "cut": '{"model.layers": '}


@pytest.mark.parametrize("lost", LOST)
def test_a_directory_whose_identity_is_lost_is_adopted_by_the_experiment_of_its_config(tmp_path, config, lost) -> None:
    with_a_step(tmp_path, identity(config), to_yaml(config))
    lose(tmp_path / "run.json", LOST[lost])
    check_run_dir(tmp_path, identity=identity(config))
    open_and_close(tmp_path, identity(config), to_yaml(config))
    assert json.loads((tmp_path / "run.json").read_text()) == json.loads(json.dumps(identity(config)))
    assert (tmp_path / "metrics.jsonl").exists()


def test_what_may_change_is_not_compared_where_an_earlier_release_has_written_it(tmp_path, config) -> None:
    with_a_step(tmp_path, identity(config) | {"data.shared_test_problems": 0, "run.name": "tiny"})
    check_run_dir(tmp_path, identity=identity(config))
    with pytest.raises(InputError) as refused:
        check_run_dir(tmp_path, identity=identity(config) | {"optimizer.lr": 0.5})
    assert refused.value.what.splitlines()[1:] == ["  optimizer.lr: 0.0003 there, 0.5 now"]


@pytest.mark.parametrize("lost", LOST)
def test_a_directory_whose_identity_is_lost_is_refused_to_other_experiments(tmp_path, config, lost) -> None:
    with_a_step(tmp_path, identity(config), to_yaml(config))
    lose(tmp_path / "run.json", LOST[lost])
    other = identity(compose_config(["experiment=tiny", "run.name=tiny", "optimizer.lr=0.5"]))
    with pytest.raises(InputError) as refused:
        open_run_dir(tmp_path, "", identity=other)
    assert refused.value.what.endswith("(its config.yaml):\n  optimizer.lr: 0.0003 there, 0.5 now")
    assert "delete" not in refused.value.fix


@pytest.mark.parametrize("config_yaml", [None, "", "model", "a: [", "other: 1"])
def test_results_of_nobody_are_left_alone_and_said_how_to_use(tmp_path, config, config_yaml) -> None:
    with_a_step(tmp_path, identity(config), to_yaml(config))
    lose(tmp_path / "run.json", "{")
    lose(tmp_path / "config.yaml", config_yaml)
    with pytest.raises(InputError, match=r"run\.json cannot be read .*config.yaml") as refused:
        open_run_dir(tmp_path, "", identity=identity(config))
    assert "run.init_from" in refused.value.fix
    assert "delete" not in refused.value.fix


def lose(file: Path, content: str | None) -> None:
    if content is None:
        file.unlink()
    else:
        file.write_text(content)


def test_a_foreign_directory_with_a_config_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: mine\n")
    with pytest.raises(InputError, match="not a run directory"):
        open_run_dir(tmp_path, "", identity=IDENTITY)
    assert (tmp_path / "config.yaml").read_text() == "model: mine\n"


def test_a_renamed_directory_is_the_same_run(tmp_path, config) -> None:
    path = with_a_step(tmp_path / "tiny", identity(config) | {"run.name": "tiny"}).rename(tmp_path / "other")
    open_and_close(path, identity(compose_config(["experiment=tiny", "run.name=other"])))


def test_a_directory_in_use_is_refused_until_its_process_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "tiny"
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(InputError, match=rf"in use by pid {holder.pid} on "):
            open_run_dir(path, "", identity={})
        holder.send_signal(signal.SIGKILL)
    open_and_close(path, {})


def test_a_new_start_withdraws_the_summary_at_once_and_a_refused_one_leaves_it(tmp_path: Path) -> None:
    """Else a start that ends before its first step would pass for the completed run of before."""
    summary = with_a_step(tmp_path / "tiny", IDENTITY) / "summary.json"
    summary.write_text('{"status": "completed"}\n')
    with pytest.raises(InputError, match="another experiment"):
        open_run_dir(tmp_path / "tiny", "", identity={})
    assert summary.exists()
    open_and_close(tmp_path / "tiny", IDENTITY)
    assert not summary.exists()

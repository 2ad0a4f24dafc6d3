"""Trackers: every line is sent once, in order, into one run; one that fails, hangs or is absent is only said."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from limits import limit
from train_jobs import wait_until

from grpo_mega.config.schema import RunConfig
from grpo_mega.observe.metric_table import find
from grpo_mega.observe.metrics import METRICS
from grpo_mega.observe.recorder import Recorder
from grpo_mega.show.observers import observers_of
from grpo_mega.show.trackers.follow import lines_after
from grpo_mega.show.trackers.trackers import SECONDS_AFTER_A_STOP, SECONDS_AT_THE_END, Trackers, prometheus_text

LINES: list[dict[str, Any]] = [
    {"step": 0, "eval/heldout/accuracy": 0.25},
    {"step": 1, "reward/mean": 0.5, "policy/entropy": None, "time/step": 1.5},
    {"step": 2, "reward/mean": 0.625, "policy/entropy": 1.25, "time/step": 1.25},
    {"step": 3, "reward/mean": 0.75, "policy/entropy": 1.0, "time/step": 1.0},
    {"step": 3, "eval/heldout/accuracy": 0.5},
]
EXPECTED = {
    (line["step"], name): value
    for line in LINES
    for name, value in line.items()
    if name != "step" and value is not None
}


def written(run: Path, lines: list[dict[str, Any]]) -> None:
    run.mkdir(exist_ok=True)
    (run / "logs").mkdir(exist_ok=True)
    (run / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "config.yaml").write_text("model: {layers: 2}\n")


def follow(run: Path, kind: str, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "grpo_mega.show.trackers.follow", str(run), kind, "--project", "proofs"]
    return subprocess.run(words, capture_output=True, text=True, env=os.environ | environment, timeout=limit(300))


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), max_size=8), st.integers(3, 6))
def test_each_line_is_sent_once_and_in_order_whatever_is_killed_and_runs_again(
    tmp_path_factory: pytest.TempPathFactory, starts: list[tuple[int, bool, bool]], longest: int
) -> None:
    """A start continues after a step, and is looked at, or not, with a line that is half written."""
    run, last = tmp_path_factory.mktemp("lines"), None
    sent = []
    steps = [{"step": n, "reward/mean": float(n)} for n in range(1, longest + 1)]
    for reached, looked, half in [*starts, (longest, True, False)]:
        kept = [{"step": 0, "eval/heldout/accuracy": 0.0}, *steps[:reached]]
        done = [{"step": longest, "eval/heldout/accuracy": 1.0}] if reached >= longest and not half else []
        written(run, [*kept, *done])
        if half:
            with (run / METRICS).open("a") as file:
                file.write('{"step": 99, "rew')
        for place, _ in lines_after(run / METRICS, last) if looked else ():
            sent.append(place)
            last = place
    assert sent == [(0, True), *((n, False) for n in range(1, longest + 1)), (longest, True)]


NUMBER = r"-?(?:\d[\d.e+-]*|inf)|nan"
SAMPLE = re.compile(rf'(\w+)\{{run="((?:[^"\\\n]|\\.)*)",metric="((?:[^"\\\n]|\\.)*)"\}} ({NUMBER})')


@given(st.dictionaries(st.text(min_size=1), st.none() | st.floats(), max_size=6), st.text())
def test_prometheus_reads_every_metric_whatever_it_is_called(metrics: dict[str, float | None], run: str) -> None:
    text = prometheus_text(run, metrics)
    assert not text or text.endswith("\n")
    found, typed = {}, []
    for line in text.split("\n")[:-1]:
        if line.startswith("# TYPE "):
            typed.append(line.split()[2])
        elif not line.startswith("# HELP "):
            match = SAMPLE.fullmatch(line)
            assert match, line
            assert match[1] == typed[-1], "the samples of a family are together"
            assert unquoted(match[2]) == run
            found[unquoted(match[3])] = float(match[4])
    assert len(typed) == len({*typed})
    assert {n: repr(x) for n, x in found.items()} == {n: repr(x) for n, x in metrics.items() if x is not None}


def unquoted(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else match[1], text)


def test_the_file_of_prometheus_has_the_newest_step_with_definitions_and_units(tmp_path: Path) -> None:
    config = RunConfig(name="r", steps=2, tensorboard=False, prometheus=str(tmp_path))
    recorder = Recorder(config, tmp_path, main=True, observers=lambda: observers_of(config, tmp_path))
    recorder.open_metrics(-1, "sft.jsonl")
    recorder.step(1, {"sft/loss": 1.0}, [])
    assert not [*tmp_path.glob("*.prom")], "only the last stage is shown"
    recorder.open_metrics(-1)
    for step in (1, 2):
        recorder.step(step, {"reward/mean": step / 4, "time/step": 2.0}, [])
    recorder.close()
    text = (tmp_path / "grpo_mega_r.prom").read_text()
    assert 'grpo_mega_reward_mean{run="r",metric="reward/mean"} 0.5\n' in text
    assert 'grpo_mega_step{run="r",metric="step"} 2.0\n' in text
    known = find("time/step")
    assert known
    assert f"# HELP grpo_mega_time_step {known.meaning} [s]\n" in text
    assert [path.name for path in tmp_path.glob("*grpo_mega*")] == ["grpo_mega_r.prom"], "no half-written one"


def test_a_folder_of_prometheus_that_is_gone_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = RunConfig(name="r", steps=2, tensorboard=False, prometheus=str(tmp_path / "gone"))
    recorder = Recorder(config, tmp_path, main=True, observers=lambda: observers_of(config, tmp_path))
    recorder.open_metrics(-1)
    for step in (1, 2):
        recorder.step(step, {"reward/mean": 0.5}, [])
    recorder.close()
    assert [str(tmp_path / "gone") in record.getMessage() for record in caplog.records] == [True]
    assert len((tmp_path / METRICS).read_text().splitlines()) == 2


def faulty(folder: Path, body: str) -> str:
    """PYTHONPATH with a trackio that does this when it is asked for a run."""
    folder.mkdir()
    (folder / "trackio.py").write_text(f"import os, subprocess, sys, time\ndef init(**_):\n    {body}\n")
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ConnectionError('no route to host')", "exit code 1 (ConnectionError: no route to host)"),
        ("os._exit(7)", "exit code 7"),
        ("open('there', 'w'); time.sleep(1000)", "has not sent all metrics within 0 s"),
        (
            "subprocess.Popen(['sleep', '1000']); open('there', 'w'); time.sleep(1000)",
            "has not sent all metrics within 0 s",
        ),
    ],
    ids=["raises", "exits", "hangs", "hangs_with_a_child"],
)
def test_a_tracker_that_fails_is_said_once_with_what_sends_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, body: str, said: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", faulty(tmp_path / "library", body))
    run = tmp_path / "run"
    written(run, LINES)
    monkeypatch.chdir(tmp_path)
    trackers = Trackers(run, ["trackio"], "proofs")
    trackers.stage("sft", 0, 3)
    assert not trackers._processes, "they begin with the last stage"
    trackers.stage("", 0, 3)
    (process,) = trackers._processes.values()
    trackers.step(1, {}, [])
    wait_until(lambda: process.poll() is not None or Path("there").exists(), "the tracker does not begin")
    members = [member for member in psutil.process_iter() if in_group(member, process.pid)]
    trackers.step(2, {}, [])
    trackers.end(seconds=0.0)
    trackers.step(3, {}, [])
    (warning,) = (record.getMessage() for record in caplog.records)
    assert said in warning
    assert f"python -m grpo_mega.show.trackers.follow {run} trackio --project proofs" in warning
    assert psutil.wait_procs(members, timeout=limit(20))[1] == []


def test_a_complete_run_waits_longer_for_its_trackers_than_one_that_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(Trackers, "end", lambda _, seconds: waited.append(seconds))
    trackers = Trackers(tmp_path, ["trackio"], "proofs")
    trackers.finish({"status": "completed"})
    trackers.finish({"status": "stopped"})
    trackers.close()
    assert waited == [SECONDS_AT_THE_END, SECONDS_AFTER_A_STOP, SECONDS_AFTER_A_STOP]
    assert SECONDS_AFTER_A_STOP < 30 < SECONDS_AT_THE_END, "torchrun kills a rank 30 s after a stop"


QUEUEING = """
import time
def init(**_): pass
def log(values, step): print("queued", step, flush=True)
def finish(): time.sleep(1000)
"""
"""A trackio that takes lines at once, and whose network is away."""


def test_what_was_only_queued_when_a_tracker_was_killed_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", faulty(tmp_path / "library", "pass"))
    (tmp_path / "library" / "trackio.py").write_text(QUEUEING)
    run = tmp_path / "run"
    written(run, LINES)
    log = run / "logs" / "tracker-trackio.log"
    for start in (1, 2):
        trackers = Trackers(run, ["trackio"], "proofs")
        trackers.stage("", 0, 3)
        wait_until(lambda: log.read_text().count("queued 3") == 2 * start, "not all lines are queued")  # noqa: B023
        trackers.end(seconds=0.0)
        assert json.loads((run / "trackers" / "trackio.json").read_text())["sent"] is None


def in_group(process: psutil.Process, group: int) -> bool:
    with suppress(ProcessLookupError):
        return os.getpgid(process.pid) == group
    return False


def test_a_tracker_that_is_not_installed_says_what_to_install(tmp_path: Path) -> None:
    written(tmp_path / "run", LINES)
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "wandb.py").write_text("raise ModuleNotFoundError(\"No module named 'wandb'\")")
    path = os.pathsep.join([str(hidden), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = follow(tmp_path / "run", "wandb", PYTHONPATH=path)
    assert (done.returncode, "No module named 'wandb': pip install wandb" in done.stderr) == (2, True)
    assert follow(tmp_path / "none", "wandb").returncode == 2


# With the libraries themselves: pip install -e .[trackers].


def sent_in_two_starts(run: Path, kind: str, **environment: str) -> list[dict[str, Any]]:
    """Sends step 2 and before, then, as a start that was killed in step 3 and repeats step 2, the rest; the states."""
    states = []
    for lines in (LINES[:3], LINES):
        written(run, lines)
        done = follow(run, kind, **environment)
        assert done.returncode == 0, done.stderr
        states.append(json.loads((run / "trackers" / f"{kind}.json").read_text()))
    return states


def records_of_wandb(file: Path) -> Iterator[bytes]:
    """The records of an offline run: LevelDB's log, in blocks of 32 KiB, after a header of 7 bytes."""
    content, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield parts
            parts = b""


def test_wandb_has_the_lines_of_metrics_jsonl(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    states = sent_in_two_starts(tmp_path / "run", "wandb", WANDB_MODE="offline", HOME=str(tmp_path))
    assert states[0]["id"] == states[1]["id"]
    found: dict[tuple[int, str], float] = {}
    for file in (tmp_path / "run" / "wandb").glob(f"offline-run-*/run-{states[0]['id']}.wandb"):
        for data in records_of_wandb(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            for name, value in items.items():
                if not name.startswith("_"):
                    assert (items["_step"], name) not in found, "a line is sent once"
                    found[items["_step"], name] = value
    assert found == EXPECTED


def test_mlflow_has_the_lines_of_metrics_jsonl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    uri = f"file:{tmp_path / 'mlruns'}"
    states = sent_in_two_starts(tmp_path / "run", "mlflow", MLFLOW_TRACKING_URI=uri, MLFLOW_ALLOW_FILE_STORE="true")
    assert states[0]["id"] == states[1]["id"]
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient(uri)
    histories = [client.get_metric_history(states[0]["id"], name) for name in {name for _, name in EXPECTED}]
    found = [((point.step, point.key), point.value) for history in histories for point in history]
    assert len(found) == len(EXPECTED)
    assert dict(found) == EXPECTED
    meanings = json.loads(Path(client.download_artifacts(states[0]["id"], "metrics.json")).read_text())
    assert "[s]" in meanings["time/step"]


def test_trackio_has_the_lines_of_metrics_jsonl(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    sent_in_two_starts(tmp_path / "run", "trackio", TRACKIO_DIR=str(tmp_path / "trackio"), HOME=str(tmp_path))
    with sqlite3.connect(tmp_path / "trackio" / "proofs.db") as database:
        rows = database.execute("select step, metrics, run_name from metrics").fetchall()
    assert {name for _, _, name in rows} == {"run"}
    found = [((step, name), value) for step, line, _ in rows for name, value in json.loads(line).items()]
    assert len(found) == len(EXPECTED)
    assert dict(found) == EXPECTED

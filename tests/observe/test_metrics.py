"""metrics.jsonl: appended, trimmed on resume, never with double or torn lines."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo_mega.errors import InputError
from grpo_mega.observe.metrics import MetricsLog, read_metrics


def steps_of(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def write_steps(run: Path, first: int, last: int, resume_from_step: int) -> None:
    log = MetricsLog(run, tensorboard=False, resume_from_step=resume_from_step)
    for step in range(first, last + 1):
        log.write(step, {"reward/mean": step / 10})
    log.close()


def test_every_line_is_on_disk_before_the_next_step(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, tensorboard=False, resume_from_step=-1)
    log.write(0, {"eval/accuracy": 0.5})
    log.write(1, {"reward/mean": 1, "reward/format": 0.25})
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 0, "eval/accuracy": 0.5},
        {"step": 1, "reward/mean": 1.0, "reward/format": 0.25},
    ]
    log.close()


def test_a_run_directory_that_is_moved_is_missed_at_the_next_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    log = MetricsLog(run, tensorboard=False, resume_from_step=-1)
    log.write(1, {"reward/mean": 1.0})
    run.rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match="its directory was moved or replaced during the run; move it back"):
        log.write(2, {"reward/mean": 1.0})
    run.mkdir()
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(FileNotFoundError, match="moved or replaced"):
        log.write(2, {"reward/mean": 1.0})
    log.close()


def test_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    write_steps(tmp_path, 0, 7, resume_from_step=-1)
    write_steps(tmp_path, 5, 10, resume_from_step=4)
    assert steps_of(tmp_path) == list(range(11))


def test_held_out_results_stay_at_the_beginning_and_go_with_an_end_that_is_none(tmp_path: Path) -> None:
    def run(steps: range, resume_from_step: int) -> None:
        log = MetricsLog(tmp_path, tensorboard=False, resume_from_step=resume_from_step)
        if resume_from_step < 0:
            log.write(0, {"eval/heldout/accuracy": 0.0})
        for step in steps:
            log.write(step, {"reward/mean": 0.5, "eval/accuracy": 0.25})
        log.write(steps.stop - 1, {"eval/heldout/accuracy": 1.0})
        log.close()

    run(range(1, 3), resume_from_step=-1)
    assert steps_of(tmp_path) == [0, 1, 2, 2]
    run(range(3, 5), resume_from_step=2)
    assert steps_of(tmp_path) == [0, 1, 2, 3, 4, 4]
    run(range(5, 5), resume_from_step=4)
    assert steps_of(tmp_path) == [0, 1, 2, 3, 4, 4]
    assert "eval/heldout/accuracy" in read_metrics(tmp_path / "metrics.jsonl")[-1]


def test_a_run_without_checkpoint_starts_from_an_empty_file(tmp_path: Path) -> None:
    write_steps(tmp_path, 0, 3, resume_from_step=-1)
    write_steps(tmp_path, 0, 2, resume_from_step=-1)
    assert steps_of(tmp_path) == [0, 1, 2]


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(min_value=0), last=st.integers(-1, 6))
def test_a_file_torn_anywhere_resumes_clean(tmp_path_factory: pytest.TempPathFactory, cut: int, last: int) -> None:
    run = tmp_path_factory.mktemp("run")
    write_steps(run, 0, 5, resume_from_step=-1)
    path = run / "metrics.jsonl"
    whole = path.read_bytes()
    torn = whole[: cut % (len(whole) + 1)]
    path.write_bytes(torn)
    complete = torn.count(b"}")

    write_steps(run, 100, 100, resume_from_step=last)
    assert steps_of(run) == [*range(min(complete, last + 1)), 100]


def test_dropping_a_torn_line_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "rew')
    assert read_metrics(path) == [{"step": 1}]
    assert "metrics.jsonl:2: dropped a half-written last line" in caplog.text


@pytest.mark.parametrize(
    ("lines", "lost"),
    [
        ([1, 2, 4, 7], "step 3, 5, 6 are lost"),
        ([], "step 1, 2, 3, 4, 5, 6, 7 are lost"),
        (None, "step 1, 2, 3, 4, 5, 6, 7 are lost"),
        ([1, 2, 3, 4, 5, 6], "step 7 are lost"),
        ([1, 2, 3, 4, 5, 6, 7], None),
    ],
)
def test_steps_that_do_not_run_again_and_have_no_line_are_named(tmp_path: Path, caplog, lines, lost) -> None:
    if lines is not None:
        (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in lines))
    MetricsLog(tmp_path, tensorboard=False, resume_from_step=7).close()
    assert (lost is None and not caplog.text) or f"metrics.jsonl: the metrics of {lost}" in caplog.text


def test_of_many_lost_steps_the_first_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    MetricsLog(tmp_path, tensorboard=False, resume_from_step=500).close()
    assert "step 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 490 more are lost" in caplog.text


def test_leftovers_of_a_killed_trim_do_no_harm(tmp_path: Path) -> None:
    write_steps(tmp_path, 0, 5, resume_from_step=-1)
    (tmp_path / ".metrics.jsonl.tmp").write_text('{"step": 0}\n{"st')
    write_steps(tmp_path, 3, 5, resume_from_step=2)
    assert steps_of(tmp_path) == [0, 1, 2, 3, 4, 5]
    assert not (tmp_path / ".metrics.jsonl.tmp").exists()


@pytest.mark.parametrize("bad", [b"nonsense", b"", b"[1]", b'{"reward/mean": 1}', b"\xff\xfe", b'{"step": "3"}'])
def test_a_damaged_line_inside_is_named_and_nothing_is_lost(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    damaged = b'{"step": 1}\n' + bad + b'\n{"step": 3}\n'
    path.write_bytes(damaged)
    with pytest.raises(InputError) as error:
        MetricsLog(tmp_path, tensorboard=False, resume_from_step=2)
    assert error.value.where == f"{path}:2"
    assert path.read_bytes() == damaged


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_null_and_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: float
) -> None:
    log = MetricsLog(tmp_path, tensorboard=True, resume_from_step=-1)
    log.write(7, {"policy/grad_norm": value, "reward/mean": 1.0})
    log.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 7, "policy/grad_norm": None, "reward/mean": 1.0}]
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.getMessage() for record in warnings] == [
        f"step 7: metric policy/grad_norm is {value}, written as null"
    ]


def test_a_metric_called_step_is_refused(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, tensorboard=False, resume_from_step=-1)
    with pytest.raises(ValueError, match="must not be called 'step'"):
        log.write(1, {"step": 5.0})
    log.close()


def test_a_run_goes_on_without_the_files_of_tensorboard(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tensorboard").write_text("a file is in the way")
    log = MetricsLog(tmp_path, tensorboard=True, resume_from_step=-1)
    log.write(1, {"reward/mean": 0.5})
    log.close()
    assert ["run.tensorboard: FileExistsError" in message for message in caplog.messages] == [True]
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path: Path) -> None:
    for steps, resume_from_step in ((range(6), -1), (range(3, 8), 2)):
        log = MetricsLog(tmp_path, tensorboard=True, resume_from_step=resume_from_step)
        for step in steps:
            log.write(step, {"reward/mean": step + resume_from_step})
        log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert shown == [(0, -1.0), (1, 0.0), (2, 1.0)] + [(step, step + 2.0) for step in range(3, 8)]

"""The panel of a run directory, printed once: where the run is, or how it ended; what cannot be shown is said."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ranks import REPOSITORY

from grpo_mega.observe.logs import ENDS
from grpo_mega.platform.clock import own_clock
from grpo_mega.platform.flight import Flight
from grpo_mega.show.status import BAD_INPUT, DONE, main

STEPS = [
    {"step": n, "reward/mean": 0.1 * n, "policy/entropy": None, "time/step": 4.0, "time/update": 1000.0, "time/x": 3.0}
    for n in (1, 2, 3)
]
HELD_OUT = {"step": 0, "eval/heldout/accuracy": 0.25}
RISE = {"step": 2, "name": "truncation", "message": "", "action": ""}


def lines(*records: dict[str, Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of eight steps that has finished three."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.yaml").write_text(yaml.safe_dump({"run": {"steps": 8}, "base": {"max_steps": 90}}))
    (tmp_path / "tiny" / "metrics.jsonl").write_text(lines(HELD_OUT, *STEPS))
    return tmp_path / "tiny"


def shown(run: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of the panel, without its frame, and what stands in the last line of that."""
    assert main([str(run)]) == DONE
    printed = capsys.readouterr().out.splitlines()
    assert {len(line) for line in printed} == {80}
    assert (printed[0][0], printed[-1][0]) == ("╭", "╰")
    assert printed[0].startswith("╭─ tiny ─")
    return [*(line.strip("│").strip() for line in printed[1:-1]), printed[-1].strip("╰─╯ ")]


def test_a_run_that_goes_on_shows_its_step_phase_numbers_and_alarms(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flight = Flight(run, 0, own_clock())
    for name in ("step", "generate"):
        flight.begin(name, {})
    flight.end("generate")
    flight.begin("update", {})
    flight.begin("forward", {})
    (run / "alarms.jsonl").write_text(
        lines(RISE | {"name": "no_signal"}, RISE, {"step": 3, "name": "no_signal", "cleared": True})
    )
    steps, phase, _, *rest, state = shown(run, capsys)
    assert re.fullmatch(r"not complete, last sign of life 0:\d\d ago", state)
    assert (steps.split()[0], *steps.split()[-4:]) == ("run", "3/8", "0:12", "0:20", "left"), "four seconds a step"
    assert phase.split()[0] == "update"
    assert re.search(r" 0:\d\d  16:[0-4]\d left$", phase), "it took 1,000 seconds in other steps"
    text = "\n".join(rest)
    for words in ("reward        0.300 ▁▄█", "held-out      25.0% ▁", "seconds        4.00 ▁▁▁"):
        assert words in text
    assert "entropy" not in text, "no step has a number"
    assert rest[-1] == "alarms: truncation since step 2"


def test_a_run_with_slices_says_what_is_in_flight_and_how_old_tokens_are(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not re.search("in flight|staleness", "\n".join(shown(run, capsys)))
    of_slices = {"rollout/in_flight": 1234, "rollout/staleness_mean": 1.255}
    (run / "metrics.jsonl").write_text(lines(*(step | of_slices for step in STEPS)))
    text = "\n".join(shown(run, capsys))
    assert re.search(r"in flight +1234 ▁", text)
    assert re.search(r"staleness +1\.25 ▁", text)


def test_a_run_with_an_environment_says_how_often_it_is_called_and_wrongly(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "call" not in "\n".join(shown(run, capsys))
    of_calls = {"environment/calls": 1.5, "environment/errors": 0.25}
    (run / "metrics.jsonl").write_text(lines(*(step | of_calls for step in STEPS)))
    text = "\n".join(shown(run, capsys))
    assert re.search(r"calls +1\.50 ▁", text)
    assert re.search(r"call errors +25\.0% ▁", text)


def test_a_phase_of_the_same_name_inside_is_no_new_one_and_between_phases_there_is_none(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flight = Flight(run, 0, own_clock())
    for name in ("evaluate", "evaluate", "poll"):
        flight.begin(name, {})
    text = (run / "flight" / "rank-00000").read_text()
    number, began, *words = text.split(maxsplit=3)
    old = f"{number} {float(began) - 70:.6f} {' '.join(words)}"
    (run / "flight" / "rank-00000").write_text(old)
    assert re.fullmatch(r"1:[1-5]\d", shown(run, capsys)[1].split()[-1]), "since the outer one began"
    flight = Flight(run, 0, own_clock())
    flight.begin("update", {})
    flight.end("update")
    assert shown(run, capsys)[1] == "", "no second bar"


def since(run: Path, seconds: float) -> None:
    """Leaves an update that began so long ago, and gave no sign of life since the fifth second of it."""
    flight = Flight(run, 0, own_clock())
    flight.begin("update", {})
    flight.begin("forward", {})
    file = run / "flight" / "rank-00000"
    for line, ago in zip(file.read_text().splitlines(), (seconds, seconds - 5), strict=True):
        number, now, rest = line.split(maxsplit=2)
        with file.open("r+") as written:
            written.seek(128 * int(number))
            written.write(f"{number} {float(now) - ago:.6f} {rest}"[:127].ljust(127))


def test_the_phase_of_a_killed_run_lasted_until_its_last_sign_of_life(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    since(run, 70)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as holder:
        (run / "run.lock").write_text(f"pid {holder.pid} on {socket.gethostname()}\n")
        _, phase, *_, state = shown(run, capsys)
        assert re.search(r" 1:[1-5]\d( |$)", phase), "it lives, and the phase goes on"
        assert re.fullmatch(r"not complete, last sign of life 1:[0-5]\d ago", state)
        holder.kill()
    _, phase, *_, state = shown(run, capsys)
    assert re.search(r" 0:05( |$)", phase)
    assert re.fullmatch(r"not complete, and its process is gone, last sign of life 1:[0-5]\d ago", state)
    (run / "checkpoints" / ".step-000002").mkdir(parents=True)
    assert "its process is gone" in shown(run, capsys)[-1]
    (run / "checkpoints" / "step-000002").mkdir()
    state = shown(run, capsys)[-1]
    assert re.fullmatch(r"not running, continues at its newest checkpoint, last sign of life 1:[0-5]\d ago", state)


@pytest.mark.parametrize("lock", ["pid 1 on elsewhere.example\n", "", "pid x on y"])
def test_of_a_process_on_another_machine_only_its_signs_of_life_are_known(
    run: Path, capsys: pytest.CaptureFixture[str], lock: str
) -> None:
    since(run, 70)
    (run / "run.lock").write_text(lock)
    _, phase, *_, state = shown(run, capsys)
    assert re.search(r" 0:05( |$)", phase)
    assert re.fullmatch(r"not complete, last sign of life 1:[0-5]\d ago", state)


def test_a_process_that_only_has_the_number_of_a_killed_one_is_another(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    since(run, 70)
    (run / "run.lock").write_text(f"pid {os.getpid()} on {socket.gethostname()}\n")
    os.utime(run / "run.lock", (1, 1))
    assert "its process is gone" in shown(run, capsys)[-1]
    (run / "logs").mkdir(exist_ok=True)
    (run / "logs" / "rank-0.log").write_text(f"2026 rank 0 CRITICAL uncaught: {ENDS}out of memory\nTraceback\n")
    assert shown(run, capsys)[-1] == "not complete, and its process is gone: out of memory"


@pytest.mark.parametrize(
    ("summary", "state"),
    [({"status": "completed"}, "completed"), ({"status": "stopped", "stopped_by": "x"}, "stopped by the alarm x")],
)
def test_a_run_that_has_ended_says_how_and_is_in_no_phase(
    run: Path, capsys: pytest.CaptureFixture[str], summary: dict[str, str], state: str
) -> None:
    Flight(run, 0, own_clock()).begin("update", {})
    (run / "summary.json").write_text(json.dumps(summary))
    _, second, *_, last = shown(run, capsys)
    assert (second, last) == ("", state)


def test_an_earlier_stage_has_its_own_steps_and_numbers(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "pretrain.jsonl").write_text(lines({"step": 30, "base/loss": 1.5, "time/step": 2.0}))
    steps, _, loss, state = shown(run, capsys)
    assert state == "not complete"
    assert steps.split()[0] == "pretrain"
    assert steps.split()[-5:] == ["30/90", "0:02", "2:00", "at", "most"]
    assert loss.startswith("loss")
    (run / "sft.jsonl").write_text(lines({"step": 7, "sft/loss": 0.5, "time/step": 2.0}))
    steps = shown(run, capsys)[0]
    assert (steps.split()[0], steps.split()[-2:]) == ("sft", ["7", "0:04"]), "how many there are is not known"


def test_what_is_not_there_yet_or_half_written_is_no_error(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    assert shown(run, capsys)[0].split()[-4:] == ["3/8", "0:12", "0:20", "left"]
    (run / "config.yaml").unlink()
    assert shown(run, capsys)[0].split()[-2:] == ["3", "0:12"]
    (run / "metrics.jsonl").unlink()
    (run / "config.yaml").write_text("run: {steps: 8}\n")
    assert shown(run, capsys)[0].split()[-2:] == ["0/8", "0:00"]


def test_the_steps_of_a_reward_model_are_those_of_its_pairs_which_no_setting_has(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "config.yaml").write_text("run: {steps: 0, trains: reward_model}\n")
    first = shown(run, capsys)[0]
    assert "/0" not in first
    assert "left" not in first


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("metrics.jsonl", "x\n{}\n"),
        ("config.yaml", "- 1\n"),
        ("config.yaml", "{"),
        ("summary.json", '{"status"'),
        ("alarms.jsonl", lines({"step": 1}, {"step": 2})),
    ],
)
def test_a_damaged_file_is_said(run: Path, capsys: pytest.CaptureFixture[str], file: str, content: str) -> None:
    (run / file).write_text(content)
    assert main([str(run)]) == BAD_INPUT
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert str(run) in said.err


LOUD = "\x1b]0;owned\x07\x9b31m\u202e[red]x[/red]"
QUIET = r"\x1b]0;owned\x07\x9b31m\u202e[red]x[/red]"


@pytest.mark.parametrize("where", ["name", "status", "alarm", "phase", "error"])
def test_no_text_of_a_run_controls_the_terminal(run: Path, capsys: pytest.CaptureFixture[str], where: str) -> None:
    quiet = QUIET
    if where == "name":
        run = run.rename(run.with_name(LOUD.replace("/", "")))
        quiet = QUIET.replace("/", "")
    elif where == "status":
        (run / "summary.json").write_text(json.dumps({"status": LOUD}))
    elif where == "alarm":
        (run / "alarms.jsonl").write_text(lines(RISE | {"name": LOUD}))
    elif where == "phase":
        phase = "\x1b]0;owned\x07\x1b[31m[red]x[/red]".replace("/", "")  # the recorder has only ASCII
        (run / "flight").mkdir()
        (run / "flight" / "rank-00000").write_text(f"0 1000000.0 begin step/{phase}\n")
        quiet = r"\x1b]0;owned\x07\x1b[31m[red]x[red]"
    else:
        (run / "config.yaml").write_text(f"a: !!{LOUD[-6:]}x '{LOUD[-15:-6]}")
        assert main([str(run)]) == BAD_INPUT
    if where != "error":
        assert main([str(run)]) == DONE
    said = "".join(capsys.readouterr())
    assert quiet in said or where == "error"
    assert not {*said} & {*"\x1b\x07\x9b\u202e"}


@pytest.mark.parametrize(
    "content", ["a: &a [x]\nb: *a", "run: &x {steps: 3, self: *x}", "run: 3", "run: {steps: 1e400}", "[" * 9000]
)
def test_a_configuration_that_no_run_writes_is_refused_in_a_line(
    run: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (run / "config.yaml").write_text(content)
    code, said = main([str(run)]), capsys.readouterr()
    assert code == DONE or said.err.count("\n") == 1
    assert (code == BAD_INPUT) == ("1e400" not in content)


@pytest.mark.parametrize(
    "name",
    ["config.yaml", "alarms.jsonl", "sft.jsonl", "run.lock", "summary.json", "logs/rank-0.log", "flight/rank-00000"],
)
def test_what_is_no_file_is_not_waited_for(run: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    code, said = main([str(run)]), capsys.readouterr()
    assert (code, said.err) == (DONE, "") or "is not a file" in said.err


def test_numbers_of_any_size_are_no_error(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = [{"step": n, "reward/mean": 1e308, "time/step": 1e308, "time/update": 10**400} for n in (4, 5, 6)]
    (run / "metrics.jsonl").write_text(lines(*large, {"step": 7, "reward/mean": 1e300, "time/step": 1e300}))
    assert main([str(run)]) == DONE
    assert "7/8" in capsys.readouterr().out
    (run / "metrics.jsonl").write_text(lines({"step": 10**400}) + "[" * 100_000 + "\n{}")
    assert main([str(run)]) == BAD_INPUT
    assert capsys.readouterr().err.count("\n") == 1


def test_the_command_keeps_to_ascii_where_it_must_and_refuses_what_is_no_run(run: Path, tmp_path: Path) -> None:
    def command(path: Path) -> subprocess.CompletedProcess[str]:
        own = {"PYTHONPATH": str(REPOSITORY), "PYTHONIOENCODING": "ascii"}
        return subprocess.run(
            [sys.executable, "-m", "grpo_mega.show.status", str(path)],
            env=os.environ | own, capture_output=True, text=True,
        )  # fmt: skip

    made = command(run)
    assert (made.returncode, made.stdout.isascii(), "3/8" in made.stdout) == (DONE, True, True), made
    made = command(tmp_path)
    assert (made.returncode, made.stdout) == (BAD_INPUT, "")
    assert "choose a run directory, such as runs/tiny" in made.stderr

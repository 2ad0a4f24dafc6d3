"""tools/trace.py: ranks become one file, of the steps that are asked for; what each rank did last; clear refusals."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import REPOSITORY
from traced import Span, events, write

from grpo_mega.observe.logs import ENDS
from grpo_mega.platform.clock import Clock
from grpo_mega.platform.flight import Flight

STEPS: list[Span] = [
    ("step", 100, 104), ("generate", 100, 103), ("update", 103, 104),
    ("step", 105, 109), ("generate", 105, 107), ("update", 107, 109),
]  # fmt: skip
SAMPLES: dict[int, list[Span]] = {
    0: [("sum 1 #0", 100.1, 102), ("sum 1 #1", 100.1, 102.5), ("sum 1 #0", 105.1, 106)],
    1: [("sum 1 #2", 100.1, 102.9), ("sum 2 #0", 100.1, 101)],
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for rank, samples in SAMPLES.items():
        write(tmp_path, rank, events(rank, STEPS, samples))
    return tmp_path


def tool(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(REPOSITORY / "tools" / "trace.py"), *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_the_ranks_become_one_file_with_groups_and_the_waterfall_is_told(run: Path) -> None:
    with (run / "trace" / "rank-00001.json").open("a") as file:
        file.write('{"ph":"B","name":"upd')  # killed
    done = tool(run)
    assert (done.returncode, done.stderr) == (0, "")
    whole = json.loads(gzip.decompress((run / "trace" / "joined.json.gz").read_bytes()))
    assert {e["pid"] for e in whole} == {0, 1}
    assert sum(e["ph"] == "M" for e in whole) == 2
    groups = {(e["name"], e["ph"]): e["ts"] / 1e6 for e in whole if e.get("cat") == "group" and e["ts"] < 104e6}
    assert groups == {
        ("sum 1", "b"): 100.1, ("sum 1", "e"): 102.9, ("sum 2", "b"): 100.1, ("sum 2", "e"): 101.0,
    }  # fmt: skip
    assert sum(e.get("cat") == "group" for e in whole) == 6
    assert "Steps 1 to 2, 2 ranks" in done.stdout
    assert "A step is bound by" in done.stdout
    assert f"{len(whole)} events" in done.stdout


def test_only_the_steps_that_are_asked_for(run: Path, tmp_path: Path) -> None:
    done = tool(run, "--steps", "2:9", "--out", tmp_path / "some.json")
    assert done.returncode == 0, done.stderr
    whole = json.loads((tmp_path / "some.json").read_text())
    times = [e["ts"] / 1e6 for e in whole if e["ph"] != "M"]
    assert (min(times), max(times)) == (105, 109)
    assert "Steps 2 to 2" in done.stdout
    assert not (run / "trace" / "joined.json.gz").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--steps", "3:5"], "steps 3:5: no whole step of them is in the traces; choose some of 1 to 2"),
        (["--steps", "5:3"], "'5:3': the last step comes before the first; write 3:5"),
        (["--steps", "a"], "'a': not a range of steps; write FIRST:LAST, such as 3:5, or one step"),
        (["--out", "/dev/null/x"], "/dev/null"),
    ],
)
def test_refusals_say_what_to_change(run: Path, options: list[str], said: str) -> None:
    done = tool(run, *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_what_recording_takes_is_that_of_the_step_with_most_events_for_its_time(run: Path) -> None:
    crowded = events(2, [("step", 100, 101), *[("poll", 100 + n / 100, 100 + n / 50) for n in range(98)]])
    write(run, 2, crowded)
    done = tool(run, "--cost")
    assert (done.returncode, done.stderr) == (0, "")
    each, share = map(float, re.findall(r"takes ([\d.]+) (?:us|%) of", done.stdout))
    assert "of 5 steps of 3 ranks, the one with most for its time has 100 in 1 s" in done.stdout
    assert share == pytest.approx(100 * each / 1e4, rel=0.1)


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    done = tool(tmp_path)
    assert done.returncode == 2
    assert "run.keep_traces" in done.stderr
    assert tool(tmp_path, "--last").returncode == 2


def test_what_each_rank_did_last_and_which_one_the_others_wait_for(tmp_path: Path) -> None:
    for rank, inside in enumerate((["step", "update", "reduce"], ["step", "update", "forward-compute"])):
        flight = Flight(tmp_path, rank, Clock(10**18))
        flight.begin("setup", {})
        flight.end("setup")
        for name in inside:
            flight.begin(name, {"mini_batch": 2} if name == "update" else {})
        flight.close()
    done = tool(tmp_path, "--last")
    assert (done.returncode, done.stderr) == (0, "")
    assert "rank-00000: in step > update > reduce" in done.stdout
    assert "step/update begins mini_batch=2" in done.stdout
    assert done.stdout.splitlines()[-1] == "Not waiting for others: rank-00001"
    Flight(tmp_path, 0, Clock(10**18)).close()  # a start with one rank, which has not done anything
    assert "rank-00000: in nothing, line 0" in tool(tmp_path, "--last").stdout
    assert "rank-00000.before: in step > update > reduce" in tool(tmp_path, "--before").stdout


def test_single_ranks_of_many_are_enough(tmp_path: Path) -> None:
    for rank in range(3):
        write(tmp_path, rank, events(rank, [("step", 1, 2)]))
    done = tool(tmp_path, "--ranks", "0", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 ranks" in done.stdout
    done = tool(tmp_path, "--ranks", "3")
    assert (done.returncode, "has no trace of rank 3; choose one of 0 to 2" in done.stderr) == (2, True)


def test_a_damaged_trace_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 0, [*events(0, [("step", 1, 2)]), {"ph": "M", "name": "clock", "pid": 0, "tid": 0, "args": []}])
    done = tool(tmp_path)
    assert (done.returncode, done.stderr[:6]) == (2, "error:")
    assert "damaged" in done.stderr


LOUD = "\x1b]0;owned\x07\x9b31m\u202e"


@pytest.mark.parametrize("options", [[], ["--last"], ["--cost"], ["--steps", "1:1"]])
def test_no_text_of_a_run_controls_the_terminal(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "flight").mkdir()
    (tmp_path / "flight" / f"rank-0{LOUD}").write_text(f"0 1e6 begin a/{LOUD[:9]} {LOUD}\n1 1e300 end a\n2 nan end a\n")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").write_text(f"x CRITICAL uncaught: {ENDS}{LOUD}\n")
    write(tmp_path, 0, [{"ph": "B", "name": LOUD, "ts": 1, "args": {LOUD: LOUD}}])
    done = tool(tmp_path, *options)
    assert (done.returncode, "Traceback" in done.stderr) == (0 if options in ([], ["--last"]) else 2, False)
    assert r"\x1b]0;owned\x07" in done.stdout or done.returncode == 2
    assert not {*done.stdout, *done.stderr} & {*"\x1b\x07\x9b\u202e"}


@pytest.mark.parametrize(
    "event",
    [
        {"args": {"step": float("inf")}}, {"args": {"step": 10**400}}, {"args": {"step": "x"}}, {"args": [1]},
        {"ts": float("nan")}, {"ts": 1e308}, {"ts": 10**400}, {"dur": "x"}, {"dur": 1e308},
        {"name": "clock", "ph": "M"},
    ],
)  # fmt: skip
def test_events_that_no_rank_writes_are_left_out_or_refused(tmp_path: Path, event: dict[str, Any]) -> None:
    error = {"ph": "M", "name": "clock", "pid": 0, "tid": 0, "args": {"error_us": "many"}}
    first, *others = events(0, [("step", 1, 2), ("update", 1, 2)])
    strange = [{**each, **event} if each["ph"] in "BX" else each for each in others]
    write(tmp_path, 0, [first, *strange, *([error] if "name" in event else [])])
    done = tool(tmp_path)
    assert done.returncode in (0, 2)
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == (done.returncode == 2)


def test_pipes_are_not_waited_for_and_endless_files_not_read(run: Path) -> None:
    (run / "trace" / "rank-00000.json").unlink()
    os.mkfifo(run / "trace" / "rank-00000.json")
    (run / "flight").mkdir()
    os.mkfifo(run / "flight" / "rank-00000")
    os.mkfifo(run / "flight" / "rank-00001")
    done = tool(run, "--last")
    assert (done.returncode, done.stdout.count("in nothing")) == (0, 2)
    assert tool(run).returncode == 0
    with (run / "trace" / "rank-00001.json").open("r+b") as file:
        file.truncate(1 << 40)
    done = tool(run)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "has more than" in done.stderr

"""tools/report.py on run directories that somebody wrote who means no good, or that are not whole: the page without the
bad part and a line that says so, or a refusal in one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forks import REPOSITORY, run_python
from runs_made import group, lines, made_run, with_machines

from grpo_mega.show.report.pack import pack
from grpo_mega.show.report.page import page_of, title_of
from grpo_mega.show.report.read import LINE_BYTES, MOST_ALARMS, MOST_NAMES, MOST_NOTES, read_run

BOMB = "a: &a [x, x]\n" + "".join(f"{chr(n + 1)}: &{chr(n + 1)} [*{chr(n)}, *{chr(n)}]\n" for n in range(97, 122))
SUMMARY = {"status": "completed", "seconds": {"a": 1e308, "b": 1e308}, "world_size": 1e300, "tokens_generated": 10**400}
LOUD = "\x1b]0;owned\x07\x9b31m\u202e[red]"


def report(*words: str | Path) -> tuple[int, str, str]:
    done = run_python(REPOSITORY / "tools" / "report.py", *words, timeout=60)
    return done.returncode, done.stdout, done.stderr


def pipe_for(run: Path, name: str) -> None:
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)


def folder_for(run: Path, name: str) -> None:
    (run / name).unlink(missing_ok=True)
    (run / name).mkdir()


def link_for(run: Path, name: str) -> None:
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to("gone")


ACCURACIES = {"held_out_accuracy_before": -7, "held_out_accuracy_after": 9, "held_out_problems": 4}
DEEP = "[" * 100_000
LARGE, LARGEST = ([{"step": n, "reward/mean": size, "time/x": size} for n in range(9)] for size in (1e300, 1e308))
MANY = {"step": 1} | {f"m{n}": 1 for n in range(MOST_NAMES + 2)}
PLANNED = {"seconds": {"a": [1e308, None]}, "memory": [10**400], "steps": ["x" * 10**6]}
ENDLESS = ({"ph": "B", "name": "step", "ts": 1, "args": {"step": float("inf")}}, {"ph": "E", "name": "step", "ts": 2})
CALLS = [None, {}, "x", [3], [{}, {"text": None, "error": 2}], [{"text": "9" * 5000, "error": True}] * 5]
GIVEN = [None, [], [[1, 2]], [[2, 1]], [[0, 9]], [[-3, 2]], [[1, 2], [1, 2]], [[1e308, 2]]]
TURNS = [{"token_texts": ["a", 3, "b"], "calls": calls, "given": given} for calls in CALLS for given in GIVEN]
CONTENTS = {
    "bomb": ("config.yaml", BOMB, "config.yaml: cannot be read: it has YAML aliases, which runs never write"),
    "cycle": ("config.yaml", "run: &x {name: 3, self: *x}", "config.yaml: cannot be read: it has YAML aliases"),
    "bytes": ("config.yaml", "run: {seed: !!binary aGk=}", "config.yaml: cannot be read"),
    "types": ("config.yaml", "run: {seed: 2020-02-02, name: [1]}\nreward: 3\nalgorithm: {group_size: .nan}\n", ""),
    "summary": ("summary.json", json.dumps(SUMMARY), ""),
    "accuracies": ("summary.json", json.dumps(ACCURACIES), ""),
    "deep summary": ("summary.json", DEEP, "summary.json: cannot be read"),
    "largest": ("metrics.jsonl", lines(LARGEST), "18 numbers beyond 1e+300, left out"),
    "large": ("metrics.jsonl", lines(LARGE), ""),
    "many names": ("metrics.jsonl", lines([MANY]), ": 2 values of more than"),
    "long name": ("metrics.jsonl", lines([{"step": 1, "m" * 5000: 1}]), ": 1 values of more than"),
    "long line": (
        "metrics.jsonl",
        "{}\n" + "1" * LINE_BYTES + "\n",
        "metrics.jsonl:2: the file or this line is too long",
    ),
    "alarms": ("alarms.jsonl", lines([{"step": 1, "name": "x"}] * (MOST_ALARMS + 1)), ": 1 after the first 2000"),
    "planned": ("planned.json", json.dumps(PLANNED), ""),
    "deep words": ("words.json", DEEP, "words.json: cannot be read"),
    "endless": ("trace/rank-00000.json", lines(ENDLESS), "its traces cannot be read: OverflowError"),
    "experts": ("experts.jsonl", lines([{"step": 1, "loads": {"1": [1e308, -1]}}, {"step": 2, "loads": [[]]}]), ""),
    "turns": ("samples/step-000001.jsonl", lines(TURNS), ""),
    "sample": ("samples/step-000001.jsonl", lines([{"reward": 1e308, "terms": [1], "token_texts": {}}]), ""),
}


@pytest.mark.parametrize(("name", "content", "said"), CONTENTS.values(), ids=CONTENTS)
def test_content_that_no_run_writes(tmp_path: Path, name: str, content: str, said: str) -> None:
    run = with_machines(made_run(tmp_path / "run"))
    (run / name).write_text(content)
    code, out, errors = report(run)
    assert (code, out[: len(str(run))]) == (0, str(run)), errors
    assert said in errors
    assert "Traceback" not in errors
    assert (run / "report.html").stat().st_size < 1_000_000


@pytest.mark.parametrize("name", [
    "config.yaml", "summary.json", "metrics.jsonl", "alarms.jsonl", "planned.json", "words.json", "experts.jsonl",
    "sft.jsonl", "samples/step-000001.jsonl", "samples/followed-000001.jsonl", "trace/rank-00000.json",
])  # fmt: skip
@pytest.mark.parametrize("put", [pipe_for, folder_for, link_for])
def test_what_is_no_file(tmp_path: Path, name: str, put: Callable[[Path, str], None]) -> None:
    run = with_machines(made_run(tmp_path / "run", samples={2: group(0, "2+3=?", [1.0, 0.0], [["5"], ["6"]])}))
    put(run, name)
    found = read_run(run)
    assert found.name in page_of(title_of([found]), pack([found]))
    assert found.samples.lines == 2
    said = f"{run / name}: is not a file, left out"
    assert said in found.damaged or name.startswith("trace/")


def test_files_without_end_are_read_in_part(tmp_path: Path) -> None:
    run = with_machines(made_run(tmp_path / "run", samples={1: group(0, "2+3=?", [1.0], [["5"]])}))
    names = ("config.yaml", "summary.json", "metrics.jsonl", "samples/step-000001.jsonl", "trace/rank-00001.json")
    for name in names:
        with (run / name).open("r+b") as file:
            file.truncate(1 << 40)  # a hole, of which the disk has nothing
    found = read_run(run)
    assert (len(found.metrics), found.samples.lines) == (9, 1)
    assert [what.partition(":")[0] for what in found.damaged[:3]] == [str(run / name) for name in names[:3]]
    assert "1,048,576 bytes" in found.damaged[0]


def test_many_lines_are_read_in_part(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", samples={1: group(0, "2+3=?", [1.0], [["5"]])})
    names = ("metrics.jsonl", "alarms.jsonl", "experts.jsonl", "samples/step-000001.jsonl")
    for name in names[1:]:
        (run / name).write_text("{}\n" * 50_001)
    (run / names[0]).write_text("x\n" * 20_000)
    found = read_run(run)
    assert (len(found.damaged), len(found.experts), found.samples.lines) == (MOST_NOTES, 50_000, 50_000)
    assert found.damaged_more == 20_000 - MOST_NOTES + 4
    assert pack([found])["runs"][0]["damaged_more"] == 20_000 + 4 - 50


def test_a_run_that_says_it_has_gone_is_refused_in_one_line(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    os.mkfifo(run / "metrics.jsonl")
    code, out, errors = report(run)
    assert (code, out, errors.count("\n")) == (2, "", 1)
    assert "not a run directory" in errors


@pytest.mark.parametrize("port", ["-1", "65536", "99999999999"])
def test_a_port_that_is_none_is_refused_in_one_line(tmp_path: Path, port: str) -> None:
    code, out, errors = report(made_run(tmp_path / "run"), "--serve", "--port", port)
    assert (code, out, errors.count("\n")) == (2, "", 1)


def test_no_text_of_a_run_controls_the_terminal(tmp_path: Path) -> None:
    run = made_run(tmp_path / f"run{LOUD}")
    (run / "config.yaml").write_text(f"a: [{LOUD[-6:]}")
    (run / "summary.json").write_text(json.dumps({"status": LOUD}) + LOUD)
    code, out, errors = report(run)
    assert code == 0
    assert r"\x1b]0;owned\x07\x9b31m\u202e[red]" in out
    assert not {*out, *errors} & {*LOUD[:1], "\x07", "\x9b", "\u202e"}
    (run / "report.html").unlink()
    code, out, errors = report(run, "--out", run)
    assert (code, out, errors.count("\n")) == (2, "", 1)
    assert not {*errors} & {"\x1b", "\x07", "\x9b", "\u202e"}


VALUES: list[Any] = [
    None,
    [],
    {},
    "x",
    -1,
    1e300,
    1e308,
    10**400,
    True,
    [1, [2]],
    {"a": {"b": 1}},
    float("nan"),
    [{"name": 1}],
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: str(value)[:20])
def test_values_of_any_type_are_no_error(tmp_path: Path, value: Any) -> None:
    run = made_run(tmp_path / "run", samples={1: group(0, "2+3=?", [1.0, 0.0], [["5"], ["6"]])})
    summary = json.loads((run / "summary.json").read_text())
    names = (
        *summary,
        "layout",
        "versions",
        "world_size",
        "parameters",
        "stopped_by",
        "held_out_problems",
        "tokens_generated",
    )
    (run / "summary.json").write_text(json.dumps(dict.fromkeys(names, value)))
    plain = value if not isinstance(value, float | int) or value in (-1, 1e300) else 7
    for room in ("run", "algorithm", "data", "model", "reward", "distill"):
        for setting in (None, "name", "trains", "advantage_std", "task", "sources", "terms", "success", "seed"):
            config = {room: plain if setting is None else {setting: plain, "task": "jsonl"}}
            (run / "config.yaml").write_text(json.dumps(config))
            found = read_run(run)
            assert page_of(title_of([found, found]), pack([found, found]))

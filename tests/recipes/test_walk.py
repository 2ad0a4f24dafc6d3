"""Walking through a recipe: stages are done once, changes are noticed, nothing is overwritten, a stop costs nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forks import run_python
from limits import limit
from metric_lines import repeated
from pools import write_pool
from processes import left, tree
from ranks import REPOSITORY
from train_jobs import SMALL, contents, wait_until

from grpo_mega.recipes.commands import settings_as_before
from grpo_mega.recipes.products import checksum
from grpo_mega.recipes.recipe import read_recipe

CHOOSING = """
stages:
  pool:
    samples: runs/none --train 2
  data:
    about: all that is right
    choose: "{pool}"
  readable:
    choose: "{pool} --keep language>=0.9"
"""
RIGHT = ("1+2=3", 5, "stop", 1.0, 1.0)
MIXED = ("1+2= 3", 5, "stop", 1.0, 0.5)
WRONG = ("4", 1, "stop", 0.0, 1.0)


@pytest.fixture
def tool(tmp_path: Path) -> Tool:
    """The command in a folder of its own, with a recipe that needs no model."""
    (tmp_path / "chain.yaml").write_text(CHOOSING)
    write_pool(tmp_path / "mine", {"1+2=?": [RIGHT, MIXED], "1+1=?": [MIXED, WRONG]})
    return Tool(tmp_path)


class Tool:
    """tools/recipe.py, as a user calls it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root = folder, folder / "runs" / "chain"

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Starts it, in a process group of its own."""
        command = [sys.executable, str(REPOSITORY / "tools" / "recipe.py"), words[0], "chain.yaml", *words[1:]]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def __call__(self, *words: str) -> tuple[int, str]:
        """Exit code, and what it prints."""
        done = run_python(REPOSITORY / "tools" / "recipe.py", words[0], "chain.yaml", *words[1:], folder=self.folder)
        return done.returncode, done.stdout + done.stderr

    def rows(self, name: str) -> list[str]:
        """The completions of a data set."""
        return [json.loads(line)["completion"] for line in (self.root / name).read_text().splitlines()]


def test_stages_are_done_once_and_changes_are_noticed(tool: Tool) -> None:
    assert tool("status")[1].splitlines()[0] == f"chain in {tool.root}: 0 of 3 stages are done"
    code, said = tool("replace", "pool", "mine")
    assert code == 0, said
    assert "replaced by hand" in said
    code, said = tool("run")
    assert code == 0, said
    assert "== 2 of 3, data: all that is right" in said
    assert "3 of 3 stages are done" in said
    assert (tool.rows("data.jsonl"), tool.rows("readable.jsonl")) == (["1+2=3", "1+2= 3", "1+2= 3"], ["1+2=3"])
    report = json.loads((tool.root / "stages" / "readable.json").read_text())
    assert report["inputs"]["pool"] == {"path": str(tool.folder / "mine"), "sha256": checksum(tool.folder / "mine")}
    assert report["product"]["sha256"] == checksum(tool.root / "readable.jsonl")
    assert report["achieved"] == {"rows": 1}

    done = contents(tool.root)
    code, said = tool("run")
    assert (code, contents(tool.root)) == (0, done)
    assert "==" not in said

    # Its own product was changed: nothing is begun, the fix is named, and nothing is overwritten by it.
    (tool.root / "readable.jsonl").write_text("mine\n")
    code, said = tool("run")
    assert code == 2
    assert "readable.jsonl, has changed (SHA-256); do it again with --again readable" in said
    assert (tool.root / "readable.jsonl").read_text() == "mine\n"
    code, said = tool("run", "--again", "readable")
    assert code == 0, said
    assert (tool.root / "set-aside" / "readable-1" / "readable.jsonl").read_text() == "mine\n"
    assert contents(tool.root)["readable.jsonl"] == done["readable.jsonl"]

    # The folder may be moved.
    tool.root.rename(tool.folder / "moved")
    code, said = tool("status", "--root", "moved")
    assert (code, said.splitlines()[0]) == (0, f"chain in {tool.folder / 'moved'}: 3 of 3 stages are done"), said
    (tool.folder / "moved").rename(tool.root)

    # What it has read was replaced: all that have read it are named, and --again of the first does all of them.
    write_pool(tool.folder / "other", {"1+2=?": [MIXED], "1+1=?": [("2", 1, "stop", 1.0, 1.0)]})
    assert tool("replace", "pool", "other")[0] == 0
    code, said = tool("run")
    assert code == 2
    for name in ("data", "readable"):
        assert f"{name}: it was made from another pool: {tool.folder / 'mine'}; do it again with --again {name}" in said
    assert tool("run", "--again", "data")[0] == 2, "readable is still made from the former pool"
    code, said = tool("run", "--again", "readable")
    assert code == 0, said
    assert (tool.rows("data.jsonl"), tool.rows("readable.jsonl")) == (["1+2= 3", "2"], ["2"])
    assert (tool.root / "set-aside" / "readable-2").is_dir()


@pytest.mark.long
def test_other_settings_are_noticed(tool: Tool) -> None:
    tool("replace", "pool", "mine")
    assert tool("run")[0] == 0
    code, said = tool("run", "data:--per-problem=1")
    assert code == 2
    assert "data: its settings have changed: nothing became --per-problem=1; do it again with --again data" in said
    code, said = tool("run", "data:--per-problem=1", "--again", "data")
    assert code == 0, said
    assert tool.rows("data.jsonl") == ["1+2=3", "1+2= 3"]


@pytest.mark.long
def test_a_stage_that_fails_ends_it_and_what_a_killed_one_left_is_set_aside(tool: Tool) -> None:
    write_pool(tool.folder / "wrong", {"1+2=?": [WRONG]})
    tool("replace", "pool", "wrong")
    code, said = tool("run")
    assert code == 1
    assert "stage data failed (exit code 2); the same command resumes it" in said
    assert not (tool.root / "stages" / "data.json").exists()
    tool("replace", "pool", "mine")
    (tool.root / "data.jsonl").write_text("of a command that was killed before its report\n")
    code, said = tool("run")
    assert code == 0, said
    assert (tool.root / "set-aside" / "data-1" / "data.jsonl").is_file()
    assert len(tool.rows("data.jsonl")) == 3


def test_what_is_read_from_elsewhere_is_reported_and_a_change_of_it_noticed(tool: Tool) -> None:
    (tool.folder / "chain.yaml").write_text("stages: {data: {choose: mine --per-problem 1}}")
    assert tool("run")[0] == 0
    report = json.loads((tool.root / "stages" / "data.json").read_text())
    assert report["files"] == {"mine": checksum(tool.folder / "mine")}
    shutil.rmtree(tool.folder / "mine")
    write_pool(tool.folder / "mine", {"1+2=?": [MIXED]})
    code, said = tool("run")
    assert code == 2
    assert "data: its input mine has changed (SHA-256); do it again with --again data" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("replace", "pool"), "replace: 1 arguments after the recipe; give a recipe, a stage and a path"),
        (("replace", "pond", "mine"), "stage pond: not in the recipe chain; choose one of pool, data, readable"),
        (("replace", "pool", "nothing"), "nothing does not exist"),
        (
            ("replace", "pool", "chain.yaml"),
            "cannot replace the product of pool; choose another path: the stage makes a folder of samples",
        ),
        (
            ("replace", "data", "mine"),
            "mine: cannot replace the product of data; choose another path: the stage makes a file, JSON Lines",
        ),
        (("again", "data", "pool"), "again: 2 arguments after the recipe; give a recipe and a stage"),
        (("run", "--again", "pond"), "stage pond: not in the recipe chain"),
    ],
)
def test_what_cannot_be_is_named(tool: Tool, words: tuple[str, ...], message: str) -> None:
    code, said = tool(*words)
    assert message in said
    assert code == 2


@pytest.mark.long
def test_what_was_put_in_its_place_by_hand_stays(tool: Tool) -> None:
    """--again of an earlier stage keeps it, and --again of the stage itself does not."""
    (tool.folder / "chain.yaml").write_text(
        "stages:\n  data: {choose: mine}\n  pool: {samples: 'runs/none --data {data}'}\n  last: {choose: '{pool}'}\n"
    )
    assert tool("replace", "pool", "mine")[0] == 0
    assert tool("run")[0] == 0
    assert tool("run", "--again", "data")[0] == 0
    assert {path.name for path in (tool.root / "set-aside").iterdir()} == {"data-1"}
    assert tool("run", "--again", "pool")[0] == 1, "there is no such run"
    assert {path.name for path in (tool.root / "set-aside").iterdir()} == {"data-1", "pool-1", "last-1"}


@pytest.mark.long
def test_a_stage_that_is_begun_again_goes_on_by_the_same_command(tool: Tool) -> None:
    """What it has made since is set aside once more only when it is done."""
    (tool.folder / "chain.yaml").write_text("stages: {pool: {samples: runs/none --train 2}}")
    assert tool("replace", "pool", "mine")[0] == 0
    for count in (1, 1):
        assert tool("run", "--again", "pool")[0] == 1
        (tool.root / "pool").mkdir(exist_ok=True)
        assert len([*(tool.root / "set-aside").iterdir()]) == count
    assert tool("replace", "pool", "mine")[0] == 0


@pytest.mark.long
def test_what_is_to_be_done_again_is_set_aside_and_left_to_what_runs_the_recipe_next(tool: Tool) -> None:
    tool("replace", "pool", "mine")
    assert tool("run")[0] == 0
    code, said = tool("again", "data")
    assert (code, said.splitlines()[0]) == (0, f"chain in {tool.root}: 2 of 3 stages are done"), said
    assert (tool.root / "set-aside" / "data-1" / "data.jsonl").is_file()
    code, said = tool("run")
    assert (code, said.count("==")) == (0, 1), said
    assert "2 of 3, data" in said


def test_a_damaged_report_is_named(tool: Tool) -> None:
    tool("replace", "pool", "mine")
    (tool.root / "stages" / "pool.json").write_text('{"product": 3}')
    code, said = tool("run")
    assert code == 2
    assert "pool.json: not a report of a stage" in said


@pytest.mark.parametrize(
    "changed",
    [
        {"achieved": {"rows": "many"}}, {"achieved": [1]}, {"achieved": {"rows": 1e308}}, {"seconds": "long"},
        {"words": 3}, {"product": []}, {"product": {"path": 3}}, {"files": [1]}, {"inputs": 3, "words": ["mine"]},
    ],
)  # fmt: skip
def test_a_report_of_another_shape_is_named_in_one_line(tool: Tool, changed: dict[str, Any]) -> None:
    tool("replace", "pool", "mine")
    file = tool.root / "stages" / "pool.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    code, said = tool("status")
    assert "Traceback" not in said
    assert (code, "pool.json: not a report of a stage" in said) == (2, True) or "done" in said


def test_no_text_of_a_recipe_controls_the_terminal(tool: Tool) -> None:
    loud = "\x1b]0;owned\x07\x9b31m\u202e"
    tool("replace", "pool", "mine")
    file = tool.root / "stages" / "pool.json"
    report = json.loads(file.read_text())
    for changed in (
        {"achieved": {loud: 3.0}, "words": []},
        {"words": [loud]},
        {loud: loud, "words": 3},
        {"inputs": loud},
    ):
        file.write_text(json.dumps(report | changed))
        _, said = tool("status")
        assert not {*said} & {*loud[:1], "\x07", "\x9b", "\u202e"}
    (tool.folder / "chain.yaml").write_text(f"stages: {{a: {{run: x=1, '{loud[-1]}': 3}}}}")
    code, said = tool("show")
    assert (code, r"\u202e" in said, "\u202e" in said) == (2, True, False)


RUNS = """
stages:
  base:
    run: experiment=tiny {small} run.steps=0
  zero:
    run: experiment=tiny {small} base=none run.init_from={{base}} run.steps=3
  pool:
    samples: "{{zero}} --train 12 --samples 4"
  data:
    choose: "{{pool}} --keep accuracy>=0"
  learned:
    run: experiment=tiny {small} base=none run.init_from={{base}} sft.path={{data}} sft.steps=3 sft.warmup_steps=0
      run.steps=0
"""


@pytest.mark.long
def test_a_chain_that_is_killed_and_stopped_everywhere_ends_as_one_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = " ".join([*SMALL[1:], "layout=single", "run.save_every=1", "run.eval_every=0"])
    chains = []
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "chain.yaml").write_text(RUNS.format(small=small))
        chains.append(Tool(tmp_path / name))
    whole, broken = chains
    code, said = whole("run")
    assert code == 0, said
    assert (whole.root / "chain.png").is_file()

    moments = [
        ("base/pretrain.jsonl", signal.SIGKILL),
        ("zero/checkpoints/step-000001", signal.SIGTERM),
        ("zero/checkpoints/step-000002", signal.SIGKILL),
        ("pool/settings.json", signal.SIGINT),
        ("learned/run.json", signal.SIGUSR1),
    ]
    for path, number in moments:
        process = broken.start("run")
        wait_until(lambda path=path, process=process: (broken.root / path).exists() or process.poll() is not None, path)
        members = tree(process.pid)
        process.send_signal(number)
        said, _ = process.communicate(timeout=limit(300))
        assert process.returncode == (-number if number == signal.SIGKILL else 75), said
        assert left(members) == [], "a process outlives the recipe"
        half = broken("status")
        assert half[0] == 0
        assert "5 of 5" not in half[1]
    code, said = broken("run")
    assert code == 0, said
    for name in ("zero/metrics.jsonl", "learned/sft.jsonl"):
        lines = [[json.loads(line) for line in (each.root / name).read_text().splitlines()] for each in chains]
        without_time = [[repeated(line) for line in of] for of in lines]
        assert without_time[0] == without_time[1]
    rows = [[json.loads(line) for line in (each.root / "data.jsonl").read_text().splitlines()] for each in chains]
    assert rows[0]
    assert [row | {"pool": ""} for row in rows[0]] == [row | {"pool": ""} for row in rows[1]]

    # A recipe that the release before this one has begun goes on.
    file = whole.root / "stages" / "zero.json"
    report = json.loads(file.read_text())
    monkeypatch.chdir(whole.folder)
    recipe = read_recipe(Path("chain.yaml"))
    before = settings_as_before(recipe, recipe.stages["zero"])
    assert before != report["settings"]
    file.write_text(json.dumps(report | {"settings": before}))
    assert whole("run")[0] == 0

    # A file of configs/ that says something else now has the same effect as other settings.
    file.write_text(json.dumps(json.loads(file.read_text()) | {"settings": "0" * 64}))
    code, said = whole("run")
    assert code == 2
    assert "zero: the files of configs/ behind its settings have changed" in said

"""Recipes as files: what they say, what is wrong with them, and that those of the repository can be run."""

from __future__ import annotations

from pathlib import Path

import pytest
from forks import run_python
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from grpo_mega.config.load import config_dir
from grpo_mega.errors import ConfigError, InputError
from grpo_mega.recipes.commands import check, command_of, config_of_pool
from grpo_mega.recipes.progress import progress_of
from grpo_mega.recipes.recipe import Recipe, RecipeStage, read_recipe

RECIPES = sorted((config_dir() / "recipe").glob("*.yaml"))
CHAIN = """
processes: 2
stages:
  base:
    run: experiment=tiny run.steps=0
    about: the first
  pool:
    samples: "{base} --train 8 --samples 2"
    processes: 1
  data:
    choose: "{pool} --keep 'format>=1'"
  learned:
    run: experiment=tiny base=none run.init_from={base} sft.path={data} sft.epochs=1 run.steps=0
"""


def recipe(folder: Path, text: str, **given: object) -> Recipe:
    (folder / "chain.yaml").write_text(text)
    return read_recipe(folder / "chain.yaml", **given)  # type: ignore[arg-type]


def test_a_recipe_is_what_its_file_says(tmp_path: Path) -> None:
    chain = recipe(tmp_path, CHAIN)
    assert (chain.name, chain.root, [*chain.stages]) == (
        "chain",
        Path("runs/chain").absolute(),
        ["base", "pool", "data", "learned"],
    )
    assert chain.stages["base"] == RecipeStage("base", "run", ("experiment=tiny", "run.steps=0"), "the first", 2)
    assert chain.stages["data"] == RecipeStage("data", "choose", ("{pool}", "--keep", "format>=1"), "", 1)
    assert [stage.processes for stage in chain.stages.values()] == [2, 1, 1, 2]
    assert chain.stages["learned"].inputs == ("base", "data")
    assert [stage.name for stage in chain.after("pool")] == ["pool", "data", "learned"]
    assert [stage.name for stage in chain.after("learned")] == ["learned"]
    assert [stage.name for stage in chain.after("base", kept=["data"])] == ["base", "pool", "learned"]
    assert [stage.processes for stage in recipe(tmp_path, CHAIN, processes=4).stages.values()] == [4, 4, 1, 4]


def test_braces_that_name_no_stage_are_for_the_settings(tmp_path: Path) -> None:
    text = "stages: {a: {run: \"x=1 data.question='Q {prompt}' y=${run.name} reward.terms=[{name:mine}]\"}}"
    words = recipe(tmp_path, text).stages["a"].with_products({"a": "never"})
    assert words == ["x=1", "data.question=Q {prompt}", "y=${run.name}", "reward.terms=[{name:mine}]"]


def test_commands_have_the_products_of_earlier_stages_and_a_place_of_their_own(tmp_path: Path) -> None:
    chain = recipe(tmp_path, CHAIN, root=tmp_path / "r")
    commands = {name: command_of(chain, stage, progress_of(chain))[1:] for name, stage in chain.stages.items()}
    torchrun = ["-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-conf=store_type=file", "--nproc-per-node"]
    own = [f"run.root={tmp_path}/r", "run.name=base"]
    assert commands["base"] == [*torchrun, "2", "-m", "grpo_mega.train", "experiment=tiny", "run.steps=0", *own]
    assert commands["pool"][:6] == [*torchrun, "1"]
    assert commands["pool"][7:] == [
        "{base}",
        "--train",
        "8",
        "--samples",
        "2",
        "--trust-run",
        "--out",
        f"{tmp_path}/r/pool",
    ]
    assert commands["data"][1:] == ["{pool}", "--keep", "format>=1", "--output", f"{tmp_path}/r/data.jsonl"]
    assert "sft.path={data}" in commands["learned"]


def test_settings_are_for_all_runs_or_for_one_stage(tmp_path: Path) -> None:
    chain = recipe(tmp_path, CHAIN, settings=["run.seed=3", "learned:run.steps=2", "pool:--temperature=0.5"])
    words = {name: stage.words for name, stage in chain.stages.items()}
    assert words["base"][-1] == "run.seed=3"
    assert words["learned"][-2:] == ("run.seed=3", "run.steps=2")
    assert words["pool"][-1] == "--temperature=0.5"
    assert words["data"] == ("{pool}", "--keep", "format>=1")


@pytest.mark.parametrize(
    ("text", "where", "fact"),
    [
        ("", "", "stages:"),
        ("stages: []", "", "stages:"),
        ("stages: {}", "", "stages:"),
        ("stages: {a: {run: x=1}}\nsteps: 3", ": steps", "unknown"),
        ("stages: {a: {run: x=1}}\nprocesses: 0", ": processes=0", "at least 1"),
        ("stages: {a: {run: x=1, processes: two}}", ": stage a: processes=two", "whole number"),
        ("stages: {A b: {run: x=1}}", ": stage A b", "lower-case letters"),
        ("stages: {stages: {run: x=1}}", ": stage stages", "none of prompt, stages"),
        ("stages: {a: x=1}", ": stage a", "KIND is run, samples, choose"),
        ("stages: {a: {train: x=1, run: y}, b: {about: x}}", ": stage b", "one of run, samples, choose"),
        ("stages: {a: {run: x=1, samples: y}}", ": stage a", "one of"),
        ("stages: {a: {run: [x=1]}}", ": stage a", "one of"),
        ("stages: {a: {run: x=1, when: now}}", ": stage a: when", "unknown"),
        ("stages: {a: {run: 'x={b}'}, b: {run: y=1}}", ": stage a: {b}", "not an earlier stage"),
        ("stages: {a: {run: 'x={a}'}}", ": stage a: {a}", "not an earlier stage"),
        ("stages: {a: {run: run.name=mine}}", ": stage a: run.name=mine", "the recipe decides"),
        ("stages: {a: {samples: runs/x --out y}}", ": stage a: --out", "the recipe decides"),
        ("stages: {a: {run: 'unclosed \" quote'}}", ": stage a: run", "No closing quotation"),
        ("stages: {a: {run", "", "cannot be read"),
        ("stages: &x {a: {run: x=1, about: *x}}", "", "cannot be read: it has YAML aliases: write out their values"),
        ("a: &a [x, x]\nstages: [*a, *a]", "", "cannot be read: it has YAML aliases"),
        ("[" * 1500, "", "cannot be read"),
        ("x: y\n" * 300_000, "", "cannot be read: has more than"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, where: str, fact: str) -> None:
    with pytest.raises(InputError) as error:
        recipe(tmp_path, text)
    problems = error.value.problems if isinstance(error.value, ConfigError) else [error.value]
    [problem] = (one for one in problems if one.where == f"{tmp_path}/chain.yaml{where}")
    assert fact in f"{problem.what}; {problem.fix}"


@pytest.mark.parametrize(
    ("setting", "fix"),
    [
        ("run.seed", "write FIELD=VALUE"),
        ("later:run.seed=1", "choose one of base, pool, data, learned"),
    ],
)
def test_settings_that_fit_nothing_are_named(tmp_path: Path, setting: str, fix: str) -> None:
    with pytest.raises(InputError) as error:
        recipe(tmp_path, CHAIN, settings=[setting])
    assert error.value.where == setting
    assert fix in error.value.fix


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.yaml: no such recipe"):
        read_recipe(tmp_path / "none.yaml")


NAMES = [f"s{i}" for i in range(8)]


@given(st.lists(st.sets(st.integers(0, 7)), min_size=8, max_size=8), st.integers(0, 7))
def test_what_depends_on_a_stage_is_what_can_be_reached_from_it(reads: list[set[int]], chosen: int) -> None:
    graph = {i: {j for j in read if j < i} for i, read in enumerate(reads)}
    stages = {
        NAMES[i]: RecipeStage(NAMES[i], "run", tuple(f"x={{{NAMES[j]}}}" for j in sorted(read)), "", 1)
        for i, read in graph.items()
    }

    def depends(i: int) -> bool:
        return i == chosen or any(depends(j) for j in graph[i])

    found = [stage.name for stage in Recipe("r", Path("r"), stages).after(NAMES[chosen])]
    assert found == [NAMES[i] for i in range(8) if depends(i)]


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_every_run_of_a_recipe_of_the_repository_composes(path: Path) -> None:
    check(read_recipe(path))


def test_pools_of_the_published_chain_split_the_model_as_the_run_before_does() -> None:
    """671 billion parameters are on no single GPU."""
    chain = read_recipe(config_dir() / "recipe" / "r1_671b.yaml")
    found = {name: config_of_pool(chain, stage) for name, stage in chain.stages.items()}
    layouts = {name: config.layout for name, config in found.items() if config}
    assert {name: (own.tp, own.pp, own.cp, own.ep) for name, own in layouts.items()} == {
        "cold_start_pool": (4, 4, 4, 64),
        "pool": (4, 4, 4, 64),
        "teacher_pool": (4, 4, 4, 128),
    }


@pytest.mark.long
def test_every_run_of_the_published_chain_fits_its_machines_and_one_that_does_not_is_named() -> None:
    def plan(*settings: str) -> tuple[int, list[str]]:
        done = run_python("tools/recipe.py", "plan", "r1_671b", *settings)
        return done.returncode, done.stdout.splitlines()

    code, lines = plan()
    runs = [
        stage.name
        for stage in read_recipe(config_dir() / "recipe" / "r1_671b.yaml").stages.values()
        if stage.kind == "run"
    ]
    assert (code, [line.partition(": ")[0] for line in lines]) == (0, runs)
    assert all(": fits: " in line for line in lines)
    code, lines = plan("r1:layout.ep=64")
    assert code == 1
    assert [line.partition(":")[0] for line in lines if "does not fit: pipeline stage" in line] == ["r1"]


def test_every_stage_whose_settings_cannot_be_used_is_named(tmp_path: Path) -> None:
    chain = recipe(tmp_path, CHAIN, settings=["base:run.stepps=3", "learned:algorithm.group_size=0"])
    with pytest.raises(ConfigError) as error:
        check(chain)
    fields = [problem.field for problem in error.value.problems]
    assert fields == ["stage base: run.stepps", "stage learned: algorithm.group_size"]


def test_a_pool_whose_processes_do_not_fit_its_layout_is_named_before_anything_runs(tmp_path: Path) -> None:
    chain = recipe(tmp_path, CHAIN, settings=["pool:layout.tp=2", "pool:layout.sp=true"])
    with refused("stage pool: the world size 1 | not divisible by layout.tp=2"):
        check(chain)
    check(recipe(tmp_path, CHAIN.replace("processes: 1", "processes: 2"), settings=["pool:layout.ep=2"]))

"""Which room may know which: an import that the table does not name is a new dependency, and somebody decides on it."""

from __future__ import annotations

import ast
import functools
import re
import sys
from pathlib import Path

import pytest

HOUSE = Path(__file__).resolve().parents[1]
PACKAGES = {"grpo_mega": HOUSE / "grpo_mega", "grpo_kernels": HOUSE / "kernels" / "grpo_kernels"}

GROUND = {"types", "errors", "config", "platform", "families"}
"""What every other room may know; they know nobody but errors, and the configuration also the
families of models and the judges' tables of words."""
MAY_KNOW: dict[str, set[str]] = {
    # The trainer.
    "grpo_kernels": set(),
    "algorithm": {"types", "grpo_kernels"},
    "types": set(),
    "errors": set(),
    "platform": {"errors"},
    "families": {"errors"},
    "config": {"errors", "families", "judges"},
    "step_ends": {"errors", "types"},
    "data": GROUND | {"judges", "step_ends"},
    "reward": GROUND | {"judges", "step_ends"},
    "observe": GROUND | {"step_ends"},
    "models": GROUND | {"grpo_kernels", "algorithm"},
    "weights": GROUND | {"models"},
    "checkpoint": GROUND | {"models"},
    "convert": GROUND | {"data", "models", "weights", "checkpoint", "observe"},
    "rollout": GROUND | {"models", "weights"},
    "environment": GROUND | {"data", "reward", "rollout", "judges"},
    "evaluate": GROUND | {"data", "models", "weights", "checkpoint", "convert", "rollout", "reward", "judges"},
    "colocation": GROUND | {"algorithm", "models", "weights", "rollout", "observe"},
    "saving": GROUND | {"models", "checkpoint", "observe"},
    "run": GROUND | {"models", "checkpoint", "observe", "saving"},
    "checks": GROUND | {"data", "models", "weights", "checkpoint", "observe"},
    "first_weights": GROUND | {"data", "models", "weights", "checkpoint", "convert"},
    "stages": GROUND
    | {
        "grpo_kernels", "algorithm", "data", "models", "checkpoint", "rollout", "environment", "evaluate", "observe",
        "run", "step_ends",
    },
    "assemble": GROUND
    | {
        "data", "models", "checks", "first_weights", "convert", "rollout", "environment", "colocation", "reward",
        "observe", "run", "stages",
    },
    "train": GROUND | {"checks", "data", "reward", "rollout", "observe", "assemble", "forecast", "show"},
    # What stands beside it.
    "judges": {"errors", "platform"},
    "forecast": GROUND
    | {
        "grpo_kernels", "algorithm", "data", "models", "weights", "checkpoint", "rollout", "colocation", "reward",
        "judges", "environment", "observe", "checks",
    },
    "show": GROUND | {"evaluate", "observe"},
    "recipes": GROUND | {"data", "reward", "evaluate", "observe", "show", "step_ends"},
    "new": GROUND | {"data", "reward", "environment", "observe", "forecast"},
}  # fmt: skip
"""A room is a folder or a file of `grpo_mega`, or the kernels."""
BESIDE = {"forecast", "show", "recipes"}
"""Rooms that no room of the trainer knows; what people start, `train` and `new`, may."""
FORMER = {"grpo_mega/observe/follow.py", "grpo_mega/observe/status.py"}
"""Files that keep the former names of commands working, and contain nothing else."""


def rooms_known() -> dict[str, dict[str, str]]:
    """{room: {room it imports: the first file that does}}"""
    known: dict[str, dict[str, str]] = {}
    for package, folder in PACKAGES.items():
        for file in sorted(folder.rglob("*.py")):
            if file.relative_to(HOUSE).as_posix() in FORMER:
                continue
            parts = (package, *file.relative_to(folder).with_suffix("").parts)
            here = room(parts)
            for module in imported(ast.parse(file.read_text())):
                there = room(tuple(module.split(".")))
                if there and here and there != here:
                    known.setdefault(here, {}).setdefault(there, str(file.relative_to(HOUSE)))
    return known


def imported(tree: ast.AST) -> list[str]:
    """Every module that a file names in an import, wherever in the file it stands, except for types alone."""
    found: list[str] = []
    for_types = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    unneeded = {id(inner) for node in for_types for inner in ast.walk(node)}
    for node in (node for node in ast.walk(tree) if id(node) not in unneeded):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def room(parts: tuple[str, ...]) -> str | None:
    """The room of a module's dotted name; None for what is not ours, and for the package itself.

    Families of models are a room of their own: unlike the models' room, theirs knows nobody, and torch neither.
    """
    if parts[0] == "grpo_kernels":
        return "grpo_kernels"
    if parts[0] != "grpo_mega" or len(parts) < 2 or parts[1] == "__init__":
        return None
    return "families" if parts[1:3] == ("models", "families") else parts[1]


def test_rooms_know_only_what_the_table_allows() -> None:
    broken = [
        f"{file}: {here} may not know {there}"
        for here, others in rooms_known().items()
        for there, file in others.items()
        if there not in MAY_KNOW[here]
    ]
    assert not broken, "\n".join(broken)


def test_the_table_allows_nothing_that_nobody_needs() -> None:
    known = rooms_known()
    needless = {here: MAY_KNOW[here] - GROUND - set(known.get(here, {})) for here in MAY_KNOW}
    assert not {here: rooms for here, rooms in needless.items() if rooms}


def test_the_table_has_no_circle() -> None:
    left = {here: set(others) for here, others in MAY_KNOW.items()}
    while free := [here for here, others in left.items() if not others & left.keys()]:
        for here in free:
            del left[here]
    assert not left, f"rooms that know each other in a circle: {sorted(left)}"


def test_only_assemble_names_stages() -> None:
    assert [here for here, others in rooms_known().items() if "stages" in others] == ["assemble"]


def test_the_trainer_knows_nothing_of_what_stands_beside_it() -> None:
    assert {here for here, others in MAY_KNOW.items() if others & BESIDE} <= {*BESIDE, "train", "new"}


def test_the_loop_of_grpo_is_the_algorithm_alone() -> None:
    """It reads beside the paper: `run.phase` stops, times and beats, so nothing of these is between the lines."""
    loop = (PACKAGES["grpo_mega"] / "stages" / "grpo.py").read_text()
    for word in ("stopping", "timer", "beat", "isinstance", "barrier", "Stream(", "Engine"):
        assert word not in loop, word


@pytest.mark.parametrize(
    ("package", "allowed"),
    [("algorithm", {"torch", "grpo_kernels", "grpo_mega"}), ("grpo_kernels", {"torch", "triton", "grpo_kernels"})],
)
def test_formulas_know_only_torch(package: str, allowed: set[str]) -> None:
    """And Python's own modules; which rooms of `grpo_mega` they know, the table says."""
    folder = PACKAGES.get(package, PACKAGES["grpo_mega"] / package)
    modules = {name.split(".")[0] for file in folder.rglob("*.py") for name in imported(ast.parse(file.read_text()))}
    assert not modules - allowed - sys.stdlib_module_names


def test_no_two_files_of_tests_have_one_name() -> None:
    """Rooms of tests are no packages: of two files of one name, pytest and imports know only the first."""
    files = (HOUSE / "tests").rglob("*.py")
    names = [file.name for file in files if file.name not in ("conftest.py", "__init__.py")]
    assert sorted(names) == sorted({*names})


def test_every_long_suite_of_the_makefile_has_a_folder() -> None:
    """A room that moves would otherwise leave a suite with nothing to run, and that only `make test-all` would say."""
    found = re.search(r"^LONG_ROOMS := (.*)$", (HOUSE / "Makefile").read_text(), re.MULTILINE)
    assert found
    tests = HOUSE / "tests"
    for room in found[1].split():
        assert len([*tests.glob(room), *tests.glob(f"*/{room}")]) == 1, room


def test_every_name_that_tests_import_from_ours_exists() -> None:
    """Also of suites that `make test` leaves out, and that would find out only when somebody runs them."""
    tests = [file for file in (HOUSE / "tests").rglob("*.py") if file.name not in ("conftest.py", "__init__.py")]
    ours = {file.stem: file for file in tests}
    for package, folder in PACKAGES.items():
        for file in folder.rglob("*.py"):
            parts = (package, *file.relative_to(folder).with_suffix("").parts)
            ours[".".join(parts).removesuffix(".__init__")] = file
    missing = [
        f"{file.relative_to(HOUSE)}: {node.module}.{alias.name}"
        for file in tests
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module in ours
        for alias in node.names
        if f"{node.module}.{alias.name}" not in ours and alias.name not in defined(ours[node.module])
    ]
    assert not missing


@functools.cache
def defined(file: Path) -> set[str]:
    """Names that a module binds anywhere in its text."""
    tree = ast.parse(file.read_text())
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return names


LONGER: dict[str, str] = {}
"""File and name of a function that may have more than sixty lines -> why it is not split."""


def test_no_function_is_longer_than_sixty_lines() -> None:
    """As CONTRIBUTING.md says, docstring included; `LONGER` has the exceptions, and no others."""
    longer = {
        f"{file.relative_to(HOUSE).as_posix()}: {node.name}"
        for folder in (*PACKAGES.values(), HOUSE / "tools")
        for file in folder.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and lines_of(node) > 60
    }
    assert longer == {*LONGER}


def lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Number of lines of a function, from `def` to its last statement."""
    return (node.end_lineno or node.lineno) - node.lineno + 1

"""constraints-gpu.txt agrees with every other place that names a version of one of its packages."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from ranks import REPOSITORY

from grpo_mega.forecast.doctor.packages import PACKAGES
from grpo_mega.rollout.sglang.release import TESTED

LINES = [line for line in (REPOSITORY / "constraints-gpu.txt").read_text().splitlines() if line and line[0] != "#"]
LOCK = {name: Version(release) for name, _, release in (line.partition("==") for line in LINES)}
PAGES = ("first_gpu.md", "quickstart.md", "clusters.md")


def declared() -> list[Requirement]:
    """What pyproject.toml asks for, in all extras but those that only tests and documentation have."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    listed = [
        *project["dependencies"],
        *(one for name in ("data", "gpu", "puzzles", "trackers") for one in extras[name]),
    ]
    return [Requirement(one) for one in listed]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def written(path: str) -> list[Requirement]:
    """Locked packages that a file names with bounds."""
    text = (REPOSITORY / path).read_text()
    bounds = r"(?:\[[\w,]+\])?(?:[<>=~]=?[\d.*]+,?)+"
    return [Requirement(one) for name in LOCK for one in re.findall(rf"(?<![\w.-]){name}{bounds}", text)]


def test_each_package_has_one_version_and_its_canonical_name() -> None:
    assert len(LOCK) == len(LINES) > 200
    assert [name for name in LOCK if name != canonical(name)] == []


@pytest.mark.parametrize("requirement", declared(), ids=str)
def test_what_the_project_asks_for_is_there(requirement: Requirement) -> None:
    assert LOCK[canonical(requirement.name)] in requirement.specifier


@pytest.mark.parametrize("path", ["README.md", "Makefile", *(f"docs/{page}" for page in PAGES)])
def test_no_command_names_another_version(path: str) -> None:
    for requirement in written(path):
        if not of_cpus(path, requirement):
            assert LOCK[requirement.name] in requirement.specifier, f"{path}: {requirement}"


def of_cpus(path: str, requirement: Requirement) -> bool:
    """Whether the Makefile has it for environments of CPU builds: of torch, and what is released beside that torch."""
    return path == "Makefile" and requirement.name in ("torch", "triton", "torchvision")


def test_the_release_of_sglang_is_the_one_that_is_tested() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    assert {str(LOCK["sglang"]), TESTED} == set(re.findall(r"^SGLANG := (\S+)", makefile, re.MULTILINE))


def test_what_sglang_pins_is_tested_on_cpus_as_well() -> None:
    constraints = (REPOSITORY / "tests" / "sglang" / "constraints.txt").read_text()
    for name in ("transformers", "tokenizers", "xgrammar"):
        assert f"\n{name}=={LOCK[name]}\n" in constraints


def test_the_doctor_installs_what_is_locked() -> None:
    for package in PACKAGES:
        if "pip install" in package.install:
            assert LOCK[package.name] in SpecifierSet(package.bounds)


def test_one_page_has_the_commands_without_a_version_and_others_link_to_it() -> None:
    texts = {page: (REPOSITORY / "docs" / page).read_text() for page in PAGES}
    commands = r"^python3 -m venv --clear \.venv.*?^touch .venv/.ready"
    found = {page: re.findall(commands, text, re.DOTALL | re.MULTILINE) for page, text in texts.items()}
    [install] = found.pop("first_gpu.md")
    assert not [page for page, commands in found.items() if commands or "(first_gpu.md#before)" not in texts[page]]
    installs = [line for line in install.splitlines() if "pip install -c constraints-gpu.txt" in line]
    assert len(installs) == 2
    assert "==" not in install

"""What documents, `make help`, comments of scripts and docstrings of tools name: files, targets, groups, settings."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

from documents import CHECKED, code, text_without_blocks
from ranks import REPOSITORY

from grpo_mega.config.load import groups, settings

TOP = "grpo_mega|kernels|configs|docs|slurm|tests|tools"
ENDINGS = "py|sh|md|yaml|env|txt|cu|cuh|cpp|png|toml"
FILE = re.compile(rf"(?<![\w/~$.{{-])((?:[\w.-]+/)*[\w-]+\.(?:{ENDINGS})|(?:{TOP})/[\w/]*)(?![\w/]|\.\w)")
SETTING = re.compile(r"(?<![\w./-])[+~]{0,2}([a-z_]+)((?:\.[a-z_0-9]+)*)(?:=([^\s'\"`,;)]*))?")

NOT_OURS = {
    "my_rewards.py": "the reader writes it",
    "my_tools.py": "the reader writes it",
    "my.yaml": "the reader writes it",
    "slurm/clusters/mine.env": "the reader makes it",
    "budgets.png": "an evaluation leaves it",
    "curves.png": "a run leaves it",
    "chain.png": "a recipe leaves it",
    "report.txt": "a job leaves it",
    "job-12/report.txt": "a job leaves it",
    "kernels.png": "tools/bench_kernels.py writes it",
    "rehearsed.png": "tools/rehearse.py writes it",
    "summary.md": "tools/gpu_smoke.py writes it",
    "slurm/NAME.sh": "any of the scripts",
}
"""Files that are named and that the repository does not have."""


def named_in() -> list[tuple[str, str]]:
    """(where, text) of all that is held to this: code in documents; comments, docstrings and help as they are."""
    lines = [(f"{path.name}:{number}", text) for path in CHECKED for number, text in code(path)]
    scripts = [path for path in sorted((REPOSITORY / "slurm").rglob("*.*")) if "__pycache__" not in path.parts]
    for path in [REPOSITORY / "Makefile", *scripts]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.match(r"\s*# ", line):
                lines.append((f"{path.relative_to(REPOSITORY)}:{number}", line))
    for path in sorted((REPOSITORY / "tools").glob("*.py")):
        lines += [(f"tools/{path.name}", line) for line in path.read_text().split('"""')[1].splitlines()]
    helped = subprocess.run(["make", "-s", "help"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return lines + [("make help", line) for line in helped.stdout.splitlines()]


TEXT = named_in()


@cache
def tracked() -> frozenset[str]:
    """Every file and folder of the repository, by each end of its path: `a/b.py` and `b.py`; those to be added too."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    paths = {Path(line) for line in listed.splitlines()}
    paths |= {parent for path in paths for parent in path.parents}
    return frozenset("/".join(path.parts[start:]) for path in paths for start in range(len(path.parts)))


def test_files_exist() -> None:
    named = {(where, name) for where, text in TEXT for name in FILE.findall(text)}
    missing = {(where, name) for where, name in named if name.rstrip("/") not in tracked() | NOT_OURS.keys()}
    assert not missing, sorted(missing)
    assert len(named) > 100
    assert not NOT_OURS.keys() - {name for _, name in named}, "nobody names these any more"


def test_links_lead_somewhere() -> None:
    links = [(path, link) for path in CHECKED for link in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text())]
    assert len(links) > 20
    assert not [(path.name, link) for path, link in links if not (path.parent / link).exists()]


def test_the_index_has_every_page() -> None:
    folder = REPOSITORY / "docs"
    linked = set(re.findall(r"\]\((\w+\.md)\)", (folder / "README.md").read_text()))
    assert linked == {path.name for path in folder.glob("*.md")} - {"README.md"}


def test_anchors_are_headings() -> None:
    """As GitHub makes them: small letters, hyphens for spaces, no other marks."""
    found = [
        (path, target, anchor)
        for path in CHECKED
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", path.read_text())
    ]
    assert len(found) > 10
    wrong = []
    for path, target, anchor in found:
        lines = [line for _, line in text_without_blocks((path.parent / target) if target else path)]
        titles = [line.lstrip("#").strip().lower() for line in lines if line.startswith("#")]
        if anchor not in {re.sub(r"[^\w -]", "", title).replace(" ", "-") for title in titles}:
            wrong.append(f"{path.name}: {target}#{anchor}")
    assert not wrong, wrong


def test_make_targets_exist() -> None:
    database = subprocess.run(["make", "-pRrq", ":"], cwd=REPOSITORY, capture_output=True, text=True).stdout
    targets = set(re.findall(r"^([\w./-]+):(?!=)", database, re.MULTILINE))
    named = {(where, name) for where, text in TEXT for name in re.findall(r"\bmake ([a-z][\w-]*|\.\S+/\S+)", text)}
    prose = {"make help"}  # `slurm` and `tools` write sentences, and in a document a command stands in code
    missing = {(where, name) for where, name in named if name not in targets and (".md" in where or where in prose)}
    assert not missing, sorted(missing)
    assert {"train", "test", "test-all", "test-sglang", "lint", ".venv/.ready"} <= {name for _, name in named}


def test_options_of_groups_exist() -> None:
    known = groups()
    known["experiment"] += [name for _, text in TEXT for name in re.findall(r"grpo_mega\.new (\w+)", text)]
    named = {
        (where, group, option)
        for where, text in TEXT
        for group, rest, option in SETTING.findall(text)
        if not rest and group in known and re.fullmatch(r"[a-z]\w*", option)
    }
    assert {"layout", "experiment", "model", "data"} <= {group for _, group, _ in named}
    assert not [f"{where}: {group}={option}" for where, group, option in named if option not in known[group]]


def test_settings_are_in_the_schema() -> None:
    known = set(settings())
    folders = {name[:end] for name in known for end in range(len(name)) if name[end] == "."}
    # Arguments of others, lists, files, and a method of runs that is named like a setting.
    free = re.compile(
        r"rollout\.sglang\.arguments\.\w+|data\.sources\.\w+\.options\.\w+|reward\.terms.*|"
        r"\w+(\.\w+)*\.(jsonl?|yaml|py|md)|run\.phase"
    )
    named = {
        (where, room + rest)
        for where, text in TEXT
        for room, rest, _ in SETTING.findall(text)
        if rest and room in folders and not free.fullmatch(room + rest)
    }
    assert len(named) > 50
    named = {(where, re.sub(r"^data\.sources\.\w+", "data.sources.NAME", name)) for where, name in named}
    assert not sorted((where, name) for where, name in named if name not in known | folders)

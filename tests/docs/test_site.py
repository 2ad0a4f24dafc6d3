"""The documents as a web site: every link and picture of every page leads somewhere, and a broken one fails it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from limits import limit
from ranks import REPOSITORY

pytest.importorskip("mkdocs", reason="pip install -e '.[docs]'")


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=limit(120))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The repository's files, to be changed."""
    root = tmp_path / "repository"
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.splitlines():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(REPOSITORY / name, root / name)
    return root


def test_every_page_is_built_and_every_link_leads_somewhere(tmp_path: Path) -> None:
    done = build(REPOSITORY, tmp_path)
    assert done.returncode == 0, done.stderr
    pages = [*tmp_path.rglob("*.html")]
    assert {page.stem for page in tmp_path.glob("*.html")} >= {
        "about", "contributing", *(path.stem for path in (REPOSITORY / "docs").glob("*.md") if path.stem != "README")
    }  # fmt: skip
    targets = {
        (page.name, target, (page.parent / target).resolve())
        for page in pages
        for target in re.findall(r'(?:href|src)="(?!https?:|#|mailto:|/)([^"#?]+)', page.read_text())
    }
    assert len(targets) > 500
    assert not [(page, target) for page, target, path in targets if not path.exists()]
    assert all(page.read_text().count('<link id="hljs-light">') == 1 for page in tmp_path.glob("*.html"))
    separator = json.loads((tmp_path / "search" / "search_index.json").read_text())["config"]["separator"]
    assert re.split(separator, "optimizer.warmup_steps=5") == ["optimizer", "warmup", "steps", "5"]
    assert "def experience" in (tmp_path / "source" / "grpo_mega" / "stages" / "grpo.py.html").read_text()


BROKEN = {
    "no_such_page.md": "[x](no_such_page.md)",
    "no-such-heading": "[x](tiny.md#no-such-heading)",
    "no_such_file.py": "[x](../grpo_mega/no_such_file.py)",
    "no_such_picture.png": "![x](images/no_such_picture.png)",
}


def test_every_kind_of_broken_link_fails_the_build(copy: Path, tmp_path: Path) -> None:
    with (copy / "docs" / "running.md").open("a") as page:
        page.write("".join(f"\n{link}\n" for link in BROKEN.values()))
    done = build(copy, tmp_path / "site")
    assert done.returncode == 1, done.stderr
    warned = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    assert [sum(name in line for line in warned) for name in BROKEN] == [1] * len(BROKEN), done.stderr
    assert len(warned) == len(BROKEN), done.stderr

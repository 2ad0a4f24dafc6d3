"""The documents as a web site: every link and picture of every page leads somewhere, and a broken one fails it."""

from __future__ import annotations

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


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository's files, to be changed."""
    root = tmp_path_factory.mktemp("repository")
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
    assert "def experience" in (tmp_path / "source" / "grpo_mega" / "stages" / "grpo.py.html").read_text()


@pytest.mark.parametrize(
    "link",
    [
        "[x](no_such_page.md)",
        "[x](tiny.md#no-such-heading)",
        "[x](../grpo_mega/no_such_file.py)",
        "![x](images/no_such_picture.png)",
    ],
)
def test_a_broken_link_fails_the_build(copy: Path, tmp_path: Path, link: str) -> None:
    page = copy / "docs" / "running.md"
    before = page.read_text()
    page.write_text(f"{before}\n{link}\n")
    done = build(copy, tmp_path)
    page.write_text(before)
    assert done.returncode == 1, done.stderr
    assert "no" in done.stderr
    assert "such" in done.stderr

"""summary.json: ordered for people, valid for programs."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_mega.observe.summary import versions, write_summary


def test_what_people_look_for_comes_first(tmp_path: Path) -> None:
    summary = {"zebra": 1, "versions": {"python": "3"}, "apple": None, "steps": 3, "status": "completed"}
    write_summary(tmp_path, summary)
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written == summary
    assert list(written) == ["status", "steps", "versions", "apple", "zebra"]


@pytest.mark.parametrize("value", [math.nan, {"generate": math.inf}, {1, 2}])
def test_what_json_cannot_hold_is_named_and_the_old_summary_stays(tmp_path: Path, value: object) -> None:
    write_summary(tmp_path, {"status": "running"})
    with pytest.raises(ValueError, match="'seconds'"):
        write_summary(tmp_path, {"status": "completed", "seconds": value})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"status": "running"}


def test_versions_names_what_is_installed() -> None:
    found = versions()
    assert found["python"] == platform.python_version()
    assert found["megatron-core"] == importlib.metadata.version("megatron-core")


@pytest.mark.parametrize(
    ("files", "expected"), [("apex/optimizers/__init__.py,,\n", "0.1"), ("apex/auth.py,,\n", None)]
)
def test_only_nvidias_apex_counts(tmp_path: Path, files: str, expected: str | None) -> None:
    info = tmp_path / "apex-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.1\n")
    (info / "RECORD").write_text(files)
    module = tmp_path / files.partition(",")[0]
    module.parent.mkdir(parents=True)
    module.touch()
    program = (
        "import sys, json; sys.path[:0] = sys.argv[1:]\n"
        "from grpo_mega.observe.summary import versions\n"
        "assert not {'torch', 'apex'} & set(sys.modules)\n"
        "print(json.dumps(versions()))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout).get("apex") == expected

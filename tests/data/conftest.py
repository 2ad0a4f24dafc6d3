"""Released chat templates, for the tests of this folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def public(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with templates, as TRL ships them. None of their text is in this repository."""
    target = tmp_path_factory.mktemp("trl")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, "trl==1.16.0"]
    if (installed := subprocess.run(install, capture_output=True, text=True)).returncode:
        pytest.skip(f"cannot be installed: {installed.stderr[-500:]}")
    return target / "trl" / "chat_templates"

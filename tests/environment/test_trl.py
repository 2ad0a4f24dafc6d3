"""The class of docs/environments.md is an environment of TRL, too."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import REPOSITORY

PACKAGES = ["trl==1.16.0", "datasets==5.2.0", "dill", "multiprocess", "xxhash", "pandas", "python-dateutil", "six"]
"""TRL and the dependencies that .venv lacks. They are installed with --no-deps, so that pip does not replace torch."""


@pytest.mark.long
def test_the_documented_class_runs_in_trl(tmp_path: Path) -> None:
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "trl", *PACKAGES]
    if (installed := subprocess.run(install, capture_output=True, text=True)).returncode:
        pytest.skip(f"cannot be installed: {installed.stderr[-500:]}")
    documented = (REPOSITORY / "docs" / "environments.md").read_text()
    ((name, source),) = re.findall(r"^```python\n# (bisect_game\.py)\n(.*?)^```$", documented, re.DOTALL | re.MULTILINE)
    (tmp_path / name).write_text(source)
    paths = {"PYTHONPATH": f"{tmp_path / 'trl'}:{tmp_path}", "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    job = [sys.executable, Path(__file__).with_name("trl_job.py"), tmp_path / "out"]
    ran = subprocess.run(job, env=os.environ | paths, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["games"] == [[3, False], [3, False], [16, True], [16, True]]
    assert found["log"]["rewards/Bisect/mean"] == 0.5
    assert found["log"]["tools/call_frequency"] == 2
    assert found["log"]["tools/failure_frequency"] == 0

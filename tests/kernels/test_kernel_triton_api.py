"""The public functions on the Triton kernels, run by Triton's interpreter, give what they give in plain torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from limits import limit

pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.long
def test_in_the_interpreter() -> None:
    job = Path(__file__).with_name("triton_api_job.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(job)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=limit(300),
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]

"""What the processes that write a checkpoint report comes back, by way of a process that knows nothing of torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_reports_come_back_without_the_program_being_run_again_or_torch_imported() -> None:
    program = Path(__file__).parent / "unguarded_program.py"
    made = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stderr
    assert made.stdout.splitlines() == [
        "[MetadataIndex(fqn='weight', offset=None, index=None)]",
        "OSError(28, 'No space left on device')",
        "libraries of torch in the helper: 0",
    ]

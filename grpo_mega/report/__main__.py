"""Writes the page about a run that goes on into its directory: `python -m grpo_mega.report RUN`.

The run itself starts it (`observe/background_report.py`). People have tools/report.py, which says more.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from grpo_mega.report.page import write_own_report

if __name__ == "__main__":
    os.nice(10)  # training comes first
    write_own_report(Path(sys.argv[1]))

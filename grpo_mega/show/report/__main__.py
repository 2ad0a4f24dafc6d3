"""Writes the page about a live run into its directory: `python -m grpo_mega.show.report RUN --parent ID`.

The run starts this process (`BackgroundReport`); users have tools/report.py, which prints more.
"""

from __future__ import annotations

import sys
from pathlib import Path

from grpo_mega.platform.orphans import come_after

if __name__ == "__main__":
    run, _, parent = sys.argv[1:]
    come_after(int(parent))
    # Imported only now: it takes a while, in which the parent may end, and this process with it.
    from grpo_mega.show.report.page import write_own_report

    write_own_report(Path(run))

"""The console of real runs in a real terminal, as tmux shows it: whole and calm at any time, and gone at the end."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from train_jobs import REPOSITORY, SMALL, wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed (apt-get install tmux)"),
]
RUN = [*SMALL, "layout=single", "run.steps=8", "run.eval_every=4", "run.save_every=4", "run.print_every=2"]


def screens(root: Path, columns: int) -> tuple[list[str], str]:
    """What a terminal of 30 lines showed while a run went on, each screen once; and all it showed after its end, what
    has scrolled away included."""
    server = ["tmux", "-u", "-S", str(root / f"socket{columns}"), "-f", "/dev/null"]
    command = [sys.executable, "-m", "grpo_mega.train", *RUN, f"run.root={root / 'runs'}", f"run.name=at{columns}"]
    own = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
    shell = f"{shlex.join(command)}; echo ended with $?; cat"  # which keeps the terminal
    size = ["-x", str(columns), "-y", "30"]
    subprocess.run([*server, "new-session", "-d", *size, shell], cwd=root, env=os.environ | own, check=True)
    seen: dict[str, None] = {}

    def captured(*more: str) -> str:
        shown = subprocess.run([*server, "capture-pane", "-p", *more], capture_output=True, text=True, check=True)
        return shown.stdout.rstrip()

    def ended() -> bool:
        seen[captured()] = None
        return "ended with" in captured()

    try:
        wait_until(ended, "the run has not ended", pause=0.1)
        return [*seen], captured("-S", "-")
    finally:
        subprocess.run([*server, "kill-server"], check=True)


@pytest.mark.parametrize("columns", [80, 160])
def test_the_panel_is_whole_whenever_it_is_looked_at_and_gone_at_the_end(tmp_path: Path, columns: int) -> None:
    seen, last = screens(tmp_path, columns)
    panels = []
    for screen in seen:
        lines = screen.splitlines()
        tops, ends = ([i for i, line in enumerate(lines) if line.startswith(corner)] for corner in "╭╰")
        assert len(tops) <= 1, f"no frame is left of an earlier one:\n{screen}"
        if tops and ends and lines[ends[0]].endswith("╯"):  # else it was being drawn
            panels.append(lines[tops[0] : ends[0] + 1])
            assert len(lines) == ends[0] + 1, f"nothing is below the panel:\n{screen}"
    assert len(panels) > 5
    for panel in panels:
        assert {len(line) for line in panel} == {columns - 1}, "\n".join(panel)
        assert all(line[0] == line[-1] == "│" for line in panel[1:-1]), "\n".join(panel)
    text = "\n".join(line for panel in panels for line in panel)
    for word in ("│ pretrain ", "│ run ", "reward ", "▁", " left "):
        assert word in text, f"{word} in\n{text}"
    # Which phases are caught depends on the machine: they take a fraction of a second.
    assert re.search(r"│ (generate|reward|logprobs|update|evaluate|checkpoint) +━", text), text
    assert "╭" not in last
    assert "│" not in last
    starting = [re.match(r"grpo_mega is starting: libraries, settings, data  (\d:\d\d)", screen) for screen in seen]
    assert len({line[1] for line in starting if line}) > 1, "while libraries are loaded its clock goes on"
    assert last.startswith("grpo_mega is starting")
    assert f"at{columns} completed: 8 steps" in last
    assert last.endswith("ended with 0")

"""Boxes and ranks that die: what ran is run again or is known to be lost, and nothing is left of it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from limits import limit
from ranks import REPOSITORY

from grpo_mega.judges.sandbox import Limits, Sandbox

ABOVE = {"bubblewrap": 3, "landlock": 2}
"""Processes of a box besides the program's: what starts or guards it, the box, and a process 1 of namespaces."""


def boxes_of(process: int) -> list[psutil.Process]:
    """All processes that a process has started, and theirs."""
    return psutil.Process(process).children(recursive=True)


def ended(processes: list[psutil.Process]) -> bool:
    """Whether all of them end within a minute."""
    _, alive = psutil.wait_procs(processes, timeout=limit(60))
    return not alive


def test_a_box_that_dies_is_replaced(sandbox: Sandbox) -> None:
    others = boxes_of(os.getpid())  # those of other tests, and programs that they keep
    one = Sandbox(boxes=1, mechanism=sandbox.mechanism)
    one.python("")
    for process in boxes_of(os.getpid()):
        if process not in others:
            process.kill()
    assert one.python("print(1)").stdout == b"1\n"
    one.close()


def lose_box(others: set[int]) -> list[psutil.Process]:
    """Kills the process of a box in which a program runs, as the kernel does; what was there, `others` aside."""
    end = time.monotonic() + limit(60)
    while time.monotonic() < end:
        for box in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                inside = box.children(recursive=True)
                if box.pid not in others and len(inside) > 1:
                    inside[0].kill()
                    return [box, *inside]
        time.sleep(0.02)
    raise AssertionError("no program began")


def test_a_program_whose_box_dies_runs_again_in_another(sandbox: Sandbox) -> None:
    one = Sandbox(boxes=1, mechanism=sandbox.mechanism)
    others = {process.pid for process in boxes_of(os.getpid())}
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(one.python, "import time; time.sleep(1); print(1)")
        lost = lose_box(others)
        assert running.result().stdout == b"1\n"
    assert ended(lost), "what the lost box was running is still there"
    one.close()


def test_what_a_program_of_a_lost_box_has_started_ends(sandbox: Sandbox) -> None:
    """The kernel ends only the box's own children; what they have started, closing the lost box ends."""
    one = Sandbox(boxes=1, mechanism=sandbox.mechanism)
    others = {process.pid for process in boxes_of(os.getpid())}
    source = "import os, time\nfor _ in range(3):\n    if os.fork() == 0: break\ntime.sleep(1000)"
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(one.python, source, limits=Limits(wall_seconds=limit(2)))
        end = time.monotonic() + limit(60)
        started = 0
        while started < 4 and time.monotonic() < end:
            boxes = [box for box in psutil.Process().children() if box.pid not in others]
            started = sum(len(box.children(recursive=True)) for box in boxes) + 1 - ABOVE[sandbox.mechanism]
            time.sleep(0.02)
        lost = lose_box(others)
        assert len(lost) >= 5, "the program did not fork before its box was lost"
        assert running.result().status == "time", "it ran again, in another box"
    assert ended(lost)
    one.close()


def test_a_program_that_loses_two_boxes_is_not_run_again(sandbox: Sandbox) -> None:
    one = Sandbox(boxes=1, mechanism=sandbox.mechanism)
    others = {process.pid for process in boxes_of(os.getpid())}
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(one.python, "import time; time.sleep(1000)", limits=Limits(wall_seconds=1000))
        lost = lose_box(others)
        lost += lose_box(others | {process.pid for process in lost})
        outcome = running.result()
    assert outcome.status == "lost"
    assert outcome.reason
    assert ended(lost)
    assert one.python("print(1)").stdout == b"1\n"
    one.close()


def test_closing_ends_all_boxes(sandbox: Sandbox) -> None:
    one = Sandbox(boxes=1, mechanism=sandbox.mechanism)
    before = {process.pid for process in boxes_of(os.getpid())}
    one.python("")
    mine = [process for process in boxes_of(os.getpid()) if process.pid not in before]
    assert mine
    one.close()
    assert ended(mine)
    assert one.python("print(1)").stdout == b"1\n"
    mine = [process for process in boxes_of(os.getpid()) if process.pid not in before]
    del one
    gc.collect()
    assert ended(mine)


RANK = """
import os, sys, threading, time
from grpo_mega.judges.sandbox import Limits, Sandbox
sandbox = Sandbox(boxes=2, mechanism=sys.argv[1])
sandbox.python("")
program = '''
import os, time
for _ in range(3):
    if os.fork() == 0: break
try: os.setsid()
except OSError: pass
time.sleep(1000)
'''
given = {"limits": Limits(wall_seconds=1000), "files": {"a": b""}}
threading.Thread(target=sandbox.python, args=(program,), kwargs=given).start()
if sys.argv[2] == "fork" and os.fork() == 0:  # a fork keeps the rank's sockets open
    time.sleep(1000)
print("ready", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("how", [pytest.param("alone", marks=pytest.mark.long), "fork"])
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_rank_that_is_killed_leaves_no_process(sandbox: Sandbox, number: signal.Signals, how: str) -> None:
    command = [sys.executable, "-c", RANK, sandbox.mechanism, how]
    rank = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert rank.stdout is not None
    assert rank.stdout.readline() == "ready\n"
    end = time.monotonic() + limit(60)
    fork = [process for process in psutil.Process(rank.pid).children() if process.cmdline()[2:3] == [RANK]]
    expected = ABOVE[sandbox.mechanism] + 4 + len(fork)  # the program has three forks
    while len(started := boxes_of(rank.pid)) < expected and time.monotonic() < end:
        time.sleep(0.02)
    assert len(started) >= expected
    rank.send_signal(number)
    rank.wait()
    left = [process for process in started if process not in fork]
    assert ended(left)
    for process in fork:
        process.kill()
    rank.stdout.close()


def test_a_rank_that_dies_together_with_its_box_leaves_nothing(sandbox: Sandbox) -> None:
    """Neither can end what the program has started then, nor remove its files: what stands between them does."""
    command = [sys.executable, "-c", RANK, sandbox.mechanism, "alone"]
    rank = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert rank.stdout is not None
    assert rank.stdout.readline() == "ready\n"
    end = time.monotonic() + limit(60)
    while len(started := boxes_of(rank.pid)) < ABOVE[sandbox.mechanism] + 4:
        assert time.monotonic() < end, "no program began"
        time.sleep(0.02)
    folder = Path(started[-1].cwd())
    assert sandbox.mechanism == "bubblewrap" or (folder / "a").exists()
    rank.send_signal(signal.SIGSTOP)  # it sees nothing of the box's death
    started[0].children()[0].kill()
    rank.kill()
    rank.wait()
    assert ended(started)
    assert sandbox.mechanism == "bubblewrap" or not folder.exists()
    rank.stdout.close()

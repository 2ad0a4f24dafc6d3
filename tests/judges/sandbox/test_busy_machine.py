"""Programs that others keep from running: that a machine is busy is no program's fault, that a program waits is."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.judges.sandbox import Limits, Sandbox
from grpo_mega.judges.sandbox.processes import Effort, waited
from grpo_mega.judges.sandbox.watch import MOST, ProgramClock

LIMITS = Limits(cpu_seconds=1000, wall_seconds=0.5)


@pytest.fixture
def others(sandbox: Sandbox) -> set[int]:
    """This process' children that are no boxes of `one_cpu`; some of earlier tests may have ended."""
    return {process.pid for process in psutil.Process().children()}


@pytest.fixture
def one_cpu(sandbox: Sandbox, others: set[int]) -> Iterator[Sandbox]:
    """A sandbox whose programs all run on one CPU."""
    one = Sandbox(boxes=1, mechanism=sandbox.mechanism)
    one.python("")
    for process in processes_of_boxes(others):
        os.sched_setaffinity(process.pid, [min(os.sched_getaffinity(0))])
    yield one
    one.close()


@pytest.fixture
def first_in_line(one_cpu: Sandbox, others: set[int]) -> Sandbox:
    """As `one_cpu`, and whatever else there is to do on that CPU has to wait, as if the machine had nothing to do."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to let its programs go first on a machine that may be busy")
    for process in processes_of_boxes(others):
        os.setpriority(os.PRIO_PROCESS, process.pid, -20)
        if (shared := Path(f"/proc/{process.pid}/autogroup")).exists():  # some kernels share CPUs among sessions
            shared.write_text("-20")
    return one_cpu


def status_of(sandbox: Sandbox, source: str) -> str:
    """Status of a program; tried again where a hypervisor took the CPU away, which looks like a busy machine."""
    status = ""
    for _ in range(3):
        before = psutil.cpu_times().steal
        status = sandbox.python(source, limits=LIMITS).status
        if psutil.cpu_times().steal == before:
            break
    return status


def processes_of_boxes(others: set[int]) -> list[psutil.Process]:
    """Processes of the boxes of `one_cpu`."""
    boxes = [box for box in psutil.Process().children() if box.pid not in others]
    return [process for box in boxes for process in (box, *box.children(recursive=True))]


@contextmanager
def busy() -> Iterator[None]:
    """That CPU has twelve other things to do, each in a session of its own."""
    hogs = [subprocess.Popen(["/bin/sh", "-c", "while :; do :; done"], start_new_session=True) for _ in range(12)]
    try:
        for hog in hogs:
            os.sched_setaffinity(hog.pid, [min(os.sched_getaffinity(0))])
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def test_a_program_that_gets_no_cpu_has_no_outcome(one_cpu: Sandbox) -> None:
    with busy():
        outcome = one_cpu.python("while True: pass", limits=LIMITS)
    assert (outcome.status, outcome.exit_code) == ("infrastructure", None), outcome
    assert "it waited for a CPU for" in outcome.reason
    assert one_cpu.python("print(1)").stdout == b"1\n"


def test_a_program_that_waits_by_itself_is_out_of_time_on_a_busy_machine_too(one_cpu: Sandbox) -> None:
    with busy():
        outcome = one_cpu.python("import threading; threading.Event().wait()", limits=replace(LIMITS, wall_seconds=1.0))
    assert (outcome.status, outcome.reason) == ("time", "did not end within 1 s")


def test_processes_of_a_program_that_are_in_each_others_way_are_out_of_time(first_in_line: Sandbox) -> None:
    source = "import os\nfor _ in range(11):\n    if os.fork() == 0: break\nwhile True: pass"
    assert status_of(first_in_line, source) == "time"


def test_children_that_a_program_has_waited_for_have_run(first_in_line: Sandbox) -> None:
    """A program that starts one after the other, which keep it from the CPU, is in its own way too."""
    source = """
import os, threading, time
def start():
    while True:
        if (pid := os.fork()) == 0:
            end = time.monotonic() + 0.05
            while time.monotonic() < end: pass
            os._exit(0)
        os.waitpid(pid, 0)
for _ in range(8): threading.Thread(target=start).start()
while True: pass
"""
    assert status_of(first_in_line, source) == "time"


SECONDS = st.floats(0, 10)


@given(SECONDS, SECONDS, SECONDS)
def test_a_thread_has_waited_for_what_it_wanted_and_did_not_get(before: float, ran: float, queued: float) -> None:
    first = Effort({7: before}, {7: 0.0}, {7: (before, 1.0)})
    second = Effort({7: before + ran}, {7: 0.0}, {7: (before + ran, 1.0 + queued)})
    assert waited(first, second) == pytest.approx(queued)
    new = Effort({7: before, 8: ran}, {7: 0.0, 8: 0.0}, {8: (ran, queued)})
    assert waited(first, new) == pytest.approx(queued), "a new one"


@given(st.lists(SECONDS, min_size=1, max_size=9))
def test_threads_of_one_cpu_that_take_turns_have_not_waited(ran: list[float]) -> None:
    turns = {number: (own, sum(ran) - own) for number, own in enumerate(ran)}  # each waits while another of them runs
    assert waited(Effort(), Effort(dict(enumerate(ran)), {}, turns)) == pytest.approx(0.0)


@given(st.lists(SECONDS, min_size=1, max_size=9), st.lists(SECONDS, min_size=1, max_size=9), SECONDS)
def test_children_that_nobody_waits_for_make_no_waits(ended: list[float], left: list[float], before: float) -> None:
    """Nothing was in the queue: a program that lets children vanish and begins others has not waited."""

    def ran(first: int, seconds: list[float]) -> Effort:
        of_each = dict(enumerate([before, *seconds], first))
        return Effort(of_each, dict.fromkeys(of_each, 0.0), {pid: (own, 0.0) for pid, own in of_each.items()})

    assert waited(ran(10, ended), ran(50, left)) <= 0.0


def test_a_child_that_was_waited_for_has_run_once() -> None:
    """Two of its three seconds were seen before it ended; meanwhile another thread was in the queue for four."""
    first = Effort({1: 0.0, 2: 2.0}, {1: 0.0, 2: 0.0}, {1: (0.0, 0.0), 2: (2.0, 0.0)})
    second = Effort({1: 0.0}, {1: 3.0}, {1: (0.0, 4.0)})
    assert waited(first, second) == pytest.approx(3.0)


@given(st.floats(0.1, 100), st.lists(st.tuples(st.floats(0.001, 1), st.floats(0, 1)), min_size=1))
def test_a_clock_stands_still_while_the_program_waits_for_a_cpu(limit: float, waits: list[tuple[float, float]]) -> None:
    clock, queued = ProgramClock(limit, Effort(threads={1: (0.0, 0.0)})), 0.0
    for passed, share in waits:
        clock.elapsed += passed
        queued += passed * share
        clock.look(Effort(threads={1: (0.0, queued)}))
        assert clock.own == pytest.approx(clock.elapsed - queued, abs=1e-9)
        assert clock.left == pytest.approx(min(limit - clock.own, MOST * limit - clock.elapsed), abs=1e-9)
        assert (clock.left <= 0) == (clock.own >= limit or clock.elapsed >= MOST * limit)

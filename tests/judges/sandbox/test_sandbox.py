"""The pool of boxes: what programs get and return, boxes and ranks that die, machines on which nothing works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from limits import limit
from processes import kill
from ranks import REPOSITORY

from grpo_mega.judges.sandbox import BoxCall, Limits, Sandbox, SandboxUnavailable, pool
from grpo_mega.judges.sandbox.start import unused_uid


def test_a_program_reads_prints_and_exits(sandbox: Sandbox) -> None:
    source = "import sys; print(input()[::-1]); print('no', file=sys.stderr); sys.exit(7)"
    outcome = sandbox.python(source, stdin="äöü\n".encode())
    assert (outcome.status, outcome.exit_code) == ("exited", 7)
    assert (outcome.stdout.decode(), outcome.stderr) == ("üöä\n", b"no\n")
    assert not outcome.succeeded
    assert outcome.seconds > 0


def test_a_function_returns_data(sandbox: Sandbox) -> None:
    outcome = sandbox.python(
        "def f(a, b):\n    print('noise')\n    return {a: (b, None)}", call=BoxCall("f", ["k", [1.5]])
    )
    assert (outcome.result, outcome.stdout, outcome.succeeded) == (b'{"k": [[1.5], null]}', b"noise\n", True)


@pytest.mark.parametrize(
    "source", ["x = 1", "f = 1", "def f(): return f", "def f(): return float('nan')", "def f(a): pass"]
)
def test_a_function_without_data_is_an_error_of_the_program(sandbox: Sandbox, source: str) -> None:
    outcome = sandbox.python(source, call=BoxCall("f"))
    assert (outcome.status, outcome.exit_code, outcome.result) == ("exited", 1, b"")
    assert b"Error" in outcome.stderr


def test_a_command_runs_with_files(sandbox: Sandbox) -> None:
    files = {"a.txt": b"hello", "folder/run.sh": b"#!/bin/sh\ncat a.txt; cat; exit 3\n"}
    outcome = sandbox.run(["./folder/run.sh"], files=files, stdin=b" world")
    assert (outcome.stdout, outcome.exit_code) == (b"hello world", 3), outcome


def test_a_program_imports_the_files_beside_it(sandbox: Sandbox) -> None:
    outcome = sandbox.python("import helper; print(helper.x)", files={"helper.py": b"x = 3"})
    assert outcome.stdout == b"3\n", outcome


def test_a_command_that_is_missing_says_so(sandbox: Sandbox) -> None:
    outcome = sandbox.run(["no-such-command"])
    assert (outcome.exit_code, outcome.stderr) == (127, b"cannot run no-such-command: No such file or directory\n")


def test_a_signal_that_ends_a_program_is_its_exit_code(sandbox: Sandbox) -> None:
    assert sandbox.python("import os; os.kill(os.getpid(), 1)").exit_code == -signal.SIGHUP
    assert sandbox.run(["/bin/sh", "-c", "kill -SEGV $$"]).exit_code == -signal.SIGSEGV
    assert sandbox.python("import os; os.abort()").exit_code == -signal.SIGABRT


def test_programs_are_the_same_when_the_rank_was_started_with_nohup(sandbox: Sandbox) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    own = Sandbox(boxes=1, mechanism=sandbox.mechanism)
    try:
        assert own.python("import os; os.kill(os.getpid(), 1)").exit_code == -signal.SIGHUP
        assert own.run(["/bin/sh", "-c", "kill -HUP $$"]).exit_code == -signal.SIGHUP
    finally:
        own.close()
        signal.signal(signal.SIGHUP, before)


def test_what_programs_of_interpreters_have(sandbox: Sandbox) -> None:
    """Threads that are waited for, recursion, modules, dataclasses with annotations, pickles of their own classes."""
    source = """
from __future__ import annotations
import dataclasses, pickle, random, sys, threading, zoneinfo
sys.setrecursionlimit(20000)
def depth(n): return n and 1 + depth(n - 1)
@dataclasses.dataclass
class Point:
    x: int
def later():
    import time; time.sleep(0.2); print(pickle.loads(pickle.dumps(Point(3))).x, depth(10000), __name__)
threading.stack_size(1 << 26)
threading.Thread(target=later).start()
"""
    outcome = sandbox.python(source)
    assert outcome.stdout == b"3 10000 __main__\n", outcome


def test_signals_to_all_processes_of_a_rank_end_no_program(sandbox: Sandbox) -> None:
    """Schedulers send them; what they ended would be a wrong program."""
    one = Sandbox(boxes=1, mechanism=sandbox.mechanism)
    one.python("")
    box = psutil.Process(one._idle[0]._process.pid)
    idle = len(box.children(recursive=True))
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(one.python, "import time; time.sleep(2); print('done')")
        end = time.monotonic() + limit(60)
        while len(box.children(recursive=True)) <= idle and time.monotonic() < end:
            time.sleep(0.02)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            for process in (box, *box.children(recursive=True)):
                kill(process, number)
        outcome = running.result()
    assert (outcome.stdout, outcome.exit_code) == (b"done\n", 0), outcome
    assert box.is_running()
    one.close()


def test_a_program_can_end_what_it_starts(sandbox: Sandbox) -> None:
    source = """
import multiprocessing, os, subprocess, sys, time
command = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
fork.start()
try:
    for child in (command, fork): child.terminate()
except PermissionError:
    print("refused", flush=True)
    os._exit(0)  # an end as usual would wait for the fork
fork.join()
print(command.wait(), fork.exitcode)
"""
    outcome = sandbox.python(source)
    # Under Landlock a program may send signals to itself only.
    assert outcome.stdout == (b"-15 -15\n" if sandbox.mechanism == "bubblewrap" else b"refused\n"), outcome


def test_random_numbers_and_hashes_are_the_same_each_time(sandbox: Sandbox) -> None:
    source = "import random; print(random.random(), hash('text'), list({'a', 'b', 'c'}))"
    assert len({sandbox.python(source).stdout for _ in range(4)}) == 1


def test_programs_do_not_meet(sandbox: Sandbox) -> None:
    """What one leaves in files, memory or modules, and does to its own copy of a file, the next does not see."""
    spoil = """
import builtins, json, os, sys
for path in ("/tmp/left", "/dev/shm/left", "left", "given.txt"):
    try: open(path, "w").write("x")
    except OSError: pass
builtins.open = None; json.loads = None; sys.path[:] = []; os.environ["LEFT"] = "1"
"""
    look = """
import json, os
left = [p for p in ("/tmp/left", "/dev/shm/left", "left") if os.path.exists(p)]
print(left, json.loads("1"), os.environ.get("LEFT"), open("given.txt").read())
"""
    files = {"given.txt": b"as given"}
    one = Sandbox(boxes=1, mechanism=sandbox.mechanism)
    assert one.python(spoil, files=files).exit_code == 0
    assert one.python(look, files=files).stdout == b"[] 1 None as given\n"
    one.close()


@given(output=st.binary(max_size=300_000), errors=st.binary(max_size=1000))
def test_output_comes_out_as_it_was_written(sandbox: Sandbox, output: bytes, errors: bytes) -> None:
    source = f"import os\nfor n, b in ((1, {output!r}), (2, {errors!r})):\n    while b: b = b[os.write(n, b):]"
    outcome = sandbox.python(source)
    assert (outcome.stdout, outcome.stderr, outcome.exit_code) == (output, errors, 0)


def test_many_threads_share_the_boxes(sandbox: Sandbox) -> None:
    with ThreadPoolExecutor(8) as threads:
        outcomes = list(threads.map(lambda n: sandbox.python(f"print({n})"), range(40)))
    assert [int(outcome.stdout) for outcome in outcomes] == list(range(40))
    assert len(sandbox._idle) <= 2


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", ""])
def test_files_elsewhere_are_refused(sandbox: Sandbox, name: str) -> None:
    with pytest.raises(ValueError, match="a path within the program's folder"):
        sandbox.python("", files={name: b""})


def test_files_that_do_not_fit_are_refused(sandbox: Sandbox) -> None:
    with pytest.raises(ValueError, match="tmp_bytes=10,000"):
        sandbox.python("", files={"a": b"x", "b": b"x"}, limits=Limits(tmp_bytes=10_000))


@pytest.mark.parametrize("field", Limits.__dataclass_fields__)
def test_a_limit_must_be_positive(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}=0"):
        Limits(**{field: 0})


@pytest.mark.parametrize("field", sorted(Limits.__dataclass_fields__.keys() - {"wall_seconds"}))
def test_a_limit_must_be_whole(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}=1.5"):
        Limits(**{field: 1.5})


def test_a_fork_of_the_rank_is_refused(sandbox: Sandbox) -> None:
    sandbox.python("")
    child = os.fork()
    if child == 0:
        try:
            sandbox.python("")
        except RuntimeError as error:
            os._exit(7 if "create another one here" in str(error) else 1)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert sandbox.python("print(1)").stdout == b"1\n"


def test_a_box_that_cannot_start_is_an_outcome_of_its_own(tmp_path: Path) -> None:
    """Here a file that programs should read is of another user's alone: bubblewrap cannot show it."""
    if pool.problem("bubblewrap"):
        pytest.skip(pool.problem("bubblewrap"))
    if os.geteuid() != 0:
        pytest.skip("needs root, to make a folder that the box's user may not enter")
    hidden = tmp_path / "hidden"
    hidden.mkdir(mode=0o700)
    (hidden / "file").touch()
    outcome = Sandbox(boxes=1, mechanism="bubblewrap", read_only=[str(hidden / "file")]).python("print(1)")
    assert outcome.status == "infrastructure"
    assert "hidden" in outcome.reason
    assert not outcome.succeeded


NOWHERE = """
import os, sys
os.environ["PATH"] = "/nonexistent"                      # no bwrap
from grpo_mega.judges.sandbox import Sandbox, SandboxUnavailable, pool
pool.MECHANISMS = ("bubblewrap",)                        # as where the kernel has no Landlock
try:
    print(Sandbox(boxes=1, run_without_isolation=sys.argv[1] == "signed").python("print(42)"))
except SandboxUnavailable as error:
    print("refused:", error)
"""


def test_where_nothing_works_programs_are_refused_unless_the_user_signs() -> None:
    def said(how: str) -> str:
        command = [sys.executable, "-c", NOWHERE, how]
        return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=True).stdout

    assert "refused: no sandbox works on this machine: bubblewrap: bwrap is not installed" in said("plain")
    assert "apt-get install bubblewrap" in said("plain")
    assert "stdout=b'42\\n'" in said("signed")
    with pytest.raises(SandboxUnavailable, match="run_without_isolation"):
        Sandbox(mechanism="unconfined")


def test_user_ids_of_boxes_are_nobody_elses() -> None:
    if os.geteuid() != 0:
        assert unused_uid() is None
        return
    numbers = {unused_uid() for _ in range(50)}
    assert len(numbers) > 40
    assert not numbers & {process.uids().real for process in psutil.process_iter()}
    assert min(number for number in numbers if number) > 10_000

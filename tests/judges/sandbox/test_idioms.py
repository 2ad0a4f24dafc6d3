"""What right programs rely on: the usual ways to end, to print, to share memory; each as `python program.py` has it."""

from __future__ import annotations

import pytest
from runners import MECHANISMS, USERS, runner

from grpo_mega.judges.sandbox import BoxCall, Limits, Sandbox

QUICK = {("bubblewrap", "user"), ("landlock", USERS[0])}
"""Mechanisms and users that `make test` tries; the others are in the long suite."""


@pytest.mark.parametrize(
    ("end", "code"), [("exit()", 0), ("quit()", 0), ("exit(3)", 3), ("quit('no')", 1), ("exit(-1)", 255)]
)
def test_a_program_ends_itself(sandbox: Sandbox, end: str, code: int) -> None:
    outcome = sandbox.python(f"print(1)\n{end}\nprint(2)")
    assert (outcome.stdout, outcome.exit_code) == (b"1\n", code), outcome


PRINTED = {
    "the first stream": "import sys\nsys.__stdout__.write('5')",
    "a stream put aside": "import io, sys\nsys.__stdout__.write('5')\nsys.stdout = io.StringIO()",
    "a file of the descriptor": "out = open(1, 'w')\nout.write('5')",
    "a file that a function writes": "out = open(1, 'w', closefd=False)\ndef f(): out.write('5')\nf()",
    "a file in a circle": "class A: pass\na = A()\na.a, a.out = a, open(1, 'w')\na.out.write('5')",
    "at the exit": "import atexit, sys\nlines = []\natexit.register(lambda: sys.stdout.write(lines[0]))\nlines += '5'",
    "by a finalizer": "import sys\nclass A:\n    def __del__(self): print(later)\na = A()\nlater = 5",
    "a closed output": "import sys\nprint(5)\nsys.stdout.close()",
    "no output any more": "import sys\nprint(5)\nsys.stdout.flush()\nsys.stdout = None",
    "before exit": "import sys\nsys.__stdout__.write('5')\nexit()",
    "with an error": "out = open(2, 'w')\nout.write('x')\nprint(5)",
}


@pytest.mark.parametrize("how", PRINTED)
def test_what_a_program_has_printed_comes_out(sandbox: Sandbox, how: str) -> None:
    outcome = sandbox.python(PRINTED[how])
    assert (outcome.stdout.strip(), outcome.exit_code) == (b"5", 0), outcome


def test_output_that_cannot_be_written_is_an_error(sandbox: Sandbox) -> None:
    assert sandbox.python("import os\nprint(5)\nos.close(1)").exit_code == 120


def test_a_program_knows_its_file(sandbox: Sandbox) -> None:
    source = "import os\nprint(os.path.basename(__file__), os.path.dirname(os.path.abspath(__file__)) == os.getcwd())"
    assert sandbox.python(source).stdout == b"program.py True\n"


def test_annotations_are_evaluated(sandbox: Sandbox) -> None:
    """They are not where a program's text is compiled with what the compiling file imports from `__future__`."""
    assert sandbox.python("def f(a: int): pass\nprint(f.__annotations__['a'] is int)").stdout == b"True\n"


def test_integers_have_as_many_digits_as_they_need(sandbox: Sandbox) -> None:
    outcome = sandbox.python("print(10**6000)\ndef f(): return 10**5000", call=BoxCall("f"))
    assert (outcome.stdout, outcome.result) == (b"1" + b"0" * 6000 + b"\n", b"1" + b"0" * 5000), outcome.stderr


def test_files_are_copied_and_zeros_are_read_and_memory_is_mapped(sandbox: Sandbox) -> None:
    """Without sendfile, /dev/zero and shared memory as elsewhere."""
    source = """
import mmap, os, shutil
print(open("/dev/zero", "rb").read(2), len(mmap.mmap(-1, 4096, mmap.MAP_PRIVATE)))
"""
    if sandbox.mechanism == "bubblewrap":  # Landlock lets nobody write
        source += """
with open("a", "w+") as file: file.write("x" * 70_000); file.flush(); print(mmap.mmap(file.fileno(), 0)[:1])
print(os.path.getsize(shutil.copy("a", "b")), os.system("cp b c && tail -c 1 c | grep -q x"))
"""
    outcome = sandbox.python(source)
    assert outcome.stdout.splitlines()[0] == b"b'\\x00\\x00' 4096", outcome
    if sandbox.mechanism == "bubblewrap":
        assert outcome.stdout.splitlines()[1:] == [b"b'x'", b"70000 0"], outcome


def test_errors_are_cut(sandbox: Sandbox) -> None:
    """Progress bars and warnings are no reason to fail a program."""
    source = "import sys\nfor _ in range(100): sys.stderr.write('x' * 100_000)\nprint(1)"
    outcome = sandbox.python(source)
    assert (outcome.stdout, outcome.stderr, outcome.succeeded) == (b"1\n", b"x" * Limits().output_bytes, True)


@pytest.mark.parametrize(
    ("mechanism", "user"),
    [
        pytest.param(mechanism, user, marks=() if (mechanism, user) in QUICK else pytest.mark.long)
        for mechanism in MECHANISMS
        for user in USERS
    ],
)
def test_memory_that_processes_share_counts_once(mechanism: str, user: str) -> None:
    source = """
import os, time
shared = bytearray(b"x" * (160 << 20))
children = []
for _ in range(6):
    if not (pid := os.fork()):
        time.sleep(1)
        os._exit(0)
    children.append(pid)
for pid in children: os.waitpid(pid, 0)
print("done")
"""
    with runner(mechanism, user) as sandbox:
        outcome = sandbox.run(source=source, limits={"memory_bytes": 512 << 20, "wall_seconds": 100.0})
    assert (outcome["status"], outcome["stdout"]) == ("exited", "done\n"), outcome

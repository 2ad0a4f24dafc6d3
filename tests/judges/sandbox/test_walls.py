"""Each wall by itself: where two of them stop an attack, an attack that fails does not show that both are there."""

from __future__ import annotations

import errno
import os
import platform
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from limits import limit

from grpo_mega.judges.sandbox import Limits, Sandbox, seccomp
from grpo_mega.judges.sandbox.seccomp import ARGUMENTS, MACHINES, NEVER, WITHOUT_NAMESPACES, instructions, numbers

LIMITS = Limits(wall_seconds=1000, memory_bytes=1 << 29, open_files=50, file_bytes=1 << 20, processes=5, cpu_seconds=7)


def program_of(sandbox: Sandbox) -> psutil.Process:
    """The process of a program that runs in the sandbox and waits."""
    end = time.monotonic() + limit(60)
    deepest = 3 if sandbox.mechanism == "bubblewrap" else 2
    while time.monotonic() < end:
        for box in psutil.Process().children():
            with suppress(psutil.NoSuchProcess, OSError):
                inside = box.children(recursive=True)
                if len(inside) == deepest and not inside[-1].children() and "Seccomp:\t2" in status(inside[-1]):
                    return inside[-1]
        time.sleep(0.02)
    raise AssertionError("no program began")


def status(process: psutil.Process) -> str:
    return Path(f"/proc/{process.pid}/status").read_text()


def test_what_the_kernel_says_of_a_program(sandbox: Sandbox) -> None:
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(sandbox.python, "import time; time.sleep(1000)", limits=LIMITS)
        program = program_of(sandbox)
        fields = dict(line.split(":\t", 1) for line in status(program).splitlines())
        names = ("user", "pid", "net", "ipc", "uts", "mnt")
        shared = {name for name in names if _namespace(program.pid, name) == _namespace(os.getpid(), name)}
        limits = {line[:26].strip(): line[26:].split()[:2] for line in _of(program, "limits").splitlines()}
        score = _of(program, "oom_score_adj").strip()
        program.kill()
        assert running.result().exit_code == -signal.SIGKILL
    assert [fields[name].strip("0") for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")] == [""] * 4
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    assert shared == (set() if sandbox.mechanism == "bubblewrap" else set(names))
    if os.geteuid() == 0:
        assert all(int(uid) > 10_000 for uid in (fields["Uid"] + "\t" + fields["Gid"]).split("\t"))
        assert fields["Groups"].strip() in ("", fields["Gid"].split("\t")[0])
    assert score == "1000"
    assert limits["Max address space"] == [str(1 << 29)] * 2
    assert limits["Max open files"] == ["50"] * 2
    assert limits["Max file size"] == [str(1 << 20)] * 2
    assert limits["Max cpu time"] == ["7", "8"]
    assert limits["Max core file size"] == ["1", "1"]
    assert int(limits["Max processes"][0]) >= 5


def _namespace(pid: int, name: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/{name}")


def _of(process: psutil.Process, name: str) -> str:
    return Path(f"/proc/{process.pid}/{name}").read_text()


def test_the_machine_is_all_that_a_program_sees(sandbox: Sandbox) -> None:
    """In a box of bubblewrap the root has nothing but the system's programs; elsewhere it cannot be listed."""
    outcome = sandbox.python("import os; print(sorted(os.listdir('/')))")
    if sandbox.mechanism == "landlock":
        assert b"PermissionError" in outcome.stderr
        return
    seen = set(eval(outcome.stdout))
    assert not seen & {"root", "home", "proc", "sys", "run", "var", "work", "mnt", "opt", "boot"} - {_own_folder()}
    assert sandbox.python("import os; print(os.listdir('/tmp'), os.listdir('/dev/shm'))").stdout == b"[] []\n"


def test_the_ranks_environment_is_not_the_programs(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "of the rank")
    one = Sandbox(boxes=1, mechanism=sandbox.mechanism)
    for outcome in (one.python("import os; print(dict(os.environ))"), one.run(["env"])):
        assert b"/usr/bin" in outcome.stdout
        assert b"SECRET" not in outcome.stdout
    one.close()


def _own_folder() -> str:
    """The folder under / that this Python lies in, and that programs may have to read."""
    return Path(sys.base_prefix).parts[1]


def test_every_call_of_the_tables_is_refused(sandbox: Sandbox) -> None:
    """With arguments that do no harm where a call is not refused."""
    column = MACHINES[platform.machine()][0]
    listed = numbers(NEVER, column)
    if sandbox.mechanism == "landlock":
        listed |= numbers(WITHOUT_NAMESPACES, column)
    source = f"""
import ctypes
C = ctypes.CDLL(None, use_errno=True)
for name, number in {listed!r}.items():
    ctypes.set_errno(0)
    if C.syscall(ctypes.c_long(number), -1, -1, -1, -1, -1, -1) != -1 or ctypes.get_errno() != {errno.EPERM}:
        print(name, ctypes.get_errno())
for number in ({seccomp.NEWEST + 1}, 5000, 0x40000000 + 39):
    if C.syscall(ctypes.c_long(number), -1) != -1 or ctypes.get_errno() != {errno.ENOSYS}:
        print(number, ctypes.get_errno())
"""
    outcome = sandbox.python(source)
    assert (outcome.stdout, outcome.exit_code) == (b"", 0), outcome


def test_ioctls_are_those_of_terminals_and_of_all_descriptors(sandbox: Sandbox) -> None:
    """Those of files, of all lengths, change what may only be read; the kernel reads 32 bits of the command."""
    of_files = (0x40086602, 0x40046602, 0x401C5820, 0x40087602, 0x40806685, 0x800C6613, 0x5000940E, 0x8901, 0x5412)
    source = f"""
import ctypes, os
C = ctypes.CDLL(None, use_errno=True)
readable, _ = os.pipe()
def error(command):
    ctypes.set_errno(0)
    C.ioctl(readable, ctypes.c_ulong(command), ctypes.create_string_buffer(4096))
    return ctypes.get_errno()
for command in {of_files!r}:
    print(*{{error(command), error(command | 1 << 32), error(command | 0xABCD << 32)}} - {{{errno.EPERM}}})
print(error(0x541B), error(0x5421), os.isatty(readable))
"""
    outcome = sandbox.python(source)
    assert outcome.stdout.decode().splitlines() == [""] * len(of_files) + ["0 0 False"], outcome


def verdict(filter_: list[seccomp.Instruction], machine: int, number: int, arguments: list[int]) -> int:
    """What the filter says of a call, as the kernel computes it: an interpreter of what it uses of classic BPF."""
    data = {0: number, 4: machine} | {16 + 8 * index: value for index, value in enumerate(arguments)}
    value = at = 0
    while True:
        code, yes, no, constant = filter_[at]
        at += 1
        if code == seccomp.RETURN:
            return constant
        if code == seccomp.LOAD:
            value = data[constant]
        elif code == seccomp.AND:
            value &= constant
        else:
            tests = {seccomp.EQUAL: value == constant, seccomp.AT_LEAST: value >= constant}
            at += yes if (tests | {seccomp.ANY_BIT: bool(value & constant)})[code] else no


ARGUMENT = st.integers(0, 2**32 - 1) | st.sampled_from(
    [0, 1, 2, 8, 77, 1024, 1031, 0x21, 0x22, 0x23, 0x40022, 0x5401, 0x5412, 0x541B, 0x8901, 0x40086602]
)
"""Arguments of system calls."""


@given(
    machine=st.sampled_from(sorted(MACHINES)),
    namespaces=st.booleans(),
    number=st.integers(0, 500),
    arguments=st.lists(ARGUMENT, min_size=6, max_size=6),
)
def test_the_filter_refuses_what_the_tables_say_and_nothing_else(
    machine: str, namespaces: bool, number: int, arguments: list[int]
) -> None:
    column, constant = MACHINES[machine]
    names = {
        known: name
        for table in (NEVER, WITHOUT_NAMESPACES, ARGUMENTS)
        for name, known in numbers(table, column).items()
    }
    name = names.get(number)
    said = verdict(instructions(namespaces, 77, machine), constant, number, arguments)
    if number > seccomp.NEWEST or name == "clone3":
        assert said == seccomp.FAIL | errno.ENOSYS
    elif name in numbers(NEVER, column) or (not namespaces and name in numbers(WITHOUT_NAMESPACES, column)):
        assert said == seccomp.FAIL | errno.EPERM
    elif name in numbers(ARGUMENTS, column):
        assert said == (seccomp.FAIL | errno.EPERM if _refused(name, namespaces, arguments) else seccomp.ALLOW)
    else:
        assert said == seccomp.ALLOW
    assert verdict(instructions(namespaces, 77, machine), 0x40000003, number, arguments) == seccomp.KILL


def _refused(name: str | None, namespaces: bool, a: list[int]) -> bool:
    """The rules of calls that depend on their arguments, written down a second time; the program's process is 77."""
    always = {
        "clone": a[0] & 0x7E020080 != 0,
        "socketpair": not (a[0] == 1 and a[1] & 0xF == 1),
        "prlimit64": a[0] not in (0, 77),
        "fcntl": a[1] in (8, 10, 15, 1024, 1026, 1031),
        "ioctl": a[1] & 0xFF00 != 0x5400 or a[1] in (0x5412, 0x541C),
        "mmap": a[3] & 0x21 == 0x21 or a[3] & 0x40000 != 0,
    }
    alone = {
        "kill": a[0] not in (0, 77),
        "tgkill": a[0] != 77,
        "open": a[1] & 0o1100 != 0,
        "openat": a[2] & 0o1100 != 0,
    }
    return (always if namespaces else always | alone).get(name or "", False)


def test_other_machines_are_refused() -> None:
    with pytest.raises(OSError, match="riscv64 are not known, only those of x86_64, aarch64"):
        instructions(True, 1, "riscv64")


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [("mmap", 3, 0x40022), ("mmap", 3, 0x21), ("mmap", 3, 0x23), *(("fcntl", 1, call) for call in (1024, 1026, 1031))],
)
@pytest.mark.parametrize("machine", MACHINES)
def test_what_would_hold_memory_that_no_limit_counts_is_refused(
    machine: str, name: str, place: int, value: int
) -> None:
    """Huge pages of the pool, anonymous shared memory; leases, watches on folders and larger pipes."""
    column, constant = MACHINES[machine]
    arguments = [0] * 6
    arguments[place] = value
    number = numbers(ARGUMENTS, column)[name]
    assert verdict(instructions(True, 77, machine), constant, number, arguments) == seccomp.FAIL | errno.EPERM
    arguments[place] = 0x22 if name == "mmap" else 3  # private and anonymous; F_GETFL
    assert verdict(instructions(True, 77, machine), constant, number, arguments) == seccomp.ALLOW

"""What users' reward functions do to the process that calls them; imported by path."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

from grpo_mega.types import Sample

calls = 0


def length(sample: Sample) -> float:
    return len(sample.text)


def count(_: Sample) -> float:
    """How often this process has called it."""
    global calls
    calls += 1
    return calls


def exits(_: Sample) -> float:
    sys.exit(0)


def leaves(_: Sample) -> float:
    print("these are my last words")
    os._exit(0)


def interrupts(_: Sample) -> float:
    raise KeyboardInterrupt


def kills_itself(_: Sample) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def crashes(_: Sample) -> float:
    signal.raise_signal(signal.SIGSEGV)
    raise AssertionError("unreachable")


def hangs(_: Sample) -> float:
    while True:
        time.sleep(0.1)


def stops(_: Sample) -> float:
    os.kill(os.getpid(), signal.SIGSTOP)
    raise AssertionError("unreachable")


def talks_for_ever(_: Sample) -> float:
    while True:
        print("la " * 1000)


def eats_memory(_: Sample) -> float:
    """Under a limit, for the sake of the machine that runs the tests."""
    resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))
    return len(bytearray(2 << 30))


def closes_all_files(_: Sample) -> float:
    os.closerange(3, 1000)
    return 1.0


def writes_everywhere(_: Sample) -> float:
    for descriptor in range(3, 5000):
        with contextlib.suppress(OSError):
            os.write(descriptor, b'{"value": 7}\n')
    return 1.0


def prints_megabytes(sample: Sample) -> float:
    print("x" * 5_000_000)
    print("x" * 5_000_000, file=sys.stderr)
    return len(sample.text)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("not even that")


def raises_what_cannot_be_printed(_: Sample) -> float:
    raise Unprintable


def returns(sample: Sample) -> object:
    return eval(sample.text)


def mutates(sample: Sample) -> float:
    object.__setattr__(sample, "text", r"\boxed{19}")
    object.__setattr__(sample.prompt, "answer", sample.text)
    return float(sample.text == r"\boxed{19}")


def changes_everything(sample: Sample) -> float:
    """The working directory, the environment, the path and the way signals are taken."""
    os.chdir("/")
    os.environ["RANK"] = "changed"
    sys.path.clear()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return len(sample.text)


def forks(_: Sample) -> float:
    """Two processes come back from here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return 1.0 if os.fork() else 2.0


def orphans(sample: Sample) -> float:
    """Starts processes that nobody waits for: one in a session of its own, one by one that has ended; writes who."""
    alone = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    shell = subprocess.run(["sh", "-c", "sleep 1000 >/dev/null & echo $!"], stdout=subprocess.PIPE, check=True)
    Path(sample.text).write_text(f"{alone.pid} {int(shell.stdout)} {os.getpid()} {os.getppid()}")
    return 1.0


def orphans_and_leaves(sample: Sample) -> float:
    orphans(sample)
    os._exit(3)


def hashes(_: Sample) -> float:
    return hash("strings are hashed with a random key, unless told otherwise") % 1_000_003


def modules(sample: Sample) -> float:
    """Whether a module has been imported."""
    return sample.text in sys.modules


def rank(_: Sample) -> float:
    return float(os.environ["RANK"])


def terminates_its_child(_: Sample) -> float:
    """A child must obey the signals that this process does not."""
    child = subprocess.Popen(["sleep", "1000"])
    child.terminate()
    return child.wait()


def first_to_go(_: Sample) -> float:
    """What the kernel adds to the badness of this process when memory runs out."""
    return int(Path("/proc/self/oom_score_adj").read_text())

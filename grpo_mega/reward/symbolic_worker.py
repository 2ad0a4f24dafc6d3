"""The process behind `symbolic.py`: `python -P symbolic_worker.py CPU_SECONDS MEMORY_BYTES`.

Writes `ready`, then for every line `[answer, truth]` on standard input one line `true` or `false`, until the input
ends. Both texts are wrapped in a box, so that math-verify reads each as one expression and does not pick the part it
likes best.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys

from math_verify import parse, verify


def equal(answer: str, truth: str) -> bool:
    """math-verify's verdict; an answer that it cannot digest is not equal to anything."""
    try:
        expected, given = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (truth, answer))
        return bool(verify(expected, given, timeout_seconds=None))
    except Exception:  # sympy raises almost any type on hostile input; the verdict is what the caller asked for
        return False


def main(cpu_seconds: float, memory_bytes: int) -> None:
    """Answers questions until standard input closes. The kernel kills the process when one takes too long."""
    verdicts = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # antlr prints version mismatches to standard output: they are no verdicts
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which closes our input
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    equal("\\frac{1}{2}", "x+1")  # the first parse builds tables; no answer should pay for that
    print("ready", file=verdicts, flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        verdict = equal(*json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(verdict), file=verdicts, flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))

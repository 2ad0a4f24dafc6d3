"""Runs the test that a change to Megatron names, without the change; prints {change: pytest's exit status} as JSON.

Usage: without_changes_job.py CHANGE... ; started by test_changes.py.
"""

import json
import os
import sys

import pytest
from ranks import REPOSITORY

from grpo_mega.platform import start

start()

from grpo_mega.models import body, model, optimizer  # noqa: E402

TABLES = {
    "TO_SPECIFICATION": body,
    "TO_CHUNK": body,
    "TO_PARALLEL_CHUNK": model,
    "BEFORE_OPTIMIZER": optimizer,
    "TO_OPTIMIZER": optimizer,
}
"""Table -> the module that applies it."""


def status(name: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        for table, module in TABLES.items():
            kept = tuple(change for change in getattr(module, table) if change.name != name)
            tests = [change.test for change in getattr(module, table) if change.name == name]
            if tests:
                patch.setattr(module, table, kept)
                return int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests]))
    raise ValueError(name)


def in_a_fork(name: str) -> int:
    """`status` where none of the other changes was made yet: some of them stay in Megatron's classes."""
    sys.stdout.flush()
    fork = os.fork()
    if fork == 0:
        found = status(name)
        sys.stdout.flush()
        os._exit(found)
    return os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])


if __name__ == "__main__":
    os.chdir(REPOSITORY)
    print("\n" + json.dumps({name: in_a_fork(name) for name in sys.argv[1:]}))

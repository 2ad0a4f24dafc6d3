"""What holds for every test."""

import gc
import random
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings
from hypothesis.internal.conjecture import providers

# Assertions of modules that tests share show what they compared, as those of tests do.
pytest.register_assert_rewrite(*(file.stem for file in Path(__file__).parent.rglob("*.py") if file.stem != "conftest"))

# `make test` tries the same examples everywhere, so that it is green or red for everybody; `make test-hunt` looks for
# new ones. A machine that is busy with other jobs is no failure.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", patient, derandomize=True, database=None)
settings.register_profile("hunt", patient, derandomize=False, print_blob=True)

LONGEST = (
    *("slurm", "train", "recipes", "stages", "evaluate", "planning", "parity", "rollout", "checkpoint", "models"),
    *("environment", "config", "weights", "report", "doctor"),
)
"""Folders of the files that take longest."""


STARTED = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--hunt", type=float, metavar="MINUTES", help="only tests with examples, ten times as many, random"
    )
    parser.addoption("--shuffle", type=int, metavar="SEED", help="take files in a random order")
    parser.addoption("--part", metavar="K/N", help="only the K-th of N parts of the files, such as 2/3")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):  # this process starts those that test
        from forks import servers

        servers()
    if config.getoption("--hunt") is not None:
        settings.load_profile("hunt")
        return
    settings.load_profile("same")
    # Hypothesis mixes in constants from the modules that are loaded at the time, so that examples would depend on which
    # tests this process ran before.
    providers._get_local_constants = lambda: providers._local_constants


@pytest.hookimpl(trylast=True)  # after -m, so that parts have equally many of the tests that are chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begins with the files that take longest: one that came last would leave the other process without work."""
    if config.getoption("--hunt") is not None:
        drawing = [item for item in items if is_hypothesis_test(getattr(item, "function", None))]
        config.hook.pytest_deselected(items=[item for item in items if item not in drawing])
        items[:] = drawing
        for test in {item.function for item in drawing}:
            if normal := getattr(test, "_hypothesis_internal_use_settings", None):  # a state machine has none
                test._hypothesis_internal_use_settings = settings(normal, max_examples=10 * normal.max_examples)
    # Not by the process that only starts those that test.
    import torch

    # Two thousand tests would be reported as skipped, one by one; asked for alone, they say why.
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if 0 < len(on_gpu) < len(items) and not torch.cuda.is_available():
        config.hook.pytest_deselected(items=on_gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    if wanted := config.getoption("--part"):
        part, parts = map(int, wanted.split("/"))
        own = files_of_part(Counter(item.path for item in items), part, parts)
        config.hook.pytest_deselected(items=[item for item in items if item.path not in own])
        items[:] = [item for item in items if item.path in own]
    seed = config.getoption("--shuffle")
    if seed is None:
        order = {room: number for number, room in enumerate(LONGEST)}
        items.sort(key=lambda item: order.get(item.path.parent.name, len(order)))
    else:
        files = sorted({item.path for item in items})
        random.Random(seed).shuffle(files)
        items.sort(key=lambda item: files.index(item.path))


def files_of_part(tests: Mapping[Path, int], part: int, parts: int) -> set[Path]:
    """The files of part 1, 2, ...; parts have about equally many tests, of which `tests` says how many a file has."""
    loads, own = [0] * parts, set()
    for path in sorted(tests, key=lambda path: (-tests[path], path)):
        least = loads.index(min(loads))
        loads[least] += tests[path]
        if least == part - 1:
            own.add(path)
    return own


def pytest_collection_finish() -> None:
    """Collections of garbage, of which a checkpoint asks for several, need not look at all that tests have imported."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)  # a composed config is 40,000 objects: one test in twelve seconds went into collections


def pytest_unconfigure() -> None:
    """At the end, extensions such as Triton's report what is never collected as leaks."""
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("--hunt")
    if minutes is not None and time.monotonic() > STARTED + 60 * minutes:
        pytest.skip("the minutes of the hunt are over")

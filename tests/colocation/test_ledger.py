"""The ledger: real memory of real processes, and a hand-over refused when some of it did not come back."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.colocation.ledger import REMEMBERED, Ledger, MemoryNotReturned, device_memory, meter, resident_memory
from grpo_mega.platform.clock import own_clock
from grpo_mega.platform.trace import Process, Trace, recording
from grpo_mega.show.traces.trace_files import read_traces

MIB = 2**20
# Each piece lies in a mapping of its own, which goes back to the system at once; the rest of the process is far smaller
# than the tolerance.
PIECE, TOLERANCE = 256 * MIB, 64 * MIB
CPU = torch.device("cpu")


def piece() -> torch.Tensor:
    return torch.ones(PIECE, dtype=torch.uint8)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(meter(CPU, {"trainer": [os.getpid()]}))


def test_memory_that_comes_back_is_handed_over(ledger: Ledger) -> None:
    held = [piece(), piece()]
    with ledger.release("trainer leaves", {"trainer": 2 * PIECE}, TOLERANCE):
        held.clear()
    begin, end = (entry.held["trainer"] for entry in ledger.entries)
    assert begin - end >= 2 * PIECE - TOLERANCE


def test_each_entry_is_a_point_of_the_trace(ledger: Ledger, tmp_path: Path) -> None:
    with recording(Trace(tmp_path, Process(0, "rank 0", 1), own_clock(), 5, dict)):
        entries = [ledger.mark("before"), ledger.mark("after")]
    (found,) = read_traces(tmp_path)
    points = [event["args"] for event in found.events if event["ph"] == "C"]
    assert points == [{"trainer GB": entry.held["trainer"] / 1e9} for entry in entries]


def test_a_tensor_that_somebody_kept_is_refused_with_the_whole_table(ledger: Ledger) -> None:
    ledger.mark("before training")
    held = [piece(), piece()]
    leak = held[0]
    with (
        pytest.raises(MemoryNotReturned) as refused,
        ledger.release("trainer leaves", {"trainer": 2 * PIECE}, TOLERANCE),
    ):
        held.clear()
    assert leak is not None
    kept = float(re.search(r"trainer leaves: trainer keeps ([\d.]+) of the 512.0 MiB", str(refused.value))[1])
    assert kept == pytest.approx(256, abs=64)
    assert "tolerance 64.0 MiB" in str(refused.value)
    assert str(refused.value).endswith(ledger.table())
    for phase in ("before training", "trainer leaves: begin", "trainer leaves: end"):
        assert re.search(rf"^{phase} +[\d,.]+$", str(refused.value), re.MULTILINE)


ENGINE = f"""
held = [b"x" * {PIECE}, b"y" * {PIECE}]
print("up", flush=True)
while held:
    assert input() == "release"
    held.pop()
    print("released", flush=True)
input()
"""


def talking(program: str) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout.readline() == "up\n"
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def engine() -> Iterator[subprocess.Popen]:
    """Another process that holds two pieces and gives one of them back each time it is told to."""
    yield from talking(ENGINE)


def tell(engine: subprocess.Popen) -> None:
    engine.stdin.write("release\n")
    assert engine.stdout.readline() == "released\n"


def test_an_engine_that_says_released_and_keeps_half(engine: subprocess.Popen) -> None:
    ledger = Ledger(meter(CPU, {"trainer": [os.getpid()], "engine": [engine.pid]}))
    with (
        pytest.raises(MemoryNotReturned, match=r"engine keeps .* of the 512.0 MiB that were due"),
        ledger.release("engine sleeps", {"engine": 2 * PIECE}, TOLERANCE),
    ):
        tell(engine)
    with ledger.release("engine sleeps again", {"engine": PIECE}, TOLERANCE):
        tell(engine)


def test_an_engine_that_has_died_holds_nothing(engine: subprocess.Popen) -> None:
    engine.kill()
    engine.wait()
    held = resident_memory({"trainer": [os.getpid()], "engine": [engine.pid]})
    assert held["engine"] == 0 < held["trainer"]


def test_a_restarted_engine_is_measured_under_its_new_process(engine: subprocess.Popen) -> None:
    processes = {"engine": [os.getpid()]}
    measure = meter(CPU, processes)
    measure()
    processes["engine"] = [engine.pid]
    assert measure() == {"engine": pytest.approx(2 * PIECE, abs=TOLERANCE)}


def test_memory_that_comes_back_late_is_waited_for() -> None:
    readings = iter([900, 900, 900, 100, 100])  # at the beginning, and at each look afterwards
    ledger = Ledger(lambda: {"engine": next(readings)})
    with ledger.release("sleep", {"engine": 800}, tolerance=0, patience=60):
        pass
    assert [entry.held["engine"] for entry in ledger.entries] == [900, 100]


def test_somebody_who_is_not_measured_is_refused_before_anything_is_released(ledger: Ledger) -> None:
    ran = False
    with (
        pytest.raises(KeyError, match="engine: not measured; measured are trainer"),
        ledger.release("engine sleeps", {"engine": 1}, TOLERANCE),
    ):
        ran = True
    assert not ran


@given(before=st.integers(0, 1000), after=st.integers(0, 1000), due=st.integers(0, 1000), tolerance=st.integers(0, 100))
def test_refused_exactly_when_more_than_the_tolerance_is_missing(
    before: int, after: int, due: int, tolerance: int
) -> None:
    level = before
    ledger = Ledger(lambda: {"a": level, "b": 7})
    try:
        with ledger.release("x", {"a": due}, tolerance):
            level = after
        refused = False
    except MemoryNotReturned:
        refused = True
    assert refused == (before - after < due - tolerance)


HOARDER = f"""
kept = []
print("up", flush=True)
while True:
    input()
    kept.append(b"x" * {PIECE // 8})
    print("released", flush=True)
"""


@pytest.fixture
def hoarder() -> Iterator[subprocess.Popen]:
    """A process that says "released" each time, and keeps a little more."""
    yield from talking(HOARDER)


def test_a_little_that_is_kept_every_time_is_refused_when_it_adds_up(hoarder: subprocess.Popen) -> None:
    ledger = Ledger(meter(CPU, {"engine": [hoarder.pid]}))
    allowed = PIECE // 8 * 2 + PIECE // 16
    for _ in range(3):
        tell(hoarder)
        ledger.at_rest("engine has left", "engine", allowed)
    tell(hoarder)
    with pytest.raises(MemoryNotReturned, match="engine has left: engine keeps") as refused:
        ledger.at_rest("engine has left", "engine", allowed)
    kept, least = re.search(r"keeps ([\d.]+) MiB, and has kept ([\d.]+) MiB", str(refused.value)).groups()
    assert float(kept) - float(least) == pytest.approx(96, abs=16)
    assert str(refused.value).endswith(ledger.table())
    ledger.forget("engine")
    ledger.at_rest("another engine has left", "engine", 0)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=8), st.integers(0, 50))
def test_at_rest_nobody_keeps_more_than_the_tolerance_above_the_least_so_far(kept: list[int], tolerance: int) -> None:
    level = 0
    ledger = Ledger(lambda: {"engine": level})
    for number, level in enumerate(kept):
        refused = nullcontext() if level <= min(kept[: number + 1]) + tolerance else pytest.raises(MemoryNotReturned)
        with refused:
            ledger.at_rest("left", "engine", tolerance)


def test_what_a_holder_keeps_may_be_gone_late() -> None:
    readings = iter([100, 900, 900, 100, 100])
    ledger = Ledger(lambda: {"engine": next(readings)})
    for _ in range(2):
        ledger.at_rest("left", "engine", tolerance=0, patience=60)
    assert [entry.held["engine"] for entry in ledger.entries] == [100, 100]


def test_a_holder_that_the_driver_does_not_list_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger(lambda: {"engine": 0})
    for _ in range(2):
        ledger.at_rest("left", "engine", tolerance=0)
    assert len([m for m in caplog.messages if "no process of the engine" in m]) == 1
    with pytest.raises(KeyError, match="trainer: not measured; measured are engine"):
        ledger.at_rest("left", "trainer", tolerance=0)


def test_the_table_shows_every_holder_and_forgets_old_phases() -> None:
    later = REMEMBERED - 1
    readings = iter([{"a": 3 * MIB}, *[{"a": 5 * MIB}] * later, {"a": 0, "engine": 2000 * MIB}])
    ledger = Ledger(lambda: next(readings))
    for phase in ("first", *["second"] * later, "a long third"):
        ledger.mark(phase)
    assert ledger.table().splitlines() == [
        "MiB             a   engine",
        *["second        5.0        -"] * later,
        "a long third  0.0  2,000.0",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_driver_the_error_says_what_is_missing() -> None:
    with pytest.raises(RuntimeError, match=r"pip install nvidia-ml-py|is the NVIDIA driver installed"):
        device_memory(CPU, {})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_a_tensor_that_somebody_kept_is_refused() -> None:
    device = torch.device("cuda", 0)
    ledger = Ledger(meter(device, {"trainer": [os.getpid()]}))
    due = dict.fromkeys(("allocated", "reserved", "device"), 2 * PIECE)
    for leaks in (False, True):
        held = [torch.ones(PIECE, dtype=torch.uint8, device=device) for _ in range(2)]
        leak = held[0] if leaks else None
        with (
            pytest.raises(MemoryNotReturned, match="device keeps") if leaks else nullcontext(),
            ledger.release("trainer leaves", due, TOLERANCE, patience=5),
        ):
            held.clear()
            torch.cuda.empty_cache()
        del leak

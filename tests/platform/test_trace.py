"""Traces: what is recorded is read back, whatever became of the process; files are bounded; no error ends a run."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mega.platform import trace
from grpo_mega.platform.clock import own_clock
from grpo_mega.platform.flight import LINES, read_flight
from grpo_mega.platform.trace import Process, Trace, recording
from grpo_mega.show.traces.trace_files import events_in, read_traces, steps_of

PROCESS = Process(3, "rank 3 on here: pp 0", 4)
Tree = list[tuple[str, Any]]
NESTED = st.recursive(
    st.just([]), lambda inner: st.lists(st.tuples(st.sampled_from(["update", "wait", "a name"]), inner), max_size=3)
)


def trace_in(path: Path, keep: int = 5) -> Trace:
    path.mkdir(exist_ok=True)
    return Trace(path, PROCESS, own_clock(), keep, lambda: {"resident GB": 0.5})


def events(path: Path) -> list[dict[str, Any]]:
    return events_in_file(path / "trace" / "rank-00003.json")


def events_in_file(file: Path) -> list[dict[str, Any]]:
    return [*events_in(file.read_text())]


def test_what_is_recorded_is_an_array_that_json_reads_once_it_is_closed(tmp_path: Path) -> None:
    with recording(trace_in(tmp_path)), trace.step(1, "grpo"), trace.phase("generate"):
        since = trace.now()
        with trace.span("poll", samples=4):
            pass
        trace.under_way("sample", 'prompt "7\n" #0', since, tokens=12)
    text = (tmp_path / "trace" / "rank-00003.json").read_text()
    whole = json.loads(text.removesuffix(",\n") + "]")
    assert whole == events(tmp_path), "and every event is on a line of its own"
    told = [(e["ph"], e["name"]) for e in whole if e["ph"] in "BEXbe"]
    assert told == [
        ("B", "step"), ("B", "generate"), ("X", "poll"), ("b", 'prompt "7\n" #0'), ("e", 'prompt "7\n" #0'),
        ("E", "generate"), ("E", "step"),
    ]  # fmt: skip
    assert all(e["pid"] == 3 for e in whole)
    assert [e["args"] for e in whole if e["name"] == "poll"] == [{"samples": 4}]
    assert {e["args"]["resident GB"] for e in whole if e["ph"] == "C"} == {0.5}
    begin, end = (next(e["ts"] for e in whole if e["ph"] == kind) for kind in "be")
    assert 0 < end - begin < 60e6


@settings(max_examples=25, deadline=None)
@given(NESTED)
def test_spans_and_phases_keep_their_order_and_nesting(tmp_path_factory: pytest.TempPathFactory, tree: Tree) -> None:
    path = tmp_path_factory.mktemp("nested")

    def walk(nodes: Tree, depth: int) -> None:
        for name, inner in nodes:
            with trace.phase(name) if depth % 2 else trace.span(name):
                walk(inner, depth + 1)

    with recording(trace_in(path)):
        walk(tree, 0)
    spans, begun = [], []
    for event in events(path):
        if event["ph"] == "B":
            begun.append(event)
        elif event["ph"] in "EX":
            first = begun.pop() if event["ph"] == "E" else event
            spans.append((first["ts"], event["ts"] + event.get("dur", 0.0), first["name"]))
    assert nested(sorted(spans, key=lambda s: (s[0], -s[1]))) == tree
    assert [".".join(m.open) for m in read_flight(path / "flight" / "rank-00003") if m.begins] == paths(tree, [])


def nested(spans: list[tuple[float, float, str]]) -> Tree:
    """Spans, by their beginnings -> what is inside of what."""
    found: Tree = []
    stack: list[tuple[float, Tree]] = [(float("inf"), found)]
    for begin, end, name in spans:
        while stack[-1][0] <= begin:
            stack.pop()
        assert end <= stack[-1][0], "a span ends after the one around it"
        inner: Tree = []
        stack[-1][1].append((name, inner))
        stack.append((end, inner))
    return found


def paths(tree: Tree, around: list[str]) -> list[str]:
    """The flight recorder's lines of what begins."""
    return [
        line
        for name, inner in tree
        for line in (".".join([*around, name]).replace(" ", "-"), *paths(inner, [*around, name]))
    ]


def test_threads_have_rows_of_their_own_and_are_no_part_of_the_flight_recorder(tmp_path: Path) -> None:
    with recording(trace_in(tmp_path)), trace.phase("reward"):
        for number in (0, 1, 0):
            thread = threading.Thread(target=in_thread, name=f"reward worker_{number}")
            thread.start()
            thread.join()
    rows = {e["tid"]: e["args"]["name"] for e in events(tmp_path) if e["name"] == "thread_name"}
    assert rows == {0: "phases", 1: "reward worker_0", 2: "reward worker_1"}
    assert [e["tid"] for e in events(tmp_path) if e["name"] == "score"] == [1, 2, 1]
    assert {m.open for m in read_flight(tmp_path / "flight" / "rank-00003")} == {("reward",)}


def in_thread() -> None:
    with trace.span("score"):
        pass


def test_other_processes_have_rows_of_their_own_one_for_each_that_works_at_the_same_time(tmp_path: Path) -> None:
    both = threading.Barrier(2)

    def ask(worker: int) -> None:
        with trace.beside("sandbox", "test", number=worker) as about:
            both.wait()
            about["status"] = "exited"

    with recording(trace_in(tmp_path)), trace.phase("reward"):
        threads = [threading.Thread(target=ask, args=(worker,)) for worker in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with pytest.raises(ValueError, match="lost"), trace.beside("sandbox", "test", number=3):
            raise ValueError("lost")
        trace.record_beside("engine", "generate", trace.now(), samples=4)
        trace.counter("device", **{"engine GB": 1.5})
    rows = {e["tid"]: e["args"]["name"] for e in events(tmp_path) if e["name"] == "thread_name"}
    found = [(rows[e["tid"]], e["name"], e["args"]) for e in events(tmp_path) if e["ph"] == "X"]
    assert {row for row, name, _ in found[:2]} == {"sandbox", "sandbox 2"}
    assert sorted(about["number"] for _, _, about in found[:2]) == [1, 2]
    assert {about["status"] for _, _, about in found[:2]} == {"exited"}
    assert found[2:] == [("sandbox", "test", {"number": 3}), ("engine", "generate", {"samples": 4})], (
        "a row is free again"
    )
    assert [e["args"] for e in events(tmp_path) if e["name"] == "device"] == [{"engine GB": 1.5}]


KILLED = """
import os, signal, sys
from pathlib import Path
from grpo_mega.platform import trace
from grpo_mega.platform.clock import own_clock
with trace.recording(trace.Trace(Path(sys.argv[1]), trace.Process(3, "rank 3", 4), own_clock(), 5, dict)):
    for step in (1, 2):
        with trace.step(step, "grpo"), trace.phase("update", mini_batch=step):
            with trace.span("forward-recv", micro=step):
                if step == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_kill_9_leaves_what_happened_before_and_what_was_going_on(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    (found,) = read_traces(tmp_path)
    assert {*steps_of(found)} == {1}, "the second is not whole"
    assert [e["args"] for e in found.events if e["ph"] == "B" and e["name"] == "update"] == [
        {"mini_batch": 1},
        {"mini_batch": 2},
    ]
    last = read_flight(tmp_path / "flight" / "rank-00003")[-1]
    assert (last.begins, last.open, last.about) == (True, ("step", "update", "forward-recv"), "micro=2")


@pytest.mark.parametrize(("keep", "steps"), [(1, 7), (3, 3), (3, 7), (3, 8), (5, 4)])
def test_the_newest_steps_are_kept_and_at_most_as_many_before_them(tmp_path: Path, keep: int, steps: int) -> None:
    with recording(trace_in(tmp_path, keep)):
        for step in range(1, steps + 1):
            with trace.step(step, "grpo"):
                pass
    (found,) = read_traces(tmp_path)
    kept = [*steps_of(found)]
    assert kept == [*range(steps + 1 - len(kept), steps + 1)]
    assert min(keep, steps) <= len(kept) <= 2 * keep


def test_a_start_with_fewer_ranks_forgets_the_others(tmp_path: Path) -> None:
    """Else their last steps would be the only ones that all have, and they the ones that others seem to wait for."""
    kept = {}
    for ranks in (3, 1):
        for rank in range(ranks):
            process = trace.Process(rank, f"rank {rank}", ranks)
            with recording(trace.Trace(tmp_path, process, own_clock(), 5, dict)), trace.step(1, "grpo"):
                pass
        kept[ranks] = {file.name for folder in ("trace", "flight") for file in (tmp_path / folder).iterdir()}
    assert {"rank-00002", "rank-00002.json"} <= kept[3]
    assert kept[1] == {"rank-00000", "rank-00000.before", "rank-00000.json", "rank-00000.before.json"}


def test_another_start_keeps_the_file_of_the_one_before(tmp_path: Path) -> None:
    for step in (1, 2):
        with recording(trace_in(tmp_path)), trace.step(step, "grpo"):
            pass
    (found,) = read_traces(tmp_path)
    assert {*steps_of(found)} == {1, 2}


def test_what_a_step_has_too_much_of_is_counted_and_left_out_but_for_phases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "MOST_EVENTS", 10)
    with recording(trace_in(tmp_path)):
        for step in (1, 2):
            with trace.step(step, "grpo"):
                for _ in range(50 if step == 1 else 3):
                    in_thread()
                with trace.phase("update"):
                    pass
    found = events(tmp_path)
    assert sum(e["name"] == "score" for e in found) == 8 + 3, "2 of the 10 are the step's own"
    assert [e["name"] for e in found if e["ph"] == "i"] == ["42 events of this step are left out"]
    assert sum(e["name"] == "update" for e in found if e["ph"] == "B") == 2


def test_what_an_error_leaves_open_ends_with_what_is_around_it(tmp_path: Path) -> None:
    with recording(trace_in(tmp_path)):
        with trace.phase("update"):
            trace.span("forward-compute").start()
        with trace.phase("checkpoint"):
            pass
    found = read_flight(tmp_path / "flight" / "rank-00003")
    assert found[-2].open == ("checkpoint",)
    assert found[-1].inside == ()


def test_the_flight_recorder_is_a_ring(tmp_path: Path) -> None:
    with recording(trace_in(tmp_path, keep=0)):
        for number in range(LINES):
            with trace.span("poll", number=number):
                pass
    found = read_flight(tmp_path / "flight" / "rank-00003")
    assert [moment.number for moment in found] == [*range(LINES, 2 * LINES)]
    assert not (tmp_path / "trace").exists(), "without run.keep_traces"


@pytest.mark.parametrize("blocked", ["trace", "flight"])
def test_a_folder_that_cannot_be_written_is_a_warning(
    tmp_path: Path, blocked: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / blocked).write_text("a file is in the way")
    with recording(trace_in(tmp_path)), trace.step(1, "grpo"):
        in_thread()
    assert [str(tmp_path / blocked) in record.getMessage() for record in caplog.records] == [True]
    other = {"trace": "flight/rank-00003", "flight": "trace/rank-00003.json"}[blocked]
    assert (tmp_path / other).stat().st_size > 0


def test_a_full_disk_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with recording(trace_in(tmp_path)):
        with trace.step(1, "grpo"):
            in_thread()
        with Path("/dev/full").open("wb") as full:
            made = trace._trace
            assert made
            assert made._descriptor
            os.dup2(full.fileno(), made._descriptor)
        for step in (2, 3):
            with trace.step(step, "grpo"):
                in_thread()
    assert [os.strerror(errno.ENOSPC) in record.getMessage() for record in caplog.records] == [True]


def test_what_a_trace_cannot_record_ends_it_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A value that JSON does not have, and memory that cannot be measured."""
    unmeasured = Trace(tmp_path, PROCESS, own_clock(), 5, lambda: {"resident GB": 1 / 0})
    (tmp_path / "other").mkdir()
    for made in (trace_in(tmp_path / "other"), unmeasured):
        with recording(made):
            for step in (1, 2):
                with trace.step(step, "grpo"), trace.span("poll", of=object()):
                    pass
    said = [record.getMessage() for record in caplog.records if record.exc_info]
    assert ["its trace ends here" in message for message in said] == [True, True]
    assert [moment.about for moment in read_flight(tmp_path / "flight" / "rank-00003") if moment.begins][-2:]


def test_without_a_trace_and_in_a_fork_nothing_is_recorded(tmp_path: Path) -> None:
    with trace.step(1, "grpo"), trace.phase("update"), trace.span("poll"):
        trace.under_way("sample", "p #0", trace.now())
    with recording(trace_in(tmp_path)), trace.step(1, "grpo"):
        child = os.fork()
        if not child:
            in_thread()
            os._exit(0)
        os.waitpid(child, 0)
    assert not [e for e in events(tmp_path) if e["name"] == "score"]

"""Traces of real runs: they change no bit, have what every rank did, and outlive a rank that is killed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from ranks import results, run_ranks
from train_jobs import SMALL, Job, differing, numbers, rewarded_by, samples, saved

from grpo_mega.platform.flight import read_flight
from grpo_mega.show.traces.trace_files import read_traces, steps_of
from grpo_mega.show.traces.waterfall import waterfall

pytestmark = pytest.mark.long

JOB = Path(__file__).with_name("stops_job.py")
COMMON = [
    rewarded_by("varied"), "run.steps=3", "run.eval_every=2", "run.tensorboard=false", "run.save_every=0",
    "layout=single", "layout.pp=2", "layout.micro_batch_tokens=128", "run.async_save=true",
]  # fmt: skip
RUNS = {
    "traced": [*COMMON, "run.keep_traces=2", "run.profile_steps=2:3"],
    "untraced": [*COMMON, "run.keep_traces=0"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    tasks = [["run", [*words, f"run.name={name}"], ["end"]] for name, words in RUNS.items()]
    assert results(run_ranks(JOB, 2, [str(folder), json.dumps(tasks)])) == [["completed"]] * len(RUNS)
    return folder


def test_traces_and_profiles_change_no_token_and_no_weight(folder: Path) -> None:
    traced, untraced = folder / "traced", folder / "untraced"
    assert numbers(traced) == numbers(untraced)
    assert differing(samples(traced), samples(untraced), by=0.0) == {}
    step = "checkpoints/step-000003"
    assert saved(traced / step) == saved(untraced / step)
    assert not (untraced / "trace").exists()
    assert not (untraced / "profile").exists()


def test_each_rank_has_its_steps_phases_passes_samples_rewards_and_checkpoints(folder: Path) -> None:
    traces = read_traces(folder / "traced")
    assert [trace.rank for trace in traces] == [0, 1]
    for trace in traces:
        assert {*steps_of(trace)} == {1, 2, 3}
        kinds = {(e["ph"], e["name"]) for e in trace.events}
        assert {("B", name) for name in ("step", "generate", "reward", "update", "evaluate", "checkpoint")} <= kinds
        assert {
            ("X", name) for name in ("poll", "forward-compute", "backward-compute", "optimizer", "term", "score")
        } <= kinds
        assert {e["args"]["name"] for e in trace.events if e["name"] == "term"} == {"accuracy", "format", "own"}
        assert all(e["args"]["resident GB"] > 0.01 for e in trace.events if e["name"] == "memory")
        assert [e["name"] for e in trace.events if e.get("cat") == "checkpoint" and e["ph"] == "b"] == ["step-000003"]
    assert ("X", "forward-recv") in {(e["ph"], e["name"]) for e in traces[1].events}
    tokens = [e["args"]["tokens"] for t in traces for e in t.events if e.get("cat") == "sample" and e["ph"] == "b"]
    assert len(tokens) == 3 * 8 * 4 + 3 * 8, "of three steps, and of three evaluations"


def test_the_waterfall_is_as_long_as_the_steps_are(folder: Path) -> None:
    found = waterfall(read_traces(folder / "traced"))
    assert found is not None
    assert (found.steps, found.ranks) == ([1, 2, 3], 2)
    lines = numbers_of_time(folder / "traced")
    assert sum(part.seconds for part in found.parts) > 0
    for step, seconds in lines.items():  # phases alone; a trace has what is between them, too
        one = waterfall(read_traces(folder / "traced"), range(step, step + 1))
        assert one is not None
        assert one.seconds >= 0.9 * seconds
        whole = (
            max(end - begin for t in read_traces(folder / "traced") for _, (begin, end) in [steps_of(t)[step]]) / 1e6
        )
        assert one.seconds <= whole * (1 + 1e-6), "nothing counts twice"
    assert {"generation", "reward", "training", "pipeline bubble"} <= {part.name for part in found.parts}


def numbers_of_time(path: Path) -> dict[int, float]:
    """Step -> seconds of its phases, on the main rank."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["time/step"] for line in lines if "time/step" in line}


def test_the_profiler_leaves_a_file_of_its_steps_for_each_rank(folder: Path) -> None:
    files = sorted((folder / "traced" / "profile").iterdir())
    assert [file.name for file in files] == [f"rank-0000{n}-steps-2-3.pt.trace.json.gz" for n in (0, 1)]
    for file in files:
        names = {event.get("name") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
        assert any(name and name.startswith("aten::") for name in names)


def test_a_run_that_fails_names_what_its_ranks_did_last(tmp_path: Path) -> None:
    words = [*SMALL, "base=none", "layout=single", rewarded_by("exits"), "run.name=failing", "run.steps=2"]
    ended = Job(tmp_path, words).finish()
    assert ended.code == 1, ended
    flight = Path("runs", "failing", "flight")
    assert f"what each rank did last: tools/trace.py {(tmp_path / flight).parent} --last" in ended.stderr
    last = [moment.open for moment in read_flight(tmp_path / flight / "rank-00000")[-4:]]
    assert {path[0] for path in last} == {"step"}
    assert ("step", "generate", "reward") in last

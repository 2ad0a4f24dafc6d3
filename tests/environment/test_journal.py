"""The journal: after a kill, the same calls get the same replies, whatever the environment would say now."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from clock_environment import KILL_AT
from ranks import run_ranks
from train_jobs import numbers, samples, saved

from grpo_mega.environment.journal import FOLDER, Journal

HERE = Path(__file__).parent
SLICED = ["rollout.slice_tokens=5", "algorithm.correction=truncate", "rollout.order=submitted"]


def digests_of(job: list[str], ranks: int, kill_at: int = 0) -> list[str]:
    """The digests after the steps of a run, which may be killed."""
    path = Path(job[0], "digests.json")
    path.unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        if kill_at:
            patch.setenv(KILL_AT, str(kill_at))
        # Of two ranks, the one that still lives may end first, as the other is gone.
        how = "exited with -9" if ranks == 1 else "exited with"
        ended = pytest.raises(AssertionError, match=how) if kill_at else nullcontext()
        with ended:
            run_ranks(HERE / "killed_in_a_call_job.py", ranks, job)
    return json.loads(path.read_text()) if path.exists() else []


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        pytest.param(1, SLICED, id="slices"),
        pytest.param(1, [], id="whole", marks=pytest.mark.long),
        pytest.param(1, [*SLICED, "environment.path=clock_environment:AsyncClock"], id="async", marks=pytest.mark.long),
        pytest.param(1, [*SLICED, "environment.path=clock_environment:agent"], id="agent"),
        pytest.param(1, [*SLICED, "rollout.ahead=true"], id="ahead", marks=pytest.mark.long),
        pytest.param(2, ["layout=ep2"], id="ep2", marks=pytest.mark.long),
        pytest.param(2, [*SLICED, "layout=tp2"], id="tp2", marks=pytest.mark.long),
    ],
)
def test_a_run_killed_in_a_call_goes_on_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, more: list[str]
) -> None:
    for folder in (HERE, HERE.parent / "stages"):
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    job = [str(tmp_path), *more]
    # What the clock says decides how many calls a rank makes, but one of them makes its share of the first nine.
    once = digests_of(job, ranks, kill_at=9 // ranks)
    assert len(once) < 3, "it was killed in a call"
    recorded = lines(tmp_path)
    assert recorded
    first = digests_of(job, ranks, kill_at=10**6)
    assert first[: len(once)] == once
    assert all(line in lines(tmp_path) for line in recorded)
    assert len(first) == 3
    assert digests_of(job, ranks) == first
    keys = [key for key, _ in lines(tmp_path)]
    assert len(keys) == len({*keys}) > 15, "nothing is asked twice"


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "layout"), [(1, "single"), (2, "ep2")])
def test_a_run_killed_between_turns_goes_on_from_its_checkpoint_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, layout: str
) -> None:
    peace, killed = tmp_path / "peace", tmp_path / "killed"
    job = HERE / "killed_between_turns_job.py"
    run_ranks(job, ranks, [str(peace), f"layout={layout}"])
    with monkeypatch.context() as patch:
        patch.setenv("KILLED_BETWEEN_TURNS", "1")
        with pytest.raises(AssertionError, match="exited with -9" if ranks == 1 else "exited with"):
            run_ranks(job, ranks, [str(killed), f"layout={layout}"])
    assert [path.name for path in checkpoints(killed)] == ["step-000001"]
    recorded = lines(killed, "turns", step=1)
    assert any(key.startswith("reply ") for key, _ in recorded), "calls of the step that was lost"
    run_ranks(job, ranks, [str(killed), f"layout={layout}"])
    found, expected = (
        [json.loads((folder / f"step-{step}.json").read_text()) for step in (1, 2, 3)] for folder in (killed, peace)
    )
    assert max(found[1]["calls"]) > 0, "samples with turns were in the checkpoint"
    assert {key for key, _ in recorded} < {*found[1]["asked"]}
    for step, in_peace in zip(found, expected, strict=True):
        assert len(step["asked"]) == len({*step["asked"]}), "nothing is asked twice"
        assert step | {"asked": sorted(step["asked"])} == in_peace | {"asked": sorted(in_peace["asked"])}
    assert metrics(killed) == metrics(peace)
    assert samples(killed / "turns") == samples(peace / "turns")
    assert [path.name for path in checkpoints(killed)] == [f"step-{step:06d}" for step in (1, 2, 3)]
    assert [*map(saved, checkpoints(killed))] == [*map(saved, checkpoints(peace))]


def metrics(folder: Path) -> list[dict[str, Any]]:
    steps = numbers(folder / "turns")
    assert all(line.pop("environment/seconds") > 0 for line in steps)
    return steps


def checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "turns" / "checkpoints").glob("step-*"))


def lines(folder: Path, name: str = "clock", step: int | None = None) -> list[tuple[str, object]]:
    """What a run has recorded, in one step or in all."""
    paths = sorted((folder / name / FOLDER).glob(f"{'*' if step is None else f'step-{step:06d}'}/*.jsonl"))
    return [tuple(json.loads(line)) for path in paths for line in path.read_text().splitlines() if line]


def test_replies_are_found_by_any_rank_and_a_torn_line_is_not(tmp_path: Path) -> None:
    before = [Journal(tmp_path, rank) for rank in range(2)]
    for rank, journal in enumerate(before):
        journal.begin(7, 0)
        journal.put(f"key {rank}", {"text": f"ü\n{rank}", "error": False})
        journal.put("none", None)
        journal.sync()
    path = tmp_path / "step-000007" / "rank-00001.jsonl"
    path.write_bytes(path.read_bytes() + b'\n["torn", {"te')
    after = Journal(tmp_path, 1)
    after.begin(7, 0)
    assert after.get("key 0") == ({"text": "ü\n0", "error": False},)
    assert after.get("none") == (None,)
    assert after.get("torn") is None
    after.put("torn", 1)
    after.sync()
    after.begin(8, 7)
    assert after.get("key 0") is None, "another step"
    after.put("key 8", 8)
    after.close()
    again = Journal(tmp_path, 0)
    again.begin(7, 0)
    assert again.get("torn") == (1,)
    again.begin(8, 8)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000008"], "a checkpoint has the other"
    assert again.get("key 8") == (8,), "the checkpoint was written before this step"

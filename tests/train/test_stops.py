"""Asked to stop, a run stops where nothing is lost; a damaged checkpoint is noticed and the one before it is used."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from metric_lines import held_out, of_steps
from ranks import results, run_ranks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from train_jobs import (
    SMALL,
    Job,
    contents,
    differing,
    half_written,
    numbers,
    rewarded_by,
    samples,
    saved,
    without_seconds,
)
from train_rewards import HOLD

from grpo_mega.rollout.engine import STEPS_PER_POLL

pytestmark = pytest.mark.long

JOB = Path(__file__).with_name("stops_job.py")
OVERRIDES = [*SMALL, "layout=single", rewarded_by("lucky"), "run.steps=4", "run.save_every=2", "run.eval_every=0"]

UPDATES = ["algorithm.kl_coef=0.05", "algorithm.epochs=2", "algorithm.mini_batches=2", "rollout.max_new_tokens=24"]
"""Four updates a step; completions long enough that an engine asks a second time."""
ALONE = [*UPDATES, rewarded_by("lucky"), "run.steps=4", "run.save_every=1", "run.eval_every=2"]
ALONE += ["run.keep_checkpoints=9", "run.async_save=true"]
STOPS = {
    "hidden_states:0:-:5:1": ("in step 1 before its first update", "step-000000"),  # generation
    "logprobs:1:-:1:0": ("in step 2 before its first update", "step-000001"),
    "update:1:1:1:1": ("in step 2 after 2 of 4 updates", "step-000001-updates-0002"),
    "update:1:2:1:0": ("in step 2 after 3 of 4 updates", "step-000001-updates-0003"),
    "hidden_states:1:4:5:1": ("in step 2 after 4 of 4 updates", "step-000001-updates-0004"),  # validation
    "score:2:-:1:1": ("in step 3 before its first update", "step-000002"),  # while step 2 is being saved
    "hidden_states:4:-:5:0": ("after step 4, before the result was measured", "step-000004"),
}
"""Where ranks that share experts are stopped, one rank alone being asked -> what is said, what is saved."""
STOPS_OF_REPLICAS = {
    "hidden_states:0:-:5:3": ("in step 1 before its first update", "step-000000"),
    "update:0:1:1:2": ("in step 1 after 2 of 4 updates", "step-000000-updates-0002"),
    "hidden_states:1:4:5:1": ("in step 2 after 4 of 4 updates", "step-000001-updates-0004"),
}
"""The same for two replicas of two stages, for two steps."""

PPO = [*ALONE, "algorithm=ppo", "algorithm.kl_coef=0.05", "critic.alone_steps=0", "run.steps=2"]
STOPS_OF_CRITIC = {
    "logprobs:0:-:1:1": ("in step 1 before its first update", "step-000000"),
    "update:0:1:1:1": ("in step 1 after 2 of 4 updates", "step-000000-updates-0002"),
    "update:1:2:1:0": ("in step 2 after 3 of 4 updates", "step-000001-updates-0003"),
}
"""The same for two ranks with a critic."""


TEACHER = ["algorithm.kl_coef=0.05", rewarded_by("lucky"), "run.steps=1", "run.eval_every=0", "model.ffn_hidden=192"]
TAUGHT = [*ALONE, "run.steps=2"]
STOPS_OF_STUDENT = {
    "logprobs:0:-:1:1": ("in step 1 before its first update", "step-000000"),
    "update:0:1:1:1": ("in step 1 after 2 of 4 updates", "step-000000-updates-0002"),
    "update:1:2:1:0": ("in step 2 after 3 of 4 updates", "step-000001-updates-0003"),
}
"""The same for two ranks with a teacher."""

SLICES = [
    *("rollout.slice_tokens=5", "rollout.in_flight=9", "rollout.reserve=3"),
    *("rollout.stop=['=','7','8']", "algorithm.correction=mask"),
]
"""A random model hardly ever ends its completions: with more tokens that end them, their lengths vary."""
SLICED = [*ALONE, *SLICES, "run.steps=3"]
STOPS_OF_SLICES = {
    "hidden_states:0:-:9:0": ("in step 1 before its first update", "step-000000"),  # a later slice of the step
    "hidden_states:1:-:5:1": ("in step 2 before its first update", "step-000001"),
    "score:1:-:1:1": ("in step 2 before its first update", "step-000001"),
    "update:1:2:1:0": ("in step 2 after 3 of 4 updates", "step-000001-updates-0003"),
    "hidden_states:1:4:5:1": ("in step 2 after 4 of 4 updates", "step-000001-updates-0004"),  # validation
    "logprobs:2:-:1:0": ("in step 3 before its first update", "step-000002"),
}
"""The same for two ranks whose samples outlive steps."""


@dataclass
class Asked:
    """Runs that stopped again and again, beside runs left in peace; how each start ended, and what engines saw."""

    folder: Path
    ends: dict[str, list[str]]
    engines: dict[str, dict[str, Any]]


def asked(folder: Path, ranks: int, layout: list[str], runs: dict[str, list], engines: dict[str, tuple]) -> Asked:
    """Runs and engines by name, all in one job: overrides and moments of each run, layout and rank of each engine."""
    tasks = [["run", [*layout, *own, f"run.name={name}"], moments] for name, (own, moments) in runs.items()]
    tasks += [["generate", [*ALONE, *own, f"run.name={name}"], rank] for name, (own, rank) in engines.items()]
    found = results(run_ranks(JOB, ranks, [str(folder), json.dumps(tasks)], timeout=600))
    return Asked(folder, dict(zip(runs, found, strict=False)), dict(zip(engines, found[len(runs) :], strict=True)))


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """Two ranks that share experts; the run `moved` waits for another layout."""
    moved = [*UPDATES, rewarded_by("varied"), "run.steps=2", "run.eval_every=0"]
    runs = {
        "peace": (ALONE, ["end"]),
        "stopped": (ALONE, [*STOPS, "end"]),
        "moved": (moved, ["update:1:1:1:1"]),
        "stayed": (moved, ["end"]),
    }
    return asked(tmp_path_factory.mktemp("sharing"), 2, ["layout=ep2"], runs, {"ep2": (["layout=ep2"], 1)})


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """Four ranks: two replicas of two stages, and engines under other layouts."""
    short = [*ALONE, "run.steps=2"]
    runs = {"peace": (short, ["end"]), "stopped": (short, [*STOPS_OF_REPLICAS, "end"])}
    engines = {
        "dp2_pp2": (["layout=pp2"], 3),
        "ep2_pp2": (["layout=pp2", "layout.ep=2"], 3),
        "tp2_dp2_ep4": (["layout.tp=2", "layout.sp=true", "layout.ep=4"], 0),
    }
    return asked(tmp_path_factory.mktemp("replicas"), 4, ["layout=pp2"], runs, engines)


@pytest.fixture(scope="module")
def critic(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """Two ranks that share experts, of policy and critic."""
    runs = {"peace": (PPO, ["end"]), "stopped": (PPO, [*STOPS_OF_CRITIC, "end"])}
    return asked(tmp_path_factory.mktemp("critic"), 2, ["layout=ep2"], runs, {})


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """Two ranks that share experts, of policy and teacher."""
    folder = tmp_path_factory.mktemp("taught")
    student = [*TAUGHT, f"distill.teacher={folder}/teacher"]
    runs = {
        "teacher": (TEACHER, ["end"]),
        "peace": (student, ["end"]),
        "stopped": (student, [*STOPS_OF_STUDENT, "end"]),
    }
    return asked(folder, 2, ["layout=ep2"], runs, {})


@pytest.fixture(scope="module")
def sliced(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """Two ranks that share experts, whose samples outlive steps."""
    runs = {"peace": (SLICED, ["end"]), "stopped": (SLICED, [*STOPS_OF_SLICES, "end"])}
    return asked(tmp_path_factory.mktemp("sliced"), 2, ["layout=ep2"], runs, {})


STORIES = {
    "sharing": STOPS,
    "replicas": STOPS_OF_REPLICAS,
    "critic": STOPS_OF_CRITIC,
    "taught": STOPS_OF_STUDENT,
    "sliced": STOPS_OF_SLICES,
}


@pytest.fixture(params=STORIES.items(), ids=STORIES)
def story(request: pytest.FixtureRequest) -> tuple[Asked, dict[str, tuple[str, str]]]:
    name, stops = request.param
    return request.getfixturevalue(name), stops


def test_one_rank_alone_is_enough_to_stop_all_where_they_are(story):
    told, stops = story
    *ends, last = told.ends["stopped"]
    checkpoints = told.folder / "stopped" / "checkpoints"
    assert ends == [
        f"stopped {where}; {checkpoints / path} is saved, the same command continues there"
        for where, path in stops.values()
    ]
    assert last == "completed"


def test_every_checkpoint_is_that_of_the_run_in_peace(story):
    told, _ = story
    names = [path.name for path in (told.folder / "peace" / "checkpoints").iterdir()]
    assert len(names) >= 2
    for name in names:
        expected, found = (saved(told.folder / run / "checkpoints" / name) for run in ("peace", "stopped"))
        assert any(part.startswith("weights/") for part in expected)
        assert found == expected


def test_numbers_samples_and_summary_are_those_of_the_run_in_peace(story):
    peace, stopped = (story[0].folder / run for run in ("peace", "stopped"))
    assert all(line["policy/grad_norm"] > 0 and "policy/kl" in line for line in numbers(peace))
    assert numbers(stopped) == numbers(peace)
    assert held_out(stopped) == held_out(peace)
    assert contents(stopped / "samples") == contents(peace / "samples")
    assert without_seconds(stopped / "summary.json") == without_seconds(peace / "summary.json")


def test_tensorboard_has_each_step_once(story):
    events = EventAccumulator(str(story[0].folder / "stopped" / "tensorboard"))
    events.Reload()
    steps = [event.step for event in events.Scalars("policy/loss")]
    assert steps == [line["step"] for line in numbers(story[0].folder / "peace")]


def test_a_checkpoint_within_a_step_is_deleted_when_it_has_served(story):
    told, stops = story
    left = {path.name for path in (told.folder / "stopped" / "checkpoints").iterdir()}
    assert any("updates" in path for _, path in stops.values())
    assert left == {path.name for path in (told.folder / "peace" / "checkpoints").iterdir()} | {"step-000000"}


def test_what_is_left_of_a_step_is_continued_by_another_number_of_processes(sharing):
    overrides = [*UPDATES, rewarded_by("varied"), "run.steps=2", "run.eval_every=0", "run.name=moved", "layout=single"]
    tasks = [["run", overrides, ["end"]]]
    assert results(run_ranks(JOB, 1, [str(sharing.folder), json.dumps(tasks)])) == [["completed"]]
    assert "after 2 of 4 updates" in sharing.ends["moved"][0]
    stay_together(*(sharing.folder / run for run in ("moved", "stayed")), steps=2)


def stay_together(moved: Path, stayed: Path, steps: int) -> None:
    assert differing(samples(moved), samples(stayed), by=1e-4) == {}
    assert [line["step"] for line in numbers(moved)] == [*range(1, steps + 1)]
    for here, there in zip(numbers(moved), numbers(stayed), strict=True):
        assert here == pytest.approx(there, rel=1e-4, abs=1e-5)


def test_samples_in_flight_go_on_under_other_layouts(tmp_path):
    """Two ranks that share experts, one, two replicas, which end the run, and two stages, for which it is longer."""
    how = [*UPDATES, *SLICES, rewarded_by("varied"), "run.eval_every=0"]
    story = [
        (2, "ep2", 3, "hidden_states:1:-:5:1", "in step 2 before its first update"),
        (1, "single", 3, "update:1:1:1:0", "in step 2 after 2 of 4 updates"),
        (2, "single", 3, "end", "completed"),
        (2, "pp2", 4, "end", "completed"),
    ]
    stayed = ["run", [*how, "layout=ep2", "run.steps=4", "run.name=stayed"], ["end"]]
    for ranks, layout, steps, moment, outcome in story:
        moved = ["run", [*how, f"layout={layout}", f"run.steps={steps}", "run.name=moved"], [moment]]
        tasks = [moved, stayed] if layout == "ep2" else [moved]
        assert outcome in results(run_ranks(JOB, ranks, [str(tmp_path), json.dumps(tasks)]))[0][0]
    stay_together(tmp_path / "moved", tmp_path / "stayed", steps=4)
    assert min(line["rollout/in_flight"] for line in numbers(tmp_path / "stayed")) > 0


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [("sharing", "ep2"), ("replicas", "dp2_pp2"), ("replicas", "ep2_pp2"), ("replicas", "tp2_dp2_ep4")],
)
def test_all_ranks_give_up_at_the_next_poll_whoever_was_asked(request, ranks, layout):
    found = request.getfixturevalue(ranks).engines[layout]
    for given_up, passes, in_peace in found["ranks"]:
        assert given_up
        assert in_peace > passes == 1 + STEPS_PER_POLL
    assert found["same"], "the next generation is not disturbed"


@pytest.fixture(scope="module")
def peaceful(finished) -> Path:
    """Four steps at once, on one rank."""
    ended = Job(finished.root, [*OVERRIDES, "run.name=in-peace"]).finish()
    assert ended.code == 0, ended
    return finished.root / "runs" / "in-peace"


@pytest.mark.parametrize(("number", "step"), [(signal.SIGTERM, 2), (signal.SIGUSR1, 1), (signal.SIGINT, 2)])
def test_a_signal_gives_up_the_step_and_the_run_goes_on_from_the_one_before(finished, peaceful, number, step):
    overrides = [*OVERRIDES, f"run.name={number.name}"]
    held = finished.root / f"held-{number.name}"
    job = Job(finished.root, overrides, environment={HOLD: f"{step}:{held}"}, cold=True)
    job.wait_until_there(held)
    if number == signal.SIGINT:
        job.interrupt()
    else:
        job.process.send_signal(number)
    ended = job.finish()
    assert ended.code == 75, ended
    assert f"stopped in step {step + 1} before its first update" in ended.stderr
    path = finished.root / "runs" / number.name
    assert [p.name for p in (path / "checkpoints").iterdir()] == [f"step-{step:06d}"]
    again = Job(finished.root, overrides).finish()
    assert again.code == 0, again
    assert f"continuing after step {step}" in again.stderr
    assert numbers(path) == numbers(peaceful)
    assert saved(path / "checkpoints" / "step-000004") == saved(peaceful / "checkpoints" / "step-000004")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_torchrun_passes_the_signal_on_and_all_ranks_agree(finished, number):
    held = finished.root / f"held-torchrun-{number}"
    overrides = [*OVERRIDES, "layout=ep2", f"run.name=torchrun-{number}"]
    job = Job(finished.root, overrides, ranks=2, environment={HOLD: f"1:{held}"}, cold=True)
    job.wait_until_there(held)
    if number == signal.SIGINT:
        job.interrupt()
    else:
        job.process.terminate()
    ended = job.finish()
    assert ended.code != 0
    assert not ended.orphans
    assert "stopped in step 2 before its first update" in ended.stderr
    path = finished.root / "runs" / f"torchrun-{number}"
    assert (path / "checkpoints" / "step-000001" / "manifest.json").is_file()
    assert half_written(path) == []


def test_a_second_ctrl_c_ends_a_run_without_torchrun_at_once(finished):
    overrides, held = [*OVERRIDES, "run.name=twice"], finished.root / "held.twice"
    job = Job(finished.root, overrides, environment={HOLD: f"2:{held}"}, cold=True)
    job.wait_until_there(held)
    job.interrupt_twice()
    ended = job.finish()
    assert (ended.code, ended.orphans) == (130, [])
    assert "interrupted: what came after the newest checkpoint is not saved" in ended.stderr
    assert half_written(finished.root / "runs" / "twice") == []


def test_a_fork_goes_on_bit_for_bit_as_the_run_it_is_from_which_stays_as_it_is(finished, peaceful):
    before, origin = contents(peaceful), peaceful / "checkpoints" / "step-000002"
    words = [*OVERRIDES, "run.name=fork", f"run.fork={origin}"]
    ended = Job(finished.root, [*words, "run.steps=3"]).finish()
    assert ended.code == 0, ended
    assert f"continuing after step 2, from {origin}" in ended.stderr
    assert contents(peaceful) == before
    again = Job(finished.root, [*words[:-1], f"run.fork={origin}-which-is-gone"]).finish()
    assert again.code == 0, again
    assert "continuing after step 3, from " in again.stderr
    path = peaceful.with_name("fork")
    assert numbers(path) == numbers(peaceful)
    assert held_out(path)[1:] == held_out(peaceful)[1:]
    assert saved(path / "checkpoints" / "step-000004") == saved(peaceful / "checkpoints" / "step-000004")


def test_a_fork_has_settings_of_its_own(finished, peaceful):
    origin, lower = peaceful / "checkpoints" / "step-000002", "optimizer.lr=1e-5"
    refused = Job(finished.root, [*OVERRIDES, "run.name=in-peace", lower]).finish()
    assert refused.code == 2
    assert "run.name=NEW run.fork=CHECKPOINT continues one of its checkpoints with the new settings" in refused.stderr
    ended = Job(finished.root, [*OVERRIDES, "run.name=lower", f"run.fork={origin}", lower]).finish()
    assert ended.code == 0, ended
    path = peaceful.with_name("lower")
    rates = [line["policy/lr"] for line in of_steps(path)]
    assert rates[:2] == [line["policy/lr"] for line in of_steps(peaceful)][:2]
    assert max(rates[2:]) <= 1e-5 < rates[1], "its warm-up goes on"
    assert numbers(path) != numbers(peaceful)


def test_what_cannot_be_forked_is_refused(finished, peaceful):
    origin = peaceful / "checkpoints" / "step-000002"
    itself = Job(finished.root, [*OVERRIDES, "run.name=in-peace", f"run.fork={origin}"]).finish()
    assert f"run.fork={origin}: one of this run's own checkpoints" in itself.stderr
    nowhere = Job(finished.root, [*OVERRIDES, "run.name=fork-2", f"run.fork={origin}9"]).finish()
    assert f"run.fork={origin}9: does not exist" in nowhere.stderr
    none = Job(finished.root, [*OVERRIDES, "run.name=fork-3", f"run.fork={peaceful}"]).finish()
    assert f"{peaceful}: not a checkpoint; give one of a run, runs/NAME/checkpoints/step-000025" in none.stderr
    other = Job(finished.root, [*OVERRIDES, "run.name=f", f"run.fork={origin}", "optimizer.weight_decay=0.1"]).finish()
    assert "optimizer.weight_decay=0.1: the optimizer's state of run.fork was saved with 0.0" in other.stderr
    assert {ended.code for ended in (itself, nowhere, none, other)} == {2}


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def altered(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "told"), [(truncated, "bytes instead of"), (altered, "differs"), (Path.unlink, "missing")]
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(finished, peaceful, harm, told):
    path = peaceful.with_name(f"damaged-{told.split()[0]}")
    shutil.copytree(peaceful, path)
    shards = sorted((path / "checkpoints" / "step-000004" / "weights").glob("*.distcp"))
    harm(shards[0])
    # The copy is another run by name only.
    (path / "run.json").write_text((path / "run.json").read_text().replace("in-peace", path.name))
    ended = Job(finished.root, [*OVERRIDES, f"run.name={path.name}"]).finish()
    assert ended.code == 0, ended
    said = ended.stderr.replace("\n", " ")
    assert "step-000004 is damaged" in said
    assert told in said
    assert "step-000002 instead" in said
    assert "continuing after step 2" in said
    assert numbers(path) == numbers(peaceful)


def test_when_every_checkpoint_is_damaged_nothing_is_thrown_away(finished, peaceful):
    path = peaceful.with_name("all-damaged")
    shutil.copytree(peaceful, path)
    for shard in (path / "checkpoints").rglob("*.distcp"):
        truncated(shard)
    (path / "run.json").write_text((path / "run.json").read_text().replace("in-peace", path.name))
    before = (path / "metrics.jsonl").read_bytes()
    ended = Job(finished.root, [*OVERRIDES, f"run.name={path.name}"]).finish()
    assert ended.code == 2, ended
    assert "every checkpoint is damaged" in ended.stderr
    assert (path / "metrics.jsonl").read_bytes() == before


def test_a_signal_in_the_evaluation_before_the_first_step_stops_the_run_and_its_helpers(finished):
    held = finished.root / "held-early"
    # Policy version 0 is held by the rewards of the evaluation that comes before the first step.
    overrides = [*OVERRIDES, "run.name=early", "run.seed=1"]
    job = Job(finished.root, overrides, environment={HOLD: f"0:{held}"}, cold=True)
    job.wait_until_there(held)
    job.process.terminate()
    ended = job.finish()
    assert ended.code == 75, ended
    assert "stopped in step 1 before its first update" in ended.stderr
    assert (finished.root / "runs" / "early" / "checkpoints" / "step-000000" / "manifest.json").is_file()
    assert not ended.orphans

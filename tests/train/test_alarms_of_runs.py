"""Alarms of real runs: they rise where something goes wrong, stop runs that ask for it, and leave good ones alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from train_jobs import SMALL, Ended, Job, contents, numbers, rewarded_by, saved, without_seconds

pytestmark = pytest.mark.long

HONEST = "{name:honest,function:train_rewards:honest}"
GAMED = [
    *SMALL,
    f"reward.terms=[{HONEST},{{name:gamed,weight:3,function:train_rewards:gamed}},"
    "{name:lucky,weight:0.1,function:train_rewards:lucky}]",
    "reward.success=honest",
    "run.steps=14",
    "run.save_every=4",
    "run.eval_every=0",
    "optimizer.lr=2e-3",
    "optimizer.warmup_steps=0",
]
"""A run whose reward pays for the opposite of what it calls success, and whose completions the length limit cuts."""


DESERVED = {
    "never_right": (
        ["reward.terms=[{name:boxed},{name:format,weight:0.2}]", "reward.success=boxed"],
        "of step 5: none of the completions of the first 5 steps was right; chain_sum/",
    ),
    "kl_runaway": (
        [rewarded_by("lucky"), "algorithm.kl_coef=0.01", "optimizer.lr=5e-2"],
        "nats, beyond alarms.kl_runaway=1.0",
    ),
    "unscorable": (
        [rewarded_by("choosy"), "reward.on_error=leave_out"],
        "of step 5: 50.0% of the completions have no score",
    ),
    "mismatch": (
        [rewarded_by("lucky"), "model=tiny_dense", "model.dtype=bf16", "alarms.mismatch=1e-4"],
        "of step 5: log-probabilities of engine and trainer differ by",
    ),
    "not_finite": (
        ["reward.terms=[{name:accuracy},{name:own,weight:1e-307,function:train_rewards:enormous}]"],
        "of step 1: not finite: reward/own, beyond",
    ),
    "expert_imbalance": (
        [
            rewarded_by("lucky"),
            "model.moe.experts=8",
            "model.moe.top_k=1",
            "model.moe.bias_update_rate=0",
            "optimizer.lr=5e-2",
        ],
        "of step 10: the busiest expert gets",
    ),
    "slow_phase": (
        [rewarded_by("halting"), "reward.timeout_seconds=600"],
        "of step 7: the phase reward took 6",
    ),
    "held_out_falling": (
        [*(setting for setting in GAMED if setting.startswith("reward.")), "run.eval_every=1", "optimizer.lr=3e-3"],
        "while the training reward has risen from",
    ),
}
"""By alarm, the settings of a run that deserves it, and what it then says. All else is that of a run that does not.

Most thresholds are the defaults. What bf16 rounds in a model of two layers is less than the one of mismatch, which is
lowered to what rounding in fp32 may do. Only a break makes a phase slow: 60 seconds are the least that the alarm minds.
"""


def alarms(run: Path) -> dict[str, int]:
    """The alarms that rose in a run, with their steps."""
    file = run / "alarms.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {line["name"]: line["step"] for line in lines if not line.get("cleared")}


@dataclass(frozen=True)
class Story:
    """A run on two ranks that an alarm stopped, which was then started again, beside one that nothing stopped."""

    runs: Path
    stopped: Ended
    again: Ended
    left: list[dict[str, str]]
    on: Ended


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    root = tmp_path_factory.mktemp("alarms")
    runs = root / "runs"
    peace = Job(root, [*GAMED, "run.name=peace"], ranks=2).finish()
    assert peace.code == 0, peace
    own = [*GAMED, "run.name=stopped"]
    stopped = Job(root, [*own, "run.stop_on=[truncation,mismatch]"], ranks=2, cold=True).finish()
    left = [contents(runs / "stopped" / "checkpoints")]
    again = Job(root, [*own, "run.stop_on=[any]"], ranks=2).finish()
    left.append(contents(runs / "stopped" / "checkpoints"))
    for name in ("summary.json", "report.html"):  # which the next start removes
        (root / name).write_bytes((runs / "stopped" / name).read_bytes())
    on = Job(root, own, ranks=2).finish()
    return Story(runs, stopped, again, left, on)


def test_it_stops_all_ranks_and_says_which_what_to_do_and_how_to_go_on(story: Story) -> None:
    said = " ".join(story.stopped.stderr.split())
    assert story.stopped.code != 0
    assert said.count("exitcode : 4 ") >= 1, said
    assert "stopped after step 10 by the alarm truncation of step 10: the length limit cut" in said
    assert "Raise rollout.max_new_tokens" in said
    assert "step-000010 is saved; the same command continues there when run.stop_on does not name the alarm" in said
    assert not story.stopped.orphans


def test_the_summary_and_the_report_name_the_alarm(story: Story) -> None:
    assert "The alarm truncation stopped it" in (story.runs.parent / "report.html").read_text()
    summary = json.loads((story.runs.parent / "summary.json").read_text())
    assert (summary["status"], summary["stopped_by"], summary["steps"]) == ("stopped", "truncation", 10)
    assert {"name": "truncation", "step": 10, "cleared": None} in summary["alarms"]


def test_started_again_it_stops_where_it_is_until_the_alarm_may_be_up(story: Story) -> None:
    assert "stopped after step 10 by the alarm truncation" in " ".join(story.again.stderr.split())
    assert story.left[0] == story.left[1]
    assert story.on.code == 0, story.on


def test_then_it_is_bit_for_bit_the_run_that_nothing_stopped(story: Story) -> None:
    peace, stopped = story.runs / "peace", story.runs / "stopped"
    last = Path("checkpoints") / "step-000014"
    assert saved(stopped / last) == saved(peace / last)
    assert numbers(stopped) == numbers(peace)
    assert (stopped / "alarms.jsonl").read_bytes() == (peace / "alarms.jsonl").read_bytes()
    assert (stopped / "experts.jsonl").read_bytes() == (peace / "experts.jsonl").read_bytes()
    assert without_seconds(stopped / "summary.json") == without_seconds(peace / "summary.json")


def test_the_loads_of_experts_are_those_of_the_imbalance_that_is_logged(story: Story) -> None:
    """A step of these runs has one update."""
    lines = [json.loads(line) for line in (story.runs / "peace" / "experts.jsonl").read_text().splitlines()]
    logged = {line["step"]: line["policy/expert_imbalance"] for line in numbers(story.runs / "peace")}
    assert {line["step"] for line in lines} == logged.keys()
    for line in lines:
        assert max(map(max, line["loads"].values())) == pytest.approx(logged[line["step"]], rel=5e-3)


def test_a_reward_that_pays_for_something_else_is_noticed(story: Story) -> None:
    risen = alarms(story.runs / "peace")
    assert risen.keys() == {"truncation", "reward_hacking"}
    lines = (story.runs / "peace" / "alarms.jsonl").read_text()
    assert "while reward/mean has risen" in lines


def test_groups_without_signal_end_a_single_process_with_the_code_of_alarms(tmp_path: Path) -> None:
    """Untrained completions are all wrong."""
    own = ["layout=single", "run.steps=12", "run.eval_every=0", "run.save_every=0", "run.name=wrong"]
    ended = Job(
        tmp_path, [*SMALL, *own, "run.stop_on=[any]", "alarms.truncation=null", "alarms.never_right=null"]
    ).finish()
    assert ended.code == 4, ended
    assert alarms(tmp_path / "runs" / "wrong") == {"no_signal": 10}
    assert (tmp_path / "runs" / "wrong" / "checkpoints" / "step-000010" / "manifest.json").is_file()


def test_a_policy_that_a_huge_learning_rate_makes_sure_of_nothing_right_has_collapsed(tmp_path: Path) -> None:
    own = ["layout=single", "run.steps=40", "optimizer.lr=5e-3", "run.stop_on=[entropy_collapse]", "run.name=sure"]
    ended = Job(tmp_path, [*GAMED, *own]).finish()
    assert ended.code == 4, ended
    assert "by the alarm entropy_collapse" in ended.stderr
    assert json.loads((tmp_path / "runs" / "sure" / "summary.json").read_text())["stopped_by"] == "entropy_collapse"


def test_answers_that_go_in_circles_are_noticed(tmp_path: Path) -> None:
    """What a huge learning rate leaves says the same again and again."""
    own = ["layout=single", "run.steps=40", "optimizer.lr=5e-3", "rollout.max_new_tokens=40", "run.name=circles"]
    ended = Job(tmp_path, [*GAMED, *own, "run.stop_on=[repetition]"]).finish()
    assert ended.code == 4, ended
    assert "by the alarm repetition" in ended.stderr


def test_a_rank_whose_rewards_take_longer_than_those_of_others_is_named(tmp_path: Path) -> None:
    own = [rewarded_by("laborious"), "run.steps=11", "run.eval_every=0", "run.name=slow", "run.stop_on=[stragglers]"]
    ended = Job(tmp_path, [*SMALL, *own], ranks=2).finish()
    assert ended.code == 4, ended
    assert "by the alarm stragglers of step 10: rank 1 works" in " ".join(ended.stderr.split())


@pytest.mark.parametrize("name", DESERVED)
def test_it_rises_on_a_run_made_to_deserve_it_and_stops_that(name: str, tmp_path: Path) -> None:
    own, words = DESERVED[name]
    common = ["base=none", "layout=single", "run.steps=12", "run.eval_every=0", "run.save_every=0"]
    common += ["optimizer.warmup_steps=0", f"run.name={name}", f"run.stop_on=[{name}]"]
    ended = Job(tmp_path, [*SMALL, *common, *own]).finish()
    assert ended.code == 4, ended
    said = " ".join(ended.stderr.split())
    assert f"by the alarm {name} of step" in said
    assert words in said
    assert name in alarms(tmp_path / "runs" / name)
    assert json.loads((tmp_path / "runs" / name / "summary.json").read_text())["stopped_by"] == name


def test_five_good_runs_raise_none(tmp_path: Path) -> None:
    """As README.md trains: some of them end with a policy that is sure of itself, and problems that are solved."""
    for seed in range(5):
        own = ["experiment=tiny", "layout=single", f"run.seed={seed}", f"run.name=good{seed}", "run.stop_on=[any]"]
        ended = Job(tmp_path, own).finish()
        assert ended.code == 0, ended
        assert alarms(tmp_path / "runs" / f"good{seed}") == {}
        assert "alarm" not in ended.stderr

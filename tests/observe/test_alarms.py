"""Alarms: each rises on a history made to deserve it, at the threshold of the configuration, and on no other."""

from __future__ import annotations

import json
import logging
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from ranks import REPOSITORY

from grpo_mega.config.schema import AlarmsConfig, RunConfig
from grpo_mega.observe import alarm_log
from grpo_mega.observe.alarm_history import REMEMBERED, History
from grpo_mega.observe.alarm_log import ALARMS_FILE, QUIET, AlarmLog, AlarmState
from grpo_mega.observe.alarm_page import page
from grpo_mega.observe.alarms import ALARMS, Alarm, Found, from_to
from grpo_mega.observe.metric_table import unknown
from grpo_mega.observe.recorder import Recorder
from grpo_mega.show.observers import observers_of

NAMES = [alarm.name for alarm in ALARMS]
Lines = list[dict[str, Any]]

GOOD: dict[str, Any] = {
    "reward/mean": 0.5,
    "reward/accuracy": 0.5,
    "reward/format": 0.6,
    "reward/unscorable": 0,
    "rollout/tokens": 640,
    "rollout/length_mean": 10.0,
    "rollout/truncated": 0.05,
    "rollout/repeated": 0.1,
    "rollout/groups_with_signal": 0.9,
    "rollout/all_right": 0.0,
    "rollout/all_wrong": 0.05,
    "policy/entropy": 0.4,
    "rollout/staleness_mean": 1.5,
    "policy/effective_samples": 0.95,
    "policy/kl": 0.02,
    "policy/expert_imbalance": 1.3,
    "mismatch/mean_abs": 0.01,
    "mismatch/effective_sample_size": 0.99,
    "time/generate": 20.0,
    "time/step": 30.0,
    "machine/straggling": 1.2,
    "machine/slowest_rank": 3,
    "eval/accuracy": 0.5,
}
"""A line of which all are alike in a run that does well."""


def lines(count: int, **changes: Any) -> Lines:
    """So many lines like `GOOD`, with changes to metrics, in whose names two underscores stand for the slash."""
    return [GOOD | {name.replace("__", "/"): value for name, value in changes.items()} for _ in range(count)]


HISTORIES: dict[str, tuple[Lines, float]] = {
    "never_right": (lines(5, reward__accuracy=0), 5.0),
    "entropy_collapse": (lines(10, policy__entropy=0.02, reward__accuracy=0.3), 0.02),
    "kl_runaway": (lines(5, policy__kl=1.5), 1.5),
    "reward_hacking": (lines(10) + lines(4, reward__accuracy=0.2, reward__mean=0.9), 0.12),
    "truncation": (lines(10, rollout__truncated=0.5), 0.5),
    "repetition": (lines(10, rollout__repeated=0.6), 0.6),
    "no_signal": (lines(10, rollout__groups_with_signal=0.25), 0.75),
    "unscorable": (lines(5, reward__unscorable=16), 0.25),
    "mismatch": (lines(5, mismatch__mean_abs=0.5), 0.5),
    "staleness": (lines(10) + lines(4, rollout__staleness_mean=6.0), 2.2),
    "correction": (lines(10, policy__effective_samples=0.3, policy__corrected=0.4), 0.3),
    "not_finite": (lines(1, policy__loss=None), 1.0),
    "expert_imbalance": (lines(10, policy__expert_imbalance=6.0), 6.0),
    "slow_phase": (lines(6) + lines(1, time__generate=200.0), 10.0),
    "stragglers": (lines(10, machine__straggling=2.5), 2.5),
    "held_out_falling": (lines(10) + lines(2, eval__accuracy=0.25, reward__mean=0.6), 0.25),
}
"""By alarm, the shortest history on which it rises, and the value that it reports."""


def raised(history: Lines, limits: AlarmsConfig | None = None) -> list[dict[str, Any]]:
    """The records of these lines, the first of which is that of step 1; an error in an alarm is one of the test."""
    state = AlarmState(limits or AlarmsConfig())
    state._only_shows = nullcontext
    return [record for step, line in enumerate(history, 1) for record in state.after(step, line)]


def test_there_is_an_alarm_for_each_threshold_and_a_history_for_each_alarm() -> None:
    assert NAMES == [field.name for field in fields(AlarmsConfig)] == list(HISTORIES)


@pytest.mark.parametrize("name", NAMES)
def test_each_rises_on_what_deserves_it_with_the_step_and_the_numbers(name: str) -> None:
    history, value = HISTORIES[name]
    (record,) = raised(history)
    assert (record["name"], record["step"]) == (name, len(history))
    assert record["value"] == pytest.approx(value)
    assert record["threshold"] == getattr(AlarmsConfig(), name)
    assert any(char.isdigit() for char in record["message"]) or name == "not_finite"
    assert record["action"].endswith(".")


@pytest.mark.parametrize("name", NAMES)
def test_the_threshold_is_that_of_the_configuration(name: str) -> None:
    """On either side of the value that the history has."""
    history, value = HISTORIES[name]
    below, above = (value * 0.9, value * 1.1) if name != "not_finite" else (0, 1)
    found = {limit: bool(raised(history, replace(AlarmsConfig(), **{name: limit}))) for limit in (below, above)}
    assert found == (
        {below: False, above: True} if name in ("entropy_collapse", "correction") else {below: True, above: False}
    )
    assert raised(history, replace(AlarmsConfig(), **{name: None})) == []


@pytest.mark.parametrize("name", [name for name in NAMES if name != "never_right"])  # the first steps come once
def test_it_is_over_after_some_good_steps_and_may_rise_again(name: str) -> None:
    history, _ = HISTORIES[name]
    good = lines(REMEMBERED + QUIET, eval__accuracy=0.9)
    first, over, *_ = raised(history + good)
    assert over == {"step": over["step"], "name": name, "cleared": True}
    assert over["step"] >= first["step"] + QUIET
    if name not in ("reward_hacking", "held_out_falling"):  # which compare with the best, which has changed
        again = [record for record in raised(history + good + history) if not record.get("cleared")]
        assert [record["name"] for record in again] == [name, name]


def test_what_comes_once_in_a_noisy_run_raises_nothing() -> None:
    noisy = {"policy__entropy": 0.0, "policy__kl": 9.0, "rollout__truncated": 1.0, "reward__unscorable": 3}
    noisy |= {"rollout__groups_with_signal": 0.0, "mismatch__mean_abs": 1.0, "policy__expert_imbalance": 8.0}
    assert (
        raised((lines(9) + lines(1, **noisy, reward__accuracy=0.0, eval__accuracy=0.1, time__generate=50.0)) * 5) == []
    )


def test_a_step_in_which_nothing_has_a_score_is_one_too_many() -> None:
    """As when a judge is down: a short run would be over before there are enough steps for a mean."""
    down = [{name: value for name, value in GOOD.items() if not name.startswith("reward/")} | {"reward/unscorable": 64}]
    (record,) = raised(lines(2) + down)
    assert (record["step"], record["name"]) == (3, "unscorable")
    assert "no completion of this step has a score" in record["message"]
    assert raised(lines(2) + down, AlarmsConfig(unscorable=None)) == []


def test_a_score_of_zero_to_ten_is_no_percentage() -> None:
    history = lines(10, reward__accuracy=8.0) + lines(10, reward__accuracy=2.5, reward__mean=9.0)
    (message,) = {record["message"] for record in raised(history) if record["name"] == "reward_hacking"}
    assert "has fallen from 8 to 7.45, while" in message


def test_both_ends_of_a_fall_are_written_alike() -> None:
    assert (from_to(2.1, 0.9), from_to(0.9, 0.25)) == ("2.1 to 0.9", "90.0% to 25.0%")


def test_a_single_right_answer_at_any_time_is_enough() -> None:
    for right in range(5):
        history = lines(5, reward__accuracy=0)
        history[right] = GOOD | {"reward/accuracy": 1e-6}
        assert "never_right" not in {record["name"] for record in raised(history + lines(5, reward__accuracy=0))}


def test_once_an_answer_was_right_they_are_not_never_right() -> None:
    later = lines(10, reward__accuracy=0) + lines(1, reward__accuracy=0.3) + lines(140, reward__accuracy=0)
    records = [record for record in raised(later, AlarmsConfig()) if record["name"] == "never_right"]
    assert [(record["step"], record.get("cleared", False)) for record in records] == [(5, False), (15, True)]


def test_answers_that_are_never_right_are_shown_with_what_was_read(tmp_path: Path) -> None:
    said = {
        "answer": "42",
        "reward": 0.0,
        "reason": "boxed: '48' is not '42'",
        "completion": "x" * 99 + "48",
    }
    samples = [{"prompt_id": f"p/{index}", **said} for index in (1, 1, 2)]
    log = AlarmLog(tmp_path, AlarmsConfig(), -1)
    records = [
        record for step, line in enumerate(lines(5, reward__accuracy=0), 1) for record in log.step(step, line, samples)
    ]
    (record,) = records
    assert record["message"].count("'48' is not '42'") == 3
    assert [record["message"].count(f"p/{index}, whose answer is '42': ...'xxx") for index in (1, 2)] == [2, 1]
    assert json.loads((tmp_path / ALARMS_FILE).read_text()) == record


def test_a_run_that_has_learned_its_problems_is_none_without_signal() -> None:
    begun = lines(10, rollout__groups_with_signal=0.6)
    solved = {"rollout__groups_with_signal": 0.1, "rollout__all_right": 0.9, "policy__entropy": 0.01}
    assert raised(begun + lines(30, **solved, reward__accuracy=0.97)) == []


def test_problems_that_were_too_easy_from_the_beginning_have_no_signal() -> None:
    easy = lines(10, rollout__groups_with_signal=0.1, rollout__all_right=0.9)
    assert [record["name"] for record in raised(easy)] == ["no_signal"]


def test_what_is_younger_than_two_updates_is_not_old_however_it_has_grown() -> None:
    young = lines(10, rollout__staleness_mean=0.1)
    assert raised(young + lines(20, rollout__staleness_mean=1.9)) == []
    (record,) = raised(young + lines(20, rollout__staleness_mean=2.5))
    assert record["message"] == "tokens are 2.02 updates old; in the first 10 steps it was 0.1 at most"


def test_the_first_steps_of_a_run_whose_samples_get_older_until_the_engine_is_full_are_no_runaway() -> None:
    rising = [line for age in range(10) for line in lines(1, rollout__staleness_mean=age / 2)]
    assert raised(rising + lines(40, rollout__staleness_mean=6.0)) == []


def test_ranks_that_are_slow_in_turn_are_no_stragglers() -> None:
    slow = [line | {"machine/slowest_rank": rank} for rank in range(4) for line in lines(1, machine__straggling=2.5)]
    assert raised(slow * 5) == []
    assert "rank 3 works 2.50 times" in raised(lines(10, machine__straggling=2.5))[0]["message"]


def test_a_straggler_is_slow_in_the_steps_that_name_it() -> None:
    unnamed = lines(10, machine__straggling=9.0)
    for line in unnamed:
        del line["machine/slowest_rank"]
    assert raised(lines(10) + unnamed) == []
    assert raised(unnamed + lines(9, machine__straggling=2.5)) == []
    assert raised(unnamed + lines(10, machine__straggling=2.5))[0]["value"] == 2.5


def test_less_accuracy_alone_is_no_hacking_and_neither_is_more_reward() -> None:
    assert raised(lines(10) + lines(20, reward__accuracy=0.2, reward__mean=0.2, reward__format=0.3)) == []
    assert raised(lines(10) + lines(20, reward__mean=0.9, reward__format=0.9)) == []


def test_hacking_is_also_what_the_evaluation_by_a_reward_model_says() -> None:
    assert [record["name"] for record in raised(lines(10, eval__hacking=0.0))] == []
    assert [record["name"] for record in raised(lines(10, eval__hacking=1.0))] == ["reward_hacking"]
    evaluated = [*lines(10), *lines(1, eval__hacking=1.0), *lines(2 * REMEMBERED)]
    assert [record["name"] for record in raised(evaluated)] == ["reward_hacking"], "up until an evaluation is better"
    assert raised([*evaluated, *lines(1, eval__hacking=0.0), *lines(QUIET)])[-1]["cleared"]


def test_a_term_that_rises_against_the_accuracy_is_named() -> None:
    (record,) = raised(lines(10) + lines(10, reward__accuracy=0.2, reward__mean=0.45, reward__format=0.95))
    assert "reward/format has risen from 0.6 to 0.74" in record["message"]


NUMBERS = st.one_of(st.none(), st.floats(), st.integers(), st.booleans(), st.text(max_size=3))
NAMES_OF_METRICS = st.one_of(st.sampled_from([*GOOD, "eval/hacking", "time/update", "policy/approx_kl_old"]), st.text())


@given(st.lists(st.dictionaries(NAMES_OF_METRICS, NUMBERS), max_size=4), st.integers(1, 20))
def test_no_line_whatever_is_in_it_is_an_error(strange: Lines, times: int) -> None:
    records = raised([GOOD | line for line in strange * times] + strange * times)
    for record in records:
        json.dumps(record, allow_nan=False)


READ = sorted({name for history, _ in HISTORIES.values() for line in history for name in line} | {
    "eval/hacking", "policy/approx_kl_old", "reward_model/expert_imbalance", "time/reward",
})  # fmt: skip
SERIES = st.lists(
    st.sampled_from([None, 0.0, -1.0, 1.0, 100.0, 5e-324, 2.2e-309, 1e300, 1e308, -1e308, float("inf"), float("nan")]),
    min_size=1,
    max_size=3,
)


@given(st.dictionaries(st.sampled_from(READ), st.tuples(SERIES, st.integers(1, 14))))
@example({"machine/straggling": ([2.0], 14), "machine/slowest_rank": ([None], 14)})
@example({"machine/straggling": ([2.0], 14), "machine/slowest_rank": ([3], 4)})
@example({"reward/unscorable": ([1e300], 14), "rollout/tokens": ([5e-324], 14), "rollout/length_mean": ([1e300], 14)})
def test_no_alarm_fails_whatever_it_reads_and_however_much_of_it(series: dict[str, tuple[list[Any], int]]) -> None:
    """Each metric repeats some values, for a number of steps that is its own."""
    steps: Lines = [{} for _ in range(14)]
    for name, (values, count) in series.items():
        for step in range(count):
            steps[step][name] = values[step % len(values)]
    for record in raised(steps):
        json.dumps(record, allow_nan=False)


def test_one_alarm_that_fails_is_said_once_and_the_others_still_rise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has not risen, and is over where it was up: a run that is to stop on any alarm stops on the other alone."""

    def mismatch(history: History, limits: AlarmsConfig) -> Found | None:
        if len(history.recent) > 3:
            raise IndexError("of my own")
        return Found(1.0, "as it should be")

    broken = Alarm(mismatch, "", "", "")
    monkeypatch.setattr(alarm_log, "ALARMS", [broken, *(alarm for alarm in ALARMS if alarm.name != broken.name)])
    recorder = record_of(tmp_path, lines(14, rollout__truncated=0.5), -1, stop_on=["any"])
    alarm = recorder.alarm_that_stops()
    assert alarm is not None
    assert alarm["name"] == "truncation"
    assert recorder.alarms is not None
    assert recorder.alarms.summary()[0] == {"name": "mismatch", "step": 1, "cleared": 3 + QUIET}
    (said,) = caplog.records
    assert "the alarm mismatch: IndexError: of my own" in said.getMessage()
    assert "in mismatch" in logging.Formatter().format(said)


def test_alarms_that_cannot_be_written_rise_all_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / ALARMS_FILE).mkdir()
    recorder = record_of(tmp_path, lines(14, rollout__truncated=0.5), -1, stop_on=["any"])
    alarm = recorder.alarm_that_stops()
    assert alarm is not None
    assert (alarm["name"], alarm["step"]) == ("truncation", 10)
    assert ["alarms.jsonl: IsADirectoryError" in message for message in caplog.messages] == [True]


@given(st.lists(st.fixed_dictionaries(dict.fromkeys(GOOD, st.floats(0, 100))), min_size=1, max_size=30), st.integers(1))
def test_what_is_known_of_a_run_is_bounded(history: Lines, seed: int) -> None:
    known = History()
    for index in range(3 * REMEMBERED):
        known.add(history[(index * seed) % len(history)])
    assert (len(known.recent), len(known.first), len(known.evaluations)) == (REMEMBERED, 10, 2)


def test_the_metrics_that_alarms_read_exist() -> None:
    read = {name for history, _ in HISTORIES.values() for line in history for name in line}
    assert unknown(read | {"eval/hacking", "policy/approx_kl_old"}) == []


def test_the_document_is_made_of_the_table() -> None:
    written = (REPOSITORY / "docs" / "alarms.md").read_text()
    assert written == page(), "python -m grpo_mega.observe.alarm_page > docs/alarms.md"
    for alarm in ALARMS:
        assert f"\n## {alarm.name}\n\n{alarm.means}\n\nWhat to do: {alarm.action}\n" in written
        assert f"`alarms.{alarm.name}={getattr(AlarmsConfig(), alarm.name)}` | {alarm.condition} |" in written


# What a run writes and prints.


def record_of(path: Path, history: Lines, resume_from_step: int, limits: AlarmsConfig | None = None, **run) -> Recorder:
    """A recorder of a run that has gone on after this step, to the end of the history."""
    settings = RunConfig(name="mine", steps=99, tensorboard=False, **run)
    recorder = Recorder(settings, path, main=True, observers=lambda: observers_of(settings, path), limits=limits)
    recorder.open_metrics(resume_from_step)
    for step in range(max(resume_from_step, 0) + 1, len(history) + 1):
        recorder.step(step, {k: float("nan") if v is None else v for k, v in history[step - 1].items()}, [])
    return recorder


UP_AND_OVER = lines(12, rollout__truncated=0.5) + lines(14) + lines(1, policy__loss=None)


@pytest.mark.parametrize("stopped", [3, 10, 11, 16, 20, 26, 27])
def test_a_run_that_continues_has_the_alarms_of_one_in_peace(tmp_path: Path, stopped: int) -> None:
    """Whether it was stopped before, while or after one was up, and however far it had come behind its checkpoint."""
    ended = []
    for name, starts in (("peace", [-1]), ("stopped", [-1, stopped])):
        (tmp_path / name).mkdir()
        for start in starts:
            recorder = record_of(tmp_path / name, UP_AND_OVER, start)
            recorder.close()
        assert recorder.alarms is not None
        ended.append(((tmp_path / name / ALARMS_FILE).read_bytes(), recorder.alarms.summary()))
    assert ended[0] == ended[1]
    assert [(alarm["name"], alarm["step"]) for alarm in ended[0][1]] == [("truncation", 10), ("not_finite", 27)]
    assert [alarm["cleared"] is None for alarm in ended[0][1]] == [False, True]


def test_another_run_in_the_directory_has_none_of_the_old_alarms(tmp_path: Path) -> None:
    record_of(tmp_path, UP_AND_OVER, -1).close()
    recorder = record_of(tmp_path, [], -1)
    assert recorder.alarms is not None
    assert (recorder.alarms.summary(), (tmp_path / ALARMS_FILE).read_text()) == ([], "")


def test_another_threshold_is_said_where_the_run_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = lines(12, rollout__truncated=0.5)
    record_of(tmp_path, history, -1).close()
    capsys.readouterr()
    recorder = record_of(tmp_path, history, 12, AlarmsConfig(truncation=0.6))
    assert "12  alarm truncation is over" in capsys.readouterr().err
    assert recorder.alarms is not None
    assert recorder.alarms.summary() == [{"name": "truncation", "step": 10, "cleared": 12}]
    recorder = record_of(tmp_path, history, 12, AlarmsConfig(truncation=0.3))
    assert "ALARM truncation: the length limit cut 50.0%" in capsys.readouterr().err


def test_it_is_printed_with_what_to_do_and_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    recorder = record_of(tmp_path / "mine", UP_AND_OVER, -1)
    recorder.finish({"status": "completed", "steps": 27})
    said = " ".join(capsys.readouterr().err.split())
    assert "10 ALARM truncation: the length limit cut 50.0% of the completions. Raise rollout.max_new_tokens" in said
    assert "alarm truncation is over" in said
    assert "mine completed: 27 steps, alarms: truncation at step 10, not_finite at step 27 (up)." in said
    written = json.loads((tmp_path / "mine" / "summary.json").read_text())["alarms"]
    assert [(alarm["name"], alarm["step"]) for alarm in written] == [("truncation", 10), ("not_finite", 27)]


@pytest.mark.parametrize(
    ("stop_on", "expected"), [([], None), (["mismatch"], None), (["truncation"], "truncation"), (["any"], "truncation")]
)
def test_an_alarm_stops_a_run_that_names_it_as_long_as_it_is_up(tmp_path: Path, stop_on, expected) -> None:
    up = record_of(tmp_path, UP_AND_OVER[:12], -1, stop_on=stop_on).alarm_that_stops()
    assert (up["name"] if up else None) == expected
    assert record_of(tmp_path, UP_AND_OVER[:26], 12, stop_on=stop_on).alarm_that_stops() is None

"""The metrics of rewards, with several tasks and with answers that could not be scored."""

from __future__ import annotations

from grpo_mega.stages.metrics import rollout_metrics
from grpo_mega.types import Answer, Group, Prompt, Score

AWAY = Score(0.0, {}, unscorable="the judge is away")


def group(task: str, *scores: Score) -> Group:
    answers = tuple(Answer(4, "stop", ((0, 0),), score) for score in scores)
    return Group(Prompt(task, (1,), "?", "8", task), answers)


def rewards(*groups: Group) -> dict[str, float]:
    metrics = rollout_metrics(groups, "accuracy")
    return {name: value for name, value in metrics.items() if name.startswith("reward/")}


def test_terms_are_averaged_over_the_answers_that_have_them():
    sums = group("sums", Score(1.0, {"accuracy": 1.0}), Score(0.0, {"accuracy": 0.0}))
    code = group("code", Score(0.5, {"tests": 0.5}), Score(0.7, {"tests": 0.7}))
    assert rewards(sums, code) == {
        "reward/mean": 0.55,
        "reward/accuracy": 0.5,
        "reward/tests": 0.6,
        "reward/unscorable": 0,
        "reward/code/total": 0.6,
        "reward/sums/total": 0.5,
    }


def test_one_task_has_no_metrics_of_its_own():
    assert rewards(group("sums", Score(1.0, {"accuracy": 1.0}))) == {
        "reward/mean": 1.0,
        "reward/accuracy": 1.0,
        "reward/unscorable": 0,
    }


def test_answers_without_a_score_are_counted_and_count_in_no_mean():
    scored = group("sums", Score(1.0, {"accuracy": 1.0}), AWAY, AWAY)
    assert rewards(scored) == {"reward/mean": 1.0, "reward/accuracy": 1.0, "reward/unscorable": 2}
    assert rewards(scored, group("code", AWAY))["reward/sums/total"] == 1.0
    assert "reward/code/total" not in rewards(scored, group("code", AWAY))


def test_a_step_in_which_nothing_could_be_scored_has_no_means():
    assert rewards(group("sums", AWAY)) == {"reward/unscorable": 1}
    assert rollout_metrics([group("sums", AWAY)], "accuracy")["rollout/length_mean"] == 4


def test_steps_are_counted_where_they_are_scored():
    two, one = Score(1.0, {}, steps=((0, 1.0), (3, 0.0))), Score(1.0, {}, steps=((3, 1.0),))
    assert rollout_metrics([group("sums", two, one, AWAY)], "accuracy")["rollout/steps_mean"] == 1.5
    assert "rollout/steps_mean" not in rollout_metrics([group("sums", AWAY)], "accuracy")

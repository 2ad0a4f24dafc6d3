"""The plan of a step beside what was measured: the planner's own figures, for answers as long as they were."""

from __future__ import annotations

import pytest

from grpo_mega import platform
from grpo_mega.config.load import compose_config
from grpo_mega.config.rules import fewest_processes

platform.start_planning()

from grpo_mega.planning.compare import Measured, compare  # noqa: E402
from grpo_mega.planning.hours import hours  # noqa: E402
from grpo_mega.planning.lines import of_the_trainer  # noqa: E402
from grpo_mega.planning.plan import plan  # noqa: E402
from grpo_mega.planning.time import Assumed  # noqa: E402

SECONDS = {"generate": 30.0, "reward": 2.0, "logprobs": 9.0, "update": 20.0, "sync": 15.0, "step": 76.0}
LONG = ["rollout.longer_from_step=6", "rollout.longer_max_new_tokens=2048"]


@pytest.mark.parametrize(("steps", "kind"), [((2, 3), 0), ((5, 6), 0), ((7, 9), 1)])
def test_it_is_the_plan_for_answers_of_this_length(steps: tuple[int, int], kind: int) -> None:
    """And for the limit that these steps had: from the seventh on twice the first."""
    config = compose_config(["experiment=deepseekmath_7b", "run.steps=20", *LONG, "model.context=4096"])
    mean = 300.0 * (1 + kind)
    found = compare(config, Measured(steps, 8, config.model.vocab_size or 0, 99.6, mean, SECONDS, 41e9))
    planned = plan(config)
    expected = (hours(config, planned, Assumed(300.0, 100)) or {})["kinds"][kind]
    assert expected["answer"] == mean
    by_name = {phase["name"]: phase["seconds"] for phase in expected["phases"]}
    assert {phase: pair[0] for phase, pair in found["seconds"].items()} == {
        "generate": by_name["generation"],
        "logprobs": by_name["log-probs of the reference policy"],
        "update": by_name["updates"],
        "sync": by_name["weights to the engines"] + by_name["turns"],
        "reward": None,
        "step": pytest.approx(expected["seconds"]),
    }
    assert {phase: pair[1] for phase, pair in found["seconds"].items()} == SECONDS
    assert found["memory"] == [max(map(of_the_trainer, planned["memory"])), 41e9]
    assert found["memory"][0] < max(planned["total"]) - 10e9
    assert (found["gpu"], found["gpus"]) == ("h100", 8)


@pytest.mark.parametrize("experiment", ["tiny_ppo", "tiny"])
def test_all_that_is_planned_belongs_to_a_phase_of_the_timer(experiment: str) -> None:
    config = compose_config([f"experiment={experiment}", "cluster=h100"])
    gpus = fewest_processes(config.layout)
    seconds = compare(config, Measured((2, 3), gpus, 45, 20.0, 10.0, SECONDS, None))["seconds"]
    of_phases = [planned for phase, (planned, _) in seconds.items() if phase != "step" and planned is not None]
    assert sum(of_phases) == pytest.approx(seconds["step"][0])
    assert ("values" in seconds) == (experiment == "tiny_ppo")


def test_gpus_are_those_that_the_run_has() -> None:
    """Whatever `cluster.nodes` says: the job may have begun with others."""
    config = compose_config(["experiment=deepseekmath_7b", "cluster.nodes=1"])
    size = config.model.vocab_size or 0
    eight, sixteen, four = (
        compare(config, Measured((2, 3), gpus, size, 100.0, 300.0, SECONDS, None)) for gpus in (8, 16, 4)
    )
    assert sixteen["seconds"]["update"][0] < eight["seconds"]["update"][0] < four["seconds"]["update"][0]
    assert sixteen["memory"][0] < eight["memory"][0]


def test_without_a_gpu_nothing_can_be_compared() -> None:
    config = compose_config(["experiment=tiny"])
    with pytest.raises(ValueError, match=r"cluster\.gpu is null"):
        compare(config, Measured((2, 3), 1, 45, 20.0, 10.0, SECONDS, None))

"""Programs of completions as a term of the reward; what they may and may not do is tested where the sandbox is."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from refusals import refused

from grpo_mega.config.schema import RewardConfig, RewardTerm
from grpo_mega.judges.sandbox.pool import best_mechanism
from grpo_mega.reward.compose import Reward, build_reward
from grpo_mega.types import Prompt, Sample, Score

pytestmark = pytest.mark.skipif(not best_mechanism()[0], reason=f"no sandbox: {best_mechanism()[1]}")

TESTS = [{"stdin": "2\n", "stdout": "4\n"}, {"stdin": "3\n", "stdout": "9\n"}]
RIGHT, WRONG = "print(int(input()) ** 2)", "print(int(input()) * 2)"


def sample(source: str, index: int = 0, tests: Any = TESTS) -> Sample:
    prompt = Prompt("code/1", (1,), "Square it.", "", "code", {"tests": tests})
    text = f"```python\n{source}\n```"
    return Sample(prompt, index, array("i", [2]), array("f", [0.0]), "stop", ((0, 0),), text)


def reward(seconds: float = 60, **options: Any) -> Reward:
    return build_reward(RewardConfig([RewardTerm(kind="code", options=options)], "code", seconds))


def test_programs_are_run_several_at_once_and_the_first_failure_is_the_reason():
    built = reward(boxes=2)
    right, wrong = (
        Score(1.0, {"code": 1.0}, "code: passed 2 tests"),
        "code: test 2 of 2: line 1 of the output is '6', not '9'",
    )
    scores = built.score([sample(RIGHT if i % 2 else WRONG, i) for i in range(6)])
    assert scores == [right if i % 2 else Score(0.0, {"code": 0.0}, wrong) for i in range(6)]
    (score,) = reward(all_or_nothing=False).score([sample(WRONG)])
    assert score.total == 0.5


def test_limits_are_those_of_the_options():
    source = "x = bytearray(200 << 20); print(int(input()) ** 2)"
    assert reward().score([sample(source)])[0].total == 1.0
    (score,) = reward(memory_mib=100).score([sample(source)])
    assert "MemoryError" in score.reason
    (score,) = reward(cpu_seconds=1).score([sample("while True: pass")])
    assert (score.total, score.unscorable) == (0.0, "")
    (score,) = reward(seconds=1).score([sample("import time; time.sleep(1000)")])
    assert score == Score(0.0, {"code": 0.0}, "code: test 1 of 2: did not end within 1 s")


def test_a_problem_without_tests_is_an_error():
    with refused("'code', prompt 'code/1', sample 3 | a list"):
        reward().score([sample(RIGHT, 3, tests=[])])


def test_without_a_sandbox_it_is_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("grpo_mega.judges.sandbox.pool.MECHANISMS", ())
    with refused("kind code | apt-get install bubblewrap"):
        reward()
    assert reward(run_without_isolation=True).score([sample(RIGHT)])[0].total == 1.0

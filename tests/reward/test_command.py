"""Terms by programs: what they are given, what they print, and what they leave behind: nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from array import array
from pathlib import Path

import psutil
import pytest
from limits import limit
from processes import left, there
from ranks import REPOSITORY

from grpo_mega.config.schema import RewardConfig, RewardTerm
from grpo_mega.reward.command import MOST_OUTPUT, run
from grpo_mega.reward.compose import Reward, build_reward
from grpo_mega.types import Prompt, Sample, Score

LENGTH = (
    "import json, sys; s = json.load(sys.stdin); print(json.dumps({'value': len(s['completion']), 'reason': s['id']}))"
)


def sample(text: str = "abc", index: int = 0) -> Sample:
    prompt = Prompt(id="p/1", token_ids=(1,), text="3+5=?", answer="8", task="sums", metadata={"tests": [1]})
    return Sample(prompt, index, array("i", [2]), array("f", [0.0]), "stop", ((0, 0),), text)


def reward(*command: str, seconds: float = 600, on_error: str = "stop", at_once: int = 4) -> Reward:
    options = {"command": [*command], "at_once": at_once}
    return build_reward(RewardConfig([RewardTerm("mine", kind="command", options=options)], "mine", seconds, on_error))


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


def test_a_program_gets_the_sample_and_prints_the_verdict():
    samples = [sample("x" * i, i) for i in range(6)]
    assert reward(*python(LENGTH)).score(samples) == [
        Score(float(i), {"mine": float(i)}, "mine: p/1") for i in range(6)
    ]
    assert reward("sh", "-c", "echo 0.5").score([sample()]) == [Score(0.5, {"mine": 0.5})]
    (score,) = reward("sh", "-c", """echo '{"unscorable": "no compiler"}'""").score([sample()])
    assert score.unscorable == "reward term 'mine': no compiler"


def test_large_samples_and_hostile_text_arrive_whole():
    text = "\ud800\0é" + "x" * 2_000_000
    code = "import json, sys; print(json.loads(sys.stdin.read())['completion'] == '\\ud800\\0é' + 'x' * 2_000_000)"
    assert run([*python(code)], json.dumps({"completion": text}).encode(), 60).output == b"True\n"
    (score,) = reward("sh", "-c", "echo 1").score([sample(text)])  # reads nothing
    assert score.total == 1.0


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "import sys; print('half'); sys.exit('my last words')",
            "exit code 1; output: half; standard error: my last words",
        ),
        ("import os; os.kill(os.getpid(), 9)", "ended with exit code 137"),
        ("import os; os.kill(os.getppid(), 9)", "ended with exit code -9"),
        ("print('yes')", "has not printed JSON; output: yes"),
        ("pass", "has not printed JSON"),
        ("print('[' * 100000)", "has not printed JSON"),
        ("print('NaN')", "returned nan; a reward must be a finite number"),
        ("print('{\"score\": 1}')", "a reward must be a finite number"),
        ("while True: print('x' * 1000)", f"has printed more than {MOST_OUTPUT} bytes; output: xxx"),
    ],
)
def test_a_program_that_fails_is_an_error_or_left_out(code: str, words: str):
    with pytest.raises((RuntimeError, ValueError), match=r"^reward term 'mine', prompt 'p/1', sample 3: ") as raised:
        reward(*python(code)).score([sample(index=3)])
    assert words in str(raised.value)
    (score,) = reward(*python(code), on_error="leave_out").score([sample()])
    assert (score.terms, words in score.unscorable) == ({}, True)


def test_a_program_that_is_not_there():
    with pytest.raises(RuntimeError, match=r"/no/such/verifier ended with exit code 127.*No such file or directory"):
        reward("/no/such/verifier").score([sample()])


def test_a_program_that_takes_too_long_has_no_verdict_and_its_words_are_shown():
    code = "import sys, time; print('thinking', file=sys.stderr, flush=True); time.sleep(1000)"
    seconds = limit(2)
    (score,) = reward(*python(code), seconds=seconds).score([sample()])
    late = f"no verdict within reward.timeout_seconds={seconds:g}; standard error: thinking"
    assert score.unscorable == f"reward term 'mine': {sys.executable}: {late}"


def test_endless_words_on_standard_error_hold_nothing_up():
    code = "import sys; sys.stderr.write('x' * 5_000_000); print(1)"
    assert reward(*python(code)).score([sample()]) == [Score(1.0, {"mine": 1.0})]


ORPHANS = """
import os, subprocess, sys
alone = subprocess.Popen(["sleep", "1000"], start_new_session=True)
shell = subprocess.run(["sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo $!"], stdout=subprocess.PIPE, check=True)
deaf = subprocess.Popen(["sh", "-c", "trap '' TERM INT; sleep 1000"])
with open(sys.argv[1], "w") as file:
    file.write(f"{alone.pid} {int(shell.stdout)} {deaf.pid} {os.getpid()}")
"""


def started(told: Path) -> list[psutil.Process]:
    """The processes whose numbers `ORPHANS` has written, those that are still there."""
    numbers = [int(number) for number in told.read_text().split()]
    assert len(numbers) == 4
    return there(numbers)


@pytest.mark.parametrize(
    ("end", "seconds"), [("print(1)", 600), pytest.param("import time; time.sleep(1000)", 3, marks=pytest.mark.long)]
)
def test_nothing_is_left_of_a_program_however_it_ends(tmp_path: Path, end: str, seconds: float):
    told = tmp_path / "told"
    (score,) = reward(*python(ORPHANS + end), str(told), seconds=limit(seconds)).score([sample()])
    assert score.total == (1.0 if end == "print(1)" else 0.0)
    assert left(started(told)) == []


OWNER = """
import os, signal, sys, threading
sys.path[:0] = sys.argv[2:]
from test_command import ORPHANS, python, reward, sample
code = ORPHANS + "print(file=sys.stderr); os.kill(int(sys.argv[2]), 9); import time; time.sleep(1000)"
reward(*python(code), sys.argv[1], str(os.getpid())).score([sample()])
"""


def test_nothing_is_left_of_a_program_when_the_rank_is_killed(tmp_path: Path):
    told = tmp_path / "told"
    parent = subprocess.run(
        [sys.executable, "-c", OWNER, str(told), str(REPOSITORY / "tests" / "reward"), str(REPOSITORY / "tests")]
    )
    assert parent.returncode == -signal.SIGKILL
    assert left(started(told)) == []


def test_several_programs_run_at_once(tmp_path: Path):
    """Each waits until all are there."""
    code = (
        "import os, sys, time; folder = sys.argv[1]; open(f'{folder}/{os.getpid()}', 'w').close()\n"
        "while len(os.listdir(folder)) < 3: time.sleep(0.01)\n"
        "print(1)"
    )
    scores = reward(*python(code), str(tmp_path), at_once=3).score([sample(index=i) for i in range(3)])
    assert [score.total for score in scores] == [1.0] * 3


def test_a_program_sees_the_environment_and_the_working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("RANK", "5")
    monkeypatch.chdir(tmp_path)
    ended = run([*python("import os; print(os.environ['RANK'], os.getcwd(), end='')")], b"", 60)
    assert ended.output.decode() == f"5 {os.getcwd()}"

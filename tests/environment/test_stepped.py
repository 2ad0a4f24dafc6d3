"""Environments of skyrl-gym, gymnasium and TextArena: classes with the same methods, and the packages themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import without_waiting
from ranks import REPOSITORY

from grpo_mega.environment.calls import load
from grpo_mega.environment.episode import _kept
from grpo_mega.errors import InputError

LONGEST = 1000
CLASSES = ["TextEnv", "TextGym", "NumberGym", "Arena"]


def played(name: str, calls: list[str], group: str = "0/p", lost: bool = False, **row: Any) -> tuple[list[Any], float]:
    """The replies to some calls, and the reward after them; with `lost`, the object is made anew before each."""
    path, replies = f"made_environments:{name}", []
    for number in range(len(calls)):
        replies.append(without_waiting.reply(row, name, group, calls[: number + 1], path, LONGEST))
        if lost:
            _kept.clear()
    reward = without_waiting.reward(row, name, group, calls, path)
    assert reward is not None
    return replies, reward


def secret(name: str, group: str, **row: Any) -> str:
    """The number that ends an episode."""
    return next(str(n) for n in range(1, 9) if played(name, [str(n)], group, **row)[0][0]["done"])


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("lost", [False, True])
def test_an_episode(name: str, lost: bool) -> None:
    row = {"answer": "5"}
    right = secret(name, "0/p", **row)
    wrong = "1" if right != "1" else "2"
    replies, reward = played(name, [wrong, f" {wrong}" if name == "NumberGym" else wrong, right], lost=lost, **row)
    cost = 0.0 if name == "Arena" else -0.25
    assert replies[0] == replies[1] == {"text": f"not {wrong}", "error": False, "done": False, "reward": cost}
    assert (replies[2]["done"], replies[2]["reward"]) == (True, 0.5 if name == "Arena" else 1.0)
    assert reward == 0.5


@pytest.mark.parametrize(("name", "seen"), [*zip(CLASSES, ["one digit", "guess", "guess", "rules"], strict=True)])
def test_what_is_seen_before_the_first_step(name: str, seen: str) -> None:
    row = {"answer": "5", "prompt": "Guess."}
    assert without_waiting.opening(row, "0/p", f"made_environments:{name}", LONGEST) == f"\n\n{seen}"
    chat = row | {"prompt": [{"role": "system", "content": "Play."}, {"role": "user", "content": "Guess."}]}
    assert without_waiting.opening(chat, "0/p", f"made_environments:{name}", LONGEST) == f"\n\n{seen}"


def test_a_game_that_changes_the_problem_is_refused() -> None:
    row = {"answer": "5", "prompt": "shout"}
    with pytest.raises(ValueError, match="init changes the problem's messages"):
        without_waiting.opening(row, "0/p", "made_environments:TextEnv", LONGEST)


@pytest.mark.parametrize("name", ["TextGym", "NumberGym", "Arena"])
def test_the_seed_is_that_of_the_group_or_of_the_problem(name: str) -> None:
    assert len({secret(name, f"0/{number}") for number in range(20)}) > 3
    assert len({secret(name, f"0/{number}", seed=7) for number in range(5)}) == 1
    assert len({secret(name, "0/p", index=number) for number in range(5)}) == 1


def test_a_limit_of_steps_ends_an_episode_too() -> None:
    wrong = "1" if secret("TextGym", "0/p") != "1" else "2"
    replies, reward = played("TextGym", [wrong] * 3)
    assert [reply["done"] for reply in replies] == [False, False, True]
    assert reward == -0.75


@pytest.mark.parametrize("name", ["NumberGym", "TextEnv", "Arena"])
def test_an_action_that_a_step_cannot_read_is_the_model_s_to_read(name: str) -> None:
    (reply,), reward = played(name, ["x"], answer="5")
    assert reply["text"].startswith("error: ValueError")
    assert (reply["error"], reply["done"], reward) == (True, False, 0.0)


def test_the_whole_call_is_the_action() -> None:
    """Also one that looks like a call of a tool."""
    call = json.dumps({"name": "reset", "arguments": {}})
    (reply,), _ = played("TextGym", [call])
    assert reply["text"] == f"not {call}"


def test_a_call_in_the_form_of_its_schema_is_a_step() -> None:
    call = json.dumps({"name": "step", "arguments": {"action": "9"}})
    (reply,), _ = played("NumberGym", [call], answer="5")
    assert (reply["text"], reply["error"]) == ("not 9", False)


def test_a_class_of_ours_may_have_a_tool_step() -> None:
    assert without_waiting.reply({}, "k", "s", ["4"], "made_environments:Steps", LONGEST)["text"] == "5"


def test_a_class_that_needs_more_is_refused() -> None:
    with pytest.raises(InputError, match="needs length"):
        load("made_environments:OfLength")


def test_an_async_class_of_other_packages_is_refused() -> None:
    with pytest.raises(InputError, match="is async"):
        load("made_environments:Waiting")


PACKAGES = ["skyrl-gym==0.4.0", "gymnasium==1.4.0", "textarena==0.7.4"]
PROGRAM = """
import json
from without_waiting import opening, reply, reward

def played(path, calls, **row):
    replies = [reply(row, path, "0/p", calls[: n + 1], path, 1000) for n in range(len(calls))]
    return replies, reward(row, path, "0/p", calls, path)

game = "textarena.envs.GuessTheNumber.env:GuessTheNumberEnv"
lake = "gymnasium.envs.toy_text.frozen_lake:FrozenLakeEnv"
math = "skyrl_gym.envs.gsm8k.env:GSM8kEnv"
truth = {"reward_spec": {"ground_truth": "72"}}
print(json.dumps({
    "openings": [
        opening({"prompt": "?"} | row, "0/p", path, 10000) for path, row in ((math, truth), (lake, {}), (game, {}))
    ],
    "math": played(math, ["#### 72"], **truth),
    "blackjack": played("gymnasium.envs.toy_text.blackjack:BlackjackEnv", ["0"]),
    "lake": [played(lake, ["1"] * 40), played(lake, ["1"] * 40)],
    "guess": [played(game, [f"[{n}]" for n in range(1, last + 1)]) for last in range(1, 20)],
}))
"""


@pytest.mark.long
def test_the_packages(tmp_path: Path) -> None:
    """In a virtual environment for themselves, as they bring 300 MB that the trainer does not need."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", *PACKAGES]
    if (installed := subprocess.run(install, capture_output=True, text=True)).returncode:
        pytest.skip(f"cannot be installed: {installed.stderr[-500:]}")
    paths = {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}", "HOME": str(tmp_path)}
    ran = subprocess.run([python, "-c", PROGRAM], env=os.environ | paths, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    nothing, start, rules = found["openings"]
    assert (nothing, start) == ("", "\n\n0")
    assert "number between" in rules
    (math,), reward = found["math"]
    assert (math["done"], math["text"], reward) == (True, "", 1.0)
    (stand,), reward = found["blackjack"]
    assert stand["done"]
    assert reward in (-1.0, 0.0, 1.0)
    once, again = found["lake"]
    assert once == again
    assert any(reply["done"] for reply in once[0])
    assert not any(reply["error"] for reply in once[0])
    last = next(number for number, (replies, _) in enumerate(found["guess"]) if replies[-1]["done"])
    replies, reward = found["guess"][last]
    assert reward == 1.0
    assert all(reply["text"] == "The target number is higher." for reply in replies[:-1])

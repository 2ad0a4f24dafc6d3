"""The guessing game: problems that read alike, documents whose replies the environment gives, and its rewards."""

from __future__ import annotations

import re

import pytest
import without_waiting
from composed import composed
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.config.schema import DataConfig
from grpo_mega.data import build_data
from grpo_mega.data.tasks.tiny_guess import GUESSES, NUMBERS, QUESTION, TinyGuess
from grpo_mega.data.tokenizer import character_tokenizer
from grpo_mega.environment.guess import Guess

TOKENIZER = character_tokenizer(DataConfig(task="tiny_guess"))
TASK = TinyGuess(TOKENIZER, validation_size=64, test_size=320)
FIRST_OF_HALVING = "16"


def replies(number: int, guesses: list[str]) -> list[dict]:
    environment = composed("experiment=tiny_guess").environment
    row = {"answer": str(number)}
    calls = [guesses[: i + 1] for i in range(len(guesses))]
    return [without_waiting.reply(row, "key", "seed", some, str(environment.path), longest=100) for some in calls]


def test_problems_read_alike_and_have_every_number() -> None:
    config = composed("experiment=tiny_guess", "run.seed=3")
    data = build_data(config)
    assert (data.validation, data.test) == (TASK.validation, TASK.test)
    train = data.train.take(500)
    assert train == [TASK.problem(3, k) for k in range(500)]
    for split in (train, TASK.validation, TASK.test):
        assert {prompt.text for prompt in split} == {QUESTION}
        assert {int(prompt.answer) for prompt in split} == {*NUMBERS}
        assert len({prompt.id for prompt in split}) == len(split)


@given(st.integers(0, 2**40))
def test_documents_are_games_that_the_environment_would_play(seed: int) -> None:
    (ids,) = TASK.documents(seed, 0, 1, 0.0, 0.0)
    turns = re.fullmatch(r"<bos>\?((?:\[\d+\][-+=];)+)<eos>", TOKENIZER.decode(ids))
    assert turns
    assert len(ids) <= TASK.longest_document()
    game = re.findall(r"\[(\d+)\](.);", turns[1])
    told = [{"+": range(int(g) + 1, 32), "-": range(int(g)), "=": range(int(g), int(g) + 1)}[s] for g, s in game]
    number = next(n for n in NUMBERS if all(n in some for some in told))
    played = replies(number, [guess for guess, _ in game])
    assert [reply["text"] for reply in played] == [sign for _, sign in game]
    assert [reply["done"] for reply in played] == [*[False] * (len(game) - 1), True]
    assert len(game) == GUESSES or game[-1][1] == "="


def test_one_document_in_ten_halves_what_is_left() -> None:
    documents = [TOKENIZER.decode(ids) for ids in TASK.documents(0, 0, 4000, 0.0, 0.0)]
    first = [re.match(r"<bos>\?\[(\d+)\]", text)[1] for text in documents]  # type: ignore[index]
    expected = 0.1 + 0.9 / 32
    assert sum(guess == FIRST_OF_HALVING for guess in first) / 4000 == pytest.approx(expected, abs=0.02)


@given(st.sampled_from(NUMBERS), st.lists(st.integers(-5, 40), min_size=1, max_size=5))
def test_rewards_of_turns_are_the_bits_that_they_tell(number: int, guesses: list[int]) -> None:
    guesses = guesses[: guesses.index(number) + 1] if number in guesses else guesses
    played = replies(number, [str(guess) for guess in guesses])
    below, above = [g for g in guesses if g < number], [g for g in guesses if g > number]
    left = 1 if number in guesses else min([32, *above]) - max([-1, *below]) - 1
    assert 2 ** (5 - 5 * sum(reply["reward"] for reply in played)) == pytest.approx(left)
    assert all(reply["reward"] >= 0 for reply in played)


@pytest.mark.parametrize(("guesses", "reward"), [([3, 7], 1.0), ([3], 0.0)])
def test_the_reward_is_whether_the_number_was_found(guesses: list[int], reward: float) -> None:
    game = Guess()
    game.reset("7")
    for guess in guesses:
        game.guess(guess)
    assert game.get_reward() == reward


def test_the_gate_wants_the_form_of_a_game() -> None:
    started = TASK.working_prompt(TASK.validation[7])
    assert started.text == f"{QUESTION}[24]-;"
    assert TOKENIZER.encode(started.text) == list(started.token_ids)
    for text in ("", "[7]=;", "[3]+;[29]-;"):
        assert TASK.is_worked_out(started, text)
    for text in ("[7]", "7=;", "[117]=;", "[1]+;" * 5, "[]+;"):
        assert not TASK.is_worked_out(started, text)

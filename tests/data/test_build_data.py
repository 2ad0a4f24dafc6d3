"""The data of a run, built from its configuration."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
from refusals import refused

from grpo_mega.config.load import compose_config
from grpo_mega.config.schema import Config, DataConfig, ModelConfig, RewardTerm, RunConfig
from grpo_mega.data import build_data
from grpo_mega.data.tasks import chain_sum
from grpo_mega.data.tokenizer import CharTokenizer
from grpo_mega.reward.scorable import why_unreachable


def config(context: int = 64, seed: int = 0, **data: object) -> Config:
    return Config(run=RunConfig(seed=seed), model=ModelConfig(context=context), data=DataConfig(**data))


def write(path: Path, n: int, offset: int = 0) -> str:
    lines = [json.dumps({"prompt": f"{i}=?", "answer": i, "id": f"{path.stem}{i}"}) for i in range(offset, offset + n)]
    path.write_text("\n".join(lines))
    return str(path)


def jsonl(folder: Path, n: int = 20, **data: object) -> Config:
    paths = {"train_path": write(folder / "train.jsonl", n), "test_path": write(folder / "test.jsonl", 5, 100)}
    return config(**{"task": "jsonl", "validation_size": 6, **paths, **data})


def test_chain_sum():
    chosen = config(task="chain_sum", seed=3, max_terms=4, validation_size=20, test_size=30)
    data, task = build_data(chosen), chain_sum(chosen.data)
    assert (len(data.validation), len(data.test)) == (20, 30)
    assert (data.validation, data.test) == (task.validation, task.test)
    assert {prompt.text.count("+") + 1 for prompt in data.test} == {3, 4}
    assert data.train.take(2) == [task.problem(3, k) for k in range(2)]


def test_chain_sum_test_set_does_not_depend_on_the_seed_but_training_does():
    one, two = (build_data(config(task="chain_sum", seed=seed)) for seed in (0, 1))
    assert (one.test, one.validation) == (two.test, two.validation)
    assert [p.text for p in one.train.take(20)] != [p.text for p in two.train.take(20)]
    with pytest.raises(ValueError, match=r"seed=0.*seed=1"):
        two.train.load_state_dict(one.train.state_dict())


def test_jsonl_splits_the_training_file(tmp_path: Path):
    one, two = build_data(jsonl(tmp_path)), build_data(jsonl(tmp_path, seed=1))
    epoch = [p.text for p in one.train.take(14)]
    assert len(one.validation) == 6
    assert sorted(epoch + [p.text for p in one.validation]) == sorted(f"<bos>{i}=?" for i in range(20))
    assert [p.answer for p in one.test] == ["100", "101", "102", "103", "104"]
    assert one.validation == two.validation
    assert epoch != [p.text for p in two.train.take(14)]


def test_jsonl_state_of_a_changed_file_is_refused(tmp_path: Path):
    state = build_data(jsonl(tmp_path)).train.state_dict()
    with pytest.raises(ValueError, match="sha256"):
        build_data(jsonl(tmp_path, n=21)).train.load_state_dict(state)


@pytest.mark.parametrize("size", [20, 21])
def test_jsonl_validation_must_leave_training_problems(tmp_path: Path, size: int):
    with refused("validation_size | validation_"):
        build_data(jsonl(tmp_path, validation_size=size))
    assert len(build_data(jsonl(tmp_path, validation_size=19)).validation) == 19


def test_jsonl_needs_a_training_file(tmp_path: Path):
    with pytest.raises(ValueError, match=r"data.train_path: not set"):
        build_data(jsonl(tmp_path, train_path=None))


def test_without_a_test_file_the_test_problems_are_taken_off_the_training_file(tmp_path: Path):
    with refused("validation_size + data.test_size | lower it to 19 or less, or give"):
        build_data(jsonl(tmp_path, test_path=None, test_size=14))
    one, two = (build_data(jsonl(tmp_path, test_path=None, test_size=5, seed=seed)) for seed in (0, 1))
    assert (one.test, one.validation) == (two.test, two.validation)
    assert (len(one.test), len(one.validation)) == (5, 6)
    parts = [*one.train.take(9), *one.test, *one.validation]
    assert sorted(prompt.text for prompt in parts) == sorted(f"<bos>{i}=?" for i in range(20))
    other = build_data(jsonl(tmp_path, test_path=None, test_size=4)).train
    with pytest.raises(ValueError, match=r"held_out=6\+4.*held_out=6\+5|held_out=6\+5.*held_out=6\+4"):
        other.load_state_dict(one.train.state_dict())


def test_the_training_file_is_no_test_file(tmp_path: Path):
    train = write(tmp_path / "train.jsonl", 20)
    with refused("data.test_path= | are in data.train_path="):
        build_data(jsonl(tmp_path, test_path=train))
    with refused("data | all 3 problems"):  # those that validation may have got
        build_data(jsonl(tmp_path, test_path=write(tmp_path / "part.jsonl", 3)))


def test_problems_that_are_there_twice_are_said(tmp_path: Path):
    assert build_data(jsonl(tmp_path)).warnings == ()
    train, test = write(tmp_path / "twice.jsonl", 20), write(tmp_path / "overlapping.jsonl", 10, 15)
    with (tmp_path / "twice.jsonl").open("a") as file:
        for i in range(20):
            file.write("\n" + json.dumps({"prompt": f"{i}=? ", "answer": i}))
    with pytest.raises(ValueError, match=r"5 of the 10 problems of data\.test_path=.*data\.shared_test_problems=5"):
        build_data(jsonl(tmp_path, train_path=train, test_path=test))
    said = build_data(jsonl(tmp_path, train_path=train, test_path=test, shared_test_problems=5)).warnings
    repeated, split, overlap = said
    assert repeated.startswith(f"20 problems occur more than once in {train}: 'twice/21', ")
    assert re.match(r"[1-6] of the 6 problems that are held out are trained on too", split)
    assert overlap.startswith(f"5 of the 10 problems of data.test_path={test} are in data.train_path={train} too")


def test_answers_that_cannot_be_reached_are_refused_in_either_file(tmp_path: Path):
    both = jsonl(tmp_path, shared_test_problems=1)
    unreachable = partial(why_unreachable, [RewardTerm(name="accuracy")])
    build_data(both, unreachable)
    for file in (tmp_path / "test.jsonl", tmp_path / "train.jsonl"):
        with file.open("a") as lines:
            lines.write("\n" + json.dumps({"prompt": "0=?", "answer": "1 + 1 = <<1+1=2>>2\n#### 2"}))
        with pytest.raises(ValueError, match=rf"{file}:\d+: field 'answer' is a whole solution of GSM8K.* '2'"):
            build_data(both, unreachable)
        build_data(both, partial(why_unreachable, [RewardTerm(name="accuracy", function="mine:f")]))


def test_stop_tokens_are_known_before_anything_is_made(tmp_path: Path):
    assert build_data(jsonl(tmp_path)).stop_ids == (CharTokenizer.eos_id,)
    assert build_data(config(task="chain_sum")).stop_ids == (CharTokenizer.eos_id,)
    unknown = jsonl(tmp_path)
    unknown.rollout.stop = ["<|im_end|>"]
    with refused("rollout.stop: '<|im_end|>' | not a token"):
        build_data(unknown)
    unknown.rollout.stop = []
    assert build_data(unknown).stop_ids == ()
    assert "rollout.stop=[]: no token ends a completion" in build_data(unknown).warnings[-1]


def test_prompt_that_fills_the_context():
    assert build_data(config(context=13, task="chain_sum")).train.take(1)
    with refused("chain_sum/ | model.context"):
        build_data(config(context=12, task="chain_sum"))


def test_jsonl_prompt_that_fills_the_context(tmp_path: Path):
    with refused("'test100' | model.context"):
        build_data(jsonl(tmp_path, context=6))


def test_unknown_task():
    choices = "chain_sum, tiny_code, tiny_guess, tiny_mixture, tiny_product, jsonl"
    with pytest.raises(ValueError, match=rf"data\.task=gsm8k: unknown; choose one of {choices}"):
        build_data(config(task="gsm8k"))


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"min_terms": 1}, "data.min_terms=1: out of range"),
        ({"min_terms": 4, "max_terms": 3}, "data.min_terms=4: must be at most data.max_terms=3"),
        ({"validation_size": -1}, "data.validation_size=-1: out of range"),
        ({"test_size": 0}, "data.test_size=0: out of range"),
    ],
)
def test_senseless_settings_are_named(values: dict[str, int], field: str):
    with pytest.raises(ValueError, match=field):
        build_data(config(task="chain_sum", **values))


def test_documents_that_do_not_fit_the_context_are_refused():
    overrides = ["experiment=tiny", "data.max_terms=14", "rollout.max_new_tokens=100"]
    with pytest.raises(ValueError, match=r"data\.max_terms=14 have worked documents of up to \d+ tokens"):
        build_data(compose_config(overrides))
    build_data(compose_config([*overrides, "base=none"]))

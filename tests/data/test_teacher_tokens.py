"""A teacher's tokens are the policy's, id by id, or it is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from composed import composed
from made_tokenizer import write_tokenizer
from refusals import refused

from grpo_mega.config.schema import Config, DataConfig
from grpo_mega.config.trained_model import TrainedModel
from grpo_mega.data import build_tokenizer
from grpo_mega.data.check_models import teacher_vocabulary

INSTEAD = "learn from its samples instead .tools/evaluate.py, tools/rejection_sample.py, sft.path: docs/recipes.md."


def taught() -> Config:
    return composed("experiment=tiny_distill", "distill.teacher=runs/teacher")


def scored(ours: DataConfig, theirs: DataConfig, of_policy: int | None = None, of_teacher: int | None = None) -> int:
    config = taught()
    teacher = TrainedModel(replace(config.model, vocab_size=of_teacher), theirs)
    config.data, config.model.vocab_size = ours, of_policy
    return teacher_vocabulary(teacher, build_tokenizer(ours), config.distill, config.data, config.model)


def of_folder(folder: Path) -> DataConfig:
    return DataConfig(task="jsonl", tokenizer=str(folder))


def test_the_same_tokens_are_taken_whatever_the_task_is_called() -> None:
    ours = taught().data
    assert scored(ours, DataConfig(task="chain_sum")) == build_tokenizer(ours).vocab_size


def test_words_of_python_are_other_tokens() -> None:
    with pytest.raises(ValueError, match=rf"'\(' is \d+ there and no token here; {INSTEAD}"):
        scored(taught().data, DataConfig(task="tiny_code"))


def test_copies_of_a_tokenizer_are_one_and_another_id_makes_it_another(tmp_path: Path) -> None:
    ours, theirs = (write_tokenizer(tmp_path / name, with_bos=False) for name in ("ours", "theirs"))
    size = scored(of_folder(ours), of_folder(theirs))
    assert size == build_tokenizer(of_folder(ours)).vocab_size
    file = theirs / "tokenizer.json"
    made = json.loads(file.read_text())
    one, other = sorted(made["model"]["vocab"], key=made["model"]["vocab"].get)[5:7]
    vocabulary = made["model"]["vocab"]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    file.write_text(json.dumps(made))
    with refused("distill.teacher=runs/teacher | tools/evaluate.py, tools/rejection_sample.py,"):
        scored(of_folder(ours), of_folder(theirs))


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    ours = of_folder(write_tokenizer(tmp_path / "ours", with_bos=False))
    with pytest.raises(ValueError, match=r"distill.teacher=runs/teacher: its tokenizer"):
        scored(ours, of_folder(tmp_path / "none"))


def test_a_teacher_may_score_more_tokens_than_the_policy_samples_and_not_fewer() -> None:
    data = taught().data
    size = build_tokenizer(data).vocab_size
    assert scored(data, data, of_teacher=size + 64) == size + 64
    with pytest.raises(ValueError, match=rf"scores {size} tokens, and the policy samples from {size + 1} "):
        scored(data, data, of_policy=size + 1)

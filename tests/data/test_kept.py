"""Large files of problems are read once: what is kept is what was read, and nothing else is taken for it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from made_tokenizer import write_tokenizer

from grpo_mega.config.schema import Config, DataConfig, ModelConfig, RewardConfig, RewardTerm, RunConfig, SourceConfig
from grpo_mega.data import build_data, build_tokenizer, stored
from grpo_mega.data.stored import Stored, read_stored
from grpo_mega.reward.scorable import why_unreachable

ROWS: list[dict[str, Any]] = [
    {
        "prompt": f"What is {i}/7, \u00e4 \U0001f600?",
        "answer": f"{i}/7",
        "hard": i / 7,
        "about": {"a": [i, None, "\n\ud800"]},
    }
    for i in range(24)
]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr(stored, "LARGE", 1)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "b.jsonl").write_text('{"prompt": "1=?", "answer": 1}\n{"prompt": "1=?", "answer": 1}\n')
    sources = {
        "a": SourceConfig(path=f"{tmp_path}/a.jsonl", difficulty="hard", metadata=["about"]),
        "b": SourceConfig(path=f"{tmp_path}/b.jsonl"),
    }
    folder = write_tokenizer(tmp_path / "model", with_bos=True)
    data = DataConfig("jsonl", tokenizer=str(folder), template="chat", sources=sources, validation_size=3, test_size=2)
    reward = RewardConfig(terms=[RewardTerm(name="boxed")])
    return Config(run=RunConfig(root=f"{tmp_path}/runs"), model=ModelConfig(context=64), data=data, reward=reward)


class Counted:
    """Reads the problems as a run does, and counts."""

    def __init__(self, config: Config) -> None:
        self.config, self.times = config, 0

    def __call__(self) -> Stored:
        self.times += 1
        data = self.config.data
        return read_stored(data, build_tokenizer(data), partial(why_unreachable, self.config.reward.terms))


def read_once(config: Config, read: Callable[[], Stored], keep: bool) -> Stored:
    return stored.read_once(config.run.root, config.data, config.reward.terms, read, keep)


def folder(config: Config) -> Path:
    return Path(config.run.root) / stored.FOLDER


def test_what_is_kept_is_what_was_read(config: Config) -> None:
    read = Counted(config)
    expected = read()
    first, second = (read_once(config, read, keep=True) for _ in range(2))
    assert first == second == expected
    assert [repr(problem) for problem in second.train["a"]] == [repr(problem) for problem in expected.train["a"]]
    assert read.times == 2
    assert expected.warnings, "about problems that are repeated"
    assert build_data(config, keep=True).train.take(30) == build_data(replace(config, run=RunConfig())).train.take(30)


def other_row(config: Config) -> Config:
    path = Path(config.data.sources["a"].path or "")
    path.write_text(path.read_text().replace('"3/7"', '"4/7"'))
    return config


def other_template(config: Config) -> Config:
    template = Path(config.data.tokenizer) / "chat_template.jinja"
    template.write_text(template.read_text() + "!")
    return config


OTHERS: list[Callable[[Config], Config]] = [
    other_row,
    other_template,
    lambda config: replace(config, data=replace(config.data, question="{prompt}?")),
    lambda config: replace(config, data=replace(config.data, validation_size=2)),
    lambda config: replace(config, reward=RewardConfig(terms=[RewardTerm(name="stated")])),
]


@pytest.mark.parametrize("change", OTHERS)
def test_what_follows_from_something_else_is_read_again(config: Config, change: Callable[[Config], Config]) -> None:
    read_once(config, Counted(config), keep=True)
    changed = change(config)
    read = Counted(changed)
    assert read_once(changed, read, keep=True) == read()
    assert read.times == 2
    assert len([*folder(config).glob("*.json")]) == 2


def test_a_change_of_the_code_is_one(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_once(config, Counted(config), keep=True)
    (tmp_path / "more.py").write_text("")
    monkeypatch.setattr(stored, "_CODE", [*stored._CODE, tmp_path / "more.py"])
    read = Counted(config)
    read_once(config, read, keep=True)
    assert read.times == 1


def test_a_damaged_file_is_as_good_as_none(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    expected = read_once(config, Counted(config), keep=True)
    (path,) = folder(config).glob("*.json")
    for damaged in (path.read_bytes()[:-9], b"[]", b"\xff"):
        path.write_bytes(damaged)
        caplog.clear()
        assert read_once(config, Counted(config), keep=True) == expected
        assert f"{path} is damaged, and the problems are read again" in caplog.text
    read = Counted(config)
    read_once(config, read, keep=True)
    assert read.times == 0


def test_those_that_start_together_wait_for_the_first(config: Config) -> None:
    together = threading.Barrier(4)
    read = Counted(config)
    found: list[Stored] = []

    def start() -> None:
        together.wait()
        found.append(read_once(config, read, keep=True))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [found[0]] * 4
    assert read.times == 1


def test_problems_are_read_where_nothing_can_be_or_is_to_be_kept(
    config: Config, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = read_once(config, Counted(config), keep=False)
    assert not Path(config.run.root).exists()
    Path(config.run.root).write_text("a file")
    assert read_once(config, Counted(config), keep=True) == expected
    assert "the problems are not kept, and are read at every start" in caplog.text
    Path(config.run.root).unlink()
    monkeypatch.setattr(stored, "LARGE", 1 << 20)
    assert read_once(config, Counted(config), keep=True) == expected
    assert not Path(config.run.root).exists()


def test_the_oldest_make_room(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "NEWEST", 2)
    for size in (1, 2, 3, 4):
        changed = replace(config, data=replace(config.data, validation_size=size))
        read_once(changed, Counted(changed), keep=True)
    assert len([*folder(config).glob("*.json")]) == 2
    read = Counted(changed)
    read_once(changed, read, keep=True)
    assert read.times == 0

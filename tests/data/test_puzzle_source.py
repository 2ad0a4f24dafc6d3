"""Problems that reasoning-gym makes: the same everywhere, held out for good, in mixtures; and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from limits import limit
from made_tokenizer import write_tokenizer
from ranks import REPOSITORY
from refusals import refused

from grpo_mega.config.rules.data import check_data
from grpo_mega.config.schema import Config, DataConfig, ModelConfig, RunConfig, SourceConfig
from grpo_mega.data import Data, build_data
from grpo_mega.data.stored import puzzles
from grpo_mega.errors import ConfigError
from grpo_mega.judges.puzzles import REFUSED, VETTED
from grpo_mega.types import Group, SampleInfo, Score

DIGESTS = """
import hashlib, json
from grpo_mega.judges.puzzles import VETTED
from grpo_mega.config.schema import SourceConfig
from grpo_mega.data.stored import puzzles
for task in VETTED:
    made, tested = puzzles(SourceConfig(reasoning_gym=task, problems=2, test_problems=1), "data.sources.a")
    fields = json.dumps([record.fields for record in [*made, *tested]])
    print(task, hashlib.sha256(fields.encode()).hexdigest())
"""


def config(tokenizer: Path, curriculum: str = "none", seed: int = 0, **sources: dict[str, Any]) -> Config:
    data = DataConfig(
        task="jsonl",
        tokenizer=str(tokenizer),
        sources={name: SourceConfig(**source) for name, source in sources.items()},
        validation_size=2,
        curriculum=curriculum,
    )
    return Config(run=RunConfig(seed=seed), model=ModelConfig(context=2048), data=data)


def refusal(**source: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        check_data(config(Path("folder"), a=source))
    return str(raised.value)


def test_a_task_is_vetted_or_refused_with_the_reason() -> None:
    assert not {*VETTED} & REFUSED.keys()
    for task, why in REFUSED.items():
        assert f"data.sources.a.reasoning_gym={task}: {why}; choose one of ab, " in refusal(reasoning_gym=task)
    assert "reasoning-gym 0.1.25 has no such task; choose one of" in refusal(reasoning_gym="gdc")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"path": "a.jsonl"}, "a.path: no effect with data.sources.a.reasoning_gym"),
        ({"metadata": ["x"]}, "a.metadata: no effect with data.sources.a.reasoning_gym"),
        ({"problems": 0}, "a.problems=0: out of range; choose a value in [1, inf)"),
        ({"test_problems": -1}, "a.test_problems=-1: out of range; choose a value in [0, inf)"),
        ({"options": {"seed": 3}}, "a.options.seed: no effect"),
        ({"weight": -1.0}, "a.weight=-1.0: out of range; choose a value in (0, inf)"),
        ({"reasoning_gym": None, "path": "a.jsonl", "problems": 5}, "a.problems: no effect without"),
    ],
)
def test_settings_that_do_not_fit_are_refused(source: dict[str, Any], message: str) -> None:
    assert message in refusal(**{"reasoning_gym": "gcd"} | source)


@pytest.mark.parametrize("release", ["0.1.19", None])
def test_another_release_of_the_library_is_refused_with_the_fix(
    release: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if release:
        (tmp_path / f"reasoning_gym-{release}.dist-info").mkdir()
        about = f"Metadata-Version: 2.1\nName: reasoning-gym\nVersion: {release}\n"
        (tmp_path / f"reasoning_gym-{release}.dist-info" / "METADATA").write_text(about)
        monkeypatch.syspath_prepend(tmp_path)
    else:
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with refused("reasoning-gym | pip install reasoning-gym==0.1.25"):
        puzzles(SourceConfig(reasoning_gym="gcd"), "data.sources.a")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (pip install -e '.[puzzles]')")
    return write_tokenizer(tmp_path / "tokenizer", with_bos=True)


def built(tokenizer: Path, **settings: Any) -> Data:
    return build_data(config(tokenizer, **settings))


def gcd(**source: Any) -> dict[str, Any]:
    return {"reasoning_gym": "gcd", "problems": 30, "test_problems": 5} | source


def test_problems_have_what_their_scorer_reads(tokenizer: Path) -> None:
    data = built(tokenizer, divisors=gcd())
    assert (len(data.problems), len(data.validation), len(data.test)) == (28, 2, 5)
    for prompt in [*data.problems, *data.validation, *data.test]:
        assert (prompt.task, prompt.id[:13]) == ("divisors", "divisors/gcd/")
        puzzle = prompt.metadata["reasoning_gym"]
        assert puzzle["task"] == "gcd"
        assert prompt.text.endswith(puzzle["entry"]["question"])
        assert prompt.answer == puzzle["entry"]["answer"]
        assert json.loads(json.dumps(puzzle)) == puzzle
    assert len({prompt.text for prompt in [*data.problems, *data.validation, *data.test]}) == 35


def test_the_runs_seed_changes_the_order_and_more_training_problems_change_no_held_out_one(tokenizer: Path) -> None:
    few, other, more = (
        built(tokenizer, seed=seed, divisors=gcd(problems=problems)) for seed, problems in ((0, 30), (1, 30), (0, 60))
    )
    assert (few.problems, few.test) == (other.problems, other.test)
    assert few.train.take(9) != other.train.take(9)
    assert few.test == more.test
    names = {prompt.id for prompt in [*more.problems, *more.validation]}
    assert {prompt.id for prompt in [*few.problems, *few.validation]} < names


def test_every_process_makes_the_same_problems(tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of every vetted task, also where Python's hashes are others."""
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    other = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = os.environ | {"PYTHONHASHSEED": other, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", DIGESTS], env=environment, capture_output=True, text=True, timeout=limit(300)
    )
    assert done.returncode == 0, done.stderr[-2000:]
    exec(DIGESTS, {})
    assert capsys.readouterr().out == done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines()] == [*VETTED]


def test_a_mixture_with_a_file_follows_the_frontier_and_continues_after_a_stop(tokenizer: Path, tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+1=?", "answer": i + 1}) + "\n" for i in range(20)))
    sources = {"divisors": gcd(weight=1.0), "sums": {"path": str(path), "weight": 1.0}}
    data, again = (built(tokenizer, curriculum="frontier", **sources) for _ in range(2))
    taken = data.train.take(60)
    assert Counter(prompt.task for prompt in taken) == {"divisors": 30, "sums": 30}
    solved = SampleInfo(1, "stop", ((0, 0),), Score(1.0, {"accuracy": 1.0}))
    data.train.learn([Group(prompt, (solved,)) for prompt in taken])
    again.train.load_state_dict(json.loads(json.dumps(data.train.state_dict())))
    assert data.train.take(40) == again.train.take(40)
    uniform = built(tokenizer, **sources).train.take(100)
    assert [prompt.id for prompt in again.train.take(20)] != [prompt.id for prompt in uniform[-20:]]


def test_a_source_can_do_without_held_out_problems(tokenizer: Path) -> None:
    assert len(built(tokenizer, divisors=gcd(test_problems=0, problems=500)).test) == 400  # taken off, as of a file


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (gcd(options={"max_number": 5}), "a.options={'max_number': 5} | gcd rejects them: "),
        (
            gcd(reasoning_gym="calendar_arithmetic", options={"tasks": []}),
            "a.options={'tasks': []} | calendar_arithmetic cannot make item 0 with them: Index",
        ),
        (
            gcd(reasoning_gym="bf", options={"difficulty": 2.5}, test_problems=0),
            "a.options={'difficulty': 2.5} | bf cannot make item 1073741824 with them: ",
        ),
        (
            gcd(
                options={"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 2},
                problems=500,
                test_problems=0,
            ),
            "a.problems=500 | 10000 items of gcd have only ",
        ),
    ],
)
def test_what_a_task_cannot_do_is_refused(tokenizer: Path, source: dict[str, Any], message: str) -> None:
    with refused(message):
        built(tokenizer, a=source)


def test_problems_that_another_source_trains_on_are_refused_with_a_fix_that_works(tokenizer: Path) -> None:
    few = {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 9}
    sources = {"a": gcd(options=few, test_problems=0), "b": gcd(options=few, problems=1, test_problems=50)}
    fix = "choose data.sources.b.options that generate different problems, or data.sources.b.test_problems=0"
    with refused(f"data.sources.b.reasoning_gym=gcd | {fix}"):
        built(tokenizer, **sources)
    others = few | {"min_value": 10, "max_value": 99}
    assert len(built(tokenizer, **sources | {"b": sources["b"] | {"options": others}}).test) == 50

"""Several sources: their columns, words, shares, splits and overlaps, from the configuration to prompts."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tokenizer import write_tokenizer
from refusals import refused

from grpo_mega.config.load import compose_config
from grpo_mega.config.schema import Config, DataConfig, ModelConfig, RewardTerm, RunConfig, SourceConfig
from grpo_mega.data import Data, build_data, build_tokenizer
from grpo_mega.data.problems import load_problems
from grpo_mega.data.prompt_order import mixture, shares
from grpo_mega.data.tokenizer import CharTokenizer
from grpo_mega.errors import InputError
from grpo_mega.reward.scorable import why_unreachable


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sums(path: Path, n: int, first: int = 0) -> str:
    return write(path, [{"prompt": f"{i}=?", "answer": i} for i in range(first, first + n)])


def build(seed: int = 0, validation_size: int = 1, test_size: int = 1, shared: int = 0, **sources: Any) -> Data:
    made = {name: SourceConfig(**source) for name, source in sources.items()}
    data = DataConfig(
        task="jsonl",
        sources=made,
        validation_size=validation_size,
        test_size=test_size,
        shared_test_problems=shared,
    )
    return build_data(Config(run=RunConfig(seed=seed), model=ModelConfig(context=64), data=data))


def test_columns_are_mapped_and_the_name_is_the_task(tmp_path: Path) -> None:
    rows = [
        {
            "question": f"{i}+1=?",
            "solution": f"It is\n#### 0\n#### {i + 1} \nDone.",
            "about": {"level": i, "name": f"n{i}"},
            "task": "other",
            "tests": ["a", {"b": i}],
        }
        for i in range(4)
    ]
    test = write(
        tmp_path / "test.jsonl", [{"question": "9+9=?", "solution": "#### 18", "about": {"name": "t"}, "tests": 1}]
    )
    gsm8k = {
        "path": write(tmp_path / "a.jsonl", rows),
        "test_path": test,
        "prompt": "question",
        "answer": "solution",
        "answer_pattern": "#### (.*)",
        "id": "about.name",
        "metadata": ["about.name", "tests"],
    }
    data = build(gsm8k=gsm8k)
    (test_prompt,) = data.test
    assert (test_prompt.id, test_prompt.task, test_prompt.answer) == ("gsm8k/t", "gsm8k", "18")
    assert test_prompt.metadata == {"about.name": "t", "tests": 1}
    for prompt in data.train.take(3):
        i = int(prompt.text.removeprefix("<bos>")[0])
        assert (prompt.id, prompt.answer, prompt.task) == (f"gsm8k/n{i}#0", str(i + 1), "gsm8k")
        assert prompt.metadata == {"about.name": f"n{i}", "tests": ["a", {"b": i}]}


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        ({"prompt": "1=?"}, {"answer": "a.b"}, "field 'a.b' | missing"),
        ({"prompt": "1=?", "a": {"b": 0.5}}, {"answer": "a.b"}, "field 'a.b' | write it as a string"),
        ({"prompt": "1=?", "answer": "no"}, {"answer_pattern": "#### (.*)"}, "answer | matches answer_pattern="),
        ({"prompt": "1=?", "answer": "####  "}, {"answer_pattern": "####(.*)"}, "field 'answer' | empty"),
        ({"prompt": "1=?", "answer": "1"}, {"id": "name"}, "field 'name' | missing"),
        ({"prompt": "1=?", "answer": "1"}, {"metadata": ["tests"]}, "field 'tests' | missing"),
        (
            {"prompt": "1=?", "answer": "1"},
            {"difficulty": "level"},
            "field 'level' | missing; the columns are",
        ),
        (
            {"prompt": "1=?", "answer": "1", "level": "x"},
            {"difficulty": "level"},
            "field 'level' | 'x' is not a number",
        ),
        (
            {"question": "1=?"},
            {},
            "field 'prompt' | by --prompt COLUMN or",
        ),
        ({"prompt": [{"role": "user"}], "answer": "1"}, {}, "field 'prompt[0].content' | missing"),
        (
            {"prompt": [{"role": "user", "content": "1"}], "answer": "1"},
            {},
            "data.tokenizer=chars | has no chat template",
        ),
        (
            {"prompt": [{"role": "assistant", "content": "1"}], "answer": "1"},
            {},
            "field 'prompt' | ends with the assistant's message",
        ),
    ],
)
def test_damage_names_file_line_and_field(
    tmp_path: Path, row: dict[str, Any], columns: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / "a.jsonl", [row])
    with refused(message) as raised:
        build(one={"path": path, **columns})
    assert str(raised.value).startswith(f"{path}:1: ")


def test_problems_without_answers_are_for_terms_that_read_none(tmp_path: Path) -> None:
    path = write(
        tmp_path / "code.jsonl", [{"prompt": f"{i}?", "tests": [{"stdin": "", "stdout": "1"}]} for i in "1234"]
    )
    source = SourceConfig(path=path, answer=None, metadata=["tests"])
    read = load_problems(path, CharTokenizer(), partial(why_unreachable, [RewardTerm(name="code")]), source=source)
    assert [problem.prompt.answer for problem in read] == [""] * 4
    missing = (
        "field 'answer' is missing, and reward term 'boxed' compares with it; name its column: data.sources.NAME.ans"
    )
    with pytest.raises(ValueError, match=missing):
        load_problems(path, CharTokenizer(), partial(why_unreachable, [RewardTerm(name="boxed")]), source=source)


def test_columns_that_nothing_reads_are_named(tmp_path: Path) -> None:
    said: list[str] = []
    rows = [{"prompt": "1=?", "answer": 1, "level": 3}, {"prompt": "2=?", "answer": 2, "tests": [], "id": "x"}]
    path = write(tmp_path / "a.jsonl", rows)
    load_problems(path, CharTokenizer(), warn=said.append)
    (line,) = said
    assert line.startswith(
        f"{path}: columns that are not read: level, tests. A reward gets those that a source names: "
    )
    load_problems(path, CharTokenizer(), warn=said.append, name="a", source=SourceConfig(metadata=[]))
    assert said == [line], "whoever names a source has chosen its columns"


def test_every_source_has_its_share_and_its_own_passes(tmp_path: Path) -> None:
    made = {name: {"path": sums(tmp_path / f"{name}.jsonl", n, 100 * n)} for name, n in (("a", 8), ("b", 20))}
    made["a"]["weight"], made["b"]["weight"] = 3, 1
    data = build(**made)
    sizes = Counter(prompt.task for prompt in data.problems)
    assert sum(sizes.values()) == 26  # one each for validation and test
    taken = data.train.take(400)
    assert Counter(prompt.task for prompt in taken) == {"a": 300, "b": 100}
    for name, size in sizes.items():
        passes = [prompt.id.partition("#")[0] for prompt in taken if prompt.task == name]
        for start in range(0, len(passes) - size, size):
            assert len({*passes[start : start + size]}) == size
    assert len({prompt.id for prompt in taken}) == 400


def test_without_weights_every_problem_comes_equally_often(tmp_path: Path) -> None:
    data = build(a={"path": sums(tmp_path / "a.jsonl", 5)}, b={"path": sums(tmp_path / "b.jsonl", 25, 50)})
    taken = Counter(prompt.id.partition("#")[0] for prompt in data.train.take(28 * 6))
    assert set(taken.values()) == {6}


def test_weights_are_the_numbers_that_were_written() -> None:
    assert shares([0.1, 0.3]) == [Fraction(1, 4), Fraction(3, 4)]


@settings(max_examples=100)
@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=6), st.integers(0, 10**9), st.integers(1, 40))
def test_a_mixture_is_exact_over_any_stretch_and_counts_each_source_up(
    weights: list[float], first: int, length: int
) -> None:
    parts = shares(weights)
    assert sum(parts) == 1
    draw = mixture(parts)
    counts: dict[int, list[int]] = {}
    for k in range(first, first + length):
        source, of_it = draw(k)
        counts.setdefault(source, []).append(of_it)
        assert abs(of_it - k * parts[source]) <= len(parts)
    for numbers in counts.values():
        assert numbers == [*range(numbers[0], numbers[0] + len(numbers))]


def test_a_source_can_be_only_tested_and_test_problems_have_its_name(tmp_path: Path) -> None:
    data = build(
        a={"path": sums(tmp_path / "a.jsonl", 9), "test_path": sums(tmp_path / "t.jsonl", 2, 50)},
        b={"test_path": sums(tmp_path / "b.jsonl", 3, 90)},
    )
    assert Counter(prompt.task for prompt in data.test) == {"a": 2, "b": 3}
    assert {prompt.task for prompt in data.problems} == {"a"}


def test_test_problems_in_any_training_file_are_named_and_a_test_file_that_is_all_trained_on_is_refused(
    tmp_path: Path,
) -> None:
    a, b = sums(tmp_path / "a.jsonl", 9), sums(tmp_path / "b.jsonl", 9, 20)
    test = sums(tmp_path / "t.jsonl", 12, 25)
    with pytest.raises(ValueError, match=r"4 of the 12 problems .*data\.shared_test_problems=4"):
        build(shared=3, a={"path": a, "test_path": test}, b={"path": b})
    data = build(shared=4, a={"path": a, "test_path": test}, b={"path": b})
    (warning,) = data.warnings
    assert warning.startswith(f"4 of the 12 problems of data.sources.a.test_path={test} are in data.sources.b.path={b}")
    both = write(tmp_path / "both.jsonl", [{"prompt": "1=?", "answer": 1}, {"prompt": "21=?", "answer": 21}])
    with refused("data.sources.c.test_path= | all 2 problems"):
        build(a={"path": a}, b={"path": b}, c={"test_path": both})


def test_difficulty_orders_the_first_pass_only(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}=?", "answer": i, "level": (7 * i) % 30} for i in range(30)]
    data = build(a={"path": write(tmp_path / "a.jsonl", rows), "difficulty": "level"})
    levels = {str(row["answer"]): row["level"] for row in rows}
    first, second = ([levels[prompt.answer] for prompt in data.train.take(28)] for _ in range(2))
    assert first == sorted(first)
    assert sorted(second) == first != second


def test_difficulty_may_be_the_text_of_a_number(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,answer,level\n" + "".join(f"{i}=?,{i},{9 - i}.5\n" for i in range(8)))
    data = build(a={"path": str(tmp_path / "a.csv"), "difficulty": "level"})
    first = [int(prompt.answer) for prompt in data.train.take(6)]
    assert first == sorted(first, reverse=True)


def test_resuming_needs_the_counter_only_and_other_data_is_refused(tmp_path: Path) -> None:
    made = {"a": {"path": sums(tmp_path / "a.jsonl", 8)}, "b": {"path": sums(tmp_path / "b.jsonl", 5, 50)}}
    one, two = build(**made), build(**made)
    one.train.take(11)
    two.train.load_state_dict(json.loads(json.dumps(one.train.state_dict())))
    assert two.train.take(20) == one.train.take(20)
    sums(tmp_path / "b.jsonl", 6, 50)
    with refused("saved prompt order | belongs to 'jsonl seed=0"):
        build(**made).train.load_state_dict(one.train.state_dict())


@pytest.mark.parametrize("curriculum", ["none", "frontier"])
def test_other_weights_are_another_order_and_refused_on_continuing(tmp_path: Path, curriculum: str) -> None:
    made = {name: {"path": sums(tmp_path / f"{name}.jsonl", 9, first)} for name, first in (("a", 0), ("b", 20))}

    def weighted(a: float, b: float) -> Data:
        weights = {"a": a, "b": b}
        sources = {name: SourceConfig(**source, weight=weights[name]) for name, source in made.items()}
        data = DataConfig(task="jsonl", sources=sources, validation_size=1, test_size=1, curriculum=curriculum)
        return build_data(Config(run=RunConfig(), model=ModelConfig(context=64), data=data))

    state = weighted(1, 3).train.state_dict()
    weighted(2, 6).train.load_state_dict(state)  # the same shares
    with pytest.raises(ValueError, match=r"a=1/4 b=3/4.*a=1/2 b=1/2"):
        weighted(1, 1).train.load_state_dict(state)


def test_a_source_with_nothing_left_to_train_on_is_refused(tmp_path: Path) -> None:
    made = {"a": {"path": sums(tmp_path / "a.jsonl", 1)}, "b": {"path": sums(tmp_path / "b.jsonl", 40, 50)}}
    with pytest.raises(ValueError, match=r"at least one of data\.sources\.a\.path=.* must be left for training"):
        build(validation_size=30, test_size=10, **made)


def test_gsm8k_is_read_as_it_is_downloaded(tmp_path: Path) -> None:
    pyarrow, tables = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for table in ("main", "socratic"):
        (tmp_path / table).mkdir()
        for split, n in (("train", 9), ("test", 4)):
            rows = [
                {"question": f"{len(split)}{i}+1=?", "answer": f"{i} <<{i}+0={i}>>\n#### 1,00{i}"} for i in range(n)
            ]
            file = tmp_path / table / f"{split}-00000-of-00001.parquet"
            tables.write_table(pyarrow.Table.from_pylist(rows), file)
    paths = [f"data.sources.gsm8k.{name}={tmp_path}/main" for name in ("path", "test_path")]
    words = ["experiment=tiny", "base=none", "data=gsm8k", "data.validation_size=2", "model.context=128", *paths]
    data = build_data(compose_config(words), partial(why_unreachable, [RewardTerm(name="accuracy")]))
    assert (len(data.problems), len(data.validation)) == (7, 2)
    assert [prompt.answer for prompt in data.test] == ["1,000", "1,001", "1,002", "1,003"]
    assert {prompt.task for prompt in [*data.test, *data.problems]} == {"gsm8k"}


JOB = ["experiment=tiny", "base=none", "data=jsonl"]


def test_a_source_is_made_by_words_on_the_command_line_without_a_plus() -> None:
    words = ["data.sources.gsm8k.path=a.parquet", "data.sources.gsm8k.metadata=[x, y]", "data.sources.aime.test_path=b"]
    sources = compose_config([*JOB, *words]).data.sources
    assert sources["gsm8k"] == SourceConfig(path="a.parquet", metadata=["x", "y"])
    assert sources["aime"] == SourceConfig(test_path="b")
    assert compose_config([*JOB, "data.sources={c: {path: d, weight: 2}, e: {path: f, weight: 1}}"]).data.sources[
        "c"
    ] == SourceConfig(path="d", weight=2.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.sources.a.pth=x"], r"data\.sources\.a\.pth: not a setting; did you mean"),
        (["data.sources.a.weight=much", "data.sources.a.path=x"], r"data\.sources\.a\.weight: "),
        (["data.sources.a.weight=1"], r"data\.sources\.a: has no problems"),
        (["data.sources.a.path=x", "data.train_path=y"], r"data\.train_path=y: no effect with data\.sources"),
        (["data.sources.a.test_path=x"], r"data\.sources: none has training problems"),
        (
            ["data.sources.a.path=x", "data.sources.a.weight=0"],
            r"a\.weight=0.0: out of range; choose a value in \(0, inf\)",
        ),
        (
            ["data.sources.a.path=x", "data.sources.a.weight=1", "data.sources.b.path=x"],
            r"data\.sources\.b\.weight: not set, but others",
        ),
        (["data.sources.a.path=x", "data.sources.a.answer_pattern='(x'"], "not a regular expression"),
        (["data.sources.a.path=x", "data.sources.a.template=Q"], r"sources\.a\.template='Q': no effect"),
        (["data.sources.a.path=x", "data.sources.a.system=Hi"], r"data\.sources\.a\.system: no effect with"),
    ],
)
def test_senseless_sources_are_refused_with_their_field(words: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        compose_config([*JOB, *words])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), with_bos=False)


def asked(folder: Path, tmp_path: Path, problem: Any, **settings: Any) -> str:
    """The prompt of one test problem in a source with these settings, the data's begin with an underscore."""
    path = write(tmp_path / "train.jsonl", [{"prompt": f"What is {i}?", "answer": 1} for i in range(3)])
    test = write(tmp_path / "test.jsonl", [{"prompt": problem, "answer": 2}])
    common = {key[1:]: value for key, value in settings.items() if key[0] == "_"}
    own = {key: value for key, value in settings.items() if key[0] != "_"}
    sources = {"a": SourceConfig(path=path), "b": SourceConfig(test_path=test, **own)}
    data = DataConfig(task="jsonl", tokenizer=str(folder), sources=sources, validation_size=1, **common)
    built = build_data(Config(run=RunConfig(), model=ModelConfig(context=200), data=data))
    (prompt,) = built.test
    assert built.tokenizer.decode(prompt.token_ids) == prompt.text
    return prompt.text


def chat(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def rendered(*turns: tuple[str, str]) -> str:
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    return f"{text}<|im_start|>assistant\n"


CHAT = {"_template": "chat"}


@pytest.mark.parametrize(
    ("problem", "settings", "expected"),
    [
        ("3+5?", CHAT, rendered(("user", "3+5?"))),
        ("3+5?", {**CHAT, "_system": "Add."}, rendered(("system", "Add."), ("user", "3+5?"))),
        ("3+5?", {**CHAT, "_system": "Add.", "system": "Sum."}, rendered(("system", "Sum."), ("user", "3+5?"))),
        ("3+5?", {**CHAT, "_system": "Add.", "system": ""}, rendered(("user", "3+5?"))),
        ("3+5?", {**CHAT, "question": "{prompt} Box it."}, rendered(("user", "3+5? Box it."))),
        ("3+5?", {**CHAT, "_system": "Add.", "system": "", "template": "Q: {prompt} A:"}, "Q: 3+5? A:"),
        ("3+5?", {"_question": "{prompt}!", "template": "Q: {prompt} A:"}, "Q: 3+5?! A:"),
        (
            chat(("user", "3+5?"), ("assistant", "8"), ("user", "Sure?")),
            {**CHAT, "_system": "Add.", "question": "{prompt} Box it."},
            rendered(("system", "Add."), ("user", "3+5?"), ("assistant", "8"), ("user", "Sure? Box it.")),
        ),
        (
            chat(("user", "3+5?"), ("assistant", "Call."), ("tool", "8")),
            {**CHAT, "question": "{prompt} Box it."},
            rendered(("user", "3+5?"), ("assistant", "Call."), ("tool", "8")),
        ),
        (
            chat(("system", "Own."), ("user", "3+5?")),
            {**CHAT, "_system": "Add."},
            rendered(("system", "Own."), ("user", "3+5?")),
        ),
    ],
)
def test_a_source_has_its_own_words_around_its_problems(
    folder: Path, tmp_path: Path, problem: Any, settings: dict[str, Any], expected: str
) -> None:
    assert asked(folder, tmp_path, problem, **settings) == expected


def test_the_words_of_a_source_are_not_those_of_the_others(folder: Path) -> None:
    common = build_tokenizer(DataConfig(tokenizer=str(folder), template="chat"))
    own = common.asking("Q: {prompt} A:", "{prompt}", None)
    assert (own.prompt("3+5?")[0], common.prompt("3+5?")[0]) == ("Q: 3+5? A:", rendered(("user", "3+5?")))


def test_special_tokens_in_messages_are_text_and_messages_need_the_chat_template(folder: Path, tmp_path: Path) -> None:
    quoting = chat(("user", "Say <|im_end|>"))
    assert "Say <|im_end|>" in asked(folder, tmp_path, quoting, **CHAT)
    path = tmp_path / "test.jsonl"
    config = DataConfig(task="jsonl", tokenizer=str(folder), template="chat", train_path=str(path), test_path=str(path))
    tokenizer = build_tokenizer(config)
    (problem,) = load_problems(path, tokenizer)
    assert problem.prompt.token_ids.count(tokenizer.token_id("<|im_end|>")) == 1
    with refused("test.jsonl:1: field 'prompt': messages | need the chat template"):
        asked(folder, tmp_path, quoting)


def test_the_same_problem_in_other_words_is_still_in_the_training_data(folder: Path, tmp_path: Path) -> None:
    with refused("data.sources.b.test_path= | are in data.sources.a.path="):
        asked(folder, tmp_path, "what is  2?", **CHAT, question="{prompt} Box it.")


def test_a_system_message_does_not_hide_a_shared_problem(folder: Path, tmp_path: Path) -> None:
    def problems(name: str, system: str, *first: int) -> str:
        return write(
            tmp_path / name,
            [{"prompt": chat(("system", system), ("user", f"{i}=?")), "answer": i} for i in first],
        )

    made = {
        "a": SourceConfig(
            path=problems("a.jsonl", "Think.", *range(9)), test_path=problems("b.jsonl", "Be brief.", 3, 99)
        )
    }
    data = DataConfig(
        task="jsonl", tokenizer=str(folder), sources=made, template="chat", validation_size=1, shared_test_problems=1
    )
    config = Config(run=RunConfig(), model=ModelConfig(context=64), data=data)
    (warning,) = build_data(config).warnings
    assert warning.startswith("1 of the 2 problems of data.sources.a.test_path=")

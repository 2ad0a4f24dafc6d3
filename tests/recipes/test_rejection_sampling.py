"""tools/rejection_sample.py: what it chooses of pools, what it says of the rest, and that a model learns from it."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import math
from collections import Counter
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from evaluating import evaluate, samples
from exporting import exported
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import Drawn, write_pool
from ranks import REPOSITORY
from refusals import refused
from train_jobs import SMALL, Job, rewarded_by

from grpo_mega.config.schema import DataConfig, SFTConfig
from grpo_mega.data.supervised import load_rows
from grpo_mega.data.tokenizer import character_tokenizer, fingerprint
from grpo_mega.evaluate import results
from grpo_mega.recipes.curation.selection import Condition, SampleFilters, condition, open_pool, rows, select

SPEC = importlib.util.spec_from_file_location("rejection_tool", REPOSITORY / "tools" / "rejection_sample.py")
assert SPEC
assert SPEC.loader
TOOL = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(TOOL)


CHARACTERS = character_tokenizer(DataConfig(task="chain_sum"))


def tool(*words: object) -> tuple[int, str]:
    """Exit code of the command, and what it prints."""
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = TOOL.main([*map(str, words)])
    return code, said.getvalue()


DRAWN = st.tuples(
    st.sampled_from(["1+2=3", "1+2 =3", "1+2=\t3", "3", "4"]),
    st.integers(1, 6),
    st.sampled_from(["stop", "stop", "length"]),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([-1.0, 0.5, 0.9, 1.0]),
)
POOLS = st.lists(
    st.dictionaries(
        st.sampled_from(["1+2=?", "4-1=?", "1+1+1=?"]), st.lists(DRAWN, min_size=1, max_size=5), min_size=1
    ),
    min_size=1,
    max_size=3,
)
FILTERS = st.builds(
    SampleFilters,
    conditions=st.sampled_from([(), (Condition("language", ">=", 0.9),), (Condition("accuracy", "<=", 0.0),)]),
    shortest=st.integers(1, 3),
    longest=st.sampled_from([None, 4]),
    per_problem=st.sampled_from([None, 1, 2]),
    choose=st.sampled_from(["first", "shortest", "highest"]),
)


def passes(drawn: Drawn, filters: SampleFilters) -> bool:
    """Whether a sample passes, written out."""
    _, tokens, finish, accuracy, language = drawn
    if language < 0 or finish != "stop" or not filters.shortest <= tokens <= (filters.longest or math.inf):
        return False
    asked = {each.term: each for each in filters.conditions}
    if "language" in asked and language < 0.9:
        return False
    return accuracy == (0.0 if "accuracy" in asked else 1.0)


def test_a_reward_model_s_scores_are_conditions_where_it_has_scored(tmp_path: Path) -> None:
    write_pool(tmp_path / "pool", {"1+2=?": [("1+2=3", 5, "stop", 1.0, 1.0), ("3", 1, "stop", 1.0, 1.0)]})
    code, said = tool(tmp_path / "pool", "--keep", "model>=0", "--output", tmp_path / "none.jsonl")
    assert (code, "model>=0: the reward of" in said) == (2, True)
    settings, lines = tmp_path / "pool" / results.SETTINGS, tmp_path / "pool" / results.SAMPLES
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"reward_model": "0" * 64}))
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    for record, score in zip(records, (-1.0, 0.5), strict=True):
        record["terms"]["model"] = score
    lines.write_text("".join(json.dumps(record) + "\n" for record in records))
    code, said = tool(tmp_path / "pool", "--keep", "model>=0", "--output", tmp_path / "liked.jsonl")
    assert code == 0, said
    assert [json.loads(line)["completion"] for line in (tmp_path / "liked.jsonl").read_text().splitlines()] == ["3"]


@settings(max_examples=60)
@given(POOLS, FILTERS)
def test_what_passes_is_chosen_once_and_the_rest_is_counted(
    tmp_path_factory: pytest.TempPathFactory, pools: list[dict[str, list[Drawn]]], filters: SampleFilters
) -> None:
    folder = tmp_path_factory.mktemp("pools")
    opened = [open_pool(write_pool(folder / str(i), pool)) for i, pool in enumerate(pools)]
    different: dict[str, dict[str, list[Drawn]]] = {}  # problem -> completion -> what passes with it
    for pool in pools:
        for asked, drawn in pool.items():
            for one in drawn:
                if passes(one, filters):
                    different.setdefault(asked, {}).setdefault(one[0], []).append(one)
    if not different:
        with refused("the pools | no sample passes"):
            select(opened, filters)
        return
    selection = select(opened, filters)
    made = [*rows(opened, selection)]
    assert selection.samples == sum(len(drawn) for pool in pools for drawn in pool.values())
    assert selection.samples == len(made) + sum(selection.left_out.values())
    assert selection.problems == len({asked for pool in pools for asked in pool})
    assert selection.solved == len(different)
    limit = filters.per_problem or math.inf
    assert Counter(row["prompt"] for row in made) == {asked: min(limit, len(of)) for asked, of in different.items()}
    for asked, of in different.items():
        chosen = [row for row in made if row["prompt"] == asked]
        assert len({row["completion"] for row in chosen}) == len(chosen)
        if filters.choose == "first":
            assert [row["completion"] for row in chosen] == list(of)[: len(chosen)]
        if filters.choose == "shortest":
            lengths = sorted(min(one[1] for one in same) for same in of.values())
            assert [row["tokens"] for row in chosen] == lengths[: len(chosen)]
        if filters.choose == "highest":
            best = sorted((max(one[3] + one[4] for one in same) for same in of.values()), reverse=True)
            assert [row["reward"] for row in chosen] == best[: len(chosen)]
    for row in made:
        pool = pools[int(Path(row["pool"]).name)]
        assert passes(pool[row["prompt"]][row["index"]], filters)
        assert row["completion"] == pool[row["prompt"]][row["index"]][0]


RIGHT: list[Drawn] = [("1+2=3", 5, "stop", 1.0, 1.0), ("3", 2, "stop", 1.0, 0.5), ("4", 2, "stop", 0.0, 1.0)]


def test_the_file_is_one_to_learn_from_and_the_report_says_what_of(tmp_path: Path) -> None:
    pool = write_pool(tmp_path / "pool", {"<bos>1+2=?": RIGHT, "<bos>2+2=?": [("4", 2, "length", 1.0, 1.0)]})
    output = tmp_path / "chosen.jsonl"
    code, said = tool(pool, "--keep", "language>=0.4", "--choose", "shortest", "--output", output)
    assert code == 0, said
    expected = ["4 samples of 2 problems", "1 are not accuracy>=1", "1 did not end by themselves"]
    assert all(part in said for part in [*expected, "2 samples of 1 problems are chosen"]), said
    made = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["completion"] for row in made] == ["3", "1+2=3"]
    tokenizer = character_tokenizer(DataConfig(task="chain_sum"))
    learned = load_rows(SFTConfig(path=str(output)), tokenizer, (tokenizer.eos_id,), 64)
    assert [tokenizer.decode(row.token_ids) for row in learned] == ["<bos>1+2=?3<eos>", "<bos>1+2=?1+2=3<eos>"]
    report = json.loads((tmp_path / "chosen.report.json").read_text())
    assert report["output"] == {
        "file": str(output),
        "rows": 2,
        "sha256": hashlib.sha256(output.read_bytes()).hexdigest(),
    }
    assert report["pools"][0]["sha256"] == hashlib.sha256((pool / "samples.jsonl").read_bytes()).hexdigest()
    assert report["keep"] == ["language>=0.4"]
    assert report["left_out"] == {"are not accuracy>=1": 1, "did not end by themselves": 1}
    before = (tmp_path / "chosen.report.json").read_bytes()
    output.rename(tmp_path / "mine.jsonl")
    code, said = tool(pool, "--output", output)
    assert (code, "chosen.report.json: exists; remove it" in said) == (2, True), said
    assert (tmp_path / "chosen.report.json").read_bytes() == before


def change_records(folder: Path, **fields: Any) -> None:
    """Sets fields of all samples of a pool."""
    lines = [json.loads(line) | fields for line in (folder / "samples.jsonl").read_text().splitlines()]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_episodes(folder: Path, **fields: Any) -> Path:
    """A pool of one sample with three calls, one with an empty reply, and an opening of its problem."""
    write_pool(folder, {"1+2=?": RIGHT[:1]})
    tokens = CHARACTERS.encode("2+3=5-1=4<eos>")
    change_records(
        folder, **{"opening": "2+", "calls": 3, "token_ids": tokens, "given": [[4, 5], [8, 9], [9, 9]], **fields}
    )
    settings = json.loads((folder / results.SETTINGS).read_text())
    settings |= {"vocabulary": fingerprint(CHARACTERS), "environment": {"close": "="}}
    (folder / results.SETTINGS).write_text(json.dumps(settings))
    return folder


def test_games_that_are_asked_alike_are_different_problems(tmp_path: Path) -> None:
    pools = [write_episodes(tmp_path / name, problem=name) for name in ("g0", "g1", "g1 again")]
    change_records(pools[2], problem="g1")
    selection = select([open_pool(pool) for pool in pools], SampleFilters())
    assert (selection.problems, len(selection.chosen)) == (2, 2)


def test_a_chat_is_opened_in_its_last_message(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    pool = write_episodes(tmp_path / "pool", asked=asked)
    assert tool(pool, "--output", tmp_path / "chosen.jsonl")[0] == 0
    assert json.loads((tmp_path / "chosen.jsonl").read_text())["prompt"] == [*asked[:2], asked[2] | {"content": "c2+"}]


@pytest.mark.parametrize(("tokens", "right"), [("2+3=", True), ("2+3", False), ("2<eos>3=", False), ("2=<eos>", True)])
def test_tokens_end_as_samples_do(tmp_path: Path, tokens: str, right: bool) -> None:
    pool = write_episodes(tmp_path / "pool", token_ids=CHARACTERS.encode(tokens), given=[])
    assert tool(pool, "--output", tmp_path / "chosen.jsonl")[0] == 0
    with nullcontext() if right else refused("field 'token_ids' | end"):
        load_rows(SFTConfig(path=str(tmp_path / "chosen.jsonl")), CHARACTERS, (CHARACTERS.eos_id,), 64)


def test_a_column_without_values_is_none(tmp_path: Path) -> None:
    """A table has every column in every row, and other fields may have any name."""
    plain = {"prompt": "1+2=?", "completion": "3", "given": None, "token_ids": None, "vocabulary": None}
    (tmp_path / "rows.jsonl").write_text(json.dumps(plain) + "\n" + json.dumps(plain | {"given": "a, b"}))
    rows = load_rows(SFTConfig(path=str(tmp_path / "rows.jsonl")), CHARACTERS, (CHARACTERS.eos_id,), 64)
    assert {CHARACTERS.decode(row.token_ids) for row in rows} == {"<bos>1+2=?3<eos>"}


def test_of_samples_with_calls_what_the_model_has_written_is_learned(tmp_path: Path) -> None:
    code, said = tool(write_episodes(tmp_path / "pool"), "--output", tmp_path / "chosen.jsonl")
    assert code == 0, said
    sft = SFTConfig(path=str(tmp_path / "chosen.jsonl"))
    (row,) = load_rows(sft, CHARACTERS, (CHARACTERS.eos_id,), 64)
    assert CHARACTERS.decode(row.token_ids) == "<bos>1+2=?2+2+3=5-1=4<eos>"
    assert [CHARACTERS.decode(row.token_ids[first:end]) for first, end in row.learned] == ["2+3=", "-1=", "<eos>"]
    # Another tokenizer's tokens would be other text.
    other = (tmp_path / "chosen.jsonl").read_text().replace(fingerprint(CHARACTERS), "0" * 16)
    (tmp_path / "chosen.jsonl").write_text(other)
    with refused("field 'vocabulary' | of another tokenizer"):
        load_rows(sft, CHARACTERS, (CHARACTERS.eos_id,), 64)


def test_of_an_agent_s_samples_each_piece_is_a_row_after_what_it_saw(tmp_path: Path) -> None:
    """The first piece after the agent's own request; every sampled token is learned once."""
    tokens, seen = CHARACTERS.encode("2+3=5-1=<bos>7=8;9=4<eos>"), CHARACTERS.encode("<bos>3+3=?")
    given = [[4, 5], [8, 11], [12, 14]]
    pool = write_episodes(
        tmp_path / "pool", opening="", token_ids=tokens, given=given, restarts=[8], prompt_ids=seen, completion="-"
    )
    code, said = tool(pool, "--output", tmp_path / "chosen.jsonl")
    assert code == 0, said
    rows = load_rows(SFTConfig(path=str(tmp_path / "chosen.jsonl")), CHARACTERS, (CHARACTERS.eos_id,), 64)
    assert [CHARACTERS.decode(row.token_ids) for row in rows] == ["<bos>3+3=?2+3=5-1=", "<bos>7=8;9=4<eos>"]
    learned = [[CHARACTERS.decode(row.token_ids[first:end]) for first, end in row.learned] for row in rows]
    assert learned == [["2+3=", "-1="], ["8", "=4<eos>"]]
    written = [json.loads(line) for line in (tmp_path / "chosen.jsonl").read_text().splitlines()]
    assert [(row["tokens"], row["completion"]) for row in written] == [(7, "-"), (4, "")]


@pytest.mark.parametrize("given", [3, [3], [[3, 2]], [[0, 3], [2, 4]], [[-1, 2]], [[0, 99]], [[0, 10]]])
def test_spans_that_are_none_are_refused(tmp_path: Path, given: Any) -> None:
    row = {"prompt": "1+2=?", "completion": "3", "vocabulary": fingerprint(CHARACTERS), "given": given}
    row["token_ids"] = CHARACTERS.encode("2+3=5-1=4<eos>")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with refused("rows.jsonl:1: field 'given'"):
        load_rows(SFTConfig(path=str(tmp_path / "rows.jsonl")), CHARACTERS, (CHARACTERS.eos_id,), 64)


@pytest.mark.parametrize("ids", ["3", [1.0], [True], [-1], [9999]])
def test_tokens_that_are_none_are_refused(tmp_path: Path, ids: Any) -> None:
    row = {"prompt": "1+2=?", "completion": "3", "vocabulary": fingerprint(CHARACTERS), "given": [], "token_ids": ids}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with refused("rows.jsonl:1: field 'token_ids'"):
        load_rows(SFTConfig(path=str(tmp_path / "rows.jsonl")), CHARACTERS, (CHARACTERS.eos_id,), 64)


def test_what_cannot_be_done_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    pool, there = write_pool(tmp_path / "pool", {"1+2=?": RIGHT}), tmp_path / "there.jsonl"
    there.write_text("mine\n")
    unfinished = write_pool(tmp_path / "unfinished", {"1+2=?": RIGHT})
    (unfinished / "results.json").unlink()
    old = write_pool(tmp_path / "old", {"": RIGHT})
    cut = write_pool(tmp_path / "cut", {"1+2=?": RIGHT})
    (cut / "samples.jsonl").write_text((cut / "samples.jsonl").read_text().replace("\n", "\n\n", 1))
    episode = write_episodes(tmp_path / "episode")
    replied, opened = (write_pool(tmp_path / name, {"1+2=?": RIGHT}) for name in ("replied", "opened"))
    change_records(replied, calls=1)
    change_records(opened, opening="1+1")
    output = tmp_path / "chosen.jsonl"
    refusals: list[tuple[str, tuple[Any, ...]]] = [
        ("no sample passes", (pool, "--longest", 1)),
        ("3 samples of 1 problems", (pool, "--longest", 1)),
        ("loosen the filter", (pool, "--longest", 1)),
        ("repetition>=0: the reward of", (pool, "--keep", "repetition>=0")),
        ("'language>0.9': not a condition; write TERM>=NUMBER", (pool, "--keep", "language>0.9")),
        ("'language>=many': not a condition", (pool, "--keep", "language>=many")),
        ("'language>=nan': not a condition", (pool, "--keep", "language>=nan")),
        ("--per-problem 0: ", (pool, "--per-problem", 0)),
        ("--longest 3: below --shortest 4", (pool, "--longest", 3, "--shortest", 4)),
        ("given twice", (pool, pool)),
        ("not an evaluation folder (no settings.json)", (tmp_path,)),
        ("is not finished (no results.json); run its command again", (unfinished,)),
        ("samples.jsonl:1: not a sample, or from an older version", (old,)),
        ("samples.jsonl:2: Expecting value", (cut,)),
        ("samples.jsonl:1: has calls but no token_ids", (replied,)),
        *(
            ("samples.jsonl:1: contains replies of an environment", (folder, kind))
            for folder in (episode, opened)
            for kind in ("--pairs", "--steps")
        ),
        ("episode has samples with calls, which are learned as the tokens they are", (episode, "--begin", "1")),
    ]
    for message, words in refusals:
        code, said = tool(*words, "--output", output)
        assert (code, message in said) == (2, True), (message, said)
    assert "give it the ending .jsonl" in tool(pool, "--output", tmp_path / "chosen.json")[1]
    assert "exists; remove it, or choose a different --output" in tool(pool, "--output", there)[1]
    assert there.read_text() == "mine\n"
    assert "does not exist; create it" in tool(pool, "--output", tmp_path / "no" / "chosen.jsonl")[1]
    (tmp_path / "same").symlink_to(pool)
    assert "given twice" in tool(pool, tmp_path / "same", "--output", output)[1]
    assert {file.name for file in tmp_path.iterdir()} == {
        "pool", "there.jsonl", "unfinished", "old", "cut", "episode", "replied", "opened", "same",
    }  # fmt: skip


def test_a_problem_is_one_in_all_pools_and_under_any_task(tmp_path: Path) -> None:
    pools = [write_pool(tmp_path / name, {"1+2=?": RIGHT[:1]}, task=name) for name in ("sums", "math")]
    selection = select([open_pool(pool) for pool in pools], SampleFilters())
    assert (len(selection.chosen), selection.problems, selection.samples) == (1, 1, 2)


def test_every_task_is_asked_for_its_own_terms(tmp_path: Path) -> None:
    """Programs have no accuracy: nothing tells which are right, unless the command does."""
    programs: list[Drawn] = [("return 1", 3, "stop", -1.0, 1.0), ("return 2", 3, "stop", -1.0, 0.0)]
    pool = write_pool(tmp_path / "pool", {"1+2=?": RIGHT})
    other = write_pool(tmp_path / "other", {"f(1)=1?": programs}, task="code")
    together = tmp_path / "together"
    results.open_folder(together, json.loads((pool / "settings.json").read_text()))
    for file in ("samples.jsonl", "results.json"):
        (together / file).write_text("".join((folder / file).read_text() for folder in (pool, other)))
    with pytest.raises(ValueError, match=r"samples of the task 'code' have no term 'accuracy', .* --keep .*language"):
        select([open_pool(together)], SampleFilters())
    selection = select([open_pool(together)], SampleFilters((Condition("language", ">=", 1.0),)))
    chosen = [row["completion"] for row in rows([open_pool(together)], selection)]
    assert chosen == ["1+2=3", "return 1"]


@pytest.mark.parametrize("text", ["", " ", "3\0", "3\ud800"])
def test_what_cannot_be_learned_is_not_chosen(tmp_path: Path, text: str) -> None:
    pool = write_pool(tmp_path / "pool", {"1+2=?": [*RIGHT[:1], (text, 1, "stop", 1.0, 1.0)]})
    selection = select([open_pool(pool)], SampleFilters())
    assert selection.left_out == {"are empty, or hold what no text may": 1}


def test_thoughts_that_the_prompt_began_are_said_and_can_be_put_in_front(tmp_path: Path) -> None:
    pool = write_pool(tmp_path / "pool", {"1+2=?<think>\n": RIGHT[:1]})
    code, said = tool(pool, "--output", tmp_path / "without.jsonl")
    assert (code, "warning: 1 of them continue thoughts" in said) == (0, True), said
    code, said = tool(pool, "--begin", r"<think>\n", "--output", tmp_path / "with.jsonl")
    assert (code, "warning" in said) == (0, False), said
    assert json.loads((tmp_path / "with.jsonl").read_text())["completion"] == "<think>\n1+2=3"


def test_conditions_are_read_as_they_are_written() -> None:
    assert condition("language>=0.9") == Condition("language", ">=", 0.9)
    assert condition(" repetition <= -0.25 ") == Condition("repetition", "<=", -0.25)
    assert not condition("accuracy>=1").holds({"language": 1.0}), "a sample without the term"


@pytest.mark.long
def test_a_model_learns_from_the_chosen_samples_of_another_and_of_no_rollouts(tmp_path: Path) -> None:
    """A pool of training problems; a run of supervised steps alone, then one more."""
    own = [rewarded_by("varied"), "reward.success=own", "run.eval_every=0", "run.tensorboard=false"]
    first = Job(tmp_path, [*SMALL, *own, "run.name=first", "run.steps=1"], ranks=2).finish()
    assert first.code == 0, first
    run, pool, chosen = tmp_path / "runs" / "first", tmp_path / "pool", tmp_path / "chosen.jsonl"
    evaluate(run, "--train", 6, "--samples", 4, "--out", pool)
    assert len({record["problem"] for record in samples(pool) if "/train/" in record["problem"]}) == 6
    assert len(samples(pool)) == 6 * 4
    code, said = tool(pool, "--keep", "own>=0", "--shortest", 1, "--output", chosen)
    assert code == 0, said
    supervised = [f"sft.path={chosen}", "sft.epochs=3", "sft.batch_size=4", "sft.warmup_steps=0", "run.steps=0"]
    second = Job(tmp_path, [*SMALL, *own, *supervised, "run.name=second"], ranks=2).finish()
    assert second.code == 0, second
    made = tmp_path / "runs" / "second"
    losses = [json.loads(line)["sft/loss"] for line in (made / "sft.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]
    summary = json.loads((made / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 0)
    assert "held_out_accuracy_after" in summary
    assert "held_out_accuracy_before" not in summary, "before what?"
    assert [file.name for file in (made / "checkpoints").iterdir() if file.is_dir()] == ["step-000000"]
    exported(made, tmp_path / "folder")
    card = (tmp_path / "folder" / "README.md").read_text()
    assert "the policy after supervised steps, trained with" in card
    assert f"| supervised steps | `{chosen}` |" in card
    assert "| algorithm |" not in card
    further = [*(word for word in supervised if word != "run.steps=0"), "run.steps=1"]
    third = Job(tmp_path, [*SMALL, *own, *further, "run.name=second"], ranks=2).finish()
    assert third.code == 0, third
    assert "continuing after step 0" in third.stderr
    assert json.loads((made / "summary.json").read_text())["steps"] == 1


def test_rows_of_the_users_own_follow_the_chosen_ones(tmp_path: Path) -> None:
    pool = write_pool(tmp_path / "pool", {"1+2=?": [("1+2=3", 5, "stop", 1.0, 1.0)]})
    own = [{"prompt": "1+1=?", "completion": "2"}, {"messages": [{"role": "user", "content": "Hi"}]}]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    code, said = tool(pool, "--also", tmp_path / "own.jsonl", "--output", tmp_path / "chosen.jsonl")
    assert code == 0, said
    first, *others = map(json.loads, (tmp_path / "chosen.jsonl").read_text().splitlines())
    assert (first["completion"], others) == ("1+2=3", own)
    report = json.loads((tmp_path / "chosen.report.json").read_text())
    assert report["output"]["rows"] == 3
    assert report["also"] == {
        str(tmp_path / "own.jsonl"): hashlib.sha256((tmp_path / "own.jsonl").read_bytes()).hexdigest()
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x"}', "own.jsonl:1: must be either a chat or a prompt with its completion"),
        ('{"prompt": ', "own.jsonl:1: not JSON"),
    ],
)
def test_a_row_that_nobody_can_learn_is_named_and_nothing_is_written(tmp_path: Path, line: str, message: str) -> None:
    pool = write_pool(tmp_path / "pool", {"1+2=?": [("1+2=3", 5, "stop", 1.0, 1.0)]})
    (tmp_path / "own.jsonl").write_text(line + "\n")
    code, said = tool(pool, "--also", tmp_path / "own.jsonl", "--output", tmp_path / "chosen.jsonl")
    assert (code, message in said) == (2, True), said
    assert {path.name for path in tmp_path.iterdir()} == {"pool", "own.jsonl"}
    code, said = tool(pool, "--also", tmp_path / "own.jsonl", "--pairs", "--output", tmp_path / "chosen.jsonl")
    assert (code, "--also: adds rows for sft.path, and --pairs writes" in said) == (2, True)

"""tools/evaluate.py on a toy run: the run's own numbers, the same under every layout and after a kill."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from evaluating import begun, evaluate, results, samples
from limits import limit
from ranks import results as seen_by
from ranks import run_ranks
from test_import import KILLED
from test_own_model import LLAMA, written
from train_jobs import SMALL, Job, rewarded_by, wait_until

from grpo_mega.config.schema import DataConfig, SFTConfig
from grpo_mega.data.supervised import load_rows
from grpo_mega.data.tokenizer import CharTokenizer, character_tokenizer
from grpo_mega.evaluate.estimates import best_of
from grpo_mega.recipes.curation.continuing import begun_id
from grpo_mega.recipes.curation.selection import SampleFilters, condition, open_pool, select
from grpo_mega.recipes.curation.selection import rows as rows_of
from grpo_mega.step_ends import beginnings

FILES = {"budgets.png", "curves.png", "results.json", "samples.jsonl", "settings.json"}
SAME = ("--samples", 4, "--budgets", 8, 3)
REFUSALS = Path(__file__).with_name("evaluate_refusals_job.py")


@dataclass(frozen=True)
class Evaluated:
    """A toy run of two ranks, and its evaluation with four samples in one process."""

    run: Path
    folder: Path
    shown: str


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    """Its success term has values that differ: random weights are never right."""
    root = tmp_path_factory.mktemp("evaluated")
    own = [rewarded_by("varied"), "reward.success=own", "run.name=toy", "run.steps=2", "run.eval_every=0"]
    own += ["base=none", "run.tensorboard=false"]
    ended = Job(root, [*SMALL, *own], ranks=2).finish()
    assert ended.code == 0, ended
    run = root / "runs" / "toy"
    shown = evaluate(run, *SAME)
    return Evaluated(run, run / "evaluations" / "step-000002", shown)


def test_the_table_is_that_of_the_samples(toy: Evaluated) -> None:
    assert {file.name for file in toy.folder.iterdir()} == FILES
    drawn = samples(toy.folder)
    assert len(drawn) == 8 * 4
    own = [record["terms"]["own"] for record in drawn]
    found = results(toy.folder)["all"]
    assert found["accuracy"]["mean"] == pytest.approx(sum(own) / 32)
    assert found["pass@2"]["mean"] == pytest.approx(sum(best_of(own[i : i + 4], 2) for i in range(0, 32, 4)) / 8)
    assert found["length"]["mean"] == pytest.approx(sum(record["tokens"] for record in drawn) / 32)
    assert f"{100 * sum(own) / 32:.1f} % [" in toy.shown
    assert "8 problems x 4 samples, temperature 1, top-p 1, up to 16 tokens\nasked, for example: '" in toy.shown
    assert "maj@" not in toy.shown, "only the function knows what an answer is"


def test_the_first_samples_are_those_of_the_runs_last_evaluation(toy: Evaluated) -> None:
    summary = json.loads((toy.run / "summary.json").read_text())
    firsts = samples(toy.folder)[::4]
    assert sum(record["terms"]["own"] for record in firsts) / 8 == pytest.approx(summary["held_out_accuracy_after"])
    assert sum(record["tokens"] for record in firsts) / 8 == summary["mean_length_after"]


def test_within_a_budget_counts_what_the_completion_is_worth_up_to_there(toy: Evaluated) -> None:
    tokenizer, drawn = character_tokenizer(DataConfig(task="chain_sum")), samples(toy.folder)
    for i, budget in enumerate((3, 8)):
        for record in drawn:
            cut = tokenizer.encode(record["completion"])[:budget]
            whole = record["tokens"] <= budget
            assert record["within"][i] == (record["terms"]["own"] if whole else sum(cut) % 7 / 7)  # as `varied` has it
        mean = sum(record["within"][i] for record in drawn) / len(drawn)
        assert results(toy.folder)["all"][f"within@{budget}"]["mean"] == pytest.approx(mean)
    assert {record["tokens"] > 8 for record in drawn} == {True, False}
    assert "within@8" in toy.shown


@pytest.mark.long
def test_numbers_are_the_same_after_a_kill_and_under_another_layout(toy: Evaluated, tmp_path: Path) -> None:
    """Killed in its second part on one process, continued by two that share the experts."""
    killed_after(5, toy, tmp_path)
    assert len([*(tmp_path / "out" / "parts").glob("*.jsonl")]) == 1
    said = evaluate(toy.run, "layout.ep=2", *SAME, "--out", tmp_path / "out", ranks=2)
    assert "8 of 8 problems" in said
    assert_same(tmp_path / "out", toy.folder)


@pytest.mark.long
@pytest.mark.parametrize("fsyncs", [1, 3, 9, 11, 12, 13, 15, 17])
def test_killed_anywhere_it_continues(toy: Evaluated, tmp_path: Path, fsyncs: int) -> None:
    killed_after(fsyncs, toy, tmp_path)
    evaluate(toy.run, *SAME, "--out", tmp_path / "out")
    assert_same(tmp_path / "out", toy.folder)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.long)])
def test_asked_to_stop_it_keeps_what_is_scored_and_ends_with_75(
    toy: Evaluated, tmp_path: Path, number: signal.Signals
) -> None:
    """The signal arrives when the first of four parts is scored; until then a second command is kept out."""
    out, held, log, signs = (tmp_path / name for name in ("out", "held", "log", "rank-0000"))
    words = (toy.run, "rollout.concurrent_sequences=8", *SAME, "--out", out)
    own = {"GRPO_MEGA_TEST_HOLD": f"0:{held}", "GRPO_MEGA_SIGNS": str(signs)}
    process = begun(log, *words, environment=own)
    wait_until(lambda: held.exists() or process.poll() is not None, "no sample is scored")
    assert "another process is writing it" in evaluate(*words, code=2)
    os.kill(process.pid, number)
    assert process.wait(limit(300)) == 75, log.read_text()
    assert f"the same command continues with the problems that {out} lacks" in log.read_text()
    assert len([*(out / "parts").glob("*.jsonl")]) == 1
    count, phase = signs.with_suffix(".beat").read_text().split()
    assert (int(count) > 1, phase) == (True, "generate")
    evaluate(*words)
    assert_same(out, toy.folder)


def test_what_it_refuses_is_marked_for_a_launcher(toy: Evaluated, tmp_path: Path) -> None:
    evaluate(toy.run, "--data", "absent.jsonl", environment={"GRPO_MEGA_SIGNS": f"{tmp_path}/rank-0000"}, code=2)
    assert [file.name for file in tmp_path.iterdir()] == ["rank-0000.refused"]


def killed_after(fsyncs: int, toy: Evaluated, tmp_path: Path) -> None:
    """Starts an evaluation into tmp_path/out, two problems a part, and kills it."""
    (tmp_path / "sitecustomize.py").write_text(KILLED)
    environment = {"PYTHONPATH": str(tmp_path), "FSYNCS": str(fsyncs)}
    few = "rollout.concurrent_sequences=8"
    words = (toy.run, few, *SAME, "--out", tmp_path / "out")
    evaluate(*words, environment=environment, code=-signal.SIGKILL)


def assert_same(folder: Path, other: Path) -> None:
    assert {file.name for file in folder.iterdir()} == FILES
    for name in ("results.json", "samples.jsonl"):
        assert (folder / name).read_bytes() == (other / name).read_bytes()


@pytest.mark.long
def test_an_environment_begins_and_replies_under_each_layout_alike(toy: Evaluated, tmp_path: Path) -> None:
    """It tells its secret, a digit, before the first turn and in each reply."""
    game = ["environment.path=made_environments:Told", "environment.open='+'", "environment.close='='"]
    words = (toy.run, *game, "environment.reply='{reply}<think>'", "environment.max_calls=2", "--samples", 4)
    here = {"PYTHONPATH": str(Path(__file__).parents[1] / "environment")}
    evaluate(*words, "--out", tmp_path / "alone", environment=here)
    evaluate(*words, "layout.ep=2", "--out", tmp_path / "ep2", ranks=2, environment=here)
    drawn = samples(tmp_path / "alone")
    assert samples(tmp_path / "ep2") == drawn
    estimates = json.loads((tmp_path / "alone" / "results.json").read_text())["all"]
    made, wrong = (sum(record.get(what, 0) for record in drawn) for what in ("calls", "errors"))
    assert estimates["environment/calls"]["mean"] == pytest.approx(made / len(drawn))
    assert wrong == estimates["environment/errors"]["mean"] == 0
    tokenizer = character_tokenizer(DataConfig(task="chain_sum"))
    rows = learned_of(tmp_path / "alone", tokenizer)
    called = [record for record in drawn if record.get("calls")]
    assert len(called) > 5
    for record in called:
        secret = record["prompt"].removeprefix(f"<bos>{record['asked']}")
        assert len(secret) == 1
        assert f"=1{secret}" in record["completion"]
        # Of the tokens the replies are known, which rejection sampling leaves out of what is learned.
        replies = [tokenizer.decode(record["token_ids"][first:end]) for first, end in record["given"]]
        assert len(replies) in (record["calls"], record["calls"] - 1)
        assert {reply[1] for reply in replies} <= {secret}
        if record["finish_reason"] == "stop":
            written = [tokenizer.decode([i]) for i in record["token_ids"]]
            for first, end in record["given"]:
                written[first:end] = [""] * (end - first)
            assert (record["prompt"], "".join(written)) in rows
        assert tokenizer.decode(record["token_ids"]).startswith(record["completion"])


def learned_of(folder: Path, tokenizer: CharTokenizer) -> set[tuple[str, str]]:
    """Prompts, and what fine-tuning on the samples of an evaluation would learn after them."""
    filters = SampleFilters((condition("own>=-99"),))
    pools = [open_pool(folder)]
    with (folder.parent / "rows.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows_of(pools, select(pools, filters)))
    rows = load_rows(SFTConfig(path=file.name), tokenizer, (tokenizer.eos_id,), 128)
    return {
        (
            tokenizer.decode(row.token_ids[: row.learned[0][0]]),
            "".join(tokenizer.decode(row.token_ids[first:end]) for first, end in row.learned),
        )
        for row in rows
    }


def test_answers_are_continued_after_each_step_and_scored_as_whole_ones(toy: Evaluated, tmp_path: Path) -> None:
    pool, continued, signs = tmp_path / "pool", tmp_path / "continued", ["1", "+", "="]
    here = {"PYTHONPATH": str(Path(__file__).parent)}
    words = (toy.run, "--reward", "evaluation_rewards:read", "--temperature", 1)
    evaluate(*words, "--samples", 8, "--out", pool, environment=here)
    more = ("--continue", pool, "--separators", *signs)
    shown = evaluate(*words, "--samples", 3, *more, "--out", continued, environment=here)
    whole = {record["problem"]: record["prompt"] for record in samples(pool)}
    begun = {
        begun_id(record["problem"], text): (record["problem"], text)
        for record in samples(pool)
        if record["finish_reason"] == "stop"
        for text in beginnings(record["completion"], signs)
    }
    drawn = samples(continued)
    assert {record["problem"] for record in drawn} == begun.keys()
    assert f"{len(begun)} problems x 3 samples" in shown
    assert "maj@" not in shown
    for record in drawn:
        problem, text = begun[record["problem"]]
        assert record["prompt"] == whole[problem] + text
        assert record["terms"]["read"] == (len(text + record["completion"]) + len(whole[problem])) % 3 / 2
    assert len({record["completion"] for record in drawn}) > 1


def test_functions_and_services_that_a_run_names_need_a_word(toy: Evaluated, tmp_path: Path) -> None:
    """A colleague's run would otherwise run what its config.yaml names, and send it keys of the reader's."""
    said = evaluate(toy.run, *SAME, "--out", tmp_path / "none", code=2, trusts=False)
    assert "runs programs or calls services: own (" in said
    assert "add --trust-run" in said
    assert not (tmp_path / "none").exists()
    run = tmp_path / "run"
    shutil.copytree(toy.run, run, ignore=shutil.ignore_patterns("evaluations", "logs"))
    recorded = yaml.safe_load((run / "config.yaml").read_text())
    (term,) = [term for term in recorded["reward"]["terms"] if term["function"]]
    term |= {"name": "own", "function": None, "kind": "command"} | {
        "options": {"command": ["sh", "-c", f"id > {tmp_path}/ran; echo 0"]}
    }
    (run / "config.yaml").write_text(yaml.safe_dump(recorded))
    said = evaluate(run, *SAME, "--out", tmp_path / "none", code=2, trusts=False)
    assert "runs programs or calls services: own (sh -c" in said
    assert not (tmp_path / "ran").exists()
    evaluate(run, "--samples", 1, "--reward", "last_number", "--out", tmp_path / "chosen", trusts=False)
    term |= {"kind": "code", "options": {"run_without_isolation": True}}
    recorded["rollout"] |= {
        "engine": "sglang",
        "sglang": recorded["rollout"]["sglang"] | {"arguments": {"tokenizer": "x"}},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(recorded))
    said = evaluate(run, "rollout.engine=sglang", "--out", tmp_path / "none", code=2, trusts=False)
    assert "own (programs without a sandbox), rollout.sglang.arguments.tokenizer; add --trust-run" in said
    recorded["environment"] |= {"path": "theirs:Game", "close": "="}
    (run / "config.yaml").write_text(yaml.safe_dump(recorded))
    own = ("--reward", "last_number", "--out", tmp_path / "none")
    said = evaluate(run, *own, code=2, trusts=False)
    assert "runs programs or calls services: environment.path=theirs:Game" in said
    assert "No module named 'theirs'" in evaluate(run, *own, code=2, trusts=True), "trusted"
    assert not (tmp_path / "ran").exists()


def test_a_folder_is_asked_as_the_papers_ask(tmp_path: Path) -> None:
    own = written(tmp_path, LLAMA)
    out = tmp_path / "out"
    shown = evaluate(own.folder, "--data", f"sums={tmp_path}/test.jsonl", "--samples", 4, "--out", out)
    assert "4 problems x 4 samples, temperature 0.6, top-p 0.95" in shown
    first, *_ = drawn = samples(out)
    assert len(drawn) == 16
    assert first["task"] == "sums"
    assert first["prompt"].startswith("<|im_start|>user\nWhat is 900 + 5?\nPlease reason step by step")
    assert first["prompt"].endswith("<|im_start|>assistant\n")
    settings = json.loads((out / "settings.json").read_text())
    assert settings["context"] == 2048, "of the model, which was not made for 32,768 more"
    assert settings["sampling"]["max_new_tokens"] > 1900
    assert {"maj@4", "pass@4"} <= results(out)["all"].keys()


@pytest.mark.long
def test_an_evaluation_of_a_folder_keeps_the_day_on_which_it_began(tmp_path: Path) -> None:
    own = written(tmp_path, LLAMA)
    template = "{{ strftime_now('%Y-%m-%d') }}: {{ messages[-1].content }}"
    (own.folder / "chat_template.jinja").write_text(template)
    words = [own.folder, "--data", f"sums={tmp_path}/test.jsonl", "--samples", 2, "--out", tmp_path / "out"]
    words.append("rollout.max_new_tokens=8")
    began = evaluate(*words, "data.date='2001-02-03'")
    assert began.startswith(evaluate(*words)), "shown again on another day"
    assert {record["prompt"][:11] for record in samples(tmp_path / "out")} == {"2001-02-03:"}


@pytest.mark.long
def test_what_has_finished_is_shown_again_and_what_cannot_be_evaluated_is_named_with_the_fix(
    toy: Evaluated, tmp_path: Path
) -> None:
    own = written(tmp_path, LLAMA)
    before = {file.name: file.stat().st_mtime_ns for file in toy.folder.iterdir()}
    said = seen_by(run_ranks(REFUSALS, 1, [str(toy.run), str(own.folder), str(tmp_path)]))
    assert said["finished"] == toy.shown[: toy.shown.index(f"\n{toy.folder}: ")]
    assert f"--out {toy.folder}: holds results of other settings:" in said["other settings"]
    assert "samples: 4 there, 2 now" in said["other settings"]
    assert "choose a different --out" in said["other settings"]
    assert {file.name: file.stat().st_mtime_ns for file in toy.folder.iterdir()} == before
    for name, given in (("budget of all", "8 16"), ("no tokens", "0")):
        assert (
            f"--budgets {given}: completions have up to rollout.max_new_tokens=16 tokens; choose numbers from 1 to 15"
            in said[name]
        )
    assert "a Hugging Face folder, which has no problems; give --data FILE" in said["no data"]
    assert "--train 0: too few problems" in said["no training problems"]
    assert "--train and --data: both select the problems" in said["two kinds of problems"]
    assert "has no tokenizer" in said["no tokenizer"]
    assert "--reward best: unknown; choose boxed," in said["no such reward"]
    assert said["reward as a group"].endswith("write --reward boxed")
    assert "layout=tp2: a run has its configuration already; give single fields" in said["layout as a group"]
    assert "eval.samples=0: out of range; choose a value in [1, 256]" in said["no samples"]
    assert "lower eval.samples to 4 or raise rollout.concurrent_sequences to 16" in said["too many at once"]
    assert "no reward term has its task 'other'" in said["no reward"]
    assert "two problems have this id" in said["same ids"]
    assert "is a model of another shape" in said["another model"]
    assert "does not exist" in said["nothing there"]
    assert "--separators: divide the steps of --continue" in said["separators alone"]
    assert "give --out FOLDER" in said["no place"]
    assert "--continue: a beginning is continued without the environment's part" in said["no environment"]
    assert "not among the problems of this command; give the --train or --data" in said["other problems"]
    assert "give the text between its steps" in said["no steps"]
    assert "engines hold the GPUs until the last sample" in said["a reward model beside engines"]

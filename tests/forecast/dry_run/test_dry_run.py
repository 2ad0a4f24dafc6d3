"""`--dry-run` names all that is wrong with a job at once, and finds nothing wrong with a job that is right."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from forks import run_python
from hypothesis import given
from hypothesis import strategies as st
from made_tokenizer import write_tokenizer
from ranks import REPOSITORY
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from grpo_mega.platform import start

start()  # before megatron.core is imported

from grpo_mega.checkpoint.checkpoint import prune, step_path  # noqa: E402
from grpo_mega.config.schema import ModelConfig, RunConfig  # noqa: E402
from grpo_mega.forecast.planning.lines import checkpoints_at_once  # noqa: E402
from grpo_mega.weights.hf_config import hf_config  # noqa: E402
from grpo_mega.weights.names import entries  # noqa: E402

LLAMA = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn_hidden=64, context=64)
REWARDS = """
def longer(sample):
    return float(len(sample.text))

def broken(sample):
    return 1 / len(sample.text)

class Board:
    def reset(self, answer, **row):
        return f" Board {answer}."

    def move(self, to: str) -> str:
        return to

class Broken(Board):
    def reset(self, **row):
        raise ValueError("no board")

class Levels(Board):
    def reset(self, answer, level, **row):
        if level == "last":
            raise ValueError("no such level")
        return level
"""
GAME = ["environment.close='<|im_end|>'", "environment.path=own_rewards:Board"]


class Ended:
    """What a dry run printed."""

    def __init__(self, words: list[str], folder: Path, environment: dict[str, str] | None = None) -> None:
        paths = (REPOSITORY, REPOSITORY / "kernels", folder)
        command = ("-m", "grpo_mega.train", *words, "--dry-run")
        done = run_python(*command, folder=folder, paths=paths, environment=environment)
        assert "Traceback" not in done.stderr, done.stderr
        self.code, self.text = done.returncode, done.stdout
        announced = re.search(r"^(\d+) problems?:$", done.stdout, re.MULTILINE)
        listed = done.stdout[announced.start() :] if announced else ""
        self.problems = re.findall(r"^ *\d+\. (.*(?:\n     .*)*)", listed, re.MULTILINE)
        assert len(self.problems) == (int(announced[1]) if announced else 0), done.stdout


@pytest.fixture
def job(tmp_path: Path) -> list[str]:
    """Settings of a job that is right: a folder, problems, rewards of its own."""
    folder = write_tokenizer(tmp_path / "model", with_bos=True)
    size = len(AutoTokenizer.from_pretrained(folder))
    (folder / "config.json").write_text(json.dumps(hf_config(LLAMA, size)))
    save_file({e.name: torch.zeros(e.shape) for e in entries(LLAMA, size)}, folder / "model.safetensors")
    for name, first, number in (("train", 0, 30), ("test", 900, 5)):
        problems = [{"prompt": f"What is {i} + 5?", "answer": i + 5} for i in range(first, first + number)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    (tmp_path / "own_rewards.py").write_text(REWARDS)
    return [
        *("experiment=own_model", f"run.init_from={folder}", f"run.root={tmp_path}/runs", "data.validation_size=4"),
        "data=jsonl",  # whose prompts fit the context: the question takes 60 characters
        *(f"data.{name}_path={tmp_path}/{name}.jsonl" for name in ("train", "test")),
        *("rollout.max_new_tokens=8", "reward.terms=[{name:boxed},{name:long,weight:0.1,function:own_rewards:longer}]"),
    ]


def test_a_job_that_is_right_is_shown_and_leaves_nothing(job: list[str], tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    ended = Ended([*job, *GAME], tmp_path)
    assert (ended.code, ended.problems) == (0, []), ended.text
    assert ended.text.endswith("\nready\n")
    assert re.search(r"\nreset adds to train/\d+#0, \d+ tokens with it: ' Board \d+\.'\n", ended.text)
    assert len(re.findall(r"^  train/\d+#0, \d+ tokens, answer '\d+': '<\|im_start\|>user", ended.text, re.M)) == 8
    assert "problems: 26 for training, 4 for validation, 5 for testing\n" in ended.text
    assert r"warning: prompts do not mention \boxed, which reward term 'boxed' reads; unless" in ended.text
    assert re.search(r"^35 prompts of \d+ to \d+ tokens, .* model.context=64$", ended.text, re.M)
    rows = {line[2:36].strip(): line[36:].split() for line in ended.text.splitlines() if line[:2] == "  "}
    assert rows[""] == ["boxed", "long", "total"]
    (answer,) = re.findall(r"whose answer is '(\d+)'", ended.text)
    text = rf"... \boxed{{{answer}}}"
    assert rows["right, in a box"] == ["1", str(len(text)), f"{1 + len(text) / 10:.4g}"]
    assert rows["wrong, in a box"][0] == rows["right, alone"][0] == "0"
    assert rows["empty"] == ["0", "0", "0"]
    assert "\nlayout=auto: one rank, the simplest on CPUs; " in ended.text
    assert "  training: takes " in ended.text
    assert "GB are free in " in ended.text
    assert [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in path.parts] == before


def test_every_mistake_is_named_at_once(job: list[str], tmp_path: Path) -> None:
    """In settings, data, tokenizer, weights, reward, run directory, memory: none hides another."""
    with (tmp_path / "train.jsonl").open("a") as train:
        train.write(
            json.dumps({"prompt": "why " * 80, "answer": 1}) + "\n" + json.dumps({"prompt": "no answer"}) + "\n"
        )
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    (tmp_path / "runs").write_text("a file")
    ended = Ended(
        [
            *(word for word in job if not word.startswith(("reward.terms", "data.test_path"))),
            *(f"data.test_path={tmp_path}/absent.jsonl", "run.stpes=3", "rollout.temperature=-1"),
            "reward.terms=[{name:boxed},{name:gone,function:own_rewards:gone},{name:bad,function:own_rewards:broken}]",
        ],
        tmp_path,
    )
    assert ended.code == 2
    expected = [
        "run.stpes: not a setting; did you mean run.steps",
        "rollout.temperature=-1",
        f"data.test_path={tmp_path}/absent.jsonl: does not exist",
        f"{tmp_path}/train.jsonl:32: field 'answer': missing",
        "reward term 'gone': cannot import 'own_rewards:gone'",
        "reward term 'bad', prompt 'made up', sample 9: ",
        "1 tensors are missing, the first: model.norm.weight",
        f"{tmp_path}/runs: cannot be written to (Not a directory); choose another run.root",
    ]
    assert len(ended.problems) == len(expected), ended.text
    for problem, words in zip(ended.problems, expected, strict=True):
        assert words in problem
    assert ended.problems[5].startswith("reward term 'bad', prompt 'made up', sample 9: ")
    assert "ZeroDivisionError" in ended.problems[5]
    assert "ready" not in ended.text


@pytest.mark.parametrize(
    "words",
    [
        ["experiment=tinny"],
        ["experiment=tiny", "model=tinny"],
        ["tiny"],
        ["experiment=own_model", "run.init_from=gone"],
    ],
)
def test_without_its_experiment_or_model_a_job_has_one_problem(words: list[str], tmp_path: Path) -> None:
    ended = Ended(words, tmp_path)
    assert ended.code == 2
    assert [problem.partition(":")[0] for problem in ended.problems] == words[-1:]
    assert "fix this first: data, rewards, environment, layout and memory were not checked" in ended.text


def test_a_run_directory_to_start_from_is_answered_with_its_checkpoint(tmp_path: Path) -> None:
    """A run that has begun no longer reads it, and is said to go on."""
    for name in ("step-000010", "step-000020", ".step-000030"):
        (tmp_path / "runs" / "tiny" / "checkpoints" / name).mkdir(parents=True)
    words = ["experiment=tiny", "base=none", f"run.root={tmp_path}/runs", f"run.init_from={tmp_path}/runs/tiny"]
    new = Ended([*words, "run.name=new"], tmp_path)
    assert any(each.endswith(f"; choose {tmp_path}/runs/tiny/checkpoints/step-000020") for each in new.problems)
    assert "has begun" not in new.text
    assert f"  {tmp_path}/runs/tiny has begun: the run continues" in Ended(words, tmp_path).text


def test_a_job_without_an_experiment_lists_all_that_it_lacks(tmp_path: Path) -> None:
    ended = Ended(["run.name=mine"], tmp_path)
    assert ended.code == 2
    assert "run.steps" in [problem.partition(":")[0] for problem in ended.problems]


@pytest.mark.long
def test_every_task_is_answered_with_its_terms_and_a_service_that_is_away_here_is_no_mistake(
    job: list[str], tmp_path: Path
) -> None:
    for name in ("train", "test"):
        problems = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        tasks = [problem | {"task": ("sums", "words")[i % 2]} for i, problem in enumerate(problems)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in tasks))
    words = [word for word in job if not word.startswith("reward.terms")]
    away = "{name:away,kind:http,options:{url:'http://127.0.0.1:9',retries:0}}"
    terms = f"reward.terms=[{{name:boxed,tasks:[sums]}},{{name:exact,tasks:[words]}},{away}]"
    ended = Ended([*words, terms], tmp_path)
    assert (ended.code, ended.problems) == (0, []), ended.text
    headings = [line.split() for line in ended.text.splitlines() if line.startswith(" " * 36) and "total" in line]
    assert sorted(headings) == [["boxed", "total"], ["exact", "total"]]
    noted = "on the machines that will run the job, perhaps not this one: reward term 'away': http://127.0.0.1:9:"
    assert ended.text.count(noted) == 2
    ended = Ended([*words, "reward.terms=[{name:boxed,tasks:[sums]}]"], tmp_path)
    assert len(ended.problems) == 1, ended.text
    assert re.match(r"problem '\w+/\d+(#0)?': no reward term has its task 'words'", ended.problems[0])


def long_prompts(root: Path) -> None:
    with (root / "test.jsonl").open("a") as test:
        for number in (80, 90):
            test.write(json.dumps({"prompt": "why " * number, "answer": number}) + "\n")


def other_experiment(root: Path) -> None:
    checkpoint = root / "runs" / "own_model" / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True)
    (root / "runs" / "own_model" / "run.json").write_text(json.dumps({"run.seed": 8}))


ONE_SMALL_GPU = ["cluster.nodes=1", "cluster.gpus_per_node=1", "cluster.gpu_memory_mib=4000"]
OFTEN = ["run.steps=1000000000", "run.save_every=1"]
OTHERS = [
    (None, ["model.rope_base=7"], "rope_theta is 10000.0, not 7.0"),
    (None, ["data.validation_size=30"], "data.validation_size=30: "),
    (None, [*ONE_SMALL_GPU, "layout=single"], "does not fit: takes "),
    (None, ONE_SMALL_GPU, "1 GPUs: no layout fits"),
    (None, ["data.curriculum=frontier", "data.frontier_terms=[exact]"], "data.frontier_terms: exact is not a term"),
    (None, [*OFTEN, "run.keep_checkpoints=1000000000"], "GB free, and checkpoints need"),
    (None, [*OFTEN, "run.keep_every=1"], "GB free, and checkpoints need"),
    (None, [*OFTEN, "run.save_every=0", "run.export_every=1"], "GB (run.save_every=0"),
    (None, [GAME[0], "environment.path=own_rewards:Broken"], "ValueError: no board"),
    (None, ["model.vocab_size=7"], "model.vocab_size=7: below the tokenizer's"),
    (lambda root: (root / "model" / "tokenizer.json").write_text("{"), [], "holds no tokenizer that can be read"),
]


@pytest.mark.parametrize(
    ("wrong", "words", "problem"),
    [
        *(pytest.param(*case, marks=pytest.mark.long) for case in OTHERS),
        (long_prompts, [], "2 of 37 prompts leave no room for a completion in model.context=64; the longest, 'test/7'"),
        (other_experiment, [], "runs/own_model: belongs to another experiment"),
    ],
)  # fmt: skip
def test_one_mistake_is_one_problem(
    job: list[str], tmp_path: Path, wrong: Callable[[Path], None] | None, words: list[str], problem: str
) -> None:
    if wrong:
        wrong(tmp_path)
    ended = Ended([*job, *words], tmp_path)
    assert ended.code == 2
    assert [problem in found for found in ended.problems] == [True], ended.text


@pytest.mark.long
def test_processes_are_those_of_the_launcher_and_one_rank_reports(job: list[str], tmp_path: Path) -> None:
    first = Ended([*job, "layout=tp2"], tmp_path, {"RANK": "0", "WORLD_SIZE": "3"})
    assert first.code == 2
    assert "3: not divisible" in first.problems[0]
    second = Ended([*job, "layout=tp2"], tmp_path, {"RANK": "1", "WORLD_SIZE": "3"})
    assert (second.code, second.text) == (0, "")


@pytest.mark.long
def test_a_prompt_that_asks_for_the_box_and_a_split_that_leaves_little_are_told(job: list[str], tmp_path: Path) -> None:
    wide = [word for word in job if word != "data=jsonl" and not word.startswith("data.test_path")]
    ended = Ended([*wide, "data.validation_size=20", "data.test_size=4"], tmp_path)
    assert "do not mention" not in ended.text
    assert "problems: 6 for training, 20 for validation, 4 for testing\n" in ended.text
    assert re.search(
        r"warning: only 6 of the 30 .* trained on, 24 are held out: data.validation_size=20, d", ended.text
    )


@pytest.mark.long
def test_prompts_of_every_source_are_shown_and_every_unreadable_source_is_named(job: list[str], tmp_path: Path) -> None:
    for name, first in (("more", 50), ("held", 700)):
        rows = [{"q": f"Say {i}", "a": {"b": f"#### {i}"}} for i in range(first, first + 20)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = [f"data.sources.more.{word}" for word in ("prompt=q", "answer=a.b", "answer_pattern='#### (.*)'")]
    words = [
        *(word for word in job if not word.startswith(("data.train_path", "data.test_path"))),
        *(f"data.sources.plain.path={tmp_path}/train.jsonl", f"data.sources.more.path={tmp_path}/more.jsonl"),
        *(f"data.sources.more.test_path={tmp_path}/held.jsonl", *columns),
    ]
    ended = Ended(words, tmp_path)
    assert (ended.code, ended.problems) == (0, []), ended.text
    assert len(re.findall(r"^  plain/train/\d+#0, \d+ tokens, answer '\d+': ", ended.text, re.M)) == 4
    assert len(re.findall(r"^  more/more/\d+#0, \d+ tokens, answer '\d+': .*Say", ended.text, re.M)) == 4
    assert re.search(r"^70 prompts of ", ended.text, re.M)
    broken = [word for word in words if "data.sources.more.prompt" not in word]
    ended = Ended([*broken, f"data.sources.gone.path={tmp_path}/gone.jsonl"], tmp_path)
    expected = [f"data.sources.gone.path={tmp_path}/gone.jsonl: does not exist"]
    expected += [f"{tmp_path}/{name}.jsonl:1: field 'prompt': missing" for name in ("more", "held")]
    assert [problem.splitlines()[0].split(";")[0] for problem in ended.problems] == expected


@pytest.mark.long
def test_an_environment_is_tried_with_the_first_problem_of_every_source(job: list[str], tmp_path: Path) -> None:
    """And each must give it the fields that it needs."""
    for name in ("one", "two"):
        rows = [{"prompt": f"{name} {i}", "answer": i, "level": name} for i in range(20)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = ["data.sources.one.metadata=[level]", "data.sources.two.metadata=[level]"]
    words = [
        *(word for word in job if not word.startswith(("data.train_path", "data.test_path"))),
        *(f"data.sources.{name}.path={tmp_path}/{name}.jsonl" for name in ("one", "two")),
        *("data.test_size=4", GAME[0], "environment.path=own_rewards:Levels"),
    ]
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text(template.read_text().replace("m.content", "m.content.split('</think>')[-1]"))
    ended = Ended([*words, *columns, "environment.reply=tool", "environment.keep_thoughts=true"], tmp_path)
    assert (ended.code, ended.problems) == (0, []), ended.text
    assert ended.text.count("warning: environment.keep_thoughts=true") == 1
    assert re.search("warning: the prompt of one/.* does not name the tool", ended.text)
    shown = re.findall(r"^reset adds to (\w+)/.*: '(.*)'$", ended.text, re.M)
    assert sorted(shown) == [("one", "one"), ("two", "two")]
    assert re.search("^tools: .*; a call is .* alone, or {", ended.text, re.M)
    ended = Ended([*words, columns[0]], tmp_path)
    (problem,) = ended.problems
    assert re.search("reset needs 'level', which the problem two/.* of two does not have", problem)
    assert "data.sources.two.metadata" in problem
    second = tmp_path / "two.jsonl"
    second.write_text(second.read_text().replace('"level": "two"', '"level": "last"'))
    ended = Ended([*words, *columns, "data.template='{prompt}'"], tmp_path)
    (problem,) = ended.problems
    assert "does not name the tool" not in ended.text, "no chat"
    assert re.search("reset of problem two/.*: ValueError: no such level; correct the environment\n", problem)


@given(steps=st.integers(0, 40), every=st.integers(0, 12), newest=st.integers(1, 5), milestones=st.integers(0, 9))
def test_as_many_checkpoints_are_counted_as_a_run_ever_has(
    steps: int, every: int, newest: int, milestones: int
) -> None:
    run = RunConfig(steps=steps, save_every=every, keep_checkpoints=newest, keep_every=milestones)
    most = 0
    with TemporaryDirectory() as folder:
        for step in range(min(1, steps), steps + 1):  # a run without steps saves what the stages before them made
            if step == steps or (every and step % every == 0):
                path = step_path(Path(folder), step)
                path.mkdir()
                most = max(most, len([*Path(folder).iterdir()]))
                prune(path, newest, milestones)
    assert checkpoints_at_once(run) == most


def imported(job: list[str], out: Path) -> list[str]:
    """The job, which starts from its folder converted to the checkpoint `out`."""
    (folder,) = (word.partition("=")[2] for word in job if word.startswith("run.init_from="))
    run_python(REPOSITORY / "tools" / "import.py", folder, out).check_returncode()
    return [*(word for word in job if not word.startswith("run.init_from=")), f"run.init_from={out}"]


def cut_short(checkpoint: Path) -> None:
    file = next((checkpoint / "weights").glob("*.distcp"))
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.long
def test_an_imported_checkpoint_is_checked_with_its_tokenizer(job: list[str], tmp_path: Path) -> None:
    words = imported(job, tmp_path / "imported")
    shutil.rmtree(tmp_path / "model")
    ended = Ended(words, tmp_path)
    assert (ended.code, ended.problems) == (0, []), ended.text
    cut_short(tmp_path / "imported")
    (tmp_path / "imported" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    ended = Ended([*words, "model.rope_base=7"], tmp_path)
    assert len(ended.problems) == 3, ended.text
    beside, weights, model = ended.problems
    assert f"data.tokenizer={tmp_path}/imported: the checkpoint is not what was imported: chat_template.jinja" in beside
    assert weights.startswith(f"{tmp_path}/imported: the checkpoint is damaged: weights/__")
    assert "bytes instead of" in weights
    assert "rope_theta is 10000.0, not 7.0" in model


@pytest.mark.long
def test_a_checkpoint_of_another_run_is_checked_with_the_model_and_the_tokenizer(
    job: list[str], tmp_path: Path
) -> None:
    """Beside the weights of a run lie neither config.json nor a tokenizer."""
    run = tmp_path / "runs" / "other"
    origin = run / "checkpoints" / "step-000001"
    origin.parent.mkdir(parents=True)
    words = [*imported(job, origin), f"data.tokenizer={tmp_path}/model", "data.template=chat"]
    manifest = json.loads((origin / "manifest.json").read_text())
    for name in [name for name in manifest if "/" not in name and name != "state.json"]:
        (origin / name).unlink()
        del manifest[name]
    (origin / "manifest.json").write_text(json.dumps(manifest))
    (run / "config.yaml").write_text(f"data: {{tokenizer: {tmp_path}/model}}")
    model = {**asdict(LLAMA), "vocab_size": len(AutoTokenizer.from_pretrained(tmp_path / "model"))}
    chosen = [f"model.{key}={model[key]}" for key in ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "context")]
    words += ["model=tiny_dense", *chosen, f"model.vocab_size={model['vocab_size']}"]
    ended = Ended(words, tmp_path)
    assert (ended.code, ended.problems) == (0, []), ended.text
    (tmp_path / "elsewhere").mkdir()
    (run / "config.yaml").write_text(f"data: {{tokenizer: {tmp_path}/elsewhere}}")
    tokens = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    (tmp_path / "elsewhere" / "tokenizer.json").write_text(json.dumps(tokens, indent=7))
    ended = Ended(words, tmp_path)
    assert (ended.code, ended.problems) == (0, []), ended.text
    last = max(tokens["model"]["vocab"], key=tokens["model"]["vocab"].get)
    tokens["model"]["merges"] = [pair for pair in tokens["model"]["merges"] if "".join(pair) != last]
    del tokens["model"]["vocab"][last]  # this run's tokenizer has one more
    (tmp_path / "elsewhere" / "tokenizer.json").write_text(json.dumps(tokens))
    ended = Ended(words, tmp_path)
    assert (ended.code, ended.problems) == (0, []), ended.text
    write_tokenizer(tmp_path / "elsewhere", with_bos=False)
    ended = Ended([*words, "model.layers=3"], tmp_path)
    assert len(ended.problems) == 2, ended.text
    expected = r": of another model than the configuration: \d+ tensors have other shapes: .* is \(2, .*, not \(3, "
    assert re.search(expected, ended.problems[0])
    assert ended.problems[1].startswith(
        f"run.init_from={origin}: was trained with data.tokenizer={tmp_path}/elsewhere, whose tokens differ"
    )

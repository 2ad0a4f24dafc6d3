"""From a folder and a file to a trained model in a folder, with README's commands, in a copied clone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from forks import REPOSITORY, run_python
from limits import limit
from metric_lines import of_steps
from own_clone import LLAMA, Clone
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_mega.config.schema import ModelConfig, MoEConfig
from grpo_mega.weights.hf_config import hf_config

WITH_WINDOWS = {
    "gpt_oss": ModelConfig(
        layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn_hidden=32, family="gpt_oss", qkv_bias=True,
        full_every=2,
        moe=MoEConfig(experts=4, top_k=2, ffn_hidden=32, score="softmax", bias_update_rate=0.0), tie_embeddings=False,
    ),
    "mistral": LLAMA,
}  # fmt: skip
WRITE = """
import pathlib, sys
from grpo_mega import new, platform
platform.start_planning()
from grpo_mega.config.load import compose_config
from grpo_mega.forecast.planning.plan import plan
config = compose_config(["experiment=r1zero_671b"])
new.write_script(pathlib.Path(sys.argv[1]), "large", config.cluster, plan(config)["checkpoint"])
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    return Clone(tmp_path_factory.mktemp("clone"))


def test_a_folder_a_file_and_a_reward_become_a_trained_model(clone: Clone) -> None:
    printed = clone.new(
        "first", "--reward", "my_rewards:score", "--completion-tokens", "64", "optimizer.lr=1e-5", "algorithm=dapo"
    )
    assert "<|im_start|>user\nWhat is 0 + 5?" in printed
    assert "-m grpo_mega.train experiment=first" in printed
    text = clone.experiment("first").read_text()
    assert text.count(" # ") > 5, "it says why"
    made = yaml.safe_load(text)
    assert made["run"]["init_from"] == str(clone.model)
    assert {"override /layout": "auto"} in made["defaults"]
    assert (float(made["optimizer"]["lr"]), {"override /algorithm": "dapo"} in made["defaults"]) == (1e-5, True)
    assert made["model"]["context"] - made["rollout"]["max_new_tokens"] >= 20
    assert (made["data"]["validation_size"], made["data"]["test_size"]) == (4, 4)
    assert "\nready\n" in clone.runs("-m", "grpo_mega.train", "experiment=first", "--dry-run")
    clone.runs("-m", "grpo_mega.train", "experiment=first", "run.steps=1")
    run = clone.root / "runs" / "first"
    (step,) = of_steps(run)
    assert step["policy/grad_norm"] > 0
    trained = AutoModelForCausalLM.from_pretrained(run / "export" / "step-000001")
    before = AutoModelForCausalLM.from_pretrained(clone.model)
    assert any(not torch.equal(a, b) for a, b in zip(trained.parameters(), before.parameters(), strict=True))


@pytest.mark.long
def test_the_question_asks_for_what_the_reward_reads(clone: Clone) -> None:
    assert r"put your final answer within \boxed{}.<|im_end|>" in clone.new("boxed")
    assert yaml.safe_load(clone.experiment("boxed").read_text())["data"]["question"].endswith(r"\boxed{}.")
    assert "<think> your reasoning </think><answer> your answer </answer>" in clone.new("tags", "--reward", "r1zero")
    assert "and end with the answer, a number.<|im_end|>" in clone.new("number", "--reward", "last_number")
    template = json.loads((clone.model / "tokenizer_config.json").read_text())
    assert "chat_template" not in template
    hidden = (clone.model / "chat_template.jinja").rename(clone.root / "template")
    try:
        assert "User: What is 0 + 5?\nPlease reason step by step" in clone.new("base")
        assert "<think> reasoning process here </think>" in clone.new("zero", "--reward", "r1zero")
        assert "What is 0 + 5?\n\n(the answer is: 5)" in clone.new("plain", "--reward", "my_rewards:score")
    finally:
        hidden.rename(clone.model / "chat_template.jinja")


SUMS = [{"stdin": "", "stdout": "3"}, {"stdin": "1", "stdout": "4\n"}]
CALLS = [{"call": "f", "args": [1, "a"], "returns": [2]}, {"call": "Solution.g", "args": [], "returns": None},
         {"call": "Solution.h", "args": [3], "returns": 4}]  # fmt: skip
OWN: dict[str, tuple[list[dict[str, Any]], list[str], str]] = {
    "code": (
        [
            {"question": f"Write f{i}.", "tests": json.dumps(CALLS) if i % 2 else SUMS, "difficulty": i}
            for i in range(9)
        ],
        ["--reward", "code", "--prompt", "question"],
        r"  right, alone +1 +1\n.*\n  wrong, in a box +0 +0\n",
    ),
    "countdown": (
        [{"prompt": f"Make {i + 3} of 1, 2 and {i}.", "answer": i + 3, "nums": [1, 2, i]} for i in range(9)],
        ["--reward", "countdown"],
        r"begins|rewards of completions of",
    ),
    "columns": (
        [{"q": f"{i} + 1?", "a": f"It is {i + 1}.\n#### {i + 1}", "level": i, "none": None} for i in range(9)],
        ["--prompt", "q", "--answer", "a", "--answer-pattern", "#### (.*)", "--reward", "my_rewards:by_level"],
        r"  right, alone +\d",
    ),
}


KINDS = ["code", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("countdown", "columns", "csv"))]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_for_columns_of_one_s_own_passes_its_own_dry_run(
    clone: Clone, tmp_path: Path, kind: str
) -> None:
    rows, options, printed = OWN["columns" if kind == "csv" else kind]
    data = tmp_path / f"own-rows.{'csv' if kind == 'csv' else 'jsonl'}"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if kind == "csv":
        data.write_text("q,a,level\n" + "".join(f'{row["q"]},"{row["a"]}",{row["level"]}\n' for row in rows))
    level = "float(sample.prompt.metadata['level'])"
    code = f"\ndef by_level(sample):\n    return {level} + (sample.prompt.answer in sample.text)\n"
    (clone.root / "my_rewards.py").write_text((clone.root / "my_rewards.py").read_text() + code)
    shown = clone.new(f"own_{kind}", "--data", str(data), *options)
    assert re.search(printed, shown), shown
    made = yaml.safe_load(clone.experiment(f"own_{kind}").read_text())
    (source,) = made["data"]["sources"].values()
    assert source["path"] == str(data)
    assert ("answer" in source, source.get("answer")) == {"code": (True, None), "countdown": (False, None)}.get(
        kind, (True, "a")
    )
    dry = clone.runs("-m", "grpo_mega.train", f"experiment=own_{kind}", "--dry-run")
    assert dry.endswith("\nready\n"), dry
    assert "\n9 prompts of " in dry
    assert "warning: in tags" not in dry


@pytest.mark.long
def test_a_folder_without_a_tokenizer_and_a_reward_that_fails_are_named_first(clone: Clone, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text((clone.model / "config.json").read_text())
    said = clone.new("bare", "--model", str(tmp_path / "bare"), code=2)
    assert f"error: {tmp_path}/bare: has no tokenizer; download its tokenizer.json" in said
    (clone.root / "bad_rewards.py").write_text("def score(sample):\n    return sample.prompt.metadata['level']\n")
    said = clone.new("failing", "--reward", "bad_rewards:score", code=2)
    assert "error: reward.terms: " in said
    assert "KeyError: 'level'" in said
    assert "return sample.prompt.metadata['level']" in said
    assert not clone.experiment("failing").exists()
    said = clone.new("failing", "algorithm.klcoef=1", code=2)
    assert "error: algorithm.klcoef: not a setting, in configs/experiment/failing.yaml; did you mean algorithm" in said
    said = clone.new("hub", "--model", "Qwen/Qwen2.5-0.5B-Instruct", code=2)
    assert "`hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir models/Qwen2.5-0.5B-Instruct`" in said
    said = clone.new("hub", "--data", "openai/gsm8k", code=2)
    assert "`hf download openai/gsm8k --repo-type dataset --local-dir data/gsm8k`" in said


@pytest.mark.long
def test_for_gpus_a_layout_is_proposed_that_fits(clone: Clone) -> None:
    printed = clone.new("cluster", "--cluster", "h100", "--nodes", "2", "optimizer.state.on_host=true")
    (sizes,) = re.findall(r"^16 GPUs: (.+);", printed, re.MULTILINE)
    assert prod(int(size.split()[1]) for size in sizes.split(" x ")) == 16
    assert re.search(r"^fits: (pipeline stage \d )?takes", printed, re.MULTILINE)
    made = yaml.safe_load(clone.experiment("cluster").read_text())
    assert made["rollout"]["engine"] == "sglang"
    assert made["cluster"] == {"nodes": 2}
    assert made["optimizer"]["distributed"] is made["optimizer"]["state"]["on_host"] is True
    planned = json.loads(clone.runs("tools/plan.py", "cluster", "--json"))
    assert planned["fits"]
    assert planned["engine"]["fits"]
    script = clone.root / "slurm" / "cluster.sh"
    assert f"{script}\n" in printed
    assert "    slurm/cluster.sh --dry-run\n    slurm/cluster.sh --partition=NAME" in printed
    assert "torchrun" not in printed
    asked = [line.partition("#SBATCH ")[2] for line in script.read_text().splitlines() if "#SBATCH" in line]
    assert {"--job-name=cluster", "--nodes=2", "--gpus-per-node=8", "--signal=B:USR1@900"} <= {*asked}
    tried = subprocess.run(
        [script, "--dry-run"], cwd=clone.root, env=os.environ | {"HOST_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=limit(300),
    )  # fmt: skip
    assert (tried.returncode, tried.stdout[-7:]) == (0, "\nready\n"), tried.stdout + tried.stderr
    script.unlink()
    clone.experiment("again").write_text("")
    assert "again.yaml exists" in clone.new("again", "--cluster", "h100", code=2)
    clone.experiment("again").rename(clone.root / "slurm" / "again.sh")
    assert "slurm/again.sh exists; choose a different NAME" in clone.new("again", "--cluster", "h100", code=2)
    assert not clone.experiment("again").exists()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gpt_oss", "mistral"])
def test_layers_that_sglang_is_not_tried_with_are_generated_by_the_embedded_engine(clone: Clone, kind: str) -> None:
    """Where the window reaches as far as a sequence, there is none, and SGLang generates."""
    small = replace(WITH_WINDOWS[kind], context=512, window=256)
    whole = clone.model / "config.json"
    text, size = whole.read_text(), len(AutoTokenizer.from_pretrained(clone.model))
    try:
        for window, engine in ((256, "embedded"), (4096, "embedded" if kind == "gpt_oss" else "sglang")):
            whole.write_text(json.dumps(hf_config(small, size) | {"sliding_window": window}))
            name = f"{kind}{window}"
            assert "\nfits: " in clone.new(name, "--cluster", "h100")
            made = yaml.safe_load(clone.experiment(name).read_text())
            assert made["rollout"]["engine"] == engine
    finally:
        whole.write_text(text)


def test_a_job_of_a_large_model_gets_the_time_to_save_it(tmp_path: Path) -> None:
    """In r1zero_671b's is as much as in the script that was written by hand."""
    (tmp_path / "write.py").write_text(WRITE)
    done = run_python(tmp_path / "write.py", tmp_path / "large.sh")
    assert done.returncode == 0, done.stderr
    (seconds,) = re.findall(r"USR1@(\d+)$", (tmp_path / "large.sh").read_text(), re.MULTILINE)
    assert 4300 < int(seconds) <= 4700


@pytest.mark.long
def test_what_cannot_be_used_is_named_and_no_file_is_left(clone: Clone, tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "a b c " * 600, "answer": 1}) + "\n")
    (tmp_path / "few.jsonl").write_text('{"prompt": "x", "answer": 1}\n{"prompt": "y", "answer": 2}\n')
    (tmp_path / "broken.jsonl").write_text('{"prompt": "x"}\n')
    bad = {
        "1 of 1 problems: leave no room for a completion: the longest prompt has": [
            "--data",
            str(tmp_path / "long.jsonl"),
        ],
        "broken.jsonl:1: field 'answer': missing": ["--data", str(tmp_path / "broken.jsonl")],
        "few.jsonl: it has 2 problems; give at least 3": ["--data", str(tmp_path / "few.jsonl")],
        "nowhere.jsonl does not exist\n  --test t.jsonl does not exist": [
            *("--data", str(tmp_path / "nowhere.jsonl"), "--test", "t.jsonl")
        ],
        f"{tmp_path}/config.json": ["--model", str(tmp_path)],
        "reward term 'missing': cannot import 'my_rewards:missing'": ["--reward", "my_rewards:missing"],
        "--reward wrong: choose boxed, by_task, code, countdown, environment, last_number, r1": ["--reward", "wrong"],
        "NAME '../x'": ["../x"],
    }
    for message, words in bad.items():
        name = [] if words[0] == "../x" else ["bad"]
        model, data = ["--model", str(clone.model)], ["--data", str(clone.data)]
        assert message in clone.runs("-m", "grpo_mega.new", *name, *model, *data, *words, code=2)
        assert not clone.experiment("bad").exists()


@pytest.mark.long
def test_test_problems_that_are_trained_on_can_be_accepted(clone: Clone, tmp_path: Path) -> None:
    others = [json.dumps({"prompt": f"What is {i} + 6?", "answer": i + 6}) + "\n" for i in range(5)]
    test = tmp_path / "test.jsonl"
    test.write_text("".join(others + clone.data.read_text().splitlines(keepends=True)[:2]))
    refused = clone.new("shared", "--test", str(test), code=2)
    (flag,) = re.findall(r"\((--shared-test-problems 2) of python -m grpo_mega\.new\)", refused)
    assert not clone.experiment("shared").exists()
    made = clone.new("shared", "--test", str(test), *flag.split())
    assert "warning: 2 of the 7 problems of data.test_path=" in made
    assert "\n  shared_test_problems: 2 # " in clone.experiment("shared").read_text()
    assert "give both, or neither" in clone.new("other", *flag.split(), code=2)


def test_a_layout_is_typed_or_searched(clone: Clone) -> None:
    for word in ("layout.tp=4", "layout=tp2", "layout.recompute=full"):
        said = clone.new("both", "--cluster", "h100", word, code=2)
        assert f"{word}: --cluster searches the layout; leave one of them out" in said
    assert not clone.experiment("both").exists()


def test_an_experiment_that_is_there_is_not_replaced(clone: Clone) -> None:
    before = clone.experiment("tiny").read_bytes()
    assert "tiny.yaml exists; choose a different NAME" in clone.new("tiny", code=2)
    assert clone.experiment("tiny").read_bytes() == before


GAME = """
class Guess:
    def reset(self, answer, hint, **row):
        self.answer, self.hint, self.found = int(answer), hint, False
        return f" (see {hint})"

    def guess(self, number: int) -> str:
        '''Guesses the number.

        Args:
            number: The guess, and no ${setting}.
        '''
        self.found = number == self.answer
        return f"right, {self.hint}" if self.found else "wrong"

    def get_reward(self) -> float:
        return float(self.found)


class Board(Guess):
    def reset(self, answer, **row):
        super().reset(answer, **row)
        return " x" * (60 if answer == "9" else 1)


class Endless(Guess):
    def reset(self, answer, **row):
        return " x" * 600


class Failing(Guess):
    def reset(self, **row):
        raise KeyError("level")


class Unfair(Guess):
    def get_reward(self):
        return "much"


class Quiz(Guess):
    done = True


def half(number: float, of: str = "it") -> float:
    return number / 2


def solve(base_url, prompt, hint, answer, **row):
    messages = [{"role": "system", "content": "Think twice."}, {"role": "user", "content": prompt}]
    said = requested(base_url, messages)
    messages += [said, {"role": "user", "content": f"Are you sure? See {hint}."}]
    return float(requested(base_url, messages)["content"] == answer)


def requested(base_url, messages):
    import json, urllib.request

    body = json.dumps({"messages": messages}).encode()
    request = urllib.request.Request(base_url + "/chat/completions", body)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as response:
        return json.load(response)["choices"][0]["message"]
"""


@pytest.fixture(scope="module")
def played(clone: Clone) -> list[str]:
    """Words of a command about problems with hints, with a game beside the clone."""
    (clone.root / "game.py").write_text(GAME)
    data = clone.root / "rows.jsonl"
    rows = [{"prompt": f"What is {i} + 5?", "answer": i + 5, "hint": f"h{i}"} for i in range(9)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--data", str(data), "environment.close=<|im_end|>", 'environment.open=""']


def test_an_environment_is_tried_and_written(clone: Clone, played: list[str]) -> None:
    printed = clone.new("game", "--environment", "game:Guess", *played)
    assert "its prompt must describe them" in printed
    assert "\n  guess(number: int) -> str  Guesses the number.\n" in printed
    call, reply = (
        r'\{"name": "guess", "arguments": \{"number": (\d+)\}\}',
        r"<\|im_start\|>tool\nright, h(\d+)<\|im_end\|>",
    )
    calls = re.findall(rf"\n{call}<\|im_end\|>\n{reply}\n<\|im_start\|>assistant\n\nreward: 1\n", printed)
    assert len(calls) == 2, printed
    assert all(int(number) == int(hint) + 5 for number, hint in calls)
    assert "right, in a box" not in printed
    assert len(re.findall(r"reset adds to \S+, \d+ tokens with it:  \(see h\d+\)\n", printed)) == 2, printed
    made = yaml.safe_load(clone.experiment("game").read_text())
    assert made["environment"] == {"path": "game:Guess", "close": "<|im_end|>", "open": "", "reply": "tool"}
    assert {"override /reward": "environment"} in made["defaults"]
    assert made["model"]["context"] > 2 * made["rollout"]["max_new_tokens"], "room for replies"
    dry = clone.runs("-m", "grpo_mega.train", "experiment=game", "--dry-run")
    assert dry.endswith("\nready\n"), dry


def test_an_agent_is_tried_and_written(clone: Clone, played: list[str]) -> None:
    """Without settings of its own: the tokens that end a turn are those of the chat template."""
    printed = clone.new("agent", "--environment", "game:solve", *played[:2])
    assert "the policy can call" not in printed
    begins = r"the agent's first request for \S+, \d+ tokens:\n<\|im_start\|>system\nThink twice\.<\|im_end\|>\n"
    assert len(re.findall(begins, printed)) == 2, printed
    goes_on = r"I do not know\.<\|im_end\|>\n<\|im_start\|>user\nAre you sure\? See h\d+\.<\|im_end\|>\n"
    assert len(re.findall(goes_on + r"<\|im_start\|>assistant\n\nreward: 0\n", printed)) == 2, printed
    made = yaml.safe_load(clone.experiment("agent").read_text())
    assert made["environment"] == {"path": "game:solve", "close": "<|im_end|>"}
    assert {"override /reward": "environment"} in made["defaults"]
    dry = clone.runs("-m", "grpo_mega.train", "experiment=agent", "--dry-run")
    assert "game:solve is an agent: it requests turns, which end with <|im_end|> or a stop token" in dry
    assert re.search(r"the agent's first request for \S+, \d+ tokens: '<\|im_start\|>system", dry)
    assert dry.endswith("\nready\n"), dry


@pytest.mark.long
def test_the_context_has_room_for_what_reset_adds(clone: Clone, played: list[str]) -> None:
    """To all problems, of which a few are tried."""
    clone.new("board", "--environment", "game:Board", *played, "--completion-tokens", "10")
    made = yaml.safe_load(clone.experiment("board").read_text())
    assert made["rollout"]["max_new_tokens"] == 10
    assert 60 + 2 * 10 < made["model"]["context"] < 300
    assert clone.runs("-m", "grpo_mega.train", "experiment=board", "--dry-run").endswith("\nready\n")
    said = clone.new("endless", "--environment", "game:Endless", *played, code=2)
    refused = r"--environment game:Endless: it adds \d{3,} tokens to a problem, and .* was trained for 512; make "
    assert re.search(refused, said)


@pytest.mark.long
def test_a_chat_template_that_reads_tools_is_given_them(clone: Clone, played: list[str]) -> None:
    template = clone.model / "chat_template.jinja"
    before = template.read_text()
    template.write_text("{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + before)
    try:
        printed = clone.new("told", "--environment", "game:Guess", *played)
        template.write_text(template.read_text() + r"{#- <tool_call>\n<function= #}")
        called = clone.new("called", "--environment", "game:Guess", *played)
        untold = clone.new("untold", "--environment", "game:half", *played)
    finally:
        template.write_text(before)
    assert "its chat template describes them" in printed
    assert "its prompt must describe them (Cannot generate JSON schema for half because it has no docstring" in untold
    assert "tool_call_parser" not in yaml.safe_load(clone.experiment("told").read_text())["environment"]
    made = yaml.safe_load(clone.experiment("called").read_text())
    assert made["environment"]["tool_call_parser"] == "qwen3_coder"
    assert made["environment"]["reply"] == "tool"
    assert "the run reads those of qwen3_coder." in called
    (tool,) = made["data"]["template_options"]["tools"]
    assert tool["function"]["description"] == "Guesses the number."
    assert tool["function"]["parameters"]["required"] == ["number"]
    assert made["model"]["context"] - made["rollout"]["max_new_tokens"] * 2 > 100, "the prompts have the schema"


@pytest.mark.long
def test_environments_without_a_reward_and_those_that_fail(clone: Clone, played: list[str]) -> None:
    (tool,) = re.findall(r"```python\n(def multiply.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    (clone.root / "my_tools.py").write_text(tool)
    functions = clone.new("product", "--environment", "my_tools:multiply", *played)
    assert '{"name": "multiply", "arguments": {"first": ' in functions
    assert "right, in a box" in functions, "it gives no reward"
    assert "the sample ends: it is done\nreward: 1" in clone.new("quiz", "--environment", "game:Quiz", *played)
    for path, words, fix in (
        ("game:Nothing", "game has no class or function Nothing", "correct the name"),
        ("no_game:Guess", "No module named 'no_game'", "add that folder to PYTHONPATH"),
        ("game:Failing", "KeyError: 'level'", "correct the environment"),
        ("game:Unfair", "a reward must be a finite number", "correct the environment"),
    ):
        said = clone.new("bad", "--environment", path, *played, code=2)
        assert path in said
        assert words in said
        assert fix in said
        assert not clone.experiment("bad").exists()
    assert "environment.close='</tool_call>'" in clone.new("bad", "--environment", "game:Guess", code=2)

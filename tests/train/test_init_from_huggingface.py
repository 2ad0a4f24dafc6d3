"""A run starts from the weights of a Hugging Face directory, or says why it cannot."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from made_tokenizer import write_tokenizer
from metric_lines import of_steps
from safetensors.torch import save_file
from train_jobs import SMALL, Job, rewarded_by

from grpo_mega.platform import start

start()  # before megatron.core is imported

from grpo_mega.config.load import compose_config  # noqa: E402
from grpo_mega.data.tokenizer import CharTokenizer  # noqa: E402
from grpo_mega.weights.hf_config import hf_config  # noqa: E402
from grpo_mega.weights.names import entries  # noqa: E402

OVERRIDES = [
    *(o for o in SMALL if not o.startswith("base.")),
    "experiment=tiny_dense",
    "layout=single",
    "base=none",
    "model.qk_norm=true",
    "run.name=from_huggingface",
    "run.steps=1",
]


@pytest.fixture(scope="module")
def even_handed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose output layer is zeros: it finds every token equally likely, unlike one with random weights."""
    folder = tmp_path_factory.mktemp("even_handed")
    vocabulary = CharTokenizer().vocab_size
    model = compose_config(OVERRIDES).model
    tensors = {e.name: 0.1 * torch.randn(e.shape) * (e.name != "lm_head.weight") for e in entries(model, vocabulary)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf_config(model, vocabulary)))
    return folder


def test_a_run_starts_from_its_weights(tmp_path: Path, even_handed: Path) -> None:
    ended = Job(tmp_path, [*OVERRIDES, rewarded_by("varied"), f"run.init_from={even_handed}"]).finish()
    assert ended.code == 0, ended.stderr
    (first,) = of_steps(tmp_path / "runs" / "from_huggingface")
    assert first["policy/entropy"] == pytest.approx(math.log(CharTokenizer().vocab_size), rel=1e-5)


def test_a_run_on_its_tokenizer_and_chat_template(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer", with_bos=False)
    # Half of the tokens end a completion: one that goes on for 16 did not hear of them.
    (tmp_path / "tokenizer" / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(0, 250, 2)]}))
    for name, first in (("train", 0), ("test", 15)):
        problems = [{"prompt": f"What is {i} + 5?", "answer": i + 5} for i in range(first, first + 20)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    files = [f"data.{name}_path={tmp_path}/{name}.jsonl" for name in ("train", "test")]
    named = [o for o in OVERRIDES if not o.startswith(("data.", "model.qk_norm", "run.name"))]
    ended = Job(
        tmp_path,
        [
            *(*named, "data=chat", *files, f"data.tokenizer={tmp_path}/tokenizer", "data.validation_size=4"),
            *("run.name=chat", rewarded_by("varied"), "data.shared_test_problems=5"),
        ],
    ).finish()
    assert ended.code == 0, ended.stderr
    (samples,) = (tmp_path / "runs" / "chat" / "samples").iterdir()
    for line in samples.read_text().splitlines():
        assert json.loads(line)["prompt"].startswith("<|im_start|>user\nWhat is ")
        assert json.loads(line)["finish_reason"] == "stop"
    assert "5 of the 20 problems of data.test_path=" in ended.stderr


@pytest.mark.long
def test_mistakes_in_data_are_found_before_a_run_directory_is_made(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer", with_bos=False)
    raw = '{"prompt": "What is 3 + 5?", "answer": "3 + 5 = <<3+5=8>>8\\n#### 8"}\n'
    (tmp_path / "train.jsonl").write_text(raw + '{"prompt": "What is 3 + 7?", "answer": 10}\n')
    (tmp_path / "test.jsonl").write_text('{"prompt": "What is 3 + 6?", "answer": 9}\n')
    files = [f"data.{name}_path={tmp_path}/{name}.jsonl" for name in ("train", "test")]
    named = [o for o in OVERRIDES if not o.startswith("data.")]
    overrides = [*named, "data=chat", *files, f"data.tokenizer={tmp_path}/tokenizer", "data.validation_size=1"]
    for more, why in (
        (
            [],
            f"{tmp_path}/train.jsonl:1: field 'answer' is a whole solution of GSM8K's; write what follows its ####: ",
        ),
        (
            ["rollout.stop=['<eos>']", "reward.terms=[{name:own,function:train_rewards:varied}]", "reward.success=own"],
            "rollout.stop: '<eos>': not a token",
        ),
    ):
        ended = Job(tmp_path, [*overrides, *more]).finish()
        assert ended.code == 2
        assert why in ended.stderr
        assert "Traceback" not in ended.stderr
        assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_another_model_is_refused(tmp_path: Path, even_handed: Path) -> None:
    ended = Job(tmp_path, [*OVERRIDES, f"run.init_from={even_handed}", "model.ffn_hidden=128"]).finish()
    assert ended.code != 0
    assert "Traceback" not in ended.stderr
    assert f"{even_handed}: config.json is of another model" in ended.stderr
    assert "intermediate_size is 256, not 128" in ended.stderr

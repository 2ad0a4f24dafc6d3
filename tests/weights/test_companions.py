"""An exported directory holds the run's tokenizer and its stop tokens, and transformers finds them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from made_tokenizer import write_tokenizer

from grpo_mega.platform import start

start()  # before megatron.core is imported

from huggingface_models import QWEN3, VOCAB  # noqa: E402

from grpo_mega.config.schema import ModelConfig  # noqa: E402
from grpo_mega.errors import InputError  # noqa: E402
from grpo_mega.weights.companions import companions  # noqa: E402
from grpo_mega.weights.directory import Writer  # noqa: E402
from grpo_mega.weights.hf_config import hf_config  # noqa: E402


@pytest.fixture
def run(tmp_path: Path) -> tuple[str, str, ModelConfig]:
    """Of a run from a released model with a tokenizer of its own."""
    write_tokenizer(tmp_path / "tokenizer", with_bos=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 4096, "bos_token_id": 0}')
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": 2, "top_p": 0.8}')
    return str(tmp_path / "tokenizer"), str(tmp_path / "model"), ModelConfig(context=32)


def test_transformers_finds_tokenizer_and_stop_tokens(tmp_path: Path, run: tuple[str, str, ModelConfig]) -> None:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    writer = Writer(tmp_path / "out", hf_config(QWEN3, VOCAB), companions(*run, (1, 2)))
    writer.begin()
    writer.add([("x", torch.ones(2))])
    writer.finish()
    theirs, expected = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("out", "tokenizer"))
    assert theirs.get_vocab() == expected.get_vocab()
    assert theirs.chat_template == expected.chat_template
    text = "<|im_start|>What is 3+5?<|im_end|>"
    assert theirs.encode(text) == expected.encode(text)
    written = AutoConfig.from_pretrained(tmp_path / "out")
    assert (written.bos_token_id, written.eos_token_id, written.max_position_embeddings) == (0, [1, 2], 4096)
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (generation.bos_token_id, generation.eos_token_id, generation.top_p) == (0, [1, 2], 0.8)


def test_a_disk_that_fails_is_an_error_of_the_operating_system(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "out", {})
    writer.begin()
    (tmp_path / ".out.tmp").rename(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="part-0: "):
        writer.add([("x", torch.ones(2))])


def test_of_two_that_write_one_directory_one_is_refused_and_the_other_is_whole(tmp_path: Path) -> None:
    first, second = (Writer(tmp_path / "out", {"of": name}) for name in ("first", "second"))
    first.begin()
    with pytest.raises(InputError, match="out: another process is writing it"):
        second.begin()
    second.discard()
    first.add([("x", torch.ones(2))])
    first.finish()
    with pytest.raises(InputError, match="out: exists"):
        second.begin()
    second.discard()
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"of": "first"}
    assert len([*(tmp_path / "out").glob("*.safetensors")]) == 1


def test_one_stop_token_is_a_number_and_none_leaves_the_models_own(run: tuple[str, str, ModelConfig]) -> None:
    assert companions(*run, (2,)).config["eos_token_id"] == 2
    none = companions(*run, ())
    assert "eos_token_id" not in none.config
    assert json.loads(none.files["generation_config.json"])["eos_token_id"] == 2


def test_the_toys_have_no_files_but_an_end(tmp_path: Path) -> None:
    found = companions("chars", None, ModelConfig(context=128), (2,))
    assert found.config == {"eos_token_id": 2, "max_position_embeddings": 128}
    assert [*found.files] == ["generation_config.json"]

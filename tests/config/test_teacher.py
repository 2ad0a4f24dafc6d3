"""What a teacher's files say of it, and what no layout of the run's or no length allows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from composed import composed
from made_run import write_run

from grpo_mega.config.load import to_yaml
from grpo_mega.config.schema import Config
from grpo_mega.config.trained_model import TrainedModel, check_teacher, read_teacher
from grpo_mega.data.tokenizer import character_tokenizer
from grpo_mega.errors import ConfigError, InputError

MOE = ("experiment=tiny", "layout=single")
QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 3, "intermediate_size": 96, "max_position_embeddings": 512,
    "vocab_size": 40, "rope_theta": 5e5, "torch_dtype": "bfloat16", "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}  # fmt: skip


def student(teacher: Path, *words: str) -> Config:
    return composed("experiment=tiny_distill", f"distill.teacher={teacher}", *words)


def described(config: Config) -> TrainedModel | None:
    return read_teacher(config.distill, config.model)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run that has a checkpoint."""
    return write_run(tmp_path / "moe", composed(*MOE))


def test_a_run_and_its_checkpoint_have_the_architecture_of_the_run(run: Path) -> None:
    for path in (run, run / "checkpoints" / "step-000003"):
        teacher = described(student(path))
        assert teacher is not None
        assert teacher.model == composed(*MOE).model != student(path).model
        assert (teacher.data.tokenizer, teacher.data.task) == ("chars", "chain_sum")


def test_number_words_are_tokens_of_a_teacher_that_has_them(run: Path) -> None:
    bilingual = composed(*MOE, "data.languages=[english,chinese]")
    (run / "config.yaml").write_text(to_yaml(bilingual))
    teacher = described(student(run))
    assert teacher is not None
    assert character_tokenizer(teacher.data).tokens == character_tokenizer(bilingual.data).tokens


def test_a_base_model_says_itself_what_it_was_trained_with(tmp_path: Path) -> None:
    state = {
        "config": {"model": {"layers": 3, "hidden": 32, "heads": 2, "kv_heads": 2, "ffn_hidden": 64, "context": 96}}
    }
    (tmp_path / "state.json").write_text(json.dumps(state))
    teacher = described(student(tmp_path))
    assert teacher is not None
    assert (teacher.model.layers, teacher.model.hidden) == (3, 32)


def test_a_hugging_face_folder_has_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    teacher = described(student(tmp_path))
    assert teacher is not None
    assert (teacher.model.layers, teacher.model.ffn_hidden, teacher.model.dtype) == (3, 96, "bf16")
    assert teacher.data.tokenizer == str(tmp_path)
    check_teacher(student(tmp_path), teacher)


def test_without_a_teacher_there_is_none() -> None:
    assert described(composed(*MOE)) is None


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("notes.txt", "", "neither a run directory .no config.yaml. nor a checkpoint .no state.json"),
        ("state.json", "{}", "neither a run directory"),
        ("config.yaml", "model: {layers: many}", "does not support the model of .*config.yaml"),
        ("config.yaml", "a: [", "config.yaml cannot be read"),
        ("config.json", '{"model_type": "mamba"}', "config.json: model_type=mamba is not supported"),
    ],
)
def test_what_is_no_model_is_named(tmp_path: Path, file: str, text: str, said: str) -> None:
    (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match=said) as error:
        described(student(tmp_path))
    assert str(tmp_path) in str(error.value)


def test_a_missing_teacher_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"distill.teacher=.*/nowhere: does not exist"):
        described(student(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("words", "changed", "said"),
    [
        (["layout.tp=2"], {"heads": 3, "kv_heads": 3}, "of the teacher, model.heads=3: not divisible by layout.tp=2"),
        (["layout.pp=2"], {"layers": 3}, "of the teacher, model.layers=3: not divisible by 2 pipeline stages"),
        (["layout.tp=2"], {}, "of the teacher, layout.sp=false: Megatron needs sequence parallelism for experts"),
        (["layout.ep=3"], {}, "of the teacher, model.moe.experts=4: not divisible by layout.ep=3"),
        (["model.context=200", "layout.micro_batch_tokens=300"], {}, "supports sequences of 128 tokens, and"),
    ],
)
def test_a_layout_that_cannot_split_it_is_refused_with_the_teacher_s_field(
    run: Path, words: list[str], changed: dict[str, int], said: str
) -> None:
    config = student(run, *words)
    teacher = described(config)
    assert teacher is not None
    teacher = replace(teacher, model=replace(teacher.model, **changed))
    with pytest.raises(ConfigError) as error:
        check_teacher(config, teacher)
    assert error.value.where == f"distill.teacher={run}"
    assert error.value.what.startswith(said)
    check_teacher(student(run), teacher)


def test_ranks_that_share_experts_need_some_in_the_model_or_its_teacher(run: Path) -> None:
    config = student(run, "layout.ep=2")
    teacher = described(config)
    assert teacher is not None
    check_teacher(config, teacher)
    dense = replace(teacher, model=student(run).model)
    with pytest.raises(ConfigError, match=r"layout.ep=2: neither the model nor its teacher has experts"):
        check_teacher(config, dense)

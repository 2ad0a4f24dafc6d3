"""Every family's folder, converted ahead of a run, is read under layouts as the folder itself is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ranks import results, run_ranks
from safetensors.torch import save_file

from grpo_mega.platform import start

start()  # before megatron.core is imported

import sys  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1] / "weights"))

from huggingface_models import IN_FP8, IN_MXFP4, MODELS, VOCAB, WITH_MTP, released_tensors  # noqa: E402

from grpo_mega.config.schema import ModelConfig  # noqa: E402
from grpo_mega.weights import fp8  # noqa: E402
from grpo_mega.weights.hf_config import hf_config  # noqa: E402
from grpo_mega.weights.names import entries  # noqa: E402

JOB = Path(__file__).with_name("import_job.py")


def write(folder: Path, model: ModelConfig) -> None:
    """A folder of random weights; those of IN_FP8 as DeepSeek-V3 is released, of IN_MXFP4 as GPT-OSS."""
    folder.mkdir()
    tensors = {entry.name: torch.randn(entry.shape).to(entry.dtype) for entry in entries(model, VOCAB)}
    config = hf_config(model, VOCAB)
    if model is IN_FP8:
        tensors = {name: t if name.endswith("bias") else t.bfloat16() for name, t in tensors.items()}
        tensors = dict(fp8.quantised_bucket(tensors.items()))
        config |= {"quantization_config": fp8.CONFIG, "torch_dtype": "bfloat16"}
    if model is IN_MXFP4:
        tensors, config = released_tensors(model), config | {"quantization_config": {"quant_method": "mxfp4"}}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.long
def test_checkpoint_and_folder_are_the_same_under_every_layout(tmp_path: Path) -> None:
    for name, model in {**MODELS, "mtp": WITH_MTP, "fp8": IN_FP8, "mxfp4": IN_MXFP4}.items():
        write(tmp_path / name, model)
    run_ranks(JOB, 1, [str(tmp_path)])
    assert len([*(tmp_path / "imported" / "deepseek_v3" / "weights").glob("*.distcp")]) > 1
    assert results(run_ranks(JOB, 4, [str(tmp_path)])) == []
    for name in ("fp8", "mxfp4"):
        written = json.loads((tmp_path / "imported" / name / "config.json").read_text())
        assert "quantization_config" not in written, "the weights of the checkpoint are not quantised"

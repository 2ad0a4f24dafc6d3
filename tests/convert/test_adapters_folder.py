"""A folder of adapters is what the library peft makes the trained model of, over the model that training began with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks import REPOSITORY, run_ranks
from safetensors.torch import load_file, save_file

JOB = Path(__file__).with_name("adapters_job.py")
EXACT = [
    "qwen3", "qwen2_tied", "llama3", "qwen3_moe", "qwen3_moe-experts", "qwen3_moe_first_dense-experts",
    "glm4_moe-attention", "deepseek_v3-attention", "moonlight-attention",
    "gpt_oss-attention",
]  # fmt: skip
"""MODEL-TARGET, or all targets; grouped and latent attention, biases, experts that transformers has in one tensor."""
REFUSED = ["deepseek_v3", "glm4_moe", "qwen3_moe_first_dense-mlp", "gpt_oss", "gpt_oss-experts"]
TOKENS = torch.arange(3, 20)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("peft")
    made = tmp_path_factory.mktemp("adapters")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(REPOSITORY / "tests" / "weights"), prepend=":")
        run_ranks(JOB, 1, [str(made), *EXACT, *REFUSED])
    return made


def logits(path: Path, adapter: Path | None = None) -> torch.Tensor:
    from transformers import AutoModelForCausalLM  # it and peft take seconds, which collecting tests would take too

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", local_files_only=True)
    if adapter:
        import peft

        model = peft.PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model.eval()(TOKENS).logits


@pytest.mark.parametrize("name", EXACT)
def test_the_adapted_model_is_the_merged_one(folder: Path, name: str) -> None:
    here = folder / name
    merged, base = logits(here / "merged"), logits(here / "base")
    assert (merged - base).abs().max() > 0.5
    assert (logits(here / "base", here / "adapter") - merged).abs().max() < 2e-5


@pytest.mark.parametrize("name", REFUSED)
def test_adapters_that_peft_would_lose_are_not_written(folder: Path, name: str) -> None:
    refusal = (folder / name / "refused").read_text()
    what = "has no adapters of single experts" if name.startswith("gpt_oss") else "cannot load its adapter"
    assert refusal.startswith("model.layers.")
    assert f": peft {what}" in refusal
    assert not (folder / name / "adapter").exists()


def swapped(tensors: dict[str, torch.Tensor]) -> None:
    """Gives keys the adapter of values, and the reverse."""
    for name in [name for name in tensors if ".k_proj." in name]:
        other = name.replace(".k_proj.", ".v_proj.")
        tensors[name], tensors[other] = tensors[other], tensors[name]


def doubled(tensors: dict[str, torch.Tensor]) -> None:
    """Twice the scale."""
    for name in [name for name in tensors if "lora_B" in name]:
        tensors[name] = 2 * tensors[name]


@pytest.mark.parametrize("spoil", [swapped, doubled])
def test_another_adapter_is_noticed(folder: Path, tmp_path: Path, spoil: Callable) -> None:
    here = folder / "qwen3"
    tensors = load_file(here / "adapter" / "adapter_model.safetensors")
    spoil(tensors)
    save_file(tensors, tmp_path / "adapter_model.safetensors", {"format": "pt"})
    (tmp_path / "adapter_config.json").write_text((here / "adapter" / "adapter_config.json").read_text())
    assert (logits(here / "base", tmp_path) - logits(here / "merged")).abs().max() > 0.1

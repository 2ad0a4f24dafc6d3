"""Experts in 4 bits: every number is the one that transformers reads, from a folder like the released ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_mega.errors import InputError
from grpo_mega.platform import start

start()  # before megatron.core is imported

from huggingface_models import IN_MXFP4 as MODEL  # noqa: E402
from huggingface_models import VOCAB, released_tensors  # noqa: E402

from grpo_mega.weights import mxfp4  # noqa: E402
from grpo_mega.weights.directory import INDEX, ONE_FILE, Reader  # noqa: E402
from grpo_mega.weights.hf_config import hf_config  # noqa: E402
from grpo_mega.weights.names import Region, entries  # noqa: E402

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
EXPERTS = "model.layers.1.mlp.experts"


def theirs(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """As transformers reads them."""
    return pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors(blocks, scales)


def ours(blocks: torch.Tensor, scales: torch.Tensor, part: Region) -> torch.Tensor:
    stored = {"x_blocks": blocks, "x_scales": scales}
    return mxfp4.dequantised(lambda name, where: stored[name][where], "x", part)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the scales in another file than the blocks."""
    folder, tensors = tmp_path_factory.mktemp("mxfp4"), released_tensors(MODEL)
    files = {name: f"{'b' if name.endswith('_scales') else 'a'}.safetensors" for name in tensors}
    for file in {*files.values()}:
        save_file({name: t for name, t in tensors.items() if files[name] == file}, folder / file, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    config = {key: value for key, value in hf_config(MODEL, VOCAB).items() if key != "torch_dtype"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": MXFP4}))
    return folder


def test_every_number_with_every_scale_is_that_of_transformers() -> None:
    scales = torch.arange(255, dtype=torch.uint8)[None, :, None]  # 255 is no number
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(255, 1, 1)[None]
    found = ours(blocks, scales.expand(1, 255, 16), (slice(0, 1), slice(0, 512), slice(0, 255)))
    expected = theirs(blocks, scales.expand(1, 255, 16))
    assert torch.equal(found.bfloat16(), expected)
    assert torch.equal(found, expected.float()), "float32 holds all of them"
    assert len(found.unique()) > 1000


def test_a_part_is_that_of_the_whole() -> None:
    """Rows in any steps; columns may begin inside a block."""
    random = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (3, 10, 3, 16), generator=random, dtype=torch.uint8)
    scales = torch.randint(120, 130, (3, 10, 3), generator=random, dtype=torch.uint8)
    whole = theirs(blocks, scales).float()
    for part in (
        (slice(1, 2), slice(0, 96), slice(1, 10, 2)),
        (slice(0, 3), slice(33, 70), slice(4, 5)),
        (slice(2, 3), slice(31, 33), slice(0, 9, 3)),
    ):
        assert torch.equal(ours(blocks, scales, part), whole[part])


def test_a_folder_is_read_as_transformers_reads_it(folder: Path) -> None:
    """Every tensor of Megatron's is where the numbers of transformers' model say."""
    transformers = pytest.importorskip("transformers")
    settings = transformers.Mxfp4Config(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=settings, dtype=torch.bfloat16
    )
    expected, reader = model.state_dict(), Reader(folder, MODEL, VOCAB)
    for entry in entries(MODEL, VOCAB):
        rows = entry.rows.period if entry.key != "embedding.word_embeddings.weight" else 64
        rows = 2 * MODEL.heads * 12 if "linear_qkv" in entry.key else rows  # queries, keys and values of two heads
        columns = {"linear_fc1.weight": 64, "linear_fc2.weight": 96}.get(".".join(entry.key.split(".")[-2:]))
        other = [columns] if columns and entry.place else [*entry.shape[1:]] if not entry.place else []
        box = tuple((0, size) for size in (rows, *other))
        held = reader.part(entry.key, box, torch.bfloat16)
        for source, target in entry.overlap(box):
            assert torch.equal(entry.outwards(held[source]), expected[entry.name][target].bfloat16()), entry.name
    assert "quantization_config" not in reader.config


Change = Callable[[dict[str, torch.Tensor], dict[str, Any]], object]
UP = f"{EXPERTS}.gate_up_proj"
# How the folder is broken -> what is said.
BAD: dict[str, tuple[Change, str]] = {
    "scales": (lambda t, c: t.pop(UP + "_scales"), f"1 tensors are missing, the first: {UP}_scales"),
    "blocks": (lambda t, c: t.pop(UP + "_blocks"), f"1 tensors are missing, the first: {UP}_blocks"),
    "bias": (lambda t, c: t.pop(UP + "_bias"), f"1 tensors are missing, the first: {UP}_bias"),
    "shape": (
        lambda t, c: t.update({UP + "_scales": t[UP + "_scales"][:, :, :1].clone()}),
        f"{UP}_scales is (8, 192, 1) U8, and must be (8, 192, 2) U8",
    ),
    "dtype": (
        lambda t, c: t.update({UP + "_blocks": t[UP + "_blocks"].to(torch.int16)}),
        f"{UP}_blocks is (8, 192, 2, 16) I16, and must be",
    ),
    "not_said": (lambda t, c: c.pop("quantization_config"), "tensors are missing, the first: model.layers.0.mlp.exp"),
    "other": (lambda t, c: c.update(quantization_config={"quant_method": "gptq"}), "quantization_config is {'quant"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_folder_that_is_not_whole_is_refused_by_name(name: str, folder: Path, tmp_path: Path) -> None:
    tensors = {key: t for file in folder.glob("*.safetensors") for key, t in load_file(file).items()}
    config = json.loads((folder / "config.json").read_text())
    break_it, message = BAD[name]
    break_it(tensors, config)
    save_file(tensors, tmp_path / ONE_FILE, {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError) as refused:
        Reader(tmp_path, MODEL, VOCAB)
    assert refused.value.where == str(tmp_path)
    assert message in str(refused.value)

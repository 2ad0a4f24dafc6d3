"""Policies and Hugging Face models of the same weights: the same names, shapes, bits and logits, under any layout."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from safetensors.torch import load_file, save_file

from grpo_mega.platform import start

start()  # before megatron.core is imported

from huggingface_models import (  # noqa: E402
    AHEAD,
    BY_EXPERT,
    EPS,
    FIRST_LAYOUTS,
    IN_FP8,
    IN_MXFP4,
    LAYOUTS,
    LR,
    MODELS,
    SEQUENCES,
    VOCAB,
    WRITTEN_AS,
    released_tensors,
)

from grpo_mega.weights import fp8  # noqa: E402
from grpo_mega.weights.directory import Reader  # noqa: E402
from grpo_mega.weights.hf_config import family_of, hf_config  # noqa: E402
from grpo_mega.weights.names import entries  # noqa: E402

JOB = Path(__file__).with_name("huggingface_job.py")
EVERY_LAYOUT = [pytest.param(name, marks=() if name in FIRST_LAYOUTS else pytest.mark.long) for name in LAYOUTS]
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def transformers_model(model_config: Any, said: dict[str, Any]) -> Any:
    """The transformers model with random weights, none of them at the value it starts with."""
    transformers = pytest.importorskip("transformers")
    config = hf_config(model_config, VOCAB) | said
    config.pop("num_nextn_predict_layers", None)  # transformers then names one, whose tensors it does not write
    torch.manual_seed(4)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config), dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            # What the gate of GPT-OSS's experts is and what it multiplies are so large that many are clamped.
            spread = torch.randn(tensor.shape) * (1.0 if name.endswith("gate_up_proj") else 0.25)
            tensor.copy_(1 + spread if "norm" in name else spread)
    return model.eval()


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {name: transformers_model(model, WRITTEN_AS.get(name, {})) for name, model in MODELS.items()}


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(VOCAB, (sum(SEQUENCES),), generator=torch.Generator().manual_seed(2))


def changed_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def break_it(path: Path) -> None:
        found = load_file(path / ONE_FILE)
        found[name] = change(found[name])
        save_file(found, path / ONE_FILE, {"format": "pt"})

    return break_it


def renamed_tensor(old: str, new: str | None) -> Callable[[Path], None]:
    def break_it(path: Path) -> None:
        found = load_file(path / ONE_FILE)
        tensor = found.pop(old)
        if new:
            found[new] = tensor
        save_file(found, path / ONE_FILE, {"format": "pt"})

    return break_it


def changed_config(**values: Any) -> Callable[[Path], None]:
    def break_it(path: Path) -> None:
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return break_it


def cut_short(path: Path) -> None:
    file = path / ONE_FILE
    file.write_bytes(file.read_bytes()[:-100])


def written(file: str, content: str) -> Callable[[Path], None]:
    return lambda path: (path / file).write_text(content) and None


def wrong_place_in_the_index(path: Path) -> None:
    index = json.loads((path / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"]["model.norm.weight"] = files[index["weight_map"]["model.norm.weight"] == files[0]]
    (path / INDEX).write_text(json.dumps(index))


YARN = {
    "rope_theta": 100.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 1.0,
    "beta_slow": 0.05, "mscale": 0.8, "mscale_all_dim": 0.8,
}  # fmt: skip
LLAMA3 = {
    "rope_theta": 100.0, "rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 16,
    "low_freq_factor": 0.2, "high_freq_factor": 1.5,
}  # fmt: skip
GEMMA_ROPE = {"full_attention": {"rope_theta": 1000.0, "rope_type": "default"}}
Q_PROJ = "model.layers.2.self_attn.q_proj.weight"
EXPERT = "model.layers.3.mlp.experts.5.up_proj.weight"
# Directory, and how it is broken -> what is said.
BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "qwen3-missing": (renamed_tensor(Q_PROJ, None), f"1 tensors are missing, the first: {Q_PROJ}"),
    "qwen3-renamed": (renamed_tensor(Q_PROJ, "model.layers.2.attn.q.weight"), f"missing, the first: {Q_PROJ}"),
    "qwen3-unknown": (renamed_tensor("lm_head.weight", "lm_head.bias"), "missing, the first: lm_head.weight"),
    "qwen3-shape": (changed_tensor(Q_PROJ, lambda t: t[:-1].clone()), f"{Q_PROJ} is (47, 32), and "),
    "qwen3-turned": (changed_tensor(Q_PROJ, lambda t: t.T.contiguous()), f"{Q_PROJ} is (32, 48), and "),
    "qwen3-dtype": (changed_tensor(Q_PROJ, lambda t: t.half()), f"{Q_PROJ} is F16, and "),
    "qwen3-integers": (changed_tensor(Q_PROJ, lambda t: t.int()), f"{Q_PROJ} is I32, and "),
    "qwen3-short": (cut_short, f"{ONE_FILE}: "),
    "qwen3-no_json": (written("config.json", "{"), "config.json is not JSON"),
    "qwen3-no_object": (written("config.json", "[1]"), "config.json is not a JSON object"),
    "qwen3-no_number": (changed_config(max_position_embeddings=[32]), "TypeError: "),
    "qwen3_moe_first_dense-index": (written(INDEX, "{}"), f"{INDEX} has no weight_map"),
    "qwen3_moe_first_dense-outside": (
        written(INDEX, json.dumps({"weight_map": {"model.norm.weight": "../model.safetensors"}})),
        f"{INDEX} names ../model.safetensors, which is not a file of the folder",
    ),
    "qwen3_moe_first_dense-place": (wrong_place_in_the_index, f"not in the file that {INDEX} names, the first: model."),
    "qwen3-no_weights": (lambda path: (path / ONE_FILE).unlink(), ONE_FILE),
    "qwen3-theta": (changed_config(rope_parameters={"rope_theta": 1e4, "rope_type": "default"}), "rope_theta is 1000"),
    "qwen3-yarn": (changed_config(rope_parameters={"rope_theta": 1e6, "rope_type": "yarn"}), "rope_type is yarn"),
    "qwen3-window": (changed_config(use_sliding_window=True), "use_sliding_window is True, not False"),
    "qwen3-short_context": (changed_config(max_position_embeddings=31), "max_position_embeddings is 31, below"),
    "qwen3-quantised": (changed_config(quantization_config={"quant_method": "fp8"}), "quantization_config is {'quant"),
    "qwen3-other_dtype": (changed_config(dtype="float8_e4m3fn"), "weights in float8_e4m3fn cannot be read"),
    "qwen3-other_family": (changed_config(model_type="llama"), "model_type is llama, not qwen3"),
    "qwen3_moe-expert": (renamed_tensor(EXPERT, None), f"missing, the first: {EXPERT}"),
    "glm4_moe-rotary": (
        changed_config(rope_parameters={"rope_theta": 1e6, "rope_type": "default"}),
        "partial_rotary_factor is 0.5, not 1.0",
    ),
    "glm4_moe_air-rotary": (
        changed_config(partial_rotary_factor=1.0, rope_parameters={"rope_theta": 1e6}),
        "is 1.0, not 0.5",
    ),
    "glm4_moe_air-bias": (changed_config(attention_bias=False), "attention_bias is False, not True"),
    "glm4_moe_air-no_weights": (lambda path: (path / ONE_FILE).unlink(), f"it has neither {ONE_FILE} nor"),
    "glm4_moe-norms": (changed_config(use_qk_norm=True), "use_qk_norm is True, not False"),
    "qwen3_moe-not_normalised": (changed_config(norm_topk_prob=False), "norm_topk_prob is False, not True"),
    "deepseek_v3-yarn": (changed_config(rope_scaling=YARN, rope_parameters=None), "rope_type is yarn, not default"),
    "deepseek_v3_yarn-plain": (changed_config(rope_parameters={"rope_theta": 1e2}), "rope_type is default, not yarn"),
    "deepseek_v3_yarn-factor": (changed_config(rope_parameters=YARN | {"factor": 8.0}), "rope factor is 8.0, not 4.0"),
    "deepseek_v3_yarn-start": (
        changed_config(rope_parameters=YARN | {"original_max_position_embeddings": 9}),
        "rope original_max_position_embeddings is 9, not 8",
    ),
    "deepseek_v3_yarn-slow": (
        changed_config(rope_parameters={k: v for k, v in YARN.items() if k != "beta_slow"}),
        "rope beta_slow is 1.0, not 0.05",
    ),
    "deepseek_v3_yarn-scale": (changed_config(rope_parameters=YARN | {"mscale": 1.0}), "rope mscale is 1.0, not 0.8"),
    "deepseek_v3_yarn-attention": (
        changed_config(rope_parameters=YARN | {"attention_factor": 1.1}),
        "rope attention_factor is 1.1, not None",
    ),
    "mistral-window": (changed_config(sliding_window=31), "model.window is 31, not None"),
    "ministral_window-full": (
        changed_config(layer_types=["sliding_attention"] * 3 + ["full_attention"]),
        "model.full_every is 4, not 2",
    ),
    "ministral_window-unequal": (
        changed_config(layer_types=["full_attention", "sliding_attention"] + ["full_attention"] * 2),
        "(only layers with full attention at equal distances)",
    ),
    "gemma3-positions": (
        changed_config(rope_parameters=GEMMA_ROPE | {"sliding_attention": {"rope_theta": 51.0}}),
        "model.window_rope_base is 51, not 50",
    ),
    "gemma3-scalar": (changed_config(query_pre_attn_scalar=21), "query_pre_attn_scalar is 21, not 20"),
    "llama3-low": (
        changed_config(rope_parameters=LLAMA3 | {"low_freq_factor": 1.0}),
        "rope low_freq_factor is 1.0, not 0.2",
    ),
    "llama3-plain": (changed_config(rope_parameters={"rope_theta": 1e2}), "rope_type is default, not llama3"),
    "qwen2-bias": (renamed_tensor("model.layers.1.self_attn.k_proj.bias", None), "1 tensors are missing, the first: "),
    "qwen2-llama": (changed_config(model_type="llama"), "model_type is llama, not qwen2"),
    "llama-partial": (changed_config(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5, not 1"),
    "llama-bias": (changed_config(mlp_bias=True), "mlp_bias is True, not False"),
    "llama-head": (changed_config(head_dim=None), "head_dim is 8, not 12"),
    "deepseek_v3-rotary": (changed_config(rope_interleave=False), "rope_interleave is False, not True"),
    "qwen3_tied-head": (renamed_tensor("model.norm.weight", "model.norm.bias"), "the first: model.norm.weight"),
}


DOWN = "model.layers.0.mlp.down_proj.weight"
BAD |= {
    "fp8-no_scale": (renamed_tensor(DOWN + "_scale_inv", None), f"missing, the first: {DOWN}_scale_inv"),
    "fp8-scale": (
        changed_tensor(DOWN + "_scale_inv", lambda t: t[:1].clone()),
        f"{DOWN}_scale_inv is (1, 2) F32, and must be (2, 2) F32",
    ),
    "fp8-not_said": (changed_config(quantization_config=None), "not of this model, the first: model.layers.0."),
    "fp8-other_blocks": (
        changed_config(quantization_config=fp8.CONFIG | {"weight_block_size": [1, 128]}),
        "quantization_config is {'quant",
    ),
}


BAD["ahead-absent"] = (
    lambda path: None,
    "model.mtp_layers=1, and the files do not hold that many prediction modules (config.json names 1, the files hold "
    "0); set model.mtp_layers=0",
)


def bad_head(path: Path) -> None:
    found = load_file(path / ONE_FILE)
    found["lm_head.weight"] = found["model.embed_tokens.weight"] + 1
    save_file(found, path / ONE_FILE, {"format": "pt"})


BAD["qwen3_tied-other_head"] = (bad_head, "lm_head.weight differs from model.embed_tokens.weight")
BAD["qwen3-extra"] = (
    lambda path: save_file(load_file(path / ONE_FILE) | {"x": torch.ones(1)}, path / ONE_FILE, {"format": "pt"}),
    "1 tensors are not of this model, the first: x",
)


def write_in_fp8(path: Path) -> None:
    """A model as DeepSeek-V3 is released: projections in fp8, everything else in bf16 or fp32."""
    path.mkdir()
    tensors = {}
    torch.manual_seed(5)
    for entry in entries(IN_FP8, VOCAB):
        tensors[entry.name] = torch.randn(entry.shape).to(
            torch.float32 if entry.name.endswith("bias") else torch.bfloat16
        )
    save_file(dict(fp8.quantised_bucket(tensors.items())), path / ONE_FILE, {"format": "pt"})
    config = hf_config(IN_FP8, VOCAB) | {"quantization_config": fp8.CONFIG, "torch_dtype": "bfloat16"}
    config.pop("dtype", None)
    (path / "config.json").write_text(json.dumps(config))


def write_in_mxfp4(path: Path) -> None:
    """A model as GPT-OSS is released, and beside it what the tensors in 4 bits are for transformers."""
    transformers_of = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    path.mkdir()
    tensors = released_tensors(IN_MXFP4)
    save_file(tensors, path / ONE_FILE, {"format": "pt"})
    config = hf_config(IN_MXFP4, VOCAB) | {"quantization_config": {"quant_method": "mxfp4"}}
    (path / "config.json").write_text(json.dumps(config))
    names = [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]
    whole = {name: transformers_of(tensors[name + "_blocks"], tensors[name + "_scales"]) for name in names}
    save_file(whole, path.with_suffix(".safetensors"), {"format": "pt"})


@pytest.fixture(scope="module")
def folder(models: dict[str, Any], tokens: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything the jobs read, and what the job of one rank wrote."""
    folder = tmp_path_factory.mktemp("huggingface")
    torch.save(tokens, folder / "tokens.pt")
    for name, model in models.items():
        # One of several files with an index, the others of one.
        model.save_pretrained(folder / name, max_shard_size="30KB" if name == "qwen3_moe_first_dense" else "1GB")
    write_in_fp8(folder / "fp8")
    write_in_mxfp4(folder / "mxfp4")
    shutil.copytree(folder / "deepseek_v3", folder / "ahead")
    for name, (break_it, _) in BAD.items():
        shutil.copytree(folder / name.split("-")[0], folder / "bad" / name)
        break_it(folder / "bad" / name)
    run_ranks(JOB, 1, [str(folder)])
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "report-1-0.pt", weights_only=False)


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest, folder: Path) -> list[dict[Any, Any]]:
    """Of the four ranks, under the first layouts and those that the selected tests are about."""
    tests = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    asked = {*FIRST_LAYOUTS, *(test.callspec.params.get("layout") for test in tests)}
    run_ranks(JOB, 4, [str(folder), *(name for name in LAYOUTS if name in asked)])
    return [torch.load(folder / f"report-4-{rank}.pt", weights_only=False) for rank in range(4)]


def stored(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory, by name."""
    return {name: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}


def flat(buckets: list[list[tuple[str, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    names = [name for bucket in buckets for name, _ in bucket]
    assert len(names) == len(set(names))
    return {name: tensor for bucket in buckets for name, tensor in bucket}


def size_of(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def expert_of(name: str) -> int | None:
    """The routed expert that a tensor belongs to."""
    number = re.search(r"\.experts\.(\d+)\.", name)
    return int(number[1]) if number else None


def of_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if expert_of(name) is not None}


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("name", MODELS)
def test_names_and_shapes_are_those_of_transformers(name: str, report: dict[str, Any], folder: Path) -> None:
    assert report["shapes"][name] == {key: tuple(tensor.shape) for key, tensor in stored(folder / name).items()}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(
    name: str, report: dict[str, Any], models: dict[str, Any], tokens: torch.Tensor
) -> None:
    with torch.no_grad():
        expected = torch.cat([models[name](part[None]).logits[0] for part in tokens.split(SEQUENCES)])
    assert expected.std() > 0.5
    assert (report["logits"][name] - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_an_update_moves_every_weight_as_that_of_transformers(
    name: str, report: dict[str, Any], models: dict[str, Any], tokens: torch.Tensor, folder: Path, tmp_path: Path
) -> None:
    """Each tensor's movement to 1e-4 of its largest; balancing biases have no gradient, and a rule of their own."""
    model = copy.deepcopy(models[name])
    model.get_input_embeddings().padding_idx = None  # Gemma's, token 0, is a token like others here
    parts = [part for part in tokens.split(SEQUENCES) if len(part) > 1]
    losses = [F.cross_entropy(model(part[None]).logits[0, :-1], part[1:], reduction="sum") for part in parts]
    (sum(losses) / sum(len(part) - 1 for part in parts)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= LR * parameter.grad / (parameter.grad.abs() + EPS)
    model.save_pretrained(tmp_path)
    before, expected, found = stored(folder / name), stored(tmp_path), dict(report["updated"][name])
    assert found.keys() == expected.keys()
    assert sum(not torch.equal(expected[key], before[key]) for key in expected) > 0.6 * len(expected)
    for key in expected:
        if not key.endswith("e_score_correction_bias"):
            moved = expected[key] - before[key]
            off = (found[key] - expected[key]).abs().max()
            assert off <= 1e-4 * moved.abs().max() + 3e-7, f"{key}: {off} of {moved.abs().max()}"


@pytest.mark.parametrize("name", MODELS)
def test_what_was_read_is_streamed_bit_for_bit_in_buckets_within_the_budget(
    name: str, report: dict[str, Any], folder: Path
) -> None:
    expected = stored(folder / name)
    for budget, buckets in report["buckets"][name].items():
        assert_same_bits(flat(buckets), expected)
        for bucket in buckets:
            fused = len(bucket) == 2 and bucket[0][0].endswith("q_a_proj.weight")
            assert len(bucket) == 1 or fused or sum(tensor.nbytes for _, tensor in bucket) <= budget
    one_each, some, all_at_once = report["buckets"][name].values()
    assert len(one_each) == len(expected) - sum(key.endswith("q_a_proj.weight") for key in expected)
    assert len(expected) > len(some) > len(all_at_once) == (2 if MODELS[name].moe.experts else 1)


@pytest.mark.parametrize("name", MODELS)
def test_transformers_opens_what_is_written(
    name: str, report: dict[str, Any], models: dict[str, Any], folder: Path
) -> None:
    import transformers

    path = folder / "out" / name
    assert len([*path.glob("*.safetensors")]) > 1
    assert not [*path.parent.glob(".*")]
    opened, said = transformers.AutoModelForCausalLM.from_pretrained(
        path, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(said[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same_bits(opened.state_dict(), models[name].state_dict())
    with torch.no_grad():
        ids = torch.arange(VOCAB)[None]
        torch.testing.assert_close(opened(ids).logits, models[name](ids).logits, atol=1e-5, rtol=1e-5)


def test_weights_are_rounded_to_the_precision_of_the_model(report: dict[str, Any], folder: Path) -> None:
    """All but the balancing bias, which is trained in fp32."""
    expected = {
        name: tensor if name.endswith("bias") else tensor.bfloat16()
        for name, tensor in stored(folder / "deepseek_v3").items()
    }
    assert_same_bits(dict(report["rounded"]), expected)


@pytest.mark.parametrize("name", BAD)
def test_a_directory_of_another_model_is_refused_by_name(name: str, report: dict[str, Any], folder: Path) -> None:
    said = report["bad"][name]
    assert said.startswith(f"{folder / 'bad' / name}: ")
    assert BAD[name][1] in said


def test_frequencies_that_early_folders_store_are_skipped(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "qwen3", tmp_path / "early")
    frequencies = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(2)}
    save_file(stored(folder / "qwen3") | frequencies, tmp_path / "early" / ONE_FILE, {"format": "pt"})
    size = stored(folder / "qwen3")["model.embed_tokens.weight"].shape[0]
    Reader(tmp_path / "early", MODELS["qwen3"], size)


def test_weights_in_fp32_under_another_dtype_are_read_and_said(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As sharded trainers save them."""
    shutil.copytree(folder / "qwen3", tmp_path / "wide")
    weights = stored(folder / "qwen3")
    config = json.loads((tmp_path / "wide" / "config.json").read_text()) | {"dtype": "bfloat16"}
    (tmp_path / "wide" / "config.json").write_text(json.dumps(config))
    wide, halves = ({name: tensor.to(to) for name, tensor in weights.items()} for to in (torch.float32, torch.float16))
    save_file(wide, tmp_path / "wide" / ONE_FILE, {"format": "pt"})
    size = weights["model.embed_tokens.weight"].shape[0]
    reader = Reader(tmp_path / "wide", replace(MODELS["qwen3"], dtype="bf16"), size)
    assert f"{len(weights)} tensors are stored in fp32, and config.json says BF16: they are read" in caplog.text
    norm = reader.part("decoder.final_layernorm.weight", ((0, 4),), torch.bfloat16)
    assert torch.equal(norm, weights["model.norm.weight"][:4].bfloat16())
    save_file(halves, tmp_path / "wide" / ONE_FILE, {"format": "pt"})
    with pytest.raises(ValueError, match=r"is F16, and the other tensors, or config\.json, are BF16; write"):
        Reader(tmp_path / "wide", replace(MODELS["qwen3"], dtype="bf16"), size)


def test_transformers_names_a_prediction_module_that_it_does_not_write(folder: Path) -> None:
    """What makes the tests of reading and of ahead-absent worth something."""
    assert json.loads((folder / "deepseek_v3" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert not [name for name in stored(folder / "deepseek_v3") if name.startswith("model.layers.4.")]


def test_modules_that_would_be_dropped_are_refused(report: dict[str, Any]) -> None:
    assert report["unwanted"].endswith(
        "the files hold 1 prediction modules (num_nextn_predict_layers), and model.mtp_layers=0; set model.mtp_layers=1"
    )


@pytest.mark.parametrize("name", AHEAD)
def test_modules_that_look_ahead_are_those_of_transformers(
    name: str, report: dict[str, Any], folder: Path, tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers
    from transformers import modeling_layers

    if not hasattr(modeling_layers, "MtpModel"):
        pytest.skip("this transformers has no multi-token prediction")
    # It knows these modules by the layer number of the released model, 61.
    pattern = rf"model\.layers\.{AHEAD[name].layers}\..*"
    monkeypatch.setattr(
        getattr(transformers, family_of(AHEAD[name]).architecture), "_keys_to_ignore_on_load_unexpected", [pattern]
    )
    main = transformers.AutoModelForCausalLM.from_pretrained(folder / name, attn_implementation="eager")
    ahead = modeling_layers.MtpModel.from_pretrained(main)
    expected = []
    with torch.no_grad():
        for part in tokens.split(SEQUENCES):
            hidden, positions = main.model(part[None]).last_hidden_state, torch.arange(len(part))[None]
            mask = torch.full((1, 1, len(part), len(part)), float("-inf")).triu(1)
            embedded = main.model.embed_tokens(part.roll(-1))[None]
            angles = main.model.rotary_emb(hidden, positions)
            expected.append(main.lm_head(ahead.layers[0](embedded, hidden, angles, mask, positions, None))[0])
    logits = torch.cat(expected)
    assert logits.std() > 0.5
    assert (report["ahead"][name] - logits).abs().max() < 1e-5 * logits.abs().max()


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_every_layout_streams_the_same_bits_on_every_rank(
    layout: str, reports: list[dict[Any, Any]], folder: Path
) -> None:
    names = {key[0] for key in reports[0] if key[1] == layout}
    assert names >= {"qwen3_moe", "deepseek_v3", "mtp"} | ({"gpt_oss"} if LAYOUTS[layout].etp == 1 else set())
    for name in names:
        expected = stored(folder / name)
        streams = [report[name, layout]["all"] for report in reports]
        for buckets, traffic in streams:
            assert_same_bits(flat(buckets), expected)
            assert list(flat(buckets)) == list(flat(streams[0][0]))
            assert traffic.tensors == len(expected)
            assert traffic.bytes == size_of(expected)


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_a_rank_gets_the_experts_that_it_asks_for(layout: str, reports: list[dict[Any, Any]], folder: Path) -> None:
    for name in BY_EXPERT:
        expected = stored(folder / name)
        for rank, report in enumerate(reports):
            for asked, numbers in (("mine", range(2 * rank, 2 * rank + 2)), ("uneven", range(rank, 2 * rank))):
                mine = {key: tensor for key, tensor in expected.items() if expert_of(key) in (None, *numbers)}
                assert_same_bits(flat(report[name, layout][asked][0]), mine)
        for asked in ("mine", "uneven"):
            assert len({len(report[name, layout][asked][0]) for report in reports}) == 1, "so many pushes have to meet"


def test_experts_that_nobody_else_asks_for_do_not_travel(reports: list[dict[Any, Any]], folder: Path) -> None:
    """Of eight experts every rank holds two under EP4, and asks for these."""
    expected = stored(folder / "deepseek_v3")
    routed = size_of(of_experts(expected))
    for report in reports:
        everything, mine = (report["deepseek_v3", "tp2_ep4"][asked][1] for asked in ("all", "mine"))
        assert everything.received_bytes - mine.received_bytes == routed * 3 // 4
        assert everything.sent_bytes - mine.sent_bytes == routed // 4
        assert everything.bytes - mine.bytes == routed * 3 // 4


def test_parameters_with_a_copy_travel_once(reports: list[dict[Any, Any]], folder: Path) -> None:
    """TP2 x PP2 is one replica, but with ETP1 two sets of experts: its ranks send the one once, the other twice."""
    for name in ("qwen3_tied", "mtp"):
        sent = sum(report[name, "tp2_pp2"]["all"][1].sent_bytes for report in reports)
        expected = stored(folder / name)
        assert sent == size_of(expected) + size_of(of_experts(expected))


def test_a_directory_is_written_under_a_layout(reports: list[dict[Any, Any]], folder: Path) -> None:
    assert_same_bits(stored(folder / "out" / "tp2_pp2"), stored(folder / "mtp"))


def test_bad_arguments_end_all_ranks(report: dict[str, Any], reports: list[dict[Any, Any]], folder: Path) -> None:
    there, not_a_folder = report["refused"]
    assert there.startswith(f"{folder / 'mtp'}: exists; ")
    assert not_a_folder.startswith("rank 0: NotADirectoryError:")
    for nothing, differing, experts, missing, unwritten, stacked in (report["refused"] for report in reports):
        assert stacked == f"experts_of={range(2)}: a tensor of this family holds all experts; take all of them"
        assert nothing.startswith("byte_budget=0 on rank 0; choose")
        assert differing.startswith("byte_budget=100")
        assert experts == "experts_of=range(0, 9) on rank 3, but the model has 8 experts"
        assert "config.json is of another model" in missing
        assert unwritten.startswith("rank 0: NotADirectoryError:")


@pytest.mark.parametrize("layout", [layout for layout in EVERY_LAYOUT if LAYOUTS[layout.values[0]].etp == 1])
def test_experts_in_mxfp4_are_read_under_every_layout(layout: str, folder: Path, reports: list[dict[Any, Any]]) -> None:
    """What test_mxfp4.py compares with transformers on one process."""
    stacked = {name: t for name, t in stored(folder / "mxfp4").items() if not name.endswith(("_blocks", "_scales"))}
    whole = load_file(folder / "mxfp4.safetensors")
    assert {name.removesuffix("_blocks") for name in stored(folder / "mxfp4") if name.endswith("_blocks")} == {*whole}
    for of_rank in reports:
        assert_same_bits(flat(of_rank["mxfp4"][layout][0]), {**stacked, **whole})


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_weights_in_fp8_are_multiplied_by_the_scale_of_their_block(
    layout: str, folder: Path, reports: list[dict[Any, Any]]
) -> None:
    """Under every layout, where a shard may begin inside a block."""
    content = stored(folder / "fp8")
    expected = {name: tensor.float() for name, tensor in content.items() if not name.endswith(fp8.SCALE)}
    for name in expected:
        if name + fp8.SCALE in content:
            scale = content[name + fp8.SCALE]
            rows, columns = expected[name].shape
            blown_up = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
            expected[name] = expected[name] * blown_up
    for of_rank in reports:
        assert_same_bits(flat(of_rank["fp8"][layout][0]), expected)

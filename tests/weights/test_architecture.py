"""A config.json read as settings: the inverse of writing one, in the words of transformers 4 and 5."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from composed import composed
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from grpo_mega.platform import start

start()  # before megatron.core is imported

from huggingface_models import AHEAD, MODELS, VOCAB, WRITTEN_AS  # noqa: E402
from test_published_configs import (  # noqa: E402
    GEMMA,
    GLM,
    GLM_AIR,
    GPT_OSS,
    GPT_OSS_120B,
    KIMI_K2,
    PUBLISHED,
    QWEN3_SIZES,
    qwen3,
)

from grpo_mega.config.load import compose_config  # noqa: E402
from grpo_mega.config.schema import Llama3RopeConfig, MLAConfig, ModelConfig, MoEConfig, YarnConfig  # noqa: E402
from grpo_mega.errors import InputError  # noqa: E402
from grpo_mega.models.families import FAMILIES, WITH_OWN_LAYERS, Family, layers_of  # noqa: E402
from grpo_mega.models.families.hf_folder import model_settings, settings_of  # noqa: E402
from grpo_mega.weights.hf_config import differences, hf_config  # noqa: E402

SIZES = st.integers(1, 64)
POSITIVE = st.floats(1e-6, 64)


@st.composite
def dense_models(draw: st.DrawFn) -> ModelConfig:
    """Any Llama, Qwen2 or Qwen3, with plain or stretched rotary positions."""
    low, more = draw(POSITIVE), draw(POSITIVE)
    stretched = Llama3RopeConfig(draw(st.floats(1.5, 64)), draw(SIZES), low, low + more)
    heads, kv_heads, channels = draw(st.integers(1, 8)), draw(st.integers(1, 8)), 2 * draw(SIZES)
    hidden = draw(st.one_of(SIZES, st.just(heads * kv_heads * channels)))
    return ModelConfig(
        layers=draw(SIZES), hidden=hidden, heads=heads * kv_heads, kv_heads=kv_heads,
        head_dim=None if hidden == heads * kv_heads * channels else channels, ffn_hidden=draw(SIZES),
        context=draw(st.integers(1, 10**6)), **draw(st.sampled_from([{}, {"qk_norm": True}, {"qkv_bias": True}])),
        llama3_rope=stretched if draw(st.booleans()) else Llama3RopeConfig(), tie_embeddings=draw(st.booleans()),
        rope_base=draw(st.integers(1, 10**8)), norm_eps=draw(st.floats(1e-12, 0.1)),
        vocab_size=draw(st.integers(1, 300_000)), dtype=draw(st.sampled_from(["fp32", "bf16"])),
    )  # fmt: skip


@st.composite
def qwen3_moe_models(draw: st.DrawFn) -> ModelConfig:
    """Any Qwen3-MoE."""
    dense, experts = replace(draw(dense_models()), qk_norm=True, qkv_bias=False), draw(SIZES)
    moe = MoEConfig(
        experts=experts, top_k=draw(st.integers(1, experts)), ffn_hidden=draw(SIZES), score="softmax",
        first_dense=draw(st.integers(0, dense.layers - 1)), bias_update_rate=0.0,
    )  # fmt: skip
    return replace(dense, moe=moe)


@st.composite
def glm4_moe_models(draw: st.DrawFn) -> ModelConfig:
    """Any GLM-4-MoE."""
    experts = draw(deepseek_models())
    return replace(
        draw(dense_models()), qkv_bias=draw(st.booleans()), moe=experts.moe, mtp_layers=experts.mtp_layers,
        rope_fraction=draw(st.sampled_from([0.25, 0.5, 1.0])),
    )  # fmt: skip


@st.composite
def deepseek_models(draw: st.DrawFn) -> ModelConfig:
    """Any DeepSeek-V3."""
    dense, experts = draw(dense_models()), draw(SIZES)
    groups, group_top_k = draw(st.sampled_from([(0, 0), (2, 1), (4, 2)]))
    top_k = 2 * group_top_k or draw(st.integers(1, experts))
    ffn_hidden, rank = draw(SIZES), draw(st.one_of(st.none(), SIZES))
    moe = MoEConfig(
        experts=4 * experts, top_k=top_k, ffn_hidden=ffn_hidden, shared_ffn_hidden=draw(st.integers(1, 4)) * ffn_hidden,
        first_dense=draw(st.integers(0, dense.layers - 1)), score="sigmoid", bias_update_rate=0.0, frozen_bias=True,
        groups=groups, group_top_k=group_top_k, scaling=draw(POSITIVE),
    )  # fmt: skip
    mla = MLAConfig(rank, draw(SIZES), draw(SIZES), 2 * draw(SIZES), draw(SIZES))
    yarn = YarnConfig(draw(st.floats(1.5, 64)), draw(SIZES), draw(POSITIVE), draw(POSITIVE), draw(POSITIVE))
    return replace(
        dense, kv_heads=dense.heads, head_dim=None, attention="mla", qk_norm=True, qkv_bias=False, mla=mla,
        moe=moe, llama3_rope=Llama3RopeConfig(),
        yarn=yarn if draw(st.booleans()) else YarnConfig(), mtp_layers=draw(st.integers(0, 2)),
    )  # fmt: skip


@st.composite
def windowed_models(draw: st.DrawFn) -> ModelConfig:
    """Any Mistral or Ministral whose window is narrower than its context, or any Gemma 3."""
    dense = replace(draw(dense_models()), qk_norm=False, qkv_bias=False)
    # With one full layer a Ministral has no window but in the layers after it.
    every = draw(st.integers(2, dense.layers)) if dense.layers > 1 and draw(st.booleans()) else 0
    if draw(st.booleans()):
        window = draw(st.integers(1, dense.context))
        return replace(dense, context=dense.context + 1, window=window, full_every=every)
    return replace(
        dense, family="gemma3_text", qk_norm=True, window=draw(SIZES), full_every=every, llama3_rope=Llama3RopeConfig(),
        window_rope_base=draw(SIZES), query_pre_attn_scalar=draw(SIZES),
    )  # fmt: skip


@st.composite
def gpt_oss_models(draw: st.DrawFn) -> ModelConfig:
    """Any GPT-OSS."""
    dense, experts, ffn_hidden = draw(dense_models()), draw(SIZES), draw(SIZES)
    moe = MoEConfig(
        experts=experts, top_k=draw(st.integers(1, experts)), ffn_hidden=ffn_hidden, score="softmax",
        bias_update_rate=0.0,
    )  # fmt: skip
    every = draw(st.integers(0, dense.layers))
    yarn = YarnConfig(
        draw(st.floats(1.5, 64)), draw(SIZES), draw(POSITIVE), draw(POSITIVE), truncate=draw(st.booleans())
    )
    return replace(
        dense, family="gpt_oss", qk_norm=False, qkv_bias=True, llama3_rope=Llama3RopeConfig(), moe=moe,
        ffn_hidden=ffn_hidden, window=draw(SIZES), full_every=every,
        yarn=yarn if draw(st.booleans()) else YarnConfig(),
    )  # fmt: skip


def model_of(found: dict[str, Any]) -> ModelConfig:
    """The model that the settings of a config.json make, with the schema's defaults."""
    merged = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), settings_of(found)))
    assert isinstance(merged, ModelConfig)
    return merged


def as_transformers_5_writes(written: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions under one key, experts and dtype under new ones."""
    found = {key: value for key, value in written.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
    scaling = dict(written["rope_scaling"] or {"rope_type": "default"})
    kind = scaling.pop("type", None) or scaling.pop("rope_type")
    found["rope_parameters"] = {"rope_theta": written["rope_theta"], "rope_type": kind, **scaling}
    if inner := found.pop("rope_local_base_freq", None):  # Gemma's, one for each kind of layer
        windowed = {"rope_theta": inner, "rope_type": "default"}
        found["rope_parameters"] = {"full_attention": found["rope_parameters"], "sliding_attention": windowed}
        found.pop("sliding_window_pattern")
    if "partial_rotary_factor" in found:
        found["rope_parameters"]["partial_rotary_factor"] = found.pop("partial_rotary_factor")
    for old in ("num_experts", "n_routed_experts"):
        if old in found:
            found["num_local_experts"] = found.pop(old)
    return found | {"dtype": written["torch_dtype"]}


@settings(deadline=None, max_examples=60)
@given(
    st.one_of(
        dense_models(), windowed_models(), qwen3_moe_models(), glm4_moe_models(), deepseek_models(), gpt_oss_models()
    )
)
def test_what_is_written_is_read_as_the_same_model(model: ModelConfig) -> None:
    assert model.vocab_size
    written = hf_config(model, model.vocab_size)
    for found in (written, as_transformers_5_writes(written), json.loads(json.dumps(written))):
        assert model_of(found) == model


@pytest.mark.parametrize("name", MODELS)
def test_what_transformers_writes_is_read_as_the_same_model(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    written = hf_config(MODELS[name], VOCAB) | WRITTEN_AS.get(name, {})
    transformers.AutoConfig.for_model(**written).save_pretrained(tmp_path)
    read = model_of(json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 0})
    assert hf_config(replace(read, init_std=MODELS[name].init_std), VOCAB) == hf_config(MODELS[name], VOCAB)


ALSO_NULL = ("head_dim", "partial_rotary_factor", "quantization_config", "rope_scaling", "rope_theta", "torch_dtype")
"""Keys that transformers reads beside those that it writes."""


def all_of(name: str) -> dict[str, Any]:
    """The config.json of a model as a `to_dict` of transformers, which has every key of the family."""
    transformers = pytest.importorskip("transformers")
    written = hf_config(MODELS[name], VOCAB) | WRITTEN_AS.get(name, {}) | {"num_nextn_predict_layers": 0}
    return json.loads(json.dumps(transformers.AutoConfig.for_model(**written).to_dict()))


def as_transformers_reads(found: dict[str, Any]) -> dict[str, Any] | None:
    """What transformers makes of a config.json, None for keys that it drops; None when it refuses it."""
    transformers = pytest.importorskip("transformers")
    kind = transformers.CONFIG_MAPPING[found["model_type"]]
    try:
        return json.loads(json.dumps(kind.from_dict(dict(found)).to_dict()))
    except Exception:  # of many classes
        return None


def read_or_refused(found: dict[str, Any]) -> ModelConfig | str:
    """The model, or why there is none."""
    try:
        return model_of(found)
    except ValueError as error:
        return str(error)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from([*MODELS]), st.data())
def test_a_null_means_what_transformers_takes_it_for(name: str, data: st.DataObject) -> None:
    """Of every key, and of several at once: the absent key's value, or a value of its own, or a refusal."""
    whole = all_of(name)
    keys = data.draw(st.lists(st.sampled_from([*whole.keys() - {"model_type"}, *ALSO_NULL]), min_size=1, max_size=4))
    nulls = whole | dict.fromkeys(keys)
    absent = {key: value for key, value in whole.items() if key not in keys}
    theirs = as_transformers_reads(nulls)
    if theirs is None:
        return
    ours = read_or_refused(nulls)
    if isinstance(ours, ModelConfig):
        assert ours == read_or_refused(theirs | {"num_nextn_predict_layers": 0})
        assert not differences(nulls, ours, VOCAB)
    if theirs == as_transformers_reads(absent):
        assert ours == read_or_refused(absent)


@pytest.mark.parametrize("name", MODELS)
def test_a_config_with_every_null_that_transformers_ignores_is_read(name: str) -> None:
    found = all_of(name)
    expected, read = as_transformers_reads(found), model_of(found)
    for key in sorted({*found, *ALSO_NULL} - {"dtype", "model_type"}):
        if as_transformers_reads(found | {key: None}) == expected:
            found[key] = None
    assert [found[key] for key in ("id2label", "rope_scaling")] == [None, None]
    found |= {"quantization_config": None}  # which transformers keeps, and takes for none
    assert model_of(found) == read
    assert not differences(found, read, VOCAB)


@pytest.mark.parametrize("experiment", PUBLISHED)
def test_a_released_model_is_its_preset(experiment: str) -> None:
    found = PUBLISHED[experiment]
    preset = composed(f"experiment={experiment}").model
    # Experiments shorten the context; the first weights, which a folder has, need no deviation.
    expected = replace(preset, context=found["max_position_embeddings"], init_std=ModelConfig.init_std)
    assert model_of(found) == expected


GLM_AIR_EXPERTS = MoEConfig(
    experts=128, top_k=8, ffn_hidden=1408, shared_ffn_hidden=1408, first_dense=1, bias_update_rate=0.0, frozen_bias=True
)
GLM_AIR_MODEL = ModelConfig(
    layers=46, hidden=4096, heads=96, kv_heads=8, head_dim=128, ffn_hidden=10944, context=131072, qkv_bias=True,
    rope_base=1000000, rope_fraction=0.5, norm_eps=1e-5, vocab_size=151552, dtype="bf16", mtp_layers=1,
    moe=GLM_AIR_EXPERTS,
)  # fmt: skip
RELEASED = {
    "GLM-4.5-Air": (GLM_AIR, GLM_AIR_MODEL),
    "Gemma-3-1B": (GEMMA, ModelConfig(
        layers=26, hidden=1152, heads=4, kv_heads=1, head_dim=256, ffn_hidden=6912, context=32768, qk_norm=True,
        family="gemma3_text", window=512, full_every=6, window_rope_base=10000, rope_base=1000000,
        query_pre_attn_scalar=256, tie_embeddings=True, vocab_size=262144, dtype="bf16",
    )),
    "GLM-4.6": (GLM, replace(
        GLM_AIR_MODEL, layers=92, hidden=5120, ffn_hidden=12288, context=202752, qk_norm=True,
        moe=replace(GLM_AIR_EXPERTS, experts=160, ffn_hidden=1536, shared_ffn_hidden=1536, first_dense=3, scaling=2.5),
    )),
}  # fmt: skip


ON_GPUS = ["experiment=qwen3_30b_a3b", "rollout.engine=embedded", "rollout.sglang.tp=1"]


@pytest.mark.parametrize(("preset", "found"), [("kimi_k2", KIMI_K2), *((name, qwen3(name)) for name in QWEN3_SIZES)])
def test_a_preset_without_an_experiment_is_the_released_model(preset: str, found: dict[str, Any]) -> None:
    model = compose_config([*ON_GPUS, f"model={preset}"], checked=False).model
    released = replace(model, context=found["max_position_embeddings"], init_std=ModelConfig.init_std)
    assert released == model_of(found)
    assert not differences(found, model, found["vocab_size"])
    assert model_of(hf_config(released, found["vocab_size"])) == released


@pytest.mark.parametrize(("preset", "found"), [("gpt_oss_20b", GPT_OSS), ("gpt_oss_120b", GPT_OSS_120B)])
def test_a_released_gpt_oss_is_its_preset(preset: str, found: dict[str, Any]) -> None:
    model = compose_config([*ON_GPUS, f"model={preset}"]).model
    released = replace(model, context=found["max_position_embeddings"], init_std=ModelConfig.init_std)
    assert released == model_of(found)
    assert not differences(found, model, found["vocab_size"])
    (difference,) = differences(found | {"quantization_config": {"quant_method": "gptq"}}, model, found["vocab_size"])
    assert difference.startswith("quantization_config is {'quant_method': 'gptq'}, not None")


def test_gpt_oss_without_rotary_settings_has_the_released_ones() -> None:
    """As transformers has it: those of an empty config.json are stretched."""
    least = {key: value for key, value in GPT_OSS.items() if key not in ("rope_scaling", "rope_theta", "layer_types")}
    assert model_of(least) == model_of(GPT_OSS)


@pytest.mark.parametrize(("found", "model"), RELEASED.values(), ids=RELEASED)
def test_a_released_model_without_preset_is_read(found: dict[str, Any], model: ModelConfig) -> None:
    assert model_of(found) == model
    assert not differences(found, model, found["vocab_size"])


def test_a_config_that_leaves_out_what_is_usual_is_read() -> None:
    least = {
        "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
        "intermediate_size": 96, "max_position_embeddings": 128, "vocab_size": 40,
    }  # fmt: skip
    expected = ModelConfig(
        layers=2, hidden=64, heads=4, kv_heads=4, ffn_hidden=96, context=128, vocab_size=40, rope_base=10000
    )
    assert model_of(least) == expected


def test_half_precision_becomes_bfloat16() -> None:
    assert model_of(PUBLISHED["deepseekmath_7b"] | {"torch_dtype": "float16"}).dtype == "bf16"


def folder_of(path: Path, found: dict[str, Any], tensors: list[str]) -> Path:
    """A folder as a program sees it that reads no weights."""
    (path / "config.json").write_text(json.dumps(found))
    if tensors:
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "a")}))
    return path


@pytest.mark.parametrize("model", AHEAD.values(), ids=AHEAD)
@pytest.mark.parametrize(("tensors", "there"), [([], 1), (["model.layers.3.x"], 0), (["model.layers.4.x"], 1)])
def test_prediction_modules_count_when_their_tensors_are_there(
    model: ModelConfig, tensors: list[str], there: int, tmp_path: Path
) -> None:
    """Of DeepSeek-V3 and GLM transformers names one module, and writes none."""
    found = hf_config(model, VOCAB)
    assert model_settings(folder_of(tmp_path, found, tensors))["mtp_layers"] == there


MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "max_position_embeddings": 8192}
UNEQUAL = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
# Family, changed keys -> the key as it stands there, with what it may be.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"attention_bias": True}, "attention_bias=true (only false)"),
    ("llama", {"mlp_bias": True}, "mlp_bias=true (only false)"),
    ("llama", {"hidden_act": "gelu"}, 'hidden_act="gelu" (only "silu")'),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type=linear (only default or llama3)"),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type=yarn (only default or llama3)"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "llama3 without original_max_position_embedd"),
    ("llama", {"rope_theta": 0.5}, "rope_theta=0.5 (only whole numbers)"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 (only 1)"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 (only 1)"),
    ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 (only null)"),
    ("llama", {"torch_dtype": "float8_e4m3fn"}, "weights in float8_e4m3fn (convert them to one of float32, bfloat16"),
    ("llama", {"hidden_size": None}, "no hidden_size"),
    ("llama", {"num_attention_heads": "many"}, 'num_attention_heads="many" (only whole numbers from 1 to 16,777,216)'),
    ("llama", {"num_attention_heads": 0}, "num_attention_heads=0 (only whole numbers from 1 to 16,777,216)"),
    ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 (only whole numbers from 1 to 10,000)"),
    ("llama", {"num_hidden_layers": True}, "num_hidden_layers=true (only whole numbers"),
    ("llama", {"hidden_size": 64.5}, "hidden_size=64.5 (only whole numbers"),
    ("llama", {"rope_theta": float("inf")}, "rope_theta=inf (only finite numbers)"),
    ("llama", {"rope_theta": "10k"}, 'rope_theta="10k" (only numbers)'),
    ("llama", {"rope_theta": [1e4]}, "rope_theta=[10000.0] (only numbers)"),
    ("llama", {"rms_norm_eps": True}, "rms_norm_eps=true (only numbers)"),
    ("llama", {"tie_word_embeddings": "yes"}, 'tie_word_embeddings="yes" (only true or false)'),
    ("llama", {"rope_scaling": "llama3"}, 'rope_scaling="llama3" (only an object)'),
    ("deepseek_v3_yarn", {"rope_scaling": {"type": "yarn", "factor": "4"}}, 'factor="4" (only numbers)'),
    ("gemma3", {"rope_local_base_freq": "10k"}, 'rope_local_base_freq="10k" (only numbers)'),
    ("gemma3", {"rope_parameters": {"full_attention": {"rope_theta": "x"}}}, 'rope_theta="x" (only numbers)'),
    ("llama", {"torch_dtype": ["bfloat16"]}, "TypeError"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": float("nan")}}, "factor=nan (only finite numbers)"),
    ("ministral_window", {"layer_types": UNEQUAL}, "(only layers with full attention at equal distances)"),
    ("gemma3", {"layer_types": ["full_attention"] * 4}, "(only layers with full attention at equal distances)"),
    ("gemma3", {"hidden_activation": "silu"}, 'hidden_activation="silu" (only "gelu_pytorch_tanh")'),
    ("gemma3", {"rope_local_base_freq": 0.5}, "rope_theta=0.5 in layers with a window (only whole numbers)"),
    ("gemma3", {"sliding_window": None}, "sliding_window=null (only a number)"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=true (only false)"),
    ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "rope_type=linear (only default)"),
    ("gemma3", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type=llama3 (only default)"),
    (
        "gemma3",
        {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "yarn"}}},
        "rope_type=yarn in layers with a window (only default)",
    ),
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window=true (only false)"),
    ("qwen3", {"head_dim": None}, "no head_dim"),
    ("qwen3", {"use_sliding_window": True}, "use_sliding_window=true (only false)"),
    ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob=false (only true)"),
    ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers=[1] (only the first layers)"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2 (only 1)"),
    ("glm4_moe", {"n_shared_experts": None}, "n_shared_experts=0 (only 1 or more)"),
    ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob=false (only true)"),
    ("deepseek_v3", {"n_shared_experts": None}, "n_shared_experts=0 (only 1 or more)"),
    ("deepseek_v3", {"scoring_func": "softmax"}, 'scoring_func="softmax" (only "sigmoid")'),
    ("deepseek_v3", {"rope_scaling": {"rope_type": "llama3"}}, "rope_type=llama3 (only default or yarn)"),
    ("deepseek_v3_yarn", {"rope_scaling": {"type": "yarn", "factor": 4}}, "yarn without original_max_position_embedd"),
    ("deepseek_v3_yarn", {"rope_scaling": GPT_OSS["rope_scaling"]}, "attention_factor or truncate=false in yarn"),
    ("gpt_oss", {"attention_bias": False}, "attention_bias=false (only true)"),
    ("gpt_oss", {"swiglu_limit": 10.0}, "swiglu_limit=10.0 (only 7.0)"),
    ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha=1.0 (only 1.702)"),
    ("gpt_oss", {"sliding_window": None}, "sliding_window=null (only a number)"),
    ("gpt_oss", {"layer_types": UNEQUAL}, "(only layers with full attention at equal distances)"),
    ("gpt_oss", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type=llama3 (only default or yarn)"),
    ("gpt_oss", {"rope_scaling": GPT_OSS["rope_scaling"] | {"mscale": 1.0}}, "mscale=1.0 in yarn (only null"),
    ("gpt_oss", {"rope_scaling": GPT_OSS["rope_scaling"] | {"attention_factor": 2.0}}, "attention_factor=2.0 in yarn"),
]


@pytest.mark.parametrize(("name", "change", "what"), REFUSED, ids=[what[:40] for *_, what in REFUSED])
def test_what_no_family_expresses_is_named_with_what_it_may_be(
    name: str, change: dict[str, Any], what: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, hf_config(MODELS[name], VOCAB) | change, [])
    with pytest.raises(InputError) as refused:
        model_settings(folder)
    assert refused.value.where == f"{folder}/config.json"
    assert what in refused.value.what


UNKNOWN: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gemma2"}, "model_type=gemma2"),
    ({"model_type": "qwen2_moe"}, "model_type=qwen2_moe"),
    ({"model_type": "gemma3", "text_config": "none"}, "model_type=gemma3"),
    ({"model_type": None}, "model_type=None"),
    ({"model_type": ["llama"]}, "model_type=['llama']"),
    ({"architectures": ["LlamaForTokenClassification"]}, "architectures=LlamaForTokenClassification"),
]


@pytest.mark.parametrize(("change", "kind"), UNKNOWN, ids=[kind for _, kind in UNKNOWN])
def test_a_model_that_is_not_supported_is_refused_with_all_that_are(
    change: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, hf_config(MODELS["llama"], VOCAB) | change, [])
    with pytest.raises(InputError) as refused:
        model_settings(folder)
    assert (refused.value.where, refused.value.what) == (f"{folder}/config.json", f"{kind} is not supported")
    listed = ", ".join(f"{name} ({family.architecture})" for name, family in FAMILIES.items())
    assert refused.value.fix == f"supported are {listed}"


def test_the_supported_text_model_of_one_that_sees_pictures_is_named() -> None:
    with pytest.raises(InputError) as refused:
        settings_of({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}})
    assert refused.value.fix.endswith("; save its text model alone, as Gemma3ForCausalLM")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(InputError) as refused:
        model_settings(tmp_path)
    assert refused.value.where == f"{tmp_path}/config.json"


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_a_folder_without_a_readable_config_is_named(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError) as refused:
        model_settings(tmp_path)
    assert refused.value.where == f"{tmp_path}/config.json"


def test_a_window_that_covers_the_sequences_is_none() -> None:
    """Mistral-7B-v0.1 has one of 4,096 tokens; with layers that all see everything there is none."""
    found = hf_config(MODELS["mistral"], VOCAB) | MISTRAL
    assert settings_of(found, longest=4096)["window"] is None
    assert settings_of(found, longest=4097)["window"] == 4096
    assert settings_of(found)["context"] == 8192
    assert settings_of(found | {"sliding_window": None})["window"] is None
    every = found | WRITTEN_AS["ministral"] | {"layer_types": ["full_attention"] * 4, "sliding_window": 3}
    assert (settings_of(every)["window"], settings_of(every)["full_every"]) == (None, 0)


def test_layers_of_gemma_keep_a_window_that_covers_the_sequences() -> None:
    """Their positions are others."""
    found = hf_config(MODELS["gemma3"], VOCAB)
    assert settings_of(found, longest=3)["window"] == 6
    before = {key: value for key, value in found.items() if key != "layer_types"}
    assert model_of(before) == model_of(found)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_family_with_layers_of_its_own_names_them(family: Family) -> None:
    """Otherwise its models would be read as Llamas; fields that config.json has exist."""
    assert family.always.get("family") == (family.name if family.name in WITH_OWN_LAYERS else None)
    assert family.layers == layers_of(family.always.get("family"))
    for field in family.fields.values():
        attrgetter(field)(ModelConfig(vocab_size=1))
    assert family.same_as is None or FAMILIES[family.same_as].layers == family.layers

"""Settings of a model read from a Hugging Face folder.

Neither torch nor transformers is imported: jobs are checked on machines without them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_mega.models.families import FAMILIES, Family
from grpo_mega.models.families.config_json import (
    RENAMED,
    ROPE,
    YARN_ASSUMED,
    family_in,
    full_every,
    inner_rope,
    is_mxfp4,
    rope,
    rope_fields,
    said,
    windows,
)
from grpo_mega.models.families.unsupported import why_not

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "bf16"}
_MAY_BE_NULL = {"q_lora_rank", "sliding_window"}
_NO_SIZES = {
    "rms_norm_eps", "tie_word_embeddings", "routed_scaling_factor", "use_qk_norm", "attention_bias",
    "query_pre_attn_scalar",
}  # fmt: skip
"""Keys with values of other kinds."""
_AT_LEAST_ONE = {
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "max_position_embeddings",
}  # fmt: skip
MOST_SIZE = 1 << 24
"""Largest size, in channels, heads or experts, that is believed; 60 times the largest of today."""
_MOST = {"num_hidden_layers": 10_000, "num_nextn_predict_layers": 1000, "max_position_embeddings": 1 << 31}
_NEVER = {
    "attn_logit_softcapping": "attention logits are not capped here",
    "final_logit_softcapping": "logits are not capped here",
}
_WHY = {
    "attention_bias": "projections of attention have no bias here",
    "hidden_act": "feed-forward layers are SwiGLU here",
    "hidden_activation": "feed-forward layers of Gemma are GeGLU in its tanh form here",
    "mlp_bias": "feed-forward layers have no bias here",
    "norm_topk_prob": "weights of the chosen experts are divided by their sum here, except that of a single one",
    "rope_interleave": "rotary channels of DeepSeek's weights are in pairs",
    "use_bidirectional_attention": "no token sees those after it here",
    "use_sliding_window": "models of this family have no windows here",
}


def on_hub(path: str | Path, is_data: bool = False) -> str:
    """The command that downloads what may be a name on the Hugging Face Hub, as the end of a message; else empty."""
    name = str(path)
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) or ".json" in name or Path(name).parent.exists():
        return ""
    room, kind = ("data", " --repo-type dataset") if is_data else ("models", "")
    folder = f"{room}/{name.partition('/')[2]}"
    return (
        f"; if it is a name on the Hugging Face Hub: `hf download {name}{kind} --local-dir {folder}`, and give {folder}"
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Content of the folder's config.json.

    Raises:
        ValueError: The file is missing or not a JSON object; names the file.
    """
    file = folder / "config.json"
    if file.exists() and not file.is_file():  # reading a pipe would wait for its writer
        raise ValueError(f"{file} is not a regular file")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}{on_hub(folder)}") from error
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds no JSON object")
    return found


def model_settings(folder: Path, longest: int | None = None) -> dict[str, Any]:
    """The folder's architecture as nested settings of `ModelConfig`; fields without a key in it are left out.

    `context` is the longest sequence that the model supports, at most `longest` if given; `mtp_layers` counts the
    prediction modules whose tensors exist.

    Raises:
        ValueError: The family is not supported, or the model has features that the family lacks here; names the file,
            and every key with its reason.
    """
    found = read_config(folder)
    try:
        settings = settings_of(found, longest)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from None
    except (TypeError, AttributeError, KeyError) as error:  # e.g. text in place of a number
        raise ValueError(f"{folder / 'config.json'}: {type(error).__name__}: {error}") from error
    if settings.get("mtp_layers"):
        settings["mtp_layers"] = stored_predictors(folder, found)
    return settings


def settings_of(found: dict[str, Any], longest: int | None = None) -> dict[str, Any]:
    """Settings expressed by the content of a config.json.

    Raises:
        ValueError: As in `model_settings`, without naming the file.
    """
    family = _supported(found)
    if absurd := [*_not_finite(found), *_no_sizes(found, family)]:
        raise ValueError("; ".join(absurd))
    context = min(found.get("max_position_embeddings") or 0, longest or float("inf"))
    if problems := [*_missing(found, family), *_inexpressible(found, family)]:
        raise ValueError(f"{family.architecture} is supported, but not with {'; '.join(problems)}")
    settings = _nested({field: said(found, key) for key, field in family.fields.items()} | {"context": context})
    balanced = _balanced_experts(found) if family.balanced else {}
    settings = _merged(settings, family.always, _rope_settings(found, family), balanced, family.read(found))
    settings |= windows(found, context) if family.window else {}
    if settings.get("head_dim") == settings["hidden"] / settings["heads"]:
        settings["head_dim"] = None
    dtype = found.get("dtype") or found.get("torch_dtype")  # transformers 5; before
    if is_mxfp4(found) and not dtype:
        dtype = "bfloat16"  # GPT-OSS as released, where the key is missing
    return settings | ({"dtype": _DTYPES[dtype]} if dtype else {})


def stored_predictors(folder: Path, found: dict[str, Any]) -> int:
    """Number of multi-token prediction modules of config.json that have tensors in the folder's files.

    For DeepSeek-V3, transformers names one and writes none. Without files, the number in config.json.
    """
    named, first = said(found, "num_nextn_predict_layers") or 0, found["num_hidden_layers"]
    names = _tensor_names(folder)
    if names is None:
        return named
    return sum(
        any(name.startswith(f"model.layers.{layer}.") for name in names) for layer in range(first, first + named)
    )


def _tensor_names(folder: Path) -> set[str] | None:
    """Names of all tensors, from the index or the header of a single file; None when neither can be read."""
    try:
        if (folder / "model.safetensors.index.json").is_file():
            return {*json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]}
        with (folder / "model.safetensors").open("rb") as file:  # 8 bytes of length, then the header in JSON
            return {*json.loads(file.read(int.from_bytes(file.read(8), "little")))}
    except (OSError, ValueError, KeyError, TypeError):  # reported when weights are read
        return None


def _supported(found: dict[str, Any]) -> Family:
    family, name = family_in(found), str(found.get("model_type"))
    if family:
        named = found.get("architectures") or [family.architecture]
        if named == [family.architecture]:
            return family
        name = ", ".join(map(str, named))
    why = f" ({reason})" if (reason := why_not(name)) else ""
    known = ", ".join(f"{known.name} ({known.architecture})" for known in FAMILIES.values())
    raise ValueError(f"a model of the kind {name} is not supported{why}; supported are {known}")


def _not_finite(found: dict[str, Any]) -> Iterator[str]:
    """Yields numbers that are none, at the top and one level below: JSON in Python may have NaN and Infinity."""
    inner = [child for child in found.values() if isinstance(child, dict)]
    for key, value in [item for each in (found, *inner) for item in each.items()]:
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{key}={value} (a number is expected)"


def _no_sizes(found: dict[str, Any], family: Family) -> Iterator[str]:
    """Yields sizes that no model has, of which memory and time would be without end."""
    for key in sorted(family.fields.keys() - _NO_SIZES):
        value, least = found.get(key, found.get(RENAMED.get(key, key))), int(key in _AT_LEAST_ONE)
        most = _MOST.get(key, MOST_SIZE)
        if value is not None and (type(value) is not int or not least <= value <= most):
            yield f"{key}={json.dumps(value)[:40]} (a whole number from {least} to {most:,} is expected)"


def _missing(found: dict[str, Any], family: Family) -> Iterator[str]:
    groups = {"n_group", "topk_group"} if family.balanced else set()
    keys = {*family.fields, *groups} - _MAY_BE_NULL
    yield from (f"no {key}" for key in sorted(keys) if said(found, key) is None)


def _inexpressible(found: dict[str, Any], family: Family) -> Iterator[str]:
    """Yields what a config.json asks for that no model of the family can have here, with the reason."""
    several = (found.get("num_experts_per_tok") or 0) > 1
    for key, value in (dict(family.fixed) | ({"norm_topk_prob": several} if family.balanced else {})).items():
        if (there := said(found, key)) != value:
            reason = None if value is True and key == "attention_bias" else _WHY.get(key)
            yield f"{key}={json.dumps(there)} ({reason or f'only {json.dumps(value)}'})"
    yield from (f"{key}={found[key]} ({why})" for key, why in _NEVER.items() if found.get(key) is not None)
    yield from family.refused(found)
    if family.window:
        yield from _inexpressible_windows(found, family)
    dtype = found.get("dtype") or found.get("torch_dtype")
    if dtype and dtype not in _DTYPES:
        yield f"weights in {dtype} (convert them to one of {', '.join(_DTYPES)})"
    yield from _inexpressible_rope(rope(found), family)


def _inexpressible_rope(rope: dict[str, Any], family: Family) -> Iterator[str]:
    kind = rope["rope_type"]
    if rope["rope_theta"] != int(rope["rope_theta"]):
        yield f"rope_theta={rope['rope_theta']} (a whole number is expected)"
    if rope["partial_rotary_factor"] != 1 and not family.partly_rotary:
        yield f"partial_rotary_factor={rope['partial_rotary_factor']} (all channels of a head turn here)"
    known = ["default", *family.rope]
    if kind not in known:
        yield f"rope_type={kind} (of this attention only {' and '.join(known)} {'are' if family.rope else 'is'} known)"
        return
    if kind in ROPE:
        fields = rope_fields(kind, family)
        yield from (f"{kind} without {key}" for key in fields if rope.get(key, YARN_ASSUMED.get(key)) is None)
    if family.layers.yarn:
        for key in ("attention_factor", "mscale", "mscale_all_dim"):
            if rope.get(key) is not None:
                yield f"{key}={rope[key]} in yarn (how much larger logits become follows from the factor here)"
    elif kind == "yarn":
        if rope.get("mscale") != rope.get("mscale_all_dim"):
            yield f"mscale={rope.get('mscale')} and mscale_all_dim={rope.get('mscale_all_dim')} (they are equal here)"
        if rope.get("attention_factor") is not None or not rope.get("truncate", True):
            yield "attention_factor or truncate=false in yarn (both follow DeepSeek-V3's here)"


def _inexpressible_windows(found: dict[str, Any], family: Family) -> Iterator[str]:
    try:
        full_every(found)
    except ValueError as error:
        yield str(error)
    inner = inner_rope(found)
    if inner.get("rope_type", "default") != "default":
        yield f"rope_type={inner['rope_type']} in layers with a window (only default is known for these)"
    if inner["rope_theta"] != int(inner["rope_theta"]):
        yield f"rope_theta={inner['rope_theta']} in layers with a window (a whole number is expected)"
    if family.window == "must" and said(found, "sliding_window") is None:
        yield f"sliding_window=null (the layers of {family.architecture} have one)"


def _rope_settings(found: dict[str, Any], family: Family) -> dict[str, Any]:
    positions = rope(found)
    settings: dict[str, Any] = {"rope_base": int(positions["rope_theta"])}
    if family.partly_rotary:
        settings["rope_fraction"] = positions["partial_rotary_factor"]
    if positions["rope_type"] in ROPE:
        kind = positions["rope_type"]
        fields = rope_fields(kind, family).items()
        settings[ROPE[kind][0]] = {field: positions.get(key, YARN_ASSUMED.get(key)) for key, field in fields}
    return settings


def _balanced_experts(found: dict[str, Any]) -> dict[str, Any]:
    """Expert settings that DeepSeek-V3's config.json expresses with other numbers than `MoEConfig`."""
    groups = said(found, "n_group")
    moe = {"shared_ffn_hidden": found["n_shared_experts"] * found["moe_intermediate_size"]}
    return {"moe": moe | ({"groups": groups, "group_top_k": said(found, "topk_group")} if groups > 1 else {})}


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Nests dotted names: {"moe.top_k": 2} becomes {"moe": {"top_k": 2}}."""
    parts: list[dict[str, Any]] = []
    for name, value in flat.items():
        room, _, field = name.rpartition(".")
        parts.append({room: {field: value}} if room else {field: value})
    return _merged(*parts)


def _merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Merges nested dictionaries of settings; later ones take precedence."""
    whole: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            whole[key] = whole.get(key, {}) | value if isinstance(value, dict) else value
    return whole

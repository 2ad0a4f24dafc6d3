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

from grpo_mega.errors import InputError, instead_of
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
from grpo_mega.models.families.family import COUNTS, FLAGS, MAY_BE_NULL, NUMBERS

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "bf16"}
_NUMBERS = {
    "rope_theta", "rope_local_base_freq", "partial_rotary_factor", "factor", "original_max_position_embeddings",
    "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor", "attention_factor",
}  # fmt: skip
"""Numbers of rotary positions, at any depth; `Family.fields` has the other keys."""
_OBJECTS = {"rope_parameters", "rope_scaling"}
MOST_SIZE = 1 << 24
"""Largest size, in channels, heads or experts, that is believed; 60 times the largest of today."""
_MOST = {"num_hidden_layers": 10_000, "num_nextn_predict_layers": 1000, "max_position_embeddings": 1 << 31}
_NEVER = ("attn_logit_softcapping", "final_logit_softcapping")
"""Keys that must be missing or null."""


_FOLDERS = {"runs", "models", "data", "imported", "exports", "checkpoints"}


def on_hub(path: str | Path, is_data: bool = False) -> str:
    """The command that downloads what may be a name on the Hugging Face Hub, as the end of a message; else empty."""
    name = str(path)
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) or ".json" in name or Path(name).parent.exists():
        return ""
    parent, kind = ("data", " --repo-type dataset") if is_data else ("models", "")
    owner, _, last = name.partition("/")
    # The folder of a download, and the others here, are no owners; nor has a data set the name of a file.
    if owner in _FOLDERS - {parent} or Path(name).suffix[1:] in ("parquet", "arrow", "csv", "gz"):
        return ""
    named, folder = name if owner != parent else f"OWNER/{last}", f"{parent}/{last}"
    command = f"hf download {named}{kind} --local-dir {folder}"
    return f"; if it is on the Hugging Face Hub: `{command}`, then use {folder}"


def missing(name: str, path: str | Path, is_data: bool = False) -> InputError:
    """The error about a setting whose path does not exist."""
    fix = f"create it, or give {name} another path{on_hub(path, is_data)}"
    return InputError(f"{name}={path}", f"does not exist{instead_of(path)}", fix)


def read_config(folder: Path) -> dict[str, Any]:
    """Content of the folder's config.json.

    Raises:
        InputError: The file is missing or not a JSON object; names the file.
    """
    file, again = folder / "config.json", "download the folder again, or choose another"
    # Opening a pipe would block until something writes to it.
    if file.exists() and not file.is_file():
        raise InputError(str(file), "not a regular file", again)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        command = on_hub(folder).removeprefix("; ") or "choose a folder with a model"
        raise InputError(str(file), f"cannot be read: {error.strerror}", command) from error
    except ValueError as error:
        raise InputError(str(file), f"not JSON: {error}", again) from error
    if not isinstance(config, dict):
        raise InputError(str(file), "not a JSON object", again)
    return config


def model_settings(folder: Path, longest: int | None = None) -> dict[str, Any]:
    """The folder's architecture as nested settings of `ModelConfig`; fields without a key in it are left out.

    `context` is the longest sequence that the model supports, at most `longest` if given; `mtp_layers` counts the
    prediction modules whose tensors exist.

    Raises:
        InputError: The family is not supported, or the model has features that the family lacks here; names the file,
            and every key with its reason.
    """
    found, file = read_config(folder), str(folder / "config.json")
    try:
        settings = settings_of(found, longest, file)
    except InputError:
        raise
    except (TypeError, AttributeError, KeyError, ValueError) as error:  # e.g. a list in place of text
        raise InputError(
            file, f"{type(error).__name__}: {error}", "correct the file, or choose another model"
        ) from error
    if settings.get("mtp_layers"):
        settings["mtp_layers"] = stored_predictors(folder, found)
    return settings


def settings_of(found: dict[str, Any], longest: int | None = None, file: str = "config.json") -> dict[str, Any]:
    """Settings expressed by the content of a config.json; errors name it as `file`.

    Raises:
        InputError: As in `model_settings`.
    """
    family = _supported(found, file)
    # Impossible values are refused first, because the checks below compute with them.
    if absurd := [*_of_wrong_kind(found), *_impossible(found, family)]:
        raise InputError(file, "; ".join(absurd), "correct the file, or download it again")
    context = min(found.get("max_position_embeddings") or 0, longest or float("inf"))
    keys = {key for key, field in family.fields.items() if field not in MAY_BE_NULL}
    keys |= {"n_group", "topk_group"} if family.balanced else set()
    missing = [f"no {key}" for key in sorted(keys) if said(found, key) is None]
    if problems := [*missing, *_inexpressible(found, family)]:
        what = f"{family.architecture} is supported, but not with {'; '.join(problems)}"
        raise InputError(file, what, "correct the file, or choose another model")
    # From here on the configuration is known to be expressible. Later parts take precedence.
    settings = _nested({field: said(found, key) for key, field in family.fields.items()} | {"context": context})
    balanced: dict[str, Any] = {}
    if family.balanced:
        # DeepSeek-V3's config.json has these settings of experts in other numbers than `MoEConfig`.
        groups = said(found, "n_group")
        moe = {"shared_ffn_hidden": found["n_shared_experts"] * found["moe_intermediate_size"]}
        balanced = {"moe": moe | ({"groups": groups, "group_top_k": said(found, "topk_group")} if groups > 1 else {})}
    settings = _merged(settings, family.always, _rope_settings(found, family), balanced, family.read(found))
    settings |= windows(found, context) if family.window else {}
    if settings.get("head_dim") == settings["hidden"] / settings["heads"]:
        settings["head_dim"] = None
    # transformers 5 writes `dtype`, earlier versions `torch_dtype`. GPT-OSS was released without either.
    dtype = found.get("dtype") or found.get("torch_dtype")
    if is_mxfp4(found) and not dtype:
        dtype = "bfloat16"
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
        # A safetensors file begins with the length of its header, in 8 bytes, and the header, in JSON.
        with (folder / "model.safetensors").open("rb") as file:
            return {*json.loads(file.read(int.from_bytes(file.read(8), "little")))}
    except (OSError, ValueError, KeyError, TypeError):
        # The same files are opened again, and errors reported, when the weights are read.
        return None


def _supported(found: dict[str, Any], file: str) -> Family:
    """The family of a config.json.

    Raises:
        InputError: It is not supported; names those that are, and the supported model inside, if there is one.
    """
    family, kind = family_in(found), f"model_type={found.get('model_type')}"
    if family:
        named = found.get("architectures") or [family.architecture]
        if named == [family.architecture]:
            return family
        kind = f"architectures={', '.join(map(str, named))}"
    fix = "supported are " + ", ".join(f"{known.name} ({known.architecture})" for known in FAMILIES.values())
    # Models that also see pictures or hear sound nest a language model's config.json.
    text = found.get("text_config")
    if inner := family_in(text) if isinstance(text, dict) else None:
        fix += f"; save its text model alone, as {inner.architecture}"
    raise InputError(file, f"{kind} is not supported", fix)


def _pairs(found: dict[str, Any], levels: int = 2) -> Iterator[tuple[str, Any]]:
    """Yields keys and values, at the top and as many levels below: what `inner_rope` reads lies on the second."""
    for key, value in found.items():
        yield key, value
        if levels and isinstance(value, dict):
            yield from _pairs(value, levels - 1)


def _of_wrong_kind(found: dict[str, Any]) -> Iterator[str]:
    """Yields values that are not finite, as Python's JSON admits NaN and Infinity, not numbers, or not objects."""
    for key, value in _pairs(found):
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{key}={value} (only finite numbers)"
        elif value is None:
            continue
        elif key in _NUMBERS and type(value) not in (int, float):
            yield f"{key}={json.dumps(value)[:40]} (only numbers)"
        elif key in _OBJECTS and not isinstance(value, dict):
            yield f"{key}={json.dumps(value)[:40]} (only an object)"


def _impossible(found: dict[str, Any], family: Family) -> Iterator[str]:
    """Yields values of another kind than the setting, and sizes that no model has: planning with them would not end."""
    for key, field in sorted(family.fields.items()):
        value = found.get(key, found.get(RENAMED.get(key, key)))
        least, most = int(field not in COUNTS), _MOST.get(key, MOST_SIZE)
        if field in FLAGS:
            fits, known = type(value) is bool, "true or false"
        elif field in NUMBERS:
            fits, known = type(value) in (int, float), "numbers"
        else:
            fits, known = type(value) is int and least <= value <= most, f"whole numbers from {least} to {most:,}"
        if value is not None and not fits:
            yield f"{key}={json.dumps(value)[:40]} (only {known})"


def _inexpressible(found: dict[str, Any], family: Family) -> Iterator[str]:
    """Yields "key=value (only ...)" for what no model of the family can have here, with what it can have."""
    # Megatron normalises the weights of several experts, but not that of a single one.
    several = (found.get("num_experts_per_tok") or 0) > 1
    for key, value in (dict(family.fixed) | ({"norm_topk_prob": several} if family.balanced else {})).items():
        if (stated := said(found, key)) != value:
            yield f"{key}={json.dumps(stated)} (only {json.dumps(value)})"
    yield from (f"{key}={found[key]} (only null)" for key in _NEVER if found.get(key) is not None)
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
        yield f"rope_theta={rope['rope_theta']} (only whole numbers)"
    if rope["partial_rotary_factor"] != 1 and not family.partly_rotary:
        yield f"partial_rotary_factor={rope['partial_rotary_factor']} (only 1)"
    if kind not in (known := ["default", *family.rope]):
        yield f"rope_type={kind} (only {' or '.join(known)})"
        return
    if kind in ROPE:
        fields = rope_fields(kind, family)
        yield from (f"{kind} without {key}" for key in fields if rope.get(key, YARN_ASSUMED.get(key)) is None)
    if family.layers.yarn:
        for key in ("attention_factor", "mscale", "mscale_all_dim"):
            if rope.get(key) is not None:
                yield f"{key}={rope[key]} in yarn (only null: it follows from the factor)"
    elif kind == "yarn":
        if rope.get("mscale") != rope.get("mscale_all_dim"):
            yield f"mscale={rope.get('mscale')} and mscale_all_dim={rope.get('mscale_all_dim')} (only equal ones)"
        if rope.get("attention_factor") is not None or not rope.get("truncate", True):
            yield "attention_factor or truncate=false in yarn (only null and true)"


def _inexpressible_windows(found: dict[str, Any], family: Family) -> Iterator[str]:
    try:
        full_every(found)
    except InputError as error:
        yield f"{error.where} ({error.what})"
    inner = inner_rope(found)
    if inner.get("rope_type", "default") != "default":
        yield f"rope_type={inner['rope_type']} in layers with a window (only default)"
    if inner["rope_theta"] != int(inner["rope_theta"]):
        yield f"rope_theta={inner['rope_theta']} in layers with a window (only whole numbers)"
    if family.window == "must" and said(found, "sliding_window") is None:
        yield "sliding_window=null (only a number)"


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


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Nests dotted names: {"moe.top_k": 2} becomes {"moe": {"top_k": 2}}."""
    parts: list[dict[str, Any]] = []
    for name, value in flat.items():
        section, _, field = name.rpartition(".")
        parts.append({section: {field: value}} if section else {field: value})
    return _merged(*parts)


def _merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Merges nested dictionaries of settings; later ones take precedence."""
    whole: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            whole[key] = whole.get(key, {}) | value if isinstance(value, dict) else value
    return whole

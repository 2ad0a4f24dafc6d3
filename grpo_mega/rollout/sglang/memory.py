"""Memory of an SGLang engine on its GPUs, and its mem_fraction_static next to a trainer.

SGLang's server argument mem_fraction_static is a share of the memory that is free when the engine starts: weights and
KV cache take that much together (`KVCacheConfigurator._profile_available_bytes` in mem_cache/kv_cache_configurator.py),
and the rest is for its CUDA graphs and activations. By default SGLang chooses it as if it were alone on the GPU
(arg_groups/memory_hook.py). Here engines start before the policy is on the GPU (assemble.py), so that default would
leave no room for the memory that an offloaded trainer keeps. `static_bytes` leaves this room; planner and engine both
use it.
"""

from __future__ import annotations

import logging
import math
import re
from typing import Any

from grpo_mega.config.schema import Config, LayoutConfig, LoRAConfig, ModelConfig, SGLangConfig
from grpo_mega.models.body import DTYPES, head_channels
from grpo_mega.rollout.contract import EngineError
from grpo_mega.rollout.sglang.arguments import attention_copies, own_experts, suspends
from grpo_mega.weights import fp8
from grpo_mega.weights.merging import merged_bytes
from grpo_mega.weights.names import NamedTensor, entries
from grpo_mega.weights.stream import plan

logger = logging.getLogger(__name__)

FIXED = 12e9
"""Bytes of CUDA context, workspaces of cuBLAS and Transformer Engine, and buffers of NCCL, of which 7 GB were measured
under TP2 x PP2 x DP2, and 9.5 GB with experts (verl's pull request 6408)."""
SUSPENDED = 6e9
"""Value of `FIXED` while process groups are suspended: NCCL kept 3.5 GB of a Megatron job's (NCCL's pull request
2060)."""
ENGINE_ASLEEP = 4e9
"""Bytes that an inference engine keeps while the trainer has the device."""
MIB = 2**20
PIECES = ((160 * 2**30, 16384), (60 * 2**30, 8192), (0, 4096))
"""(bytes of a GPU, tokens): on larger GPUs SGLang reads prompts in chunks of that length."""
REQUESTS = 512
"""Default of the largest batch for which SGLang captures CUDA graphs."""
LEAST_WORK = (60 * 2**30, 10 * 2**30)
"""(bytes of a GPU, bytes): on larger GPUs SGLang reserves at least that much for its work."""
WHOLE = ("q_a_proj", "kv_a_proj_with_mqa", "gate")
"""Matrices that, like vectors, are replicated on every GPU of an engine."""


def weights(model: ModelConfig, sglang: SGLangConfig, vocab_size: int) -> dict[str, float]:
    """Bytes of an engine's weights on each GPU: {"routed experts", "other weights"}.

    SGLang loads no prediction modules, and holds the up-projection of latent keys and values twice.
    """
    result = {"routed experts": 0.0, "other weights": 0.0}
    for entry, count in _tensors(model, vocab_size)[0]:
        kind = "other weights" if entry.expert is None else "routed experts"
        twice = 2 if ".kv_b_proj." in entry.name else 1
        size = entry.bytes
        # In fp8 each block of the matrix also has a scale, of 4 bytes.
        if sglang.fp8 and fp8.in_fp8(entry.name):
            size = math.prod(entry.shape) * fp8.DTYPE.itemsize + 4 * math.prod(fp8.scale_shape(entry.shape))
        result[kind] += count * twice * size / _gpus(entry, model.kv_heads, sglang)
    return result


_counted: dict[str, tuple[list[tuple[NamedTensor, int]], int]] = {}


def _tensors(model: ModelConfig, vocab_size: int) -> tuple[list[tuple[NamedTensor, int]], int]:
    """What an engine loads: pairs of a tensor and how many are like it, in other layers and experts; and bytes of the
    largest that is pushed, prediction modules included.

    Counted once for a model: the planner asks for engines of many sizes, and a model may have 46,000 tensors.
    """
    key = repr((model, vocab_size))
    if key not in _counted:
        wanted = entries(model, vocab_size)
        alike: dict[Any, tuple[NamedTensor, int]] = {}
        for entry in wanted:
            layer = re.match(r"model\.layers\.(\d+)\.", entry.name)
            # Hugging Face numbers prediction modules as further layers; SGLang is sent them, and keeps none.
            if layer and int(layer[1]) >= model.layers:
                continue
            step = entry.place and entry.place.step
            one = (re.sub(r"\d+", "", entry.name), entry.shape, entry.dtype, entry.expert is None, step)
            first, count = alike.get(one, (entry, 0))
            alike[one] = first, count + 1
        # With a budget of one byte every bucket is one tensor, or one group that must not be separated.
        largest = max(sum(entry.bytes for entry in tensors) for tensors in plan(wanted, byte_budget=1))
        _counted[key] = [*alike.values()], largest
    return _counted[key]


def cache_bytes(model: ModelConfig, sglang: SGLangConfig) -> int:
    """Bytes of KV cache per token on each GPU that holds it.

    Latent attention keeps one vector for all heads (DeepSeek-V2, section 2.1), on all GPUs that share the heads;
    otherwise each GPU has the keys and values of its own heads, at least one.
    """
    channels = model.mla.kv_lora_rank + model.mla.qk_rope_dim
    if model.attention == "gqa":
        channels = 2 * max(1, model.kv_heads // _attention_gpus(sglang)) * head_channels(model)
    in_fp8 = str(sglang.arguments.get("kv_cache_dtype", "auto")).startswith("fp8")
    return model.layers * channels * (1 if in_fp8 else DTYPES[model.dtype].itemsize)


def work(sglang: SGLangConfig, capacity: float) -> float:
    """Bytes for activations, CUDA graphs and collectives while an engine generates, as SGLang itself reserves them.

    1.5 MiB for each token of a prompt chunk, 2 MiB for each request in CUDA graphs, under data parallel attention 3 MiB
    more (4.5 from 301 requests on) for each of them times its ranks, and a GiB for every 8 GPUs
    (arg_groups/memory_hook.py).
    """
    arguments = sglang.arguments
    piece = next(tokens for size, tokens in PIECES if capacity > size)
    given = arguments.get("chunked_prefill_size") or 0
    piece = given if given > 0 else piece
    requests = arguments.get("cuda_graph_max_bs_decode") or REQUESTS
    graphs = 2.0 * requests
    copies = attention_copies(sglang)
    if copies > 1:
        graphs += (4.5 if requests > 300 else 3) * requests * copies
    size, least = LEAST_WORK
    return max(MIB * (512 + 1.5 * piece + graphs + 128 * sglang.tp), least if capacity > size else 0)


def static_bytes(sglang: SGLangConfig, capacity: float) -> float:
    """Bytes for weights and KV cache on a GPU of `capacity` bytes.

    The user's mem_fraction_static of it; otherwise the rest after an offloaded trainer, one bucket of weights and the
    engine's work.
    """
    given = sglang.arguments.get("mem_fraction_static")
    if given is not None:
        return given * capacity
    return capacity - (SUSPENDED if suspends(sglang) else FIXED) - sglang.bucket_bytes - work(sglang, capacity)


def mem_fraction_static(sglang: SGLangConfig, free: float, capacity: float) -> float:
    """mem_fraction_static for an engine that starts with `free` bytes: `static_bytes`, or less to leave room for work.

    When an engine is restarted the trainer's weights may be on the GPU; its cache is smaller then.

    Raises:
        EngineError: Nothing is left for weights and cache.
    """
    planned, left = static_bytes(sglang, capacity), free - work(sglang, capacity)
    if left < planned:
        logger.warning(
            "an SGLang engine starts with %.1f GB of a GPU for weights and KV cache instead of the planned %.1f GB: "
            "the rest is in use, for example by the trainer's weights",
            left / 1e9,
            planned / 1e9,
        )
    # SGLang multiplies the share by the free memory, not by the capacity. Rounded down, so as not to exceed the plan.
    share = math.floor(1000 * min(planned, left) / free) / 1000
    if share <= 0:
        raise EngineError(
            f"{free / 1e9:.1f} of a GPU's {capacity / 1e9:.1f} GB are free, too little for an SGLang engine beside the "
            "trainer; to try nevertheless, set rollout.sglang.arguments.mem_fraction_static"
        )
    return share


def plan_engine(config: Config, vocab_size: int, trainer_weights: float, capacity: float) -> dict[str, Any]:
    """Memory plan of a GPU of `capacity` bytes while weights are pushed, and while the engine generates.

    Args:
        config: The run's configuration.
        vocab_size: Vocabulary size of the model.
        trainer_weights: Bytes of the weights of the fullest pipeline stage.
        capacity: Bytes of a GPU.
    """
    model, sglang = config.model, config.rollout.sglang
    held = weights(model, sglang, vocab_size)
    # Negative where the weights alone do not fit; no token is cached then, and the planner calls the plan unfit.
    cache = static_bytes(sglang, capacity) - sum(held.values())
    caches, per_token = attention_copies(sglang), cache_bytes(model, sglang)
    tokens = max(0, int(cache / per_token)) * caches
    return {
        "hand-over": held
        | {
            "KV cache": 0.0,
            "engine's work": ENGINE_ASLEEP,
            "trainer's weights": trainer_weights,
            "buckets": _under_way(model, config.lora, config.layout, sglang, vocab_size),
            "libraries": FIXED,
        },
        "generation": held
        | {
            "KV cache": cache,
            "engine's work": work(sglang, capacity),
            "trainer's weights": 0.0,
            "buckets": 0.0,
            "libraries": SUSPENDED if suspends(sglang) else FIXED,
        },
        "cache_bytes": per_token,
        "caches": caches,
        "tokens": tokens,
        # Sequences of full length that fit at once. Each lies in one cache, so the rests of the caches do not add up.
        "longest": tokens // caches // model.context * caches,
    }


def _under_way(
    model: ModelConfig, lora: LoRAConfig, layout: LayoutConfig, sglang: SGLangConfig, vocab_size: int
) -> float:
    """Bytes of weights on a GPU while they are pushed: a bucket as it arrives, its tensors, and what the rank sends.

    When every rank gets only its experts, the pipeline stage that holds a layer sends a bucket to every other stage.
    A tensor that is larger than a bucket, such as an embedding, arrives alone. Merging adapters takes more memory.
    """
    bucket = sglang.bucket_bytes
    sent = 0 if own_experts(sglang, model.moe.experts, 0) is None else layout.pp
    _, largest = _tensors(model, vocab_size)
    merged = merged_bytes(model, lora, layout.tp, max(1, sent) * bucket)
    return max((2 + sent) * bucket, 2 * largest) + merged


def _gpus(entry: NamedTensor, kv_heads: int, sglang: SGLangConfig) -> int:
    """Number of GPUs of an engine over which a tensor is split."""
    name = entry.name
    matrix = name.split(".")[-2]
    if len(entry.shape) == 1 or matrix in WHOLE:
        return 1
    # A GPU holds whole experts or a part of each; ep_size decides which, but does not change the number of bytes.
    if entry.expert is not None:
        return sglang.tp
    # With more GPUs than key-value heads, several GPUs hold the same head.
    if matrix in ("k_proj", "v_proj"):
        return min(kv_heads, _attention_gpus(sglang))
    of_attention = ("embed_tokens", *(["lm_head"] if sglang.arguments.get("enable_dp_lm_head") else []))
    if ".self_attn." in name or matrix in of_attention:
        return _attention_gpus(sglang)
    if ".shared_experts." in name:
        return 1 if sglang.arguments.get("moe_a2a_backend", "none") != "none" else sglang.tp
    return (sglang.arguments.get("moe_dense_tp_size") or sglang.tp) if ".mlp." in name else sglang.tp


def _attention_gpus(sglang: SGLangConfig) -> int:
    """Number of GPUs that share the heads of one copy of the attention layers."""
    return max(1, sglang.tp // attention_copies(sglang))

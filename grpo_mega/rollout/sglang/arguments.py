"""What an SGLang engine is started with: server arguments, environment, its model directory, and who owns which expert.

Names of server arguments and what they mean are those of SGLang's ServerArgs, releases 0.5.20 and 0.5.23; what the
installed release does not have `host.py` refuses.
"""

from __future__ import annotations

import json
import os
import random
import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from grpo_mega.config.schema import Config, SGLangConfig
from grpo_mega.platform import Platform, process_groups
from grpo_mega.platform.files import write_atomic
from grpo_mega.rollout.contract import EngineError, Spec
from grpo_mega.rollout.sglang import loader
from grpo_mega.weights import fp8
from grpo_mega.weights.families import hf_config
from grpo_mega.weights.names import entries

ROOM = 8
"""Positions that SGLang keeps free after the longest sequence."""
PORTS, NEIGHBOURS = (20000, 30000), 20
"""Where the parts of an engine meet: SGLang takes some of the ports after the one that it is given."""

NEVER = 7 * 24 * 3600.0
"""SGLang's own limit for a batch that hangs is off: `rollout.sglang.silence_seconds` is the only one."""
ENVIRONMENT = {
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
    "SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0",  # processes of other nodes than the first have to answer us
    "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1",  # else CUDA graphs keep their memory when they are released
    # NCCL would register buffers under captured graphs; these are mapped anew when memory comes back, and a replay that
    # uses the old ones can hang (torch_memory_saver's issue 88). SGLang 0.5.23 sets it too, older ones may not.
    "NCCL_GRAPH_REGISTER": "0",
}
IN_TURNS = {
    "enable_memory_saver": True,
    "disable_prefill_cuda_graph": True,  # SGLang's kind of graphs for prompts is refused beside the memory saver
    "disable_piecewise_cuda_graph": True,  # their name before 0.5.14
}
ON_CPU = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "max_total_tokens": 32768,
}
"""Server arguments that `rollout.sglang.arguments` can replace."""

PLACEMENT: dict[str, Any] = {
    "dwdp_size": 1,
    "elastic_ep_backend": None,
    "enable_eplb": False,
    "ep_join_mode": None,
    "ep_num_redundant_experts": 0,
    "init_expert_location": "trivial",
    "moe_dp_size": 1,
}
"""Server arguments that move or copy experts, with the values that do not."""


def server_arguments(config: Config, platform: Platform, folder: Path, number: int, engines: int) -> dict[str, Any]:
    """Of engine `number` of `engines`: what follows from the run, and what the user adds or replaces."""
    sglang = config.rollout.sglang
    return {
        "model_path": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "dtype": {"fp32": "float32", "bf16": "bfloat16"}[config.model.dtype],
        "tp_size": sglang.tp,
        "base_gpu_id": (platform.device.index or 0) + (sglang.first_gpu or 0),
        "random_seed": config.run.seed * engines + number,
        "log_level": "warning",
        "watchdog_timeout": NEVER,
        **({"enable_return_routed_experts": True} if sglang.routing_replay else {}),
        **(ON_CPU if platform.device.type == "cpu" else IN_TURNS if take_turns(sglang, platform) else {}),
        **sglang.arguments,
        **({} if sglang.transport == "shared" else {"custom_weight_loader": [loader.NAME]}),
    }


def take_turns(sglang: SGLangConfig, platform: Platform) -> bool:
    """Whether trainer and engines share GPUs, so that one has to leave for the other."""
    return platform.device.type == "cuda" and sglang.first_gpu is None


def suspends(sglang: SGLangConfig) -> bool:
    """Whether the trainer's process groups give memory back while engines have the GPUs."""
    return sglang.suspend_process_groups and process_groups.can_suspend()


def check_platform(config: Config, platform: Platform) -> None:
    """Raises a ValueError when the engines cannot be started, or reached, on machines such as this."""
    sglang = config.rollout.sglang
    if platform.device.type == "cpu":
        for name, without in (("first_gpu", "null"), ("fp8", "false")):
            if getattr(sglang, name) not in (None, False):
                raise ValueError(
                    f"rollout.sglang.{name} needs GPUs, and there are none here; give rollout.sglang.{name}={without}"
                )
        return
    if sglang.transport == "network" and sglang.first_gpu is None:
        raise ValueError(
            "rollout.sglang.transport=network: NCCL reaches no engine on the GPU of the trainer itself; set "
            "rollout.sglang.first_gpu to have the engines on others, or rollout.sglang.transport=shared"
        )
    ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if sglang.first_gpu is not None and not ranks <= sglang.first_gpu <= gpus - ranks:
        raise ValueError(
            f"rollout.sglang.first_gpu={sglang.first_gpu}: {ranks} processes here have the first GPUs, their engines "
            f"need {ranks} others, and there are {gpus} in all; choose {ranks} to {gpus - ranks}, or start fewer"
        )


def environment(sglang: SGLangConfig, platform: Platform) -> dict[str, str]:
    """Variables that join those of the trainer."""
    if platform.device.type == "cpu":
        return ENVIRONMENT | {"SGLANG_USE_CPU_ENGINE": "1"}
    if sglang.transport == "network":  # both ends must agree, and SGLang would set 0
        return ENVIRONMENT | {"NCCL_CUMEM_ENABLE": os.environ.get("NCCL_CUMEM_ENABLE", "1")}
    return ENVIRONMENT


def model_config(config: Config, vocab_size: int) -> dict[str, Any]:
    """The engine's config.json. Only the stop tokens that we name end a completion."""
    silent = {"bos_token_id": None, "eos_token_id": None, "max_position_embeddings": config.model.context + ROOM}
    in_fp8 = {"quantization_config": fp8.CONFIG | {"activation_scheme": "dynamic"}} if config.rollout.sglang.fp8 else {}
    return hf_config(config.model, vocab_size) | silent | in_fp8


def expected_weights(config: Config, vocab_size: int, experts: range | None) -> dict[str, Spec]:
    """What is to be pushed, of the routed experts only these: names, shapes and dtypes.

    Raises:
        ValueError: No Hugging Face model describes this one.
    """
    found: dict[str, Spec] = {}
    for entry in entries(config.model, vocab_size):
        if experts is not None and entry.expert is not None and entry.expert not in experts:
            continue
        if config.rollout.sglang.fp8 and fp8.in_fp8(entry.name):
            found[entry.name] = Spec(entry.shape, fp8.DTYPE)
            found[entry.name + fp8.SCALE] = Spec(fp8.scale_shape(entry.shape), torch.float32)
        else:
            found[entry.name] = Spec(entry.shape, entry.dtype)
    return found


def write_model(folder: Path, config: Config, vocab_size: int) -> None:
    """Writes a Hugging Face directory without weights, for an engine to start from."""
    folder.mkdir(exist_ok=True)
    write_atomic(folder / "config.json", json.dumps(model_config(config, vocab_size), indent=1))


def attention_copies(sglang: SGLangConfig) -> int:
    """How many copies of the attention layers an engine has, with a KV cache each: its data parallel attention."""
    given = sglang.arguments
    return given.get("dp_size", 1) if given.get("enable_dp_attention") else given.get("attn_dp_size", 1)


def own_experts(config: Config, place: int) -> range | None:
    """The routed experts that the rank at `place` of an engine keeps; None when it may be any.

    With the server argument ep_size a rank keeps consecutive experts (FusedMoE._map_global_expert_id_to_local_expert_id
    in SGLang), and tp / ep_size consecutive ranks keep the same (SGLang's initialize_model_parallel).
    """
    given, experts, tp = config.rollout.sglang.arguments, config.model.moe.experts, config.rollout.sglang.tp
    ep = given.get("ep_size", 1)
    moved = any(given.get(name, plain) != plain for name, plain in PLACEMENT.items())
    if not experts or ep == 1 or moved or experts % ep or tp % ep:
        return None
    share, number = experts // ep, place // (tp // ep)
    return range(number * share, (number + 1) * share)


def free_address(address: str) -> str:
    """`address`:port, where that port, with those after it, is free on this machine.

    They lie below those that outgoing connections take; another program may still take one before SGLang does.
    """
    for port in random.sample(range(*PORTS, NEIGHBOURS), k=(PORTS[1] - PORTS[0]) // NEIGHBOURS):
        with suppress(OSError), ExitStack() as servers:
            for neighbour in range(port, port + NEIGHBOURS):
                servers.enter_context(socket.create_server(("", neighbour)))
            return f"{address}:{port}"
    raise EngineError(f"no {NEIGHBOURS} neighbouring ports are free between {PORTS[0]} and {PORTS[1]}")


def own_address() -> str:
    """The address of the interface that leads to the job's first node; a host's own name may stand for another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))  # sends nothing
        return probe.getsockname()[0]

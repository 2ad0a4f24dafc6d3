"""What an SGLang engine is started with: server arguments, environment, model directory; also the experts of a rank.

Server arguments have the names and meanings of SGLang's ServerArgs, releases 0.5.20 and 0.5.23; `release.py` refuses
names that the installed release lacks.
"""

from __future__ import annotations

import os
import random
import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from grpo_mega.config.schema import ModelConfig, RolloutConfig, SGLangConfig
from grpo_mega.errors import InputError
from grpo_mega.platform import Platform, process_groups
from grpo_mega.rollout.contract import EngineError, Spec
from grpo_mega.rollout.sglang import loader
from grpo_mega.weights import fp8
from grpo_mega.weights.hf_config import hf_config
from grpo_mega.weights.names import entries

SPARE_POSITIONS = 8
"""Positions that SGLang keeps free after the longest sequence."""
PORTS, NEIGHBOURS = (20000, 30000), 20
"""Range of the ports where the parts of an engine meet, and number of consecutive ports needed: SGLang also uses some
after the one it is given."""

# Referenced until the process ends: closing one of these sockets would offer its ports to another rank.
_claims: list[socket.socket] = []

NEVER = 7 * 24 * 3600.0
"""Seconds after which SGLang's watchdog ends an engine that hangs: in effect never, so that
`rollout.sglang.silence_seconds` is the only limit."""
ENVIRONMENT = {
    # With 1, SGLang would return log-probs before the division by the temperature, and the trainer's are those after.
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
    # Otherwise SGLang blocks in the constructor of `Engine` on all nodes but the first, and their processes never
    # answer the trainer.
    "SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0",
    # Otherwise CUDA graphs keep their memory on release.
    "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1",
    # NCCL would register the buffers of captured graphs; these are mapped again when memory is resumed, and a replay
    # with the old registration can hang (torch_memory_saver's issue 88). SGLang 0.5.23 sets it too, older ones may not.
    "NCCL_GRAPH_REGISTER": "0",
}
EXACT = {"disable_overlap_schedule": True}
"""Disables SGLang's overlapped scheduler, which prepares a batch while the previous one is computed. With it a token
now and then gets a log-prob that is not the policy's, even while the KV cache has room for all.
`tests/rollout/engine_contract.py` found this in 0.5.20 for 4 of two million tokens, by up to 0.3, and for none of two
million without overlap; in 0.5.23 in one run of two. Later checks found no such token in 218,730 with overlap and
177,630 without: too few to tell whether it has become rarer. Without overlap 0.5.23 gave none in 1.7 million; a check
of 43,270 failed once on another machine, by a distance that was not kept."""
ON_SHARED_GPU = {
    "enable_memory_saver": True,
    # SGLang refuses CUDA graphs for prompts together with the memory saver. The second name is the one before 0.5.14;
    # `release.py` leaves out the one that the installed release lacks.
    "disable_prefill_cuda_graph": True,
    "disable_piecewise_cuda_graph": True,
}
ON_CPU = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "max_total_tokens": 32768,
}
"""Default server arguments on a CPU; `rollout.sglang.arguments` can replace them, like those of `ON_SHARED_GPU`."""

EXPERT_PLACEMENT: dict[str, Any] = {
    "dwdp_size": 1,
    "elastic_ep_backend": None,
    "enable_eplb": False,
    "ep_join_mode": None,
    "ep_num_redundant_experts": 0,
    "init_expert_location": "trivial",
    "moe_dp_size": 1,
}
"""Server arguments that can move or copy experts, with the values that prevent it."""


def server_arguments(sglang: SGLangConfig, dtype: str, platform: Platform, folder: Path, seed: int) -> dict[str, Any]:
    """Server arguments of an engine: those derived from the run, and the user's.

    Args:
        sglang: Settings of the engines.
        dtype: `model.dtype`.
        platform: Platform of the trainer.
        folder: The engine's model directory.
        seed: The engine's random seed.
    """
    # Later entries win. The user's arguments may replace all that precede them (`rules/rollout.py` refuses those that
    # follow from settings), but not the loader, without which the transport cannot deliver weights.
    return {
        "model_path": str(folder),
        # The directory has no weights, only a config.json: the engine starts with random ones, which the first push
        # replaces.
        "load_format": "dummy",
        # Requests and answers are token ids.
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "dtype": {"fp32": "float32", "bf16": "bfloat16"}[dtype],
        "tp_size": sglang.tp,
        "base_gpu_id": (platform.device.index or 0) + (sglang.first_gpu or 0),
        "random_seed": seed,
        "log_level": "warning",
        "watchdog_timeout": NEVER,
        **({"enable_return_routed_experts": True} if sglang.routing_replay else {}),
        **EXACT,
        **(ON_CPU if platform.device.type == "cpu" else ON_SHARED_GPU if take_turns(sglang, platform) else {}),
        **sglang.arguments,
        **({} if sglang.transport == "shared" else {"custom_weight_loader": [loader.NAME]}),
    }


def take_turns(sglang: SGLangConfig, platform: Platform) -> bool:
    """Whether trainer and engines share GPUs, so that each must release its memory for the other."""
    return platform.device.type == "cuda" and sglang.first_gpu is None


def suspends(sglang: SGLangConfig) -> bool:
    """Whether the trainer's process groups release their memory while engines use the GPUs."""
    return sglang.suspend_process_groups and process_groups.can_suspend()


def check_platform(rollout: RolloutConfig, platform: Platform) -> None:
    """Raises InputError when the engines cannot be started or reached on this machine, or cannot do what is asked."""
    sglang = rollout.sglang
    if rollout.ahead and take_turns(sglang, platform):
        raise InputError(
            "rollout.ahead=true",
            "the engines cannot generate while the trainer has their GPUs",
            "set rollout.sglang.first_gpu to give the engines other GPUs, or rollout.ahead=false",
        )
    if platform.device.type == "cpu":
        for name, without in (("first_gpu", "null"), ("fp8", "false")):
            if getattr(sglang, name) not in (None, False):
                field = f"rollout.sglang.{name}"
                raise InputError(
                    f"{field}={getattr(sglang, name)}", "this machine has no GPUs", f"set {field}={without}"
                )
        return
    if sglang.transport == "network" and sglang.first_gpu is None:
        raise InputError(
            "rollout.sglang.transport=network",
            "NCCL cannot reach an engine on the trainer's GPU",
            "set rollout.sglang.first_gpu to give the engines other GPUs, or rollout.sglang.transport=shared",
        )
    # Rank i of a node uses GPU i, and its part of an engine GPU first_gpu + i.
    ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if sglang.first_gpu is not None and not ranks <= sglang.first_gpu <= gpus - ranks:
        raise InputError(
            f"rollout.sglang.first_gpu={sglang.first_gpu}",
            f"the {ranks} processes here use the first {ranks} of {gpus} GPUs, and their engines need {ranks} others",
            f"choose {ranks} to {gpus - ranks}, or start fewer processes",
        )


def environment(sglang: SGLangConfig, platform: Platform) -> dict[str, str]:
    """Environment variables of the engine's process, in addition to those of the trainer."""
    if platform.device.type == "cpu":
        return ENVIRONMENT | {"SGLANG_USE_CPU_ENGINE": "1"}
    if sglang.transport == "network":
        # Trainer and engine share an NCCL communicator, whose ends must agree on this; SGLang would set 0 on its own.
        return ENVIRONMENT | {"NCCL_CUMEM_ENABLE": os.environ.get("NCCL_CUMEM_ENABLE", "1")}
    return ENVIRONMENT


def model_config(model: ModelConfig, in_fp8: bool, vocab_size: int) -> dict[str, Any]:
    """Content of the engine's config.json, without stop tokens, which are part of each request.

    `in_fp8` is `rollout.sglang.fp8`.

    Raises:
        InputError: The model has no Hugging Face equivalent.
    """
    # SGLang ends completions at the eos_token_id of this file as well, and only the tokens of a request should.
    changes = {"bos_token_id": None, "eos_token_id": None, "max_position_embeddings": model.context + SPARE_POSITIONS}
    quantised = {"quantization_config": fp8.CONFIG | {"activation_scheme": "dynamic"}} if in_fp8 else {}
    return hf_config(model, vocab_size) | changes | quantised


def expected_weights(model: ModelConfig, in_fp8: bool, vocab_size: int, experts: range | None) -> dict[str, Spec]:
    """Shapes and dtypes of the weights to push, by name; of routed experts only those in `experts`, or all for None.

    Raises:
        InputError: The model has no Hugging Face equivalent.
    """
    expected: dict[str, Spec] = {}
    for entry in entries(model, vocab_size):
        if experts is not None and entry.expert is not None and entry.expert not in experts:
            continue
        if in_fp8 and fp8.in_fp8(entry.name):
            expected[entry.name] = Spec(entry.shape, fp8.DTYPE)
            expected[entry.name + fp8.SCALE] = Spec(fp8.scale_shape(entry.shape), torch.float32)
        else:
            expected[entry.name] = Spec(entry.shape, entry.dtype)
    return expected


def attention_copies(sglang: SGLangConfig) -> int:
    """Number of copies of the attention layers in an engine (data parallel attention), each with its own KV cache."""
    given = sglang.arguments
    return given.get("dp_size", 1) if given.get("enable_dp_attention") else given.get("attn_dp_size", 1)


def own_experts(sglang: SGLangConfig, experts: int, engine_rank: int) -> range | None:
    """The part of a model's `experts` that an engine's rank `engine_rank` holds; None for all.

    With the server argument ep_size a rank holds consecutive experts (FusedMoE._map_global_expert_id_to_local_expert_id
    in SGLang), and tp / ep_size consecutive ranks hold the same (SGLang's initialize_model_parallel).
    """
    given, tp = sglang.arguments, sglang.tp
    ep = given.get("ep_size", 1)
    # None is always correct, only slower: a rank that is sent all experts keeps those that SGLang placed on it.
    moved = any(given.get(name, plain) != plain for name, plain in EXPERT_PLACEMENT.items())
    if not experts or ep == 1 or moved or experts % ep or tp % ep:
        return None
    size, part = experts // ep, engine_rank // (tp // ep)
    return range(part * size, (part + 1) * size)


def free_port() -> int:
    """A free port on this machine, followed by `NEIGHBOURS` - 1 free ports.

    The ports are below the range of outgoing connections. No other rank of this machine gets them as long as this
    process lives; another program may still take one before SGLang does.
    """
    # Python's global generator would make the run's random draws depend on how often engines start.
    choice = random.SystemRandom()
    for port in choice.sample(range(*PORTS, NEIGHBOURS), k=(PORTS[1] - PORTS[0]) // NEIGHBOURS):
        claim = socket.socket(socket.AF_UNIX)
        with suppress(OSError), ExitStack() as servers:
            # Only one process of the machine can bind an abstract name, and the kernel frees it when that process
            # dies: unlike a lock file it cannot be left behind. The ports themselves must be free again on return,
            # because SGLang binds them.
            claim.bind(f"\0grpo_mega engine at port {port}")
            for neighbour in range(port, port + NEIGHBOURS):
                servers.enter_context(socket.create_server(("", neighbour)))
            _claims.append(claim)
            return port
        claim.close()
    raise EngineError(f"no {NEIGHBOURS} neighbouring ports are free between {PORTS[0]} and {PORTS[1]}")


def own_address() -> str:
    """Address of the interface that leads to the job's first node; the host name may resolve to another."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a UDP socket sends nothing; it only makes the kernel choose the route.
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        return probe.getsockname()[0]

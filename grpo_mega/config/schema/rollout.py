"""How completions are sampled, and the engines that sample them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from grpo_mega.config.limits import Interval, OneOf


@dataclass
class Timeouts:
    """Seconds that each state of a shared device between training and generating may last before the run ends, inf for
    no limit; see `colocation/lease.py`. Those of the engine also have room for an engine that is given up
    (`answer_seconds`). Engines on GPUs of their own (`first_gpu`) need `engine_loading` only."""

    trainer_acquiring: Annotated[float, Interval("(0, inf]")] = 300.0
    """Weights and optimizer come back from the host."""
    trainer_releasing: Annotated[float, Interval("(0, inf]")] = 300.0
    """Weights and optimizer move to the host; the first time its memory is pinned, some seconds for 10 GB."""
    engine_resuming_weights: Annotated[float, Interval("(0, inf]")] = 600.0
    """Memory for the engine's weights."""
    engine_loading: Annotated[float, Interval("(0, inf]")] = 900.0
    """The engine gets its new weights, all buckets of them; the first time connections are made on the way."""
    engine_resuming_cache: Annotated[float, Interval("(0, inf]")] = 600.0
    """Memory for the engine's KV cache and CUDA graphs."""
    engine_releasing: Annotated[float, Interval("(0, inf]")] = 600.0
    """The engine frees its memory."""


@dataclass
class SGLangConfig:
    """SGLang engines; read when `rollout.engine` is sglang."""

    tp: Annotated[int, Interval("[1, inf)")] = 1
    """Tensor parallel size of an engine: as many consecutive ranks, on one node or several, share it and its work."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further server arguments, by the names of SGLang's ServerArgs, such as
    +rollout.sglang.arguments.mem_fraction_static=0.6 (on a GPU it follows from the plan otherwise, see
    `rollout/sglang/memory.py`); those that the installed release lacks are refused."""
    bucket_bytes: Annotated[int, Interval("[1, inf)")] = 536870912
    """Most bytes of weights in one push; each rank holds two such buckets meanwhile."""
    transport: Annotated[str, OneOf("shared", "network", "disk")] = "shared"
    """How weights reach the engines: shared (memory of the GPU that both are on), network (NCCL, to engines on other
    GPUs; gloo on a CPU), or disk (a model directory in the run directory, written and read for every update, within
    timeouts.engine_loading; where nothing else works). With the server argument ep_size a rank of an engine gets only
    the experts that it keeps."""
    first_gpu: Annotated[int | None, Interval("[1, inf)")] = None
    """The engines are on GPUs of their own on the trainer's nodes, from this number on, one for each process there, and
    trainer and engines stay where they are; null: they are on the trainer's GPUs, and both take turns."""
    suspend_process_groups: bool = True
    """While the engines have the GPUs, the trainer's process groups give back what NCCL keeps for them (gigabytes;
    needs torch 2.12 and NCCL 2.29.7, without which they keep it)."""
    verify_every: Annotated[int, Interval("[1, inf)")] = 20
    """The engines' log-probs of a sequence are compared with the trainer's after the first push of weights, then after
    every `verify_every` pushes."""
    routing_replay: bool = False
    """Training sends each token to the experts that the engine sent it to (R3, Ma et al., 2025, arXiv:2510.11370).
    Every rank keeps 2 bytes for each token of a step, layer with experts and expert chosen: 928 a token of DeepSeek-V3.
    """
    fp8: bool = False
    """The engines compute with weights in 8 bits, E4M3 in blocks of 128 x 128, as DeepSeek-V3 is released: half of the
    memory, and samples from a policy that differs by that rounding (algorithm.correction). Needs model.dtype=bf16."""
    restarts: Annotated[int, Interval("[0, inf)")] = 3
    """How often lost engines are started again before the run ends. On a GPU that trainer and engine share, an engine
    that dies during a push leaves the memory of its bucket allocated."""
    start_seconds: Annotated[float, Interval("(0, inf)")] = 900.0
    """Longest time in which an engine must have started."""
    answer_seconds: Annotated[float, Interval("(0, inf)")] = 300.0
    """Longest time in which an engine must answer a request other than to generate; after it the engine counts as lost.
    A push of weights is one request for each bucket."""
    silence_seconds: Annotated[float, Interval("(0, inf)")] = 900.0
    """Longest time without a new token from an engine that generates; after it the engine counts as lost."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    """Time limits of the states of a shared device."""


@dataclass
class RolloutConfig:
    """How completions are sampled."""

    engine: Annotated[str, OneOf("embedded", "sglang")] = "embedded"
    """embedded (samples from the training weights, no copy of them) or sglang."""

    max_new_tokens: Annotated[int, Interval("[1, inf)")] = 48
    """Longest completion."""
    longer_from_step: Annotated[int | None, Interval("[1, inf)")] = None
    """Step from which on completions may have `longer_max_new_tokens` (DeepSeek-R1-Zero); null for never."""
    longer_max_new_tokens: Annotated[int | None, Interval("[1, inf)")] = None
    """Longest completion from `longer_from_step` on."""
    temperature: Annotated[
        float,
        Interval(
            "[1e-06, 1000000]", "training needs the log-probs of sampled tokens; greedy decoding is for evaluation only"
        ),
    ] = 1.0
    """Logits are divided by it before sampling and in every training log-prob."""
    top_p: Annotated[float, Interval("(0, 1]")] = 1.0
    """Nucleus sampling: smallest set of tokens whose probability reaches this; 1 for all."""
    top_k: Annotated[int, Interval("[0, inf)")] = 0
    """Sample among the k likeliest tokens; 0 for all."""
    stop: list[str] | None = None
    """Tokens that end a completion; null for the model's own: the tokenizer's end of text, and what
    generation_config.json of data.tokenizer and run.init_from names."""
    concurrent_sequences: Annotated[int, Interval("[1, inf)")] = 512
    """Sequences a data parallel replica of the embedded engine generates at once; bounds the key-value cache. Beside
    SGLang's engines it samples for the base model's gate only."""
    sglang: SGLangConfig = field(default_factory=SGLangConfig)

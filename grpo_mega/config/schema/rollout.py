"""Sampling of completions, and the engines that generate them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from grpo_mega.config.limits import Interval, IsSet, OneOf, With


@dataclass
class Timeouts:
    """Time limits, in seconds, of the states in which a shared device changes hands (`colocation/lease.py`); inf for
    none. Those of the engine include the time to give it up (`answer_seconds`). Engines with separate GPUs
    (`first_gpu`) need `engine_loading` only."""

    trainer_acquiring: Annotated[float, Interval("(0, inf]")] = 300.0
    """Weights and optimizer are copied back from the host."""
    trainer_releasing: Annotated[float, Interval("(0, inf]")] = 300.0
    """Weights and optimizer are copied to the host, whose memory is pinned the first time (seconds for 10 GB)."""
    engine_resuming_weights: Annotated[float, Interval("(0, inf]")] = 600.0
    """Memory for the engine's weights is allocated."""
    engine_loading: Annotated[float, Interval("(0, inf]")] = 900.0
    """The engine receives its new weights, all buckets; the first time it also connects."""
    engine_resuming_cache: Annotated[float, Interval("(0, inf]")] = 600.0
    """Memory for the engine's KV cache and CUDA graphs is allocated."""
    engine_releasing: Annotated[float, Interval("(0, inf]")] = 600.0
    """The engine frees its memory."""


@dataclass
class SGLangConfig:
    """SGLang engines."""

    tp: Annotated[int, Interval("[1, inf)")] = 1
    """Tensor parallel size of an engine: so many consecutive ranks share it, on one node or several."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further server arguments, by the names of SGLang's ServerArgs, such as
    rollout.sglang.arguments.mem_fraction_static=0.6 (default on a GPU: from the memory plan, see
    `rollout/sglang/memory.py`); names that the installed release lacks are refused."""
    bucket_bytes: Annotated[int, Interval("[1, inf)")] = 536870912
    """Largest bucket of weights in a push, in bytes; each rank holds two meanwhile."""
    transport: Annotated[str, OneOf("shared", "network", "disk")] = "shared"
    """How weights reach the engines: shared (memory of a common GPU), network (NCCL, to other GPUs; gloo on a CPU), or
    disk (a model directory, written and read at every update within timeouts.engine_loading; works everywhere). With
    the server argument ep_size a rank of an engine gets only its own experts."""
    first_gpu: Annotated[int | None, Interval("[1, inf)")] = None
    """First GPU, on the trainer's nodes, of engines with separate GPUs, one for each process there; trainer and engines
    then keep their memory. null: they share GPUs and take turns."""
    suspend_process_groups: bool = True
    """Release NCCL's memory of the trainer's process groups (gigabytes) while engines use the GPUs; needs torch 2.12
    and NCCL 2.29.7."""
    verify_every: Annotated[int, Interval("[1, inf)")] = 20
    """Pushes of weights between comparisons of the engines' log-probs with the trainer's; the first push is always
    checked."""
    routing_replay: bool = False
    """Training routes each token to the experts that the engine chose (R3, Ma et al., 2025, arXiv:2510.11370). Each
    rank keeps 2 bytes for each token that it computes in a step, or whose sample waits for a later one, MoE layer and
    chosen expert: 928 a token of DeepSeek-V3."""
    fp8: bool = False
    """Engines use fp8 weights (E4M3 in blocks of 128 x 128, as DeepSeek-V3 is released): half the memory, but another
    policy by that rounding (see algorithm.correction). Needs model.dtype=bf16."""
    restarts: Annotated[int, Interval("[0, inf)")] = 3
    """Restarts of lost engines before the run ends. On a shared GPU, an engine that dies during a push leaves the
    memory of its bucket allocated."""
    start_seconds: Annotated[float, Interval("(0, inf)")] = 900.0
    """Time limit for the start of an engine."""
    answer_seconds: Annotated[float, Interval("(0, inf)")] = 300.0
    """Time limit for an engine's answer to any request but "generate", such as each bucket of a push; then it counts as
    lost."""
    silence_seconds: Annotated[float, Interval("(0, inf)")] = 900.0
    """Longest time without a new token from a generating engine; then it counts as lost."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    """Time limits of the states of a shared device."""


@dataclass
class RolloutConfig:
    """Sampling of completions."""

    engine: Annotated[str, OneOf("embedded", "sglang")] = "embedded"
    """embedded (samples from the training weights, without a copy) or sglang."""

    max_new_tokens: Annotated[int, Interval("[1, inf)")] = 48
    """Longest completion, in tokens."""
    longer_from_step: Annotated[int | None, Interval("[1, inf)")] = None
    """First step with the limit `longer_max_new_tokens` (DeepSeek-R1-Zero); null for never."""
    longer_max_new_tokens: Annotated[int | None, Interval("[1, inf)")] = None
    """Longest completion from `longer_from_step` on, in tokens."""
    temperature: Annotated[
        float,
        Interval(
            "[1e-06, 1000000]", "training needs the log-probs of sampled tokens; greedy decoding is for evaluation only"
        ),
    ] = 1.0
    """Sampling temperature, which divides the logits in sampling and in every training log-prob."""
    top_p: Annotated[float, Interval("(0, 1]")] = 1.0
    """Nucleus sampling: smallest set of tokens whose probability reaches this; 1 for all."""
    top_k: Annotated[int, Interval("[0, inf)", "0 samples among all tokens, as -1 elsewhere")] = 0
    """Sample among the k likeliest tokens; 0 for all."""
    stop: list[str] | None = None
    """Tokens that end a completion; null for the model's own: the tokenizer's end of text, and those in
    generation_config.json (else config.json) of data.tokenizer and run.init_from."""
    slice_tokens: Annotated[int | None, Interval("[1, inf)")] = None
    """Most tokens that a slice adds to each sample. Unfinished samples continue in later slices, with the weights of
    that time, so that no step waits for its longest completion; null for whole completions. Half
    the mean length to the mean is a good choice. Needs `algorithm.correction`."""
    in_flight: Annotated[int | None, Interval("[1, inf)"), With("slice_tokens", IsSet())] = None
    """Groups whose samples a slice generates at once; prompts are added up to that many samples. Null for
    `algorithm.prompts_per_step`."""
    reserve: Annotated[int, Interval("[0, inf)"), With("slice_tokens", IsSet())] = 0
    """Further groups, whose samples begin within a slice, each where another has ended (docs/rollout.md)."""
    order: Annotated[str, OneOf("finished", "submitted"), With("slice_tokens", IsSet())] = "finished"
    """Which complete groups a step takes first: finished (short completions train somewhat earlier), or submitted
    (lengths as without slices, but older samples)."""
    ahead: bool = False
    """Generate the next step's completions, or slice, during this step's updates, with the weights before them. Saves
    time with engines on other GPUs (`rollout.sglang.first_gpu`); the embedded engine generates the same before the
    updates. Needs `algorithm.correction`."""
    concurrent_sequences: Annotated[int, Interval("[1, inf)")] = 512
    """Sequences that a data parallel replica of the embedded engine generates at once; bounds the KV cache."""
    sglang: Annotated[SGLangConfig, With("engine", OneOf("sglang"))] = field(default_factory=SGLangConfig)

    @property
    def samples_wait(self) -> bool:
        """Whether samples may wait for a later step than the one in which they began."""
        return self.slice_tokens is not None or self.ahead

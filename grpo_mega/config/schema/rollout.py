"""Sampling of completions, and the engines that generate them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from grpo_mega.config.limits import Interval, IsSet, OneOf, With


@dataclass
class Timeouts:
    """Time limits, in seconds, of the states in which a shared device switches between training and generation; inf for
    none; see `colocation/lease.py`. Those of the engine also allow for an engine that is given up (`answer_seconds`).
    Engines on GPUs of their own (`first_gpu`) need `engine_loading` only."""

    trainer_acquiring: Annotated[float, Interval("(0, inf]")] = 300.0
    """Weights and optimizer are copied back from the host."""
    trainer_releasing: Annotated[float, Interval("(0, inf]")] = 300.0
    """Weights and optimizer are copied to the host; the first time its memory is pinned, which takes some seconds for
    10 GB."""
    engine_resuming_weights: Annotated[float, Interval("(0, inf]")] = 600.0
    """Memory for the engine's weights is allocated."""
    engine_loading: Annotated[float, Interval("(0, inf]")] = 900.0
    """The engine receives its new weights, all buckets; the first time connections are set up as well."""
    engine_resuming_cache: Annotated[float, Interval("(0, inf]")] = 600.0
    """Memory for the engine's KV cache and CUDA graphs is allocated."""
    engine_releasing: Annotated[float, Interval("(0, inf]")] = 600.0
    """The engine frees its memory."""


@dataclass
class SGLangConfig:
    """SGLang engines."""

    tp: Annotated[int, Interval("[1, inf)")] = 1
    """Tensor parallel size of an engine, which is shared by this many consecutive ranks on one node or several."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further server arguments, by the names of SGLang's ServerArgs, such as
    +rollout.sglang.arguments.mem_fraction_static=0.6 (by default derived from the memory plan on a GPU, see
    `rollout/sglang/memory.py`); names that the installed release lacks are refused."""
    bucket_bytes: Annotated[int, Interval("[1, inf)")] = 536870912
    """Largest size of a bucket of weights in a push, in bytes; each rank holds two buckets meanwhile."""
    transport: Annotated[str, OneOf("shared", "network", "disk")] = "shared"
    """Transport of weights to the engines: shared (memory of the GPU that both are on), network (NCCL, to engines on
    other GPUs; gloo on a CPU), or disk (a model directory in the run directory, written and read for every update,
    within timeouts.engine_loading; works everywhere). With the server argument ep_size a rank of an engine gets only
    its own experts."""
    first_gpu: Annotated[int | None, Interval("[1, inf)")] = None
    """First GPU, on the trainer's nodes, of engines on GPUs of their own, one for each process there; trainer and
    engines then keep their memory. null: engines share the trainer's GPUs, and both take turns."""
    suspend_process_groups: bool = True
    """Release NCCL's memory of the trainer's process groups (gigabytes) while the engines use the GPUs; has no effect
    without torch 2.12 and NCCL 2.29.7."""
    verify_every: Annotated[int, Interval("[1, inf)")] = 20
    """Pushes of weights between comparisons of the engines' log-probs of a sequence with the trainer's; the first push
    is always followed by one."""
    routing_replay: bool = False
    """Routing replay: training routes each token to the experts that the engine chose (R3, Ma et al., 2025,
    arXiv:2510.11370). Every rank keeps 2 bytes for each token of a step, MoE layer and chosen expert: 928 a token of
    DeepSeek-V3."""
    fp8: bool = False
    """Engines use fp8 weights (E4M3 in blocks of 128 x 128, as DeepSeek-V3 is released): half the memory, and samples
    from a policy that differs by that rounding (see algorithm.correction). Needs model.dtype=bf16."""
    restarts: Annotated[int, Interval("[0, inf)")] = 3
    """Number of restarts of lost engines before the run ends. On a GPU that trainer and engine share, an engine that
    dies during a push leaves the memory of its bucket allocated."""
    start_seconds: Annotated[float, Interval("(0, inf)")] = 900.0
    """Time limit in seconds for the start of an engine."""
    answer_seconds: Annotated[float, Interval("(0, inf)")] = 300.0
    """Time limit in seconds for an engine's answer to a request other than "generate"; then the engine counts as lost.
    A push of weights is one request for each bucket."""
    silence_seconds: Annotated[float, Interval("(0, inf)")] = 900.0
    """Longest time in seconds without a new token from a generating engine; then the engine counts as lost."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    """Time limits of the states of a shared device."""


@dataclass
class RolloutConfig:
    """Sampling of completions."""

    engine: Annotated[str, OneOf("embedded", "sglang")] = "embedded"
    """Generation engine: embedded (samples from the training weights, without a copy) or sglang."""

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
    """Tokens that end a completion; null for the model's own: the tokenizer's end of text, and what
    generation_config.json of data.tokenizer and run.init_from, or config.json of a folder without it, names."""
    slice_tokens: Annotated[int | None, Interval("[1, inf)")] = None
    """Largest number of tokens that a step samples at a time of each sample. What is unfinished then goes on in later
    steps, under their weights, so that no step waits for its longest answer; null for whole answers. About the mean
    length is a good choice. Needs `algorithm.correction`: a sample's first tokens are of earlier weights."""
    in_flight: Annotated[int | None, Interval("[1, inf)"), With("slice_tokens", IsSet())] = None
    """Number of groups whose samples a slice generates at once: prompts are added as long as the unfinished samples
    stay within those of that many groups. Null for `algorithm.prompts_per_step`."""
    order: Annotated[str, OneOf("finished", "submitted"), With("slice_tokens", IsSet())] = "finished"
    """Order in which steps take complete groups: finished (short answers are trained somewhat earlier than long ones),
    or submitted (every step has the lengths of a run without slices; samples are older)."""
    ahead: bool = False
    """Generate the answers, or the slice, of the next step while the policy is trained, so with the weights before this
    step's updates. Saves time with engines on other GPUs (`rollout.sglang.first_gpu`); the embedded engine generates
    the same before the updates. Needs `algorithm.correction`."""
    concurrent_sequences: Annotated[int, Interval("[1, inf)")] = 512
    """Sequences that a data parallel replica of the embedded engine generates at once; bounds the key-value cache. With
    SGLang, the embedded engine samples only for the base model's gate."""
    sglang: Annotated[SGLangConfig, With("engine", OneOf("sglang"))] = field(default_factory=SGLangConfig)

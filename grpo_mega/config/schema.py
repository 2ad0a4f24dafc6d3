"""The configuration: one dataclass per room, a docstring under every field.

Hydra composes the YAML files of `configs/` into these classes; a field that is not here is refused. Rules that
involve more than one field live in `rules`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class MoEConfig:
    """Mixture of experts. `experts: 0` makes the model dense."""

    experts: int = 0
    """Routed experts per MoE layer; 0 for a dense model."""
    top_k: int = 2
    """Experts each token is sent to."""
    ffn_hidden: int = 64
    """Hidden size of one routed expert."""
    shared_ffn_hidden: int = 0
    """Hidden size of the expert every token visits; 0 for none."""
    first_dense: int = 0
    """How many of the first layers stay dense (DeepSeek-V3: 3)."""
    score: str = "sigmoid"
    """Router scores: sigmoid (DeepSeek-V3) or softmax."""
    bias_update_rate: float = 1e-3
    """Step of the auxiliary-loss-free balancing bias (DeepSeek-V3, section 2.1.2); 0 turns it off. Needs sigmoid."""
    frozen_bias: bool = False
    """Keep the balancing bias as it was loaded; needs bias_update_rate=0."""
    aux_loss_coef: float = 0.0
    """Coefficient of the balance loss within each sequence (DeepSeek-V3, equations 17 to 20: 0.0001)."""
    z_loss_coef: float = 0.0
    """Coefficient of the router's z-loss (ST-MoE, equation 5), which keeps its logits small."""
    groups: int = 0
    """Group-limited routing: number of expert groups; 0 for none."""
    group_top_k: int = 0
    """Group-limited routing: groups a token may use."""
    scaling: float = 1.0
    """Factor on the routed experts' output (DeepSeek-V3: 2.5)."""


@dataclass
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, section 2.1); read when `model.attention` is mla."""

    q_lora_rank: int | None = 32
    """Rank of the compressed query; null for queries that are not compressed (Moonlight)."""
    kv_lora_rank: int = 16
    """Rank of the compressed key and value."""
    qk_head_dim: int = 16
    """Query and key channels per head without position."""
    qk_rope_dim: int = 8
    """Query and key channels per head that carry the rotary position."""
    v_head_dim: int = 16
    """Value channels per head."""


@dataclass
class YarnConfig:
    """YaRN (Peng et al., 2023): rotary positions stretched over a longer context; for latent attention."""

    factor: float = 1.0
    """How many times longer the context has become (DeepSeek-V3: 40); 1 for plain rotary positions."""
    original_context: int = 4096
    """Context of pre-training, in tokens."""
    beta_fast: float = 32.0
    """Channels that turn more often than this within the original context keep their frequency."""
    beta_slow: float = 1.0
    """Channels that turn less often than this are slowed down by `factor`; those in between by less."""
    mscale: float = 1.0
    """Attention logits are multiplied by (0.1 * mscale * ln(factor) + 1)^2; `mscale_all_dim` in DeepSeek's files."""


@dataclass
class ModelConfig:
    """The policy's architecture."""

    layers: int = MISSING
    """Transformer layers."""
    hidden: int = MISSING
    """Hidden size."""
    heads: int = MISSING
    """Attention heads."""
    kv_heads: int = MISSING
    """Key-value heads (grouped-query attention); equal to `heads` for plain multi-head attention."""
    head_dim: int | None = None
    """Channels per head of grouped-query attention (Qwen3: 128); null for hidden / heads."""
    ffn_hidden: int = MISSING
    """Hidden size of a dense SwiGLU feed-forward layer."""
    context: int = MISSING
    """Longest sequence, prompt and completion, in tokens."""
    attention: str = "gqa"
    """gqa or mla."""
    qk_norm: bool = False
    """RMSNorm on queries and keys (Qwen3)."""
    tie_embeddings: bool = False
    """Share input embedding and output weights."""
    rope_base: int = 10000
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-6
    """Epsilon of RMSNorm."""
    init_std: float = 0.02
    """Standard deviation of the initial weights."""
    vocab_size: int | None = None
    """Tokens that the embedding and the output layer know, where those are more than the tokenizer's (released models);
    null for the tokenizer's."""
    vocab_multiple: int = 32
    """Embedding rows are padded up to a multiple of this; padding is never sampled. Same in every layout."""
    dtype: str = "fp32"
    """fp32 or bf16 (with fp32 master weights)."""
    mtp_layers: int = 0
    """Multi-token prediction modules (DeepSeek-V3: 1); 0 for none. They learn to draft the policy's tokens."""
    mtp_loss_coef: float = 0.1
    """Coefficient of their loss, the mean over depths and trained tokens; it moves nothing but these modules, which the
    gradient norm leaves out."""
    moe: MoEConfig = field(default_factory=MoEConfig)
    mla: MLAConfig = field(default_factory=MLAConfig)
    yarn: YarnConfig = field(default_factory=YarnConfig)


@dataclass
class LayoutConfig:
    """How the processes share the model. Data parallelism is what is left: world size / (tp * cp * pp)."""

    tp: int = 1
    """Tensor parallel size."""
    pp: int = 1
    """Pipeline parallel size."""
    vpp: int = 1
    """Pieces of the model on every pipeline rank, interleaved (virtual pipeline); needs pp > 1."""
    first_stage_layers: int | None = None
    """Layers of the first pipeline stage; null for as many as every other stage."""
    last_stage_layers: int | None = None
    """Layers of the last pipeline stage, which also computes the loss (DeepSeek-V3: fewer); null as above."""
    cp: int = 1
    """Context parallel size: ranks that share every sequence."""
    ep: int = 1
    """Expert parallel size: ranks that share one set of experts; etp * ep divides the ranks of a pipeline stage."""
    etp: int = 1
    """Tensor parallel size inside an expert; 1 keeps each expert whole (DeepSeek-V3)."""
    sp: bool = False
    """Sequence parallelism; needs tp > 1, and Megatron requires it for experts and for latent attention with tp > 1."""
    micro_batch_tokens: int = 16384
    """Most tokens in one micro-batch, prompts of a group counted once, context parallel ranks together."""
    recompute: str = "none"
    """What the backward pass computes anew instead of remembering: none, selective (attention) or full (layers)."""


@dataclass
class DataConfig:
    """Where prompts come from."""

    task: str = MISSING
    """chain_sum (generated) or jsonl."""
    tokenizer: str = "chars"
    """chars (built in: digits, operators and tags), or a directory with a Hugging Face tokenizer."""
    template: str = "{prompt}"
    """What a Hugging Face model is given for a problem: a text in which {prompt} stands for it (the token that texts
    begin with is added), or chat for the tokenizer's chat template."""
    parse_special: bool = False
    """Special tokens, such as <|im_end|>, that a problem spells count as such: for problems that hold whole dialogues.
    Otherwise they are text like any other, and only the template writes special tokens."""
    min_terms: int = 3
    """chain_sum: fewest numbers in a sum."""
    max_terms: int = 5
    """chain_sum: most numbers in a sum."""
    validation_size: int = 200
    """Problems for tuning: for chain_sum disjoint from training and test, permutations of the same digits included; for
    jsonl taken off the training file."""
    test_size: int = 400
    """chain_sum: held-out problems for the reported accuracy."""
    train_path: str | None = None
    """jsonl: file of training problems, one {"prompt": ..., "answer": ...} a line, optional "id" and "task"."""
    test_path: str | None = None
    """jsonl: file of held-out problems."""


@dataclass
class RewardTerm:
    """One component of the reward."""

    name: str = MISSING
    """Name in the metrics; also the built-in to use (accuracy, boxed, format) when `function` is not given."""
    weight: float = 1.0
    """Factor in the total reward."""
    function: str | None = None
    """Import path `package.module:function` of `f(sample: Sample) -> float`; replaces the built-in.

    It runs in a process beside each rank, with the rank's working directory, import path and environment (RANK and its
    kin), one sample at a time. Each call gets a copy of its sample, and its own seed, made of run.seed, the term and
    the sample, for the generators of `random`, and of numpy and torch if the function's module imports them: what it
    draws depends on nothing else, not on earlier calls and not on the rank. What it keeps between calls (caches,
    globals, a model loaded at import) is per rank, and lost when a run is continued. Wrong values, exceptions, exits
    and calls that take too long end the run, with the term and the sample named. Processes that it starts are killed
    when the run ends; it must not join process groups of torch.distributed.
    """


@dataclass
class RewardConfig:
    """Rewards and how they add up."""

    terms: list[RewardTerm] = MISSING
    """The total reward is the sum of weight * term."""
    success: str = "accuracy"
    """The term whose mean is reported as accuracy."""
    timeout_seconds: float = 60.0
    """Longest that a call of a term's `function` may take; then the run ends, and says where the function was."""


@dataclass
class AlgorithmConfig:
    """GRPO (DeepSeekMath, equation 3) and its variants."""

    prompts_per_step: int = 32
    """Prompts sampled per step."""
    group_size: int = 8
    """G, samples per prompt; at least 2."""
    groups_without_signal: str = "count"
    """What becomes of groups whose rewards are all equal, so that every advantage is 0. count: their sequences and
    tokens count in the denominators of `aggregation`, and the KL term and an entropy bonus act on them (DeepSeekMath,
    equation 3; Dr. GRPO); with neither they have no gradient and are not computed, so they do not take part in experts'
    balance and prediction modules' loss either. drop: as if never sampled (DAPO, equation 8, without refilling)."""
    advantage_std: str = "sample"
    """Divide group-centred rewards by the group's standard deviation: sample, population, or none (Dr. GRPO)."""
    objective: str = "ppo"
    """ppo: the token's importance ratio is clipped (GRPO, DAPO); gspo: the sequence's (arXiv 2507.18071); cispo: the
    clipped ratio is a constant factor of the log-prob (MiniMax-M1, arXiv 2506.13585)."""
    clip_low: float = 0.2
    """Ratio is clipped from below at 1 - clip_low; 1 or more for no bound, as ratios are positive (DeepSeek-R1: 10)."""
    clip_high: float = 0.2
    """Ratio is clipped from above at 1 + clip_high (DAPO: 0.28, DeepSeek-R1: 10); inf (.inf in a file) for no bound."""
    dual_clip: float | None = None
    """Upper bound c > 1 on the loss of negative advantages (dual-clip PPO); null for none."""
    entropy_coef: float = 0.0
    """The loss falls by this times the entropy of each token's distribution."""
    correction: str = "none"
    """What to do about the ratio c of the trainer's to the engine's probability of a token: none; truncate: the policy
    term is multiplied by min(c, correction_cap) (truncated importance sampling: IMPALA, arXiv 1802.01561; between
    engine and trainer: Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, 2025); mask:
    it is multiplied by c, and a token whose c is above the cap has no loss, but counts in the denominators (the upper
    half of IcePop, arXiv 2510.18855)."""
    correction_cap: float = 2.0
    """See `correction`; at least 1, where engine and trainer agree."""
    kl_coef: float = 0.0
    """Coefficient of the KL term to the reference policy; 0 keeps no reference."""
    kl_estimator: str = "k3"
    """k1, k2 or k3 (Schulman, Approximating KL Divergence)."""
    aggregation: str = "token_mean"
    """sequence_mean (DeepSeekMath), token_mean (DAPO) or constant (Dr. GRPO)."""
    epochs: int = 1
    """Passes over each rollout."""
    mini_batches: int = 1
    """Optimizer updates per pass."""
    reference_refresh: int = 0
    """Copy the policy to the reference every so many steps (DeepSeek-R1: 400); 0 for never."""


@dataclass
class Timeouts:
    """Seconds that each state of a shared device between training and generating may last before the run ends, inf for
    no limit; see `colocation/lease.py`. Those of the engine also have room for an engine that is given up
    (`answer_seconds`). Engines on GPUs of their own (`first_gpu`) need `engine_loading` only."""

    trainer_acquiring: float = 300.0
    """Weights and optimizer come back from the host."""
    trainer_releasing: float = 300.0
    """Weights and optimizer move to the host; the first time its memory is pinned, some seconds for 10 GB."""
    engine_resuming_weights: float = 600.0
    """Memory for the engine's weights."""
    engine_loading: float = 900.0
    """The engine gets its new weights, all buckets of them; the first time connections are made on the way."""
    engine_resuming_cache: float = 600.0
    """Memory for the engine's KV cache and CUDA graphs."""
    engine_releasing: float = 600.0
    """The engine frees its memory."""


@dataclass
class SGLangConfig:
    """SGLang engines; read when `rollout.engine` is sglang."""

    tp: int = 1
    """Tensor parallel size of an engine; so many consecutive ranks, on a node or several, share one and its prompts."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further server arguments, by the names of SGLang's ServerArgs, such as
    +rollout.sglang.arguments.mem_fraction_static=0.6 (on a GPU it follows from the plan otherwise, see
    `rollout/sglang/memory.py`); those that the installed release does not know are refused."""
    bucket_bytes: int = 536870912
    """Most bytes of weights that are pushed at once; each rank holds two such buckets meanwhile."""
    transport: str = "shared"
    """How weights reach the engines: shared (memory of the GPU that both are on), network (NCCL, to engines on other
    GPUs; gloo on a CPU), or disk (a model directory in the run directory, written and read for every update, within
    timeouts.engine_loading; where nothing else works). With the server argument ep_size a rank of an engine gets only
    the experts that it keeps."""
    first_gpu: int | None = None
    """The engines are on GPUs of their own on the trainer's nodes, from this number on, one for each process there, and
    trainer and engines stay where they are; null: they are on the trainer's GPUs, and both take turns."""
    suspend_process_groups: bool = True
    """While the engines have the GPUs, the trainer's process groups give back what NCCL keeps for them (gigabytes;
    needs torch 2.12 and NCCL 2.29.7, without which they keep it)."""
    verify_every: int = 20
    """The engines' log-probs of a sequence are compared with the trainer's after the first push and every so many."""
    routing_replay: bool = False
    """Training sends each token to the experts that the engine sent it to (R3, Ma et al., 2025, arXiv:2510.11370).
    Every rank keeps 2 bytes for each token of a step, layer with experts and expert chosen: 928 a token of DeepSeek-V3.
    """
    fp8: bool = False
    """The engines compute with weights in 8 bits, E4M3 in blocks of 128 x 128, as DeepSeek-V3 is released: half of the
    memory, and samples from a policy that differs by that rounding (algorithm.correction). Needs model.dtype=bf16."""
    restarts: int = 3
    """How often lost engines are started anew before the run gives up. On a GPU that both are on, an engine that dies
    in a push leaves the memory of that bucket lost."""
    start_seconds: float = 900.0
    """Until an engine must be up."""
    answer_seconds: float = 300.0
    """Until an engine must have answered a request other than to generate; then it counts as lost. A push of weights is
    a request for each bucket."""
    silence_seconds: float = 900.0
    """Longest time in which an engine that generates brings no token; then it counts as lost."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    """How long the states of a shared device may last."""


@dataclass
class RolloutConfig:
    """How completions are sampled."""

    engine: str = "embedded"
    """embedded (samples from the training weights, no copy of them) or sglang."""

    max_new_tokens: int = 48
    """Longest completion."""
    longer_from_step: int | None = None
    """Step from which on completions may have `longer_max_new_tokens` (DeepSeek-R1-Zero); null for never."""
    longer_max_new_tokens: int | None = None
    """Longest completion from then on."""
    temperature: float = 1.0
    """Logits are divided by it before sampling and in every training log-prob."""
    top_p: float = 1.0
    """Nucleus sampling: smallest set of tokens whose probability reaches this; 1 for all."""
    top_k: int = 0
    """Sample among the k likeliest tokens; 0 for all."""
    stop: list[str] | None = None
    """Tokens that end a completion; null for the model's own: the tokenizer's end of text, and what
    generation_config.json of data.tokenizer and run.init_from names."""
    concurrent_sequences: int = 512
    """Sequences a data parallel replica of the embedded engine generates at once; bounds the key-value cache. Beside
    SGLang's engines it samples for the base model's gate only."""
    sglang: SGLangConfig = field(default_factory=SGLangConfig)


@dataclass
class OptimizerConfig:
    """AdamW through Megatron's optimizer."""

    lr: float = MISSING
    """Peak learning rate."""
    warmup_steps: int = 0
    """Linear warm-up over so many optimizer updates."""
    beta1: float = 0.9
    """Adam's first moment decay."""
    beta2: float = 0.95
    """Adam's second moment decay."""
    eps: float = 1e-8
    """Adam's epsilon."""
    weight_decay: float = 0.0
    """Decoupled weight decay; with 0, a step without signal moves nothing."""
    clip_grad: float = 1.0
    """Global gradient norm limit; 0 for none."""
    distributed: bool = False
    """Shard optimizer state over data parallel ranks (Megatron's distributed optimizer)."""
    overlap: bool = False
    """Reduce gradients over data parallel ranks while the backward pass goes on; with `distributed`, also gather the
    updated parameters while the next forward pass goes on."""


@dataclass
class BaseConfig:
    """The base model: a plain language model trained on worked arithmetic. Cached by the checksum of this recipe."""

    train: bool = False
    """Train (or take from the cache) a base model before reinforcement learning; otherwise start at `init_from`."""
    max_steps: int = 1200
    """Give up when the gate was not reached by then."""
    batch_size: int = 64
    """Documents per step."""
    lr: float = 3e-3
    """Learning rate after warm-up."""
    warmup_steps: int = 50
    """Linear warm-up."""
    decay_steps: int = 30
    """Linear decay to 0 after the gate is passed."""
    weight_decay: float = 0.01
    """Decoupled weight decay."""
    tagged: float = 0.1
    """Share of documents in the answer format; 0 for none."""
    direct: float = 0.25
    """Share of the untagged documents that hold the bare answer without working."""
    gate_accuracy: float = 0.9
    """Competence gate: greedy accuracy on untagged working, started with the first sum, over validation problems."""
    gate_every: int = 50
    """Steps between gate checks."""
    gate_from: int = 150
    """First gate check."""
    gate_passes: int = 2
    """Checks in a row that must be passed: accuracy jumps about while it rises, and one check may be luck."""
    save_every: int = 500
    """Steps between checkpoints; 0 for none but when it is asked to stop, and at the end."""


@dataclass
class SFTConfig:
    """Cold start: supervised steps before reinforcement learning."""

    path: str | None = None
    """File of what is learned, one {"messages": [{"role": ..., "content": ...}, ...]} a line (every turn of the
    assistant's is learned; needs data.template=chat) or {"prompt": text or messages, "completion": text}; null for the
    traces in the answer format that data.task=chain_sum makes."""
    steps: int = 0
    """Optimizer updates; 0 for none (R1-Zero)."""
    epochs: int = 0
    """Passes over the rows of `path`, in place of `steps`; 0 when `steps` says how long."""
    batch_size: int = 64
    """Rows per step."""
    max_tokens: int | None = None
    """Tokens of the longest row of `path`; null for model.context."""
    too_long: str = "refuse"
    """What becomes of longer rows: refuse (the run does not begin) or cut (their last tokens are left out)."""
    lr: float = 1e-3
    """Learning rate after warm-up."""
    warmup_steps: int = 5
    """Linear warm-up; must be shorter than `steps`."""
    weight_decay: float = 0.01
    """Decoupled weight decay."""
    save_every: int = 500
    """Steps between checkpoints; 0 for none but when it is asked to stop, and at the end."""


@dataclass
class RunConfig:
    """What a run is called, how long it lasts and what it leaves behind."""

    name: str = MISSING
    """The run's directory is `root`/`name`."""
    root: str = "runs"
    """Where run directories and cached base models live."""
    seed: int = 0
    """Everything random derives from it: weights, data, sampling."""
    steps: int = MISSING
    """GRPO steps."""
    eval_every: int = 20
    """Steps between evaluations on the validation problems; 0 for never. The held-out test runs first and last."""
    save_every: int = 20
    """Steps between checkpoints; 0 saves only the last step."""
    async_save: bool = False
    """Write checkpoints while training goes on; one counts when it is complete, a step or more later. Costs memory: the
    state as it was saved is held until then."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept."""
    keep_every: int = 0
    """Checkpoints of steps divisible by this are kept for good; 0 for none. Those of an earlier stage, such as the cold
    start, go when the next one has saved."""
    print_every: int = 10
    """Steps between rows of the console table."""
    samples_per_step: int = 4
    """Completions written to samples/ at every step."""
    tensorboard: bool = True
    """Write TensorBoard event files."""
    init_from: str | None = None
    """Directory to start from when `base.train` is false: a checkpoint, or a Hugging Face model (Llama, Qwen3,
    Qwen3-MoE, DeepSeek-V3) of the same shape; null starts from random weights."""


@dataclass
class ClusterConfig:
    """The machines that an experiment is meant for: what the planner plans for, and how long they wait for each other.
    Training takes what torchrun starts."""

    nodes: int | None = None
    """Machines; null for the fewest processes that fit the layout."""
    gpus_per_node: int = 8
    """GPUs of one machine."""
    gpu_memory_mib: int | None = None
    """Memory of one GPU in MiB, as nvidia-smi shows it (H100: 81559, H200: 143771); null gives no verdict."""
    timeout_seconds: int = 1800
    """How long a rank waits in a collective for the others before it ends the job. A rank that has read its part of a
    checkpoint waits there, too: it has to be more than the slowest takes. Writing and checking one is not limited."""


@dataclass
class Config:
    """The whole configuration of a run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    base: BaseConfig = field(default_factory=BaseConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

"""The values that each field may have on its own: an interval for every number, a list for every choice.

Rules that involve more than one field live in `rules`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from difflib import get_close_matches
from operator import attrgetter

from grpo_mega.config.schema import GENERATED_TASKS, REWARD_MODELS, Config, PartsConfig, Timeouts

RANGES: dict[str, tuple[str, ...]] = {
    "[1, inf)": (
        "model.layers", "model.hidden", "model.heads", "model.kv_heads", "model.head_dim", "model.ffn_hidden",
        "model.context", "model.rope_base", "model.vocab_multiple", "model.window", "model.window_rope_base",
        "model.query_pre_attn_scalar",
        "model.yarn.factor", "model.yarn.original_context", "model.llama3_rope.factor",
        "model.llama3_rope.original_context", "model.moe.top_k", "model.moe.ffn_hidden",
        "model.mla.q_lora_rank", "model.mla.kv_lora_rank", "model.mla.qk_head_dim", "model.mla.qk_rope_dim",
        "model.mla.v_head_dim", "layout.tp", "layout.pp", "layout.cp", "layout.vpp",
        "layout.first_stage_layers", "layout.last_stage_layers", "layout.ep", "layout.etp", "layout.micro_batch_tokens",
        "data.validation_size", "data.test_size", "algorithm.prompts_per_step", "algorithm.group_size",
        "algorithm.epochs", "algorithm.mini_batches", "rollout.max_new_tokens",
        "rollout.longer_from_step", "rollout.longer_max_new_tokens", "rollout.concurrent_sequences", "base.max_steps",
        "rollout.sglang.tp", "rollout.sglang.first_gpu", "rollout.sglang.bucket_bytes", "rollout.sglang.verify_every",
        "base.batch_size", "base.gate_every", "base.gate_passes", "sft.batch_size", "sft.max_tokens",
        "pairs.epochs", "pairs.batch_size", "pairs.max_tokens",
        "run.keep_checkpoints", "run.print_every",
        "cluster.nodes", "cluster.gpus_per_node", "cluster.gpu_memory_mib", "cluster.host_memory_gib",
        "algorithm.correction_cap",
    ),
    "[1, 10000000]": ("model.vocab_size",),
    "[1, 256]": ("eval.samples",),
    "[0, 1000000]": ("eval.temperature",),
    "[0, 4294967295]": ("run.seed",),
    "[1e-06, 1000000]": ("rollout.temperature",),
    "[2, inf)": ("data.min_terms", "data.max_terms", "data.frontier_revisit",
        "optimizer.decay_steps", "sft.decay_steps", "pairs.decay_steps",),
    "[0, inf)": (
        "model.full_every", "model.mtp_layers",
        "model.moe.experts", "model.moe.shared_ffn_hidden", "model.moe.first_dense",
        "model.moe.bias_update_rate", "model.moe.aux_loss_coef", "model.moe.z_loss_coef", "model.moe.groups",
        "model.moe.group_top_k", "algorithm.kl_coef", "algorithm.reference_refresh", "rollout.top_k",
        "algorithm.off_policy_mask",
        "optimizer.warmup_steps", "optimizer.weight_decay", "optimizer.clip_grad", "base.warmup_steps",
        "base.decay_steps", "base.weight_decay", "base.gate_from", "sft.steps", "sft.epochs", "sft.warmup_steps",
        "sft.weight_decay", "base.save_every", "sft.save_every", "run.steps", "run.eval_every", "run.save_every",
        "run.report_every", "run.keep_every", "run.keep_traces", "run.sample_groups_per_step",
        "run.followed_problems",
        "rollout.sglang.restarts", "lora.rank", "critic.alone_steps",
        "data.shared_test_problems", "distill.reward_coef", "pairs.test_size", "reward.model.from_step",
        "pairs.warmup_steps", "pairs.weight_decay", "pairs.save_every", "alarms.not_finite",
    ),
    "(0, inf)": (
        "model.norm_eps", "model.init_std", "model.yarn.beta_fast", "model.yarn.beta_slow", "model.yarn.mscale",
        "model.llama3_rope.low_freq_factor", "model.llama3_rope.high_freq_factor",
        "model.mtp_loss_coef", "model.moe.scaling", "reward.timeout_seconds",
        "rollout.sglang.start_seconds",
        "rollout.sglang.answer_seconds", "rollout.sglang.silence_seconds", "optimizer.lr", "optimizer.eps",
        "base.lr", "sft.lr", "pairs.lr", "lora.alpha", "critic.lr", "critic.clip", "distill.coef",
        "algorithm.tau_pos", "algorithm.tau_neg", "alarms.entropy_collapse", "alarms.kl_runaway",
        "alarms.reward_hacking", "alarms.mismatch", "alarms.held_out_falling",
        "algorithm.vespo_k_pos", "algorithm.vespo_lambda_pos", "algorithm.vespo_k_neg", "algorithm.vespo_lambda_neg",
        *(f"optimizer.parts.{field.name}.lr_multiplier" for field in fields(PartsConfig)),
    ),
    "(-inf, inf)": ("data.frontier_low", "data.frontier_high", "reward.model.weight"),
    "[-1, inf)": ("run.export_every",),
    "(1, inf)": ("algorithm.dual_clip", "alarms.expert_imbalance", "alarms.slow_phase"),
    "[0, inf]": ("algorithm.clip_low", "algorithm.clip_high"),
    "[60, 604800]": ("cluster.timeout_seconds",),
    "[-1, 1]": ("algorithm.entropy_coef",),
    "(0, 1)": ("pairs.replay_share",),
    "(0, 1]": ("rollout.top_p", "eval.top_p", "model.rope_fraction"),
    "(0, inf]": (
        *(f"rollout.sglang.timeouts.{field.name}" for field in fields(Timeouts)),
    ),
    "[0, 1)": (
        "alarms.truncation", "alarms.repetition", "alarms.no_signal", "alarms.unscorable",
        "optimizer.beta1", "optimizer.beta2", "optimizer.average_decay",
        *(f"optimizer.parts.{field.name}.weight_decay" for field in fields(PartsConfig)),
    ),
    "[0, 1]": ("optimizer.lr_floor", "sft.lr_floor", "pairs.lr_floor",
        "base.tagged", "base.direct", "base.gate_accuracy",
        "algorithm.correction_floor", "algorithm.rejection_floor", "critic.gamma", "critic.lam"),
    "[1, inf]": ("algorithm.rejection_cap",),
}  # fmt: skip
"""Interval in mathematical notation -> the fields that must lie in it."""

CHOICES: dict[str, tuple[str, ...]] = {
    "run.trains": ("policy", *REWARD_MODELS),
    "model.attention": ("gqa", "mla"),
    "model.dtype": ("fp32", "bf16"),
    "model.moe.score": ("sigmoid", "softmax"),
    "layout.recompute": ("none", "selective", "full"),
    "data.task": (*GENERATED_TASKS, "jsonl"),
    "data.curriculum": ("none", "frontier"),
    "sft.too_long": ("refuse", "cut"),
    "optimizer.schedule": ("constant", "linear", "cosine", "wsd"),
    "sft.schedule": ("constant", "linear", "cosine", "wsd"),
    "pairs.schedule": ("constant", "linear", "cosine", "wsd"),
    "rollout.engine": ("embedded", "sglang"),
    "rollout.sglang.transport": ("shared", "network", "disk"),
    "reward.on_error": ("stop", "leave_out"),
    "reward.model.outcome": ("min", "product", "last"),
    "algorithm.groups_without_signal": ("count", "drop"),
    "algorithm.advantage_baseline": ("mean", "leave_one_out", "optimal", "batch", "critic"),
    "algorithm.advantage_std": ("sample", "population", "mean", "batch", "batch_rewards", "none"),
    "algorithm.supervision": ("outcome", "process"),
    "algorithm.objective": ("ppo", "cispo", "sapo", "gspo", "gspo_token", "gmpo", "vespo"),
    "algorithm.correction": ("none", "truncate", "mask"),
    "algorithm.correction_level": ("token", "sequence", "sequence_mean"),
    "algorithm.kl_in": ("loss", "reward"),
    "algorithm.kl_estimator": ("k1", "k2", "k3"),
    "algorithm.aggregation": ("sequence_mean", "token_mean", "constant"),
    "cluster.gpu": ("h100", "h200", "h800", "h20", "a100", "b200", "gb200", "gb300"),
}

REASONS: dict[str, str] = {
    "algorithm.dual_clip": "smaller bounds would cut the plain policy gradient; null turns dual clipping off",
    "model.vocab_size": "today's largest vocabularies have some 300,000 tokens",
    "run.seed": "generators are seeded with 32 bits of it",
    "rollout.temperature": "training needs the log-probs of sampled tokens; greedy decoding is for evaluation only",
    "cluster.timeout_seconds": "a minute to a week: busy ranks are late, and a job that hangs has to end",
    "run.export_every": "-1 exports after the last step only, 0 never",
    "optimizer.decay_steps": "the first step of a fall is still at the peak",
    "sft.decay_steps": "the first step of a fall is still at the peak",
    "pairs.decay_steps": "the first step of a fall is still at the peak",
    "model.init_std": "with 0 every channel stays the same",
}


def field_problems(config: Config, room: str = "") -> Iterator[str]:
    """Yields one message for every field whose value is outside its interval (NaN included) or not a known choice.

    With a `room`, such as "data.", only its fields are checked, and the others need not be set.
    """
    for name, interval in ((name, interval) for interval, names in RANGES.items() for name in names):
        value = attrgetter(name)(config) if name.startswith(room) else None
        if value is not None and not _inside(value, interval):
            reason = f" ({REASONS[name]})" if name in REASONS else ""
            yield f"{name}={value}: choose a value in {interval}{reason}"
    for name, allowed in CHOICES.items():
        value = attrgetter(name)(config)
        if name.startswith(room) and value is not None and value not in allowed:
            close = get_close_matches(value, allowed, n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            yield f"{name}={value}: choose one of {', '.join(allowed)}{meant}"


def _inside(value: float, interval: str) -> bool:
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    above = low <= value if interval[0] == "[" else low < value
    below = value <= high if interval[-1] == "]" else value < high
    return above and below

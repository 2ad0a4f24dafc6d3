"""Every rule is broken once, its error names the field, and following the advice makes it go away."""

from __future__ import annotations

import re
from operator import attrgetter

import pytest
from composed import composed
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from ruled import DENSE, TINY, problems_of, with_values

from grpo_mega.config.load import compose_config
from grpo_mega.config.rules.rollout import FP8_BLOCK
from grpo_mega.config.schema import Config, RewardTerm
from grpo_mega.errors import InputError
from grpo_mega.weights import fp8

EIGHT_BITS: dict[str, object] = {
    "layout.fp8": True,
    "model.dtype": "bf16",
    "algorithm.correction": "truncate",
}
TAUGHT: dict[str, object] = {"distill.teacher": "runs/teacher"}
CRITIC: dict[str, object] = {"algorithm.advantage_baseline": "critic", "algorithm.advantage_std": "batch"}


def test_a_template_without_a_place_for_the_problem() -> None:
    files = {"data.train_path": "a.jsonl", "data.test_path": "b.jsonl", "base.train": False}
    values = {"data.task": "jsonl", "data.tokenizer": "models/x", "data.template": "Answer!", **files}
    (problem,) = problems_of(with_values(TINY, values))
    assert problem.field == "data.template"
    assert "{prompt}" in problem.what


def solved(config: Config, problem: InputError, world_size: int | None = None) -> bool:
    """Whether the problem goes away with the settings that its advice writes out, all of them or one."""
    written_out = re.findall(r"(?<![\w.])([a-z][\w.]*\.\w+)=([^\s,;]+)", problem.fix)
    advised = {name: OverridesParser.create().parse_override(f"x={value}").value() for name, value in written_out}
    one_by_one = [{name: value} for name, value in advised.items()]
    return any(
        problem.field not in {left.field for left in problems_of(with_values(config, chosen), world_size)}
        for chosen in (advised, *one_by_one)
    )


STEPWISE = [RewardTerm("accuracy"), RewardTerm("sum_steps")]
"""A reward whose steps are scored."""
SHORT = {"limit": 48, "buffer": 8}
STERN = {"url": "http://judge", "model": "m", "rubric": "{completion}", "low": -1}
KIND = STERN | {"low": 1.0}


def divided(*terms: RewardTerm, **model: object) -> dict[str, object]:
    """A reward whose mean divides, of accuracy, these terms and perhaps a reward model."""
    terms = (RewardTerm("accuracy"), *terms)
    of_model = {f"reward.model.{name}": value for name, value in model.items()}
    return {"algorithm.advantage_std": "mean", "reward.terms": [*terms]} | of_model


NEGATIVE: dict[str, dict[str, object]] = {
    "reward.terms[1] (length, weight -0.1)": divided(
        RewardTerm("length", -0.1, options={"low": 9, "high": 48}), RewardTerm("format", 0.2)
    ),
    "reward.terms[1] (overlong, weight 0.5)": divided(RewardTerm("overlong", 0.5, options=SHORT)),
    "reward.terms[1] (repetition, weight 1)": divided(RewardTerm("repetition", tasks=["chain_sum"])),
    "reward.terms[1] (judge, weight 1)": divided(RewardTerm("judge", options=STERN)),
    "reward.terms[1] (f, weight -1)": divided(RewardTerm(weight=-1.0, function="my:f")),
    "reward.model.weight=-1": divided(path="runs/liked", weight=-1.0),
    "reward.terms[2] (overlong, weight 1)": divided(  # of the tasks that the judge has not
        RewardTerm("judge", options=KIND, tasks=["a"]), RewardTerm("overlong", 1.0, options=SHORT)
    ),
}
"""What can make a reward negative -> a reward with it."""


@pytest.mark.parametrize(
    "values",
    [
        divided(RewardTerm("overlong", 0.0, options=SHORT), RewardTerm("judge", 0.0, options=STERN)),
        divided(RewardTerm("overlong", -1.0, options=SHORT)),
        divided(RewardTerm("judge", 1.0, options=KIND), RewardTerm("overlong", 0.5, options=SHORT)),
        divided(RewardTerm(function="my:f"), RewardTerm("http", options={"url": "http://x"})),
        divided(path="runs/liked"),  # if it scores steps, which its file says
        divided(RewardTerm("overlong", 0.5, options=SHORT)) | {"algorithm.advantage_std": "population"},
    ],
)
def test_rewards_that_are_known_to_be_never_negative_may_be_divided_by_their_mean(values: dict[str, object]) -> None:
    assert problems_of(with_values(TINY, values)) == []


BROKEN: list[tuple[dict[str, object], str]] = [
    ({"model.hidden": 98}, "model.hidden"),
    ({"model.hidden": 100}, "model.hidden"),
    ({"model.kv_heads": 3}, "model.heads"),
    ({"layout.tp": 4, "layout.sp": True}, "model.kv_heads"),
    ({"model.ffn_hidden": 255, "layout.tp": 2, "layout.sp": True}, "model.ffn_hidden"),
    ({"model.vocab_multiple": 33, "layout.tp": 2, "layout.sp": True}, "model.vocab_multiple"),
    ({"layout.pp": 3}, "model.layers"),
    ({"layout.pp": 2, "layout.last_stage_layers": 2}, "model.layers"),
    ({"layout.last_stage_layers": 1}, "layout.last_stage_layers"),
    ({"layout.vpp": 2}, "layout.vpp"),
    ({"layout.attention": "torch"}, "layout.attention"),
    ({"layout.attention": "flash4", "model.dtype": "bf16", "model.head_dim": 320}, "layout.attention"),
    ({"layout.pp": 2, "layout.vpp": 2}, "layout.vpp"),
    ({"model.moe.ffn_hidden": 65, "layout.etp": 2}, "model.moe.ffn_hidden"),
    ({"model.moe.shared_ffn_hidden": 65, "layout.tp": 2, "layout.sp": True}, "model.moe.shared_ffn_hidden"),
    ({"layout.ep": 3}, "model.moe.experts"),
    ({"model.attention": "mla"}, "model.kv_heads"),
    ({"model.attention": "mla", "model.kv_heads": 4, "model.mla.qk_rope_dim": 7}, "model.mla.qk_rope_dim"),
    ({"model.attention": "mla", "model.kv_heads": 4, "model.head_dim": 24}, "model.head_dim"),
    ({"model.head_dim": 25}, "model.head_dim"),
    ({"layout.micro_batch_tokens": 127}, "model.context"),
    ({"model.moe.top_k": 5}, "model.moe.top_k"),
    ({"model.moe.first_dense": 2}, "model.moe.first_dense"),
    ({"model.moe.score": "softmax"}, "model.moe.bias_update_rate"),
    ({"model.moe.score": "softmax", "model.moe.bias_update_rate": 0.0, "model.moe.top_k": 1}, "model.moe.top_k"),
    ({"model.moe.groups": 2}, "model.moe.groups"),
    ({"model.moe.group_top_k": 1}, "model.moe.groups"),
    ({"model.moe.groups": 1, "model.moe.group_top_k": 2}, "model.moe.group_top_k"),
    ({"model.moe.groups": 3, "model.moe.group_top_k": 2}, "model.moe.experts"),
    ({"model.moe.groups": 4, "model.moe.group_top_k": 1}, "model.moe.top_k"),
    ({"model.moe.groups": 4, "model.moe.group_top_k": 2, "model.moe.top_k": 1}, "model.moe.top_k"),
    ({"model.moe.frozen_bias": True}, "model.moe.frozen_bias"),
    (
        {"model.moe.frozen_bias": True, "model.moe.bias_update_rate": 0.0, "model.moe.score": "softmax"},
        "model.moe.frozen_bias",
    ),
    ({"model.yarn.factor": 4.0}, "model.yarn.factor"),
    ({"model.yarn.truncate": False}, "model.yarn.truncate"),
    ({"model.llama3_rope.low_freq_factor": 4.0}, "model.llama3_rope.high_freq_factor"),
    ({"model.attention": "mla", "model.kv_heads": 4, "model.llama3_rope.factor": 8.0}, "model.llama3_rope.factor"),
    ({"model.attention": "mla", "model.kv_heads": 4, "model.qkv_bias": True}, "model.qkv_bias"),
    ({"model.attention": "mla", "model.kv_heads": 4, "model.rope_fraction": 0.5}, "model.rope_fraction"),
    ({"model.full_every": 2}, "model.full_every"),
    ({"model.window_rope_base": 100}, "model.window_rope_base"),
    ({"model.window": 8, "model.mtp_layers": 1}, "model.window"),
    ({"model.family": "gemma3_text"}, "model.family"),
    ({"model.attention": "mla", "model.kv_heads": 4, "model.query_pre_attn_scalar": 8}, "model.query_pre_attn_scalar"),
    ({"model.rope_fraction": 0.3}, "model.rope_fraction"),
    ({"model.yarn.beta_slow": 33.0}, "model.yarn.beta_slow"),
    ({"model.mtp_layers": 1, "model.tie_embeddings": True}, "model.mtp_layers"),
    ({"layout.sp": True}, "layout.sp"),
    ({"layout.attention": "flash4", "model.dtype": "bf16", "model.window": 8}, "layout.attention"),
    ({"layout.tp": 2}, "layout.sp"),
    ({"layout.tp": 2, "model.moe.experts": 0, "model.attention": "mla", "model.kv_heads": 4}, "layout.sp"),
    (EIGHT_BITS | {"model.dtype": "fp32"}, "layout.fp8"),
    (EIGHT_BITS | {"algorithm.correction": "none"}, "layout.fp8"),
    (EIGHT_BITS | {"model.hidden": 100, "model.heads": 5, "model.kv_heads": 5, "model.head_dim": 20}, "layout.fp8"),
    (EIGHT_BITS | {"layout.tp": 2, "layout.sp": True, "model.moe.shared_ffn_hidden": 48}, "layout.fp8"),
    ({"data.min_terms": 6}, "data.min_terms"),
    ({"data.languages": ["english", "latin"]}, "data.languages[1]"),
    ({"data.languages": ["english", "english"]}, "data.languages"),
    ({"data.task": "tiny_code", "data.languages": ["english"]}, "data.languages"),
    ({"data.parse_special": True}, "data.parse_special"),
    ({"data.train_path": "train.jsonl"}, "data.train_path"),
    ({"data.test_path": "test.jsonl"}, "data.test_path"),
    ({"data.task": "jsonl", "base.train": False, "data.test_path": "t"}, "data.train_path"),
    ({"data.task": "jsonl", "data.train_path": "t", "data.test_path": "t"}, "base.train"),
    (
        {"data.task": "jsonl", "data.train_path": "t", "data.test_path": "t", "base.train": False, "sft.steps": 9},
        "sft.steps",
    ),
    ({"reward.terms": []}, "reward.terms"),
    ({"reward.success": "format_"}, "reward.success"),
    ({"reward.terms": [RewardTerm("accuracy"), RewardTerm("accuracy")]}, "reward.terms"),
    ({"reward.terms": [RewardTerm("a b")], "reward.success": "a b"}, "reward.terms[0].name"),
    ({"reward.terms": [RewardTerm("std", 1.0, "my:f")], "reward.success": "std"}, "reward.terms[0].name"),
    ({"reward.terms": [RewardTerm("accuracy", float("nan"))]}, "reward.terms[0].weight"),
    ({"reward.terms": [RewardTerm("accuracy", 1.0, "my.module.f")]}, "reward.terms[0].function"),
    ({"reward.terms": [RewardTerm("accuracy"), RewardTerm()]}, "reward.terms[1]"),
    ({"reward.terms": [RewardTerm("accuracy", kind="bxoed")]}, "reward.terms[0].kind"),
    ({"reward.terms": [RewardTerm("acuracy"), RewardTerm("format")]}, "reward.terms[0].name"),
    ({"reward.terms": [RewardTerm("accuracy", 1.0, "my:f", "boxed")]}, "reward.terms[0].kind"),
    ({"reward.terms": [RewardTerm("accuracy", 1.0, "my:f", options={"a b": 1})]}, "reward.terms[0].options"),
    ({"reward.terms": [RewardTerm("accuracy", kind="exact", options={"raed": "tag"})]}, "reward.terms[0].options.raed"),
    ({"reward.on_error": "leave-out"}, "reward.on_error"),
    ({"data.tokenizer": "models/x"}, "data.tokenizer"),
    ({"data.task": "tiny_code", "data.tokenizer": "m"}, "data.tokenizer"),
    ({"data.task": "tiny_code", "data.train_path": "a"}, "data.train_path"),
    ({"data.task": "tiny_mixture", "data.curriculum": "frontier"}, "data.curriculum"),
    ({"data.task": "tiny_mixture", "data.train_size": 1}, "data.train_size"),
    ({"data.train_size": 0}, "data.train_size"),
    ({"data.task": "jsonl", "data.train_path": "t", "base.train": False, "data.train_size": 9}, "data.train_size"),
    ({"data.task": "tiny_mixture", "data.min_terms": 9}, "data.min_terms"),
    ({"data.task": "tiny_code", "sft.steps": 9}, "sft.steps"),
    ({"data.template": "chat"}, "data.template"),
    ({"data.question": "{prompt}?"}, "data.question"),
    ({"algorithm.group_size": 1}, "algorithm.group_size"),
    ({"distill.teacher": "http://host:30000", "rollout.temperature": 0.7}, "rollout.temperature"),
    (TAUGHT | {"distill.timeout_seconds": 9.0}, "distill.timeout_seconds"),
    ({"distill.teacher": "http://host:30000", "layout.ep": 2, "model.moe.experts": 0}, "layout.ep"),
    ({"distill.reward_coef": 1.0}, "distill.reward_coef"),
    (TAUGHT | {"algorithm.group_size": 1, "distill.reward_coef": 0.5}, "algorithm.group_size"),
    (TAUGHT | CRITIC, "algorithm.advantage_baseline"),
    (TAUGHT | {"algorithm.objective": "gspo"}, "algorithm.objective"),
    (TAUGHT | {"algorithm.groups_without_signal": "drop"}, "algorithm.groups_without_signal"),
    (
        TAUGHT | {"algorithm.kl_in": "reward", "algorithm.kl_coef": 0.1, "algorithm.advantage_std": "none"},
        "algorithm.kl_in",
    ),
    (TAUGHT | {"algorithm.supervision": "process", "reward.terms": STEPWISE}, "algorithm.supervision"),
    ({"critic.lr": 0.001}, "critic.lr"),
    (CRITIC | {"optimizer.frozen": ["norms"], "base.train": False}, "optimizer.frozen"),
    (CRITIC | {"algorithm.advantage_std": "sample"}, "algorithm.advantage_std"),
    (CRITIC | {"algorithm.groups_without_signal": "drop"}, "algorithm.groups_without_signal"),
    (CRITIC | {"algorithm.objective": "gspo"}, "algorithm.objective"),
    (
        CRITIC
        | {"base.train": False, "lora.rank": 4, "model.moe.bias_update_rate": 0.0, "model.moe.frozen_bias": True},
        "lora.rank",
    ),
    (CRITIC | {"critic.alone_steps": 80}, "critic.alone_steps"),
    ({"algorithm.mini_batches": 257}, "algorithm.mini_batches"),
    ({"algorithm.advantage_baseline": "batch"}, "algorithm.advantage_baseline"),
    ({"algorithm.advantage_std": "mean", "algorithm.advantage_baseline": "optimal"}, "algorithm.advantage_std"),
    *((values, "algorithm.advantage_std") for values in NEGATIVE.values()),
    ({"algorithm.terms_apart": True, "algorithm.advantage_std": "none"}, "algorithm.terms_apart"),
    ({"algorithm.reference_refresh": 400}, "algorithm.reference_refresh"),
    ({"algorithm.objective": "cispo", "algorithm.dual_clip": 3.0}, "algorithm.dual_clip"),
    ({"algorithm.objective": "gmpo", "algorithm.dual_clip": 3.0}, "algorithm.dual_clip"),
    ({"algorithm.objective": "reinforce"}, "algorithm.objective"),
    ({"algorithm.correction_level": "sequence"}, "algorithm.correction_level"),
    ({"algorithm.correction_normalized": True}, "algorithm.correction_normalized"),
    ({"algorithm.kl_in": "reward"}, "algorithm.kl_in"),
    *(
        (
            {"algorithm.kl_in": "reward", "algorithm.kl_coef": 0.1, "algorithm.advantage_std": std, name: value},
            name,
        )
        for name, value, std in (
            ("algorithm.kl_unbiased", True, "none"),
            ("algorithm.terms_apart", True, "sample"),
            *(("algorithm.advantage_std", std, std) for std in ("sample", "population", "mean")),
            ("algorithm.groups_without_signal", "drop", "none"),
            ("algorithm.groups_without_signal", "refill", "none"),
        )
    ),
    *(
        ({"algorithm.supervision": "process", "reward.terms": STEPWISE, name: value} | others, name)
        for name, value, others in (
            ("algorithm.advantage_baseline", "optimal", {}),
            *(("algorithm.advantage_std", std, {}) for std in ("mean", "batch", "batch_rewards")),
            ("algorithm.terms_apart", True, {}),
            ("algorithm.kl_in", "reward", {"algorithm.kl_coef": 0.1, "algorithm.advantage_std": "none"}),
            *(("algorithm.objective", kind, {}) for kind in ("gspo", "gmpo", "vespo")),
        )
    ),
    ({"algorithm.supervision": "process"}, "algorithm.supervision"),
    (
        {"algorithm.supervision": "process", "reward.terms": [RewardTerm("accuracy"), RewardTerm("sum_steps", 0.0)]},
        "algorithm.supervision",
    ),
    ({"algorithm.supervision": "processes"}, "algorithm.supervision"),
    ({"algorithm.objective": "sapo", "algorithm.clip_low": 0.1}, "algorithm.clip_low"),
    ({"algorithm.objective": "sapo", "algorithm.clip_high": 0.28}, "algorithm.clip_high"),
    *(
        (
            {"algorithm.objective": "cispo", "algorithm.clip_low": 0.0, "algorithm.clip_high": 0.0, more: 2},
            "algorithm.epochs",
        )
        for more in ("algorithm.epochs", "algorithm.mini_batches")
    ),
    ({"algorithm.correction_cap": 5.0}, "algorithm.correction_cap"),
    ({"algorithm.tau_pos": 3.0}, "algorithm.tau_pos"),
    (
        {"algorithm.objective": "vespo", "algorithm.vespo_k_pos": 50.0, "algorithm.vespo_lambda_pos": 1e-09},
        "algorithm.vespo_k_pos",
    ),
    ({"algorithm.vespo_k_neg": 4.0}, "algorithm.vespo_k_neg"),
    ({"algorithm.objective": "vespo", "algorithm.clip_high": 0.28}, "algorithm.clip_high"),
    (
        {
            "algorithm.advantage_baseline": "batch",
            "algorithm.advantage_std": "batch",
            "algorithm.groups_without_signal": "drop",
        },
        "algorithm.groups_without_signal",
    ),
    (
        {
            "algorithm.advantage_baseline": "batch",
            "algorithm.advantage_std": "batch",
            "algorithm.groups_without_signal": "refill",
        },
        "algorithm.groups_without_signal",
    ),
    ({"algorithm.refill_limit": 3}, "algorithm.refill_limit"),
    (
        {"algorithm.groups_without_signal": "refill", "reward.model.path": "runs/judge"},
        "algorithm.groups_without_signal",
    ),
    ({"algorithm.kl_unbiased": True}, "algorithm.kl_unbiased"),
    ({"algorithm.correction_floor": 0.5}, "algorithm.correction_floor"),
    ({"rollout.temperature": 0.0}, "rollout.temperature"),
    ({"rollout.max_new_tokens": 128}, "rollout.max_new_tokens"),
    ({"rollout.longer_from_step": 9}, "rollout.longer_from_step"),
    ({"rollout.longer_max_new_tokens": 96}, "rollout.longer_max_new_tokens"),
    ({"rollout.longer_from_step": 9, "rollout.longer_max_new_tokens": 48}, "rollout.max_new_tokens"),
    ({"rollout.longer_from_step": 9, "rollout.longer_max_new_tokens": 128}, "rollout.longer_max_new_tokens"),
    ({"run.init_from": "checkpoints/9"}, "run.init_from"),
    ({"base.gate_from": 1201}, "base.max_steps"),
    ({"base.gate_passes": 30}, "base.max_steps"),
    ({"sft.steps": 5}, "sft.warmup_steps"),
    ({"lora.alpha": 9.0}, "lora.alpha"),
    ({"model.window": 8, "model.window_rope_base": 100, "model.llama3_rope.factor": 8.0}, "model.llama3_rope.factor"),
    ({"model.window": 8, "rollout.engine": "sglang", "layout.ep": 1}, "model.window"),
    ({"optimizer.decay_steps": 9}, "optimizer.decay_steps"),
    ({"optimizer.lr_floor": 0.1}, "optimizer.lr_floor"),
    ({"optimizer.schedule": "cosine", "optimizer.lr_floor": 1.1}, "optimizer.lr_floor"),
    ({"optimizer.schedule": "wsd"}, "optimizer.decay_steps"),
    (
        {"optimizer.schedule": "linear", "optimizer.warmup_steps": 160, "algorithm.mini_batches": 2},
        "optimizer.warmup_steps",
    ),
    ({"optimizer.schedule": "wsd", "optimizer.decay_steps": 76}, "optimizer.decay_steps"),
    ({"optimizer.schedule": "cosine", "optimizer.decay_steps": 70}, "optimizer.lr_floor"),
    ({"sft.steps": 9, "sft.schedule": "cosine", "sft.decay_steps": 5}, "sft.decay_steps"),
    ({"layout.dispatch": "flex"}, "layout.dispatch"),
    ({"layout.dispatch": "deepep", "model.dtype": "bf16"}, "layout.dispatch"),
    ({"layout.dispatch": "deepep", "layout.ep": 2, "layout.etp": 2, "model.dtype": "bf16"}, "layout.dispatch"),
    ({"layout.dispatch": "deepep", "layout.ep": 2}, "layout.dispatch"),
    (
        {"layout.dispatch": "deepep", "layout.ep": 16, "model.moe.experts": 16, "model.dtype": "bf16"}
        | {"cluster.gpus_per_node": 4},
        "layout.dispatch",
    ),
    ({"optimizer.state.moments": "bf16"}, "optimizer.state.moments"),
    ({"optimizer.state.on_host": True}, "optimizer.state.on_host"),
    ({"optimizer.distributed": True, "optimizer.state.moments": "bf16", "optimizer.beta2": 0.999}, "optimizer.beta2"),
    ({"optimizer.state.moments": "fp16"}, "optimizer.state.moments"),
    ({"optimizer.parts.predictors.lr_multiplier": 2.0}, "optimizer.parts.predictors"),
    ({"optimizer.parts.norms.weight_decay": 0.1}, "optimizer.parts.norms.weight_decay"),
    ({"optimizer.frozen": ["heads"], "base.train": False}, "optimizer.frozen"),
    (
        {"optimizer.frozen": ["head"], "optimizer.parts.head.lr_multiplier": 2.0, "base.train": False},
        "optimizer.parts.head",
    ),
    ({"optimizer.frozen": ["head"], "model.tie_embeddings": True, "base.train": False}, "optimizer.frozen"),
    ({"optimizer.frozen": ["adapters"], "base.train": False}, "optimizer.frozen"),
    ({"optimizer.frozen": ["embedding"]}, "optimizer.frozen"),
    ({"optimizer.frozen": ["router"], "base.train": False}, "optimizer.frozen"),
    ({"base.train": False, "run.steps": 0}, "run.steps"),
    ({"sft.path": "a.jsonl"}, "sft.path"),
    ({"sft.path": "a", "sft.epochs": 1, "sft.steps": 9}, "sft.steps"),
    ({"sft.epochs": 1}, "sft.epochs"),
    ({"sft.too_long": "cut"}, "sft.too_long"),
    ({"sft.max_tokens": 9}, "sft.max_tokens"),
    ({"sft.path": "a", "sft.epochs": 1, "sft.max_tokens": 129}, "sft.max_tokens"),
    ({"reward.terms": [RewardTerm("accuracy", 1e300)]}, "reward.terms[0].weight"),
    ({"reward.terms": [RewardTerm("accuracy", 1), RewardTerm("format", -2000000.0)]}, "reward.terms[1].weight"),
    ({"reward.terms": [RewardTerm("accuracy", 0.0)]}, "reward.terms"),
    ({"rollout.temperature": 1e-30}, "rollout.temperature"),
    ({"model.vocab_size": 10**10}, "model.vocab_size"),
    ({"run.seed": 2**64}, "run.seed"),
    ({"run.root": ""}, "run.root"),
    ({"run.name": "a" * 101}, "run.name"),
    ({"run.name": "../elsewhere"}, "run.name"),
    ({"run.name": ""}, "run.name"),
    ({"run.name": ".."}, "run.name"),
    ({"run.name": "a b\n"}, "run.name"),
    ({"run.profile_steps": "5:3"}, "run.profile_steps"),
    ({"run.profile_steps": "a:b"}, "run.profile_steps"),
    ({"run.profile_steps": "0:3"}, "run.profile_steps"),
    ({"run.profile_steps": "9:12", "run.steps": 8}, "run.profile_steps"),
    ({"run.trackers": ["wandbb"]}, "run.trackers"),
    ({"run.stop_on": ["any", "truncatio"]}, "run.stop_on"),
    ({"run.stop_on": ["mismatch"], "alarms.mismatch": None}, "run.stop_on"),
]


@pytest.mark.parametrize(("values", "field"), BROKEN, ids=lambda value: value if isinstance(value, str) else "")
def test_a_broken_rule_is_the_only_problem_and_names_its_field(values: dict[str, object], field: str) -> None:
    (problem,) = problems_of(with_values(TINY, values))
    assert problem.field == field
    assert problem.what
    assert problem.fix


WRITTEN_OUT = [
    values for values, _ in BROKEN if re.search(r"[a-z]\.\w+=[\w.\[]", problems_of(with_values(TINY, values))[0].fix)
]


@pytest.mark.parametrize("values", WRITTEN_OUT, ids=lambda values: " ".join(values))
def test_the_settings_that_the_advice_writes_out_solve_the_problem(values: dict[str, object]) -> None:
    broken = with_values(TINY, values)
    (problem,) = problems_of(broken)
    assert solved(broken, problem), problem


@pytest.mark.parametrize(("culprit", "values"), NEGATIVE.items())
def test_what_can_make_a_reward_negative_is_named(culprit: str, values: dict[str, object]) -> None:
    (problem,) = problems_of(with_values(TINY, values))
    assert culprit in problem.what


GPT_OSS: dict[str, object] = {
    "model.family": "gpt_oss", "model.qkv_bias": True, "model.moe.score": "softmax", "model.moe.bias_update_rate": 0.0,
    "model.moe.shared_ffn_hidden": 0, "model.moe.first_dense": 0, "model.qk_norm": False, "model.window": 8,
    "model.ffn_hidden": 64,  # as the experts of tiny have
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"model.qk_norm": True}, "model.qk_norm"),
        (
            {"model.window": None},
            "model.window",
        ),
        ({"model.ffn_hidden": 7}, "model.ffn_hidden"),
        ({"model.qkv_bias": False}, "model.qkv_bias"),
        ({"model.moe.experts": 0}, "model.family"),
        ({"model.moe.score": "sigmoid"}, "model.moe.score"),
        ({"model.moe.shared_ffn_hidden": 64}, "model.moe.shared_ffn_hidden"),
        ({"model.moe.first_dense": 1}, "model.moe.first_dense"),
        ({"model.llama3_rope.factor": 8.0}, "model.llama3_rope.factor"),
        ({"layout.etp": 2}, "layout.etp"),
        ({"rollout.engine": "sglang"}, "model.family"),
    ],
)
def test_what_the_layers_of_gpt_oss_have_not(values: dict[str, object], field: str) -> None:
    assert not problems_of(with_values(TINY, GPT_OSS | {"model.yarn.factor": 4.0, "model.yarn.truncate": False}))
    assert field in {problem.field for problem in problems_of(with_values(TINY, GPT_OSS | values))}


ADAPTERS = {"base.train": False, "lora.rank": 8, "model.moe.bias_update_rate": 0.0, "model.moe.frozen_bias": True}


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"lora.rank": -1}, "lora.rank"),
        (EIGHT_BITS, "layout.fp8"),
        ({"lora.alpha": 0.0}, "lora.alpha"),
        ({"lora.targets": ["attention", "expert"]}, "lora.targets"),
        ({"lora.targets": []}, "lora.targets"),
        (
            {"lora.targets": ["experts"]},
            "lora.targets",
        ),
        (
            {"lora.targets": ["mlp", "experts"], "model.moe.shared_ffn_hidden": 0},
            "lora.targets",
        ),
        (
            {"lora.targets": ["mlp"], "layout.pp": 2, "model.moe.first_dense": 1, "model.moe.shared_ffn_hidden": 0},
            "lora.targets",
        ),
        ({"base.train": True}, "lora.rank"),
        ({"model.moe.bias_update_rate": 1e-3, "model.moe.frozen_bias": False}, "lora.rank"),
    ],
)
def test_adapters_need_a_model_that_stays_as_it_is(values: dict[str, object], field: str) -> None:
    adapted = with_values(TINY, ADAPTERS)
    assert problems_of(adapted) == []
    (problem,) = problems_of(with_values(adapted, values))
    assert problem.field == field


def test_adapters_on_experts_leave_no_pipeline_stage_without_any() -> None:
    values = {"layout.pp": 2, "model.moe.first_dense": 1, "model.moe.shared_ffn_hidden": 0}
    assert problems_of(with_values(TINY, ADAPTERS | values | {"lora.targets": ["mlp", "experts"]})) == []


def test_files_give_supervised_steps_something_to_learn() -> None:
    jsonl = {"data.task": "jsonl", "data.train_path": "t", "data.test_path": "t", "base.train": False}
    for length in ({"sft.steps": 9}, {"sft.epochs": 2}):
        for data in ({}, jsonl):
            assert problems_of(with_values(TINY, {"sft.path": "a.jsonl", **length, **data})) == []


def test_the_configurations_that_the_cases_start_from_are_accepted() -> None:
    assert problems_of(composed(*TINY)) == []
    assert problems_of(composed(*DENSE)) == []


def test_heads_of_a_given_size_need_not_divide_the_hidden_size() -> None:
    assert problems_of(with_values(TINY, {"model.hidden": 98, "model.head_dim": 24})) == []


def test_expert_rules_leave_a_dense_model_alone() -> None:
    settings_of_experts = {
        "model.moe.top_k": 9,
        "model.moe.score": "softmax",
        "model.moe.first_dense": 9,
        "layout.tp": 2,
    }
    assert problems_of(with_values(DENSE, settings_of_experts)) == []


@pytest.mark.parametrize("name", ["layout.ep", "layout.etp"])
def test_expert_parallelism_needs_experts(name: str) -> None:
    (problem,) = problems_of(with_values(DENSE, {name: 2}))
    assert (problem.field, problem.what) == (name, "needs experts")


def test_something_is_trained() -> None:
    parts = ["embedding", "head", "attention", "mlp", "norms"]
    values = {"optimizer.frozen": parts, "base.train": False}
    (problem,) = problems_of(with_values(DENSE, values))
    assert problem.field == "optimizer.frozen"
    assert not problems_of(with_values(DENSE, values | {"optimizer.frozen": parts[1:]}))


def test_group_limited_routing_of_deepseek_v3_is_accepted() -> None:
    v3 = {"experts": 256, "top_k": 8, "groups": 8, "group_top_k": 4}
    assert problems_of(with_values(TINY, {f"model.moe.{name}": value for name, value in v3.items()})) == []


def test_blocks_of_8_bits_are_those_of_the_weights() -> None:
    assert FP8_BLOCK == fp8.BLOCK


def test_reward_terms_of_ones_own_are_accepted() -> None:
    terms = [RewardTerm("mine", -0.5, "my_package.rewards:score")]
    assert problems_of(with_values(TINY, {"reward.terms": terms, "reward.success": "mine"})) == []


def test_all_problems_are_reported_at_once() -> None:
    values = {"model.kv_heads": 3, "algorithm.group_size": 1, "model.dtype": "fp16", "run.name": "a/b"}
    problems = problems_of(with_values(TINY, values))
    assert len(problems) == len(values)
    assert {problem.field for problem in problems} == {"model.heads", *values} - {"model.kv_heads"}


def test_required_fields_are_reported_before_anything_else() -> None:
    problems = problems_of(Config())
    required = {"run.name", "run.steps", "model.layers", "model.context", "data.task", "reward.terms", "optimizer.lr"}
    assert required <= {problem.field for problem in problems}
    assert all(problem.what == "not set" for problem in problems)


ADVISED = [
    values
    for values, _ in BROKEN
    if re.search("not divisible by [a-z]|must be (below|at most)", problems_of(with_values(TINY, values))[0].what)
]
"""Broken values of rules that advise numbers."""


@pytest.mark.parametrize("values", ADVISED, ids=lambda values: " ".join(values))
def test_every_number_that_is_advised_solves_the_problem(values: dict[str, object]) -> None:
    broken = with_values(TINY, values)
    (problem,) = problems_of(broken)
    fixes = [(name, number) for name, numbers in re.findall(r"([\w.]+)(?:=| to )(\d+(?: or \d+)*)", problem.fix)
             for number in numbers.split(" or ")]  # fmt: skip
    assert len(fixes) >= 2
    for name, number in fixes:
        assert str(problem) not in map(str, problems_of(with_values(broken, {name: int(number)})))
        assert attrgetter(name)(broken) != int(number)


def test_a_context_is_not_advised_that_no_completion_fits_into() -> None:
    (problem,) = problems_of(with_values(TINY, {"layout.micro_batch_tokens": 1}))
    assert problem.fix == "raise layout.micro_batch_tokens to 128"


ANYTHING = st.dictionaries(
    st.sampled_from([
        "model.layers", "model.hidden", "model.heads", "model.kv_heads", "model.context", "model.moe.experts",
        "model.moe.top_k", "model.moe.groups", "model.moe.group_top_k", "layout.tp", "layout.pp", "layout.ep",
        "layout.cp", "layout.vpp", "layout.first_stage_layers", "layout.last_stage_layers",
        "algorithm.group_size", "algorithm.mini_batches", "rollout.max_new_tokens", "sft.steps", "base.gate_from",
    ]),
    st.integers(-3, 300),
    min_size=1,
)  # fmt: skip


@given(values=ANYTHING)
@settings(max_examples=100, deadline=None)
def test_no_integers_crash_the_rules_themselves(values: dict[str, object]) -> None:
    for problem in problems_of(with_values(TINY, values)):
        assert any(name in str(problem) for name in values)


@pytest.mark.parametrize(
    "word", ["optimizer.lr_floor=0.1", "distill.coef=2", "critic.lr=1", "data.tokenizer=somewhere"]
)
def test_settings_of_policies_may_be_given_to_a_reward_model_s_run(word: str) -> None:
    """Experiments that both share give them."""
    pairs = ("experiment=tiny", "base=none", "sft=none", "run.trains=reward_model", "pairs.path=a.jsonl")
    assert problems_of(compose_config([*pairs, word], checked=False)) == []


def test_a_source_that_has_no_effect_is_named() -> None:
    words = ["experiment=tiny", "data.sources.a.path=x.jsonl"]
    (problem,) = problems_of(compose_config(words, checked=False))
    assert problem.field == "data.sources"
    assert "no effect with data.task=chain_sum" in str(problem)

"""Every rule is broken once, its message names the field, and following the advice makes it go away."""

from __future__ import annotations

import re
from copy import deepcopy
from operator import attrgetter

import pytest
from composed import composed
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mega.config.rules import check_backend, check_config, check_layout
from grpo_mega.config.rules.rollout import FP8_BLOCK
from grpo_mega.config.schema import Config, RewardTerm
from grpo_mega.errors import ConfigError
from grpo_mega.weights import fp8

TINY = ("experiment=tiny", "layout=single")
DENSE = ("experiment=tiny_dense",)
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
    assert problem.startswith("data.template='Answer!' has no {prompt}, which stands for the problem")


def with_values(start: Config | tuple[str, ...], values: dict[str, object]) -> Config:
    """A configuration, or the one of these words, with other values."""
    config = composed(*start) if isinstance(start, tuple) else deepcopy(start)
    for name, value in values.items():
        *path, leaf = name.split(".")
        setattr(attrgetter(".".join(path))(config), leaf, value)
    return config


def problems_of(config: Config, world_size: int | None = None) -> list[str]:
    """The lines of the error, or nothing when the configuration is accepted."""
    try:
        check_config(config) if world_size is None else check_layout(config, world_size)
    except ConfigError as error:
        return [line.removeprefix("  - ") for line in str(error).splitlines()[1:]]
    return []


# What is broken -> how the one message begins.
STEPWISE = [RewardTerm("accuracy"), RewardTerm("sum_steps")]
"""A reward whose steps are scored."""
SHORT = {"limit": 48, "buffer": 8}
STERN = {"url": "http://judge", "model": "m", "rubric": "{completion}", "low": -1}
KIND = STERN | {"low": 1.0}
DIVIDED = "algorithm.advantage_std=mean divides by the mean reward of a group, so no reward may be negative, and"


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
    ({"model.hidden": 98}, "model.hidden=98"),
    ({"model.hidden": 100}, "model.hidden=100 gives model.heads=4 heads an odd"),
    ({"model.kv_heads": 3}, "model.heads=4 is not divisible by model.kv_heads=3"),
    ({"layout.tp": 4, "layout.sp": True}, "model.kv_heads=2 is not divisible by layout.tp=4"),
    ({"model.ffn_hidden": 255, "layout.tp": 2, "layout.sp": True}, "model.ffn_hidden=255"),
    ({"model.vocab_multiple": 33, "layout.tp": 2, "layout.sp": True}, "model.vocab_multiple=33"),
    ({"layout.pp": 3}, "model.layers=2 cannot be shared out equally over 3 pipeline stages (layout.pp=3)"),
    ({"layout.pp": 2, "layout.last_stage_layers": 2}, "model.layers=2 - layout.last_stage_layers=2 leaves 0"),
    ({"layout.last_stage_layers": 1}, "layout.last_stage_layers=1 needs pipeline stages; set layout.pp=2"),
    ({"layout.vpp": 2}, "layout.vpp=2 needs pipeline stages; set layout.pp=2"),
    (
        {"layout.attention": "torch"},
        "layout.attention=torch: model.dtype=fp32: the kernels compute in bf16; set layout.",
    ),
    (
        {"layout.attention": "flash4", "model.dtype": "bf16", "model.head_dim": 320},
        "layout.attention=flash4: heads have 320 channels: the kernels take 256",
    ),
    ({"layout.pp": 2, "layout.vpp": 2}, "layout.vpp=2 does not divide the 1 layers of a pipeline stage"),
    ({"model.moe.ffn_hidden": 65, "layout.etp": 2}, "model.moe.ffn_hidden=65 is not divisible by layout.etp=2"),
    ({"model.moe.shared_ffn_hidden": 65, "layout.tp": 2, "layout.sp": True}, "model.moe.shared_ffn_hidden=65"),
    ({"layout.ep": 3}, "model.moe.experts=4 is not divisible by layout.ep=3"),
    ({"model.attention": "mla"}, "model.kv_heads=2 has no effect"),
    ({"model.attention": "mla", "model.kv_heads": 4, "model.mla.qk_rope_dim": 7}, "model.mla.qk_rope_dim=7"),
    ({"model.attention": "mla", "model.kv_heads": 4, "model.head_dim": 24}, "model.head_dim=24 has no effect"),
    ({"model.head_dim": 25}, "model.head_dim=25: rotary positions turn channels in pairs; choose 26"),
    ({"layout.micro_batch_tokens": 127}, "model.context=128 must be at most layout.micro_batch_tokens=127"),
    ({"model.moe.top_k": 5}, "model.moe.top_k=5"),
    ({"model.moe.first_dense": 2}, "model.moe.first_dense=2"),
    ({"model.moe.score": "softmax"}, "model.moe.bias_update_rate=0.001 needs sigmoid"),
    (
        {"model.moe.score": "softmax", "model.moe.bias_update_rate": 0.0, "model.moe.top_k": 1},
        "model.moe.top_k=1 gives the router no gradient",
    ),
    ({"model.moe.groups": 2}, "model.moe.groups=2 and model.moe.group_top_k=0"),
    ({"model.moe.group_top_k": 1}, "model.moe.groups=0 and model.moe.group_top_k=1"),
    ({"model.moe.groups": 1, "model.moe.group_top_k": 2}, "model.moe.group_top_k=2 must be at most"),
    ({"model.moe.groups": 3, "model.moe.group_top_k": 2}, "model.moe.experts=4 is not divisible by model.moe.groups=3"),
    ({"model.moe.groups": 4, "model.moe.group_top_k": 1}, "model.moe.top_k=2 exceeds the 1 experts"),
    (
        {"model.moe.groups": 4, "model.moe.group_top_k": 2, "model.moe.top_k": 1},
        "model.moe.top_k=1 is not divisible by model.moe.group_top_k=2",
    ),
    ({"model.moe.frozen_bias": True}, "model.moe.frozen_bias=true needs"),
    (
        {"model.moe.frozen_bias": True, "model.moe.bias_update_rate": 0.0, "model.moe.score": "softmax"},
        "model.moe.frozen_bias=true needs",
    ),
    ({"model.yarn.factor": 4.0}, "model.yarn.factor=4.0 is for latent attention and model.family=gpt_oss"),
    ({"model.yarn.truncate": False}, "model.yarn.truncate=false is for model.family=gpt_oss"),
    ({"model.llama3_rope.low_freq_factor": 4.0}, "model.llama3_rope.high_freq_factor=4.0 must be above model.llama3"),
    (
        {"model.attention": "mla", "model.kv_heads": 4, "model.llama3_rope.factor": 8.0},
        "model.llama3_rope.factor=8.0 is for grouped-query attention",
    ),
    (
        {"model.attention": "mla", "model.kv_heads": 4, "model.qkv_bias": True},
        "model.qkv_bias=true has no effect with model.attention=mla",
    ),
    (
        {"model.attention": "mla", "model.kv_heads": 4, "model.rope_fraction": 0.5},
        "model.rope_fraction=0.5 is for grouped-query attention",
    ),
    ({"model.full_every": 2}, "model.full_every=2 has no effect without a window; set model.window"),
    ({"model.window_rope_base": 100}, "model.window_rope_base=100 has no effect without a window"),
    ({"model.window": 8, "model.mtp_layers": 1}, "model.window=8 is for grouped-query attention without prediction"),
    ({"model.family": "gemma3_text"}, "model.family=gemma3_text is for dense layers with grouped-query attention"),
    (
        {"model.attention": "mla", "model.kv_heads": 4, "model.query_pre_attn_scalar": 8},
        "model.query_pre_attn_scalar=8 is for grouped-query attention",
    ),
    ({"model.rope_fraction": 0.3}, "model.rope_fraction=0.3 of 24 channels is no even number"),
    ({"model.yarn.beta_slow": 33.0}, "model.yarn.beta_slow=33.0 must be at most model.yarn.beta_fast=32.0"),
    ({"model.mtp_layers": 1, "model.tie_embeddings": True}, "model.mtp_layers=1 reads the embedding"),
    ({"layout.sp": True}, "layout.sp=true needs tensor parallelism"),
    (
        {"layout.attention": "flash4", "model.dtype": "bf16", "model.window": 8},
        "layout.attention=flash4: its backward pass knows no window, and model.window=8; set layout.attention=torch",
    ),
    ({"layout.tp": 2}, "layout.sp=false: Megatron needs sequence parallelism for experts"),
    (
        {"layout.tp": 2, "model.moe.experts": 0, "model.attention": "mla", "model.kv_heads": 4},
        "layout.sp=false: Megatron needs sequence parallelism for latent attention",
    ),
    (
        EIGHT_BITS | {"model.dtype": "fp32"},
        "layout.fp8=true needs model.dtype=bf16, not fp32; set it, or layout.fp8=false",
    ),
    (EIGHT_BITS | {"algorithm.correction": "none"}, "layout.fp8=true moves the trainer's probabilities away"),
    (
        EIGHT_BITS | {"model.hidden": 100, "model.heads": 5, "model.kv_heads": 5, "model.head_dim": 20},
        "layout.fp8=true needs model.hidden=100 to be a multiple of 16; set layout.fp8=false",
    ),
    (
        EIGHT_BITS | {"layout.tp": 2, "layout.sp": True, "model.moe.shared_ffn_hidden": 48},
        "layout.fp8=true needs model.moe.shared_ffn_hidden=48 to be a multiple of 16 on each of 2 ranks",
    ),
    ({"data.min_terms": 6}, "data.min_terms=6"),
    ({"data.languages": ["english", "latin"]}, "data.languages[1]=latin: choose one of english, chinese"),
    ({"data.languages": ["english", "english"]}, "data.languages has a language twice"),
    (
        {"data.task": "tiny_code", "data.languages": ["english"]},
        "data.languages has no effect with data.task=tiny_code",
    ),
    ({"data.parse_special": True}, "data.parse_special=true has no effect with data.tokenizer=chars"),
    ({"data.train_path": "train.jsonl"}, "data.train_path=train.jsonl has no effect"),
    ({"data.test_path": "test.jsonl"}, "data.test_path=test.jsonl has no effect"),
    ({"data.task": "jsonl", "base.train": False, "data.test_path": "t"}, "data.train_path is not set"),
    ({"data.task": "jsonl", "data.train_path": "t", "data.test_path": "t"}, "base.train=true needs"),
    (
        {"data.task": "jsonl", "data.train_path": "t", "data.test_path": "t", "base.train": False, "sft.steps": 9},
        "sft.steps=9 needs",
    ),
    ({"reward.terms": []}, "reward.terms=[]"),
    ({"reward.success": "format_"}, "reward.success=format_"),
    ({"reward.terms": [RewardTerm("accuracy"), RewardTerm("accuracy")]}, "reward.terms has 2 terms named accuracy"),
    ({"reward.terms": [RewardTerm("a b")], "reward.success": "a b"}, "reward.terms[0].name='a b'"),
    (
        {"reward.terms": [RewardTerm("std", 1.0, "my:f")], "reward.success": "std"},
        "reward.terms[0].name=std: reward/std is a metric",
    ),
    ({"reward.terms": [RewardTerm("accuracy", float("nan"))]}, "reward.terms[0].weight=nan"),
    ({"reward.terms": [RewardTerm("accuracy", 1.0, "my.module.f")]}, "reward.terms[0].function='my.module.f'"),
    (
        {"reward.terms": [RewardTerm("accuracy"), RewardTerm()]},
        "reward.terms[1] has neither name nor kind nor function",
    ),
    ({"reward.terms": [RewardTerm("accuracy", kind="bxoed")]}, "reward term 'bxoed' is not built in"),
    (
        {"reward.terms": [RewardTerm("accuracy", 1.0, "my:f", "boxed")]},
        "reward.terms[0].kind=boxed and function=my:f exclude each other",
    ),
    (
        {"reward.terms": [RewardTerm("accuracy", 1.0, "my:f", options={"a b": 1})]},
        "reward.terms[0].options: 'a b' cannot be the name of an argument",
    ),
    (
        {"reward.terms": [RewardTerm("accuracy", kind="exact", options={"raed": "tag"})]},
        "reward.terms[0].options.raed is no option of exact; did you mean read?",
    ),
    (
        {"reward.on_error": "leave-out"},
        "reward.on_error=leave-out: choose one of stop, leave_out; did you mean leave_out",
    ),
    ({"data.tokenizer": "models/x"}, "data.tokenizer=models/x has no effect with data.task=chain_sum"),
    ({"data.task": "tiny_code", "data.tokenizer": "m"}, "data.tokenizer=m has no effect with data.task=tiny_code"),
    ({"data.task": "tiny_code", "data.train_path": "a"}, "data.train_path=a has no effect with data.task=tiny_code"),
    ({"data.task": "tiny_mixture", "data.curriculum": "frontier"}, "data.curriculum=frontier has no effect"),
    ({"data.task": "tiny_mixture", "data.train_size": 1}, "data.train_size=1 must be at least 2"),
    ({"data.train_size": 0}, "data.train_size=0: choose a value in"),
    (
        {"data.task": "jsonl", "data.train_path": "t", "base.train": False, "data.train_size": 9},
        "data.train_size=9 has no effect with data.task=jsonl",
    ),
    ({"data.task": "tiny_mixture", "data.min_terms": 9}, "data.min_terms=9 must be at most data.max_terms"),
    ({"data.task": "tiny_code", "sft.steps": 9}, "sft.steps=9 needs rows to learn, and data.task=tiny_code"),
    ({"data.template": "chat"}, "data.template='chat' has no effect with data.tokenizer=chars"),
    ({"data.question": "{prompt}?"}, "data.question='{prompt}?' has no effect with data.tokenizer=chars"),
    ({"algorithm.group_size": 1}, "algorithm.group_size=1: algorithm.advantage_baseline=mean is relative to the group"),
    (
        {"distill.teacher": "http://host:30000", "rollout.temperature": 0.7},
        "rollout.temperature=0.7 does not go with distill.teacher=http://host:30000: SGLang scores a text at",
    ),
    (TAUGHT | {"distill.timeout_seconds": 9.0}, "distill.timeout_seconds=9 is for a teacher that is a server"),
    (
        {"distill.teacher": "http://host:30000", "layout.ep": 2, "model.moe.experts": 0},
        "layout.ep=2 needs experts; set model.moe.experts above 0, or layout.ep=1",
    ),
    ({"distill.reward_coef": 1.0}, "distill.reward_coef=1.0 has no effect without a teacher; set distill.teacher"),
    (
        TAUGHT | {"algorithm.group_size": 1, "distill.reward_coef": 0.5},
        "algorithm.group_size=1: algorithm.advantage_baseline=mean is relative to the group",
    ),
    (TAUGHT | CRITIC, "algorithm.advantage_baseline=critic does not go with distill.teacher=runs/teacher"),
    (
        TAUGHT | {"algorithm.objective": "gspo"},
        "algorithm.objective=gspo does not go with distill.teacher=runs/teacher",
    ),
    (
        TAUGHT | {"algorithm.groups_without_signal": "drop"},
        "algorithm.groups_without_signal=drop does not go with distill.teacher=runs/teacher, which has something",
    ),
    (
        TAUGHT | {"algorithm.kl_in": "reward", "algorithm.kl_coef": 0.1, "algorithm.advantage_std": "none"},
        "algorithm.kl_in=reward does not go with distill.teacher=runs/teacher, which with distill.reward_coef=0 leaves",
    ),
    (
        TAUGHT | {"algorithm.supervision": "process", "reward.terms": STEPWISE},
        "algorithm.supervision=process does not go with distill.teacher=runs/teacher",
    ),
    ({"critic.lr": 1e-3}, "critic.lr=0.001 has no effect with algorithm.advantage_baseline=mean; set that to critic"),
    (
        CRITIC | {"optimizer.frozen": ["norms"], "base.train": False},
        "optimizer.frozen=['norms'] does not go with algorithm.advantage_baseline=critic",
    ),
    (CRITIC | {"algorithm.advantage_std": "sample"}, "algorithm.advantage_std=sample does not go with"),
    (CRITIC | {"algorithm.groups_without_signal": "drop"}, "algorithm.groups_without_signal=drop does not go with"),
    (
        CRITIC | {"algorithm.objective": "gspo"},
        "algorithm.objective=gspo does not go with algorithm.advantage_baseline=critic",
    ),
    (
        CRITIC
        | {"base.train": False, "lora.rank": 4, "model.moe.bias_update_rate": 0.0, "model.moe.frozen_bias": True},
        "lora.rank=4 does not go with algorithm.advantage_baseline=critic",
    ),
    (CRITIC | {"critic.alone_steps": 80}, "critic.alone_steps=80 leaves none of run.steps=80 to the policy"),
    ({"algorithm.mini_batches": 257}, "algorithm.mini_batches=257"),
    (
        {"algorithm.advantage_baseline": "batch"},
        "algorithm.advantage_baseline=batch does not go with algorithm.advantage_std=sample",
    ),
    (
        {"algorithm.advantage_std": "mean", "algorithm.advantage_baseline": "optimal"},
        "algorithm.advantage_std=mean divides what the mean was subtracted from",
    ),
    *((values, f"{DIVIDED} {field}") for field, values in NEGATIVE.items()),
    (
        {"algorithm.terms_apart": True, "algorithm.advantage_std": "none"},
        "algorithm.terms_apart=true makes terms comparable by their deviation",
    ),
    ({"algorithm.reference_refresh": 400}, "algorithm.reference_refresh=400"),
    ({"algorithm.objective": "cispo", "algorithm.dual_clip": 3.0}, "algorithm.dual_clip=3.0 has no effect"),
    ({"algorithm.objective": "gmpo", "algorithm.dual_clip": 3.0}, "algorithm.dual_clip=3.0 has no effect"),
    ({"algorithm.objective": "reinforce"}, "algorithm.objective=reinforce: choose one of ppo, cispo, sapo, gspo"),
    (
        {"algorithm.correction_level": "sequence"},
        "algorithm.correction_level=sequence has no effect with algorithm.correction=none; set algorithm.correction=",
    ),
    ({"algorithm.correction_normalized": True}, "algorithm.correction_normalized=true has no effect"),
    ({"algorithm.kl_in": "reward"}, "algorithm.kl_in=reward has no effect without a KL term"),
    *(
        (
            {"algorithm.kl_in": "reward", "algorithm.kl_coef": 0.1, "algorithm.advantage_std": std}
            | {f"algorithm.{name}": value},
            f"algorithm.{name}={str(value).lower()} {why}, and does not go with algorithm.kl_in=reward",
        )
        for name, value, why, std in (
            ("kl_unbiased", True, "is about a KL term in the loss", "none"),
            ("terms_apart", True, "has no total reward that it could lower", "sample"),
            *(
                (
                    "advantage_std",
                    std,
                    "divides by what is left of a group of equal rewards, the penalties' rounding,",
                    std,
                )
                for std in ("sample", "population", "mean")
            ),
            ("groups_without_signal", "drop", "drops by the reward alone", "none"),
            ("groups_without_signal", "refill", "drops by the reward alone", "none"),
        )
    ),
    *(
        (
            {"algorithm.supervision": "process", "reward.terms": STEPWISE} | values,
            f"algorithm.{name}={value} {why}, and does not go with algorithm.supervision=process; set "
            f"algorithm.{name}={other} or",
        )
        for name, value, why, other, values in (
            (
                "advantage_baseline",
                "optimal",
                "is of the rewards of completions",
                "mean",
                {"algorithm.advantage_baseline": "optimal"},
            ),
            *(
                ("advantage_std", std, "is of the rewards of completions", "sample", {"algorithm.advantage_std": std})
                for std in ("mean", "batch", "batch_rewards")
            ),
            (
                "terms_apart",
                "true",
                "normalises each term of a completion's reward",
                "false",
                {"algorithm.terms_apart": True},
            ),
            (
                "kl_in",
                "reward",
                "lowers the rewards of completions",
                "loss",
                {"algorithm.kl_in": "reward", "algorithm.kl_coef": 0.1, "algorithm.advantage_std": "none"},
            ),
            *(
                (
                    "objective",
                    kind,
                    "has one ratio and one advantage for a whole completion",
                    other,
                    {"algorithm.objective": kind},
                )
                for kind, other in (("gspo", "gspo_token"), ("gmpo", "ppo"), ("vespo", "ppo"))
            ),
        )
    ),
    (
        {"algorithm.supervision": "process"},
        "algorithm.supervision=process rewards steps, and no term of the reward scores them; add a function",
    ),
    (
        {"algorithm.supervision": "process", "reward.terms": [RewardTerm("accuracy"), RewardTerm("sum_steps", 0.0)]},
        "algorithm.supervision=process rewards steps, and no term of the reward scores them; add a function",
    ),
    (
        {"algorithm.supervision": "processes"},
        "algorithm.supervision=processes: choose one of outcome, process; did you",
    ),
    *(
        (
            {"algorithm.objective": "sapo"} | bound,
            "algorithm.clip_low=0.2 and algorithm.clip_high=0.28 have no effect on algorithm.objective=sapo"
            if "algorithm.clip_high" in bound
            else "algorithm.clip_low=0.1 and algorithm.clip_high=0.2 have no effect on algorithm.objective=sapo",
        )
        for bound in ({"algorithm.clip_high": 0.28}, {"algorithm.clip_low": 0.1})
    ),
    *(
        (
            {"algorithm.objective": "cispo", "algorithm.clip_low": 0.0, "algorithm.clip_high": 0.0} | {more: 2},
            f"algorithm.epochs={1 + ('epochs' in more)} and algorithm.mini_batches={1 + ('mini' in more)} make 2 "
            "updates of a rollout, and with algorithm.clip_low=0 and algorithm.clip_high=0 there is no",
        )
        for more in ("algorithm.epochs", "algorithm.mini_batches")
    ),
    (
        {"algorithm.correction_cap": 5.0},
        "algorithm.correction_cap=5.0 has no effect with algorithm.correction=none; set algorithm.correction=mask or",
    ),
    (
        {"algorithm.tau_pos": 3.0},
        "algorithm.tau_pos=3.0 and algorithm.tau_neg=1.05 have an effect on algorithm.objective=sapo",
    ),
    (
        {"algorithm.objective": "vespo", "algorithm.vespo_k_pos": 50.0, "algorithm.vespo_lambda_pos": 1e-9},
        "algorithm.vespo_k_pos=50.0 and algorithm.vespo_lambda_pos=1e-09: the factor of a sequence, 1",
    ),
    (
        {"algorithm.vespo_k_neg": 4.0},
        "algorithm.vespo_k_neg=4.0 has an effect on algorithm.objective=vespo alone, not on ppo; leave it out",
    ),
    (
        {"algorithm.objective": "vespo", "algorithm.clip_high": 0.28},
        "algorithm.clip_low=0.2 and algorithm.clip_high=0.28 have no effect on algorithm.objective=vespo, whose",
    ),
    (
        {
            "algorithm.advantage_baseline": "batch",
            "algorithm.advantage_std": "batch",
            "algorithm.groups_without_signal": "drop",
        },
        "algorithm.groups_without_signal=drop drops none with algorithm.advantage_baseline=batch",
    ),
    (
        {
            "algorithm.advantage_baseline": "batch",
            "algorithm.advantage_std": "batch",
            "algorithm.groups_without_signal": "refill",
        },
        "algorithm.groups_without_signal=refill drops none with algorithm.advantage_baseline=batch",
    ),
    (
        {"algorithm.refill_limit": 3},
        "algorithm.refill_limit=3 has no effect with algorithm.groups_without_signal=count; set that to refill",
    ),
    (
        {"algorithm.groups_without_signal": "refill", "reward.model.path": "runs/judge"},
        "algorithm.groups_without_signal=refill asks for a group's rewards while others are generated",
    ),
    ({"algorithm.kl_unbiased": True}, "algorithm.kl_unbiased=true has no effect without a KL term"),
    (
        {"algorithm.correction_floor": 0.5},
        "algorithm.correction_floor=0.5 has no effect with algorithm.correction=none",
    ),
    ({"rollout.temperature": 0.0}, "rollout.temperature=0.0"),
    ({"rollout.max_new_tokens": 128}, "rollout.max_new_tokens=128 must be below model.context=128"),
    ({"rollout.longer_from_step": 9}, "rollout.longer_from_step=9 and rollout.longer_max_new_tokens=None go together"),
    ({"rollout.longer_max_new_tokens": 96}, "rollout.longer_from_step=None and rollout.longer_max_new_tokens=96 go"),
    (
        {"rollout.longer_from_step": 9, "rollout.longer_max_new_tokens": 48},
        "rollout.max_new_tokens=48 must be below rollout.longer_max_new_tokens=48",
    ),
    (
        {"rollout.longer_from_step": 9, "rollout.longer_max_new_tokens": 128},
        "rollout.longer_max_new_tokens=128 must be below model.context=128",
    ),
    ({"run.init_from": "checkpoints/9"}, "run.init_from=checkpoints/9 contradicts"),
    ({"base.gate_from": 1201}, "base.gate_from=1201"),
    ({"base.gate_passes": 30}, "base.gate_from=150, base.gate_every=50 and base.gate_passes=30 let the gate"),
    ({"sft.steps": 5}, "sft.warmup_steps=5 must be below sft.steps=5"),
    ({"lora.alpha": 9.0}, "lora.alpha and lora.targets have no effect with lora.rank=0; set lora.rank, or leave them"),
    (
        {"model.window": 8, "model.window_rope_base": 100, "model.llama3_rope.factor": 8.0},
        "model.llama3_rope.factor=8.0 would stretch positions within windows, which have model.window_rope_base=100",
    ),
    (
        {"model.window": 8, "rollout.engine": "sglang", "layout.ep": 1},
        "model.window=8 with rollout.engine=sglang: SGLang's Mistral and Ministral have no windows; set rollout.engine",
    ),
    ({"optimizer.decay_steps": 9}, "optimizer.decay_steps=9 has no effect with optimizer.schedule=constant; set it"),
    ({"optimizer.lr_floor": 0.1}, "optimizer.lr_floor=0.1 has no effect with optimizer.schedule=constant; set it to 0"),
    ({"optimizer.schedule": "cosine", "optimizer.lr_floor": 1.1}, "optimizer.lr_floor=1.1: choose a value in [0, 1]"),
    ({"optimizer.schedule": "wsd"}, "optimizer.decay_steps is not set, and optimizer.schedule=wsd has to know when"),
    (
        {"optimizer.schedule": "linear", "optimizer.warmup_steps": 160, "algorithm.mini_batches": 2},
        "optimizer.warmup_steps=160 leaves 0 of 80 steps, and optimizer.schedule=linear takes two or more",
    ),
    (
        {"optimizer.schedule": "wsd", "optimizer.decay_steps": 76},
        "optimizer.decay_steps=76 is more than the 75 steps after warm-up; lower it to 75, or raise run.steps",
    ),
    (
        {"optimizer.schedule": "cosine", "optimizer.decay_steps": 70},
        "optimizer.lr_floor=0 leaves the last 5 of 80 steps without a learning rate; set it above 0",
    ),
    (
        {"sft.steps": 9, "sft.schedule": "cosine", "sft.decay_steps": 5},
        "sft.decay_steps=5 is more than the 4 steps after warm-up; lower it to 4, or raise sft.steps",
    ),
    ({"layout.dispatch": "flex"}, "layout.dispatch=flex"),
    (
        {"layout.dispatch": "deepep", "model.dtype": "bf16"},
        "layout.dispatch=deepep has kernels for layout.ep of 2, 4, 8",
    ),
    (
        {"layout.dispatch": "deepep", "layout.ep": 2, "layout.etp": 2, "model.dtype": "bf16"},
        "layout.dispatch=deepep keeps experts whole; set layout.etp=1, not 2",
    ),
    (
        {"layout.dispatch": "deepep", "layout.ep": 2},
        "layout.dispatch=deepep sends bf16; set model.dtype=bf16, not fp32",
    ),
    (
        {"layout.dispatch": "deepep", "layout.ep": 16, "model.moe.experts": 16, "model.dtype": "bf16"}
        | {"cluster.gpus_per_node": 4},
        "layout.dispatch=deepep needs machines of 8 GPUs for layout.ep=16, and cluster.gpus_per_node=4; set it to 8",
    ),
    (
        {"optimizer.state.moments": "bf16"},
        "optimizer.state.moments=bf16 needs Megatron's distributed optimizer, whose inner one keeps its own state; set",
    ),
    ({"optimizer.state.on_host": True}, "optimizer.state.on_host=true needs Megatron's distributed optimizer"),
    (
        {"optimizer.distributed": True, "optimizer.state.moments": "bf16", "optimizer.beta2": 0.999},
        "optimizer.beta2=0.999 is too slow for optimizer.state.moments=bf16: what an update takes of a moment would be",
    ),
    ({"optimizer.state.moments": "fp16"}, "optimizer.state.moments=fp16"),
    ({"optimizer.parts.predictors.lr_multiplier": 2.0}, "optimizer.parts.predictors has settings, and with model.mtp"),
    ({"optimizer.parts.norms.weight_decay": 0.1}, "optimizer.parts.norms.weight_decay=0.1 has no effect"),
    ({"optimizer.frozen": ["heads"], "base.train": False}, "optimizer.frozen has heads: choose from embedding, head,"),
    (
        {"optimizer.frozen": ["head"], "optimizer.parts.head.lr_multiplier": 2.0, "base.train": False},
        "optimizer.parts.head has settings, and optimizer.frozen has head; take it out of one",
    ),
    (
        {"optimizer.frozen": ["head"], "model.tie_embeddings": True, "base.train": False},
        "optimizer.frozen has head, and with model.tie_embeddings=true it is the embedding",
    ),
    (
        {"optimizer.frozen": ["adapters"], "base.train": False},
        "optimizer.frozen has adapters, and with lora.rank=0 there are none; take it out",
    ),
    ({"optimizer.frozen": ["embedding"]}, "optimizer.frozen=['embedding'] keeps weights as they were loaded, and base"),
    (
        {"optimizer.frozen": ["router"], "base.train": False},
        "optimizer.frozen has router, and model.moe.bias_update_rate=0.001 changes the choice",
    ),
    ({"base.train": False, "run.steps": 0}, "run.steps=0 leaves nothing to do without supervised steps; set run.steps"),
    ({"sft.path": "a.jsonl"}, "sft.path=a.jsonl has no effect without steps; set sft.epochs=1"),
    ({"sft.path": "a", "sft.epochs": 1, "sft.steps": 9}, "sft.steps=9 and sft.epochs=1 both say how long"),
    ({"sft.epochs": 1}, "sft.epochs=1 is about the rows of sft.path; give sft.path=FILE.jsonl, or set sft.epochs=0"),
    ({"sft.too_long": "cut"}, "sft.too_long=cut is about the rows of sft.path"),
    ({"sft.max_tokens": 9}, "sft.max_tokens=9 is about the rows of sft.path"),
    ({"sft.path": "a", "sft.epochs": 1, "sft.max_tokens": 129}, "sft.max_tokens=129 must be at most model.context=128"),
    ({"reward.terms": [RewardTerm("accuracy", 1e300)]}, "reward.terms[0].weight=1e+300: choose a value in"),
    ({"reward.terms": [RewardTerm("accuracy", 1), RewardTerm("format", -2e6)]}, "reward.terms[1].weight=-2000000.0: "),
    ({"reward.terms": [RewardTerm("accuracy", 0.0)]}, "reward.terms all have weight 0"),
    ({"rollout.temperature": 1e-30}, "rollout.temperature=1e-30: choose a value in [1e-06, 1000000]"),
    ({"model.vocab_size": 10**10}, "model.vocab_size=10000000000: choose a value in [1, 10000000]"),
    ({"run.seed": 2**64}, "run.seed=18446744073709551616: choose a value in [0, 4294967295]"),
    ({"run.root": ""}, "run.root='' names no directory"),
    ({"run.name": "a" * 101}, "run.name has 101 characters"),
    ({"run.name": "../elsewhere"}, "run.name='../elsewhere'"),
    ({"run.name": ""}, "run.name=''"),
    ({"run.name": ".."}, "run.name='..'"),
    ({"run.name": "a b\n"}, "run.name='a b\\n'"),
    ({"run.profile_steps": "5:3"}, "run.profile_steps: '5:3' has no step: its last one comes before its first"),
    ({"run.profile_steps": "a:b"}, "run.profile_steps: 'a:b' is no range of steps: write FIRST:LAST, such as 3:5"),
    ({"run.profile_steps": "0:3"}, "run.profile_steps: '0:3' begins before the first step"),
    ({"run.profile_steps": "9:12", "run.steps": 8}, "run.profile_steps=9:12 begins after the last step: run.steps=8"),
    (
        {"run.trackers": ["wandbb"]},
        "run.trackers names 'wandbb': choose of wandb, trackio, mlflow; did you mean",
    ),
    (
        {"run.stop_on": ["any", "truncatio"]},
        "run.stop_on names the alarm 'truncatio': choose of any, never_right, entropy_collapse",
    ),
    ({"run.stop_on": ["mismatch"], "alarms.mismatch": None}, "run.stop_on names the alarm mismatch, which is off"),
]


@pytest.mark.parametrize(("values", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_a_broken_rule_is_the_only_problem_and_names_its_field(values: dict[str, object], message: str) -> None:
    (problem,) = problems_of(with_values(TINY, values))
    assert problem.startswith(message)


GPT_OSS: dict[str, object] = {
    "model.family": "gpt_oss", "model.qkv_bias": True, "model.moe.score": "softmax", "model.moe.bias_update_rate": 0.0,
    "model.moe.shared_ffn_hidden": 0, "model.moe.first_dense": 0, "model.qk_norm": False, "model.window": 8,
    "model.ffn_hidden": 64,  # as the experts of tiny have
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model.qk_norm": True}, "model.qk_norm=true with model.family=gpt_oss"),
        (
            {"model.window": None},
            "model.window=null with model.family=gpt_oss, whose layers have one; set",
        ),
        ({"model.ffn_hidden": 7}, "model.ffn_hidden=7 with model.family=gpt_oss, whose layers know only"),
        ({"model.qkv_bias": False}, "model.qkv_bias=false with model.family=gpt_oss, whose layers know only true; set"),
        ({"model.moe.experts": 0}, "model.family=gpt_oss needs experts"),
        ({"model.moe.score": "sigmoid"}, "model.moe.score=sigmoid with model.family=gpt_oss, whose layers"),
        ({"model.moe.shared_ffn_hidden": 64}, "model.moe.shared_ffn_hidden=64 with model.family=gpt_oss"),
        ({"model.moe.first_dense": 1}, "model.moe.first_dense=1 with model.family=gpt_oss"),
        ({"model.llama3_rope.factor": 8.0}, "model.llama3_rope.factor=8.0 with model.family=gpt_oss"),
        ({"layout.etp": 2}, "layout.etp=2 with model.family=gpt_oss: Megatron cannot split experts that have"),
        ({"rollout.engine": "sglang"}, "model.family=gpt_oss with rollout.engine=sglang: nothing tests that SGLang"),
    ],
)
def test_what_the_layers_of_gpt_oss_have_not(values: dict[str, object], message: str) -> None:
    assert not problems_of(with_values(TINY, GPT_OSS | {"model.yarn.factor": 4.0, "model.yarn.truncate": False}))
    assert any(problem.startswith(message) for problem in problems_of(with_values(TINY, GPT_OSS | values)))


ADAPTERS = {"base.train": False, "lora.rank": 8, "model.moe.bias_update_rate": 0.0, "model.moe.frozen_bias": True}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lora.rank": -1}, "lora.rank=-1: choose a value in [0, inf)"),
        (EIGHT_BITS, "layout.fp8=true does not go with lora.rank=8: adapters are products of their own"),
        ({"lora.alpha": 0.0}, "lora.alpha=0.0: choose a value in (0, inf)"),
        ({"lora.targets": ["attention", "expert"]}, "lora.targets has expert: choose from"),
        ({"lora.targets": []}, "lora.targets=[] names no matrix of this model that every token meets"),
        (
            {"lora.targets": ["experts"]},
            "lora.targets=['experts'] names no matrix of this model that every token meets",
        ),
        (
            {"lora.targets": ["mlp", "experts"], "model.moe.shared_ffn_hidden": 0},
            "lora.targets=['mlp', 'experts'] names no matrix",
        ),
        (
            {"lora.targets": ["mlp"], "layout.pp": 2, "model.moe.first_dense": 1, "model.moe.shared_ffn_hidden": 0},
            "lora.targets=['mlp'] leaves layers without adapters, and with layout.pp=2",
        ),
        ({"base.train": True}, "lora.rank=8 trains adapters of a model that exists, and base.train=true makes one"),
        ({"model.moe.bias_update_rate": 1e-3, "model.moe.frozen_bias": False}, "lora.rank=8 leaves the routers as"),
    ],
)
def test_adapters_need_a_model_that_stays_as_it_is(values: dict[str, object], message: str) -> None:
    adapted = with_values(TINY, ADAPTERS)
    assert problems_of(adapted) == []
    (problem,) = problems_of(with_values(adapted, values))
    assert problem.startswith(message)


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
    assert problem.startswith(f"{name}=2 needs experts")


def test_something_is_trained() -> None:
    parts = ["embedding", "head", "attention", "mlp", "norms"]
    values = {"optimizer.frozen": parts, "base.train": False}
    (problem,) = problems_of(with_values(DENSE, values))
    assert problem.startswith("optimizer.frozen has every part of the model")
    assert not problems_of(with_values(DENSE, values | {"optimizer.frozen": parts[1:]}))


def test_group_limited_routing_of_deepseek_v3_is_accepted() -> None:
    v3 = {"experts": 256, "top_k": 8, "groups": 8, "group_top_k": 4}
    assert problems_of(with_values(TINY, {f"model.moe.{name}": value for name, value in v3.items()})) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rollout.sglang.tp": 2}, "rollout.sglang.tp has no effect with rollout.engine=embedded"),
        ({"rollout.sglang.arguments": {"a": 1}}, "rollout.sglang.arguments has no effect with rollout.engine=embedded"),
        ({"rollout.engine": "sglang", "rollout.sglang.arguments": {"tp_size": 2}}, "rollout.sglang.arguments.tp_size "),
        (
            {"rollout.engine": "sglang", "rollout.sglang.transport": "network"}
            | {"rollout.sglang.arguments": {"speculative_algorithm": "EAGLE"}},
            "rollout.sglang.arguments.speculative_algorithm: a draft model would wait",
        ),
        ({"rollout.engine": "sglang", "rollout.sglang.arguments": {"pp_size": 2}}, "rollout.sglang.arguments.pp_size "),
        (
            {"rollout.engine": "sglang", "rollout.sglang.arguments": {"context_length": 16}},
            "rollout.sglang.arguments.context_length follows from model.context; give ~rollout.",
        ),
        ({"rollout.engine": "sglang", "rollout.sglang.fp8": True}, "rollout.sglang.fp8=true rounds weights that are "),
        (
            {"rollout.engine": "sglang", "rollout.sglang.first_gpu": 4},
            "rollout.sglang.first_gpu=4 puts the engines ",
        ),
        (
            {"rollout.engine": "sglang", "rollout.sglang.tp": 2, "rollout.sglang.arguments": {"ep_size": 4}},
            "rollout.sglang.arguments.ep_size=4 must divide rollout.sglang.tp=2 and model.moe.experts=",
        ),
        (
            {"rollout.engine": "sglang", "rollout.sglang.arguments": {"moe_a2a_backend": "deepep"}},
            "rollout.sglang.arguments.moe_a2a_backend makes an engine take more of a GPU",
        ),
        (
            {"rollout.engine": "sglang", "rollout.sglang.tp": 2}
            | {"rollout.sglang.arguments": {"enable_dp_attention": True, "dp_size": 4}},
            "rollout.sglang.arguments.dp_size=4 must divide rollout.sglang.tp=2; choose 1 or 2",
        ),
        (
            {"rollout.engine": "sglang", "rollout.sglang.tp": 2, "rollout.sglang.arguments": {"attn_dp_size": 0}},
            "rollout.sglang.arguments.attn_dp_size=0 must divide rollout.sglang.tp=2; choose 1 or 2",
        ),
        (
            {"rollout.engine": "sglang", "rollout.sglang.tp": 2}
            | {"rollout.sglang.arguments": {"enable_dp_attention": True, "attn_dp_size": 2}},
            "rollout.sglang.arguments.attn_dp_size means the same as enable_dp_attention with dp_size",
        ),
        (
            {"rollout.engine": "sglang", "rollout.sglang.tp": 2, "rollout.sglang.arguments": {"dp_size": 2}},
            "rollout.sglang.arguments.dp_size makes copies of an engine, and each rank has a part of one; set it to 1,",
        ),
        (
            {"rollout.engine": "sglang", "rollout.sglang.fp8": True, "model.dtype": "bf16", "model.moe.ffn_hidden": 128}
            | {"model.ffn_hidden": 128, "model.moe.shared_ffn_hidden": 256, "rollout.sglang.tp": 2}
            | {"rollout.sglang.arguments": {"moe_dense_tp_size": 1}},
            "rollout.sglang.fp8=true needs blocks of 128 columns, and model.moe.ffn_hidden=128 on 2 GPUs has none",
        ),
        (
            {"rollout.sglang.timeouts.engine_loading": 1.0},
            "rollout.sglang.timeouts has no effect with rollout.engine=embedded",
        ),
        (
            {"rollout.engine": "sglang", "rollout.sglang.timeouts.engine_releasing": 300.0},
            "rollout.sglang.timeouts.engine_releasing=300 is not above rollout.sglang.answer_seconds=300",
        ),
    ],
)
def test_settings_of_sglang_are_neither_idle_nor_twice(values: dict[str, object], message: str) -> None:
    (problem,) = problems_of(with_values(TINY, values))
    assert problem.startswith(message)


def test_settings_of_the_embedded_engine_are_no_rules_for_sglang() -> None:
    too_few = {"rollout.concurrent_sequences": 7}
    (problem,) = problems_of(with_values(TINY, too_few))
    assert problem.startswith("algorithm.group_size=8 must be at most rollout.concurrent_sequences=7; lower")
    large = {"rollout.engine": "sglang", "algorithm.group_size": 513}
    assert problems_of(with_values(TINY, large)) == []
    assert problems_of(with_values(TINY, {"rollout.engine": "sglang"} | too_few)) == []  # for the base model's gate
    (problem,) = problems_of(with_values(TINY, {"rollout.engine": "sglang", "base.train": False} | too_few))
    assert problem.startswith("rollout.concurrent_sequences=7 has no effect with rollout.engine=sglang and base.train")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"suspend_process_groups": False}, "rollout.sglang.suspend_process_groups=false has no effect with rollout."),
        ({"timeouts.engine_loading": 300.0}, "rollout.sglang.timeouts.engine_loading=300 is not above"),
    ],
)
def test_on_gpus_of_their_own_nobody_makes_room(values: dict[str, object], message: str) -> None:
    apart = {"rollout.engine": "sglang", "rollout.sglang.first_gpu": 4, "rollout.sglang.transport": "network"}
    values = {f"rollout.sglang.{name}": value for name, value in values.items()}
    (problem,) = problems_of(with_values(TINY, apart | values))
    assert problem.startswith(message)
    assert problems_of(with_values(TINY, apart | {"rollout.sglang.answer_seconds": 700.0})) == []


def test_server_arguments_of_ones_own_are_accepted() -> None:
    arguments = {"rollout.engine": "sglang", "rollout.sglang.arguments": {"mem_fraction_static": 0.6}}
    assert problems_of(with_values(TINY, arguments)) == []


def test_what_has_no_effect_is_undone_by_the_overrides_that_are_advised() -> None:
    """An experiment's file may have set it, so there may be nothing that the user could leave out."""
    own = [
        "rollout.sglang.timeouts.engine_loading=3",
        "+rollout.sglang.arguments.log_level=info",
        "rollout.sglang.transport=disk",
    ]
    command = ["experiment=tiny_sglang", *own, "rollout.engine=embedded"]
    with pytest.raises(ConfigError) as refused:
        composed(*command)
    undone = re.findall(r"give (.*?), or rollout.engine=sglang", str(refused.value))
    assert len(undone) == 3
    assert composed(*command, *" ".join(undone).split()).rollout.engine == "embedded"


def test_reduction_without_replicas_is_turned_off_by_the_override_that_is_advised() -> None:
    (problem,) = problems_of(with_values(DENSE, {"optimizer.overlap": True}), 1)
    assert "set optimizer.overlap=false" in problem


def test_a_released_model_keeps_its_shape() -> None:
    with pytest.raises(ConfigError) as refused:
        composed("experiment=qwen3_30b_a3b", "layout.tp=8")
    assert "model.kv_heads=4 is not divisible by layout.tp=8; choose layout.tp=4" in str(refused.value)
    assert "choose model.kv_heads" not in str(refused.value)


def test_a_lone_process_is_told_of_the_layout_for_one() -> None:
    (problem,) = problems_of(with_values(TINY, {"layout.tp": 2}), 1)
    assert problem.endswith("start 2 processes, or choose layout=single")


def test_blocks_of_8_bits_are_those_of_the_weights() -> None:
    assert FP8_BLOCK == fp8.BLOCK


def test_reward_terms_of_ones_own_are_accepted() -> None:
    terms = [RewardTerm("mine", -0.5, "my_package.rewards:score")]
    assert problems_of(with_values(TINY, {"reward.terms": terms, "reward.success": "mine"})) == []


def test_all_problems_are_reported_at_once() -> None:
    values = {"model.kv_heads": 3, "algorithm.group_size": 1, "model.dtype": "fp16", "run.name": "a/b"}
    problems = problems_of(with_values(TINY, values))
    assert len(problems) == len(values)
    assert all(any(name in problem for problem in problems) for name in values)


def test_required_fields_are_reported_before_anything_else() -> None:
    problems = problems_of(Config())
    required = {"run.name", "run.steps", "model.layers", "model.context", "data.task", "reward.terms", "optimizer.lr"}
    assert required <= {problem.split()[0] for problem in problems}
    assert all("is not set; give " in problem for problem in problems)


# The messages that advise numbers.
ADVISED = [
    (values, message)
    for values, message in BROKEN
    if re.search("is not divisible|must be (below|at most)", "".join(problems_of(with_values(TINY, values))))
]


@pytest.mark.parametrize(("values", "message"), ADVISED, ids=[message for _, message in ADVISED])
def test_every_number_that_is_advised_solves_the_problem(values: dict[str, object], message: str) -> None:
    broken = with_values(TINY, values)
    (problem,) = problems_of(broken)
    advice = problem.split("; ")[1]
    fixes = [(name, number) for name, numbers in re.findall(r"([\w.]+)(?:=| to )(\d+(?: or \d+)*)", advice)
             for number in numbers.split(" or ")]  # fmt: skip
    assert len(fixes) >= 2
    for name, number in fixes:
        assert problem not in problems_of(with_values(broken, {name: int(number)}))
        assert attrgetter(name)(broken) != int(number)


def test_a_context_is_not_advised_that_no_completion_fits_into() -> None:
    (problem,) = problems_of(with_values(TINY, {"layout.micro_batch_tokens": 1}))
    assert problem.endswith("; raise layout.micro_batch_tokens to 128")


def test_stages_that_leave_nothing_for_the_others_are_named() -> None:
    values = {"model.layers": 4, "layout.pp": 2, "layout.last_stage_layers": 4}
    (problem,) = problems_of(with_values(TINY, values))
    assert "leaves 0 layers to share out equally over the other stages (1 of layout.pp=2)" in problem


def test_a_smaller_expert_parallel_size_fits_the_processes_too() -> None:
    config = with_values(TINY, {"model.moe.experts": 6, "layout.ep": 4})
    (problem,) = problems_of(config)
    (size,) = advised(r"layout.ep=(\d+)$", problem)
    config = with_values(config, {"layout.ep": size})
    assert problems_of(config) == problems_of(config, 4) == []


LAYOUTS = st.fixed_dictionaries({
    "layout.tp": st.integers(1, 6),
    "layout.pp": st.integers(1, 6),
    "layout.ep": st.integers(1, 6),
    "layout.etp": st.integers(1, 3),
    "algorithm.prompts_per_step": st.integers(1, 40),
})  # fmt: skip


@given(values=LAYOUTS, world_size=st.integers(1, 48))
@settings(max_examples=200, deadline=None)
def test_layouts_are_accepted_exactly_when_megatron_can_build_them(values: dict[str, int], world_size: int) -> None:
    tp, pp, ep, etp = (values[f"layout.{name}"] for name in ("tp", "pp", "ep", "etp"))
    prompts = values["algorithm.prompts_per_step"]
    dense_fits = world_size % (tp * pp) == 0
    experts_fit = world_size % (etp * ep * pp) == 0
    buildable = dense_fits and experts_fit and prompts % (world_size // (tp * pp)) == 0
    assert (problems_of(with_values(TINY, values), world_size) == []) == buildable


@given(values=LAYOUTS, world_size=st.integers(1, 48))
@settings(max_examples=200, deadline=None)
def test_world_sizes_that_are_advised_solve_the_problem(values: dict[str, int], world_size: int) -> None:
    config = with_values(TINY, values)
    for problem in problems_of(config, world_size):
        solved = ("the world size", "layout.") if problem.startswith("layout.") else ("the world size",)
        for number in advised(r"start ([\d or]+) processes", problem):
            assert not any(remaining.startswith(solved) for remaining in problems_of(config, number))


def advised(pattern: str, problem: str) -> list[int]:
    return [int(number) for numbers in re.findall(pattern, problem) for number in numbers.split(" or ")]


@pytest.mark.parametrize(
    ("values", "world_size", "message"),
    [
        ({"layout.tp": 2, "layout.pp": 2}, 6, "the world size 6 is not divisible by layout.tp=2 * layout.cp=1 * "),
        ({"layout.tp": 2, "layout.pp": 2}, 2, "the world size 2 is not divisible by layout.tp=2 * layout.cp=1 * "),
        ({"layout.ep": 4}, 2, "layout.ep=4 * layout.etp=1 does not divide the 2 ranks of a pipeline stage"),
        ({"layout.ep": 2, "layout.etp": 2, "layout.tp": 2}, 2, "layout.ep=2 * layout.etp=2 does not divide the 2"),
        ({"layout.ep": 2, "layout.pp": 2}, 2, "layout.ep=2 * layout.etp=1 does not divide the 1 ranks"),
        ({}, 3, "algorithm.prompts_per_step=32 is not divisible by the data parallel size 3"),
        ({"rollout.engine": "sglang", "rollout.sglang.tp": 3}, 4, "rollout.sglang.tp=3 does not divide the 4 "),
    ],
)  # fmt: skip
def test_a_layout_that_does_not_fit_is_named(values: dict[str, object], world_size: int, message: str) -> None:
    (problem,) = problems_of(with_values(TINY, values), world_size)
    assert problem.startswith(message)


@pytest.mark.parametrize(
    ("values", "fits"),
    [
        ({"layout.tp": 2, "layout.etp": 2}, True),
        ({"layout.ep": 2}, True),
        ({"layout.tp": 2, "layout.etp": 2, "layout.ep": 2}, False),
        ({"layout.etp": 2}, False),
    ],
)
def test_gloo_cannot_gather_unequal_numbers_of_tokens(values: dict[str, object], fits: bool) -> None:
    config = with_values(TINY, {"layout.ep": 1} | values)
    check_backend(config, "nccl")
    if fits:
        check_backend(config, "gloo")
    else:
        with pytest.raises(ConfigError, match=r"layout\.etp=2 with .* needs NCCL: on a CPU use layout\.etp=1"):
            check_backend(config, "gloo")


def test_experts_may_be_spread_over_tensor_parallel_ranks() -> None:
    assert problems_of(with_values(TINY, {"layout.tp": 2, "layout.sp": True, "layout.ep": 2}), 2) == []


@pytest.mark.parametrize(("prompts", "numbers"), [(32, [30, 33]), (2, [3])])
def test_numbers_of_prompts_that_are_advised_solve_the_problem(prompts: int, numbers: list[int]) -> None:
    config = with_values(TINY, {"algorithm.prompts_per_step": prompts})
    (problem,) = problems_of(config, 3)
    assert advised(r"choose ([\d or]+)", problem) == numbers
    for number in numbers:
        assert problems_of(with_values(config, {"algorithm.prompts_per_step": number}), 3) == []


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
        assert any(name in problem for name in values)

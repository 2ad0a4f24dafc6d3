"""Rules about base model, cold start, reward models, distillation and adapters; `config/trained_model.py` checks a
teacher's files.
"""

from __future__ import annotations

from collections.abc import Iterator

from grpo_mega.config.rules.optimizer import schedule_problems
from grpo_mega.config.rules.shared import at_most, clashes, unknown
from grpo_mega.config.schema import (
    GENERATED_TASKS,
    Config,
    DistillConfig,
    PairsConfig,
    files_in,
)
from grpo_mega.errors import InputError

TARGETS = ("attention", "mlp", "experts")


def stages_problems(config: Config) -> Iterator[InputError]:
    """An error for each violated rule about the stages before reinforcement learning."""
    base, sft, task = config.base, config.sft, config.data.task
    if config.run.steps == 0 and not (base.train or sft.steps or sft.epochs):
        fix = "set run.steps, or sft.path and sft.epochs"
        yield InputError("run.steps=0", "without supervised steps there is nothing to do", fix)
    yield from _sft_problems(config)
    if not base.train:
        return
    if task not in GENERATED_TASKS:
        what = f"data.task={task} has no worked problems"
        yield InputError("base.train=true", what, "choose data=chain_sum or base=none")
    # The gate must be passed several times in a row; a base model that cannot reach this step would fail only at its
    # end.
    earliest = base.gate_from + (base.gate_passes - 1) * base.gate_every
    if earliest > base.max_steps:
        yield InputError(
            f"base.max_steps={base.max_steps}",
            f"base.gate_from={base.gate_from}, base.gate_every={base.gate_every} and base.gate_passes="
            f"{base.gate_passes} let the gate be passed at step {earliest} at the earliest",
            f"set base.max_steps to {earliest} or more",
        )
    if config.run.init_from is not None:
        yield InputError(
            f"run.init_from={config.run.init_from}",
            "contradicts base.train=true",
            "set run.init_from=null, or choose base=none",
        )


def _sft_problems(config: Config) -> Iterator[InputError]:
    """An error for each violated rule about supervised steps."""
    sft, task = config.sft, config.data.task
    if sft.steps > 0 and not sft.path and task != "chain_sum":
        yield InputError(
            f"sft.steps={sft.steps}",
            f"data.task={task} generates no rows to learn from",
            "give sft.path=FILE.jsonl, or choose data=chain_sum or sft=none",
        )
    if sft.path and not sft.steps and not sft.epochs:
        yield InputError(f"sft.path={sft.path}", "no effect without steps", "set sft.epochs=1, or sft.path=null")
    if sft.steps and sft.epochs:
        yield InputError(f"sft.steps={sft.steps}", f"excludes sft.epochs={sft.epochs}", "set one of them to 0")
    elif sft.steps:
        yield from at_most(config, "sft.warmup_steps", "sft.steps", margin=1)
        if sft.warmup_steps < sft.steps:
            yield from schedule_problems(sft, "sft", sft.steps, "sft.steps")
    if sft.max_tokens:
        yield from at_most(config, "sft.max_tokens", "model.context")


def pairs_problems(config: Config) -> Iterator[InputError]:
    """An error for each violated rule about a reward model's training, and each setting that it excludes."""
    pairs, trains = config.pairs, config.run.trains
    yield from _files_problems(pairs, trains)
    if not pairs.separators or "" in pairs.separators:
        fix = "list at least one text that divides steps, none of them empty"
        yield InputError(f"pairs.separators={pairs.separators}", "cannot divide a completion", fix)
    if pairs.max_tokens:
        yield from at_most(config, "pairs.max_tokens", "model.context")
    language = "no language model is trained"
    whole = "the whole reward model is trained"
    none = "a reward model learns from pairs alone"
    refused = {
        "base.train": (config.base.train, "false (base=none)", "run.init_from names the model to start from"),
        "sft.steps": (config.sft.steps, "0", none),
        "sft.epochs": (config.sft.epochs, "0", none),
        "reward.model.path": (config.reward.model.path, "null", "run.init_from names the model to start from"),
        "distill.teacher": (config.distill.teacher, "null", none),
        "lora.rank": (config.lora.rank, "0", whole),
        "optimizer.frozen": (config.optimizer.frozen, "[]", whole),
        "optimizer.average_decay": (config.optimizer.average_decay, "0", none),
        "run.export_every": (config.run.export_every, "0", language),
        "rollout.slice_tokens": (config.rollout.slice_tokens, "null", none),
        "rollout.ahead": (config.rollout.ahead, "false", none),
    }
    yield from clashes(config, f"run.trains={trains}", refused, "run.trains=policy")


def _files_problems(pairs: PairsConfig, trains: str) -> Iterator[InputError]:
    """An error for each violated rule about the files of pairs."""
    for name, paths in (("pairs.path", pairs.path), ("pairs.replay_path", pairs.replay_path)):
        is_list = isinstance(paths, list) and all(isinstance(path, str) and path for path in paths)
        if not (paths is None or isinstance(paths, str) or is_list):
            yield InputError(f"{name}={paths!r}", "not files", "write one file, or a list of files")
    if not files_in(pairs.path):
        yield InputError("pairs.path", f"not set, and run.trains={trains} learns from it", "give pairs.path=FILE.jsonl")
    if pairs.test_path and pairs.test_size:
        yield InputError(
            f"pairs.test_path={pairs.test_path}",
            f"excludes pairs.test_size={pairs.test_size}: both say what is held out",
            "leave one of them out",
        )


def distill_problems(config: Config) -> Iterator[InputError]:
    """An error for each setting that is incompatible with a teacher."""
    distill, algorithm = config.distill, config.algorithm
    if not distill.teacher:
        return
    where = f"distill.teacher={distill.teacher}"
    if distill.served and config.rollout.temperature != 1:
        yield InputError(
            f"rollout.temperature={config.rollout.temperature:g}",
            f"incompatible with {where}: SGLang scores a text at temperature 1",
            "set rollout.temperature=1, or give the teacher's files",
        )
    if not distill.served and distill.timeout_seconds != DistillConfig.timeout_seconds:
        yield InputError(
            f"distill.timeout_seconds={distill.timeout_seconds:g}",
            "only for a teacher on a server, http://HOST:PORT",
            "leave it out",
        )
    # The teacher gives every token its own advantage, and unless `reward_coef` is set rewards have no part in it: hence
    # settings that need one advantage per completion, or rewards, are refused.
    rewards = "rewards have no effect with distill.reward_coef=0"
    refused = {
        "algorithm.advantage_baseline": (
            algorithm.advantage_baseline == "critic",
            "mean",
            "the teacher's log-probs replace a critic's advantages",
        ),
        "algorithm.objective": (
            algorithm.objective in ("gspo", "gmpo", "vespo"),
            "ppo or gspo_token",
            "every token has its own advantage",
        ),
        "algorithm.groups_without_signal": (
            algorithm.groups_without_signal != "count",
            "count",
            "the policy learns from the teacher in every group",
        ),
        "algorithm.kl_in": (algorithm.kl_in == "reward" and not distill.reward_coef, "loss", rewards),
        "algorithm.supervision": (
            algorithm.supervision == "process" and not distill.reward_coef,
            "outcome",
            rewards,
        ),
    }
    yield from clashes(config, where, refused, "distill.teacher=null")


def lora_problems(config: Config) -> Iterator[InputError]:
    """An error for each rule that the settings of the adapters violate."""
    lora, model = config.lora, config.model
    for target in lora.targets:
        if target not in TARGETS:
            yield unknown(f"lora.targets={lora.targets}", target, TARGETS)
    if not lora.rank:
        return
    moe, attention, mlp = model.moe, "attention" in lora.targets, "mlp" in lora.targets
    beside_experts = attention or (mlp and (not moe.experts or moe.first_dense > 0 or moe.shared_ffn_hidden > 0))
    if not beside_experts:
        yield InputError(
            f"lora.targets={lora.targets}",
            "has no matrix of this model that every token passes, and Megatron's optimizer needs one",
            "add attention",
        )
    # With the MLP of dense layers alone, layers with experts have adapters on these or on the shared expert, or none.
    elif config.layout.pp > 1 and not (
        attention or not moe.experts or "experts" in lora.targets or moe.shared_ffn_hidden > 0
    ):
        yield InputError(
            f"lora.targets={lora.targets}",
            f"layers without adapters could leave a pipeline stage (layout.pp={config.layout.pp}) nothing to train",
            "add attention, or set layout.pp=1",
        )
    if config.base.train:
        yield InputError(
            f"lora.rank={lora.rank}",
            "adapters need a trained model, and base.train=true makes one",
            "run it without lora.rank first, then set base=none and run.init_from=CHECKPOINT",
        )
    if model.moe.experts and model.moe.bias_update_rate > 0:
        yield InputError(
            f"lora.rank={lora.rank}",
            f"routers stay as they were loaded, and model.moe.bias_update_rate={model.moe.bias_update_rate} changes "
            "their bias",
            "set model.moe.bias_update_rate=0 and model.moe.frozen_bias=true",
        )

"""Rules that a configuration must keep before anything is built; every violation names the field and the way out.

`check_config` needs the configuration only, `check_layout` also the number of processes, `check_backend` what they
communicate with.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import is_dataclass
from operator import attrgetter
from typing import Any

from omegaconf import DictConfig, OmegaConf

from grpo_mega.config.bounds import field_problems
from grpo_mega.config.schema import Config, LayoutConfig, SGLangConfig

# (field, what it must be divisible by, field that must be set for the rule to count)
# The expert that every token visits is split like a dense layer, by tp; only routed experts are split by etp.
FP8_BLOCK = 128
"""As in weights/fp8.py, which takes torch to import."""

_DIVISIBLE = (
    ("model.heads", "model.kv_heads", None),
    ("model.heads", "layout.tp", None),
    ("model.kv_heads", "layout.tp", None),
    ("model.ffn_hidden", "layout.tp", None),
    ("model.vocab_multiple", "layout.tp", None),
    ("model.moe.ffn_hidden", "layout.etp", "model.moe.experts"),
    ("model.moe.shared_ffn_hidden", "layout.tp", "model.moe.experts"),
    ("model.moe.experts", "layout.ep", "model.moe.experts"),
    ("model.moe.experts", "model.moe.groups", "model.moe.groups"),
    ("model.moe.top_k", "model.moe.group_top_k", "model.moe.groups"),
)

# (field, how far below the other it must stay at least, the other, field that must be set for the rule to count)
_ORDERED = (
    ("model.context", 0, "layout.micro_batch_tokens", None),
    ("rollout.max_new_tokens", 1, "model.context", None),
    ("rollout.longer_max_new_tokens", 1, "model.context", "rollout.longer_max_new_tokens"),
    ("rollout.max_new_tokens", 1, "rollout.longer_max_new_tokens", "rollout.longer_max_new_tokens"),
    ("data.min_terms", 0, "data.max_terms", None),
    ("algorithm.group_size", 0, "rollout.concurrent_sequences", None),
    ("model.moe.top_k", 0, "model.moe.experts", "model.moe.experts"),
    ("model.moe.first_dense", 1, "model.layers", "model.moe.experts"),
    ("model.moe.group_top_k", 0, "model.moe.groups", "model.moe.groups"),
    ("model.yarn.beta_slow", 0, "model.yarn.beta_fast", None),
    ("sft.warmup_steps", 1, "sft.steps", "sft.steps"),
)

_FOLLOWING = {
    "context_length": "model.context",
    "custom_weight_loader": "rollout.sglang.transport",
    "dtype": "model.dtype",
    "load_format": "rollout.sglang.transport",
    "model_path": "model",
    "nnodes": "rollout.sglang.tp",
    "node_rank": "rollout.sglang.tp",
    "pp_size": "rollout.sglang.tp",
    "skip_tokenizer_init": "data.tokenizer",
    "tp_size": "rollout.sglang.tp",
}
"""Server arguments of SGLang's that are not the user's to give, and what gives them."""

_EXAMPLES = {
    "run.name": "run.name=my_run",
    "run.steps": "run.steps=60",
    "optimizer.lr": "optimizer.lr=3e-4",
    "data.task": "data=chain_sum",
    "reward.terms": "reward=think_answer",
}


HEAVIEST = 1000000
"""Largest weight of a reward term: rewards are summed in 32 bits, where 1e38 would be the end."""
LONGEST_NAME = 100
"""Characters of a run's name: it becomes a file name, with more around it."""


class ConfigError(ValueError):
    """A configuration that cannot run; the message has one line per violated rule."""


def check_complete(config: Config | DictConfig) -> None:
    """Raises a ConfigError that lists every required field that is not set, with an override that sets it."""
    missing = sorted(OmegaConf.missing_keys(config))
    _refuse([f"{name} is not set; give {_example(name)}, or an experiment such as experiment=tiny" for name in missing])


def check_config(config: Config) -> None:
    """Raises one ConfigError that lists every rule the configuration violates, or first every field nobody set."""
    check_complete(config)
    rules = (_divisible, _ordered, _model, _routing, _layout, _data, _reward, _algorithm, _rollout, _stages, _run)
    _refuse([*field_problems(config), *(problem for rule in rules for problem in rule(config))])


def check_layout(config: Config, world_size: int, counted: str = "the world size") -> None:
    """Raises a ConfigError when `world_size` processes, `counted` in these words, cannot be arranged in the layout.

    Megatron-Core (parallel_state.py) cuts the ranks of a pipeline stage twice: into tp * cp * dp for attention and
    dense layers, and into etp * ep * expert replicas for routed experts. Every data parallel rank takes whole prompts.
    """
    layout, prompts = config.layout, config.algorithm.prompts_per_step
    model_size, expert_size = layout.tp * layout.cp * layout.pp, layout.etp * layout.ep
    if world_size % model_size:
        product = f"a product of {_divisors(world_size)}" if world_size > 1 else "layout=single"
        _refuse([
            f"{counted} {world_size} is not divisible by layout.tp={layout.tp} * layout.cp={layout.cp} * "
            f"layout.pp={layout.pp}; start "
            f"{_multiples(world_size, model_size)} processes, or choose {product}"
        ])  # fmt: skip
    dp, stage = world_size // model_size, world_size // layout.pp
    problems = []
    if stage % expert_size:
        smallest = fewest_processes(layout)
        problems.append(
            f"layout.ep={layout.ep} * layout.etp={layout.etp} does not divide the {stage} ranks of a pipeline stage; "
            f"choose a product of {_divisors(stage)}, or start {_multiples(world_size, smallest)} processes"
        )
    if prompts % dp:
        problems.append(
            f"algorithm.prompts_per_step={prompts} is not divisible by the data parallel size {dp} (world size "
            f"{world_size} / (tp {layout.tp} * cp {layout.cp} * pp {layout.pp})); choose {_multiples(prompts, dp)}"
        )
    if config.rollout.engine == "sglang" and world_size % config.rollout.sglang.tp:
        problems.append(
            f"rollout.sglang.tp={config.rollout.sglang.tp} does not divide the {world_size} processes; choose "
            f"{_divisors(world_size)}"
        )
    if config.optimizer.overlap and dp * layout.cp == 1:
        problems.append(
            "optimizer.overlap=true has no effect without data or context parallelism: a lone replica reduces no "
            "gradients; set optimizer.overlap=false, or start more processes"
        )
    _refuse(problems)


def fewest_processes(layout: LayoutConfig) -> int:
    """Processes of the smallest job that has this layout."""
    return layout.pp * math.lcm(layout.tp * layout.cp, layout.etp * layout.ep)


def check_backend(config: Config, backend: str) -> None:
    """Raises a ConfigError when the layout gathers unequal numbers of tokens per expert and `backend` is gloo."""
    layout = config.layout
    if backend == "gloo" and layout.etp > 1 and (layout.ep > 1 or layout.etp > layout.tp):
        _refuse([
            f"layout.etp={layout.etp} with layout.ep={layout.ep} and layout.tp={layout.tp} needs NCCL: on a CPU use "
            "layout.etp=1, or layout.etp=layout.tp with layout.ep=1"
        ])  # fmt: skip


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError("the configuration cannot run:\n" + "\n".join(f"  - {problem}" for problem in problems))


def _example(name: str) -> str:
    return _EXAMPLES.get(name, "model=tiny_moe" if name.startswith("model.") else f"{name}=...")


def _get(config: Config, name: str) -> int:
    return attrgetter(name)(config)


def _divisible(config: Config) -> Iterator[str]:
    for name, by, when in _DIVISIBLE:
        if when is None or _get(config, when):
            yield from _indivisible(config, name, by)
    if config.model.head_dim is None:
        yield from _indivisible(config, "model.hidden", "model.heads")


def _indivisible(config: Config, name: str, by: str) -> Iterator[str]:
    value, divisor = _get(config, name), _get(config, by)
    if value > 0 and divisor > 0 and value % divisor:
        # A smaller layout must still divide the processes that are there.
        fitting = (d for d in range(1, divisor) if value % d == 0 and not (by.startswith("layout.") and divisor % d))
        fix = f"choose {by}={max(fitting)}"
        if config.run.init_from is None:
            fix = f"choose {name}={_multiples(value, divisor)}, or {fix.removeprefix('choose ')}"
        elif by.startswith("model."):  # weights that are loaded have their shape
            fix = f"set both as run.init_from={config.run.init_from} has them"
        yield f"{name}={value} is not divisible by {by}={divisor}; {fix}"


def _ordered(config: Config) -> Iterator[str]:
    for name, margin, other, when in _ORDERED:
        value, limit = _get(config, name), _get(config, other)
        if (when is None or _get(config, when)) and value + margin > limit:
            too_short = name == "model.context" and limit <= config.rollout.max_new_tokens
            lower = "" if too_short else f"lower {name} to {limit - margin} or "
            yield (
                f"{name}={value} must be {'below' if margin else 'at most'} {other}={limit}; "
                f"{lower}raise {other} to {value + margin}"
            )


def _model(config: Config) -> Iterator[str]:
    model, rope_dim = config.model, config.model.mla.qk_rope_dim
    if model.mtp_layers and model.tie_embeddings:
        yield (
            f"model.mtp_layers={model.mtp_layers} reads the embedding without gradient, and with "
            "model.tie_embeddings=true Megatron would give it the output layer's; set one of them off"
        )
    if model.yarn.factor > 1 and model.attention != "mla":
        yield (
            f"model.yarn.factor={model.yarn.factor} is for latent attention; set model.attention=mla, or "
            "model.yarn.factor=1"
        )
    if model.attention == "mla":
        if model.kv_heads != model.heads:
            yield (
                f"model.kv_heads={model.kv_heads} has no effect with model.attention=mla, where every head has keys of "
                f"its own; set model.kv_heads={model.heads}"
            )
        if model.head_dim is not None:
            yield (
                f"model.head_dim={model.head_dim} has no effect with model.attention=mla; leave it null and set the "
                "sizes in model.mla"
            )
        if rope_dim % 2:
            yield f"model.mla.qk_rope_dim={rope_dim}: rotary positions turn channels in pairs; choose {rope_dim + 1}"
    elif model.head_dim is not None:
        if model.head_dim % 2:
            yield (
                f"model.head_dim={model.head_dim}: rotary positions turn channels in pairs; choose {model.head_dim + 1}"
            )
    elif model.heads > 0 and model.hidden % (2 * model.heads) == model.heads:
        yield (
            f"model.hidden={model.hidden} gives model.heads={model.heads} heads an odd number of channels, and rotary "
            f"positions turn channels in pairs; choose {_multiples(model.hidden, 2 * model.heads)}"
        )


def _routing(config: Config) -> Iterator[str]:
    moe = config.model.moe
    if moe.experts <= 0:
        return
    if moe.bias_update_rate > 0 and moe.score != "sigmoid":
        yield (
            f"model.moe.bias_update_rate={moe.bias_update_rate} needs sigmoid scores; "
            "set model.moe.score=sigmoid or model.moe.bias_update_rate=0"
        )
    if moe.frozen_bias and (moe.bias_update_rate > 0 or moe.score != "sigmoid"):
        yield (
            f"model.moe.frozen_bias=true needs model.moe.score=sigmoid and model.moe.bias_update_rate=0, not "
            f"{moe.score} and {moe.bias_update_rate}; set these, or model.moe.frozen_bias=false"
        )
    if moe.top_k == 1 and moe.score == "softmax":
        yield (
            "model.moe.top_k=1 gives the router no gradient with model.moe.score=softmax, which is taken over the "
            "chosen experts; set model.moe.top_k=2 or model.moe.score=sigmoid"
        )
    if (moe.groups > 0) != (moe.group_top_k > 0):
        yield (
            f"model.moe.groups={moe.groups} and model.moe.group_top_k={moe.group_top_k} go together; "
            "set both above 0 for group-limited routing, or both to 0"
        )
    elif moe.groups > 0 and moe.top_k * moe.groups > moe.group_top_k * moe.experts:
        reach = moe.group_top_k * moe.experts // moe.groups
        yield (
            f"model.moe.top_k={moe.top_k} exceeds the {reach} experts in model.moe.group_top_k={moe.group_top_k} "
            f"groups; lower model.moe.top_k to {reach} or raise model.moe.group_top_k"
        )


def _stages_of_pipeline(config: Config) -> Iterator[str]:
    """Every pipeline stage has the same number of layers, the first and the last apart where they are given."""
    layout, layers = config.layout, config.model.layers
    given = {
        name: size
        for name, size in (
            ("layout.first_stage_layers", layout.first_stage_layers),
            ("layout.last_stage_layers", layout.last_stage_layers),
        )
        if size is not None
    }
    if layout.pp == 1:
        given |= {"layout.vpp": layout.vpp} if layout.vpp > 1 else {}
        for name, size in given.items():
            yield f"{name}={size} needs pipeline stages; set layout.pp=2 or more, or leave {name} out"
        return
    rest, stages = layers - sum(given.values()), layout.pp - len(given)
    taken = "".join(f" - {name}={size}" for name, size in given.items())
    if rest < stages or (rest % stages if stages else rest):
        shared = f"cannot be shared out equally over {stages} pipeline stages (layout.pp={layout.pp})"
        left = f"leaves {rest} layers to share out equally over the other stages ({stages} of layout.pp={layout.pp})"
        yield (
            f"model.layers={layers}{taken} {left if given else shared}; "
            "change layout.pp, layout.first_stage_layers or layout.last_stage_layers"
        )
        return
    for size in {*given.values(), *([rest // stages] if stages else [])}:
        if size % layout.vpp:
            yield (
                f"layout.vpp={layout.vpp} does not divide the {size} layers of a pipeline stage; "
                f"choose layout.vpp={_divisors(size)}"
            )


def _layout(config: Config) -> Iterator[str]:
    layout, experts = config.layout, config.model.moe.experts
    yield from _stages_of_pipeline(config)
    if layout.sp and layout.tp == 1:
        yield "layout.sp=true needs tensor parallelism; set layout.tp=2 or more, or layout.sp=false"
    if layout.tp > 1 and not layout.sp and (experts > 0 or config.model.attention == "mla"):
        what = "experts" if experts > 0 else "latent attention (model.attention=mla)"
        yield f"layout.sp=false: Megatron needs sequence parallelism for {what} with layout.tp > 1; set layout.sp=true"
    for name, size in (("layout.ep", layout.ep), ("layout.etp", layout.etp)):
        if size > 1 and experts == 0:
            yield f"{name}={size} needs experts; set model.moe.experts above 0, or {name}=1"


def _data(config: Config) -> Iterator[str]:
    data = config.data
    for name, path in (("data.train_path", data.train_path), ("data.test_path", data.test_path)):
        if data.task == "jsonl" and not path:
            yield f"{name} is not set, and data.task=jsonl reads it; give {name}=FILE.jsonl"
        if data.task == "chain_sum" and path is not None:
            yield f"{name}={path} has no effect with data.task=chain_sum; set {name}=null, or choose data=jsonl"
    if data.task == "chain_sum" and data.tokenizer != "chars":
        yield f"data.tokenizer={data.tokenizer} has no effect with data.task=chain_sum; set it to chars"
    if data.tokenizer == "chars" and data.template != "{prompt}":
        yield (
            f"data.template={data.template!r} has no effect with data.tokenizer=chars; give data.tokenizer=FOLDER, a "
            "Hugging Face model's, or choose data=jsonl"
        )
    if data.tokenizer == "chars" and data.parse_special:
        yield "data.parse_special=true has no effect with data.tokenizer=chars; set data.parse_special=false"
    if data.template != "chat" and "{prompt}" not in data.template and data.tokenizer != "chars":
        yield f"data.template={data.template!r} has no place for the problem; write {{prompt}} there, or choose chat"


def _reward(config: Config) -> Iterator[str]:
    terms = config.reward.terms
    names = [term.name for term in terms]
    if not terms:
        yield "reward.terms=[] scores nothing; list at least one term, or choose reward=think_answer"
    elif config.reward.success not in names:
        yield f"reward.success={config.reward.success} is not a term of the reward; choose one of {', '.join(names)}"
    if terms and not any(term.weight for term in terms):
        yield (
            f"reward.terms all have weight 0, so every reward is 0 and nothing is learned; set "
            f"reward.terms.{names.index(config.reward.success) if config.reward.success in names else 0}.weight=1"
        )
    for name, count in Counter(names).items():
        if count > 1:
            yield f"reward.terms has {count} terms named {name}; give every term a name of its own"
    for index, term in enumerate(terms):
        field = f"reward.terms[{index}]"
        if not re.fullmatch(r"[A-Za-z]\w*", term.name):
            yield f"{field}.name={term.name!r} becomes a metric; use letters, digits and '_', a letter first"
        if not abs(term.weight) <= HEAVIEST:
            yield f"{field}.weight={term.weight}: choose a value in [-{HEAVIEST}, {HEAVIEST}]"
        if term.function is not None and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", term.function):
            yield f"{field}.function={term.function!r}; write it as package.module:function"


def _algorithm(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    samples = algorithm.prompts_per_step * algorithm.group_size
    if 0 < samples < algorithm.mini_batches:
        yield (
            f"algorithm.mini_batches={algorithm.mini_batches} exceeds the {samples} samples of a step "
            f"(prompts_per_step * group_size); lower it to {samples}"
        )
    if algorithm.objective == "cispo" and algorithm.dual_clip is not None:
        yield f"algorithm.dual_clip={algorithm.dual_clip} has no effect on algorithm.objective=cispo; set it to null"
    if algorithm.reference_refresh > 0 and algorithm.kl_coef == 0:
        yield (
            f"algorithm.reference_refresh={algorithm.reference_refresh} has no effect without a KL term; "
            "set algorithm.kl_coef above 0, or algorithm.reference_refresh=0"
        )


def _rollout(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if (rollout.longer_from_step is None) != (rollout.longer_max_new_tokens is None):
        yield (
            f"rollout.longer_from_step={rollout.longer_from_step} and rollout.longer_max_new_tokens="
            f"{rollout.longer_max_new_tokens} go together; give both, or leave both null"
        )
    sglang = rollout.sglang
    if rollout.engine != "sglang":
        for name, default in vars(SGLangConfig()).items():
            if getattr(sglang, name) != default:
                undone = " ".join(_taken_back(getattr(sglang, name), default, f"rollout.sglang.{name}"))
                yield (
                    f"rollout.sglang.{name} has no effect with rollout.engine={rollout.engine}; give {undone}, or "
                    "rollout.engine=sglang"
                )
        return
    if sglang.routing_replay and not config.model.moe.experts:
        yield (
            "rollout.sglang.routing_replay=true needs experts; set model.moe.experts above 0, or "
            "rollout.sglang.routing_replay=false"
        )
    for name, setting in _FOLLOWING.items():
        if name in sglang.arguments:
            yield f"rollout.sglang.arguments.{name} follows from {setting}; give ~rollout.sglang.arguments.{name}"
    if sglang.transport == "network" and "speculative_algorithm" in sglang.arguments:
        yield (
            "rollout.sglang.arguments.speculative_algorithm: a draft model would wait for weights of its own; set "
            "rollout.sglang.transport=shared or disk"
        )
    if sglang.fp8 and config.model.dtype != "bf16":
        yield f"rollout.sglang.fp8=true rounds weights that are trained in {config.model.dtype}; set model.dtype=bf16"
    yield from _parts_of_an_engine(sglang, config.model.moe.experts)
    yield from _fp8_blocks(config)
    if (
        sglang.arguments.get("moe_a2a_backend", "none") != "none"
        and "mem_fraction_static" not in sglang.arguments
        and sglang.first_gpu is None
    ):
        yield (
            "rollout.sglang.arguments.moe_a2a_backend makes an engine take more of a GPU that it shares than is "
            "planned for; give rollout.sglang.arguments.mem_fraction_static, too"
        )
    if sglang.first_gpu is not None and sglang.transport == "shared":
        yield (
            f"rollout.sglang.first_gpu={sglang.first_gpu} puts the engines on other GPUs than the trainer's, and "
            "rollout.sglang.transport=shared reaches those only; set rollout.sglang.transport=network"
        )
    for name, limit in vars(sglang.timeouts).items():
        if name.startswith("engine_") and limit <= sglang.answer_seconds:
            yield (
                f"rollout.sglang.timeouts.{name}={limit:g} is not above rollout.sglang.answer_seconds="
                f"{sglang.answer_seconds:g}: the run would end before an engine that hangs is started anew; raise the "
                "first or lower the second"
            )


def _parts_of_an_engine(sglang: SGLangConfig, experts: int) -> Iterator[str]:
    """Expert parallelism and data parallel attention."""
    given = sglang.arguments
    for name, whole, of_what in (
        ("ep_size", math.gcd(sglang.tp, experts), f"rollout.sglang.tp={sglang.tp} and model.moe.experts={experts}"),
        ("dp_size", sglang.tp, f"rollout.sglang.tp={sglang.tp}"),
        ("attn_dp_size", sglang.tp, f"rollout.sglang.tp={sglang.tp}"),
    ):
        parts = given.get(name, 1)
        if type(parts) is not int or parts < 1 or whole % parts:
            yield f"rollout.sglang.arguments.{name}={parts} must divide {of_what}; choose {_divisors(whole)}"
            return
    if given.get("enable_dp_attention") and "attn_dp_size" in given:
        yield (
            "rollout.sglang.arguments.attn_dp_size is what enable_dp_attention and dp_size say together; give "
            "one or the other"
        )
    if given.get("dp_size", 1) > 1 and not given.get("enable_dp_attention"):
        yield (
            "rollout.sglang.arguments.dp_size makes copies of an engine, and each rank has a part of one; set it to 1, "
            "or set rollout.sglang.arguments.enable_dp_attention=true for copies of its attention"
        )


def _fp8_blocks(config: Config) -> Iterator[str]:
    """SGLang computes in fp8 with whole blocks only, also of the parts that its GPUs have of a matrix."""
    sglang, model = config.rollout.sglang, config.model
    if not sglang.fp8 or model.dtype != "bf16":
        return
    sizes = {}
    if not model.moe.experts or model.moe.first_dense:
        sizes["model.ffn_hidden"] = (model.ffn_hidden, sglang.arguments.get("moe_dense_tp_size") or sglang.tp)
    if model.moe.experts:
        sizes["model.moe.ffn_hidden"] = (model.moe.ffn_hidden, sglang.tp // sglang.arguments.get("ep_size", 1))
    if model.moe.shared_ffn_hidden and sglang.arguments.get("moe_a2a_backend", "none") == "none":
        sizes["model.moe.shared_ffn_hidden"] = (model.moe.shared_ffn_hidden, sglang.tp)
    for name, (size, gpus) in sizes.items():
        if size % (FP8_BLOCK * gpus):
            yield (
                f"rollout.sglang.fp8=true needs blocks of {FP8_BLOCK} columns, and {name}={size} on {gpus} GPUs has "
                "none; lower rollout.sglang.tp, raise rollout.sglang.arguments.ep_size (experts) or set "
                "rollout.sglang.arguments.moe_dense_tp_size=1 (dense layers), or rollout.sglang.fp8=false"
            )


def _stages(config: Config) -> Iterator[str]:
    base, sft, task = config.base, config.sft, config.data.task
    if base.train and task != "chain_sum":
        yield f"base.train=true needs worked arithmetic, not data.task={task}; choose data=chain_sum or base=none"
    if sft.steps > 0 and task != "chain_sum":
        yield f"sft.steps={sft.steps} needs worked arithmetic, not data.task={task}; choose data=chain_sum or sft=none"
    earliest = base.gate_from + (base.gate_passes - 1) * base.gate_every
    if base.train and earliest > base.max_steps:
        yield (
            f"base.gate_from={base.gate_from}, base.gate_every={base.gate_every} and base.gate_passes="
            f"{base.gate_passes} let the gate be passed at step {earliest} at the earliest; raise base.max_steps="
            f"{base.max_steps}"
        )
    if base.train and config.run.init_from is not None:
        yield (
            f"run.init_from={config.run.init_from} contradicts base.train=true; set run.init_from=null, or "
            "choose base=none"
        )


def _run(config: Config) -> Iterator[str]:
    if not re.fullmatch(r"\w[\w.-]*", config.run.name, re.ASCII):
        yield (
            f"run.name={config.run.name!r} must be a plain file name: letters, digits, '_', '-' and '.', "
            "beginning with a letter, digit or '_'"
        )
    if len(config.run.name) > LONGEST_NAME:
        yield f"run.name has {len(config.run.name)} characters and names a directory; choose at most {LONGEST_NAME}"
    if not config.run.root.strip():
        yield "run.root='' names no directory; set run.root=. for the working directory, or run.root=runs"


def _taken_back(value: Any, default: Any, name: str) -> list[str]:
    """Overrides that undo what was set, in an experiment's file or elsewhere."""
    if is_dataclass(value):
        pairs = vars(value).items()
        return [one for key, inner in pairs for one in _taken_back(inner, getattr(default, key), f"{name}.{key}")]
    if value == default:
        return []
    if isinstance(value, dict):
        return [f"~{name}.{key}" for key in value]
    return [f"{name}={default if isinstance(default, str) else json.dumps(default)}"]


def _multiples(value: int, divisor: int) -> str:
    """The positive multiples of `divisor` on both sides of `value`, for people."""
    below = value // divisor * divisor
    return " or ".join(str(multiple) for multiple in (below, below + divisor) if multiple > 0)


def _divisors(value: int) -> str:
    """All divisors of `value`, for people."""
    return " or ".join(str(d) for d in range(1, value + 1) if value % d == 0)

"""Rules about the layout, and the processes and back end that it needs."""

from __future__ import annotations

import math
from collections.abc import Iterator

from grpo_mega.config.derived import why_padded
from grpo_mega.config.rules.shared import divisible, divisors, multiples, refuse
from grpo_mega.config.schema import ClusterConfig, Config, LayoutConfig, ModelConfig
from grpo_mega.errors import InputError

DEEPEP_SIZES = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)
"""Numbers of ranks that DeepEP has kernels for (get_dispatch_config in its buffer.py)."""
DEEPEP_MACHINE = 8
"""Number of GPUs of a machine that DeepEP assumes when ranks are on several machines."""


def layout_problems(config: Config) -> Iterator[InputError]:
    """An error for each rule that the layout violates with any number of processes."""
    layout, experts = config.layout, config.model.moe.experts
    for name in ("model.heads", "model.kv_heads", "model.ffn_hidden", "model.vocab_multiple"):
        yield from divisible(config, name, "layout.tp")
    if experts:
        # The shared expert is split like a dense layer, by tp; only routed experts are split by etp.
        yield from divisible(config, "model.moe.ffn_hidden", "layout.etp")
        yield from divisible(config, "model.moe.shared_ffn_hidden", "layout.tp")
        yield from divisible(config, "model.moe.experts", "layout.ep")
    yield from _equal_stages(layout, config.model.layers)
    if layout.sp and layout.tp == 1:
        yield InputError("layout.sp=true", "needs tensor parallelism", "set layout.tp=2 or more, or layout.sp=false")
    if layout.tp > 1 and not layout.sp and (experts > 0 or config.model.attention == "mla"):
        what = "experts" if experts > 0 else "latent attention (model.attention=mla)"
        what = f"Megatron needs sequence parallelism for {what} with layout.tp > 1"
        yield InputError("layout.sp=false", what, "set layout.sp=true")
    if layout.fp8:
        yield from _eight_bit_problems(config)
    if layout.dispatch == "deepep":
        yield from _deepep_problems(layout, config.model, config.cluster)
    if layout.attention not in ("auto", "padded") and (why := why_padded(config.model)):
        yield InputError(f"layout.attention={layout.attention}", why, "set layout.attention=padded, or auto")
    if layout.attention == "flash4" and config.model.window is not None:
        yield InputError(
            "layout.attention=flash4",
            f"its backward pass cannot compute windows, and model.window={config.model.window}",
            "set layout.attention=torch",
        )
    # Expert parallelism may be meant for the teacher alone; `check_teacher` looks when the teacher's files are read.
    teacher_is_here = config.distill.teacher and not config.distill.served
    for name, size in (("layout.ep", layout.ep), ("layout.etp", layout.etp)):
        if size > 1 and experts == 0 and not teacher_is_here:
            yield InputError(f"{name}={size}", "needs experts", f"set model.moe.experts above 0, or {name}=1")


def _deepep_problems(layout: LayoutConfig, model: ModelConfig, cluster: ClusterConfig) -> Iterator[InputError]:
    """An error for each setting with which DeepEP cannot exchange tokens."""
    where, otherwise = "layout.dispatch=deepep", "or layout.dispatch=alltoall"
    if not model.moe.experts:
        yield InputError(where, "needs experts", f"set model.moe.experts above 0, {otherwise}")
        return
    if layout.ep not in DEEPEP_SIZES and not layout.undecided:
        sizes = ", ".join(map(str, DEEPEP_SIZES))
        yield InputError(where, f"has no kernels for layout.ep={layout.ep}", f"choose layout.ep of {sizes}")
    if layout.etp > 1:
        yield InputError(where, f"keeps experts whole, and layout.etp={layout.etp}", "set layout.etp=1")
    if model.dtype != "bf16":
        yield InputError(where, f"sends bf16, and model.dtype={model.dtype}", "set model.dtype=bf16")
    if model.hidden % 8:
        fix = "make model.hidden a multiple of 8"
        yield InputError(where, f"sends 16 bytes at a time, and model.hidden={model.hidden}", fix)
    if layout.ep > DEEPEP_MACHINE and cluster.gpus_per_node != DEEPEP_MACHINE:
        yield InputError(
            where,
            f"needs machines of {DEEPEP_MACHINE} GPUs for layout.ep={layout.ep}, and cluster.gpus_per_node="
            f"{cluster.gpus_per_node}",
            f"set it to {DEEPEP_MACHINE} if your machines have as many, {otherwise}",
        )


def _eight_bit_problems(config: Config) -> Iterator[InputError]:
    """An error for each setting that does not work with matrix products in 8 bits."""
    model, layout = config.model, config.layout
    where, otherwise = "layout.fp8=true", "set layout.fp8=false"
    if model.dtype != "bf16":
        yield InputError(where, f"needs bf16, and model.dtype={model.dtype}", f"set model.dtype=bf16, or {otherwise}")
    if config.lora.rank:
        yield InputError(where, f"lora.rank={config.lora.rank} adds matrix products in bf16", otherwise)
    sizes = {"model.hidden": (model.hidden, 1), "model.ffn_hidden": (model.ffn_hidden, layout.tp)}
    if model.moe.experts:
        sizes |= {
            "model.moe.ffn_hidden": (model.moe.ffn_hidden, layout.etp),
            "model.moe.shared_ffn_hidden": (model.moe.shared_ffn_hidden, layout.tp),
        }
    for name, (size, ranks) in sizes.items():
        if size % (16 * ranks):
            shared = f" on each of {ranks} ranks" if ranks > 1 else ""
            yield InputError(where, f"{name}={size} is not a multiple of 16{shared}", otherwise)
    if config.run.trains == "policy" and config.run.steps and config.algorithm.correction == "none":
        yield InputError(
            where,
            "the trainer's probabilities differ from the engine's, and algorithm.correction=none does not correct it",
            "set algorithm.correction=truncate or mask",
        )


def _equal_stages(layout: LayoutConfig, layers: int) -> Iterator[InputError]:
    """An error when layers cannot be split evenly over pipeline stages, apart from given first and last stages."""
    given = {
        f"layout.{name}": size
        for name in ("first_stage_layers", "last_stage_layers")
        if (size := getattr(layout, name)) is not None
    }
    # Without a pipeline none of these settings has an effect.
    if layout.pp == 1:
        given |= {"layout.vpp": layout.vpp} if layout.vpp > 1 else {}
        for name, size in given.items():
            fix = f"set layout.pp=2 or more, or {name}={'1' if name == 'layout.vpp' else 'null'}"
            yield InputError(f"{name}={size}", "needs pipeline stages", fix)
        return
    # Layers that are left for the stages whose size is not given, which Megatron splits evenly.
    rest, stages = layers - sum(given.values()), layout.pp - len(given)
    if rest < stages or (rest % stages if stages else rest):
        taken = " and ".join(f"{name}={size}" for name, size in given.items())
        what = f"{taken} leave {rest} layers, " if given else ""
        yield InputError(
            f"model.layers={layers}",
            f"{what}not divisible by {stages}{' other' if given else ''} pipeline stages (layout.pp={layout.pp})",
            "change layout.pp, layout.first_stage_layers or layout.last_stage_layers",
        )
        return
    # Interleaving cuts every stage into `vpp` pieces of equal size.
    for size in {*given.values(), *([rest // stages] if stages else [])}:
        if size % layout.vpp:
            what = f"does not divide the {size} layers of a pipeline stage"
            yield InputError(f"layout.vpp={layout.vpp}", what, f"choose layout.vpp={divisors(size)}")


def check_layout(config: Config, world_size: int, counted: str | None = None) -> None:
    """Raises a ConfigError when `world_size` processes do not fit the layout; messages call those of a plan `counted`.

    Megatron-Core (parallel_state.py) cuts the ranks of a pipeline stage twice: into tp * cp * dp for attention and
    dense layers, and into etp * ep * expert replicas for routed experts. Every data parallel rank takes whole prompts.
    """
    layout, prompts = config.layout, config.algorithm.prompts_per_step
    # A lone process was probably started without a launcher.
    alone = world_size == 1 and counted is None
    started = "processes (torchrun --nproc-per-node)" if alone else "processes"
    model_size, expert_size = layout.tp * layout.cp * layout.pp, layout.etp * layout.ep
    if world_size % model_size:
        product = f"sizes whose product is {divisors(world_size)}" if world_size > 1 else "layout=single"
        what = f"not divisible by layout.tp={layout.tp} * layout.cp={layout.cp} * layout.pp={layout.pp}"
        fix = f"start {multiples(world_size, model_size)} {started}, or choose {product}"
        # Refused at once: without a data parallel size the rules below have no meaning.
        refuse([InputError(f"{counted or 'the world size'} {world_size}", what, fix)])
    dp, stage = world_size // model_size, world_size // layout.pp
    problems = []
    if stage % expert_size:
        smallest = fewest_processes(layout)
        product = f"sizes whose product is {divisors(stage)}" if stage > 1 else "layout=single"
        problems.append(
            InputError(
                f"layout.ep={layout.ep}",
                f"with layout.etp={layout.etp} a pipeline stage needs {expert_size} processes, or a multiple; it has "
                f"{stage}",
                f"start {multiples(world_size, smallest)} {started}, or choose {product}",
            )
        )
    if prompts % dp:
        problems.append(
            InputError(
                f"algorithm.prompts_per_step={prompts}",
                f"not divisible by the data parallel size {dp} (world size {world_size} / (tp {layout.tp} * "
                f"cp {layout.cp} * pp {layout.pp}))",
                f"choose {multiples(prompts, dp)}",
            )
        )
    if config.rollout.engine == "sglang" and world_size % (tp := config.rollout.sglang.tp):
        what = f"does not divide the {world_size} processes"
        problems.append(InputError(f"rollout.sglang.tp={tp}", what, f"choose {divisors(world_size)}"))
    if config.optimizer.overlap and dp * layout.cp == 1:
        what = "no effect without data or context parallelism: a single replica reduces no gradients"
        fix = "set optimizer.overlap=false, or start more processes"
        problems.append(InputError("optimizer.overlap=true", what, fix))
    refuse(problems)


def fewest_processes(layout: LayoutConfig) -> int:
    """Number of processes of the smallest job with this layout."""
    return layout.pp * math.lcm(layout.tp * layout.cp, layout.etp * layout.ep)


def check_backend(layout: LayoutConfig, backend: str) -> None:
    """Raises a ConfigError when the layout gathers unequal numbers of tokens per expert and `backend` is gloo."""
    if backend == "gloo" and layout.etp > 1 and (layout.ep > 1 or layout.etp > layout.tp):
        what = f"with layout.ep={layout.ep} and layout.tp={layout.tp} needs NCCL"
        fix = "on a CPU use layout.etp=1, or layout.etp=layout.tp with layout.ep=1"
        refuse([InputError(f"layout.etp={layout.etp}", what, fix)])

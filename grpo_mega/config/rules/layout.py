"""Rules about the layout, and the processes and back end that it needs."""

from __future__ import annotations

import math
from collections.abc import Iterator

from grpo_mega.config.attention import why_padded
from grpo_mega.config.rules.problems import divisible, divisors, multiples, refuse
from grpo_mega.config.schema import Config, LayoutConfig


def layout_problems(config: Config) -> Iterator[str]:
    """A message for each rule that the layout violates with any number of processes."""
    layout, experts = config.layout, config.model.moe.experts
    for name in ("model.heads", "model.kv_heads", "model.ffn_hidden", "model.vocab_multiple"):
        yield from divisible(config, name, "layout.tp")
    if experts:
        # The shared expert is split like a dense layer, by tp; only routed experts are split by etp.
        yield from divisible(config, "model.moe.ffn_hidden", "layout.etp")
        yield from divisible(config, "model.moe.shared_ffn_hidden", "layout.tp")
        yield from divisible(config, "model.moe.experts", "layout.ep")
    yield from _equal_stages(config)
    if layout.sp and layout.tp == 1:
        yield "layout.sp=true needs tensor parallelism; set layout.tp=2 or more, or layout.sp=false"
    if layout.tp > 1 and not layout.sp and (experts > 0 or config.model.attention == "mla"):
        what = "experts" if experts > 0 else "latent attention (model.attention=mla)"
        yield f"layout.sp=false: Megatron needs sequence parallelism for {what} with layout.tp > 1; set layout.sp=true"
    if layout.fp8:
        yield from _eight_bit_problems(config)
    if layout.dispatch == "deepep":
        yield from _deepep_problems(config)
    theirs = config.distill.teacher and not config.distill.served  # may have experts, see config/teacher.py
    if layout.attention not in ("auto", "padded") and (why := why_padded(config.model)):
        yield f"layout.attention={layout.attention}: {why}; set layout.attention=padded, or auto"
    if layout.attention == "flash4" and config.model.window is not None:
        yield (
            f"layout.attention=flash4: its backward pass knows no window, and model.window={config.model.window}; set "
            "layout.attention=torch"
        )
    for name, size in (("layout.ep", layout.ep), ("layout.etp", layout.etp)):
        if size > 1 and experts == 0 and not theirs:
            yield f"{name}={size} needs experts; set model.moe.experts above 0, or {name}=1"


DEEPEP_SIZES = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)
"""Numbers of ranks that DeepEP has kernels for (get_dispatch_config in its buffer.py)."""
DEEPEP_MACHINE = 8
"""Number of GPUs of a machine that DeepEP assumes when ranks are on several machines."""


def _deepep_problems(config: Config) -> Iterator[str]:
    """A message for each setting with which DeepEP cannot exchange tokens."""
    model, layout, cluster = config.model, config.layout, config.cluster
    if not model.moe.experts:
        yield "layout.dispatch=deepep needs experts; set model.moe.experts above 0, or layout.dispatch=alltoall"
        return
    if layout.ep not in DEEPEP_SIZES and not layout.undecided:
        sizes = ", ".join(map(str, DEEPEP_SIZES))
        yield f"layout.dispatch=deepep has kernels for layout.ep of {sizes}, not {layout.ep}; choose one of these"
    if layout.etp > 1:
        yield f"layout.dispatch=deepep keeps experts whole; set layout.etp=1, not {layout.etp}"
    if model.dtype != "bf16":
        yield f"layout.dispatch=deepep sends bf16; set model.dtype=bf16, not {model.dtype}"
    if model.hidden % 8:
        yield f"layout.dispatch=deepep sends 16 bytes at once; make model.hidden={model.hidden} a multiple of 8"
    if layout.ep > DEEPEP_MACHINE and cluster.gpus_per_node != DEEPEP_MACHINE:
        yield (
            f"layout.dispatch=deepep needs machines of {DEEPEP_MACHINE} GPUs for layout.ep={layout.ep}, and "
            f"cluster.gpus_per_node={cluster.gpus_per_node}; set it to {DEEPEP_MACHINE} where it is so, or "
            "layout.dispatch=alltoall"
        )


def _eight_bit_problems(config: Config) -> Iterator[str]:
    """A message for each setting that does not go with matrix products in 8 bits."""
    model, layout = config.model, config.layout
    if model.dtype != "bf16":
        yield f"layout.fp8=true needs model.dtype=bf16, not {model.dtype}; set it, or layout.fp8=false"
    if config.lora.rank:
        yield (
            f"layout.fp8=true does not go with lora.rank={config.lora.rank}: adapters are products of their own, in "
            "bf16; set layout.fp8=false"
        )
    sizes = {"model.hidden": (model.hidden, 1), "model.ffn_hidden": (model.ffn_hidden, layout.tp)}
    if model.moe.experts:
        sizes |= {
            "model.moe.ffn_hidden": (model.moe.ffn_hidden, layout.etp),
            "model.moe.shared_ffn_hidden": (model.moe.shared_ffn_hidden, layout.tp),
        }
    for name, (size, ranks) in sizes.items():
        if size % (16 * ranks):
            shared = f" on each of {ranks} ranks" if ranks > 1 else ""
            yield f"layout.fp8=true needs {name}={size} to be a multiple of 16{shared}; set layout.fp8=false"
    if config.run.trains == "policy" and config.run.steps and config.algorithm.correction == "none":
        yield (
            "layout.fp8=true moves the trainer's probabilities away from the engine's, and algorithm.correction=none "
            "does nothing about it; set algorithm.correction=truncate or mask"
        )


def _equal_stages(config: Config) -> Iterator[str]:
    """A message when layers cannot be split evenly over pipeline stages, apart from given first and last stages."""
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
                f"choose layout.vpp={divisors(size)}"
            )


def check_layout(config: Config, world_size: int, counted: str = "the world size") -> None:
    """Raises a ConfigError when `world_size` processes, which the message calls `counted`, do not fit the layout.

    Megatron-Core (parallel_state.py) cuts the ranks of a pipeline stage twice: into tp * cp * dp for attention and
    dense layers, and into etp * ep * expert replicas for routed experts. Every data parallel rank takes whole prompts.
    """
    layout, prompts = config.layout, config.algorithm.prompts_per_step
    model_size, expert_size = layout.tp * layout.cp * layout.pp, layout.etp * layout.ep
    if world_size % model_size:
        product = f"a product of {divisors(world_size)}" if world_size > 1 else "layout=single"
        refuse([
            f"{counted} {world_size} is not divisible by layout.tp={layout.tp} * layout.cp={layout.cp} * "
            f"layout.pp={layout.pp}; start "
            f"{multiples(world_size, model_size)} processes, or choose {product}"
        ])  # fmt: skip
    dp, stage = world_size // model_size, world_size // layout.pp
    problems = []
    if stage % expert_size:
        smallest = fewest_processes(layout)
        problems.append(
            f"layout.ep={layout.ep} * layout.etp={layout.etp} does not divide the {stage} ranks of a pipeline stage; "
            f"choose a product of {divisors(stage)}, or start {multiples(world_size, smallest)} processes"
        )
    if prompts % dp:
        problems.append(
            f"algorithm.prompts_per_step={prompts} is not divisible by the data parallel size {dp} (world size "
            f"{world_size} / (tp {layout.tp} * cp {layout.cp} * pp {layout.pp})); choose {multiples(prompts, dp)}"
        )
    if config.rollout.engine == "sglang" and world_size % config.rollout.sglang.tp:
        problems.append(
            f"rollout.sglang.tp={config.rollout.sglang.tp} does not divide the {world_size} processes; choose "
            f"{divisors(world_size)}"
        )
    if config.optimizer.overlap and dp * layout.cp == 1:
        problems.append(
            "optimizer.overlap=true has no effect without data or context parallelism: a lone replica reduces no "
            "gradients; set optimizer.overlap=false, or start more processes"
        )
    refuse(problems)


def fewest_processes(layout: LayoutConfig) -> int:
    """Number of processes of the smallest job with this layout."""
    return layout.pp * math.lcm(layout.tp * layout.cp, layout.etp * layout.ep)


def check_backend(config: Config, backend: str) -> None:
    """Raises a ConfigError when the layout gathers unequal numbers of tokens per expert and `backend` is gloo."""
    layout = config.layout
    if backend == "gloo" and layout.etp > 1 and (layout.ep > 1 or layout.etp > layout.tp):
        refuse([
            f"layout.etp={layout.etp} with layout.ep={layout.ep} and layout.tp={layout.tp} needs NCCL: on a CPU use "
            "layout.etp=1, or layout.etp=layout.tp with layout.ep=1"
        ])  # fmt: skip

"""Prints the formulas behind the times of a plan, with their numbers."""

from __future__ import annotations

from typing import Any

from grpo_mega.config.schema import Config
from grpo_mega.forecast.planning.counting import layer_ops, token_ops
from grpo_mega.forecast.planning.hours import cache_room, job_of
from grpo_mega.forecast.planning.memory import held, leaves
from grpo_mega.forecast.planning.time import Assumed, Job, PlannedRollout, StepTime, run_time
from grpo_mega.forecast.planning.training_time import Micro, layer_forward


def explain(config: Config, planned: dict[str, Any], assumed: Assumed) -> None:
    """Prints the formulas of a run that `hours.hours` has times of."""
    job = job_of(config, planned)
    assert job is not None  # or there were no times
    room, trainer = cache_room(job, planned["engine"]), job.trainer
    print("\nhow these are computed (docs/planner.md has the formulas and the source of each constant)")
    for step in run_time(job, room, assumed):
        print(f"\ncompletions up to {step.longest:,} tokens")
        _generation(step.rollout, step.completion, room, assumed.prompt)
        _training(job, step)
    moved = max(leaves(held(trainer, [*job.roles], number)) for number in range(config.layout.pp))
    gpu, rates = job.machines.gpu, job.machines.rates
    print(
        f"\noffload: 2 x {moved / 1e9:.1f} GB to main memory / ({gpu.host / 1e9:.0f} GB/s x {rates.host}) = "
        f"{2 * moved / gpu.host / rates.host:.1f} s, and {rates.turn:.0f} s to wake and sleep"
    )
    here = min(job.machines.gpus, config.cluster.gpus_per_node)
    over = "its number of replicas" if config.optimizer.distributed else "1"
    print(
        f"a checkpoint: {here} GPUs x {trainer.saved_state_bytes} bytes of Adam's state per parameter / {over}, plus "
        f"{trainer.weight_bytes} bytes per weight on GPUs of the first replica = {planned['saving'] / 1e9:.1f} GB of a "
        "machine's main memory, on its fullest stage"
    )


def _generation(rollout: PlannedRollout, completion: float, room: float, prompt: int) -> None:
    decoder, most = rollout.decoder, rollout.slowest.most
    print(
        f"  {rollout.engines} engines, each with room for {room:,.0f} tokens, at most {most} completions at once, "
        f"{rollout.slowest.waves:.1f} waves"
    )
    for running in dict.fromkeys((1, most)):
        held_tokens = running * (completion / 2 + prompt)
        touched = 1 - (1 - decoder.chosen) ** running
        read = decoder.dense + decoder.experts * touched + held_tokens / decoder.caches * decoder.per_key
        print(
            f"  a step with {running:,}: max({read / 1e9:.1f} GB ({decoder.dense / 1e9:.1f} of weights + "
            f"{decoder.experts / 1e9:.1f} of experts x {touched:.0%} touched + keys and values of "
            f"{held_tokens / decoder.caches:,.0f} tokens) / {decoder.memory / 1e12:.2f} TB/s, {running:,} x "
            f"{1e6 * decoder.per_sequence:.1f} us of products) + {1e3 * decoder.fixed:.1f} ms + {running:,} x "
            f"{1e6 * decoder.message:.1f} us of messages = {1e3 * decoder.step(running, held_tokens):.1f} ms"
        )
    if sliced := rollout.sliced:
        print(
            f"  simulated with slices: {sliced.seconds:,.1f} s of {sliced.slices:.2f} slices a step, of which "
            f"{sliced.reading:,.1f} s read prompts and completions so far; without slices:"
        )
    print(
        f"  simulated: {rollout.slowest.seconds:,.1f} s; if all had {completion:,.0f} tokens {rollout.level:,.1f} s, "
        f"the rest is the tail; the longest completion alone {rollout.alone:,.1f} s"
    )


def _training(job: Job, step: StepTime) -> None:
    trainer, algorithm, rates, gpu = job.trainer, job.config.algorithm, job.machines.rates, job.machines.gpu
    model, layout = trainer.model, trainer.layout
    updates = next(phase for phase in step.phases if phase.name == "updates")
    assert updates.slots is not None  # it is a pass
    keys = step.tokens / (step.groups * algorithm.group_size) / 2
    micro = Micro(layout.micro_batch_tokens, keys)
    mine = layout.micro_batch_tokens / layout.cp / layout.tp
    experts = bool(model.moe.experts)
    ops = layer_ops(model, experts, trainer.lora)
    forward = layer_forward(trainer, experts, 0.0, micro, job.machines)
    whole = token_ops(model, job.vocab_size, keys)
    print(f"  a token: {whole / 1e9:.1f} GFLOP forward in the whole model, attending to {keys:,.0f} tokens")
    print(f"  a layer forward, full micro-batch, {mine:,.0f} tokens per GPU:")
    peak = f"{gpu.flops / 1e12:.0f} TFLOP/s"
    of_products = f"{2 * gpu.flops / 1e12:.0f} TFLOP/s in 8 bits" if layout.fp8 else peak
    bandwidth = f"({gpu.memory / 1e12:.2f} TB/s x {rates.memory})"
    products = (ops.matmul + ops.adapters) / 1e6
    numbers = {
        "matrix products": f"{products:,.0f} MFLOP per token / ({of_products} x {rates.matmul})",
        "routed experts": f"{ops.grouped / 1e6:,.0f} MFLOP per token x {rates.imbalance} / ({of_products} x "
        f"{rates.grouped})",
        "attention": f"{ops.per_key / 1e3:,.0f} kFLOP x {keys:,.0f} / ({peak} x {rates.attention})",
        "single numbers": f"{rates.traffic:g} x bytes kept / {bandwidth}",
        "to 8 bits": f"4 bytes per number that a product with weights reads / {bandwidth}",
        "weights to 8 bits": f"4 bytes per weight, once per micro-batch / {bandwidth}",
        "exchange of experts": f"{model.moe.top_k} copies of a token there and back over "
        f"{layout.ep * layout.etp} ranks, x {rates.imbalance} x (1 - {rates.hidden:g})",
        "waits for the host": f"{1e3 * rates.wait:g} ms",
    }
    for name, seconds in forward.items():
        if seconds:
            print(f"    {name}: {numbers.get(name, 'bytes over the link')} = {1e3 * seconds:.2f} ms")
    print(
        f"  updates: {updates.slots.micros} micro-batches of the slowest replica on pipeline stage "
        f"{updates.slots.stage}, forward and backward, plus a bubble of {layout.pp - 1} / {layout.vpp} micro-batches; "
        f"{algorithm.epochs * algorithm.mini_batches} updates = {updates.seconds:,.1f} s"
    )

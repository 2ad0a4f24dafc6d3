"""Prints how the times of a plan come about: each formula, with its numbers in it."""

from __future__ import annotations

from typing import Any

from grpo_mega.config.schema import Config
from grpo_mega.forecast.planning.counting import layer_ops, token_ops
from grpo_mega.forecast.planning.generation import decoder_of
from grpo_mega.forecast.planning.hardware import Machines, machines_of
from grpo_mega.forecast.planning.hours import cache_room
from grpo_mega.forecast.planning.memory import held, leaves, saved_state_bytes, weight_bytes
from grpo_mega.forecast.planning.plan import roles_of, vocabulary
from grpo_mega.forecast.planning.time import Assumed, StepTime, run_time
from grpo_mega.forecast.planning.training_time import Micro, layer_forward


def explain(config: Config, planned: dict[str, Any], assumed: Assumed) -> None:
    """Prints the formulas of a run that `hours.hours` has times of."""
    machines = machines_of(config.cluster, planned["gpus"])
    assert machines is not None  # or there were no times
    vocab_size = vocabulary(config)
    roles = roles_of(config, vocab_size, machines.gpus)
    room = cache_room(config, planned, vocab_size)
    print("\nhow these come about (docs/planner.md has the formulas and where each constant is from)")
    for step in run_time(config, roles, vocab_size, machines, room, assumed):
        print(f"\nanswers up to {step.longest:,} tokens")
        _generation(config, vocab_size, machines, step, room, assumed.prompt)
        _training(config, vocab_size, machines, step)
    moved = max(leaves(held(config, roles, number)) for number in range(config.layout.pp))
    gpu, rates = machines.gpu, machines.rates
    print(
        f"\nturns: 2 x {moved / 1e9:.1f} GB to main memory / ({gpu.host / 1e9:.0f} GB/s x {rates.host}) = "
        f"{2 * moved / gpu.host / rates.host:.1f} s, and {rates.turn:.0f} s to wake and sleep"
    )
    here = min(machines.gpus, config.cluster.gpus_per_node)
    over = "the replicas of each" if config.optimizer.distributed else "1"
    print(
        f"a checkpoint: {here} GPUs x {saved_state_bytes(config)} bytes a parameter of Adam's state / {over}, and "
        f"{weight_bytes(config)} bytes a weight on those of the first replica = {planned['saving'] / 1e9:.1f} GB of a "
        "machine's main memory, on its fullest stage"
    )


def _generation(config: Config, vocab_size: int, machines: Machines, step: StepTime, room: float, prompt: int) -> None:
    decoder, rollout = decoder_of(config, vocab_size, machines), step.rollout
    alone, many = 1, rollout.slowest.most
    print(
        f"  {rollout.engines} engines, each with room for {room:,.0f} tokens, at most {many} answers at once, "
        f"{rollout.slowest.waves:.1f} waves"
    )
    for running in dict.fromkeys((alone, many)):
        held_tokens = running * (step.answer / 2 + prompt)
        touched = 1 - (1 - decoder.chosen) ** running
        read = decoder.dense + decoder.experts * touched + held_tokens / decoder.caches * decoder.per_key
        print(
            f"  a step with {running:,}: max({read / 1e9:.1f} GB ({decoder.dense / 1e9:.1f} of weights + "
            f"{decoder.experts / 1e9:.1f} of experts x {touched:.0%} touched + keys and values of "
            f"{held_tokens / decoder.caches:,.0f} tokens) / {decoder.memory / 1e12:.2f} TB/s, {running:,} x "
            f"{1e6 * decoder.per_sequence:.1f} us of products) + {1e3 * decoder.fixed:.1f} ms + {running:,} x "
            f"{1e6 * decoder.message:.1f} us of messages = {1e3 * decoder.step(running, held_tokens):.1f} ms"
        )
    print(
        f"  simulated: {rollout.slowest.seconds:,.1f} s; if all had {step.answer:,.0f} tokens {rollout.level:,.1f} s, "
        f"the rest is the tail; the longest alone {rollout.alone:,.1f} s"
    )


def _training(config: Config, vocab_size: int, machines: Machines, step: StepTime) -> None:
    layout, rates, gpu = config.layout, machines.rates, machines.gpu
    updates = next(phase for phase in step.phases if phase.name == "updates")
    assert updates.slots is not None  # it is a pass
    keys = step.tokens / (step.groups * config.algorithm.group_size) / 2
    micro = Micro(layout.micro_batch_tokens, keys)
    mine = layout.micro_batch_tokens / layout.cp / layout.tp
    experts = bool(config.model.moe.experts)
    ops = layer_ops(config.model, experts, config.lora)
    forward = layer_forward(config, experts, 0.0, micro, machines)
    whole = token_ops(config.model, vocab_size, keys)
    print(f"  a token: {whole / 1e9:.1f} GFLOP forward in the whole model, with {keys:,.0f} tokens to look at")
    print(f"  a layer forward, full micro-batch, {mine:,.0f} tokens for each GPU:")
    peak = f"{gpu.flops / 1e12:.0f} TFLOP/s"
    of_products = f"{2 * gpu.flops / 1e12:.0f} TFLOP/s in 8 bits" if layout.fp8 else peak
    bandwidth = f"({gpu.memory / 1e12:.2f} TB/s x {rates.memory})"
    numbers = {
        "matrix products": f"{(ops.matmul + ops.adapters) / 1e6:,.0f} MFLOP a token / ({of_products} x {rates.matmul})",
        "routed experts": f"{ops.grouped / 1e6:,.0f} MFLOP a token x {rates.imbalance} / ({of_products} x "
        f"{rates.grouped})",
        "attention": f"{ops.per_key / 1e3:,.0f} kFLOP x {keys:,.0f} / ({peak} x {rates.attention})",
        "single numbers": f"{rates.traffic:g} x bytes that are kept / {bandwidth}",
        "to 8 bits": f"4 bytes for each number that a product with weights reads / {bandwidth}",
        "weights to 8 bits": f"4 bytes for each weight, whose products are of a micro-batch / {bandwidth}",
        "exchange of experts": f"{config.model.moe.top_k} copies of a token there and back over "
        f"{layout.ep * layout.etp} ranks, x {rates.imbalance} x (1 - {rates.hidden:g})",
        "waits for the host": f"{1e3 * rates.wait:g} ms",
    }
    for name, seconds in forward.items():
        if seconds:
            print(f"    {name}: {numbers.get(name, 'bytes over the link')} = {1e3 * seconds:.2f} ms")
    print(
        f"  updates: {updates.slots.micros} micro-batches of the slowest replica on stage {updates.slots.stage}, "
        f"forward and backward, and a bubble of {layout.pp - 1} / {layout.vpp} more; "
        f"{config.algorithm.epochs * config.algorithm.mini_batches} updates = {updates.seconds:,.1f} s"
    )

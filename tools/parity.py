"""Checks that a layout trains like one process on this cluster. Run it before a big job.

    torchrun --nproc-per-node 4 tools/parity.py layout=tp2_pp2
    torchrun --nproc-per-node 2 tools/parity.py layout.tp=2 layout.sp=true model=tiny_mla_moe model.qk_norm=true
    torchrun --nproc-per-node 4 tools/parity.py --all

The same seeded weights and the same batch (random tokens, sequences of very different lengths, groups that share a
prompt) go through several optimizer steps, on one process that the first rank starts and on the layout. Their results
are compared number by number; `--all` does so for every layout of `LAYOUTS` that fits the processes and the model.

Arguments are overrides of the configuration; the defaults are those of `SHAPE` below. Set your model's features:
model.qk_norm=true (Qwen3, DeepSeek-V3) adds norms whose gradients each layout sums differently. Every rank holds the
whole weights of every step: choose few layers of a big model. Exit code 0: all agree; 1: some differ, and the first
differing tensor is named; 2: the configuration cannot run.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from array import array
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from grpo_mega import platform
from grpo_mega.algorithm.weights import token_weights
from grpo_mega.config.load import compose_config
from grpo_mega.config.rules import check_backend, check_layout
from grpo_mega.config.schema import Config, LayoutConfig
from grpo_mega.observe.launcher import finish
from grpo_mega.types import Batch, Prompt, Sample

DIFFERENT = 1
"""Exit code when a number is off by more than its tolerance, or the run on one process failed."""
BAD_INPUT = 2
"""Exit code when the configuration cannot run."""
VOCABULARY = 100
"""Vocabulary size; embedding rows are padded above it."""
TORCHRUN = re.compile("RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*")
"""Environment variables that would make a process join torchrun's job."""

SHAPE = [
    "model=tiny_moe",
    "model.layers=4",
    "model.init_std=0.05",
    "data=chain_sum",
    "reward=think_answer",
    "algorithm.group_size=4",
    "algorithm.clip_high=0.28",
    "algorithm.kl_coef=0.04",
    "layout.micro_batch_tokens=200",
    "optimizer.lr=1e-4",
    # With a smaller eps, the rounding of a gradient near 0 would become a step of full size.
    "optimizer.eps=1e-6",
    "run.name=parity",
    "run.steps=1",
]

LAYOUTS = """
layout=single
layout.tp=2
layout.tp=2 layout.sp=true
layout.tp=4 layout.sp=true
layout.pp=2
layout.pp=4
layout.pp=2 layout.vpp=2
layout.cp=2
layout.ep=2
layout.ep=4
layout.tp=2 layout.sp=true layout.etp=2
layout.tp=2 layout.sp=true layout.pp=2
layout.tp=2 layout.sp=true layout.pp=2 layout.vpp=2
layout.tp=2 layout.sp=true layout.cp=2
layout.tp=2 layout.sp=true layout.ep=2
layout.tp=2 layout.sp=true layout.ep=4
layout.pp=2 layout.ep=2
layout.pp=2 layout.cp=2
layout.cp=2 layout.ep=2
layout.tp=2 layout.sp=true layout.pp=2 layout.ep=2
layout.tp=2 layout.sp=true layout.pp=2 layout.cp=2
layout.tp=4 layout.sp=true layout.pp=2 layout.ep=4
layout.tp=8 layout.sp=true
layout.ep=8
optimizer.distributed=true
optimizer.distributed=true layout.tp=2 layout.sp=true
optimizer.distributed=true layout.ep=2
optimizer.distributed=true optimizer.overlap=true
optimizer.distributed=true optimizer.overlap=true layout.tp=2 layout.sp=true
optimizer.distributed=true optimizer.overlap=true layout.pp=2 layout.vpp=2
optimizer.distributed=true optimizer.overlap=true layout.ep=2
""".strip().splitlines()
"""Layouts of `--all`; the remaining ranks are data parallel. Layouts that do not fit the processes or the model are
skipped."""

# fp32: rounding, of sums in another order. A gradient differs by it alone; Adam divides by the gradient's size, so that
# an update is some ten times further off, and the later steps start from there. Measured over LAYOUTS on a CPU: at most
# a tenth of these for updates and later steps, half of them for gradients.
# bf16: a product is off by up to 2^-9, and a token on the edge goes to another expert; TP2 alone changes the gradient
# of the default model by a tenth. A wrong factor shows, a subtle mistake does not: find that in fp32.
TOLERANCES = {
    "fp32": {
        "gradient, all": (1e-6, 1e-6),
        "gradient, worst": (5e-6, 5e-6),
        "log-probs": (1e-5, 1e-4),
        # In later steps a token on the edge between two experts may go to the other one.
        "expert load": (0.0, 5e-3),
        "expert bias": (0.0, 4e-3),
        "loss": (2e-6, 1e-5),
        "gradient norm": (2e-6, 1e-5),
        "update, all": (1e-4, 1e-4),
        "update, worst": (1e-3, 1e-3),
    },
    "bf16": {
        "gradient, all": (0.2, 0.2),
        "gradient, worst": (0.4, 0.4),
        "log-probs": (0.5, 0.5),
        "expert load": (0.05, 0.05),
        "expert bias": (4e-3, 1e-2),
        "loss": (0.02, 0.02),
        "gradient norm": (0.05, 0.05),
        "update, all": (0.6, 0.6),
        "update, worst": (0.8, 0.8),
    },
}
"""{`model.dtype`: {quantity: (largest allowed difference in the first step, in later steps)}}."""

Tensors = dict[str, torch.Tensor]
Tolerances = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Row:
    """Comparison of one quantity.

    Attributes:
        quantity, step: The quantity, and the optimizer step (from 1) after which it was measured.
        found, one_rank: Values on the layout and on one rank: the mean of log-probs, of each expert's share of its
            layer's tokens, of biases; the L2 norm of other tensors.
        difference: The largest absolute difference for log-probs, experts' shares and biases; else relative, for
            tensors in L2 norm.
        tolerance: Largest difference that passes.
        tensor: The compared tensor, if only one.
        first: First tensor in layer order that exceeds the tolerance.
    """

    quantity: str
    step: int
    found: float
    one_rank: float
    difference: float
    tolerance: float
    tensor: str = ""
    first: str = ""

    @property
    def passed(self) -> bool:
        """Whether the difference is a number within the tolerance."""
        return self.difference <= self.tolerance


def main() -> None:
    """Compares and exits with the code in the module's docstring, the same on every rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps, 3 by default")
    parser.add_argument("--all", action="store_true", help="every layout that fits, one line each")
    parser.add_argument("--save", type=Path, help="on one process: write what it finds here, compare with nothing")
    parser.add_argument("overrides", nargs="*", help="configuration overrides")
    options = parser.parse_args()
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    here = platform.start()
    platform.join_processes(here)
    code = run(options, here)
    # torchrun sends SIGTERM to the others once one rank has exited with a code above 0; all must reach the barrier.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.barrier()
    finish(code)


def run(options: argparse.Namespace, here: platform.Platform) -> int:
    """Runs the comparison; returns the exit code, the same on every rank."""
    # The same batch must suit one rank and every layout; all of them divide the prompts.
    prompts = f"algorithm.prompts_per_step={math.lcm(8, dist.get_world_size())}"
    overrides = options.overrides if options.save else [prompts, *options.overrides]
    config = accepted(overrides, layout=not (options.all or options.save))
    if isinstance(config, str):
        say(f"error: {config}", sys.stderr)
        return BAD_INPUT
    if options.save:
        torch.save(findings(on_one_rank(config), here, options.steps), options.save)
        return 0
    reference = run_one_rank(overrides, options.steps)
    if not reference:
        return DIFFERENT
    if not options.all:
        rows = compare_layout(config, here, options.steps, reference)
        say(table(rows))
        return failed(rows)
    codes = [try_layout(layout, overrides, here, options.steps, reference) for layout in LAYOUTS]
    say(f"{codes.count(0)} layouts agree with one rank, {codes.count(DIFFERENT)} do not")
    return max((code for code in codes if code is not None), default=0)


def accepted(overrides: list[str], layout: bool) -> Config | str:
    """Configuration of `SHAPE` and overrides, or why it, or its layout on these processes, cannot run."""
    try:
        config = compose_config(SHAPE + overrides)
        if layout:
            check_layout(config, dist.get_world_size())
            check_backend(config.layout, dist.get_backend())
    except ValueError as error:
        return str(error)
    return config


def on_one_rank(config: Config) -> Config:
    """The configuration without parallelism; the batch is still split into micro-batches of the same budget."""
    return replace(
        config,
        layout=LayoutConfig(micro_batch_tokens=config.layout.micro_batch_tokens),
        optimizer=replace(config.optimizer, distributed=False, overlap=False),
    )


def run_one_rank(overrides: list[str], steps: int) -> dict[str, Any]:
    """Results on one process: all on the first rank, only the batch on others; {} if it failed."""
    result: dict[str, Any] = {}
    if dist.get_rank() == 0:
        # With torchrun's variables, the single process would try to join this job.
        environment = {name: value for name, value in os.environ.items() if not TORCHRUN.fullmatch(name)}
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "one_rank.pt"
            command = [sys.executable, __file__, "--save", str(file), "--steps", str(steps), *overrides]
            code = subprocess.run(command, env=environment).returncode
            if code == 0:
                result = torch.load(file)
            else:
                say(f"the run on one process ended with exit code {code}; its error is above", sys.stderr)
    batch = [result.get("batch")]
    dist.broadcast_object_list(batch)
    return result or ({"batch": batch[0]} if batch[0] else {})


def try_layout(
    layout: str, overrides: list[str], here: platform.Platform, steps: int, reference: dict[str, Any]
) -> int | None:
    """One line of `--all`: 0 or `DIFFERENT`, None if the layout does not fit."""
    config = accepted([*overrides, *layout.split()], layout=True)
    if isinstance(config, str):
        say(f"left out  {layout}: {config.splitlines()[-1].strip(' -').split(';')[0]}")
        return None
    rows = compare_layout(config, here, steps, reference)
    dp = dist.get_world_size() // (config.layout.tp * config.layout.cp * config.layout.pp)
    say(f"{'FAIL' if failed(rows) else 'pass'}      {layout}, dp {dp}: {summary(rows)}")
    return failed(rows)


def compare_layout(config: Config, here: platform.Platform, steps: int, reference: dict[str, Any]) -> list[Row]:
    """All comparisons of the layout with one rank, on every rank; leaves the layout's process groups."""
    from grpo_mega.models.topology import leave_groups

    found = findings(config, here, steps, Batch(**reference["batch"]))
    # The policy is gone by now: before, its groups would survive, 600 threads a rank after all layouts.
    leave_groups()
    rows = [compare(found, reference, TOLERANCES[config.model.dtype]) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(rows)
    assert rows[0] is not None
    return rows[0]


def findings(config: Config, here: platform.Platform, steps: int, batch: Batch | None = None) -> dict[str, Any]:
    """Trains and returns the batch, the gradients at the initial weights, and the input of `step_rows` for every step.

    Without a batch a synthetic one is used. All tensors are whole, on every rank.
    """
    # Megatron may be imported only after the platform is prepared.
    from grpo_mega.models.policy import Policy
    from grpo_mega.models.topology import join_layout
    from grpo_mega.stages.step import loss_of

    topology, optimizer = join_layout(config.layout, config.run.seed), config.optimizer
    policy = Policy(config.model, config.layout, VOCABULARY, topology, here, optimizer=optimizer, lora=config.lora)
    policy.initialize(config.run.seed)
    policy.use_optimizer(optimizer)
    whole, temperature = batch or made_up_batch(config, policy), config.rollout.temperature
    batch = policy.share(whole)
    loss = loss_of(config.algorithm, old_is_current=False)
    initial = by_layer(policy.whole_weights())
    policy.gradients(batch, loss, temperature)
    # From a separate pass, because the optimizer clips the gradients of an update.
    gradients = by_layer(policy.whole_gradients())
    done = []
    for _ in range(steps):
        step = policy.update(batch, loss, optimizer.lr, temperature)
        weights = by_layer(policy.whole_weights())
        done.append({
            "log-probs": policy.gathered(step.outputs, batch)[whole.mask],
            "loss": step.metrics["loss"],
            "gradient norm": step.metrics["grad_norm"],
            "update": {key: weights[key].float() - initial[key].float() for key in gradients},
            "expert load": torch.cat([torch.zeros(0), *(torch.tensor(x) / sum(x) for x in step.expert_loads.values())]),
            "expert bias": torch.cat([torch.zeros(0), *(weights[key] for key in weights if "expert_bias" in key)]),
        })  # fmt: skip
    return {"batch": vars(whole), "gradients": gradients, "steps": done}


def made_up_batch(config: Config, policy: Any) -> Batch:
    """Synthetic batch: groups of random tokens that share a prompt, of all lengths that fit; advantages of both signs.

    Old and reference log-probs are so far from the policy's that ratios clip and the KL term has a gradient.
    """
    # Imports Megatron, for which the platform must be prepared.
    from grpo_mega.stages.exchange import pack_samples

    draw, context, algorithm = random.Random(config.run.seed), config.model.context, config.algorithm
    samples = []
    for p in range(algorithm.prompts_per_step):
        prompt = Prompt(f"random/{p}", random_tokens(draw, context // 2), "", "", "random")
        longest = min(config.rollout.max_new_tokens, context - len(prompt.token_ids))
        for g in range(algorithm.group_size):
            tokens = array("i", random_tokens(draw, longest))
            samples.append(Sample(prompt, g, tokens, array("f", bytes(4 * len(tokens))), "length", ((0, 0),), ""))
    batch = pack_samples(samples)
    logprob, shift = policy.logprobs(batch, config.rollout.temperature), torch.sin(torch.arange(len(batch.tokens)))
    return batch.with_(
        weight=token_weights(batch.mask, batch.cu_seqlens, algorithm.aggregation, config.rollout.max_new_tokens),
        advantage=torch.linspace(-1.5, 1.5, len(samples)).repeat_interleave(batch.lengths),
        old_logprob=logprob + 0.3 * shift,
        ref_logprob=logprob - 0.2 * shift,
        rollout_logprob=logprob - 0.4 * shift,
    )


def random_tokens(draw: random.Random, longest: int) -> tuple[int, ...]:
    """Random tokens, from one to `longest` of them."""
    return tuple(draw.choices(range(VOCABULARY), k=draw.randint(1, longest)))


def by_layer(tensors: Tensors) -> Tensors:
    """Tensors split by layer, which checkpoint keys may join, in the order of the model."""
    apart: Tensors = {}
    for key, tensor in tensors.items():
        stacked = re.fullmatch(r"(.*\blayers\.)(?!\d)(.+)", key)
        apart |= {f"{stacked[1]}{i}.{stacked[2]}": t for i, t in enumerate(tensor)} if stacked else {key: tensor}
    return dict(sorted(apart.items(), key=lambda item: place_in_model(item[0])))


def place_in_model(key: str) -> tuple:
    """Sort key of parameter names: embedding, layers by number, final norm, output layer."""
    places = ("embedding.", "decoder.layers.", "decoder.", "output_layer.")
    parts = (".input_layernorm.", ".self_attention.", ".pre_mlp_layernorm.", ".mlp.")
    place = next((i for i, name in enumerate(places) if key.startswith(name)), len(places))
    part = next((i for i, name in enumerate(parts) if name in key), len(parts))
    return place, [int(number) for number in re.findall(r"\blayers\.(\d+)", key)], part, key


def compare(found: dict[str, Any], one_rank: dict[str, Any], tolerances: Tolerances) -> list[Row]:
    """Compares every quantity of every step; `found` and `one_rank` come from `findings`."""
    rows = tensor_rows("gradient", 1, found["gradients"], one_rank["gradients"], tolerances)
    for number, (mine, other) in enumerate(zip(found["steps"], one_rank["steps"], strict=True), start=1):
        rows += step_rows(number, mine, other, tolerances)
    return rows


def step_rows(step: int, mine: dict[str, Any], other: dict[str, Any], tolerances: Tolerances) -> list[Row]:
    """Comparisons of one optimizer step."""
    rows = []
    for name in ("log-probs", "expert load", "expert bias"):
        a, b = mine[name], other[name]
        if len(b):
            off = (a - b).abs().max().item() if a.shape == b.shape else math.inf
            rows.append(Row(name, step, a.mean().item(), b.mean().item(), off, tolerances[name][step > 1]))
    for name in ("loss", "gradient norm"):
        a, b = mine[name], other[name]
        rows.append(Row(name, step, a, b, abs(a - b) / abs(b) if b else abs(a), tolerances[name][step > 1]))
    return rows + tensor_rows("update", step, mine["update"], other["update"], tolerances)


def tensor_rows(name: str, step: int, mine: Tensors, other: Tensors, tolerances: Tolerances) -> list[Row]:
    """Comparison of all tensors together, and of the one with the largest difference."""
    off = {key: distance(mine.get(key), other.get(key)) for key in {**other, **mine}}
    worst = max(off, key=lambda key: off[key])
    rows = []
    for quantity, keys in ((f"{name}, all", list(off)), (f"{name}, worst", [worst])):
        tolerance = tolerances[quantity][step > 1]
        a, b = flat(mine, keys), flat(other, keys)
        # Tensors are in the order of the model: the first that differs is where the cause is, and later ones may only
        # follow.
        first = next((key for key in off if not off[key] <= tolerance), "")
        tensor = worst if keys == [worst] else ""
        rows.append(Row(quantity, step, a.norm().item(), b.norm().item(), distance(a, b), tolerance, tensor, first))
    return rows


def distance(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """|a - b| / |b| (L2 norms); infinite if one is missing, of another shape or not a number."""
    if a is None or b is None or a.shape != b.shape:
        return math.inf
    off, size = (a.double() - b.double()).norm().item(), b.double().norm().item()
    if off == 0:
        return 0.0
    return off / size if size and math.isfinite(off) else math.inf


def flat(tensors: Tensors, keys: list[str]) -> torch.Tensor:
    """The existing tensors of these names as one vector in double precision."""
    there = [tensors[key].flatten().double() for key in keys if key in tensors]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *there])


def failed(rows: list[Row]) -> int:
    """Exit code of these comparisons."""
    return 0 if all(row.passed for row in rows) else DIFFERENT


def table(rows: list[Row]) -> str:
    """Table of all comparisons, with a hint where to look first."""
    lines = [f"{'quantity':<16}{'step':>5}{'found':>15}{'one rank':>15}{'difference':>12}{'tolerance':>11}"]
    for r in rows:
        lines.append(
            f"{r.quantity:<16}{r.step:>5}{r.found:>15.7g}{r.one_rank:>15.7g}{r.difference:>12.1e}{r.tolerance:>11.0e}"
            f"  {'pass' if r.passed else 'FAIL'}  {r.tensor}".rstrip()
        )
    return "\n".join([*lines, summary(rows)])


def summary(rows: list[Row]) -> str:
    """Summary of the comparisons in a line; on failure with the first differing tensor of the model."""
    bad = [row for row in rows if not row.passed]
    if not bad:
        gradients = [f"{row.difference:.1e}" for row in rows if row.quantity.startswith("gradient, ")]
        return f"agrees with one rank: all gradients within {gradients[0]}, the worst within {gradients[1]}"
    where = next((f"{r.first} ({r.quantity.split(',')[0]} of step {r.step})" for r in bad if r.first), "none")
    return (
        f"{len(bad)} of {len(rows)} comparisons failed, the first: {bad[0].quantity} of step {bad[0].step}; "
        f"first tensor that differs: {where}"
    )


def say(line: str, file: Any = None) -> None:
    """Prints on the first rank."""
    if dist.get_rank() == 0:
        print(line, file=file, flush=True)


if __name__ == "__main__":
    main()

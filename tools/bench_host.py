"""Measures what one rank's host does between engine and update, in seconds and memory.

    python tools/bench_host.py
    python tools/bench_host.py --samples 2048 --replicas 1 2 4 8
    python tools/bench_host.py --mean 2000 experiment=qwen3_30b_a3b

This process stands for one rank of a job with the settings and the layout of an experiment, R1-Zero's by default; each
row of the table is a process of its own. Samples are made up, with log-normal lengths. What other ranks would send is
made up here too, so the network is not in the figures; neither are rewards, nor the model. The parts:

    completions  the samples that this rank holds, as the engine hands them out, and what it hears of all others
    batch        advantages, mini-batches and replicas of all samples, packing of those that this replica computes
    schedule     the plan of micro-batches for the log-probs; they are made one by one while the pipeline runs
    updates      the mini-batches with their weights, and the plans of their micro-batches
    metrics      what is logged of the step, how far engine and trainer are apart, records of samples
    stop         the rest of a step written into a checkpoint and read back

`--json FILE` writes the table. On a shared machine CPU seconds are the steadier figure, which is why they are shown.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import pickle
import random
import subprocess
import sys
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from grpo_mega import platform
from grpo_mega.config.limits import Interval
from grpo_mega.config.load import compose_config, is_override
from grpo_mega.config.rules.shared import multiples
from grpo_mega.config.schema import Config
from grpo_mega.errors import InputError
from grpo_mega.types import Group, Prompt, Rollout, Sample, SampleInfo, Score

PROMPT_TOKENS = 200
SHAPE = 0.8, 32_768
"""Standard deviation of the logarithm of a completion's length, and the longest."""
PARTS = ("completions", "batch", "schedule", "updates", "metrics", "stop")
LIMITS = {"samples": Interval("[1, inf)"), "replicas": Interval("[1, inf)"), "mean": Interval(f"[1, {SHAPE[1]}]")}
DONE, FAILED, BAD_INPUT = 0, 1, 2


def main(arguments: list[str]) -> int:
    """Measures every combination in its own process and prints the table; returns the exit code."""
    options, overrides = parsed(arguments)
    try:
        config = compose_config(overrides)
        check(options, config)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    if options.alone:
        print(json.dumps(measure(config, options.samples[0], options.replicas[0], options.mean)))
        return DONE
    rows = []
    for samples in options.samples:
        for replicas in options.replicas:
            one = ["--alone", "--samples", str(samples), "--replicas", str(replicas), "--mean", str(options.mean)]
            # Libraries warn of packages that are not installed, once in every process.
            quiet = os.environ | {"PYTHONWARNINGS": "ignore"}
            done = subprocess.run([sys.executable, __file__, *one, *overrides], env=quiet, stdout=subprocess.PIPE)
            if done.returncode:
                what = f"{samples} samples and {replicas} replicas"
                print(f"error: the process that measured {what} ended with {done.returncode}", file=sys.stderr)
                return FAILED
            rows.append(json.loads(done.stdout))
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return DONE


def parsed(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the overrides of the configuration, which may stand anywhere among them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[128, 512, 2048, 8192], help="of a whole rollout")
    parser.add_argument("--replicas", type=int, nargs="+", default=[8], help="data parallel size, 8 by default")
    parser.add_argument("--mean", type=int, default=8000, help="mean length of a completion, 8,000 by default")
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--alone", action="store_true", help="measure in this process, print JSON")
    parser.add_argument("overrides", nargs="*", help="configuration overrides, experiment=r1zero_671b by default")
    # After `--samples 8 16` argparse would take an override for one more number.
    overrides = [word for word in arguments if is_override(word)]
    options = parser.parse_intermixed_args([word for word in arguments if not is_override(word)])
    named = any(word.startswith("experiment=") for word in overrides)
    return options, [*([] if named else ["experiment=r1zero_671b"]), *options.overrides, *overrides]


def check(options: argparse.Namespace, config: Config) -> None:
    """Raises InputError for sizes that cannot be measured; names the option and what to choose."""
    for name, values in (("samples", options.samples), ("replicas", options.replicas), ("mean", [options.mean])):
        for value in values:
            if value not in LIMITS[name]:
                raise InputError(f"--{name}={value}", LIMITS[name].fault, LIMITS[name].refusal(value))
    size = config.algorithm.group_size
    for samples in options.samples:
        if samples % size:
            what = f"not divisible by algorithm.group_size={size}"
            raise InputError(f"--samples={samples}", what, f"choose {multiples(samples, size)}")


@dataclass
class Meter:
    """CPU seconds by part, and peak memory of this process above its memory at the start.

    Attributes:
        seconds: Part -> CPU seconds.
        peak: Part -> bytes.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    before: int = field(default_factory=lambda: resident("VmRSS"))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Context that measures its body as this part."""
        # On Linux, writing 5 resets VmHWM, the peak of resident memory.
        Path("/proc/self/clear_refs").write_text("5")
        start = time.process_time()
        yield
        self.seconds[name] = round(time.process_time() - start, 3)
        self.peak[name] = max(0, resident("VmHWM") - self.before)


def resident(name: str) -> int:
    """Bytes of a memory field (`name`) of this process in /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def measure(config: Config, samples: int, replicas: int, mean: int) -> dict[str, Any]:
    """One row of the table: sizes, and CPU seconds and peak bytes by part."""
    logging.getLogger("megatron").setLevel(logging.WARNING)
    here = platform.start()
    platform.join_processes(here)
    # Megatron may be imported only after the platform is prepared.
    from grpo_mega.algorithm.mismatch import rollout_mismatch
    from grpo_mega.checkpoint import step_in_progress
    from grpo_mega.models.microbatch import micro_batches
    from grpo_mega.observe.samples import sample_record
    from grpo_mega.platform.manifest import MANIFEST
    from grpo_mega.stages import exchange
    from grpo_mega.stages.step import StepOptions, batch_of_step, batch_of_update, step_of
    from grpo_mega.stages.step_report import step_metrics

    topology, size = one_of_many(config, replicas), config.algorithm.group_size
    # Stands in for the data that other ranks would send.
    exchange.exchange = made_up
    lengths, budget, cpu = lengths_of(samples, mean), config.layout.micro_batch_tokens, torch.device("cpu")
    prompts = [made_up_prompt(number) for number in range(samples // size)]
    announced = pickle.dumps([info_of(number, length, topology.world_size) for number, length in enumerate(lengths)])
    meter = Meter()
    with meter.part("completions"):
        mine = {number: sample_of(prompts[number // size], number % size, lengths[number])
                for number in range(0, samples, topology.world_size)}  # fmt: skip
        infos: list[SampleInfo] = pickle.loads(announced)
        rollout = Rollout([Group(p, tuple(infos[i * size : (i + 1) * size])) for i, p in enumerate(prompts)], mine)
    with meter.part("batch"):
        options = StepOptions.of(config)
        current = step_of(rollout.groups, options, 0)
        batch = batch_of_step(rollout, current, options, topology)
        assert batch is not None
        current.batch = batch.with_(ref_logprob=-torch.rand(len(batch.tokens)))
    with meter.part("schedule"):
        micro_batches(batch, topology, budget, cpu)
    with meter.part("updates"):
        for mini_batch in current.mini_batches:
            micro_batches(batch_of_update(current, mini_batch, options, 0), topology, budget, cpu)
            current.updates.append({"loss": 0.0})
    with meter.part("metrics"):
        current.mismatch = rollout_mismatch(batch.ref_logprob[batch.mask], batch.rollout_logprob[batch.mask])
        step_metrics(current, "own", learns_from_groups=True)
        shown = [*mine.values()][:size]
        current.shown = [sample_record(sample, Score(0.0, {}), 0, spelled) for sample in shown]
    with meter.part("stop"), TemporaryDirectory() as folder:
        step_in_progress.save(Path(folder), current, topology)
        files = [step_in_progress.FILE, *(step_in_progress.batch_file(i, replicas) for i in range(replicas))]
        (Path(folder) / MANIFEST).write_text(json.dumps({name: [0, ""] for name in files}))
        step_in_progress.load(Path(folder), topology)
    dist.destroy_process_group()
    sizes = {"samples": samples, "replicas": replicas, "tokens": sum(lengths), "tokens_here": len(batch.tokens)}
    return sizes | {"seconds": meter.seconds, "peak": meter.peak}


def one_of_many(config: Config, replicas: int) -> Any:
    """Topology of the first rank of a job with `replicas` replicas, which needs no other rank."""
    from grpo_mega.models.topology import Topology

    class OneOfMany(Topology):
        replicas = None

        def of_every_replica(self, numbers: Any) -> list[list[int]]:
            return [[*numbers]]

    # The order of Megatron's ranks: tensor parallel ranks are neighbours, then context parallel ones, replicas, stages.
    layout = config.layout
    row = layout.tp * layout.cp
    world = row * layout.pp * replicas
    replica_of_rank = [rank // row % replicas for rank in range(world)]
    assert dist.group.WORLD is not None
    return OneOfMany(
        rank=0,
        world_size=world,
        tp_size=layout.tp,
        pp_rank=0,
        pp_size=layout.pp,
        cp_rank=0,
        cp_size=layout.cp,
        dp_rank=0,
        dp_size=replicas,
        replica_of_rank=replica_of_rank,
        interleaved=False,
        fp8=layout.fp8,
        lock_step=dist.group.WORLD,
    )


def made_up(parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """Stand-in for `collectives.exchange`: joins this rank's parts, and returns synthetic data of the right size."""
    leaving = torch.cat([*parts])
    arriving = torch.empty(sum(sizes), dtype=leaving.dtype)
    return arriving.uniform_(-5, 0) if arriving.is_floating_point() else arriving.random_(0, 1000)


def lengths_of(samples: int, mean: int) -> list[int]:
    """Log-normal lengths of completions, from 1 to the longest."""
    (deviation, longest), draw = SHAPE, random.Random(0)
    # The mean of a log-normal distribution is its scale times e to the power of half the variance of the logarithm.
    scale = mean / 2.718281828 ** (deviation**2 / 2)
    return [min(longest, max(1, int(scale * draw.lognormvariate(0, deviation)))) for _ in range(samples)]


def made_up_prompt(number: int) -> Prompt:
    """A prompt of random tokens."""
    draw = random.Random(number)
    return Prompt(f"p{number}", tuple(draw.choices(range(1000), k=PROMPT_TOKENS)), "a question", "4", "made up")


def sample_of(prompt: Prompt, index: int, length: int) -> Sample:
    """A sample of random tokens."""
    ids, logprobs = torch.randint(1000, (length,), dtype=torch.int32), -torch.rand(length)
    columns = array("i", ids.numpy().tobytes()), array("f", logprobs.numpy().tobytes())
    return Sample(prompt, index, *columns, "stop", ((0, 0),), "an answer " * (length // 4))


def spelled(ids: Iterable[int]) -> str:
    """Text of token ids: one character for each token."""
    return "".join(map(chr, ids))


def info_of(number: int, length: int, ranks: int) -> SampleInfo:
    """Info of a sample, as known to all ranks; a third of them are right, and holders alternate.

    Each has a reason in words, as long as those of the built-in rewards for code and arithmetic.
    """
    reward = float(number % 3 == 0)
    reason = f"own: passed {number} tests" if reward else f"own: test 3: add({number}, 5) is {number}, not {number + 5}"
    return SampleInfo(length, "stop", ((0, 0),), Score(reward, {"own": reward}, reason), number % ranks)


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown: CPU seconds by part, and peak memory."""
    head = ["samples", "tokens", "replicas", "tokens here", *(f"{part} s" for part in PARTS), "all s", "peak GB"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        sizes = [
            f"{row['samples']:,}",
            f"{row['tokens'] / 1e6:.1f} M",
            str(row["replicas"]),
            f"{row['tokens_here'] / 1e6:.2f} M",
        ]
        seconds = [row["seconds"][part] for part in PARTS]
        lines.append(
            [*sizes, *(f"{s:.2f}" for s in (*seconds, sum(seconds))), f"{max(row['peak'].values()) / 1e9:.2f}"]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

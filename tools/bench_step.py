"""Measures one GRPO step end to end: generation, reward, log-probs, update.

    python tools/bench_step.py
    python tools/bench_step.py model.moe.experts=8 model.moe.top_k=2
    torchrun --nproc-per-node 2 tools/bench_step.py layout=ep2 model.moe.experts=8

Arguments are overrides of the configuration; the defaults are those of `SHAPE` below. Prompts are random tokens, no
token stops a completion and the reward is a checksum, so every step trains the same number of tokens. It prints, for
the median step, wall and CPU seconds by phase (CPU seconds added up over ranks), CPU seconds per 1,000 trained
tokens, tokens per second, and peak memory; `--json FILE` writes the same. On a shared machine compare ratios only.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from grpo_mega import platform
from grpo_mega.config.limits import Interval
from grpo_mega.config.load import compose_config
from grpo_mega.config.rules import check_backend, check_layout
from grpo_mega.config.schema import Config
from grpo_mega.data import Data, PromptSource
from grpo_mega.data.tokenizer import CharTokenizer
from grpo_mega.errors import InputError
from grpo_mega.observe.recorder import Recorder
from grpo_mega.observe.timer import PhaseTimer
from grpo_mega.reward.compose import Reward, Term
from grpo_mega.reward.verdict import Verdict
from grpo_mega.types import Prompt, Sample

SHAPE = [
    "model=tiny_dense",
    "model.layers=4",
    "model.hidden=128",
    "model.heads=4",
    "model.kv_heads=4",
    "model.ffn_hidden=512",
    "model.moe.ffn_hidden=256",
    "model.moe.shared_ffn_hidden=0",
    "data=chain_sum",
    "reward=think_answer",
    "algorithm.prompts_per_step=16",
    "algorithm.group_size=8",
    "algorithm.kl_coef=0.04",
    "rollout.max_new_tokens=64",
    "rollout.stop=[]",
    "layout.micro_batch_tokens=2600",
    "optimizer.lr=1e-6",
    "run.name=bench",
    "run.steps=1",
]


def main() -> None:
    """Runs the benchmark and prints the table on the main rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="measured steps, 5 by default; the median is shown")
    parser.add_argument("--warmup", type=int, default=2, help="steps for warm-up, 2 by default")
    parser.add_argument("--vocabulary", type=int, default=128, help="number of tokens, 128 by default")
    parser.add_argument("--prompt-tokens", type=int, default=16, help="length of every prompt, 16 by default")
    parser.add_argument("--json", type=Path, help="a file to write the result to, too")
    parser.add_argument("overrides", nargs="*", help="configuration overrides")
    options = parser.parse_intermixed_args()
    logging.getLogger("megatron").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    here = platform.start()
    platform.join_processes(here)
    try:
        config = compose_config(SHAPE + options.overrides)
        check_layout(config, dist.get_world_size())
        check_backend(config.layout, dist.get_backend())
        check(options, config)
    except ValueError as error:
        platform.refuse(f"error: {error}")
    steps = measure(config, here, options)
    result = summarize(config, steps, here)
    if dist.get_rank() == 0:
        print(table(result))
        if options.json:
            options.json.write_text(json.dumps(result, indent=2) + "\n")
    dist.destroy_process_group()


def check(options: argparse.Namespace, config: Config) -> None:
    """Raises InputError for options that cannot be measured; names the option and what to choose."""
    room = config.model.context - config.rollout.max_new_tokens
    longest = Interval(f"[1, {room}]", "model.context less rollout.max_new_tokens")
    positive, whole = Interval("[1, inf)"), Interval("[0, inf)")
    limits = {"steps": positive, "warmup": whole, "vocabulary": positive, "prompt-tokens": longest}
    for name, limit in limits.items():
        value = getattr(options, name.replace("-", "_"))
        if value not in limit:
            raise InputError(f"--{name}={value}", limit.fault, limit.refusal(value))


def measure(config: Config, here: platform.Platform, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Phases (name -> wall and CPU seconds, the latter over all ranks) and trained tokens of every measured step."""
    from grpo_mega.models.policy import Policy
    from grpo_mega.models.reference import ReferencePolicy
    from grpo_mega.models.scalar import ScalarModel
    from grpo_mega.models.topology import join_layout
    from grpo_mega.rollout.embedded import EmbeddedEngine
    from grpo_mega.run import Run
    from grpo_mega.stages.grpo import GRPO, StageParts
    from grpo_mega.stages.ppo import PPO
    from grpo_mega.stages.rollouts import DirectAccess, Rollouts
    from grpo_mega.stages.step import StepOptions
    from grpo_mega.stages.step_report import Watch

    # The parts of a run, without files, records of samples and rewards that take time.
    topology = join_layout(config.layout, config.run.seed)
    sharded = replace(config.optimizer, overlap=False, frozen=[])
    place = (config.layout, options.vocabulary, topology, here)
    policy = Policy(config.model, *place, optimizer=sharded, lora=config.lora)
    policy.initialize(config.run.seed)
    source = PromptSource(lambda k: random_prompt(k, options.prompt_tokens, options.vocabulary), "random")
    data = Data(CharTokenizer(), source, [], [])
    reward = Reward((Term("accuracy", 1.0, checksums),))
    engine = EmbeddedEngine(policy, spelled, config.rollout.concurrent_sequences)
    recorder, timer = Recorder(config.run, Path(), main=False), PhaseTimer()
    sections = (StepOptions.of(config), config.run, config.eval, config.reward)
    rollouts = Rollouts(
        *sections,
        engine=engine,
        access=DirectAccess(timer),
        score=reward.score,
        policy=policy,
        stop_ids=data.stop_ids,
        decode=spelled,
    )
    reference = ReferencePolicy(policy) if config.algorithm.kl_coef else None
    parts = StageParts(config.run, config.optimizer, policy, reference, data, rollouts, Watch(config, topology))
    stage = GRPO(parts)
    if config.algorithm.advantage_baseline == "critic":
        critic = ScalarModel("critic", config.model, *place, optimizer=sharded, before=True)
        critic.take_body(policy)
        stage = PPO(parts, critic, config.critic)
    stage.prepare()
    run = Run(config.run, config.layout, policy, [stage], recorder, timer)
    # The steps. All ranks work at once, so wall time is the main rank's and CPU time the sum.
    steps = []
    for _ in range(options.warmup + options.steps):
        before = stage.watch.tokens["trained"]
        stage.step(run)
        run.step += 1
        phases = {name: [spent.wall, spent.cpu] for name, spent in timer.step_seconds().items()}
        all_ranks: list = [None] * topology.world_size
        dist.all_gather_object(all_ranks, {name: cpu for name, (_, cpu) in phases.items()})
        for name, phase in phases.items():
            phase[1] = sum(rank[name] for rank in all_ranks)
        steps.append({"phases": phases, "trained": stage.watch.tokens["trained"] - before})
    return steps[options.warmup :]


def random_prompt(k: int, length: int, vocabulary: int) -> Prompt:
    """Random prompt number k of `length` tokens."""
    tokens = random.Random(k).choices(range(vocabulary), k=length)
    return Prompt(f"random/{k}", tuple(tokens), "", "", "random")


def spelled(ids: Iterable[int]) -> str:
    """The tokens as numbers, in place of text."""
    return " ".join(map(str, ids))


def checksums(samples: Sequence[Sample]) -> list[Verdict | Exception]:
    """A reward that differs within nearly every group and takes no time."""
    return [Verdict(float(sum(sample.token_ids) % 7)) for sample in samples]


def summarize(config: Config, steps: list[dict[str, Any]], here: platform.Platform) -> dict[str, Any]:
    """Numbers of the median step."""

    def median(of: int, name: str) -> float:
        return statistics.median(step["phases"][name][of] for step in steps)

    names = list(steps[0]["phases"])
    wall = statistics.median(sum(w for w, _ in step["phases"].values()) for step in steps)
    cpu = statistics.median(sum(c for _, c in step["phases"].values()) for step in steps)
    trained = statistics.median(step["trained"] for step in steps)
    model = config.model
    return {
        "shape": f"{model.layers} layers, hidden {model.hidden}, "
        + (f"{model.moe.experts} experts top {model.moe.top_k}" if model.moe.experts else f"ffn {model.ffn_hidden}")
        + f", {config.algorithm.prompts_per_step} prompts x {config.algorithm.group_size} samples x "
        f"{config.rollout.max_new_tokens} tokens, {dist.get_world_size()} processes",
        "device": str(here.device),
        "torch": torch.__version__,
        "threads_per_process": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "trained_tokens": trained,
        "seconds": wall,
        "tokens_per_second": trained / wall,
        "cpu_seconds": cpu,
        "cpu_seconds_per_1000_trained_tokens": 1000 * cpu / trained,
        "phases": {name: {"wall": median(0, name), "cpu": median(1, name)} for name in names},
        "peak_memory_mb": platform.peak_memory_bytes(here) / 1e6,
    }


def table(result: dict[str, Any]) -> str:
    """The result as a table."""
    lines = [result["shape"], f"{'phase':>12} {'wall s':>9} {'CPU s':>9} {'share':>7}"]
    for name, spent in result["phases"].items():
        lines.append(f"{name:>12} {spent['wall']:9.3f} {spent['cpu']:9.3f} {spent['cpu'] / result['cpu_seconds']:7.1%}")
    lines += [
        f"{'step':>12} {result['seconds']:9.3f} {result['cpu_seconds']:9.3f}",
        f"{result['cpu_seconds_per_1000_trained_tokens']:.3f} CPU seconds per 1,000 trained tokens; "
        f"{result['tokens_per_second']:,.0f} trained tokens per second; peak memory {result['peak_memory_mb']:,.0f} MB",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()

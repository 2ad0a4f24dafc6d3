"""The steps of tools/gpu_smoke.py, in the order of risk: each is one command, with what it shows and what proves it."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

SIZES = ("one", "two", "node")
"""Sizes of the check: one GPU, two, and all of a machine (four or more)."""
TEST = "-m pytest -q -rs -p no:cacheprovider tests/gpu/test_gpu_{name}.py"
COMPLETED = r"completed: \d+ steps"
"""Pattern in the last line of a run that completed."""
PASSED = r"\d+ passed"
"""Pattern in pytest's last line unless every test was skipped."""


@dataclass(frozen=True)
class Step:
    """A step of the check.

    Attributes:
        name: Name of the step and of its log.
        command: Command after the interpreter's name, with shell quoting.
        shows: What a pass proves.
        proof: Regular expression that the output of a passed step matches; exit code 0 does not suffice, e.g. if all
            tests were skipped.
        seconds: Time limit of the step.
        after: Steps that must have passed, without which it would fail too.
        lacks: What the step needs and is missing here, with the fix; empty if nothing is missing.
    """

    name: str
    command: str
    shows: str
    proof: str
    seconds: int
    after: tuple[str, ...] = ()
    lacks: str = ""

    def words(self) -> list[str]:
        """The command line."""
        return [sys.executable, *shlex.split(self.command)]


def steps_of(size: str, gpus: int, out: Path, model: Path) -> list[Step]:
    """The steps for a machine.

    Args:
        size: One of SIZES.
        gpus: Number of GPUs: 1, 2, or an even number from 4 on.
        out: Folder for the output.
        model: Folder of a small Hugging Face model, such as Qwen2.5-0.5B.
    """
    of_size = {"one": _one, "two": _two, "node": _node}[size]
    folders = shlex.quote(str(out)), shlex.quote(str(model))
    lacks = "" if (model / "config.json").is_file() else f"no model in {model}: docs/first_gpu.md says how to get one"
    steps = of_size(gpus, *folders)
    return [replace(step, lacks=step.lacks or lacks) if step.name == "model" else step for step in steps]


def train(processes: int, settings: str, out: str) -> str:
    """Command of a training run whose directory is in `out`."""
    return (
        f"-m torch.distributed.run --standalone --nproc-per-node {processes} -m grpo_mega.train {settings}"
        f" run.root={out}/runs run.eval_every=0 run.save_every=10"
    )


def _doctor(out: str) -> Step:
    """Step that checks whether the machine can train."""
    return Step("doctor", f"tools/doctor.py --json --runs {out}/runs", "packages, driver, limits", '"fit": true', 300)


def _one(gpus: int, out: str, model: str) -> Iterator[Step]:
    """Steps on one GPU: kernels, memory, runs without and with an engine that takes turns, a real model, speed."""
    yield _doctor(out)
    yield Step("kernels", "tools/bench_kernels.py --check", "losses and gradients agree with float64", "all right", 900)
    yield Step(
        "kernel-tests", TEST.format(name="rows"), "kernels on hostile rows, launches, repeatability", PASSED, 2400
    )
    yield Step("policy", TEST.format(name="policy"), "building a model leaves no second copy in memory", PASSED, 600)
    settings = "experiment=tiny layout=single run.name=tiny run.steps={}"
    yield Step("tiny", train(1, settings.format(20), out), "Megatron's step on CUDA learns", COMPLETED, 1800)
    yield Step(
        "resume", train(1, settings.format(30), out), "a checkpoint of a GPU is read again", COMPLETED, 900, ("tiny",)
    )
    yield Step(
        "engine",
        TEST.format(name="sglang"),
        "turns, weights by CUDA IPC, memory that comes back",
        PASSED,
        3600,
        lacks=_sglang(),
    )
    yield Step(
        "tiny-sglang",
        train(1, "experiment=tiny_sglang layout=single run.name=tiny_sglang run.steps=10", out),
        "a run that generates in SGLang",
        COMPLETED,
        1800,
        ("tiny",),
        _sglang(),
    )
    yield Step("suspend", TEST.format(name="process_groups"), "NCCL gives its memory back", PASSED, 600)
    yield from _model(1, "layout=single", out, model)
    yield Step(
        "kernel-times", f"tools/bench_kernels.py --json {out}/kernels.json", "times beside other libraries", "", 2400
    )
    yield Step(
        "step-times", f"tools/bench_step.py --json {out}/step.json", "seconds of a step by phase", "", 900, ("tiny",)
    )


def _two(gpus: int, out: str, model: str) -> Iterator[Step]:
    """Steps on two GPUs: NCCL's collectives, layouts, an engine over both, and one with a GPU of its own."""
    yield _doctor(out)
    yield Step("suspend", TEST.format(name="process_groups"), "groups of two ranks give memory back", PASSED, 600)
    yield from _parity(2)
    yield Step(
        "tiny-ep2",
        train(2, "experiment=tiny layout=ep2 run.name=tiny_ep2 run.steps=20", out),
        "experts over two GPUs",
        COMPLETED,
        1800,
    )
    yield Step(
        "tiny-tp2",
        train(2, "experiment=tiny layout=tp2 run.name=tiny_tp2 run.steps=10", out),
        "every layer over two GPUs",
        COMPLETED,
        1800,
    )
    yield Step(
        "engine-of-two",
        train(2, "experiment=tiny_sglang layout=ep2 rollout.sglang.tp=2 run.name=engine_of_two run.steps=10", out),
        "one engine over two GPUs, in turns",
        COMPLETED,
        1800,
        ("tiny-ep2",),
        _sglang(),
    )
    apart = "rollout.sglang.transport=network rollout.sglang.first_gpu=1"
    yield Step(
        "engine-apart",
        train(1, f"experiment=tiny_sglang layout=single {apart} run.name=engine_apart run.steps=10", out),
        "an engine on a GPU of its own, weights by NCCL",
        COMPLETED,
        1800,
        ("tiny-ep2",),
        _sglang(),
    )


def _node(gpus: int, out: str, model: str) -> Iterator[Step]:
    """Steps on all GPUs of a machine: layouts with pipeline stages, engines of two GPUs, a real model on all."""
    yield _doctor(out)
    yield Step("suspend", TEST.format(name="process_groups"), "groups of two ranks give memory back", PASSED, 600)
    yield from _parity(gpus)
    layout = "layout=tp2_pp2" if gpus % 4 == 0 else "layout=tp2"
    yield Step(
        "tiny-layout",
        train(
            gpus, f"experiment=tiny {layout} algorithm.prompts_per_step={8 * gpus} run.name=layout run.steps=20", out
        ),
        "tensor, pipeline and data parallelism at once",
        COMPLETED,
        1800,
    )
    engines = f"experiment=tiny_sglang layout=ep2 rollout.sglang.tp=2 algorithm.prompts_per_step={8 * gpus}"
    yield Step(
        "engines",
        train(gpus, f"{engines} run.name=engines run.steps=10", out),
        "engines of two GPUs each, in turns",
        COMPLETED,
        2400,
        ("tiny-layout",),
        _sglang(),
    )
    yield from _model(gpus, "layout=single optimizer.distributed=true optimizer.overlap=true", out, model)


def _parity(gpus: int) -> Iterator[Step]:
    command = f"-m torch.distributed.run --standalone --nproc-per-node {gpus} tools/parity.py --all"
    yield Step("parity", command, "layouts train as one process does, over NCCL", "", 3600)


def _model(gpus: int, layout: str, out: str, model: str) -> Iterator[Step]:
    """Steps that train a real small model on problems generated here."""
    count = 2 * 16 * gpus * 4
    problems = f"tools/countdown.py {out}/countdown --train {count} --test 100"
    yield Step("problems", problems, "problems of Countdown, made here", "", 300)
    of_source = "data.sources.countdown"
    settings = (
        f"experiment=countdown_1b model=from_folder run.init_from={model} {layout} data.validation_size=16"
        f" {of_source}.path={out}/countdown/train.jsonl {of_source}.test_path={out}/countdown/test.jsonl"
        f" algorithm.prompts_per_step={16 * gpus} cluster.gpus_per_node={gpus} run.name=model run.steps=4"
    )
    yield Step(
        "model",
        train(gpus, settings, out),
        "a real model takes turns with its engine",
        COMPLETED,
        3600,
        ("problems", "tiny-sglang" if gpus == 1 else "engines"),
        _sglang(),
    )


def _sglang() -> str:
    """What is missing for steps with engines."""
    return "" if importlib.util.find_spec("sglang") else "SGLang is not installed: docs/clusters.md says how"

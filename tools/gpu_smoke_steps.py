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
        proof: Regular expression that its output holds when it has passed; exit code 0 alone proves nothing, as of
            tests that were all skipped.
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
        model: The folder of a small Hugging Face model, such as Qwen2.5-0.5B.
    """
    of_size = {"one": _one, "two": _two, "node": _node}[size]
    folders = shlex.quote(str(out)), shlex.quote(str(model))
    lacks = "" if (model / "config.json").is_file() else f"no model in {model}: docs/first_gpu.md says how to get one"
    steps = of_size(gpus, *folders)
    return [replace(step, lacks=step.lacks or lacks) if step.name == "model" else step for step in steps]


def _one(gpus: int, out: str, model: str) -> Iterator[Step]:
    """Steps on one GPU: kernels, memory, runs without and with an engine that takes turns, a real model, speed."""
    yield _doctor(out)
    yield Step("kernels", "tools/bench_kernels.py --check", "losses and gradients agree with float64", "all right", 900)
    yield _tests("kernel-tests", "rows", "kernels on hostile rows, launches, repeatability", 2400)
    yield _tests("attention", "attention", "attention of a run, by each kernel there is, against float64", 1800)
    yield _tests("policy", "policy", "building a model leaves no second copy in memory", 600)
    yield _tests("copies", "transfer", "the optimizer's state reaches checkpoints as it is", 300)
    yield _tests("numbers", "numbers", "log-probs and gradients in bf16, by all fused paths, against float32", 1200)
    tiny = "experiment=tiny layout=single optimizer.distributed=true run.name=tiny run.steps="
    yield _run("tiny", 1, tiny + "20", out, "Megatron's step on CUDA learns")
    yield _run("resume", 1, tiny + "30", out, "a checkpoint of a GPU is read again", after=("tiny",))
    yield _tests("engine", "sglang", "turns, weights by CUDA IPC, memory that comes back", 3600, _sglang())
    settings = "experiment=tiny_sglang layout=single run.name=tiny_sglang run.steps=10"
    yield _run("tiny-sglang", 1, settings, out, "a run that generates in SGLang", ("tiny",), _sglang())
    yield _tests("suspend", "process_groups", "NCCL gives its memory back", 600)
    yield from _model(1, "layout=single", out, model, after="tiny-sglang")
    yield Step("kernel-times", f"tools/bench_kernels.py --json {out}/kernels.json", "times beside rivals", "", 2400)
    yield Step("step-times", f"tools/bench_step.py --json {out}/step.json", "seconds of a step", "", 900, ("tiny",))


def _two(gpus: int, out: str, model: str) -> Iterator[Step]:
    """Steps on two GPUs: NCCL's collectives, layouts, an engine over both, and one with a GPU of its own."""
    yield _doctor(out)
    yield _parity(2)
    settings = "experiment=tiny layout=ep2 run.name=tiny_ep2 run.steps=20"
    yield _run("tiny-ep2", 2, settings, out, "experts over two GPUs")
    settings = "experiment=tiny layout=tp2 run.name=tiny_tp2 run.steps=10"
    yield _run("tiny-tp2", 2, settings, out, "every layer over two GPUs")
    after = ("tiny-ep2",)
    settings = "experiment=tiny_sglang layout=ep2 rollout.sglang.tp=2 run.name=engine_of_two run.steps=10"
    yield _run("engine-of-two", 2, settings, out, "one engine over two GPUs, in turns", after, _sglang())
    apart = "rollout.sglang.transport=network rollout.sglang.first_gpu=1"
    settings = f"experiment=tiny_sglang layout=single {apart} run.name=engine_apart run.steps=10"
    yield _run("engine-apart", 1, settings, out, "an engine on a GPU of its own, weights by NCCL", after, _sglang())
    yield _tests("suspend", "process_groups", "groups of two ranks give memory back", 600)


def _node(gpus: int, out: str, model: str) -> Iterator[Step]:
    """Steps on all GPUs of a machine: layouts with pipeline stages, engines of two GPUs, a real model on all."""
    yield _doctor(out)
    yield _parity(gpus)
    layout = "layout=tp2_pp2" if gpus % 4 == 0 else "layout=tp2"
    prompts = f"algorithm.prompts_per_step={8 * gpus}"
    settings = f"experiment=tiny {layout} {prompts} run.name=layout run.steps=20"
    yield _run("tiny-layout", gpus, settings, out, "tensor, pipeline and data parallelism at once")
    settings = f"experiment=tiny_sglang layout=ep2 rollout.sglang.tp=2 {prompts} run.name=engines run.steps=10"
    yield _run("engines", gpus, settings, out, "engines of two GPUs each, in turns", ("tiny-layout",), _sglang())
    yield _tests("suspend", "process_groups", "groups of two ranks give memory back", 600)
    layout = "layout=single optimizer.distributed=true optimizer.overlap=true"
    yield from _model(gpus, layout, out, model, after="engines")


def _doctor(out: str) -> Step:
    """Step that checks whether the machine can train."""
    return Step("doctor", f"tools/doctor.py --json --runs {out}/runs", "packages, driver, limits", '"fit": true', 300)


def _tests(name: str, file: str, shows: str, seconds: int, lacks: str = "") -> Step:
    """Step that runs a file of tests/gpu."""
    command = f"-m pytest -q -rs -p no:cacheprovider tests/gpu/test_gpu_{file}.py"
    tools = all(map(importlib.util.find_spec, ("pytest", "hypothesis")))
    lacks = lacks or ("" if tools else "pytest is not installed: python -m pip install pytest hypothesis")
    return Step(name, command, shows, PASSED, seconds, lacks=lacks)


def _run(
    name: str, processes: int, settings: str, out: str, shows: str, after: tuple[str, ...] = (), lacks: str = ""
) -> Step:
    """Step of a training run whose directory is in `out`."""
    command = (
        f"-m torch.distributed.run --nproc-per-node {processes} -m grpo_mega.train {settings}"
        f" run.root={out}/runs run.eval_every=0 run.save_every=10"
    )
    return Step(name, command, shows, COMPLETED, 2400, after, lacks)


def _parity(gpus: int) -> Step:
    """Step that compares every layout that fits the GPUs with one process."""
    command = f"-m torch.distributed.run --nproc-per-node {gpus} tools/parity.py --all"
    return Step("parity", command, "layouts train as one process does, over NCCL", "", 3600)


def _model(gpus: int, layout: str, out: str, model: str, after: str) -> Iterator[Step]:
    """Steps that train a real small model on problems generated here."""
    prompts, steps = 16 * gpus, 4
    problems = f"tools/countdown.py {out}/countdown --train {2 * prompts * steps} --test 100"
    yield Step("problems", problems, "problems of Countdown, made here", "", 300)
    source = "data.sources.countdown"
    # rollout.stop=null: the model brings its own stop tokens, which may be others than the experiment's.
    settings = (
        f"experiment=countdown_1b model=from_folder run.init_from={model} {layout} data.validation_size=16"
        f" {source}.path={out}/countdown/train.jsonl {source}.test_path={out}/countdown/test.jsonl"
        f" algorithm.prompts_per_step={prompts} cluster.gpus_per_node={gpus} rollout.stop=null"
        f" run.name=model run.steps={steps}"
    )
    yield _run("model", gpus, settings, out, "a real model takes turns with its engine", ("problems", after), _sglang())


def _sglang() -> str:
    """Requirements of steps with engines that are missing here; empty if none."""
    return "" if importlib.util.find_spec("sglang") else "SGLang is not installed: docs/clusters.md says how"

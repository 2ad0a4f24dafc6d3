"""Benchmarks the kernels against all installed alternatives, and checks their results against float64.

    python tools/bench_kernels.py --json kernels.json --plot kernels.png
    python tools/bench_kernels.py --rows 16384 151936 --linear 16384 151936 4096 --dtype float32
    python tools/bench_kernels.py --attention              # only attention, which comes last otherwise
    python tools/bench_kernels.py --check                  # only verifies this project's kernels; exit code 1 if wrong
    TRITON_INTERPRET=1 python tools/bench_kernels.py --traps    # which results are wrong, also of Triton, without a GPU

Alternatives are Liger, TRL, flash-linear-attention, cut-cross-entropy, Megatron's cross entropies, torch and
torch.compile: `kernel_contenders.py`. The copy and matrix-product ceilings of this machine come first; a contender's
time is then given as a multiple of the floor, the time those ceilings allow: one reading of the logits for log-probs;
one reading and one writing for a loss with its gradient; 6 N V H operations for a linear loss. Shapes are those of real
models; smaller vocabularies are the shards of tensor parallelism. Without a GPU, small sizes run on the CPU.

Each repetition gets fresh logits, copied outside the measured time. Memory is the peak above what was allocated before.
Attention is a layer's, over a group of completions that differ in length, by every value of layout.attention that there
is a kernel for (`attention_contenders.py`); its shape is tokens, heads, heads of keys, channels of keys and of values,
and its floor the time of its products.

"Error" is the worst log-prob error and the relative (L2) error of the gradient in rows spread over the batch. The table
of traps shows the results of all contenders on difficult rows that occur in practice.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from kernel_check import LOSSES, LossFunction, check_losses, own_loss
from kernel_contenders import RIVALS, Contender, Problem, Result, options, own
from torch import Tensor

import grpo_kernels
from grpo_kernels import reference

GPU_ROWS = [
    (4096, 128256), (16384, 151936), (32768, 129280), (65536, 151936),
    (16384, 151936 // 2), (16384, 151936 // 4), (16384, 151936 // 8),
]  # fmt: skip
GPU_LINEAR = [(8192, 128256, 2048), (16384, 151936, 4096), (32768, 129280, 7168), (16384, 151936 // 8, 4096)]
CPU_ROWS, CPU_LINEAR = [(512, 4096), (64, 32000)], [(512, 8192, 128)]
# Number of rows that are compared with float64.
SAMPLE = 64
# A larger log-prob error, or relative gradient error of float32 logits, is a defect and not rounding.
WRONG = 1e-3


@dataclass
class Line:
    """One contender's result; times in milliseconds, memory in MiB."""

    operation: str
    shape: list[int]
    name: str
    milliseconds: float | None = None
    over_floor: float | None = None
    peak: float | None = None
    logprob_error: float | None = None
    gradient_error: float | None = None
    failed: str = ""


@dataclass
class Ceilings:
    """Peak rates of the machine: bytes per second of a copy (read + written), operations per second of products."""

    copy: float
    product: float


def main() -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="verify this project's kernels, measure nothing")
    parser.add_argument("--attention", action="store_true", help="only attention")
    parser.add_argument("--traps", action="store_true", help="only the table of traps")
    parser.add_argument("--rows", type=int, nargs=2, action="append", metavar=("N", "V"), help="a shape of logits")
    parser.add_argument(
        "--linear", type=int, nargs=3, action="append", metavar=("N", "V", "H"), help="of hidden states"
    )
    parser.add_argument(
        "--dtype", default=None, choices=["float32", "bfloat16"], help="bfloat16 on a GPU, else float32"
    )
    parser.add_argument("--repeat", type=int, default=10, help="repetitions; the median is shown (10)")
    parser.add_argument("--json", type=Path, help="a file to write the results to")
    parser.add_argument("--plot", type=Path, help="a file to plot the results to")
    chosen = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backends = available(device)
    print(f"{machine(device)}, torch {torch.__version__}; grpo_kernels paths: {', '.join(backends)}")
    if device.type == "cpu":
        print("No GPU here: small sizes on the CPU, which say nothing about a GPU.")
    # Checks of results, which measure nothing.
    ours = [contender for backend in backends for contender in own(backend)]
    if chosen.check:
        return check(ours, {f"grpo_kernels, {backend}": own_loss(backend) for backend in backends}, device)
    missing = sorted({c.library for c in RIVALS if not installed(c.library)})
    print(f"not installed: {', '.join(missing) or 'nothing'}")
    triton_runs = device.type == "cuda" or interpreted()
    field = ours + [c for c in RIVALS if c.library not in missing and (triton_runs or not c.needs_gpu)]
    if chosen.traps:
        print(format_traps(table_of_traps(field, device)))
        return 0
    # Measurements: ceilings of the machine first, which the floors of all times follow from.
    dtype = getattr(torch, chosen.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    ceilings = measure_ceilings(device, dtype)
    print(f"copy {ceilings.copy / 1e9:.0f} GB/s, matrix product {ceilings.product / 1e12:.2f} TFLOP/s in {dtype}")
    lines = []
    for shape in shapes(chosen, device):
        for line in measure_shape(field, shape, dtype, device, ceilings, chosen.repeat):
            print(describe(line), flush=True)
            lines.append(line)
    traps = {} if chosen.attention else table_of_traps(field, device)
    if traps:
        print(format_traps(traps))
    # Attention comes last, since its import prepares the platform of training.
    if not (chosen.rows or chosen.linear):
        for line in measure_attention(dtype, device, ceilings, chosen.repeat):
            print(describe(line), flush=True)
            lines.append(line)
    result = {
        "machine": machine(device), "torch": torch.__version__, "dtype": str(dtype), "ceilings": asdict(ceilings),
        "missing": missing, "lines": [asdict(line) for line in lines], "traps": traps,
    }  # fmt: skip
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=2) + "\n")
    if chosen.plot:
        plot(lines, machine(device), chosen.plot)
    return 0


def available(device: torch.device) -> list[str]:
    """Implementations of grpo_kernels that run here."""
    if device.type == "cpu":
        return ["torch", "triton"] if interpreted() else ["torch"]
    best = grpo_kernels.backend(torch.zeros(1, 1024, device=device), one_launch=True)
    print(f"best path for a loss: {best.name} ({best.why})")
    return {"cuda": ["cuda", "triton", "torch"], "triton": ["triton", "torch"], "torch": ["torch"]}[best.name]


def interpreted() -> bool:
    """Whether Triton's interpreter runs its kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def installed(library: str) -> bool:
    """Whether a library is installed."""
    try:
        return importlib.util.find_spec(library) is not None
    except ModuleNotFoundError:
        return False


def machine(device: torch.device) -> str:
    """A name for the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def shapes(chosen: argparse.Namespace, device: torch.device) -> list[tuple[int, ...]]:
    """(N, V) and (N, V, H) to measure."""
    if chosen.attention:
        return []
    if chosen.rows or chosen.linear:
        return [tuple(shape) for shape in (chosen.rows or []) + (chosen.linear or [])]
    return [*GPU_ROWS, *GPU_LINEAR] if device.type == "cuda" else [*CPU_ROWS, *CPU_LINEAR]


# ------------------------------------------------------------------------------------------------ problems


def make_problem(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Problem:
    """Random tokens, with old and reference log-probs near the current ones, so that ratios clip."""
    torch.manual_seed(0)
    count, columns, *rest = shape
    sequences = 16 if count % 16 == 0 and count >= 64 else 1
    logits = hidden = matrix = None
    if rest:
        hidden = torch.randn(count, rest[0], device=device, dtype=dtype)
        matrix = torch.randn(columns, rest[0], device=device, dtype=dtype) * (4 / rest[0] ** 0.5)
    else:
        logits = torch.empty(count, columns, device=device, dtype=dtype).normal_(std=4)
    ids = torch.randint(columns, (count,), device=device)
    present = present_logprobs(logits, hidden, matrix, ids)
    old, ref = (present + 0.2 * torch.randn(count, device=device) for _ in range(2))
    advantage = torch.randn(sequences, device=device).repeat_interleave(count // sequences)
    weight = torch.ones(count, device=device)
    weight.view(sequences, -1)[:, -1] = 0
    return Problem(logits, hidden, matrix, ids, old, ref, advantage, weight / weight.sum(), sequences)


@torch.no_grad()
def present_logprobs(logits: Tensor | None, hidden: Tensor | None, matrix: Tensor | None, ids: Tensor) -> Tensor:
    """[N] log-probs of the tokens under the current policy."""
    if logits is not None:
        return grpo_kernels.fused_logprob(logits, ids)[0]
    return grpo_kernels.linear_logprob(hidden, matrix, ids)[0]


def errors(p: Problem, operation: str, result: Result) -> tuple[float | None, float | None]:
    """(worst log-prob error, relative gradient error) in a sample of the rows with a loss."""
    counted = (p.weight != 0).nonzero()[:, 0]
    rows = counted[torch.linspace(0, len(counted) - 1, min(SAMPLE, len(counted))).long()]
    linear = p.logits is None
    logits = (p.hidden[rows].double() @ p.matrix.double().t() if linear else p.logits[rows]).cpu()
    ids, old, ref, advantage, weight = (v[rows].cpu() for v in (p.ids, p.old, p.ref, p.advantage, p.weight))
    of = replace(options(operation), kind="ppo")
    of_old, of_ref = (old, ref) if of.kl_coef else (None, None)
    exact = reference.grpo_loss(logits, ids, of_old, of_ref, advantage, weight, options=of)
    logprob_error = gradient_error = None
    if result.logprob is not None:
        logprob_error = float((result.logprob[rows].cpu().double() - exact.logprob).abs().max())
    # GSPO's gradient depends on whole sequences, which the sampled rows are not.
    if result.gradient is not None and operation != "gspo":
        expected = exact.gradient.to(p.ids.device) @ p.matrix.double() if linear else exact.gradient
        difference = result.gradient[rows].double().to(expected.device) - expected
        gradient_error = float(difference.norm() / expected.norm())
    return logprob_error, gradient_error


# ------------------------------------------------------------------------------------------------ measuring


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """The best of several copies and of several products."""
    size = 2**32 if device.type == "cuda" else 2**28
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    copy = min(seconds(lambda: target.copy_(source), device) for _ in range(10))
    side = 8192 if device.type == "cuda" else 1024
    a, b = torch.randn(2, side, side, device=device).to(dtype)
    product = min(seconds(lambda: torch.mm(a, b), device) for _ in range(10))
    return Ceilings(2 * size / copy, 2 * side**3 / product)


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one run on the device; on a CPU its CPU seconds, as other processes may use it too."""
    if device.type == "cpu":
        begin = time.process_time()
        run()
        return time.process_time() - begin
    begin_event, end_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin_event.record()
    run()
    end_event.record()
    end_event.synchronize()
    return begin_event.elapsed_time(end_event) / 1e3


def measure_shape(
    field: list[Contender],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    ceilings: Ceilings,
    repeat: int,
) -> Iterator[Line]:
    """The results of all contenders that support this shape, operation by operation."""
    problem = make_problem(shape, dtype, device)
    linear = len(shape) == 3
    for operation in sorted({c.operation for c in field if c.operation.startswith("linear") == linear}):
        for contender in field:
            if contender.operation == operation:
                yield measure(contender, problem, shape, ceilings, repeat)


def measure(contender: Contender, problem: Problem, shape: tuple[int, ...], ceilings: Ceilings, repeat: int) -> Line:
    """Errors and peak memory of the first run, the median time of the later ones; or its failure."""
    line = Line(contender.operation, list(shape), contender.name)
    device = problem.ids.device
    try:
        line.peak, result = peak_of(contender, problem)
        line.logprob_error, line.gradient_error = errors(problem, contender.operation, result)
        del result
        times = []
        for _ in range(repeat):
            fresh = problem.fresh()
            times.append(seconds(lambda: contender.run(fresh), device))  # noqa: B023
        line.milliseconds = statistics.median(times) * 1e3
        line.over_floor = statistics.median(times) / floor(contender.operation, problem, shape, ceilings)
    # An exception of a library is a result, too.
    except Exception as error:
        line.failed = f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"
    gc.collect()
    return line


def peak_of(contender: Contender, problem: Problem) -> tuple[float | None, Result]:
    """Peak MiB above what was allocated before, after a first run that compiles, or None on a CPU; and the result."""
    if problem.ids.device.type == "cpu":
        return None, contender.run(problem.fresh())
    contender.run(problem.fresh())
    torch.cuda.synchronize()
    fresh = problem.fresh()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = contender.run(fresh)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20, result


def measure_attention(dtype: torch.dtype, device: torch.device, ceilings: Ceilings, repeat: int) -> Iterator[Line]:
    """Median time and peak memory of every kernel for attention, of a forward pass alone, and with a backward pass."""
    # This prepares the platform of training, see there.
    from attention_contenders import CPU_SHAPES, GPU_SHAPES, chosen, kernels, prepared

    for shape in GPU_SHAPES if device.type == "cuda" else CPU_SHAPES:
        print(f"attention of {shape.model}: a prompt of {shape.prompt} tokens, completions of {shape.completions}")
        for gradients, name in product((False, True), kernels(device)):
            operation = "attention" if gradients else "attention forward"
            line = Line(operation, shape.numbers, f"layout.attention={name}")
            try:
                with chosen(name, device):
                    run = prepared(name, shape, dtype, device, gradients)
                    line.peak = peak_of_pass(run, device)
                    times = [seconds(run, device) for _ in range(repeat)]
                line.milliseconds = statistics.median(times) * 1e3
                line.over_floor = statistics.median(times) * ceilings.product / shape.operations(gradients)
            except Exception as error:  # as in `measure`
                line.failed = f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"
            gc.collect()
            yield line


def peak_of_pass(run: Callable[[], Any], device: torch.device) -> float | None:
    """Peak MiB of a pass above what was allocated before, after a first one; None on a CPU."""
    run()
    if device.type == "cpu":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def floor(operation: str, problem: Problem, shape: tuple[int, ...], ceilings: Ceilings) -> float:
    """Lower bound on the time in seconds, from the machine's peak rates."""
    if operation.startswith("linear"):
        return 6 * shape[0] * shape[1] * shape[2] / ceilings.product
    passes = 1 if operation == "logprob" else 2
    return passes * problem.logits.numel() * problem.logits.element_size() / ceilings.copy


def describe(line: Line) -> str:
    """Row of the table."""
    shape = " x ".join(map(str, line.shape))
    start = f"{line.operation:17s} {shape:27s} {line.name:29s}"
    if line.failed:
        return f"{start} failed: {line.failed}"
    peak = "" if line.peak is None else f"{line.peak:9.0f} MiB"
    result = [("log-prob", line.logprob_error), ("gradient", line.gradient_error)]
    error = ", ".join(f"{name} error {value:.1e}" for name, value in result if value is not None)
    return f"{start} {line.milliseconds:10.3f} ms {line.over_floor:7.2f} x floor {peak}  {error}"


def plot(lines: list[Line], where: str, file: Path) -> None:
    """Plots time over the floor as bars, a panel per operation and shape."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels: dict[str, list[Line]] = {}
    for line in lines:
        if line.milliseconds is not None:
            panels.setdefault(f"{line.operation}, {' x '.join(map(str, line.shape))}", []).append(line)
    figure, axes = pyplot.subplots(len(panels), squeeze=False, figsize=(9, 1.2 + 1.6 * len(panels)))
    for axis, (title, drawn) in zip(axes[:, 0], panels.items(), strict=True):
        colours = ["tab:blue" if line.name.startswith("grpo_kernels") else "tab:gray" for line in drawn]
        axis.barh([line.name for line in drawn], [line.over_floor for line in drawn], color=colours)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_title(f"{title}: time / floor", fontsize=9)
        axis.invert_yaxis()
    figure.suptitle(where)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


# ------------------------------------------------------------------------------------------------ traps

TRAPS: dict[str, tuple[tuple[int, int], torch.dtype, Callable[[Tensor], Any]]] = {
    "float32 logits": ((32, 8192), torch.float32, lambda x: x),
    "bfloat16 logits": ((32, 8192), torch.bfloat16, lambda x: x),
    "first half -inf (masks, top-k replay)": ((32, 8192), torch.float32, lambda x: x[:, :4096].fill_(-torch.inf)),
    "every logit below -104": ((32, 8192), torch.float32, lambda x: x.sub_(200)),
    "1500 columns, offset -20": ((32, 1500), torch.float32, lambda x: x.sub_(20)),
    "offset -1e4": ((32, 8192), torch.float32, lambda x: x.sub_(1e4)),
    "NaN in a row that does not count": ((32, 8192), torch.float32, lambda x: x[-1].fill_(torch.nan)),
}
# Triton's interpreter would take very long for it.
if not interpreted():
    TRAPS["70000 tokens in one sequence"] = ((70000, 64), torch.float32, lambda x: x)


def table_of_traps(field: list[Contender], device: torch.device) -> dict[str, dict[str, str]]:
    """{trap: {contender: outcome}}."""
    asked = [c for c in field if c.operation in ("logprob", "ppo", "on-policy")]
    return {
        trap: {f"{c.name}, {c.operation}": caught(c, trapped(trap, c.operation, device)) for c in asked}
        for trap in TRAPS
    }


def trapped(trap: str, operation: str, device: torch.device) -> Problem:
    """Problem of a trap; targets are finite logits."""
    shape, dtype, change = TRAPS[trap]
    problem = make_problem(shape, dtype, device)
    change(problem.logits)
    problem.ids[:] = problem.logits.nan_to_num(nan=0.0).argmax(-1)
    problem.old[:] = problem.ref[:] = torch.nan_to_num(present_logprobs(problem.logits, None, None, problem.ids))
    return replace(problem, sequences=1, advantage=torch.ones_like(problem.advantage)) if shape[0] > 65535 else problem


def caught(contender: Contender, problem: Problem) -> str:
    """The word "ok", or a description of the error."""
    try:
        result = contender.run(problem.fresh())
        values = errors(problem, contender.operation, result)
    except Exception as error:  # as in `measure`
        return f"fails: {type(error).__name__}"
    wrong = [value for value in values if value is not None and not value <= limit(problem, contender)]
    masked = result.gradient is not None and bool(result.gradient[problem.weight == 0].isnan().any())
    if any(value != value for value in wrong) or masked:
        return "NaN"
    return f"error {max(wrong):.1e}" if wrong else "ok"


def limit(problem: Problem, contender: Contender) -> float:
    """Error limit; gradients of bfloat16 logits may be rounded, nothing else."""
    return 5e-3 if problem.logits.dtype == torch.bfloat16 and contender.operation != "logprob" else WRONG


def format_traps(traps: dict[str, dict[str, str]]) -> str:
    """Table of the traps, with the errors of each contender."""
    lines = ["traps:"]
    for trap, outcomes in traps.items():
        bad = [f"{name}: {outcome}" for name, outcome in outcomes.items() if outcome != "ok"]
        lines.append(f"  {trap:38s} {'; '.join(bad) or 'all correct'}")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------ --check


def check(ours: list[Contender], losses: dict[str, LossFunction], device: torch.device) -> int:
    """0 if every kernel of this project is correct on every trap, on a linear problem and in every setting."""
    traps = table_of_traps(ours, device)
    print(format_traps(traps))
    bad = [
        f"{trap}: {name}: {verdict}"
        for trap, verdicts in traps.items()
        for name, verdict in verdicts.items()
        if verdict != "ok"
    ]
    for shape in ((64, 4099), (64, 4099, 128)):
        for dtype in (torch.float32, torch.bfloat16):
            problem = make_problem(shape, dtype, device)
            for contender in ours:
                if contender.operation.startswith("linear") == (len(shape) == 3):
                    bad += wrong(contender, problem)
    bad += check_losses(losses, device)
    print(f"{len(LOSSES)} settings of the loss compared with float64: {'; '.join(LOSSES)}")
    print("\n".join(f"WRONG  {line}" for line in bad) or "all right")
    return 1 if bad else 0


def wrong(contender: Contender, problem: Problem) -> list[str]:
    """Errors beyond rounding."""
    dtype = (problem.hidden if problem.logits is None else problem.logits).dtype
    logprob_error, gradient_error = errors(problem, contender.operation, contender.run(problem.fresh()))
    limits = [(logprob_error, 1e-5), (gradient_error, 5e-3 if dtype == torch.bfloat16 else 1e-5)]
    return [
        f"{contender.name}, {contender.operation}, {dtype}: error {value:.1e}, limit {most:.0e}"
        for value, most in limits
        if value is not None and not value <= most
    ]


if __name__ == "__main__":
    sys.exit(main())

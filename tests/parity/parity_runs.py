"""Runs cases of parity_cases.py and says how far each is from one process, quantity by quantity."""

import operator
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_cases import WITHOUT_PEFT, expert_layers, has_adapters, model_of, name_of, one_process, processes
from ranks import run_ranks

JOB = Path(__file__).with_name("layouts_job.py")
JOB_SECONDS = 1800
"""Until a job that goes through all cases of a number of processes counts as hung."""

LIMITS = {
    "fp32": {
        "sampled tokens": 0,
        "log-probs, engine and trainer": 1e-5,
        "log-probs, scoring and update": 1e-5,
        "log-probs": 1e-5,
        "loss and metrics": 2e-6,
        "gradients": 2e-6,
        "worst gradient": 5e-6,
        "gradient norms": 2e-6,
        "updates": 5e-6,
        "worst update": 3e-4,
        "tokens after the updates": 0,
        "log-probs after the updates": 1e-5,
        "expert loads": 0,
        "expert bias": 1e-8,
        "parameters": 0,
        "frozen weights": 0,
        "merged weights": 1e-6,
        "exported adapters": 0,
    },
    "bf16": {
        "log-probs": 0.1,
        "gradients": 0.1,
        "worst gradient": 0.2,
        "gradient norms": 0.1,
        "updates": 0.2,
    },
    "bf16 with experts": {
        "log-probs": 0.5,
        "gradients": 0.2,
        "worst gradient": 0.4,
        "gradient norms": 0.15,
        "updates": 0.4,
    },
}
"""The largest difference that passes; docs/parity.md says what was measured.

In bf16 one rounding is 2^-8 = 0.004 relative, and the weights themselves are rounded; a ratio on the edge of a clip
bound falls on the other side, and a token on the edge between two experts goes to the other one. A wrong factor shows,
a subtle mistake does not: fp32 is for that."""
EXPERTS_ONLY = ("expert loads", "expert bias")
ADAPTERS_ONLY = ("frozen weights", "merged weights", "exported adapters")
EXPORTED = ("merged", "adapters")

Found = dict[str, Any]
"""What layouts_job.py saved about a case."""


def limits(case: str) -> dict[str, float]:
    """Of every quantity that [MUTATION@]MODEL:LAYOUT has."""
    model = model_of(case)
    if model.dtype == "bf16":
        return LIMITS["bf16 with experts" if expert_layers(model) else "bf16"]
    without = (() if expert_layers(model) else EXPERTS_ONLY) + (() if has_adapters(case) else ADAPTERS_ONLY)
    without += ("exported adapters",) if name_of(case) in WITHOUT_PEFT else ()
    return {name: x for name, x in LIMITS["fp32"].items() if name not in without}


def run_cases(cases: Iterable[str], out: Path) -> dict[str, Found]:
    """What was found in each case, [MUTATION@]MODEL:LAYOUT, and in the one each is compared with."""
    cases = dict.fromkeys(cases)
    names = dict.fromkeys([*map(one_process, cases), *cases])
    for size in sorted({processes(name) for name in names}):
        run_ranks(JOB, size, [str(out), *(name for name in names if processes(name) == size)], timeout=JOB_SECONDS)
    return {name: torch.load(out / f"{name}.pt") for name in names}


def found_by(job: Path, sizes: dict[str, int], request: pytest.FixtureRequest, out: Path) -> dict[str, Found]:
    """What another job found in the cases of the selected tests of a file, and in those they are compared with.

    `sizes` are the processes of each case; of any other, one.
    """
    here = [item for item in request.session.items if item.path == request.path]
    cases = {item.callspec.params["case"] for item in here}  # type: ignore[attr-defined]
    cases |= {one_process(case) for case in cases}
    for size in sorted({sizes.get(case, 1) for case in cases}):
        run_ranks(job, size, [str(out), *(case for case in sorted(cases) if sizes.get(case, 1) == size)])
    return {case: torch.load(out / f"{case}.pt") for case in cases}


def assert_close(mine: Found, one: Found, quantity: str) -> None:
    """Fails when fp32 tensors by name, gradients or updates, are further apart than their limits."""
    together, each = distances(mine[quantity], one[quantity])
    assert together <= LIMITS["fp32"][quantity], quantity
    assert largest(each)[0] <= LIMITS["fp32"][f"worst {quantity[:-1]}"], largest(each)


def excesses(found: dict[str, Found], case: str) -> dict[str, float]:
    """The quantities that are further from one process than their limits."""
    off = differences(found[case], found[one_process(case)])
    return {name: off[name][0] for name, limit in limits(case).items() if not off[name][0] <= limit}


def differences(mine: Found, one: Found) -> dict[str, tuple[float, str]]:
    """How far a case is from one process, and where: a tensor's name, say.

    Log-probs and the bias by the largest absolute difference; metrics and gradient norms, with those that the gradient
    noise scale is made of, by the relative one; gradients and updates by relative L2 distance, of all tensors together
    and of the worst; tokens by the samples that differ.
    """
    metrics = {name: relative(mine["metrics"].get(name), x) for name, x in one["metrics"].items()}
    norms = dict(enumerate(map(relative, mine["norms"], one["norms"])))
    result = {
        "log-probs, scoring and update": (farthest(mine["scored"], mine["trained"]), ""),
        "log-probs": (max(farthest(mine[name], one[name]) for name in ("scored", "trained")), ""),
        "loss and metrics": largest(metrics),
        "gradient norms": largest(norms),
        "expert loads": (float(mine["expert_loads"] != one["expert_loads"]), ""),
        "expert bias": (mine["bias_off"], ""),
        "parameters": (abs(mine["parameters"] - one["parameters"]), ""),
        "frozen weights": (mine["frozen_off"], ""),
    }
    for name in ("gradients", "updates"):
        together, each = distances(mine[name], one[name])
        result |= {name: (together, ""), f"worst {name[:-1]}": largest(each)}
    if "merged" in one:
        result |= of_adapters(mine, one)
    if "samples" in one:
        result |= of_samples(mine, one)
    return result


def of_adapters(mine: Found, one: Found) -> dict[str, tuple[float, str]]:
    """The part of `differences` that is about adapters: whether an update moved other weights, and what is exported."""
    assert all(mine[kind].keys() == one[kind].keys() for kind in EXPORTED)
    merged, adapters = ({name: farthest(mine[kind][name], x) for name, x in one[kind].items()} for kind in EXPORTED)
    return {
        "frozen weights": (mine["frozen_off"], ""),
        "merged weights": largest(merged),
        **({"exported adapters": largest(adapters)} if adapters else {}),
    }


def of_samples(mine: Found, one: Found) -> dict[str, tuple[float, str]]:
    """The part of `differences` that is about what was sampled, before the updates and behind them."""
    drawn = [tokens[: mine["longest"]] for tokens in one["samples"]]
    both = mine["after"].keys() & one["after"].keys()
    after = [abs(a - b) for key in both for a, b in zip(mine["after"][key], one["after"][key], strict=True)]
    return {
        "sampled tokens": (float(sum(map(operator.ne, mine["samples"], drawn))), ""),
        "log-probs, engine and trainer": (farthest(mine["logprob"], mine["rollout_logprob"]), ""),
        "tokens after the updates": (float(len(mine["after"].keys() ^ one["after"].keys())), ""),
        "log-probs after the updates": (max(after, default=0.0), ""),
    }


def farthest(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest absolute difference; infinite when the shapes differ."""
    return (a - b).abs().max().item() if a.shape == b.shape else float("inf")


def relative(a: float | None, b: float) -> float:
    """|a - b| / |b|; a number below 0.05 counts as 0.05, and one that is missing is infinitely far."""
    return float("inf") if a is None else abs(a - b) / max(abs(b), 0.05)


def largest(off: dict[Any, float]) -> tuple[float, str]:
    """The largest difference and its name; one that is not a number is the largest."""
    name = max(off, key=lambda key: float("inf") if off[key] != off[key] else off[key])
    return off[name], str(name)


def distances(mine: dict[str, torch.Tensor], one: dict[str, torch.Tensor]) -> tuple[float, dict[str, float]]:
    """Relative L2 distance of all tensors together, and of each by its key."""
    assert mine.keys() == one.keys()
    off = {key: (mine[key].double() - one[key].double()).norm() for key in one}
    size = {key: one[key].double().norm() for key in one}
    together = torch.stack([*off.values()]).norm() / torch.stack([*size.values()]).norm()
    return together.item(), {key: (off[key] / size[key]).item() if off[key] else 0.0 for key in one}

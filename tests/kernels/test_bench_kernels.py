"""`tools/bench_kernels.py --check` finds this project's kernels right on every trap, here, and wrong ones wrong."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import run_python
from ranks import REPOSITORY

from grpo_kernels import LossOptions

sys.path.append(str(REPOSITORY / "tools"))  # last: some of them have names of modules, as trace.py

from kernel_check import LOSSES, LossFunction, Outcome, check_losses, own_loss

BENCH = REPOSITORY / "tools" / "bench_kernels.py"
HERE = torch.device("cpu")


def test_check():
    done = run_python(BENCH, "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all right" in done.stdout
    assert done.stdout.count("all correct") == 8
    assert f"{len(LOSSES)} settings of the loss compared with float64" in done.stdout


def test_attention(tmp_path: Path):
    done = run_python(BENCH, "--attention", "--repeat", "1", "--json", tmp_path / "found")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = json.loads((tmp_path / "found").read_text())["lines"]
    assert not [line for line in lines if line["failed"]], done.stdout
    measured = [(line["operation"], line["name"]) for line in lines]
    assert measured.count(("attention forward", "layout.attention=padded")) == 3
    assert measured.count(("attention", "layout.attention=padded")) == 3
    assert all(line["milliseconds"] > 0 for line in lines)


def other_options(**fields: Any) -> Callable[[LossFunction], LossFunction]:
    """A loss that takes a setting for another one, where it applies."""

    def wrong(right: LossFunction) -> LossFunction:
        def run(inputs: tuple[torch.Tensor, ...], arguments: dict[str, Any]) -> Outcome:
            options = arguments["options"]
            new = {name: value(options) if callable(value) else value for name, value in fields.items()}
            changed = replace(options, **new)
            ends = arguments["cu_seqlens"] if changed.per_sequence else None
            return right(inputs, arguments | {"options": changed, "cu_seqlens": ends})

        return run

    return wrong


def changed(change: Callable[[Outcome], Outcome]) -> Callable[[LossFunction], LossFunction]:
    """A loss whose results are changed."""
    return lambda right: lambda inputs, arguments: change(right(inputs, arguments))


def _another_kl(options: LossOptions) -> str:
    return {"k1": "k2", "k2": "k3", "k3": "k1"}[options.kl]


KLS = {"ppo, k1", "ppo, k2", "ppo, k3", "ppo, all of it", "gspo, all of it", "cispo, all of it"}
ENTROPIES = {"ppo, entropy bonus", "ppo, entropy penalty", "ppo, all of it", "gspo, all of it", "cispo, all of it"}
WRONG = {
    "the entropy's sign": (other_options(entropy_coef=lambda o: -o.entropy_coef), ENTROPIES),
    "no entropy": (other_options(entropy_coef=0.0), ENTROPIES),
    "another KL estimator": (other_options(kl=_another_kl), KLS),
    "no KL": (other_options(kl_coef=0.0), KLS),
    "no dual clip": (other_options(dual_clip=None), {"ppo, dual clip", "gspo, dual clip"}),
    "no correction": (
        other_options(correction="none"),
        {"ppo, truncate", "ppo, mask", "ppo, all of it", "gspo, all of it", "cispo, all of it"},
    ),
    "truncation for a mask": (
        other_options(correction=lambda o: "none" if o.correction == "none" else "truncate"),
        {"ppo, mask", "gspo, all of it", "cispo, all of it"},
    ),
    "another cap": (other_options(correction_cap=3.0), {"ppo, truncate", "ppo, mask"}),
    "no bound below": (other_options(clip_low=1.0), {"ppo", "ppo, no bound above", "gspo", "cispo"}),
    "no bound above": (other_options(clip_high=float("inf")), {"ppo", "ppo, no bound below", "gspo", "cispo"}),
    "a bound where there is none": (
        other_options(clip_low=lambda o: min(o.clip_low, 0.5), clip_high=lambda o: min(o.clip_high, 1.0)),
        {"ppo, no bound below", "ppo, no bound above", "cispo, all of it"},
    ),
    "the token's ratio for the sequence's": (
        other_options(kind=lambda o: "ppo" if o.kind == "gspo" else o.kind),
        {"gspo", "gspo, dual clip", "gspo, all of it"},
    ),
    "the gradient stops at cispo's bounds": (
        other_options(kind=lambda o: "ppo" if o.kind == "cispo" else o.kind),
        {"cispo", "cispo, all of it"},
    ),
    "the gradient of a whole sequence for a token's": (
        other_options(kind=lambda o: "gspo" if o.kind == "gspo_token" else o.kind),
        {"gspo_token"},
    ),
    "a clipped mean for the mean of clipped ratios": (
        other_options(kind=lambda o: "gspo" if o.kind == "gmpo" else o.kind),
        {"gmpo"},
    ),
    "cispo's factor for vespo's": (
        other_options(kind=lambda o: "cispo" if o.kind == "vespo" else o.kind),
        {"vespo"},
    ),
    "vespo's shapes swapped": (
        other_options(vespo_k_pos=lambda o: o.vespo_k_neg, vespo_lambda_pos=lambda o: o.vespo_lambda_neg),
        {"vespo"},
    ),
    "a clip for sapo's gate": (other_options(kind=lambda o: "ppo" if o.kind == "sapo" else o.kind), {"sapo"}),
    "sapo's temperatures swapped": (
        other_options(tau_pos=lambda o: o.tau_neg, tau_neg=lambda o: o.tau_pos),
        {"sapo"},
    ),
    "a mask of nothing": (
        other_options(off_policy_mask=lambda o: None if o.off_policy_mask is None else 1e3),
        {"ppo, off-policy mask"},
    ),
    "KL without the ratio": (other_options(kl_unbiased=False), {"ppo, unbiased k3"}),
    "no floor of the correction": (other_options(correction_floor=0.0), {"ppo, mask on both sides"}),
    "log-probs a little off": (changed(lambda found: replace(found, logprob=found.logprob + 1e-4)), set(LOSSES)),
    "another sum of the losses": (changed(lambda found: replace(found, loss=found.loss * 1.001)), set(LOSSES)),
    "one of the gradients": (
        changed(lambda found: replace(found, gradients=(*found.gradients[:-1], found.gradients[-1] * 1.01))),
        set(LOSSES),
    ),
}
"""What a kernel does wrong, and the settings that have to show it."""


IN_MAKE_TEST = (
    "the entropy's sign", "another KL estimator", "no correction", "no bound above", "log-probs a little off",
    "the token's ratio for the sequence's", "one of the gradients",
)  # fmt: skip
assert {*IN_MAKE_TEST} <= {*WRONG}


@functools.cache
def checked(in_make_test: bool) -> list[str]:
    """What `check_losses` finds, with all wrong kernels at once: what is right is computed once for them."""
    wrong = {
        bug: change(own_loss("torch")) for bug, (change, _) in WRONG.items() if (bug in IN_MAKE_TEST) == in_make_test
    }
    return check_losses({"right": own_loss("torch"), **wrong}, HERE)


@pytest.mark.parametrize(
    "bug", [pytest.param(bug, marks=() if bug in IN_MAKE_TEST else pytest.mark.long) for bug in WRONG]
)
def test_a_wrong_kernel_fails(bug: str) -> None:
    lines = checked(bug in IN_MAKE_TEST)
    assert not [line for line in lines if line.startswith("right: ")]
    for source in ("logits", "hidden states"):
        for dtype in ("float32", "bfloat16"):
            where = f", {source}, torch.{dtype}: "
            found = {line.split(where)[0] for line in lines if line.startswith(f"{bug}: ") and where in line}
            settings = {setting.removesuffix(", on-policy") for setting in found}
            assert settings >= {f"{bug}: {setting}" for setting in WRONG[bug][1]}

"""Every bad argument is refused before anything runs, by name; and what the library imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import grpo_kernels
from grpo_kernels import LossOptions

N, V, HIDDEN = 4, 10, 3
IDS = torch.tensor([0, 3, 9, 1])
ONES = torch.ones(N)
NOWHERE = torch.device("meta")

COMMON: list[tuple[dict[str, Any], str]] = [
    ({"ids": IDS[:3]}, "ids has 3 entries; it needs 4"),
    ({"ids": IDS.int()}, r"ids is torch\.int32; use torch\.int64"),
    ({"ids": IDS[:, None]}, r"ids has shape \[4, 1\]; it needs 1 dimension"),
    ({"ids": IDS.tolist()}, "ids is a list; pass a tensor"),
    ({"ids": IDS.to(NOWHERE)}, "ids is on meta; it must be on cpu"),
    ({"ids": IDS + 1}, r"ids has a token outside \[0, 10\)"),
    ({"ids": IDS - 1}, r"ids has a token outside \[0, 10\)"),
    ({"vocab_size": 9}, r"ids has a token outside \[0, 9\)"),
    ({"vocab_size": 0}, "vocab_size is 0; 1 x 10 columns hold 1 to 10 tokens"),
    ({"vocab_size": 11}, "vocab_size is 11; 1 x 10 columns hold 1 to 10 tokens"),
    ({"temperature": 0.0}, "temperature is 0.0; use a number between"),
    ({"temperature": float("nan")}, "temperature is nan; use a number between"),
    ({"temperature": -1.0}, r"temperature is -1\.0; use a number between"),
    ({"group": "tensor parallel"}, r"group is 'tensor parallel'; pass a torch\.distributed\.ProcessGroup"),
    ({"group": dist.GroupMember.NON_GROUP_MEMBER}, "that this rank is a member of"),
    ({"backend": "cuDNN"}, "backend is 'cuDNN'; use one of torch, triton, cuda"),
]
LOGITS: list[tuple[dict[str, Any], str]] = [
    ({"logits": torch.zeros(N)}, r"logits has shape \[4\]; it needs 2 dimension"),
    ({"logits": torch.zeros(N, V, dtype=torch.float64)}, r"logits is torch\.float64; use torch\.float32 or"),
    ({"logits": torch.zeros(V, N).t()}, r"logits has strides \(1, 4\).*pass logits\.contiguous"),
    ({"logits": torch.zeros(1, V).expand(N, V)}, r"logits has strides \(0, 1\).*rows must not overlap"),
    ({"rows": torch.tensor([0, 1, 2, 4])}, r"rows has a number outside \[0, 4\)"),
    ({"rows": torch.tensor([0, 1, -1, 2])}, r"rows has a number outside \[0, 4\)"),
    ({"rows": torch.tensor([0, 1, 1, 2])}, "rows lists a row twice"),
    ({"rows": torch.tensor([0, 1, 2])}, "ids has 4 entries; it needs 3"),
    ({"rows": torch.tensor([True, True, True, True])}, r"rows is torch\.bool; use torch\.int64"),
]
LOSS: list[tuple[dict[str, Any], str]] = [
    *(
        ({name: torch.ones(N, requires_grad=True)}, f"{name} requires a gradient, .*; pass {name}.detach")
        for name in ("advantages", "token_weight", "old_logprob", "ref_logprob", "rollout_logprob")
    ),
    ({"advantages": ONES[:2]}, "advantages has 2 entries; it needs 4"),
    ({"token_weight": ONES.double()}, r"token_weight is torch\.float64; use torch\.float32"),
    ({"old_logprob": ONES[:, None]}, r"old_logprob has shape \[4, 1\]; it needs 1 dimension"),
    ({"ref_logprob": ONES.to(NOWHERE)}, "ref_logprob is on meta; it must be on cpu"),
    ({"ref_logprob": None, "options": LossOptions(kl_coef=0.1)}, "ref_logprob is None, and options.kl_coef is 0.1"),
    ({"options": LossOptions(correction="mask")}, "rollout_logprob is None, and options.correction is 'mask'"),
    ({"options": {"kind": "ppo"}}, "options is a dict; pass a LossOptions"),
    ({"options": LossOptions(kind="gspo")}, "cu_seqlens goes with options.kind gspo"),
    ({"cu_seqlens": torch.tensor([0, 4])}, "cu_seqlens goes with options.kind gspo"),
    ({"sampled": ONES > 0}, "sampled goes with options.off_policy_mask"),
]
SEQUENCES: list[tuple[dict[str, Any], str]] = [
    ({"cu_seqlens": torch.tensor([0, 3])}, "cu_seqlens must begin with 0, never fall and end with 4"),
    ({"cu_seqlens": torch.tensor([1, 4])}, "cu_seqlens must begin with 0"),
    ({"cu_seqlens": torch.tensor([0, 3, 2, 4])}, "cu_seqlens must begin with 0, never fall"),
    ({"cu_seqlens": torch.tensor([], dtype=torch.int64)}, "cu_seqlens is empty"),
]
LINEAR: list[tuple[dict[str, Any], str]] = [
    ({"hidden": torch.zeros(N, HIDDEN, 1)}, r"hidden has shape \[4, 3, 1\]; it needs 2 dimension"),
    (
        {"output_weight": torch.zeros(V, HIDDEN + 1)},
        r"hidden is \[4, 3\] and output_weight \[10, 4\]; both need H columns",
    ),
    (
        {"output_weight": torch.zeros(V, HIDDEN, dtype=torch.float16)},
        r"output_weight is torch\.float16; use torch\.float32 or",
    ),
    ({"output_weight": torch.zeros(V, HIDDEN, device=NOWHERE)}, "output_weight is on meta; it must be on cpu"),
    ({"chunk": 0}, "chunk is 0; use a positive number of rows"),
    ({"logits_dtype": torch.float16}, r"logits_dtype is torch\.float16; use one of torch\.float32, torch\.bfloat16"),
    ({"hidden_grad": "sum"}, "hidden_grad is 'sum'; use one of all_reduce, reduce_scatter, partial"),
]
MAIN_GRAD: list[tuple[dict[str, Any], str]] = [
    (
        {"main_grad": torch.zeros(V, HIDDEN + 1)},
        r"main_grad is \[10, 4\]; it needs the shape of output_weight, \[10, 3\]",
    ),
    ({"main_grad": torch.zeros(V, HIDDEN).bfloat16()}, r"main_grad is torch\.bfloat16; use torch\.float32"),
    ({"main_grad": torch.zeros(V, HIDDEN), "grad_scale": 0.0}, "grad_scale is 0.0; use the finite number"),
]


def logits() -> dict[str, Any]:
    return {"logits": torch.zeros(N, V, requires_grad=True), "ids": IDS}


def hidden() -> dict[str, Any]:
    return {"hidden": torch.zeros(N, HIDDEN), "output_weight": torch.zeros(V, HIDDEN, requires_grad=True), "ids": IDS}


def loss() -> dict[str, Any]:
    vectors = dict.fromkeys(("old_logprob", "ref_logprob", "advantages", "token_weight"), ONES)
    return vectors | {"options": LossOptions()}


def refused(function: Any, good: dict[str, Any], bad: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        function(**good | bad)


@pytest.mark.parametrize(("bad", "message"), COMMON + LOGITS)
def test_bad_arguments_of_fused_logprob(bad: dict[str, Any], message: str) -> None:
    refused(grpo_kernels.fused_logprob, logits(), bad, message)


@pytest.mark.parametrize(("bad", "message"), COMMON + LOGITS + LOSS)
def test_bad_arguments_of_fused_grpo_loss(bad: dict[str, Any], message: str) -> None:
    good = logits() | loss()
    refused(grpo_kernels.fused_grpo_loss, good, bad, message)
    if isinstance(given := (good | bad)["logits"], torch.Tensor):
        assert not given.any(), "the logits were overwritten before the arguments were checked"


@pytest.mark.parametrize(("bad", "message"), COMMON + LINEAR)
def test_bad_arguments_of_linear_logprob(bad: dict[str, Any], message: str) -> None:
    refused(grpo_kernels.linear_logprob, hidden(), bad, message)


@pytest.mark.parametrize(("bad", "message"), COMMON + LINEAR + MAIN_GRAD)
def test_bad_arguments_of_linear_token_loss(bad: dict[str, Any], message: str) -> None:
    good = hidden() | {"token_loss": lambda logprob, entropy, part: (logprob, {})}
    refused(grpo_kernels.linear_token_loss, good, bad, message)


@pytest.mark.parametrize(("bad", "message"), COMMON + LINEAR + MAIN_GRAD + LOSS)
def test_bad_arguments_of_linear_grpo_loss(bad: dict[str, Any], message: str) -> None:
    refused(grpo_kernels.linear_grpo_loss, hidden() | loss(), bad, message)


@pytest.mark.parametrize(("bad", "message"), SEQUENCES)
def test_bad_sequences(bad: dict[str, Any], message: str) -> None:
    gspo = loss() | {"options": LossOptions(kind="gspo")}
    refused(grpo_kernels.fused_grpo_loss, logits() | gspo, bad, message)
    refused(grpo_kernels.linear_grpo_loss, hidden() | gspo, bad, message)


@pytest.mark.parametrize(
    ("sampled", "message"),
    [(ONES, r"sampled is torch\.float32; use torch\.bool"), (ONES[1:] > 0, "sampled has 3 entries; it needs 4")],
)
def test_bad_tokens_of_the_off_policy_mask(sampled: torch.Tensor, message: str) -> None:
    masked = {"options": LossOptions(off_policy_mask=0.1), "rollout_logprob": ONES, "cu_seqlens": torch.tensor([0, N])}
    refused(grpo_kernels.fused_grpo_loss, logits() | loss() | masked, {"sampled": sampled}, message)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "grpo"),
        ("clip_low", -0.1),
        ("clip_high", -0.1),
        ("clip_high", float("nan")),
        ("clip_low", float("nan")),
        ("dual_clip", 1.0),
        ("kl", "k4"),
        ("kl_coef", float("nan")),
        ("kl_coef", -0.01),
        ("kl_coef", float("inf")),
        ("entropy_coef", float("inf")),
        ("correction", "clamp"),
        ("correction_cap", 0.99),  # with "mask", a token about which engine and trainer agree would not count
        ("correction_cap", float("inf")),
        ("correction_cap", float("nan")),
        ("correction_floor", 1.01),  # as above
        ("correction_floor", -0.1),
        ("correction_floor", float("nan")),
        ("tau_pos", 0.0),
        ("tau_neg", float("inf")),
        ("vespo_k_pos", 0.0),
        ("vespo_lambda_neg", float("nan")),
        ("off_policy_mask", -0.1),
        ("off_policy_mask", float("nan")),
    ],
)
def test_bad_options(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field} is "):
        LossOptions(**{field: value})


def test_a_vector_with_a_gradient_is_fine_where_nothing_gets_one() -> None:
    with torch.no_grad():
        vectors = loss() | {"advantages": torch.ones(N, requires_grad=True)}
        assert grpo_kernels.fused_grpo_loss(**logits(), **vectors)[0].isfinite()


@pytest.mark.parametrize("kind", ["cispo", "sapo", "gmpo", "vespo"])
def test_kinds_without_dual_clip(kind: str) -> None:
    with pytest.raises(ValueError, match=rf"^dual_clip is 3\.0; {kind} has none"):
        LossOptions(kind=kind, dual_clip=3.0)


def test_the_implementation_and_the_reason_for_it() -> None:
    chosen = grpo_kernels.backend(torch.zeros(1, 1))
    assert (chosen.name, chosen.why) == ("torch", "cpu tensors: the kernels need a GPU")
    assert grpo_kernels.backend(torch.zeros(1, 1), "triton").name == "triton"


def test_the_library_needs_only_torch() -> None:
    """Its own directory is enough, and neither the trainer nor Megatron nor, on a CPU, triton is touched."""
    code = (
        "import sys, torch; before = set(sys.modules); import grpo_kernels; "
        "x = torch.zeros(2, 3); grpo_kernels.fused_logprob(x, torch.tensor([0, 1])); "
        "packages = {name.split('.')[0] for name in set(sys.modules) - before} - {'torch'}; "
        "print(*sorted(packages - sys.stdlib_module_names))"
    )
    path = Path(grpo_kernels.__file__).parents[1]
    output = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert output.stdout.split() == ["grpo_kernels"]

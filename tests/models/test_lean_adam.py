"""An optimizer with a lean state: on the host it computes what the usual one does, with moments in bf16 nearly so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import MODELS, PLATFORM, VOCABULARY

from grpo_mega.algorithm.objective import negative_log_likelihood
from grpo_mega.checkpoint import checkpoint
from grpo_mega.config.rules.optimizer import SLOWEST
from grpo_mega.config.schema import (
    LayoutConfig,
    LoRAConfig,
    OptimizerConfig,
    PartConfig,
    PartsConfig,
    StateConfig,
)
from grpo_mega.errors import InputError
from grpo_mega.models.average import AveragedPolicy
from grpo_mega.models.megatron.adam import MASTER, LeanAdamW
from grpo_mega.models.noise import moment_sums
from grpo_mega.models.policy import Policy
from grpo_mega.models.topology import Topology
from grpo_mega.types import Batch

HOST = StateConfig(on_host=True)
NARROW = StateConfig(moments="bf16", on_host=True)
USUAL = OptimizerConfig(lr=0.01, weight_decay=0.1, clip_grad=0.5)
PARTS = PartsConfig(head=PartConfig(0.5), experts=PartConfig(2.0, 0.3))
KINDS = {
    "dense": ("dense", {}, {}),
    "experts in bf16": ("moe", {"dtype": "bf16"}, {}),
    "parts": ("moe", {"dtype": "bf16"}, {"frozen": ["embedding", "router"]}),
    "adapters": ("moe", {"dtype": "bf16"}, {"lora": LoRAConfig(rank=4)}),
}

Make = Callable[..., Policy]


@pytest.fixture
def make(topology: Topology) -> Make:
    """Builds a policy of one of KINDS with Megatron's distributed optimizer and this state."""

    def made(kind: str, state: StateConfig, **settings: object) -> Policy:
        name, changes, own = KINDS[kind]
        model, sharded = (
            replace(MODELS[name], **changes),
            OptimizerConfig(distributed=True, frozen=own.get("frozen", [])),
        )
        policy = Policy(model, LayoutConfig(), VOCABULARY, topology, PLATFORM, sharded, own.get("lora"))
        policy.initialize(seed=0)
        parts = PARTS if kind == "parts" else PartsConfig()
        policy.use_optimizer(replace(USUAL, state=state, parts=parts, **settings))
        return policy

    return made


def update(policy: Policy, batch: Batch, times: int) -> list[float]:
    """So many updates; their gradient norms."""
    norms = []
    for number in range(times):
        weight = (batch.mask * (1 + number)) / batch.mask.sum()
        metrics = policy.update(batch.with_(weight=weight), negative_log_likelihood, lr=0.01 / (1 + number)).metrics
        norms.append(metrics["grad_norm"])
    return norms


def everything(policy: Policy) -> dict[str, torch.Tensor]:
    """Weights, and the optimizer's state in float32, as checkpoints have it."""
    found = {f"weights {name}": weight.float() for name, weight in policy.whole_weights().items()}
    for number, part in enumerate(policy.optimizer.chained_optimizers):
        for place, parameter in enumerate(part.model_param_group_index_map if part.optimizer is not None else ()):
            state = part._get_main_param_and_optimizer_states(parameter)
            found |= {f"{name} {number} {place}": value.detach().float().clone() for name, value in state.items()}
    return found


def unequal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    assert len(a) == len(b)
    kind = {name.split(" ")[0] for name in a}
    assert kind == {"weights", "param", "exp_avg", "exp_avg_sq"}
    return [name for name, value in a.items() if not torch.equal(value, b[name])]


def lean(policy: Policy) -> list[LeanAdamW]:
    return [part.optimizer for part in policy.optimizer.chained_optimizers if isinstance(part.optimizer, LeanAdamW)]


@pytest.mark.parametrize("kind", KINDS)
def test_on_the_host_every_number_is_that_of_the_usual_optimizer(make: Make, batch: Batch, kind: str) -> None:
    usual, host = make(kind, StateConfig()), make(kind, HOST)
    assert lean(host)
    assert not lean(usual)
    assert update(usual, batch, 3) == update(host, batch, 3)
    assert unequal(everything(usual), everything(host)) == []
    assert moment_sums(usual.optimizer) == moment_sums(host.optimizer)


@pytest.mark.parametrize("kind", ["dense", "experts in bf16"])
def test_with_moments_in_bf16_weights_move_nearly_as_far_and_no_moment_is_wider(make: Make, batch: Batch, kind: str):
    usual, narrow = make(kind, HOST), make(kind, NARROW)
    update(usual, batch, 8)
    update(narrow, batch, 8)
    state = [state for optimizer in lean(narrow) for state in optimizer.state.values()]
    assert {value.dtype for each in state for name, value in each.items() if name != MASTER} == {torch.bfloat16}
    assert {each[MASTER].dtype for each in state} == {torch.float32}
    start, theirs, ours = (
        torch.cat([value for name, value in everything(policy).items() if name.startswith("param ")])
        for policy in (make(kind, HOST), usual, narrow)
    )
    assert 0 < (theirs - ours).norm() / (theirs - start).norm() < 0.01


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        ("parts", HOST),
        ("experts in bf16", NARROW),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("experts in bf16", HOST), ("adapters", HOST))),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("parts", NARROW), ("adapters", NARROW))),
    ],
)
def test_a_run_that_is_continued_ends_bit_for_bit(make: Make, batch: Batch, tmp_path: Path, kind: str, state) -> None:
    kept = make(kind, state)
    update(kept, batch, 2)
    checkpoint.save(tmp_path / "there", [kept], {})
    there = everything(kept)
    continued = make(kind, state)
    checkpoint.load(tmp_path / "there", [continued])
    assert unequal(there, everything(continued)) == []
    update(kept, batch, 2)
    update(continued, batch, 2)
    assert unequal(everything(kept), everything(continued)) == []
    assert unequal(there, everything(continued))


@pytest.mark.parametrize(("before", "after"), [(StateConfig(), HOST), (HOST, StateConfig())], ids=["to", "from"])
def test_a_run_may_move_its_state_to_the_host_and_back(make: Make, batch: Batch, tmp_path: Path, before, after) -> None:
    kept, moved = make("experts in bf16", before), make("experts in bf16", after)
    update(kept, batch, 2)
    checkpoint.save(tmp_path / "there", [kept], {})
    checkpoint.load(tmp_path / "there", [moved])
    update(kept, batch, 2)
    update(moved, batch, 2)
    assert unequal(everything(kept), everything(moved)) == []


def test_an_average_follows_the_weights(make: Make, batch: Batch) -> None:
    averages = []
    for state in (StateConfig(), HOST):
        policy = make("experts in bf16", state)
        average = AveragedPolicy(policy, 0.5)
        update(policy, batch, 2)
        average.follow()
        with average.swapped_in():
            averages.append(policy.whole_weights())
    assert all(torch.equal(weight, averages[1][name]) for name, weight in averages[0].items())


@settings(deadline=None)
@given(st.floats(1e-30, 1e30), st.floats(0, SLOWEST, exclude_max=True))
def test_a_moment_in_bf16_falls_as_long_as_the_rules_allow_its_rate(first: float, beta: float) -> None:
    """Without a gradient Adam multiplies a moment by beta."""
    moment = torch.tensor(first, dtype=torch.bfloat16)
    assert (moment.float() * beta).bfloat16() < moment


def test_a_slower_moment_in_bf16_would_never_fall() -> None:
    moment = torch.tensor(1 + 2**-7, dtype=torch.bfloat16)
    assert (moment.float() * 0.999).bfloat16() == moment


def test_without_the_distributed_optimizer_a_lean_state_is_refused(topology: Topology) -> None:
    policy = Policy(MODELS["dense"], LayoutConfig(), VOCABULARY, topology, PLATFORM)
    with pytest.raises(InputError) as refused:
        policy.use_optimizer(replace(USUAL, state=HOST))
    assert (refused.value.where, refused.value.fix) == ("optimizer.state", "set optimizer.distributed=true")

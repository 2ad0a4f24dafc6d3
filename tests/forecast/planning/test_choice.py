"""A chosen layout can run on the processes that it is chosen for, and is kept by a run that goes on; what fits nowhere
is refused with what comes nearest."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from composed import composed
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mega import platform

platform.start()

from grpo_mega.config.load import compose_config, to_yaml  # noqa: E402
from grpo_mega.config.rules import check_config, check_layout  # noqa: E402
from grpo_mega.config.schema import ClusterConfig, Config, LayoutConfig  # noqa: E402
from grpo_mega.errors import InputError  # noqa: E402
from grpo_mega.forecast.planning import choice  # noqa: E402
from grpo_mega.forecast.planning.choice import Choice, choose, machines_ahead  # noqa: E402
from grpo_mega.forecast.planning.plan import planned_vocabulary  # noqa: E402
from grpo_mega.forecast.planning.search import smaller_batches  # noqa: E402

TINY = ("experiment=tiny", "layout=auto", "run.root=nowhere")
SEVEN = ("experiment=deepseekmath_7b", "layout=auto", "layout.recompute=none", "run.root=nowhere")


def chosen(config: Config, machines: ClusterConfig) -> Choice:
    return choose(config, planned_vocabulary(config.model, config.data), machines)


def tried(config: Config, machines: ClusterConfig) -> tuple[Config | None, str]:
    """The configuration with its choice, or the refusal."""
    try:
        return chosen(config, machines).config, ""
    except InputError as error:
        return None, str(error)


def on_cpus(config: Config, processes: int) -> LayoutConfig:
    return chosen(config, ClusterConfig(nodes=1, gpus_per_node=processes)).config.layout


@settings(max_examples=25, deadline=None)
@given(
    processes=st.integers(1, 12),
    prompts=st.integers(1, 24),
    experts=st.sampled_from([0, 2, 6]),
    layers=st.integers(1, 4),
)
def test_on_cpus_a_choice_can_run_and_splits_the_model_only_where_it_must(
    processes: int, prompts: int, experts: int, layers: int
) -> None:
    config = composed(*TINY) if experts else composed(*TINY, "model=tiny_dense")
    config.algorithm.prompts_per_step, config.model.layers = prompts, layers
    if experts:
        config.model.moe.experts = experts
    found, refusal = tried(config, ClusterConfig(nodes=1, gpus_per_node=processes))
    if found is None:
        assert prompts % processes, "data parallelism alone could run"
        assert f"algorithm.prompts_per_step={prompts}: not divisible by" in refusal
        return
    check_config(found)
    check_layout(found, processes)
    layout = found.layout
    assert (layout.auto, layout.chosen_for, layout.undecided) == (False, processes, False)
    if prompts % processes == 0:
        assert layout.tp * layout.pp * layout.cp == 1
    if experts == 2 and processes % 2 == 0:
        assert layout.ep == 2
    assert replace(found, layout=config.layout) == config, "nothing else is chosen"


@settings(max_examples=4, deadline=None)
@given(gpus=st.sampled_from([1, 2, 4, 6]), mib=st.sampled_from([20_000, 81_559, 143_771]), tokens=st.integers(0, 2))
def test_on_gpus_a_choice_can_run(gpus: int, mib: int, tokens: int) -> None:
    config = composed(*SEVEN, f"layout.micro_batch_tokens={4096 << tokens}", f"algorithm.prompts_per_step={4 * gpus}")
    machines = ClusterConfig(nodes=1, gpus_per_node=gpus, gpu_memory_mib=mib, gpu="h100")
    found, refusal = tried(config, machines)
    if found is None:
        assert refusal.startswith(f"{gpus} GPUs: no layout fits: ")
        return
    check_config(found)
    check_layout(found, gpus)
    assert found.layout.chosen_for == gpus
    assert found.layout.micro_batch_tokens <= config.layout.micro_batch_tokens
    assert found.optimizer.distributed
    assert (found.model, found.cluster) == (config.model, config.cluster)


def test_on_gpus_it_is_what_the_planner_finds_first() -> None:
    config = composed(*SEVEN)
    found = chosen(config, machines_ahead(config.cluster))
    assert found.config.layout.chosen_for == 8
    assert found.why.startswith("layout=auto: dp ")
    assert "simplest of the predicted fastest of " in found.why
    assert " of 78.7 GB that may be planned)" in found.why
    engines = found.config.rollout.sglang.tp
    assert (f"engines of {engines} GPUs" in found.why) == (engines != config.rollout.sglang.tp)
    small = composed(*SEVEN, "layout.micro_batch_tokens=2048")
    larger = chosen(small, ClusterConfig(nodes=1, gpus_per_node=8, gpu_memory_mib=143_771, gpu="h200")).config.layout
    assert larger.tp * larger.pp * larger.cp <= (
        found.config.layout.tp * found.config.layout.pp * found.config.layout.cp
    )


def test_a_proposal_that_does_not_fit_when_it_is_built_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    config = composed(*SEVEN, "layout.recompute=none")
    monkeypatch.setattr(choice, "plan", lambda _: {"fits": True})
    first = choice.propose(config).layout
    monkeypatch.setattr(choice, "plan", lambda tried: {"fits": tried.layout != first})
    assert choice.propose(config).layout != first
    monkeypatch.setattr(choice, "plan", lambda _: {"fits": False})
    with pytest.raises(InputError, match="no layout fits: ") as error:
        choice.propose(config)
    assert error.value.where == "8 GPUs"


def test_what_is_given_is_kept() -> None:
    full = composed(*SEVEN, "layout.recompute=full")
    assert chosen(full, machines_ahead(full.cluster)).config.layout.recompute == "full"
    assert not composed(*TINY, "layout.tp=2", "layout.sp=true").layout.undecided
    assert not composed(*TINY, "layout=single").layout.undecided


def test_what_fits_nowhere_is_refused_with_what_comes_nearest() -> None:
    config = composed(*SEVEN)
    with pytest.raises(InputError, match=r"no layout fits: the smallest takes about [\d.]+ GB") as error:
        chosen(config, replace(config.cluster, nodes=1, gpus_per_node=1))
    assert error.value.where == "1 GPUs"
    assert re.search(r"\d+ GPUs \(cluster.nodes=\d+\)", error.value.fix)


def test_a_run_that_goes_on_keeps_what_it_has(tmp_path: Path) -> None:
    """As chosen, on as many processes; as given, wherever it fits. Otherwise it gets a choice of its own."""
    config = composed("experiment=tiny", "layout=auto", f"run.root={tmp_path}")
    path = tmp_path / "tiny"
    (path / "checkpoints" / "step-000001").mkdir(parents=True)

    def goes_on(layout: LayoutConfig, processes: int) -> LayoutConfig:
        (path / "config.yaml").write_text(to_yaml(replace(config, layout=layout)))
        return on_cpus(config, processes)

    odd = LayoutConfig(tp=2, sp=True, chosen_for=2)
    assert on_cpus(config, 2).ep == 2
    assert goes_on(odd, 2) == odd
    assert goes_on(odd, 4) == replace(on_cpus(config, 4), ep=4, tp=1, chosen_for=4)
    assert goes_on(replace(odd, chosen_for=None), 4) == replace(odd, chosen_for=None)
    assert goes_on(replace(odd, chosen_for=None), 1) == LayoutConfig(chosen_for=1)
    (path / "checkpoints" / "step-000001").rmdir()
    assert goes_on(odd, 2).ep == 2


def test_the_optimizer_that_came_with_a_choice_stays(tmp_path: Path) -> None:
    """Where the GPUs are not seen, as on a login node, or under a layout of one's own, a run is still the same
    experiment."""
    words = ["experiment=tiny", f"run.root={tmp_path}", "layout=auto"]
    config = composed(*words)
    (tmp_path / "tiny").mkdir()
    there = replace(
        config,
        layout=replace(config.layout, auto=False, chosen_for=8),
        optimizer=replace(config.optimizer, distributed=True),
    )
    (tmp_path / "tiny" / "config.yaml").write_text(to_yaml(there))
    assert compose_config(words).optimizer.distributed
    assert compose_config([*words[:2], "layout=single"]).optimizer.distributed
    assert not compose_config([words[0], f"run.root={tmp_path}/other", "layout=single"]).optimizer.distributed


def test_a_run_that_has_begun_without_a_distributed_optimizer_goes_on_without(tmp_path: Path) -> None:
    """As it must, from its first step on: it may have no checkpoint yet."""
    config = composed("experiment=tiny", "layout=auto", "cluster=h100", f"run.root={tmp_path}")
    machines = machines_ahead(config.cluster, 8)
    assert chosen(config, machines).config.optimizer.distributed
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.yaml").write_text(to_yaml(config))
    assert not chosen(config, machines).config.optimizer.distributed


def test_a_lean_state_brings_the_optimizer_that_it_needs() -> None:
    config = composed(*TINY, "optimizer.state.on_host=true")
    assert on_cpus(config, 2) == on_cpus(composed(*TINY), 2)
    assert config.optimizer.distributed


def test_micro_batches_are_halved_down_to_a_sequence() -> None:
    config = composed(*TINY, "layout.micro_batch_tokens=600")
    smaller = smaller_batches(config.layout, config.model.context)
    assert [layout.micro_batch_tokens for layout in smaller] == [600, 300, 150, 128]


def test_machines_of_a_job_that_is_not_started() -> None:
    cpus, gpus = ClusterConfig(), ClusterConfig(gpu_memory_mib=81559)
    for cluster, processes, expected in (
        (cpus, None, (1, 1)),
        (cpus, 16, (2, 8)),
        (cpus, 12, (1, 12)),
        (gpus, None, (1, 8)),
        (replace(gpus, nodes=4), None, (4, 8)),
        (replace(gpus, nodes=4), 8, (1, 8)),
    ):
        there = machines_ahead(cluster, processes)
        assert (there.nodes, there.gpus_per_node) == expected

"""Lines of a plan: DeepEP's buffers are as large as its formulas say; which problems come again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from ranks import REPOSITORY

from grpo_mega import platform

platform.start()

from grpo_mega.config.load import compose_config  # noqa: E402
from grpo_mega.forecast.planning.lines import (  # noqa: E402
    engine_verdict,
    in_gb,
    of_the_trainer,
    problems_at_hand,
)
from grpo_mega.forecast.planning.memory import memory  # noqa: E402
from grpo_mega.forecast.planning.plan import engine_of, roles_of  # noqa: E402

ENVIRONMENT = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'kernels'}"}


@pytest.mark.parametrize(
    ("ep", "inside", "across"),
    [
        # Channels x GPUs or machines x rows x bytes of a row; DeepSeek-V3's has 7,168 numbers.
        (8, 10 * 8 * 256 * (14_336 + 8 + 128 * 16), 0),
        (64, 10 * 8 * 288 * (14_336 + 8 + 128 * 16), 10 * 8 * 140 * 2 * (14_336 + 8 + 128 * 16 + 16)),
    ],
)
def test_buffers_are_as_large_as_deepep_recommends(ep: int, inside: int, across: int) -> None:
    words = ["experiment=r1zero_671b", f"layout.ep={ep}", "cluster.nodes=64"]
    lines, others = (
        memory(config, roles_of(config, 129_280, 512, counted=True), 1, 129_280)
        for config in (compose_config([*words, "layout.dispatch=deepep"]), compose_config(words))
    )
    assert lines["DeepEP's buffers"] == pytest.approx(inside + across + (32 << 20), rel=0.005)
    assert {name: size for name, size in lines.items() if name != "DeepEP's buffers"} == others
    assert of_the_trainer(lines) == of_the_trainer(others)  # torch's allocator does not have them


@pytest.mark.parametrize(("words", "problems"), [([], None), (["data.train_size=64"], 64)])
def test_generated_problems_come_again_only_where_their_number_is_set(words: list[str], problems: int | None) -> None:
    assert problems_at_hand(compose_config(["experiment=tiny", *words]).data) == problems


def test_readers_of_plans_need_neither_torch_nor_megatron() -> None:
    program = (
        "import sys, grpo_mega.forecast.planning.lines, grpo_mega.forecast.planning.show; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=ENVIRONMENT)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(("size", "text"), [(0, "0.0"), (4e6, "0.004"), (12.34e9, "12.3")])
def test_no_size_is_shown_as_nothing(size: float, text: str) -> None:
    assert in_gb(size) == text


@pytest.mark.parametrize(
    ("per_step", "in_flight", "waits", "fewer"),
    [(16, 16, False, False), (16, 800, True, True), (16, None, False, False), (800, None, True, False)],
)
def test_samples_in_flight_without_room_in_the_cache_are_told(
    per_step: int, in_flight: int | None, waits: bool, fewer: bool
) -> None:
    """With advice that can be followed: a slice cannot have fewer groups than a step."""
    words = ["experiment=deepseekmath_7b", "algorithm.correction=truncate", f"algorithm.prompts_per_step={per_step}"]
    more = [f"rollout.in_flight={in_flight}"] if in_flight else []
    config = compose_config([*words, "rollout.slice_tokens=250", *more])
    engine = engine_of(config, 102_400, 8, roles_of(config, 102_400, 8, counted=True))
    assert engine
    samples = (in_flight or per_step) * config.algorithm.group_size // 8
    assert engine["samples"] == samples
    assert engine["waiting"] == max(0, samples - engine["tokens"] // 250)
    verdict = engine_verdict(engine)
    assert ("these wait" in verdict, "lower rollout.in_flight" in verdict) == (waits, fewer)


def test_slices_that_no_completion_exceeds_need_no_more_room_than_none() -> None:
    words = ["experiment=deepseekmath_7b", "algorithm.correction=truncate", "algorithm.prompts_per_step=800"]
    config = compose_config([*words, "rollout.slice_tokens=1024", "rollout.max_new_tokens=1024"])
    engine = engine_of(config, 102_400, 8, roles_of(config, 102_400, 8, counted=True))
    assert engine
    assert engine_verdict(engine) == "fits: there is room to receive weights and to generate"

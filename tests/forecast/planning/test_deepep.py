"""DeepEP's buffers are those that its own formulas give, and a line of the plan."""

from __future__ import annotations

import pytest

from grpo_mega import platform

platform.start()

from grpo_mega.config.load import compose_config  # noqa: E402
from grpo_mega.forecast.planning.lines import of_the_trainer  # noqa: E402
from grpo_mega.forecast.planning.memory import memory  # noqa: E402
from grpo_mega.forecast.planning.search import roles_about  # noqa: E402


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
    without = compose_config(words)
    lines = memory(with_it := compose_config([*words, "layout.dispatch=deepep"]), roles_about(with_it, 512), 1, 129_280)
    others = memory(without, roles_about(without, 512), 1, 129_280)
    assert lines["DeepEP's buffers"] == pytest.approx(inside + across + (32 << 20), rel=0.005)
    assert {name: size for name, size in lines.items() if name != "DeepEP's buffers"} == others
    assert of_the_trainer(lines) == of_the_trainer(others)  # torch's allocator does not have them

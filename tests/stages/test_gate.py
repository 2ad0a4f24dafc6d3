"""The gate of the base model: checks that are passed one after the other, and no lucky one."""

import pytest

from grpo_mega.config.schema import BaseConfig
from grpo_mega.platform import start

start()  # before megatron.core is imported

from grpo_mega.stages.pretrain import gate_is_passed  # noqa: E402


@pytest.mark.parametrize(
    ("passes", "accuracies", "passed"),
    [
        (1, [0.2, 0.9], True),
        (1, [0.95, 0.89], False),
        (2, [0.95], False),
        (2, [0.9, 0.9], True),
        (2, [0.95, 0.86, 0.95], False),
        (2, [0.2, 0.95, 0.86, 0.92, 0.915], True),
        (3, [0.95, 0.86, 0.92, 0.915], False),
        (3, [0.86, 0.92, 0.915, 0.9], True),
    ],
)
def test_the_last_checks_all_reach_it(passes: int, accuracies: list[float], passed: bool) -> None:
    assert gate_is_passed(accuracies, BaseConfig(gate_accuracy=0.9, gate_passes=passes)) is passed

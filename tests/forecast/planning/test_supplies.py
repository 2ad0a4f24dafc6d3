"""What a run needs beside its GPUs: how many problems come again."""

from __future__ import annotations

import pytest

from grpo_mega.config.load import compose_config
from grpo_mega.forecast.planning.supplies import problems_at_hand


@pytest.mark.parametrize(("words", "problems"), [([], None), (["data.train_size=64"], 64)])
def test_generated_problems_come_again_only_where_their_number_is_set(words: list[str], problems: int | None) -> None:
    assert problems_at_hand(compose_config(["experiment=tiny", *words])) == problems

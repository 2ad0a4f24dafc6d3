"""What `peft` is told to load below adapters: a folder that transformers can load, or nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_mega.platform import start

start()  # before megatron.core is imported

from grpo_mega.checkpoint.checkpoint import STATE  # noqa: E402
from grpo_mega.convert.export import base_of_adapters  # noqa: E402


@pytest.mark.parametrize(("state", "base"), [({"imported_from": "models/x"}, "models/x"), ({"step": 3}, None)])
def test_of_a_checkpoint_it_is_what_was_imported(tmp_path: Path, state: dict[str, object], base: str | None) -> None:
    (tmp_path / STATE).write_text(json.dumps(state))
    assert base_of_adapters(str(tmp_path)) == base


def test_of_a_folder_it_is_the_folder(tmp_path: Path) -> None:
    assert base_of_adapters(str(tmp_path)) == str(tmp_path)
    assert base_of_adapters(None) is None

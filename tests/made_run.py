"""The directory of a run that was never run: what its configuration is read from."""

from __future__ import annotations

from pathlib import Path

from grpo_mega.config.load import to_yaml
from grpo_mega.config.schema import Config


def write_run(folder: Path, config: Config) -> Path:
    """A run directory with a configuration and one checkpoint, `checkpoints/step-000003`, that has no weights."""
    checkpoint = folder / "checkpoints" / "step-000003"
    checkpoint.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    (checkpoint / "state.json").write_text("{}")
    return folder

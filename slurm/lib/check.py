"""Asks a configuration where its run lies and whether it can start on so many ranks: check.py --ranks N -- SETTING...

Prints the run directory, or an error with the way out, in about a second: nothing is started or written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

try:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
except ImportError as error:
    sys.exit(
        f"error: {sys.executable} has no {error.name}: set PYTHON, or with a container HOST_PYTHON, to an interpreter "
        "(3.11 or newer) with `pip install hydra-core`, or run `make .venv/.ready`"
    )

from grpo_mega.config.load import compose_config, explained, identity
from grpo_mega.config.rules import check_layout
from grpo_mega.observe.run_dir import check_run_dir


def run_directory(settings: list[str], ranks: int) -> Path:
    """Where the run of these settings lies.

    Raises:
        ValueError: It cannot run on so many ranks, or the directory belongs to something else.
        FileNotFoundError: Its data or its first weights are not there.
    """
    config = compose_config(settings)
    check_layout(config, ranks)
    inputs = {"data.train_path": config.data.train_path, "data.test_path": config.data.test_path}
    inputs |= {} if config.base.train else {"run.init_from": config.run.init_from}
    for name, place in inputs.items():
        if place and not Path(place).exists():
            raise FileNotFoundError(f"{name}={place} does not exist")
    path = Path(config.run.root).resolve() / config.run.name
    check_run_dir(path, identity=identity(config))
    return path


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("settings", nargs="*")
    options = parser.parse_args()
    try:
        print(run_directory(options.settings, options.ranks))
    except HydraException as error:
        sys.exit(f"error: {explained(error)}")
    except (ValueError, FileNotFoundError, OmegaConfBaseException) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

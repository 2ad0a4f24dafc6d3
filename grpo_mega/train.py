"""Trains a policy with GRPO.

    torchrun --nproc-per-node 2 -m grpo_mega.train experiment=tiny
    torchrun --nproc-per-node 4 -m grpo_mega.train experiment=tiny layout=tp2_pp2 run.name=tiny_tp2_pp2

Starting the same command again continues the run at its newest checkpoint.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback

import hydra
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from grpo_mega.config.load import config_dir, load
from grpo_mega.config.rules import check_layout
from grpo_mega.config.schema import Config
from grpo_mega.platform.stop import Stopped

FAILED = 1
"""Exit code after an unexpected error, whose traceback every rank prints."""
BAD_INPUT = 2
"""Exit code when the configuration, the data or the run directory cannot be used."""
STOPPED = 75
"""Exit code after SIGTERM or SIGUSR1, when the step in progress was finished and saved (EX_TEMPFAIL: try again)."""
INTERRUPTED = 130
"""Exit code after Ctrl-C."""


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")
def main(raw: DictConfig) -> None:
    """The entry point of every rank."""
    try:
        config = load(raw)
        check_layout(config, int(os.environ.get("WORLD_SIZE", "1")))
        train(config)
    except (ValueError, FileNotFoundError, OmegaConfBaseException) as error:
        _leave(f"error: {error}", BAD_INPUT)
    except KeyboardInterrupt:
        _leave("interrupted; the same command continues at the newest checkpoint", INTERRUPTED)
    except Stopped as stopped:
        _leave(str(stopped), STOPPED)
    except Exception:
        traceback.print_exc()
        _leave("failed; the same command continues at the newest checkpoint", FAILED)


def train(config: Config) -> None:
    """Runs one experiment to its end."""
    from grpo_mega import platform

    here = platform.start()
    platform.join_processes(here)
    # Megatron may only be imported now that the platform is prepared.
    from grpo_mega.assemble import assemble

    with assemble(config, here) as trainer:
        try:
            trainer.run()
        except (ValueError, FileNotFoundError) as error:
            # The input was accepted on every rank; what goes wrong now may be seen by one of them alone.
            raise RuntimeError(f"in step {trainer.step + 1}: {error}") from error


def _leave(message: str, code: int) -> None:
    """Ends this rank and its helpers at once, without waiting for ranks that may hang in a collective.

    torchrun ends those.
    """
    for helper in multiprocessing.active_children():
        helper.kill()
    if os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stderr)
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()

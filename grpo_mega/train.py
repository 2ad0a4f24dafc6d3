"""Trains a policy with GRPO.

    torchrun --nproc-per-node 2 -m grpo_mega.train experiment=tiny
    torchrun --nproc-per-node 4 -m grpo_mega.train experiment=tiny layout=tp2_pp2 run.name=tiny_tp2_pp2

Starting the same command again continues the run at its newest checkpoint.
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
from functools import partial
from itertools import chain
from pathlib import Path

from grpo_mega.config.help import answer
from grpo_mega.dry_run import OPTION
from grpo_mega.dry_run import main as dry_run

if __name__ == "__main__":
    answer(sys.argv[1:])  # before torch is imported, which takes seconds
    if OPTION in sys.argv:
        sys.exit(dry_run(sys.argv[1:]))

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from grpo_mega import platform
from grpo_mega.config.inputs import check_inputs
from grpo_mega.config.load import config_dir, explained, load, prepare
from grpo_mega.config.rules import check_backend, check_layout
from grpo_mega.config.schema import Config
from grpo_mega.data import build_data
from grpo_mega.observe.heartbeat import mark_failed, mark_refused
from grpo_mega.platform.orphans import end_with_launcher
from grpo_mega.platform.stop import SIGNALS, Stopped
from grpo_mega.reward.compose import build_reward
from grpo_mega.reward.scorable import check_problems
from grpo_mega.reward.truths import why_unreachable
from grpo_mega.rollout.sglang.release import check_installed

FAILED = 1
"""Exit code after an unexpected error, or when something called sys.exit; every rank prints the traceback."""
BAD_INPUT = 2
"""Exit code when the configuration, the data or the run directory cannot be used."""
STOPPED = 75
"""Exit code after SIGTERM or SIGUSR1, when the run's progress is saved (EX_TEMPFAIL: try again)."""
INTERRUPTED = 130
"""Exit code after Ctrl-C."""
SECONDS_FOR_OTHERS = 15
"""How long rank 0 waits for the other ranks to meet the same bad input, if a launcher waits for their reports."""
SECONDS_FOR_RANK_0 = 10
"""How long the other ranks then wait for rank 0 to print the error."""


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")
def main(raw: DictConfig) -> None:
    """The entry point of every rank."""
    try:
        config = load(raw)
        check_layout(config, int(os.environ.get("WORLD_SIZE", "1")))
        check_installed(config.rollout)
        check_inputs(config)
        train(config)
    except (ValueError, FileNotFoundError, OmegaConfBaseException) as error:
        _refuse(f"error: {error}")
    except KeyboardInterrupt:
        _leave(
            "interrupted; the same command continues at the newest checkpoint, or starts over if there is none yet",
            INTERRUPTED,
        )
    except Stopped as stopped:
        _leave(str(stopped), STOPPED)
    except (Exception, SystemExit) as error:  # when something calls sys.exit, the run is not completed either
        mark_failed(error)
        logging.getLogger("uncaught").critical("this rank ends", exc_info=True)
        traceback.print_exc()
        _leave(str(error) if isinstance(error, FailedInStep) else "failed before the first step", FAILED)


class FailedInStep(Exception):
    """An error after training had begun; the message is where it failed, and what the same command will do."""

    def __init__(self, where: str, newest: Path | None) -> None:
        after = (
            f"; the same command continues at the newest checkpoint, {newest}" if newest else ", nothing is saved yet"
        )
        super().__init__(f"failed {where}{after}")


def train(config: Config) -> None:
    """Runs one experiment to its end."""
    data = build_data(config, partial(why_unreachable, config.reward.terms))
    check_problems(config.reward.terms, chain(data.problems, data.validation, data.test))
    reward = build_reward(config.reward, config.run.seed)
    for number in SIGNALS:  # until the run takes them over, there is nothing to save
        signal.signal(number, lambda *_: _leave("stopped before the first step", STOPPED))
    started = platform.start()
    check_backend(config, started.backend)
    platform.join_processes(started, config.cluster.timeout_seconds)
    # Megatron may only be imported now that the platform is prepared.
    from grpo_mega.assemble import assemble

    with assemble(config, started, data, reward) as run:
        try:
            run.execute()
        except Stopped:
            raise
        except (ValueError, FileNotFoundError) as error:
            if not run.begun:  # such as a damaged base model in the cache: still bad input, refused on every rank
                raise
            raise FailedInStep(run.where(), run.newest) from error
        except (Exception, SystemExit) as error:
            # The input was accepted on every rank; from now on an error may occur on one of them alone.
            raise FailedInStep(run.where(), run.newest) from error


def _refuse(message: str) -> None:
    """Ends this rank because of bad input. Usually all ranks have the same error, and only rank 0 prints it.

    If another rank ended first, torchrun would end rank 0 before it printed anything. So the others wait until torchrun
    ends them because rank 0 has ended. A rank that is not ended is the only one with the error, and prints it itself.
    """
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    mark_refused(int(os.environ.get("WORLD_SIZE", "1")), SECONDS_FOR_OTHERS)
    if rank != "0":
        time.sleep(SECONDS_FOR_RANK_0)
        print(f"rank {rank}: {message}", file=sys.stderr)
    _leave(message, BAD_INPUT)


def _leave(message: str, code: int) -> None:
    """Ends this rank and its helper processes at once, with a message from rank 0.

    It does not wait for ranks that may hang in a collective: torchrun ends those.
    """
    for helper in multiprocessing.active_children():
        helper.kill()
    if os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stderr)
    sys.stderr.flush()
    os._exit(code)


def run() -> None:
    """Calls `main`, and reports what hydra refuses in the same form as other bad input."""
    end_with_launcher()
    faulthandler.register(signal.SIGUSR2)  # prints the stacks of all threads, and continues
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise, do not print
    try:
        prepare(sys.argv[1:])
        main()
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # a ValueError of hydra's own, too
        _refuse(f"error: {explained(error, sys.argv[1:])}")
    _end()


def _end() -> None:
    """Ends this rank without destroying its objects one by one, which takes seconds, nor waiting for threads."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    run()

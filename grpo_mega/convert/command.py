"""Shared parts of the tools that read a run's model: options, and start and end on every rank.

Tools end as training does (`grpo_mega.observe.launcher`), so that a launcher can watch them.
"""

from __future__ import annotations

import argparse
import faulthandler
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

from grpo_mega import platform
from grpo_mega.observe.launcher import FAILED, STOPPED, leave, mark_failed, refuse
from grpo_mega.platform.orphans import end_with_launcher
from grpo_mega.platform.stop import Stopped

DONE = 0


def parser_of(description: str, sources: str, models: tuple[str, ...], default: str | None) -> argparse.ArgumentParser:
    """A parser with the options that select the model to read: the source, --model and --config.

    Args:
        description: The tool's docstring, printed verbatim.
        sources: Kinds of sources, such as RUN|CHECKPOINT.
        models: Values of --model.
        default: Default of --model; None for the model that the run itself evaluates.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar=sources, help="where the model is")
    named = default or "the one that its evaluations are about"
    parser.add_argument("--model", choices=models, default=default, help=f"which model of a run ({named})")
    parser.add_argument("--config", type=Path, metavar="FILE", help="config.yaml of the run (the run directory's)")
    return parser


def run(work: Callable[[platform.Platform], str], again: str) -> int:
    """Joins the ranks, runs `work` on each, and prints its result on one; returns the exit code.

    A ValueError or FileNotFoundError ends the process with exit code 2, `Stopped` with 75, a RuntimeError is exit code
    1; one rank prints the message.

    Args:
        work: Work of the tool; when one rank raises, all must raise.
        again: Sentence about the state after a RuntimeError, and how to continue.
    """
    end_with_launcher()
    # On SIGUSR2 the process prints the stacks of all threads and continues.
    faulthandler.register(signal.SIGUSR2)
    for library in ("megatron", "torch"):
        warnings.filterwarnings("ignore", module=library)
    here = platform.start()
    platform.join_processes(here)
    import torch.distributed as dist

    try:
        result = work(here)
    except (ValueError, FileNotFoundError) as error:
        refuse(f"error: {error}")
    except Stopped as stopped:
        leave(str(stopped), STOPPED)
    except RuntimeError as error:
        mark_failed(error)
        if dist.get_rank() == 0:
            print(f"error: {error}. {again}", file=sys.stderr)
        return FAILED
    if dist.get_rank() == 0:
        print(result)
    dist.destroy_process_group()
    return DONE

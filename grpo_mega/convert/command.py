"""What the tools that read a model of a run have in common: options, and how they begin and end on every rank.

They end as training does (`grpo_mega.observe.leave`), so that a launcher can watch them.
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
from grpo_mega.observe.heartbeat import mark_failed
from grpo_mega.observe.leave import FAILED, STOPPED, leave, refuse
from grpo_mega.platform.orphans import end_with_launcher
from grpo_mega.platform.stop import Stopped

DONE = 0


def parser_of(description: str, sources: str, models: tuple[str, ...], default: str | None) -> argparse.ArgumentParser:
    """A parser with the options that say which model is read: the source, --model and --config.

    Args:
        description: The tool's docstring, printed as it is.
        sources: What the source may be, such as RUN|CHECKPOINT.
        models: What --model may be.
        default: What it is when it is not given; None for the one that the run's own evaluations are about.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar=sources, help="where the model is")
    named = default or "the one that its evaluations are about"
    parser.add_argument("--model", choices=models, default=default, help=f"which model of a run ({named})")
    parser.add_argument("--config", type=Path, metavar="FILE", help="config.yaml of the run (the run directory's)")
    return parser


def run(work: Callable[[platform.Platform], str], again: str) -> int:
    """Joins the ranks, does the work on each, and prints what it returns on one; returns the exit code.

    A ValueError or FileNotFoundError ends the process with exit code 2, `Stopped` with 75, a RuntimeError is exit code
    1; one rank prints it.

    Args:
        work: What the tool does; every rank raises what one raises.
        again: What a RuntimeError leaves and how to go on, as a sentence.
    """
    end_with_launcher()
    faulthandler.register(signal.SIGUSR2)  # prints the stacks of all threads, and continues
    for library in ("megatron", "torch"):
        warnings.filterwarnings("ignore", module=library)
    here = platform.start()
    platform.join_processes(here)
    import torch.distributed as dist

    try:
        said = work(here)
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
        print(said)
    dist.destroy_process_group()
    return DONE

"""Trains a policy with GRPO, or a reward model.

    torchrun --nproc-per-node 2 -m grpo_mega.train experiment=tiny
    torchrun --nproc-per-node 4 -m grpo_mega.train experiment=tiny layout=tp2_pp2 run.name=tiny_tp2_pp2

Starting the same command again resumes the run from its newest checkpoint.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import traceback
from functools import partial
from itertools import chain
from pathlib import Path

from grpo_mega.config.help import answer
from grpo_mega.forecast.dry_run import OPTION
from grpo_mega.forecast.dry_run import main as dry_run
from grpo_mega.observe import waiting
from grpo_mega.observe.launcher import end_with_code_of, open_streams

if __name__ == "__main__":
    open_streams()
    # Help is printed before torch is imported, which takes seconds.
    answer(sys.argv[1:])
    if OPTION in sys.argv:
        end_with_code_of(dry_run)
    # The console appears only after the imports, seconds later.
    if os.environ.get("RANK", "0") == "0":
        waiting.begin("grpo_mega is starting: libraries, settings, data")

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from grpo_mega import platform
from grpo_mega.checks import input_checks, layout_checks, refuse_all
from grpo_mega.config import listing
from grpo_mega.config.load import config_dir, explained, groups, load, prepare
from grpo_mega.config.rules import check_backend
from grpo_mega.config.schema import REWARD_MODELS, Config, RunConfig
from grpo_mega.config.typed import as_meant, with_chosen_sizes
from grpo_mega.data import Data, ExampleData, build_data, build_example_data
from grpo_mega.data.tokenizer import vocabulary
from grpo_mega.errors import InputError
from grpo_mega.observe.launcher import ALARMED, FAILED, STOPPED, finish, leave, mark_failed, refuse
from grpo_mega.observe.logs import ENDS
from grpo_mega.observe.recorder import Observers
from grpo_mega.platform.collectives import from_all_ranks, succeed_together
from grpo_mega.platform.flight import FOLDER as FLIGHT
from grpo_mega.platform.orphans import end_with_launcher
from grpo_mega.platform.stop import SIGNALS, FailedOutside, Stopped, StoppedByAlarm
from grpo_mega.reward.compose import Reward, build_reward
from grpo_mega.reward.scorable import check_curriculum, check_problems, why_unreachable
from grpo_mega.rollout.sglang.release import check_installed

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")
def main(raw: DictConfig) -> None:
    """Entry point of every rank."""
    try:
        config = load(raw)
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        refuse_all([*layout_checks(config, processes), *input_checks(config)])
        check_installed(config.rollout)
        train(config)
    except (ValueError, FileNotFoundError, OmegaConfBaseException) as error:
        refuse(f"error: {error}")
    except KeyboardInterrupt:
        leave(
            "interrupted: what came after the newest checkpoint is not saved; the same command continues there, or "
            "starts over if there is none yet",
            INTERRUPTED,
        )
    except Stopped as stopped:
        leave(str(stopped), STOPPED)
    except StoppedByAlarm as stopped:
        leave(str(stopped), ALARMED)
    except (Exception, SystemExit) as error:
        # SystemExit too: if something calls sys.exit, the run is just as incomplete. The failure is marked before
        # anything is printed, and so earlier than on the ranks that fail because this one has ended: the launcher
        # recognises the first failure by it.
        elsewhere = mark_failed(error)
        cause = (error.__cause__ if isinstance(error, FailedInStep) else error) or error
        first_line = f"{type(cause).__name__}: {cause}".partition("\n")[0]
        logging.getLogger("uncaught").critical("%s%s", ENDS, first_line, exc_info=True)
        where = str(error) if isinstance(error, FailedInStep) else "failed before the first step"
        # For an error of the user's code or data, our own stack would only hide the message; the log file has it.
        if isinstance(error, FailedInStep) and isinstance(error.__cause__, (FailedOutside, ValueError)):
            leave(f"error: {error.__cause__}\n{where}", FAILED)
        traceback.print_exc()
        leave(where, FAILED, reason="" if elsewhere else f"{first_line}\n{where}")


class FailedInStep(Exception):
    """An error after training had begun; the message says where it failed, and what the same command will do."""

    def __init__(self, where: str, newest: Path | None, flight: Path) -> None:
        after = (
            f"; the same command continues at the newest checkpoint, {newest}" if newest else ", nothing is saved yet"
        )
        super().__init__(
            f"failed {where}{after}. Stacks are in {flight.parent / 'logs'}; what each rank did last: "
            f"tools/trace.py {flight.parent} --last"
        )


def train(config: Config) -> None:
    """Runs one experiment to its end."""
    # Data is read and checked before the processes are joined and the GPU is touched: most mistakes show within
    # seconds.
    data, reward = read(config)
    # Until the run takes over the signals there is nothing to save, so they end the process at once.
    for number in SIGNALS:
        signal.signal(number, lambda *_: leave("stopped before the first step", STOPPED))
    started = platform.start()
    check_backend(config.layout, started.backend)
    flight = Path(config.run.root) / config.run.name / FLIGHT
    # torch reads these settings when it creates NCCL's groups, so they are set before.
    if started.backend == "nccl":
        platform.record_collectives(flight)
    platform.join_processes(started, config.cluster.timeout_seconds)
    # Ranks that started around midnight would otherwise train on different prompts.
    if len(days := {*from_all_ranks(lambda: config.data.date)}) > 1:
        raise InputError(
            "today's date in the prompts", f"the ranks began on {' and '.join(sorted(map(str, days)))}", "start again"
        )
    # Megatron may be imported only after the platform is prepared, so these imports cannot be at the top of the file.
    from grpo_mega.assemble import assemble
    from grpo_mega.forecast.planning.choice import choose_together

    remarks = []
    if config.layout.undecided:
        chosen = choose_together(config, started, vocabulary(config.model, data.tokenizer))
        config, remarks = chosen.config, [chosen.why]
        # Checked again: a resumed run keeps the layout that it began with, perhaps on another backend.
        check_backend(config.layout, started.backend)
    with assemble(config, started, data, reward, remarks, partial(observers, config, data, started)) as run:
        try:
            run.execute()
        except Stopped:
            raise
        except StoppedByAlarm:
            # Together, while all ranks live: torchrun would end rank 0 with the first rank that exits.
            succeed_together(partial(report, config.run))
            raise
        except (ValueError, FileNotFoundError) as error:
            # Bad input too, such as a damaged base model in the cache, which every rank refuses.
            if not run.begun:
                raise
            raise FailedInStep(run.where(), run.newest, flight) from error
        except (Exception, SystemExit) as error:
            # The input was accepted on every rank; from now on an error may occur on a single rank.
            raise FailedInStep(run.where(), run.newest, flight) from error
    # The process groups are gone by now, so no rank waits for the report.
    report(config.run)


def observers(
    config: Config, data: Data | ExampleData, started: platform.Platform, run: RunConfig, path: Path
) -> Observers:
    """Observers of the run: the console, those that its settings name and, for known GPUs, the plan's prediction."""
    import torch.distributed as dist

    from grpo_mega.forecast.planning.prediction import Prediction
    from grpo_mega.show.console.columns import columns_of
    from grpo_mega.show.observers import observers_of

    shown = dict(observers_of(run, path, columns_of(config.run, config.reward, config.algorithm, config.environment)))
    # Only runs on a known GPU, with problems, can be predicted and compared.
    if config.cluster.gpu and isinstance(data, Data):
        prompts = [len(prompt.token_ids) for prompt in data.problems or data.validation or data.test]
        shown["the plan"] = partial(
            Prediction,
            path,
            gpus=dist.get_world_size(),
            vocab_size=vocabulary(config.model, data.tokenizer),
            prompt=sum(prompts) / max(1, len(prompts)),
            allocator=started.device.type == "cuda",
        )
    return shown


def report(config: RunConfig) -> None:
    """Writes the report of the run, on the main rank."""
    if int(os.environ.get("RANK", "0")) == 0:
        waiting.begin("grpo_mega writes the report", stays=False)
        from grpo_mega.show.report.page import write_own_report

        write_own_report(Path(config.root) / config.name)
        waiting.end()


def read(config: Config) -> tuple[Data | ExampleData, Reward | None]:
    """Reads the training data: problems and the reward of their completions, or examples for a reward model."""
    if config.run.trains in REWARD_MODELS:
        return build_example_data(config), None
    data = build_data(config, partial(why_unreachable, config.reward.terms), keep=True, tell=waiting.tell)
    check_problems(config.reward.terms, chain(data.problems, data.validation, data.test))
    check_curriculum(config.data, config.reward, data.problems)
    return data, build_reward(config.reward, config.run.seed)


def run() -> None:
    """Calls `main`, and reports hydra's errors in the same form as other bad input."""
    end_with_launcher()
    # On SIGUSR2 the process prints the stacks of all threads and continues.
    faulthandler.register(signal.SIGUSR2)
    # Makes hydra raise its errors instead of printing them and exiting.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    for word in sys.argv[1:]:
        # Left to hydra, these would print hydra's own usage, or begin something else.
        if word.partition("=")[0].translate(str.maketrans("", "", "-_")) == "dryrun":
            refuse(f"error: {InputError(word, 'no such option', f'write {OPTION}')}")
        setting, _, value = word.lstrip("-").partition("=")
        section, dot, _ = setting.partition(".")
        if word.startswith("-") and (setting in groups() or (dot and section in listing.section_types())):
            fix = f"write {setting}={value or 'VALUE'}, without dashes"
            refuse(f"error: {InputError(word, 'settings are not options', fix)}")
    sys.argv[1:] = with_chosen_sizes(as_meant(sys.argv[1:]))
    try:
        main(prepare(sys.argv[1:]))
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        # Hydra also raises plain ValueErrors.
        refuse(f"error: {explained(error, sys.argv[1:])}")
    finish()


if __name__ == "__main__":
    run()

"""Being asked to stop: SIGTERM and SIGUSR1 are noted and obeyed, after saving, as soon as nothing can be lost by it.

Before the first update of a GRPO step the step is given up: it will be run again, with the same samples. Later the
update in progress is finished, and the rest of the step is saved with the checkpoint. Between the signal and the end of
the run lie at most

- in generation, the reading of the prompts of one wave and `rollout.engine.STEPS_PER_POLL` decode steps;
- the rewards of one step, one pass of log-probs or one optimizer update, when the signal falls into one of them;
- the checkpoint, if that of the state to keep is not written yet.

A signal that reaches one rank alone stops all ranks just as soon.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers and torchrun send before they kill; torchrun kills 30 seconds later."""


@contextmanager
def shielded_children() -> Iterator[None]:
    """Processes started inside never see the signals that ask this one to stop.

    Megatron writes checkpoints through helper processes that live as long as the run. Schedulers and torchrun signal
    whole process groups: without a shield the helpers die at once, and the last checkpoint cannot be written.
    """
    resource_tracker.ensure_running()  # when Python starts it later, it unblocks the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*SIGNALS, signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Interrupted(Exception):
    """Work was given up, on every rank, because some rank was asked to stop."""


class Stopped(Exception):
    """The run saved a checkpoint and stopped because it was asked to."""


class StopRequest:
    """Whether this process was asked to stop."""

    def __init__(self) -> None:
        """Nothing was asked, and no signal is noted before `listen`."""
        self.received: str | None = None

    def listen(self) -> None:
        """Takes over the signals for the rest of the process; they only leave a note, and the first one says so."""
        for number in SIGNALS:
            signal.signal(number, self._note)

    def asked(self) -> bool:
        """Whether one of the signals was received."""
        return self.received is not None

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.received is None:
            name, rank = signal.Signals(number).name, os.environ.get("RANK", "0")
            with suppress(OSError):  # past sys.stderr, in the middle of whose work the signal may have come
                os.write(2, f"rank {rank}: {name} received, stopping where nothing is lost\n".encode())
            self.received = name

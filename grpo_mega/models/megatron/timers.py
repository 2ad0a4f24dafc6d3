"""Megatron's timers as spans of the trace: the passes of each micro-batch, the sends and receives of a pipeline."""

from __future__ import annotations

from grpo_mega.platform.trace import span


class SpanTimers:
    """Timers for Megatron's `config.timers`; calling it with a name returns an object to start and stop.

    Unlike Megatron's own timers they never wait for other ranks (`barrier`).
    """

    def __init__(self) -> None:
        self._spans: dict[str, span] = {}

    def __call__(self, name: str, log_level: int = 0) -> span:
        """Returns the timer of this name; all levels are recorded."""
        return self._spans.setdefault(name, span(name))

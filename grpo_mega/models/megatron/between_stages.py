"""What Megatron's schedules get from us: messages between stages whose shapes are known, and timers that trace.

When micro-batches differ in length, Megatron's stages send each other the shape of what they are about to send, and the
host waits for every such message. Here all ranks of a replica have its whole plan of micro-batches, so each computes
the shapes beforehand, in the order in which the schedule asks for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection

from grpo_mega.platform.trace import span

GROUPS = ["tp", "cp", "pp", "embd", "pos_embd", "dp_cp"]
"""Megatron's names of the process groups that its schedules use."""
Shape = tuple[int, int, int]


class KnownShapes(P2PCommunicator):
    """Megatron's messages between stages, with shapes that this rank knows. Each pass makes a new one.

    The first stage gets no hidden states for its first layers, the last one no gradients for its last ones.
    """

    def __init__(self, config: ModelParallelConfig, shapes: Sequence[Shape]) -> None:
        """`shapes` are those of the hidden states [rows, 1, hidden] of this rank's micro-batches, in their order."""
        super().__init__(parallel_state.get_pipeline_model_parallel_group(), config)
        stages, stage = self.pp_group.size(), self.pp_group.rank()
        pieces = self.virtual_pipeline_model_parallel_size or 1
        # (micro-batch, piece of the model) in the order of the forward pass. The backward pass takes the pieces in
        # reverse, so there piece 0 of the table is the last one.
        order = get_schedule_table(len(shapes), pieces, stages)
        self._coming = deque(shapes[micro] for micro, piece in order if piece or stage > 0)
        self._returning = deque(shapes[micro] for micro, piece in order if piece or stage < stages - 1)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape | None, Shape | None]:
        # Called once for each message, in the order of the schedule, so the next shape is always the first of its
        # queue.
        return self._coming.popleft() if recv_prev else None, self._returning.popleft() if recv_next else None


def between_stages(config: ModelParallelConfig, shapes: Sequence[Shape]) -> dict[str, Any]:
    """Arguments of Megatron's schedules that have them send and receive hidden states of these shapes."""
    return {
        "p2p_communicator": KnownShapes(config, shapes),
        "pg_collection": ProcessGroupCollection.use_mpu_process_groups(GROUPS),
    }


class SpanTimers:
    """Timers for Megatron's `config.timers`; calling it with a name returns an object to start and stop.

    Unlike Megatron's own timers they never wait for other ranks (`barrier`).
    """

    def __init__(self) -> None:
        self._spans: dict[str, span] = {}

    def __call__(self, name: str, log_level: int = 0) -> span:
        """Returns the timer of this name; all levels are recorded."""
        return self._spans.setdefault(name, span(name))

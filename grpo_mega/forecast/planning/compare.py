"""The plan of a step beside what a run has measured.

    python -m grpo_mega.forecast.planning.compare CONFIG MEASURED OUT --parent ID

The run itself starts it after a few steps (`prediction.py`), with its config.yaml and, as JSON, what `Measured` has.
Answers are as long as they were in these steps, so that only the planner's own constants are compared, not its guess of
lengths.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_mega import platform
from grpo_mega.config.load import load_recorded
from grpo_mega.config.recorded import plain
from grpo_mega.config.schema import ClusterConfig, Config
from grpo_mega.forecast.planning.lines import of_the_trainer
from grpo_mega.platform.files import write_atomic
from grpo_mega.platform.orphans import come_after

PHASES = {
    "generate": ("generation",),
    "reward_model": ("scores of the reward model",),
    "logprobs": ("log-probs of the reference policy", "log-probs of the old policy"),
    "teacher": ("log-probs of the teacher",),
    "values": ("values of the critic",),
    "update": ("updates", "updates of the critic"),
    "sync": ("weights to the engines", "turns"),
}
"""Phase of a run's timer -> phases of `time.py` that it covers, in the order of a step."""
WHOLE = "step"
"""What all phases together are called, here and in metrics."""


@dataclass(frozen=True)
class Measured:
    """What some steps of a run took.

    Attributes:
        steps: Their numbers.
        gpus, vocab_size: Of the run.
        prompt, answer: Mean tokens of a prompt, and of an answer.
        signal: Share of groups with signal.
        seconds: By the timer's phase, mean of the steps, and `WHOLE`.
        peak: Most bytes that torch's allocator gave to a rank's tensors; None where there is no GPU.
    """

    steps: tuple[int, ...]
    gpus: int
    vocab_size: int
    prompt: float
    answer: float
    signal: float
    seconds: dict[str, float]
    peak: float | None


def main(config: Path, measured: Measured, out: Path) -> None:
    """Plans the run of a config.yaml, and writes both as JSON, atomically."""
    warnings.filterwarnings("ignore", module="megatron|torch")
    found = compare(load_recorded(plain(config.read_text())), measured)
    write_atomic(out, json.dumps(found, indent=1, allow_nan=False) + "\n")


def compare(config: Config, measured: Measured) -> dict[str, Any]:
    """Planned and measured seconds and memory, as JSON.

    Raises:
        ValueError: The run cannot be planned, see `plan.plan` and `time.step_time`.
    """
    platform.start_planning()
    from grpo_mega.forecast.planning.hardware import machines_of
    from grpo_mega.forecast.planning.hours import cache_room
    from grpo_mega.forecast.planning.plan import plan, roles_of
    from grpo_mega.forecast.planning.time import Assumed, step_time

    config = replace(
        config,
        cluster=_cluster(config.cluster, measured.gpus),
        model=replace(config.model, vocab_size=measured.vocab_size),
    )
    machines = machines_of(config.cluster, measured.gpus)
    if machines is None:
        raise ValueError("cluster.gpu is null: nothing says which GPU it is")
    planned, roles = plan(config), roles_of(config, measured.vocab_size, measured.gpus)
    room, longest = cache_room(config, planned, measured.vocab_size), _longest(config, measured.steps[-1])
    # `Assumed` has the mean under the first limit, and takes the same share of a later one.
    answer = measured.answer / longest * config.rollout.max_new_tokens
    assumed = Assumed(answer, round(measured.prompt), measured.signal)
    step = step_time(config, roles, measured.vocab_size, machines, room, longest, assumed)
    return {
        "gpu": config.cluster.gpu,
        "gpus": measured.gpus,
        "steps": [*measured.steps],
        "prompt": assumed.prompt,
        "answer": measured.answer,
        "seconds": beside({phase.name: phase.seconds for phase in step.phases}, measured.seconds),
        "memory": [max(of_the_trainer(lines) for lines in planned["memory"]), measured.peak],
    }


def beside(planned: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, list[float | None]]:
    """{phase of the timer: [seconds planned, seconds measured]}; None for what is not planned, or did not happen."""
    rows: dict[str, list[float | None]] = {}
    for phase, covered in PHASES.items():
        seconds = [planned[name] for name in covered if name in planned]
        if seconds or phase in measured:
            rows[phase] = [sum(seconds) if seconds else None, measured.get(phase)]
    unplanned = {phase: [None, seconds] for phase, seconds in measured.items() if phase not in {*PHASES, WHOLE}}
    return rows | unplanned | {WHOLE: [sum(planned.values()), measured[WHOLE]]}


def _cluster(cluster: ClusterConfig, gpus: int) -> ClusterConfig:
    """The machines of a run on so many GPUs."""
    nodes, rest = divmod(gpus, cluster.gpus_per_node)
    return replace(cluster, nodes=1, gpus_per_node=gpus) if rest else replace(cluster, nodes=nodes)


def _longest(config: Config, step: int) -> int:
    """Tokens that an answer of a step may have."""
    rollout = config.rollout
    later = rollout.longer_from_step is not None and step > rollout.longer_from_step
    return (rollout.longer_max_new_tokens if later else None) or rollout.max_new_tokens


if __name__ == "__main__":
    *words, _, parent = sys.argv[1:]
    come_after(int(parent))
    main(Path(words[0]), Measured(**json.loads(words[1])), Path(words[2]))

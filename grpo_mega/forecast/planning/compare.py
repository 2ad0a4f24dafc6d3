"""Compares the plan of a step with the measurements of a run.

    python -m grpo_mega.forecast.planning.compare CONFIG MEASURED OUT --parent ID

The run starts it after a few steps (`prediction.py`), with its config.yaml and the fields of `Measured` as JSON. The
plan assumes the measured lengths of completions, so only the planner's constants are compared, not its guess of
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
from grpo_mega.config.schema import Config
from grpo_mega.errors import InputError
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
    "sync": ("weights to the engines", "offload"),
}
"""Phase of a run's timer -> phases of `time.py` that it covers, in the order of a step."""
WHOLE = "step"
"""Name of all phases together, here and in metrics."""


@dataclass(frozen=True)
class Measured:
    """Measurements of some steps of a run.

    Attributes:
        steps: Numbers of the steps.
        gpus, vocab_size: GPUs and vocabulary of the run.
        prompt, completion: Mean tokens of a prompt, and of a completion.
        signal: Share of groups with signal.
        seconds: {phase of the timer, or `WHOLE`: mean seconds}.
        peak: Peak bytes of a rank's tensors in torch's allocator; None without a GPU.
    """

    steps: tuple[int, ...]
    gpus: int
    vocab_size: int
    prompt: float
    completion: float
    signal: float
    seconds: dict[str, float]
    peak: float | None


def main(config: Path, measured: Measured, out: Path) -> None:
    """Plans the run of a config.yaml, and writes both as JSON, atomically."""
    warnings.filterwarnings("ignore", module="megatron|torch")
    compared = compare(load_recorded(plain(config.read_text())), measured)
    write_atomic(out, json.dumps(compared, indent=1, allow_nan=False) + "\n")


def compare(config: Config, measured: Measured) -> dict[str, Any]:
    """Planned and measured seconds and memory, as JSON.

    Raises:
        InputError: The run cannot be planned, see `plan.plan` and `time.step_time`.
    """
    platform.start_planning()
    from grpo_mega.forecast.planning.hours import cache_room, job_of
    from grpo_mega.forecast.planning.plan import plan
    from grpo_mega.forecast.planning.time import Assumed, step_time

    if config.cluster.gpu is None:
        raise InputError("cluster.gpu=null", "no GPU is named to plan for", "set cluster.gpu, or choose cluster=h100")
    nodes, rest = divmod(measured.gpus, config.cluster.gpus_per_node)
    cluster = replace(config.cluster, nodes=nodes)
    # The job may have had another number of GPUs per machine than its settings say.
    if rest:
        cluster = replace(cluster, nodes=1, gpus_per_node=measured.gpus)
    config = replace(config, cluster=cluster, model=replace(config.model, vocab_size=measured.vocab_size))
    planned = plan(config)
    job = job_of(config, planned)
    assert job is not None  # a GPU is named
    room, rollout = cache_room(job, planned["engine"]), config.rollout
    later = rollout.longer_from_step is not None and measured.steps[-1] > rollout.longer_from_step
    longest = (rollout.longer_max_new_tokens if later else None) or rollout.max_new_tokens
    # `Assumed` has the mean under the first limit, and takes the same share of a later one.
    completion = measured.completion / longest * rollout.max_new_tokens
    assumed = Assumed(completion, round(measured.prompt), measured.signal)
    step = step_time(job, room, longest, assumed)
    return {
        "gpu": config.cluster.gpu,
        "gpus": measured.gpus,
        "steps": [*measured.steps],
        "prompt": assumed.prompt,
        # The report reads this name in the planned.json of any run, so it stays.
        "answer": measured.completion,
        "seconds": seconds_of_phases({phase.name: phase.seconds for phase in step.phases}, measured.seconds),
        "memory": [max(of_the_trainer(lines) for lines in planned["memory"]), measured.peak],
    }


def seconds_of_phases(planned: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, list[float | None]]:
    """{phase of the timer: [seconds planned, seconds measured]}; None for a phase not planned, or not measured."""
    rows: dict[str, list[float | None]] = {}
    for phase, covered in PHASES.items():
        seconds = [planned[name] for name in covered if name in planned]
        if seconds or phase in measured:
            rows[phase] = [sum(seconds) if seconds else None, measured.get(phase)]
    unplanned = {phase: [None, seconds] for phase, seconds in measured.items() if phase not in {*PHASES, WHOLE}}
    return rows | unplanned | {WHOLE: [sum(planned.values()), measured[WHOLE]]}


if __name__ == "__main__":
    # The last two words are --parent and the id of the run's process, without which this one must not go on.
    *words, _, parent = sys.argv[1:]
    come_after(int(parent))
    main(Path(words[0]), Measured(**json.loads(words[1])), Path(words[2]))

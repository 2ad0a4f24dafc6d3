"""Seconds of a step by phase, and GPU-hours of a run: counted work over the rates that others measured.

The phases are those of the stages (`stages/grpo.py`, `stages/ppo.py`): answers are generated, log-probs computed as the
algorithm needs them, updates made, weights pushed, GPUs handed over. How long answers are is assumed. Not in it: a
reward that takes longer than an engine's turn, evaluations, checkpoints, supervised steps before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from grpo_mega.config.passes import is_on_policy
from grpo_mega.config.schema import Config
from grpo_mega.forecast.planning.counting import dense_layers, gated, model_numbers, numbers
from grpo_mega.forecast.planning.generation import Decoder, Generated, decoder_of, draws, simulate
from grpo_mega.forecast.planning.hardware import Machines
from grpo_mega.forecast.planning.inventory import Role
from grpo_mega.forecast.planning.lengths import SHARE, answer_lengths
from grpo_mega.forecast.planning.memory import held, leaves, weight_bytes
from grpo_mega.forecast.planning.training_time import Parts, Sequences, Slots, after_passes, micro_batches, passes
from grpo_mega.rollout.sglang.arguments import own_experts

PROMPT = 200
"""Tokens of a prompt, unless they are given."""
REQUESTS = 2048
"""Sequences that SGLang lets run at once, unless max_running_requests says otherwise."""
SAMPLED = 1024
"""Sequences at most whose micro-batches are made; those of more are counted in proportion."""


@dataclass(frozen=True)
class Assumed:
    """What a plan of time has to be told.

    Attributes:
        answer: Mean tokens of an answer under `rollout.max_new_tokens`; None for `lengths.SHARE` of it. Where longer
            answers are allowed later, the same share of that limit.
        prompt: Tokens of a prompt.
        signal: Share of groups that have signal; of no effect where all count (`algorithm.groups_without_signal`).
    """

    answer: float | None = None
    prompt: int = PROMPT
    signal: float = 1.0

    def mean(self, config: Config, longest: int) -> float:
        """Mean tokens of answers that may have up to `longest`."""
        if self.answer is None:
            return max(1.0, SHARE * longest)
        return self.answer / config.rollout.max_new_tokens * longest

    def groups(self, config: Config) -> tuple[int, int]:
        """Groups that a step draws, and those of them that it learns from.

        Raises:
            ValueError: `signal` is not between 0 and 1.
        """
        if not 0 <= self.signal <= 1:  # NaN, too
            raise ValueError(f"a share of {self.signal:g} of groups with signal is not between 0 and 1")
        algorithm = config.algorithm
        wanted = drawn = algorithm.prompts_per_step
        if algorithm.groups_without_signal == "count":
            return drawn, drawn
        if algorithm.groups_without_signal == "refill":
            drawn = math.ceil(wanted / max(self.signal, 1 / algorithm.refill_limit) - 1e-9)  # 8 / (8 / 11) is above 11
        return drawn, min(wanted, max(1, round(self.signal * drawn)))

    def answers(self, config: Config, longest: int) -> tuple[Sequence[int], Sequence[int]]:
        """Lengths of a step's answers of up to `longest` tokens: all, and those that it learns from.

        Raises:
            ValueError: The mean length is beyond the longest, or see `groups`.
        """
        drawn, learned = self.groups(config)
        size = config.algorithm.group_size
        lengths = answer_lengths(drawn * size, self.mean(config, longest), longest)
        return lengths, lengths[: learned * size]


@dataclass(frozen=True)
class Phase:
    """A part of a step.

    Attributes:
        name: What happens.
        parts: {what takes time: seconds}; they add up.
        slots: Micro-batches of it, where it is a pass of the trainer.
    """

    name: str
    parts: Parts
    slots: Slots | None = None

    @property
    def seconds(self) -> float:
        """Seconds of the phase."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class PlannedRollout:
    """Generation of a step.

    Attributes:
        engines: How many engines work.
        slowest: What became of the sequences of the one that ends last.
        level: Seconds if all answers had the mean length.
        alone: Seconds of the longest answer when nothing else runs: more GPUs do not make it shorter.
        evicted: Sequences of all engines that lost their cache and were read again.
        decoder: How fast an engine is.
    """

    engines: int
    slowest: Generated
    level: float
    alone: float
    evicted: int
    decoder: Decoder = field(repr=False)


@dataclass(frozen=True)
class StepTime:
    """A step, or all steps with the same limit on answers.

    Attributes:
        steps: How many there are.
        longest: Tokens that an answer may have.
        answer: Mean tokens of an answer.
        groups: Groups that are drawn.
        tokens: Tokens of all sequences of a step, prompts included.
        phases: In the order in which they come.
        rollout: More about generation.
    """

    steps: int
    longest: int
    answer: float
    groups: int
    tokens: int
    phases: list[Phase]
    rollout: PlannedRollout

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(phase.seconds for phase in self.phases)


def run_time(
    config: Config, roles: Sequence[Role], vocab_size: int, machines: Machines, room: float, assumed: Assumed
) -> list[StepTime]:
    """The steps of a run: one kind, or two when longer answers are allowed from some step on.

    Args:
        config: The run's.
        roles: Its models, see `plan.roles_of`.
        vocab_size: Tokens of the model.
        machines: Its GPUs.
        room: Tokens that the caches of an engine hold, together.
        assumed: How long prompts and answers are.

    Raises:
        ValueError: An engine has no room for the longest sequence, or the mean length is beyond the longest.
    """
    rollout, steps = config.rollout, config.run.steps
    later = rollout.longer_from_step
    kinds = [(steps if later is None else min(later, steps), rollout.max_new_tokens)]
    if later is not None and later < steps:
        kinds.append((steps - later, rollout.longer_max_new_tokens or rollout.max_new_tokens))
    return [
        step_time(config, roles, vocab_size, machines, room, longest, assumed, count)
        for count, longest in kinds
        if count
    ]


def step_time(
    config: Config,
    roles: Sequence[Role],
    vocab_size: int,
    machines: Machines,
    room: float,
    longest: int,
    assumed: Assumed,
    steps: int = 1,
) -> StepTime:
    """A step whose answers may have up to `longest` tokens; see `run_time`."""
    answers, learned = assumed.answers(config, longest)
    rollout = generate(config, vocab_size, machines, answers, assumed.prompt, room)
    phases = [
        as_phase(rollout),
        *trainer_phases(config, roles, machines, learned, assumed.prompt),
        *hand_over_phases(config, vocab_size, machines, roles),
    ]
    tokens = sum(answers) + assumed.prompt * len(answers)
    groups, _ = assumed.groups(config)
    return StepTime(steps, longest, assumed.mean(config, longest), groups, tokens, phases, rollout)


def trainer_phases(
    config: Config, roles: Sequence[Role], machines: Machines, answers: Sequence[int], prompt: int
) -> list[Phase]:
    """The trainer's passes over answers of these lengths: those before the updates, and the updates."""
    return [
        *_before_updates(config, roles, machines, answers, prompt),
        *_updates(config, roles, machines, answers, prompt),
    ]


def hand_over_phases(config: Config, vocab_size: int, machines: Machines, roles: Sequence[Role]) -> list[Phase]:
    """New weights for the engines, and GPUs that change hands; none of either without engines of their own."""
    phases = [
        Phase("weights to the engines", push(config, vocab_size, machines)),
        Phase("turns", hand_over(config, roles, machines)),
    ]
    return [phase for phase in phases if phase.parts]


def as_phase(rollout: PlannedRollout) -> Phase:
    """Generation as a phase: what it would take if all answers had the mean length, and the tail."""
    level = rollout.level
    return Phase("generation", {"answers of the mean length": level, "tail": rollout.slowest.seconds - level})


def generation_phase(
    config: Config, vocab_size: int, machines: Machines, room: float, assumed: Assumed
) -> Phase | None:
    """Generation of a step with the longest answers of the run; None when an engine has no room for one."""
    longest = config.rollout.longer_max_new_tokens or config.rollout.max_new_tokens
    if room < longest + assumed.prompt:
        return None
    answers, _ = assumed.answers(config, longest)
    return as_phase(generate(config, vocab_size, machines, answers, assumed.prompt, room))


def generate(
    config: Config, vocab_size: int, machines: Machines, answers: Sequence[int], prompt: float, room: float
) -> PlannedRollout:
    """Generation of answers of these lengths by the run's engines, which get as many each.

    Answers of more groups than `algorithm.prompts_per_step` are submitted later: those refill groups without signal.
    """
    decoder = decoder_of(config, vocab_size, machines)
    if config.rollout.engine == "sglang":
        engines = max(1, machines.gpus // config.rollout.sglang.tp)
        most = config.rollout.sglang.arguments.get("max_running_requests") or REQUESTS * decoder.caches
    else:
        engines = machines.gpus // (config.layout.tp * config.layout.pp * config.layout.cp)
        most = config.rollout.concurrent_sequences
    size = config.algorithm.group_size
    first = answers[: config.algorithm.prompts_per_step * size]
    later = answers[len(first) :]

    def simulated(at_first: Sequence[int], then: Sequence[int]) -> Generated:
        lengths = [*at_first, *then]
        return simulate(decoder, lengths, prompt, room, most, draws(lengths, len(at_first), size))

    busy = min(engines, len(first))
    shares = [(first[number::busy], later[number::busy]) for number in range(busy)]
    ended = [simulated(*share) for share in shares]
    mean = max(1, round(sum(answers) / len(answers)))
    level = simulated([mean] * len(shares[0][0]), [mean] * len(shares[0][1])).seconds
    slowest = max(ended, key=lambda engine: engine.seconds)
    alone = max(answers) / decoder.accepted * decoder.step(1, max(answers) / 2 + prompt)
    return PlannedRollout(
        engines, slowest, min(level, slowest.seconds), alone, sum(engine.evicted for engine in ended), decoder
    )


def _before_updates(
    config: Config, roles: Sequence[Role], machines: Machines, answers: Sequence[int], prompt: int
) -> list[Phase]:
    """The passes without gradients: of whatever models the algorithm compares with, and of the old policy."""
    policy = roles[0]
    made = []
    for role in roles[1:]:
        own = replace(config, model=role.model) if role.model else config
        name = {"critic": "values of the critic", "reward model": "scores of the reward model"}.get(role.name)
        made.append((name or f"log-probs of the {role.name}", own, role, name is None))
    if not is_on_policy(config):
        made.append(("log-probs of the old policy", config, policy, True))
    phases = []
    for name, own, role, head in made:
        slots = _passes(own, role, machines, answers, prompt, training=False, head=head)
        phases.append(Phase(name, slots.parts, slots))
    return phases


def _updates(
    config: Config, roles: Sequence[Role], machines: Machines, answers: Sequence[int], prompt: int
) -> list[Phase]:
    """The updates of all models that are trained, every epoch's."""
    algorithm = config.algorithm
    updates = algorithm.epochs * algorithm.mini_batches
    share = answers[: max(1, len(answers) // algorithm.mini_batches)]
    phases = []
    for role in (role for role in roles if role.trained):
        slots = _passes(config, role, machines, share, prompt, training=True, head=role is roles[0])
        one = (slots.seconds - slots.parts["bubble"]) / slots.micros
        parts = slots.parts | after_passes(config, role.stages[slots.stage], machines, one)
        name = "updates" if role is roles[0] else f"updates of the {role.name}"
        phases.append(Phase(name, {part: updates * seconds for part, seconds in parts.items()}, slots))
    return phases


def _passes(
    config: Config,
    role: Role,
    machines: Machines,
    answers: Sequence[int],
    prompt: int,
    training: bool,
    head: bool,
) -> Slots:
    """A pass over sequences, of which at most `SAMPLED` are put into micro-batches."""
    layout, size = config.layout, config.algorithm.group_size
    replicas = machines.gpus // (layout.tp * layout.pp * layout.cp)
    few = answers[: max(SAMPLED, 8 * replicas)]
    work = Sequences(
        lengths=tuple(answer + prompt for answer in few),
        prompts=tuple(number // size for number in range(len(few))),
        prompt_tokens=(prompt,) * len(few),
    )
    slots = passes(config, role.stages, micro_batches(config, work, replicas), machines, training, head)
    more = len(answers) / len(few)
    parts = {name: seconds * (1 if name == "bubble" else more) for name, seconds in slots.parts.items()}
    return Slots(round(slots.micros * more), parts, slots.stage)


def push(config: Config, vocab_size: int, machines: Machines) -> Parts:
    """Seconds in which the engines get new weights: what passes through a GPU over what others' links reached.

    With `ep_size` a GPU gets its own experts only, otherwise all of the model does.
    """
    if config.rollout.engine != "sglang":
        return {}
    model, sglang = config.model, config.rollout.sglang
    layers = model.layers - dense_layers(model)
    routed = layers * model.moe.experts * numbers(gated(model.hidden, model.moe.ffn_hidden))
    others = model_numbers(model, vocab_size) - routed
    own = sglang.tp if own_experts(sglang, model.moe.experts, 0) is not None else 1
    rate = machines.rates.push if sglang.first_gpu is None else machines.rates.push_apart
    received = weight_bytes(config) * (others + routed / own)
    return {"bytes": received / rate, "around them": machines.rates.push_fixed}


def hand_over(config: Config, roles: Sequence[Role], machines: Machines) -> Parts:
    """Seconds in which GPUs change hands twice: what the trainer holds goes to main memory and comes back."""
    if config.rollout.engine != "sglang" or config.rollout.sglang.first_gpu is not None:
        return {}
    most = max(leaves(held(config, [*roles], number)) for number in range(config.layout.pp))
    moved = 2 * most / (machines.gpu.host * machines.rates.host)
    return {"to main memory and back": moved, "engines wake and sleep": machines.rates.turn}

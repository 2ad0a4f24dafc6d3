"""Seconds of a step by phase, and of a run: counted work over the rates that others measured.

The phases are those of the stages (`stages/grpo.py`, `stages/ppo.py`): completions are generated, log-probs computed
where the algorithm needs them, updates made, weights pushed, GPUs handed over. Lengths of completions are assumed. Not
included: rewards that take longer than an engine's turn, evaluations, checkpoints, earlier supervised steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from grpo_mega.config.derived import skips_old_pass
from grpo_mega.config.schema import AlgorithmConfig, Config, RolloutConfig
from grpo_mega.errors import InputError
from grpo_mega.forecast.planning.counting import dense_layers, gated, model_numbers, numbers
from grpo_mega.forecast.planning.generation import (
    SHARE,
    Decoder,
    EngineSet,
    Generated,
    completion_lengths,
    decoder_of,
    draws,
    simulate,
)
from grpo_mega.forecast.planning.hardware import Machines
from grpo_mega.forecast.planning.inventory import Role
from grpo_mega.forecast.planning.memory import Trainer, held, leaves
from grpo_mega.forecast.planning.slices import Lengths, Steady, steady
from grpo_mega.forecast.planning.training_time import Parts, Sequences, Slots, after_passes, micro_batches, passes
from grpo_mega.rollout.sglang.arguments import own_experts
from grpo_mega.rollout.stream import slices_of

PROMPT = 200
"""Assumed tokens of a prompt."""
REQUESTS = 2048
"""Default of SGLang's max_running_requests: sequences that run at once."""
SAMPLED = 1024
"""Simulate micro-batches of about so many sequences; extrapolate beyond that."""


@dataclass(frozen=True)
class Job:
    """A run on its machines, whose times are planned.

    Attributes:
        config: The run.
        roles: Its models, see `plan.roles_of`.
        vocab_size: Rows of the policy's vocabulary.
        machines: Its GPUs.
    """

    config: Config
    roles: Sequence[Role]
    vocab_size: int
    machines: Machines

    @property
    def trainer(self) -> Trainer:
        """The trainer of its policy."""
        return Trainer.of(self.config)

    @property
    def replicas(self) -> int:
        """Data parallel replicas of the trainer."""
        layout = self.config.layout
        return self.machines.gpus // (layout.tp * layout.pp * layout.cp)


@dataclass(frozen=True)
class Assumed:
    """Figures that a plan of time cannot know.

    Attributes:
        completion: Mean tokens of a completion under `rollout.max_new_tokens`; None for `SHARE` of it. Where longer
            completions are allowed later, the same share of that limit.
        prompt: Tokens of a prompt.
        signal: Share of groups that have signal; without effect where all count (`algorithm.groups_without_signal`).
    """

    completion: float | None = None
    prompt: int = PROMPT
    signal: float = 1.0

    def mean(self, rollout: RolloutConfig, longest: int) -> float:
        """Mean tokens of completions that may have up to `longest`."""
        if self.completion is None:
            return max(1.0, SHARE * longest)
        return self.completion / rollout.max_new_tokens * longest

    def groups(self, algorithm: AlgorithmConfig) -> tuple[int, int]:
        """Groups that a step draws, and those of them that it learns from.

        Raises:
            InputError: `signal` is not between 0 and 1.
        """
        # Not `< 0 or > 1`, which would let NaN pass.
        if not 0 <= self.signal <= 1:
            raise InputError(
                f"--signal {self.signal:g}", "not between 0 and 1", "choose a share of groups, such as 0.5"
            )
        wanted = drawn = algorithm.prompts_per_step
        if algorithm.groups_without_signal == "count":
            return drawn, drawn
        if algorithm.groups_without_signal == "refill":
            # Without the subtraction, rounding errors add a group: in floats 8 / (8 / 11) is above 11.
            drawn = math.ceil(wanted / max(self.signal, 1 / algorithm.refill_limit) - 1e-9)
        return drawn, min(wanted, max(1, round(self.signal * drawn)))

    def completions(
        self, algorithm: AlgorithmConfig, rollout: RolloutConfig, longest: int
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Lengths of a step's completions of up to `longest` tokens: all, and those that it learns from.

        Raises:
            InputError: The mean length is beyond the longest, or see `groups`.
        """
        drawn, learned = self.groups(algorithm)
        lengths = completion_lengths(drawn * algorithm.group_size, self.mean(rollout, longest), longest)
        return lengths, lengths[: learned * algorithm.group_size]


@dataclass(frozen=True)
class Phase:
    """A part of a step.

    Attributes:
        name: Its name in the output.
        parts: {what takes time: seconds}; they add up.
        slots: Micro-batches, if it is a pass of the trainer.
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
        engines: Number of engines.
        slowest: Outcome of the engine that ends last, if no completion outlives the step.
        level: Seconds if all completions had the mean length.
        alone: Seconds of the longest completion when nothing else runs: more GPUs do not shorten it.
        evicted: Sequences of all engines that lost their cache and were read again.
        decoder: Speed of an engine.
        sliced: What it is with slices, if the run has them; then `evicted` counts theirs.
    """

    engines: int
    slowest: Generated
    level: float
    alone: float
    evicted: int
    decoder: Decoder = field(repr=False)
    sliced: Steady | None = None


@dataclass(frozen=True)
class StepTime:
    """A step, or all steps with the same limit on completions.

    Attributes:
        steps: Number of steps.
        longest: Most tokens of a completion.
        completion: Mean tokens of a completion.
        groups: Groups drawn.
        tokens: Tokens of all sequences of a step, prompts included.
        phases: Phases in order.
        rollout: Details of generation.
    """

    steps: int
    longest: int
    completion: float
    groups: int
    tokens: int
    phases: list[Phase]
    rollout: PlannedRollout

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(phase.seconds for phase in self.phases)


def run_time(job: Job, room: float, assumed: Assumed) -> list[StepTime]:
    """The steps of a run: one kind, or two when longer completions are allowed from some step on.

    Args:
        job: The run.
        room: Tokens that the caches of an engine hold, together.
        assumed: Lengths of prompts and completions.

    Raises:
        InputError: An engine has no room for the longest sequence, or the mean length is beyond the longest.
    """
    rollout, steps = job.config.rollout, job.config.run.steps
    later = rollout.longer_from_step
    kinds = [(steps if later is None else min(later, steps), rollout.max_new_tokens)]
    if later is not None and later < steps:
        kinds.append((steps - later, rollout.longer_max_new_tokens or rollout.max_new_tokens))
    return [step_time(job, room, longest, assumed, count) for count, longest in kinds if count]


def step_time(job: Job, room: float, longest: int, assumed: Assumed, steps: int = 1) -> StepTime:
    """A step whose completions may have up to `longest` tokens; see `run_time`."""
    config = job.config
    completions, learned = assumed.completions(config.algorithm, config.rollout, longest)
    rollout = generate(job, completions, assumed.prompt, room)
    generation, training = _as_phase(rollout), trainer_phases(job, learned, assumed.prompt)
    phases = [beside(generation, training, config.rollout), *training, *hand_over_phases(job)]
    tokens = sum(completions) + assumed.prompt * len(completions)
    groups, _ = assumed.groups(config.algorithm)
    mean = assumed.mean(config.rollout, longest)
    return StepTime(steps, longest, mean, groups, tokens, phases, rollout)


def beside(generation: Phase, training: Sequence[Phase], rollout: RolloutConfig) -> Phase:
    """The generation that a step waits for: with `rollout.ahead`, what takes longer than the training."""
    # The embedded engine generates ahead too, but not at the same time.
    if not rollout.ahead or rollout.engine != "sglang":
        return generation
    hidden = sum(phase.seconds for phase in training)
    return Phase(generation.name, {"longer than the training": max(0.0, generation.seconds - hidden)})


def generation_phase(job: Job, room: float, assumed: Assumed) -> Phase | None:
    """Generation of a step with the longest completions of the run; None when an engine has no room for one."""
    rollout = job.config.rollout
    longest = rollout.longer_max_new_tokens or rollout.max_new_tokens
    if room < longest + assumed.prompt:
        return None
    completions, _ = assumed.completions(job.config.algorithm, rollout, longest)
    return _as_phase(generate(job, completions, assumed.prompt, room))


def _as_phase(rollout: PlannedRollout) -> Phase:
    if sliced := rollout.sliced:
        parts = {"slices": sliced.seconds - sliced.reading, "prompts, and completions read again": sliced.reading}
    else:
        parts = {"completions of the mean length": rollout.level, "tail": rollout.slowest.seconds - rollout.level}
    return Phase("generation", parts)


def engines_of(job: Job, prompt: float, room: float) -> EngineSet:
    """The run's engines; `room` is the tokens that the caches of each hold, together."""
    config, rollout = job.config, job.config.rollout
    decoder = decoder_of(rollout, config.model, config.layout, job.vocab_size, job.machines)
    if rollout.engine != "sglang":
        return EngineSet(job.replicas, decoder, prompt, room, rollout.concurrent_sequences)
    most = rollout.sglang.arguments.get("max_running_requests") or REQUESTS * decoder.caches
    return EngineSet(max(1, job.machines.gpus // rollout.sglang.tp), decoder, prompt, room, most)


def generate(job: Job, completions: Sequence[int], prompt: float, room: float) -> PlannedRollout:
    """Generation of completions of these lengths by the run's engines, each of which gets an equal share.

    Completions of more groups than `algorithm.prompts_per_step` are submitted later: they refill groups without signal.
    """
    algorithm, engines = job.config.algorithm, engines_of(job, prompt, room)
    decoder, size = engines.decoder, algorithm.group_size
    first = completions[: algorithm.prompts_per_step * size]
    later = completions[len(first) :]

    def simulated(at_first: Sequence[int], then: Sequence[int]) -> Generated:
        lengths = [*at_first, *then]
        return simulate(decoder, lengths, prompt, room, engines.most, draws(lengths, len(at_first), size))

    # `completion_lengths` spreads short and long completions such that every k-th of them, an engine's share, is
    # typical of all.
    busy = min(engines.count, len(first))
    shares = [(first[number::busy], later[number::busy]) for number in range(busy)]
    ended = [simulated(*share) for share in shares]
    mean = max(1, round(sum(completions) / len(completions)))
    # The same share with equal lengths. What generation takes beyond that is reported as the tail, which the minimum
    # below keeps from being negative where the mean was rounded up.
    level = simulated([mean] * len(shares[0][0]), [mean] * len(shares[0][1])).seconds
    slowest = max(ended, key=lambda engine: engine.seconds)
    # While a completion grows, half of it is in the cache on average.
    alone = max(completions) / decoder.accepted * decoder.step(1, max(completions) / 2 + prompt)
    evicted = sum(engine.evicted for engine in ended)
    sliced = None
    if job.config.rollout.slice_tokens:
        lengths = Lengths(sorted(completions))
        slices = slices_of(job.config.rollout, job.config.algorithm.prompts_per_step)
        sliced = steady(engines, lengths, slices, size, max(completions), len(completions) // size)
        evicted = round(sliced.evicted)
    return PlannedRollout(engines.count, slowest, min(level, slowest.seconds), alone, evicted, decoder, sliced)


def trainer_phases(job: Job, completions: Sequence[int], prompt: int) -> list[Phase]:
    """The trainer's passes over completions of these lengths: log-probs, values and scores, then the updates."""
    phases = []
    for role in job.roles[1:]:
        name = {"critic": "values of the critic", "reward model": "scores of the reward model"}.get(role.name)
        slots = _passes(job, role, completions, prompt, training=False, head=name is None)
        phases.append(Phase(name or f"log-probs of the {role.name}", slots.parts, slots))
    if not skips_old_pass(job.config.algorithm, job.config.distill):
        slots = _passes(job, job.roles[0], completions, prompt, training=False, head=True)
        phases.append(Phase("log-probs of the old policy", slots.parts, slots))
    return phases + [_updates(job, role, completions, prompt) for role in job.roles if role.trained]


def _updates(job: Job, role: Role, completions: Sequence[int], prompt: int) -> Phase:
    """All updates of a model that is trained, of every epoch."""
    algorithm, is_policy = job.config.algorithm, role is job.roles[0]
    updates = algorithm.epochs * algorithm.mini_batches
    # Any part of the completions is typical of all, so the first mini-batch stands for the others.
    mini_batch = completions[: max(1, len(completions) // algorithm.mini_batches)]
    slots = _passes(job, role, mini_batch, prompt, training=True, head=is_policy)
    # Overlap hides communication behind computation, not behind idle time.
    micro_seconds = (slots.seconds - slots.parts["bubble"]) / slots.micros
    parts = slots.parts | after_passes(job.trainer, role.stages[slots.stage], job.machines, micro_seconds)
    name = "updates" if is_policy else f"updates of the {role.name}"
    return Phase(name, {part: updates * seconds for part, seconds in parts.items()}, slots)


def _passes(job: Job, role: Role, completions: Sequence[int], prompt: int, training: bool, head: bool) -> Slots:
    """A pass over sequences: micro-batches of about `SAMPLED` of them are simulated, and their seconds extrapolated."""
    trainer, size = job.trainer.of_role(role), job.config.algorithm.group_size
    few = completions[: max(SAMPLED, 8 * job.replicas)]
    work = Sequences(
        lengths=tuple(completion + prompt for completion in few),
        prompts=tuple(number // size for number in range(len(few))),
        prompt_tokens=(prompt,) * len(few),
    )
    micros = micro_batches(trainer, work, job.replicas)
    slots = passes(trainer, role.stages, micros, job.machines, training, head)
    more = len(completions) / len(few)
    # The bubble comes once in a pass, however many micro-batches there are.
    parts = {name: seconds * (1 if name == "bubble" else more) for name, seconds in slots.parts.items()}
    return Slots(round(slots.micros * more), parts, slots.stage)


def hand_over_phases(job: Job) -> list[Phase]:
    """New weights for the engines, and GPUs that change hands; none without SGLang engines."""
    config, trainer, machines = job.config, job.trainer, job.machines
    rates, sglang = machines.rates, config.rollout.sglang
    if config.rollout.engine != "sglang":
        return []
    model = config.model
    layers = model.layers - dense_layers(model)
    routed = layers * model.moe.experts * numbers(gated(model.hidden, model.moe.ffn_hidden))
    others = model_numbers(model, job.vocab_size) - routed
    # With `ep_size` a GPU receives only its own experts.
    sharing = sglang.tp if own_experts(sglang, model.moe.experts, 0) is not None else 1
    received = trainer.weight_bytes * (others + routed / sharing)
    rate = rates.push if sglang.first_gpu is None else rates.push_apart
    phases = [Phase("weights to the engines", {"bytes": received / rate, "around them": rates.push_fixed})]
    if sglang.first_gpu is None:
        most = max(leaves(held(trainer, [*job.roles], number)) for number in range(config.layout.pp))
        moved = 2 * most / (machines.gpu.host * rates.host)
        phases.append(Phase("offload", {"to main memory and back": moved, "engines wake and sleep": rates.turn}))
    return phases

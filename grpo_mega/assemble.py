"""Assembles a run: process groups, run directory, models, engine, stages and the first weights.

This is the only file that names concrete engines and stages. It serves runs that train a policy and runs that train a
reward model (`run.trains`).
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from grpo_mega.checks import model_checks, refuse_together
from grpo_mega.colocation.colocation import Colocation
from grpo_mega.config.load import identity, to_yaml, words
from grpo_mega.config.schema import Config, LayoutConfig, ModelConfig, RewardConfig, RunConfig
from grpo_mega.config.trained_model import read_teacher
from grpo_mega.convert.of_run import Exports
from grpo_mega.convert.source import load_teacher
from grpo_mega.data import Data, ExampleData
from grpo_mega.data.check_models import teacher_vocabulary
from grpo_mega.data.tasks import generated_task
from grpo_mega.data.tokenizer import Tokenizer, vocabulary
from grpo_mega.environment.conversation import Conversation, conversation_of
from grpo_mega.errors import InputError
from grpo_mega.first_weights import (
    CheckedRewardModel,
    find_reward_model,
    load_first_body,
    load_first_weights,
    load_reward_model,
)
from grpo_mega.models.average import AveragedPolicy
from grpo_mega.models.model import Model
from grpo_mega.models.policy import Policy
from grpo_mega.models.reference import ReferencePolicy, Teacher
from grpo_mega.models.scalar import REWARD_MODEL, ScalarModel
from grpo_mega.models.topology import Topology, join_layout, leave_layout
from grpo_mega.observe.launcher import Heartbeat
from grpo_mega.observe.logs import setup_rank_logging
from grpo_mega.observe.recorder import Observers, Recorder
from grpo_mega.observe.run_dir import RunDir, open_run_dir
from grpo_mega.observe.timer import PhaseTimer
from grpo_mega.platform import Platform, memory_gb
from grpo_mega.platform.clock import shared_clock
from grpo_mega.platform.collectives import from_all_ranks, from_main_rank
from grpo_mega.platform.trace import Process, Trace, recording
from grpo_mega.reward.compose import Reward
from grpo_mega.rollout.embedded import EmbeddedEngine
from grpo_mega.rollout.sglang.engine import SGLangEngine
from grpo_mega.rollout.sglang.lifecycle import Engines
from grpo_mega.rollout.sglang.teacher import ServedTeacher, TeacherServer
from grpo_mega.run import Run, Stage
from grpo_mega.stages.distill import Distill
from grpo_mega.stages.grpo import GRPO, StageParts
from grpo_mega.stages.learned_reward import LearnedReward, ScoresOf, StepScores, WholeScores
from grpo_mega.stages.ppo import PPO
from grpo_mega.stages.pretrain import Pretrain
from grpo_mega.stages.process_reward_model import ProcessRewardModel
from grpo_mega.stages.reward_model import RewardModel, Scale
from grpo_mega.stages.rollouts import DirectAccess, EngineAccess, Rollouts
from grpo_mega.stages.scalar_training import ScalarTraining
from grpo_mega.stages.sft import SFT
from grpo_mega.stages.step import StepOptions
from grpo_mega.stages.step_report import Watch
from grpo_mega.types import Decode, Prompt


@dataclass(frozen=True)
class Ground:
    """Common parts of a run that trains a policy and of one that trains a reward model.

    Attributes:
        config: The configuration.
        path: The run directory.
        vocab_size: Number of tokens that the models score.
        platform, topology: Platform and topology of this process.
        recorder, timer: Recorder and phase timer of the run.
        remarks: Further lines that introduce the run.
    """

    config: Config
    path: Path
    vocab_size: int
    platform: Platform
    topology: Topology
    recorder: Recorder
    timer: PhaseTimer
    remarks: Sequence[str]


@dataclass(frozen=True)
class Guides:
    """Models that guide a policy besides its rewards: checked before the run directory is made, loaded after it.

    Attributes:
        teacher: Architecture and vocabulary size of a teacher that the trainer computes.
        server: A server that teaches, and the checksum of its model.
        reward_model: A reward model that scores completions.
    """

    teacher: tuple[ModelConfig, int] | None
    server: tuple[TeacherServer, str] | None
    reward_model: CheckedRewardModel | None


@contextmanager
def assemble(
    config: Config,
    platform: Platform,
    data: Data | ExampleData,
    reward: Reward | None = None,
    remarks: Sequence[str] = (),
    observers: Callable[[RunConfig, Path], Observers] = lambda run, path: {},
) -> Iterator[Run]:
    """Context with a run that is ready to `execute`, resumed from its directory if that has a checkpoint.

    Args:
        config: The configuration; `run.trains` selects the kind of run.
        platform: Device and backend of this process.
        data: Examples for a run that trains a reward model, otherwise problems.
        reward: Scores completions.
        remarks: Further lines that introduce the run.
        observers: Makes the observers of the run from its settings (with the final number of steps) and directory.

    Raises:
        InputError: The layout, the run directory or its checkpoints cannot be used.
    """
    checks = model_checks(config, data.tokenizer, vocabulary(config.model, data.tokenizer), alone=False)
    refuse_together(checks)
    # Found before the run directory is made, so that a missing teacher leaves no half-made run.
    guides = _find_guides(config, data.tokenizer)
    if isinstance(data, ExampleData):
        with _ground(config, platform, data, remarks, observers) as ground:
            yield _reward_model_run(ground, data)
        return
    assert reward is not None, "a policy is trained on completions that a reward scores"
    decode = partial(_decode, data.tokenizer)
    with conversation_of(config, data.tokenizer) as conversation:
        # Checked before the run directory is made, like the guides.
        if conversation:
            conversation.check_fields([*data.problems, *data.validation, *data.test])
        with (
            _ground(config, platform, data, remarks, observers) as ground,
            _sglang(ground, decode) as sglang,
        ):
            for warning in conversation.warnings if conversation and ground.topology.rank == 0 else ():
                logging.getLogger(__name__).warning(warning)
            yield _policy_run(ground, data, reward, decode, sglang, guides, conversation)


@contextmanager
def _ground(
    config: Config,
    platform: Platform,
    data: Data | ExampleData,
    remarks: Sequence[str],
    observers: Callable[[RunConfig, Path], Observers],
) -> Iterator[Ground]:
    """Context that opens the run directory and creates the process groups; closes and destroys them at its end."""
    path = Path(config.run.root) / config.run.name
    main = dist.get_rank() == 0
    # The directory comes first: it is locked before anything is written, and logs and traces are written into it.
    run_dir = _open_run_dir(path, to_yaml(config), identity(config))
    setup_rank_logging(path, dist.get_rank())
    for warning in data.warnings if main else ():
        logging.getLogger(__name__).warning(warning)
    topology = join_layout(config.layout, config.run.seed, config.cluster.timeout_seconds)
    steps = data.examples.steps if isinstance(data, ExampleData) else config.run.steps
    settings = replace(config.run, steps=steps)
    recorder = Recorder(settings, path, main, partial(observers, settings, path), config.alarms)
    place = f"pp {topology.pp_rank}, dp {topology.dp_rank}, cp {topology.cp_rank}"
    process = Process(topology.rank, f"rank {topology.rank} on {socket.gethostname()}: {place}", topology.world_size)
    trace = Trace(path, process, shared_clock(), config.run.keep_traces, partial(memory_gb, platform))
    try:
        with recording(trace):
            timer = PhaseTimer(Heartbeat(), recorder.phase)
            vocab_size = vocabulary(config.model, data.tokenizer)
            yield Ground(config, path, vocab_size, platform, topology, recorder, timer, remarks)
            # Only after a normal end: after an error, destroying the groups could wait for ranks that hang in a
            # collective.
            leave_layout()
    finally:
        recorder.close()
        if run_dir:
            run_dir.close()


def _reward_model_run(ground: Ground, data: ExampleData) -> Run:
    """A run of one stage, which trains a reward model of whole completions or of their steps."""
    config, recorder, settings = ground.config, ground.recorder, ground.config.optimizer
    with ground.timer("setup"):
        here = (config.layout, ground.vocab_size, ground.topology, ground.platform)
        model = ScalarModel(REWARD_MODEL, config.model, *here, optimizer=settings)
    kind = RewardModel if config.run.trains == "reward_model" else ProcessRewardModel
    stage: ScalarTraining[Any] = kind(config.pairs, settings, config.run.eval_every, model, data.examples)
    tested = f", {len(data.examples.test)} {stage.noun}s held out" if data.examples.test else ""
    size = f"{config.pairs.batch_size} {stage.noun}s per step, {data.examples.steps} steps{tested}"
    recorder.start([_size_in_words(config.layout, model), size, *ground.remarks], _where(ground.platform))
    run = Run(config.run, config.layout, model, [stage], recorder, ground.timer)
    if not run.resume():
        load_first_body(config.run, config.model, model)
    return run


def _policy_run(
    ground: Ground,
    data: Data,
    reward: Reward,
    decode: Decode,
    sglang: SGLangEngine | None,
    guides: Guides,
    conversation: Conversation | None,
) -> Run:
    """A run that trains a policy: reinforcement learning and the stages before it."""
    config, timer, optimizer = ground.config, ground.timer, ground.config.optimizer
    options = StepOptions.of(config)
    placed = (config.layout, ground.vocab_size, ground.topology, ground.platform)
    with timer("setup"):
        # The models. An embedded engine exists in every run, since pretraining samples from it even beside SGLang.
        policy = Policy(config.model, *placed, optimizer=optimizer, lora=config.lora)
        embedded = EmbeddedEngine(policy, decode, config.rollout.concurrent_sequences)
        critic, scorer, learned = None, None, None
        if config.algorithm.advantage_baseline == "critic":
            critic = ScalarModel("critic", config.model, *placed, optimizer=optimizer, before=True)
        if guides.reward_model:
            scorer = load_reward_model(guides.reward_model, config.layout, ground.topology, ground.platform)
            learned = learned_reward(config.reward, guides.reward_model, scorer, options, decode)
        teacher = _teacher(ground, guides)
    lines = [*_introduction(options, config.layout, config.run.steps, policy), *ground.remarks]
    ground.recorder.start(lines, _where(ground.platform))
    reference = ReferencePolicy(policy) if config.algorithm.kl_coef else None
    average = AveragedPolicy(policy, optimizer.average_decay) if optimizer.average_decay else None
    sections = (options, config.run, config.eval, config.reward)
    rollouts = Rollouts(
        *sections,
        engine=sglang or embedded,
        access=_access(ground, sglang, policy, (critic, reference, scorer, teacher), data.test),
        score=partial(reward.score, decode=decode) if options.advantages.by_step else reward.score,
        policy=policy,
        stop_ids=data.stop_ids,
        decode=decode,
        average=average,
        learned=learned,
        conversation=conversation,
    )
    watch = Watch(config, ground.topology, learned.checksum if learned else "")
    parts = StageParts(config.run, optimizer, policy, reference, data, rollouts, watch)
    # The stages, in the order in which they run; the last one names the algorithm.
    stages: list[Stage] = []
    if config.base.train:  # with generated problems: config/rules/stages.py refuses stored ones
        stages.append(Pretrain(config, policy, embedded, generated_task(config.data)))
    if data.supervised:
        stages.append(SFT(config.sft, optimizer.state, policy, data.supervised))
    if critic:
        stages.append(PPO(parts, critic, config.critic))
    elif teacher:
        stages.append(Distill(parts, teacher, config.distill))
    else:
        stages.append(GRPO(parts))
    exports = Exports(ground.path, policy, config, data.tokenizer)
    run = Run(config.run, config.layout, policy, stages, ground.recorder, timer, exports)
    if not run.resume():
        load_first_weights(config.run, config.base, policy)
    return run


def _access(
    ground: Ground,
    sglang: SGLangEngine | None,
    policy: Policy,
    others: Sequence[Model | ReferencePolicy | ServedTeacher | None],
    prompts: Sequence[Prompt],
) -> EngineAccess:
    """The engine's access to the policy's weights.

    Models among `others` leave a shared GPU with the policy's; `prompts` are read to verify that weights have arrived.
    """
    if sglang is None:  # the embedded engine computes with the trainer's own
        return DirectAccess(ground.timer)
    text = [token for prompt in prompts for token in prompt.token_ids]
    # A teacher behind an address takes no memory here.
    offloaded = [model for model in others if isinstance(model, Model | ReferencePolicy)]
    return Colocation(policy, offloaded, sglang, ground.config.rollout.sglang, ground.timer, text, ground.path)


@contextmanager
def _sglang(ground: Ground, decode: Decode) -> Iterator[SGLangEngine | None]:
    """Context with SGLang's engines, if the run has them. Created before the policy, as they measure free memory."""
    config = ground.config
    if config.rollout.engine != "sglang":
        yield None
        return
    with ground.timer("setup"):
        here = (ground.vocab_size, ground.platform, ground.path)
        engine = SGLangEngine(Engines(config.model, config.rollout, config.run.seed, *here), decode)
    with closing(engine):  # before the process groups are destroyed
        yield engine


def learned_reward(
    config: RewardConfig, checked: CheckedRewardModel, scorer: ScalarModel, options: StepOptions, decode: Decode
) -> LearnedReward:
    """What adds a reward model's scores of completions, or of their steps, to rewards; `scorer` is the loaded model."""
    if checked.separators:
        scores: ScoresOf = StepScores(scorer, checked.separators, config.model.outcome, decode)
    else:
        scores = WholeScores(scorer, Scale(**checked.stage["scale"]) if config.model.normalize else None)
    by_step = options.advantages.by_step
    return LearnedReward(config, by_step, options.exchange, scorer.topology, scores, checked.checksum)


def _find_guides(config: Config, tokenizer: Tokenizer) -> Guides:
    """Finds the run's teacher and reward model, which `model_checks` have accepted; every rank must call it.

    Raises:
        InputError: One cannot be used: it is damaged, or its server does not answer.
    """
    local, server = None, None
    if teacher := read_teacher(config.distill, config.model):
        local = teacher.model, teacher_vocabulary(teacher, tokenizer, config.distill, config.data, config.model)
    if config.distill.served:
        sampled = vocabulary(config.model, tokenizer)
        client = TeacherServer(str(config.distill.teacher), config.distill.timeout_seconds, sampled)
        server = client, client.check(config.model.context, partial(_decode, tokenizer))
    return Guides(local, server, find_reward_model(config, tokenizer))


def _teacher(ground: Ground, guides: Guides) -> Teacher | ServedTeacher | None:
    """The teacher, with its weights loaded, or on its server; None without one."""
    if guides.server:
        return ServedTeacher(*guides.server, ground.topology)
    if guides.teacher is None:
        return None
    model, vocab_size = guides.teacher
    teacher = Teacher(model, ground.config.layout, vocab_size, ground.topology, ground.platform)
    load_teacher(Path(str(ground.config.distill.teacher)), teacher)
    return teacher


def _open_run_dir(path: Path, config_yaml: str, of_run: dict[str, object]) -> RunDir | None:
    """The run directory on the main rank, None on the others; every rank must call it.

    `of_run` is the identity of the run's configuration.

    Raises:
        InputError: On every rank. The directory cannot be used for this run.
        RuntimeError: On every rank. The disk failed.
    """
    # Only the main rank opens and locks the directory. Its error is returned as a value and raised on all ranks, or the
    # others would wait for it.
    opened: list[RunDir] = []

    def refusal() -> Exception | None:
        try:
            opened.append(open_run_dir(path, config_yaml, identity=of_run, words=words()))
        except InputError as error:
            return error
        except ValueError as error:
            return ValueError(str(error))
        except OSError as error:
            return RuntimeError(f"{path}: {error}")
        return None

    if problem := from_main_rank(refusal):
        raise problem
    return opened[0] if opened else None


def _decode(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """Text of the tokens, skipping ids that only the model has, as Hugging Face's tokenizers do."""
    return tokenizer.decode(i for i in ids if i < tokenizer.vocab_size)


def _introduction(options: StepOptions, layout: LayoutConfig, steps: int, policy: Policy) -> list[str]:
    """Lines that introduce a policy's run: its size, layout and number of steps."""
    algorithm, rollout, slices = options.algorithm, options.rollout, options.slices
    lines = [
        _size_in_words(layout, policy),
        f"{algorithm.prompts_per_step} prompts x {algorithm.group_size} samples per step, {steps} steps",
    ]
    if slices.outlive_steps:
        longest = rollout.longer_max_new_tokens or rollout.max_new_tokens
        oldest = slices.most_steps_late(longest, algorithm.groups_without_signal == "refill")
        what = f"slices of {slices.tokens} tokens" if slices.tokens else "completions"
        ahead = ", generated ahead of the updates" if slices.ahead else ""
        noun = "step" if oldest == 1 else "steps"
        lines.append(f"{what}{ahead}: a token is at most {oldest} {noun} old when it is learned")
    if policy.lora:
        lines.append(f"adapters of rank {policy.lora.rank} are trained: {policy.adapter_parameters():,} parameters")
    return lines


def _size_in_words(layout: LayoutConfig, model: Model) -> str:
    """Size and layout of the trained model, in words; every rank must call it."""
    topology = model.topology
    names = ("tp", "pp", "vpp", "cp", "ep", "etp")
    sizes = {"dp": topology.dp_size} | {name: getattr(layout, name) for name in names}
    arranged = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"
    kernel = "" if model.attention == "padded" else f", layout.attention={model.attention}"
    processes = f"{topology.world_size} process{'es' if topology.world_size > 1 else ''}"
    return f"{model.parameters():,} parameters on {processes}: {arranged}{kernel}"


def _where(platform: Platform) -> str:
    """The machines of the run and their devices, in words; every rank must call it."""
    hosts = [*dict.fromkeys(from_all_ranks(socket.gethostname))]
    device = torch.cuda.get_device_name(platform.device) if platform.device.type == "cuda" else "CPU"
    named = hosts[0] if len(hosts) == 1 else f"{len(hosts)} machines, the first {hosts[0]}"
    return f"on {named} ({device})"

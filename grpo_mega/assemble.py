"""Assembles a run: process groups, run directory, models, engine, stages and the first weights.

This is the only file that names concrete engines and stages.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch.distributed as dist

from grpo_mega.checkpoint import checkpoint
from grpo_mega.colocation.turns import Turns
from grpo_mega.config.load import identity, to_yaml
from grpo_mega.config.schema import Config, ModelConfig
from grpo_mega.convert.of_run import Exports
from grpo_mega.data import Data
from grpo_mega.data.tasks import generated_task
from grpo_mega.data.tokenizer import Tokenizer, vocabulary
from grpo_mega.models.average import AveragedPolicy
from grpo_mega.models.policy import Policy
from grpo_mega.models.reference import ReferencePolicy
from grpo_mega.models.scalar import ScalarModel
from grpo_mega.models.topology import Topology, join_layout, leave_layout
from grpo_mega.observe.console import columns_of
from grpo_mega.observe.heartbeat import Heartbeat
from grpo_mega.observe.logs import setup_rank_logging
from grpo_mega.observe.recorder import Recorder
from grpo_mega.observe.run_dir import RunDir, has_checkpoints, open_run_dir
from grpo_mega.observe.timer import PhaseTimer
from grpo_mega.platform import Platform
from grpo_mega.platform.collectives import from_main_rank
from grpo_mega.reward.compose import Reward
from grpo_mega.rollout.embedded import EmbeddedEngine
from grpo_mega.rollout.engine import Engine
from grpo_mega.rollout.sglang.engine import SGLangEngine
from grpo_mega.run import Run, Stage
from grpo_mega.stages.grpo import GRPO
from grpo_mega.stages.ppo import PPO
from grpo_mega.stages.pretrain import Pretrain
from grpo_mega.stages.rollouts import Rollouts, without_turns
from grpo_mega.stages.sft import SFT
from grpo_mega.weights import directory as huggingface


@contextmanager
def assemble(config: Config, platform: Platform, data: Data, reward: Reward) -> Iterator[Run]:
    """A run, resumed from its directory if that has a checkpoint, ready to `execute`.

    Raises:
        ValueError: The layout, the run directory or its checkpoints cannot be used.
    """
    path = Path(config.run.root) / config.run.name
    vocab_size = vocabulary(config.model, data.tokenizer)
    _check_origin(config, path, vocab_size)
    main = dist.get_rank() == 0
    run_dir = _open_run_dir(path, config)
    setup_rank_logging(path, dist.get_rank())
    for warning in data.warnings if main else ():
        logging.getLogger(__name__).warning(warning)
    topology = join_layout(config.layout, config.run.seed, config.cluster.timeout_seconds)
    recorder = Recorder(config.run, path, main, columns_of(config))
    timer = PhaseTimer(Heartbeat())
    decode = partial(_decode, data.tokenizer)
    sglang: SGLangEngine | None = None
    try:
        with timer("setup"):
            if config.rollout.engine == "sglang":  # before the policy: it measures how much memory is free
                sglang = SGLangEngine(config, vocab_size, platform, decode, path)
            policy = Policy(
                config.model,
                config.layout,
                vocab_size,
                topology,
                platform,
                distributed_optimizer=config.optimizer.distributed,
                overlap=config.optimizer.overlap,
                frozen=config.optimizer.frozen,
                lora=config.lora,
            )
            embedded = EmbeddedEngine(policy, decode, config.rollout.concurrent_sequences)
            critic = _critic(config, vocab_size, topology, platform)
        score = partial(reward.score, decode=decode) if config.algorithm.supervision == "process" else reward.score
        recorder.start(_introduction(config, policy))
        reference = ReferencePolicy(policy) if config.algorithm.kl_coef else None
        decay = config.optimizer.average_decay
        average = AveragedPolicy(policy, decay) if decay else None
        if sglang:
            text = [token for prompt in data.test for token in prompt.token_ids]
            others = [model for model in (critic, reference) if model]
            turns = Turns(policy, others, sglang, config.rollout.sglang, timer, text, path)
            rollouts = Rollouts(
                config,
                sglang,
                turns.generate,
                score,
                policy,
                data.stop_ids,
                average,
                generates_meanwhile=True,
                traffic=turns.metrics,
                outdate=turns.outdate,
            )
        else:
            in_turn = partial(without_turns, timer)
            rollouts = Rollouts(config, embedded, in_turn, score, policy, data.stop_ids, average)
        if critic:
            last: Stage = PPO(config, policy, critic, reference, data, rollouts)
        else:
            last = GRPO(config, policy, reference, data, rollouts)
        exports = Exports(path, policy, config, data.tokenizer)
        run = Run(config, policy, [*_stages_before(config, policy, embedded, data), last], recorder, timer, exports)
        if not run.resume():
            _load_first_weights(config, policy)
        yield run
        if sglang:
            sglang.close()  # before the process groups are destroyed
        leave_layout()
    finally:
        if sglang:
            sglang.close()
        recorder.close()
        if run_dir:
            run_dir.close()


def _critic(config: Config, vocab_size: int, topology: Topology, platform: Platform) -> ScalarModel | None:
    """A critic, if advantages are to come from one."""
    if config.algorithm.advantage_baseline != "critic":
        return None
    settings = config.optimizer
    parallel = (topology, platform, settings.distributed, settings.overlap)
    return ScalarModel("critic", config.model, config.layout, vocab_size, *parallel, before=True)


def _stages_before(config: Config, policy: Policy, embedded: Engine, data: Data) -> list[Stage]:
    """The stages before reinforcement learning: base model and supervised fine-tuning, as configured."""
    stages: list[Stage] = []
    if config.base.train:
        # config/rules/stages.py refuses base.train with stored problems.
        stages.append(Pretrain(config, policy, embedded, generated_task(config.data)))
    if data.supervised:
        stages.append(SFT(config.sft, policy, data.supervised))
    return stages


def _open_run_dir(path: Path, config: Config) -> RunDir | None:
    """The run directory on the main rank, None on the others; every rank must call it.

    Raises:
        ValueError: On every rank. The directory cannot be used for this run.
        RuntimeError: On every rank. The disk failed.
    """
    opened: list[RunDir] = []

    def refusal() -> tuple[type[Exception], str] | None:
        try:
            opened.append(open_run_dir(path, to_yaml(config), identity=identity(config)))
        except ValueError as error:
            return ValueError, str(error)
        except OSError as error:
            return RuntimeError, f"{path}: {error}"
        return None

    if problem := from_main_rank(refusal):
        kind, message = problem
        raise kind(message)
    return opened[0] if opened else None


def _decode(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """The text of the tokens, without those that only the model has, as with Hugging Face's tokenizers."""
    return tokenizer.decode(i for i in ids if i < tokenizer.vocab_size)


def _check_origin(config: Config, path: Path, vocab_size: int) -> None:
    """Checks where the first weights come from, before the run directory is made.

    A run that has checkpoints to continue at needs them no more.

    Raises:
        FileNotFoundError: There is neither a checkpoint nor a Hugging Face model.
        ValueError: The Hugging Face model is of another shape; raised on every rank.
    """
    if config.run.init_from is None:
        return
    origin = Path(config.run.init_from)
    if huggingface.is_model(origin):
        if problem := from_main_rank(lambda: _unlike(origin, config.model, path, vocab_size)):
            raise ValueError(problem)
    elif not (origin / checkpoint.STATE).is_file():
        raise FileNotFoundError(
            f"run.init_from={origin} holds no checkpoint (no {checkpoint.STATE}), and no Hugging Face model (no "
            f"{huggingface.CONFIG})"
        )


def _is_folder(origin: Path) -> bool:
    """Whether the weights are in a Hugging Face folder; an imported one has a config.json, but is a checkpoint."""
    return huggingface.is_model(origin) and not (origin / checkpoint.STATE).is_file()


def _unlike(origin: Path, model: ModelConfig, path: Path, vocab_size: int) -> str | None:
    """How a Hugging Face model differs from the configuration; None for a run that has checkpoints."""
    if has_checkpoints(path):
        return None
    try:
        huggingface.check_architecture(origin, model, vocab_size, has_weights=_is_folder(origin))
    except ValueError as error:
        return str(error)
    except Exception as error:  # whatever is wrong with a file, the other ranks must hear of it
        return f"{origin} cannot be loaded: {type(error).__name__}: {error}"
    return None


def _load_first_weights(config: Config, policy: Policy) -> None:
    """Gives the policy the weights that the first stage starts from, unless that stage is the base model's."""
    if config.base.train:
        return
    if config.run.init_from:
        origin = Path(config.run.init_from)
        (huggingface if _is_folder(origin) else checkpoint).load_weights(origin, policy)
        policy.initialize_adapters(config.run.seed)
    else:
        logging.getLogger(__name__).warning("starting from random weights: base.train is false and run.init_from null")
        policy.initialize(config.run.seed)


def _introduction(config: Config, policy: Policy) -> list[str]:
    """The lines that introduce a run: its size, layout and number of steps."""
    layout, topology, algorithm = config.layout, policy.topology, config.algorithm
    names = ("tp", "pp", "vpp", "cp", "ep", "etp")
    sizes = {"dp": topology.dp_size} | {name: getattr(layout, name) for name in names}
    arranged = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"
    adapters = [f"adapters of rank {config.lora.rank} are trained: {policy.adapter_parameters():,} parameters"]
    return [
        f"{policy.parameters():,} parameters on {topology.world_size} processes: {arranged}",
        f"{algorithm.prompts_per_step} prompts x {algorithm.group_size} samples per step, {config.run.steps} steps",
        *(adapters if policy.lora else []),
    ]

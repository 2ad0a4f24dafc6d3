"""Puts a run together: process groups, run directory, models, engine, stages, and where the first weights come from.

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
from grpo_mega.data import Data
from grpo_mega.data.tokenizer import Tokenizer
from grpo_mega.models.policy import Policy
from grpo_mega.models.reference import ReferencePolicy
from grpo_mega.models.topology import join_layout, leave_layout
from grpo_mega.observe.console import columns_of
from grpo_mega.observe.heartbeat import Heartbeat
from grpo_mega.observe.logs import setup_rank_logging
from grpo_mega.observe.recorder import Recorder
from grpo_mega.observe.run_dir import RunDir, open_run_dir
from grpo_mega.observe.timer import PhaseTimer
from grpo_mega.platform import Platform
from grpo_mega.platform.collectives import main_says
from grpo_mega.reward.compose import Reward
from grpo_mega.rollout.embedded import EmbeddedEngine
from grpo_mega.rollout.engine import Engine
from grpo_mega.rollout.sglang.engine import SGLangEngine
from grpo_mega.run import Run, Stage
from grpo_mega.stages.grpo import GRPO
from grpo_mega.stages.pretrain import Pretrain
from grpo_mega.stages.rollouts import Rollouts, without_turns
from grpo_mega.stages.sft import SFT
from grpo_mega.weights import directory as huggingface


@contextmanager
def assemble(config: Config, platform: Platform, data: Data, reward: Reward) -> Iterator[Run]:
    """A run that stands where its directory says, ready to `execute`.

    Raises:
        ValueError: The layout, the run directory or its checkpoints cannot be used.
    """
    _check_origin(config.run.init_from)
    path = Path(config.run.root) / config.run.name
    main = dist.get_rank() == 0
    run_dir = _opened(path, config)
    setup_rank_logging(path, dist.get_rank())
    for warning in data.warnings if main else ():
        logging.getLogger(__name__).warning(warning)
    topology = join_layout(config.layout, config.run.seed, config.cluster.timeout_seconds)
    recorder = Recorder(config.run, path, main, columns_of(config))
    timer = PhaseTimer(Heartbeat())
    decode, vocabulary = partial(_text, data.tokenizer), _vocabulary(config.model, data.tokenizer)
    sglang: SGLangEngine | None = None
    try:
        with timer("setup"):
            if config.rollout.engine == "sglang":  # before the policy: it measures how much memory is free
                sglang = SGLangEngine(config, vocabulary, platform, decode, path)
            policy = Policy(
                config.model,
                config.layout,
                vocabulary,
                topology,
                platform,
                distributed_optimizer=config.optimizer.distributed,
                overlap=config.optimizer.overlap,
            )
            embedded = EmbeddedEngine(policy, decode, config.rollout.concurrent_sequences)
        recorder.start(_opening(config, policy))
        reference = ReferencePolicy(policy) if config.algorithm.kl_coef else None
        if sglang:
            text = [token for prompt in data.test for token in prompt.token_ids]
            turns = Turns(policy, reference, sglang, config.rollout.sglang, timer, text, path)
            rollouts = Rollouts(
                config, sglang, turns.generate, reward.score, topology, data.stop_ids, True, turns.metrics
            )
        else:
            rollouts = Rollouts(config, embedded, partial(without_turns, timer), reward.score, topology, data.stop_ids)
        stages: list[Stage] = [GRPO(config, policy, reference, data, rollouts)]
        run = Run(config, policy, [*_stages_before(config, policy, embedded, data), *stages], recorder, timer)
        if not run.resume():
            _load_first_weights(config, policy)
        yield run
        if sglang:
            sglang.close()  # while there are process groups
        leave_layout()
    finally:
        if sglang:
            sglang.close()
        recorder.close()
        if run_dir:
            run_dir.close()


def _stages_before(config: Config, policy: Policy, embedded: Engine, data: Data) -> list[Stage]:
    """What comes before reinforcement learning."""
    stages: list[Stage] = []
    if config.base.train:
        assert data.chain_sum is not None, "config/rules/stages.py refuses base.train without data.task=chain_sum"
        stages.append(Pretrain(config, policy, embedded, data.chain_sum))
    if data.supervised:
        stages.append(SFT(config.sft, policy, data.supervised))
    return stages


def _opened(path: Path, config: Config) -> RunDir | None:
    """The run directory, on the main rank.

    Raises:
        ValueError: It cannot be used for this run.
        RuntimeError: The disk failed. Both are raised on every rank: none waits for another.
    """
    opened: list[RunDir] = []

    def refused() -> tuple[type[Exception], str] | None:
        try:
            opened.append(open_run_dir(path, to_yaml(config), identity=identity(config)))
        except ValueError as error:
            return ValueError, str(error)
        except OSError as error:
            return RuntimeError, f"{path}: {error}"
        return None

    if problem := main_says(refused):
        kind, words = problem
        raise kind(words)
    return opened[0] if opened else None


def _vocabulary(model: ModelConfig, tokenizer: Tokenizer) -> int:
    """Tokens that the model scores and samples."""
    if model.vocab_size is None:
        return tokenizer.vocab_size
    if model.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"model.vocab_size={model.vocab_size} is below the tokenizer's {tokenizer.vocab_size} tokens; raise it, or "
            "leave it null"
        )
    return model.vocab_size


def _text(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """What the tokens say; those that only the model knows say nothing, as with Hugging Face's tokenizers."""
    return tokenizer.decode(i for i in ids if i < tokenizer.vocab_size)


def _check_origin(init_from: str | None) -> None:
    if init_from is None or huggingface.is_model(Path(init_from)):
        return
    if not (Path(init_from) / checkpoint.STATE).is_file():
        raise FileNotFoundError(
            f"run.init_from={init_from} holds no checkpoint (no {checkpoint.STATE}), and no Hugging Face model (no "
            f"{huggingface.CONFIG})"
        )


def _load_first_weights(config: Config, policy: Policy) -> None:
    """Gives the policy the weights that the first stage starts from, unless that trains its own."""
    if config.base.train:
        return
    if config.run.init_from:
        origin = Path(config.run.init_from)
        (huggingface if huggingface.is_model(origin) else checkpoint).load_weights(origin, policy)
    else:
        logging.getLogger(__name__).warning("starting from random weights: base.train is false and run.init_from null")
        policy.initialize(config.run.seed)


def _opening(config: Config, policy: Policy) -> list[str]:
    """What is about to run."""
    layout, topology, algorithm = config.layout, policy.topology, config.algorithm
    names = ("tp", "pp", "vpp", "cp", "ep", "etp")
    sizes = {"dp": topology.dp_size} | {name: getattr(layout, name) for name in names}
    arranged = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"
    return [
        f"{policy.parameters():,} parameters on {topology.world_size} processes: {arranged}",
        f"{algorithm.prompts_per_step} prompts x {algorithm.group_size} samples per step, {config.run.steps} steps",
    ]

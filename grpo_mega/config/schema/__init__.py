"""The configuration: one dataclass per section, a docstring under every field.

Hydra composes the YAML files of `configs/` into these classes; other fields are refused. Rules that involve more than
one field live in `rules`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from grpo_mega.config.limits import OneOf, With
from grpo_mega.config.schema.algorithm import AlgorithmConfig, CriticConfig
from grpo_mega.config.schema.data import GENERATED_TASKS, DataConfig, SourceConfig
from grpo_mega.config.schema.environment import EnvironmentConfig
from grpo_mega.config.schema.layout import ClusterConfig, LayoutConfig
from grpo_mega.config.schema.model import Llama3RopeConfig, MLAConfig, ModelConfig, MoEConfig, YarnConfig
from grpo_mega.config.schema.optimizer import LoRAConfig, OptimizerConfig, PartConfig, PartsConfig, StateConfig
from grpo_mega.config.schema.reward import RewardConfig, RewardModelConfig, RewardTerm
from grpo_mega.config.schema.rollout import RolloutConfig, SGLangConfig, Timeouts
from grpo_mega.config.schema.run import ANY, REWARD_MODELS, TRACKERS, AlarmsConfig, EvalConfig, RunConfig
from grpo_mega.config.schema.stages import BaseConfig, DistillConfig, PairsConfig, SFTConfig, files_in

__all__ = [
    "ANY",
    "GENERATED_TASKS",
    "REWARD_MODELS",
    "TRACKERS",
    "AlarmsConfig",
    "AlgorithmConfig",
    "BaseConfig",
    "ClusterConfig",
    "Config",
    "CriticConfig",
    "DataConfig",
    "DistillConfig",
    "EnvironmentConfig",
    "EvalConfig",
    "LayoutConfig",
    "Llama3RopeConfig",
    "LoRAConfig",
    "MLAConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PairsConfig",
    "PartConfig",
    "PartsConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RewardTerm",
    "RolloutConfig",
    "RunConfig",
    "SFTConfig",
    "SGLangConfig",
    "SourceConfig",
    "StateConfig",
    "Timeouts",
    "YarnConfig",
    "files_in",
]


WITH_CRITIC = With("algorithm.advantage_baseline", OneOf("critic"))


@dataclass
class Config:
    """The whole configuration of a run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: Annotated[CriticConfig, WITH_CRITIC] = field(default_factory=CriticConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    base: BaseConfig = field(default_factory=BaseConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    pairs: Annotated[PairsConfig, With("run.trains", OneOf(*REWARD_MODELS))] = field(default_factory=PairsConfig)
    alarms: AlarmsConfig = field(default_factory=AlarmsConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

"""The models of a run as one rank holds them, built as `assemble.py` does, with weights that nobody has written."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_mega.config.reward_model import read_reward_model
from grpo_mega.config.schema import Config
from grpo_mega.config.teacher import read_teacher
from grpo_mega.forecast.planning.plan import planned_vocabulary
from grpo_mega.models.model import Model
from grpo_mega.models.policy import Policy
from grpo_mega.models.reference import ReferencePolicy, Teacher
from grpo_mega.models.scalar import REWARD_MODEL, ScalarModel
from grpo_mega.models.topology import Topology
from grpo_mega.platform import Platform


@dataclass(frozen=True)
class Models:
    """The policy, and what the run has beside it."""

    policy: Policy
    reference: ReferencePolicy | None
    critic: ScalarModel | None
    scorer: ScalarModel | None
    teacher: Teacher | None

    @property
    def all(self) -> list[Model | ReferencePolicy]:
        """Those that there are, the policy first."""
        models = (self.policy, self.critic, self.reference, self.scorer, self.teacher)
        return [model for model in models if model is not None]

    @property
    def saved(self) -> list[Model | ReferencePolicy]:
        """Those that checkpoints hold."""
        return [model for model in (self.policy, self.critic, self.reference) if model is not None]


def build_reward_model(config: Config, topology: Topology, platform: Platform) -> ScalarModel:
    """This rank's part of the reward model that a run trains, with its optimizer."""
    settings = config.optimizer
    here = (config.layout, planned_vocabulary(config.model, config.data), topology, platform)
    model = ScalarModel(REWARD_MODEL, config.model, *here, optimizer=settings)
    model.use_optimizer(settings)
    return model


def build(config: Config, topology: Topology, platform: Platform) -> Models:
    """This rank's part of all models, with optimizers.

    Raises:
        ValueError: The files of a teacher or a reward model say nothing of its architecture, or a package that the
            settings name is not here.
    """
    vocab_size, settings = planned_vocabulary(config.model, config.data), config.optimizer
    here = (topology, platform)
    policy = Policy(config.model, config.layout, vocab_size, *here, optimizer=settings, lora=config.lora)
    reference = ReferencePolicy(policy) if config.algorithm.kl_coef else None
    policy.use_optimizer(settings)
    critic = scorer = teacher = None
    if config.algorithm.advantage_baseline == "critic":
        critic = ScalarModel("critic", config.model, config.layout, vocab_size, *here, optimizer=settings, before=True)
        critic.use_optimizer(settings)
    if config.reward.model.path is not None:
        model = read_reward_model(config) or config.model
        size = model.vocab_size or vocab_size
        scorer = ScalarModel(REWARD_MODEL, model, config.layout, size, *here, optimizer=None)
    if taught := read_teacher(config):
        teacher = Teacher(taught.model, config.layout, taught.model.vocab_size or vocab_size, *here)
    return Models(policy, reference, critic, scorer, teacher)

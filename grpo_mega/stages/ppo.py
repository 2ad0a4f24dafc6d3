"""PPO with a critic (Schulman et al., 2017, arXiv 1707.06347), as for language models (Ouyang et al., 2022, arXiv
2203.02155), the baseline of GRPO.

The loop is that of GRPO. A second model, as large as the policy, estimates the future rewards before every token; each
token has its own advantage, the difference to that estimate, and groups are not required.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from grpo_mega.algorithm.gae import explained_variance, generalized_advantages, whitened
from grpo_mega.config.schema import AlgorithmConfig, CriticConfig
from grpo_mega.models.learning_rate import scheduled
from grpo_mega.models.model import Pass
from grpo_mega.models.scalar import ClippedSquaredError, ScalarModel
from grpo_mega.run import Run
from grpo_mega.stages.grpo import GRPO, StageParts
from grpo_mega.types import Batch, Step


class PPO(GRPO):
    """Reinforcement learning of the policy, with advantages from a critic that is trained alongside."""

    name = "ppo"

    def __init__(self, parts: StageParts, critic: ScalarModel, config: CriticConfig) -> None:
        super().__init__(parts)
        self.critic, self.models = critic, [self.policy, critic, *self.copies]
        self.critic_config = config
        self.critic_optimizer = replace(self.optimizer, lr=config.lr)
        updates_per_step = self.algorithm.epochs * self.algorithm.mini_batches
        self.critic_rate = scheduled(self.critic_optimizer, self.most_steps, updates_per_step)
        self.critic_loss = ClippedSquaredError(config.clip)

    def experience(self, run: Run) -> Step:
        """Experience of a step as in GRPO, with a value before every token and advantages from these."""
        current = super().experience(run)
        if current.batch is not None:
            with run.phase("values"):
                scores = [info.score.total for group in current.groups for info in group.infos]
                current.batch = with_critic(current.batch, scores, self.critic, self.algorithm, self.critic_config)
        return current

    def update(self, current: Step, batch: Batch, step: int) -> None:
        """One update of the policy (except in the critic's first steps alone), and one of the critic."""
        if step < self.critic_config.alone_steps:
            current.updates.append({})
        else:
            super().update(current, batch, step)
        lr = self.critic_rate.at(self.critic.updates, step)
        metrics = critic_update(batch, self.critic, self.critic_loss, lr).metrics
        current.updates[-1] |= {f"critic/{name}": value for name, value in metrics.items()}

    def begin(self, run: Run) -> None:
        """Starts from the policy's current weights, which are copied to the critic's body and the reference."""
        self.critic.take_body(self.policy)
        super().begin(run)

    def prepare(self) -> None:
        """Creates both optimizers."""
        super().prepare()
        self.critic.use_optimizer(self.critic_optimizer)

    def state_dict(self) -> dict[str, Any]:
        """GRPO's state, and the number of updates of the critic."""
        return super().state_dict() | {"critic_updates": self.critic.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state of `state_dict`."""
        super().load_state_dict(state)
        self.critic.updates = state["critic_updates"]


def with_critic(
    batch: Batch, scores: Sequence[float], critic: ScalarModel, algorithm: AlgorithmConfig, config: CriticConfig
) -> Batch:
    """The replica's batch with a value before every token, and the resulting advantages and returns.

    `scores` are the rewards of all samples of the step. Every rank must call it.
    """
    replicas = critic.topology.replicas
    value = critic.values(batch)
    rewards = token_rewards(batch, scores, algorithm)
    advantage, returns = generalized_advantages(rewards, value, batch.mask, batch.cu_seqlens, config.gamma, config.lam)
    if algorithm.advantage_std == "batch":
        advantage = whitened(advantage, batch.mask, replicas)
    return batch.with_(value=value, advantage=advantage, returns=returns)


def critic_update(batch: Batch, critic: ScalarModel, loss: ClippedSquaredError, lr: float) -> Pass:
    """One update of the critic on the replica's batch; its metrics include what its values explained before, over all
    replicas' batches. Every rank must call it."""
    update = critic.update(batch, loss, lr)
    update.metrics["explained_variance"] = explained_variance(batch, critic.topology.replicas)
    return update


def token_rewards(batch: Batch, scores: Sequence[float], algorithm: AlgorithmConfig) -> torch.Tensor:
    """[T] rewards of tokens: the sample's score at its last sampled token; with `kl_in=reward`, less kl_coef *
    log(old / reference) at each sampled token."""
    rewards = torch.zeros(len(batch.tokens))
    if algorithm.kl_in == "reward":
        rewards -= algorithm.kl_coef * (batch.old_logprob - batch.ref_logprob) * batch.mask
    # Of each token, the last sampled one up to it; a sequence without any keeps its reward off the mask, at its start.
    latest = torch.where(batch.mask, torch.arange(len(batch.mask)), 0).cummax(0).values
    last = torch.maximum(latest[batch.cu_seqlens[1:] - 1], batch.cu_seqlens[:-1])
    rewards[last] += torch.tensor(scores)[batch.numbers]
    return rewards

"""Supervised steps: maximum likelihood of given tokens, through the same update as GRPO."""

from __future__ import annotations

from grpo_mega.algorithm.weights import token_weights
from grpo_mega.config.schema import Config, OptimizerConfig
from grpo_mega.data.tasks.chain_sum import ChainSum
from grpo_mega.models.losses import negative_log_likelihood
from grpo_mega.models.optimizer import warmed_up
from grpo_mega.models.policy import Gradients, Policy
from grpo_mega.types import Batch, pack_tokens

Row = tuple[list[int], int]
"""Token ids, and how many of them come before the first one that is learned."""


def supervised_update(policy: Policy, rows: list[Row], lr: float) -> Gradients:
    """One update on the mean negative log-likelihood of the learned tokens."""
    batch: Batch = pack_tokens([ids for ids, _ in rows], [start for _, start in rows])
    weight = token_weights(batch.mask, batch.cu_seqlens, "token_mean", constant_length=1)
    return policy.update(batch.with_(weight=weight), negative_log_likelihood, lr)


def cold_start(config: Config, policy: Policy, task: ChainSum) -> float:
    """Supervised steps on traces in the answer format (DeepSeek-R1, section 2.3.1); the last loss."""
    sft = config.sft
    policy.use_optimizer(OptimizerConfig(lr=sft.lr, weight_decay=0.01))
    for step in range(sft.steps):
        traces = task.sft_traces(config.run.seed, step, sft.batch_size)
        rows = [(prompt + completion, len(prompt)) for prompt, completion in traces]
        found = supervised_update(policy, rows, warmed_up(sft.lr, sft.warmup_steps, step))
    return found.metrics["loss"]

"""Supervised fine-tuning: maximum likelihood of given completions, through the same update as GRPO.

Before reinforcement learning it is the cold start (DeepSeek-R1, arXiv 2501.12948, section 2.3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_mega.algorithm.weights import token_weights
from grpo_mega.checkpoint.step_in_progress import StepInProgress
from grpo_mega.config.schema import OptimizerConfig, SFTConfig
from grpo_mega.data.supervised import SupervisedRows
from grpo_mega.models.losses import negative_log_likelihood
from grpo_mega.models.optimizer import warmed_up
from grpo_mega.models.policy import Gradients, Policy
from grpo_mega.models.reference import ReferencePolicy
from grpo_mega.run import Run, StepRecord
from grpo_mega.types import Row, pack_rows


class SFT:
    """Supervised steps on rows that follow from the number of the step."""

    name = "sft"
    reference: ReferencePolicy | None = None
    in_progress: StepInProgress | None = None

    def __init__(self, config: SFTConfig, policy: Policy, rows: SupervisedRows) -> None:
        """Learns `rows`, step by step."""
        self.config = config
        self.save_every = config.save_every
        self.policy = policy
        self.rows = rows
        self.loss = float("nan")

    def begin(self, run: Run) -> None:
        """Starts at the policy's present weights."""
        self.prepare()

    def prepare(self) -> None:
        """Makes the optimizer."""
        self.policy.use_optimizer(OptimizerConfig(lr=self.config.lr, weight_decay=self.config.weight_decay))

    def step(self, run: Run) -> StepRecord:
        """One update on the rows of this step."""
        with run.phase("cold start"):
            lr = warmed_up(self.config.lr, self.config.warmup_steps, run.step)
            metrics = supervised_update(self.policy, self.rows.of_step(run.step), lr).metrics
        self.loss = metrics["loss"]
        return StepRecord({f"sft/{name}": value for name, value in metrics.items()})

    def is_done(self, steps: int) -> bool:
        """Whether nothing is left to do after so many steps."""
        return steps >= self.rows.steps

    def end(self, run: Run) -> None:
        """Reports how well the rows are known."""
        self.policy.optimizer = None
        run.recorder.note(f"cold start: {run.step} supervised steps, loss {self.loss:.3f}")

    def progress(self, step: int) -> str:
        """Steps are whole or not begun."""
        return ""

    def state_dict(self) -> dict[str, Any]:
        """The last loss, for the report, and which rows are learned."""
        return {"loss": self.loss, "rows": self.rows.identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken. Raises ValueError when other rows were learned there."""
        if state.get("rows") != self.rows.identity:
            raise ValueError(
                f"the saved supervised steps learned {state.get('rows')!r}, this run reads {self.rows.identity!r}: "
                "bring back the file, the tokenizer and its template as they were, or give the run a new run.name"
            )
        self.loss = state["loss"]


def supervised_update(policy: Policy, rows: Sequence[Row], lr: float) -> Gradients:
    """One update on the mean negative log-likelihood of the learned tokens."""
    batch = pack_rows(rows)
    weight = token_weights(batch.mask, batch.cu_seqlens, "token_mean", constant_length=1)
    return policy.update(batch.with_(weight=weight), negative_log_likelihood, lr)

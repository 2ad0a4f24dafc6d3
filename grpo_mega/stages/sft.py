"""Supervised fine-tuning: maximum likelihood of given completions, through the same update as GRPO.

Before reinforcement learning this is called a cold start (DeepSeek-R1, arXiv 2501.12948, section 2.3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_mega.algorithm.objective import negative_log_likelihood
from grpo_mega.algorithm.weights import token_weights
from grpo_mega.config.schema import OptimizerConfig, SFTConfig, StateConfig
from grpo_mega.data.supervised import SupervisedRows
from grpo_mega.errors import InputError
from grpo_mega.models.learning_rate import scheduled
from grpo_mega.models.model import Pass
from grpo_mega.models.policy import Policy
from grpo_mega.run import Run, StepRecord
from grpo_mega.types import Row, Step, StreamState, pack_rows


class SFT:
    """Stage of supervised steps, each on the rows of its number."""

    name = "sft"
    in_progress: Step | None = None
    in_flight: StreamState | None = None

    def __init__(self, config: SFTConfig, state: StateConfig, policy: Policy, rows: SupervisedRows) -> None:
        """A stage that trains `policy` on `rows`, with an optimizer whose state is kept as `state` says."""
        self.config, self.state = config, state
        self.save_every, self.most_steps = config.save_every, rows.steps
        self.policy = policy
        self.models = [policy]
        self.rows = rows
        self.rate = scheduled(config, rows.steps)
        self.loss = float("nan")

    def begin(self, run: Run) -> None:
        """Starts from the policy's current weights."""
        self.prepare()

    def prepare(self) -> None:
        """Creates the optimizer."""
        self.policy.use_optimizer(
            OptimizerConfig(lr=self.config.lr, weight_decay=self.config.weight_decay, state=self.state)
        )

    def step(self, run: Run) -> StepRecord:
        """One update on the rows of this step."""
        with run.phase("sft"):
            lr = self.rate.at(update=run.step, step=run.step)
            metrics = supervised_update(self.policy, self.rows.of_step(run.step), lr).metrics
        self.loss = metrics["loss"]
        return StepRecord({f"sft/{name}": value for name, value in metrics.items()})

    def is_done(self, steps: int) -> bool:
        """Whether the stage ends after `steps` steps."""
        return steps >= self.rows.steps

    def end(self, run: Run) -> None:
        """Reports the final loss."""
        self.policy.optimizer = None
        run.recorder.note(f"supervised fine-tuning: {run.step} steps, last loss {self.loss:.3f}")

    def progress(self, step: int) -> str:
        """An empty text: steps of this stage are never stopped half-way."""
        return ""

    def state_dict(self) -> dict[str, Any]:
        """The last loss, for the report, and the identity of the rows."""
        return {"loss": self.loss, "rows": self.rows.identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state of `state_dict`. Raises InputError when it was trained on other rows."""
        if state.get("rows") != self.rows.identity:
            raise InputError(
                f"the supervised rows {self.rows.identity!r}",
                f"the saved supervised steps of this run were on {state.get('rows')!r}",
                "restore the file, the tokenizer and its template, or choose a different run.name",
            )
        self.loss = state["loss"]


def supervised_update(policy: Policy, rows: Sequence[Row], lr: float) -> Pass:
    """One update on the mean negative log-likelihood of the learned tokens of all rows, which every rank has."""
    batch = policy.share(pack_rows(rows))
    learned = [sum(end - first for first, end in row.learned) for row in rows]
    weight = token_weights(batch.mask, batch.cu_seqlens, "token_mean", constant_length=1, counted=learned)
    return policy.update(batch.with_(weight=weight), negative_log_likelihood, lr)

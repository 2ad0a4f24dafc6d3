"""GRPO, step by step, as the paper has it (DeepSeekMath, algorithm 1): this file is the loop and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from grpo_mega.algorithm.advantage import group_advantages, has_signal
from grpo_mega.algorithm.mini_batches import Share, deal
from grpo_mega.algorithm.mismatch import rollout_mismatch
from grpo_mega.algorithm.weights import token_weights
from grpo_mega.checkpoint import checkpoint, random_state, step_in_progress, unfinished
from grpo_mega.checkpoint.step_in_progress import StepInProgress
from grpo_mega.colocation.turns import Turns
from grpo_mega.config.schema import Config
from grpo_mega.data import Data
from grpo_mega.models.losses import grpo_loss
from grpo_mega.models.optimizer import warmed_up
from grpo_mega.models.policy import Gradients, Policy
from grpo_mega.models.reference import ReferencePolicy
from grpo_mega.observe.recorder import Recorder
from grpo_mega.observe.rollout import average, rollout_metrics
from grpo_mega.observe.summary import versions, warn_of_other_versions
from grpo_mega.observe.timer import PhaseTimer
from grpo_mega.platform.stop import Interrupted, Stopped, StopRequest
from grpo_mega.reward.compose import Reward
from grpo_mega.rollout.engine import Engine, SamplingParams
from grpo_mega.rollout.sglang.engine import SGLangEngine
from grpo_mega.types import Batch, Group, Prompt, Sample, pack

logger = logging.getLogger(__name__)

Metrics = dict[str, float]

PATIENCE = 3
"""Steps in a row without any signal before a warning."""
ROUNDING = {"fp32": 1e-4, "bf16": 0.05}
"""Mean difference of log-probs between engine and trainer, in nats, that rounding explains; by `model.dtype`."""


class Trainer:
    """Everything a run needs, and the loop over it."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        engine: Engine,
        data: Data,
        reward: Reward,
        recorder: Recorder,
        timer: PhaseTimer,
    ) -> None:
        self.config = config
        self.policy = policy
        self.reference = ReferencePolicy(policy) if config.algorithm.kl_coef else None
        self.engine = engine
        self.turns: Turns | None = None
        if isinstance(engine, SGLangEngine):
            text = [token for prompt in data.test for token in prompt.token_ids]
            self.turns = Turns(policy, self.reference, engine, config.rollout.sglang, timer, text, recorder.path)
        self.mismatch_watched = False
        self.data = data
        self.reward = reward
        self.recorder = recorder
        self.timer = timer
        self.first_sampling = SamplingParams(
            max_new_tokens=config.rollout.max_new_tokens,
            stop_ids=data.stop_ids,
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            top_k=config.rollout.top_k,
            seed=config.run.seed,
        )
        # With a single update per rollout the old policy is the policy itself.
        self.on_policy = config.algorithm.epochs * config.algorithm.mini_batches == 1
        self.loss = grpo_loss(config.algorithm, self.on_policy)
        self.stop = StopRequest()
        self.step = 0
        self.in_progress: StepInProgress | None = None
        self.updates = 0
        self.steps_without_signal = 0
        self.unfinished: list[Sample] = []
        self.saving: checkpoint.Saving | None = None
        self.newest: Path | None = None
        self.tokens = {"generated": 0, "trained": 0}
        self.before: Metrics = {}
        self.earlier_seconds: Metrics = {}

    def sampling(self, step: int) -> SamplingParams:
        """How completions of a step are sampled: from `rollout.longer_from_step` on they may be longer."""
        longer, since = self.config.rollout.longer_max_new_tokens, self.config.rollout.longer_from_step
        if longer is None or since is None or step < since:
            return self.first_sampling
        return replace(self.first_sampling, max_new_tokens=longer)

    def begin(self) -> None:
        """Starts reinforcement learning at the policy's present weights."""
        random_state.reseed(self.config.run.seed, step=0)
        self.policy.use_optimizer(self.config.optimizer)
        if self.reference:
            self.reference.refresh()
        self.recorder.open_metrics(resume_from_step=-1)
        self.before = self.evaluate("held-out", self.data.test, self.step)

    def run(self) -> None:
        """Trains to `run.steps`, measures what was achieved and records it.

        Raises:
            Stopped: A signal asked for it; what was done is saved, see `grpo_mega.platform.stop`.
        """
        run = self.config.run
        self.stop.listen()
        self.timer.step_seconds()  # what came before belongs to no step
        try:
            while self.step < run.steps or self.in_progress:  # a step that was begun is finished
                metrics, groups = self.train_step()
                if run.eval_every and (self.step + 1) % run.eval_every == 0:
                    found = self.evaluate("validation", self.data.validation, self.step + 1)
                    metrics |= {f"eval/{name}": value for name, value in found.items()}
                self.end_step()
                if self.turns:
                    metrics |= self.turns.metrics()
                self.recorder.step(self.step, metrics | self.seconds(), groups)
                self.finish_saving(wait=False)
                last = self.step >= run.steps
                if last or (run.save_every and self.step % run.save_every == 0):
                    self.save(wait=last or not run.async_save)
            after = self.evaluate("held-out", self.data.test, self.step)
        except Interrupted:
            self.save()
            raise Stopped(f"stopped {self.place()}; {self.newest} is saved, the same command continues there") from None
        self.recorder.finish(self.achieved(after))

    def train_step(self) -> tuple[Metrics, list[Group]]:
        """One iteration, or the rest of the one in progress: experience, then the updates it is good for.

        Raises:
            Interrupted: Before the first update, as if the step had not begun; or behind another one.
        """
        if self.in_progress is None:
            with self.nothing_if_interrupted():
                self.in_progress = self.experience()
        now = self.in_progress
        metrics = rollout_metrics(now.groups, self.config.reward.success)
        metrics["rollout/groups_with_signal"] = average(has_signal(group.rewards) for group in now.groups)
        if now.batch is None:
            return metrics | now.mismatch, now.groups
        with self.timer("update"):
            for mini_batch in islice(self.mini_batches(now), len(now.updates), None):
                if now.updates:
                    self.obey()
                self.timer.go_on()
                found = self.update(mini_batch)
                now.updates.append(found.metrics)
                if self.on_policy:
                    now.batch = now.batch.with_(old_logprob=found.logprob)
        mismatch = self.mismatch(now.batch, now.batch.old_logprob)
        return metrics | _named("policy", _mean(now.updates)) | mismatch, now.groups

    def experience(self) -> StepInProgress:
        """What a step is made of before its first update: questions, groups of answers, rewards, advantages, log-probs.

        Raises:
            Interrupted: A signal arrived in the meantime.
        """
        algorithm = self.config.algorithm
        prompts = self.data.train.take(algorithm.prompts_per_step)
        samples = self.generate("generate", prompts, algorithm.group_size, self.step)
        self.obey()
        with self.timer("reward"):
            groups = self.score(samples)
        step = StepInProgress(groups, self.make_batch(groups))
        with self.timer("logprobs"):
            if step.batch is not None:
                step.batch = self.with_logprobs(step.batch)
            else:  # nothing to learn, but whether engine and trainer agree is to be seen at every step
                self.obey()
                batch = pack(samples)
                step.mismatch = self.mismatch(batch, self.policy.logprobs(batch, self.config.rollout.temperature))
        self.obey()
        self.tokens["generated"] += sum(len(s.token_ids) for s in samples)
        self.watch_signal(groups)
        return step

    def with_logprobs(self, batch: Batch) -> Batch:
        """The batch with the log-probs its updates need; a signal is obeyed before each pass."""
        if self.reference:
            self.obey()
            batch = batch.with_(ref_logprob=self.reference.logprobs(batch, self.config.rollout.temperature))
        if not self.on_policy:
            self.obey()
            batch = batch.with_(old_logprob=self.policy.logprobs(batch, self.config.rollout.temperature))
        return batch

    def end_step(self) -> None:
        """The step in progress is done."""
        self.step, self.in_progress = self.step + 1, None
        refresh = self.config.algorithm.reference_refresh
        if self.reference and refresh and self.step % refresh == 0:
            self.reference.refresh()

    def obey(self) -> None:
        """Raises `Interrupted` on every rank when any of them was asked to stop; every rank must call it."""
        if self.policy.topology.any_rank(self.stop.asked(), self.policy.platform.device):
            raise Interrupted

    @contextmanager
    def nothing_if_interrupted(self) -> Iterator[None]:
        """Takes back what the body did to the order of prompts and to random generators when it is interrupted."""
        prompts, generators = self.data.train.state_dict(), random_state.current()
        try:
            self.obey()
            yield
        except Interrupted:
            self.data.train.load_state_dict(prompts)
            random_state.restore(generators)
            raise

    def place(self) -> str:
        """Where the run stands, in words."""
        if self.in_progress:
            of = len(self.shares(self.in_progress.groups))
            return f"in step {self.step + 1} after {len(self.in_progress.updates)} of {of} updates"
        if self.step >= self.config.run.steps:
            return f"after step {self.step}, before the result was measured"
        return f"in step {self.step + 1} before its first update"

    def score(self, samples: Sequence[Sample]) -> list[Group]:
        """The samples with their rewards, group by group."""
        scored = self.score_all(samples)
        size = self.config.algorithm.group_size
        groups = []
        for i in range(0, len(samples), size):
            totals, terms = zip(*scored[i : i + size], strict=True)
            components = {name: tuple(t[name] for t in terms) for name in terms[0]}
            groups.append(Group(tuple(samples[i : i + size]), totals, components))
        return groups

    def score_all(self, samples: Sequence[Sample]) -> list[tuple[float, dict[str, float]]]:
        """Total reward and terms of every sample; each sample is scored by one rank alone, for all."""
        return self.policy.topology.spread_over_ranks(samples, lambda mine: self.reward.score(list(mine)))

    def chosen(self, groups: Sequence[Group]) -> tuple[list[int], list[int]]:
        """Numbers of the samples that updates compute, and of those that count in their denominators.

        A group without signal has advantage 0 everywhere. By equation 3 its samples count all the same, and the KL
        term, like an entropy bonus, moves them; where there is neither they have no gradient and need no computation.
        """
        algorithm = self.config.algorithm
        signal = [has_signal(group.rewards) for group in groups for _ in group.samples]
        with_signal, everyone = [i for i, there in enumerate(signal) if there], list(range(len(signal)))
        if algorithm.groups_without_signal == "drop":
            return with_signal, with_signal
        return (everyone if algorithm.kl_coef or algorithm.entropy_coef else with_signal), everyone

    def make_batch(self, groups: Sequence[Group]) -> Batch | None:
        """Packs the samples that updates compute, with their advantages; None when there is none."""
        std = self.config.algorithm.advantage_std
        advantages = [group_advantages(torch.tensor(g.rewards, dtype=torch.float64), std) for g in groups]
        trained, _ = self.chosen(groups)
        if not trained:
            return None
        samples = [sample for group in groups for sample in group.samples]
        batch = pack([samples[i] for i in trained])
        advantage = torch.cat(advantages)[trained].repeat_interleave(batch.lengths)
        return batch.with_(advantage=advantage * batch.mask)

    def shares(self, groups: Sequence[Group]) -> list[Share]:
        """The samples of every mini-batch of a step, epoch after epoch; the same whenever it is asked for."""
        algorithm = self.config.algorithm
        trained, counted = self.chosen(groups)
        seeds = [f"{self.config.run.seed}/mini-batches/{self.step}/{epoch}" for epoch in range(algorithm.epochs)]
        return [share for seed in seeds for share in deal(counted, trained, algorithm.mini_batches, seed)]

    def mini_batches(self, step: StepInProgress) -> Iterator[Batch]:
        """The batch of the step cut into the updates, each with its weights over all samples that count in it."""
        batch, longest = step.batch, self.sampling(self.step).max_new_tokens
        if batch is None:
            return
        place = {sample: i for i, sample in enumerate(self.chosen(step.groups)[0])}
        tokens = [len(sample.token_ids) for group in step.groups for sample in group.samples]
        for share in self.shares(step.groups):
            part = batch.select([place[i] for i in share.trained])
            left_out = [tokens[i] for i in share.left_out]
            weight = token_weights(part.mask, part.cu_seqlens, self.config.algorithm.aggregation, longest, left_out)
            yield part.with_(weight=weight)

    def update(self, mini_batch: Batch) -> Gradients:
        """One optimizer update on the GRPO objective."""
        lr = warmed_up(self.config.optimizer.lr, self.config.optimizer.warmup_steps, self.updates)
        self.updates += 1
        self.tokens["trained"] += int(mini_batch.mask.sum())
        return self.policy.update(mini_batch, self.loss, lr, self.config.rollout.temperature)

    def evaluate(self, split: str, prompts: list[Prompt], step: int) -> Metrics:
        """Accuracy, format rate and length of one sampled answer per prompt behind a step; also reported.

        Raises:
            Interrupted: A signal arrived in the meantime; it can be done again with the same result.
        """
        with self.nothing_if_interrupted():
            samples = self.generate("evaluate", prompts, 1, step)
            self.obey()
            with self.timer("evaluate"):
                scored = self.score_all(samples)
        terms = {name: average(t[name] for _, t in scored) for name in scored[0][1]}
        metrics = {"accuracy": terms.pop(self.config.reward.success), **terms}
        metrics["length"] = average(len(s.token_ids) for s in samples)
        self.recorder.evaluation(step, split, metrics)
        return metrics

    def generate(self, phase: str, prompts: list[Prompt], group_size: int, version: int) -> list[Sample]:
        """Samples of the policy, as a phase of the step; an engine with weights of its own gets them before.

        Raises:
            Interrupted: A signal arrived in the meantime.
        """

        def interrupted() -> bool:
            self.timer.go_on()
            return self.stop.asked()

        def work() -> list[Sample]:
            return self.engine.generate(prompts, group_size, self.sampling(version), version, interrupted)

        if self.turns:
            return self.turns.generate(version, phase, work)
        with self.timer(phase):
            return work()

    def mismatch(self, batch: Batch, logprob: torch.Tensor) -> Metrics:
        """How far the trainer's log-probs are from the engine's.

        Warns when they are not those of the same weights, in the first step behind a start.
        """
        mismatch = rollout_mismatch(logprob[batch.mask], batch.rollout_logprob[batch.mask])
        allowed = ROUNDING[self.config.model.dtype]
        if not self.mismatch_watched and not mismatch["mean_abs"] <= allowed:
            logger.warning(
                "the engine's log-probs differ from the trainer's by %.2g on average and %.2g at most, although both "
                "have the same weights; rounding explains %g: compare their kernels, dtypes and sampling settings",
                mismatch["mean_abs"],
                mismatch["max_abs"],
                allowed,
            )
        self.mismatch_watched = True
        return _named("mismatch", mismatch)

    def watch_signal(self, groups: Sequence[Group]) -> None:
        """Warns when step after step no group had two different rewards: nothing is being learned."""
        signal = any(has_signal(group.rewards) for group in groups)
        self.steps_without_signal = 0 if signal else self.steps_without_signal + 1
        if self.steps_without_signal == PATIENCE:
            logger.warning(
                "no group had two different rewards for %d steps, so nothing was learned from them: the problems are "
                "too hard or too easy for the policy, or the answer format was never sampled; look at samples/",
                PATIENCE,
            )

    def seconds(self) -> Metrics:
        """Wall seconds of the step by phase, and in total."""
        phases = {f"time/{name}": spent.wall for name, spent in self.timer.step_seconds().items()}
        # Measured once per step; the checkpoint's time is that of the one before this step.
        apart = phases.get("time/evaluate", 0.0) + phases.get("time/checkpoint", 0.0)
        return {**phases, "time/step": sum(phases.values()) - apart}

    def total_seconds(self) -> Metrics:
        """Wall seconds of the whole run by phase, over all its starts."""
        now = {name: spent.wall for name, spent in self.timer.totals().items()}
        names = [*self.earlier_seconds, *(name for name in now if name not in self.earlier_seconds)]
        return {name: round(self.earlier_seconds.get(name, 0.0) + now.get(name, 0.0), 2) for name in names}

    def save(self, wait: bool = True) -> None:
        """Writes a checkpoint of the whole run, unless the newest is of this moment.

        Without `wait`, helper processes write it while training goes on.
        """
        self.finish_saving()
        path = checkpoint.step_path(self.checkpoints, self.step, self.in_progress)
        if path == self.newest:
            return
        with self.timer("checkpoint"):
            self.saving = checkpoint.Saving(
                path, self.policy, self.state_dict(), self.reference, not wait, self.in_progress
            )
        if wait:
            self.finish_saving()

    def finish_saving(self, wait: bool = True) -> None:
        """Completes the checkpoint that is being written, if there is one, and deletes the oldest ones."""
        if self.saving is None:
            return
        with self.timer("checkpoint"):
            if not self.saving.finish(wait):
                return
            self.newest, self.saving = self.saving.path, None
            if self.policy.topology.is_main:
                checkpoint.prune(self.newest, self.config.run.keep_checkpoints, self.config.run.keep_every)
                logger.info("the checkpoint %s is complete", self.newest)

    def resume(self) -> bool:
        """Continues at the newest checkpoint of the run directory; False when there is none."""
        with self.timer("checkpoint"):  # reads all of it, and then again: two signs of life
            newest = checkpoint.newest_whole(self.checkpoints)
        if newest is None:
            return False
        self.policy.use_optimizer(self.config.optimizer)
        with self.timer("checkpoint"):
            state = checkpoint.load(newest, self.policy, self.reference)
        self.load_state_dict(state)
        random_state.load(newest, self.config.run.seed, self.step)
        self.in_progress, self.newest = step_in_progress.load(newest), newest
        behind = self.place() if self.in_progress else f"behind step {self.step}"
        self.recorder.note(f"continuing {behind}, from {newest}")
        self.recorder.open_metrics(resume_from_step=self.step)
        return True

    @property
    def checkpoints(self) -> Path:
        """The run's folder of checkpoints."""
        return Path(self.config.run.root) / self.config.run.name / "checkpoints"

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on besides tensors and generators. Sampling noise is a function of counters."""
        return {
            "step": self.step,
            "updates": self.updates,
            "steps_without_signal": self.steps_without_signal,
            "tokens": self.tokens,
            "before": self.before,
            "seconds": self.total_seconds(),
            "data": self.data.train.state_dict(),
            "unfinished": unfinished.to_json(self.unfinished),
            "versions": versions(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken."""
        self.step, self.updates = state["step"], state["updates"]
        self.steps_without_signal = state["steps_without_signal"]
        self.tokens, self.before = state["tokens"], state["before"]
        self.earlier_seconds = state["seconds"]
        self.data.train.load_state_dict(state["data"])
        self.unfinished = unfinished.from_json(state["unfinished"])
        warn_of_other_versions(state["versions"])

    def achieved(self, after: Metrics) -> dict[str, Any]:
        """The fields of summary.json that the loop knows."""
        names = {"accuracy": "held_out_accuracy", "format": "format_rate", "length": "mean_length"}
        moments = {"before": self.before, "after": after}
        return {
            "status": "completed",
            "steps": self.step,
            **{f"{names.get(k, k)}_{when}": x for when, metrics in moments.items() for k, x in metrics.items()},
            "tokens_trained": self.tokens["trained"],
            "tokens_generated": self.tokens["generated"],
            "seconds": self.total_seconds(),
            "layout": asdict(self.config.layout) | {"dp": self.policy.topology.dp_size},
            "world_size": self.policy.topology.world_size,
            "parameters": self.policy.parameters(),
            "versions": versions(),
        }


def _mean(updates: Sequence[Metrics]) -> Metrics:
    """Each metric's mean over the updates of a step."""
    return {name: average(metrics[name] for metrics in updates) for name in updates[0]}


def _named(room: str, metrics: Metrics) -> Metrics:
    return {f"{room}/{name}": value for name, value in metrics.items()}

"""Reward terms for programs that the policy writes: each runs against its problem's tests in a sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from grpo_mega.config.schema.terms import CodeOptions
from grpo_mega.judges.sandbox import Limits, Sandbox, SandboxUnavailable
from grpo_mega.platform.trace import span
from grpo_mega.reward.code import code_score
from grpo_mega.reward.verdict import Verdict
from grpo_mega.types import Sample


@dataclass(frozen=True)
class Programs:
    """Scores the programs of completions.

    Attributes:
        options: Resource limits and scoring rule.
        seconds: Wall-clock limit for one test.
        sandbox: Sandbox that runs the programs.
    """

    options: CodeOptions
    seconds: float
    sandbox: Sandbox = field(init=False)

    def __post_init__(self) -> None:
        """Raises ValueError, with the fix, when no containment mechanism works on this machine."""
        try:
            made = Sandbox(self.options.boxes or None, run_without_isolation=self.options.run_without_isolation)
        except SandboxUnavailable as error:
            raise ValueError(f"reward terms of the kind code need a sandbox: {error}") from error
        object.__setattr__(self, "sandbox", made)

    def outcomes(self, samples: Sequence[Sample]) -> list[Verdict | Exception]:
        """Verdict for each sample: the share of tests passed, or whether all pass, and the first failure.

        A program that the sandbox could not run leaves its sample without a score. A problem with invalid tests is an
        error.
        """
        with ThreadPoolExecutor(self.sandbox.boxes, "reward worker") as threads:
            return list(threads.map(self._outcome, samples))

    def _outcome(self, sample: Sample) -> Verdict | Exception:
        options = self.options
        limits = Limits(
            cpu_seconds=options.cpu_seconds,
            wall_seconds=self.seconds,
            memory_bytes=options.memory_mib << 20,
        )
        try:
            with span("program"):
                return code_score(sample, limits, options.all_or_nothing, self.sandbox, options.strict)
        except ValueError as error:
            return error

"""Terms by programs that the policy writes: each is run against its problem's tests, in a sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from grpo_mega.config.schema.terms import CodeOptions
from grpo_mega.platform.trace import span
from grpo_mega.reward.code import code_score
from grpo_mega.reward.verdict import Verdict
from grpo_mega.sandbox import Limits, Sandbox, SandboxUnavailable
from grpo_mega.types import Sample


@dataclass(frozen=True)
class Programs:
    """What runs the programs of completions.

    Attributes:
        options: What a program may use, and what it earns.
        seconds: Time limit for one test, by the clock.
        sandbox: Where the programs run.
    """

    options: CodeOptions
    seconds: float
    sandbox: Sandbox = field(init=False)

    def __post_init__(self) -> None:
        """Raises ValueError, with the fix, when nothing on this machine can keep programs in."""
        try:
            made = Sandbox(self.options.boxes or None, run_without_isolation=self.options.run_without_isolation)
        except SandboxUnavailable as error:
            raise ValueError(f"reward terms of the kind code need a sandbox: {error}") from error
        object.__setattr__(self, "sandbox", made)

    def outcomes(self, samples: Sequence[Sample]) -> list[Verdict | Exception]:
        """The share of its tests that each sample's program passes, or whether it passes all; and the first failure.

        A program that the sandbox could not run leaves its sample without a score. A problem whose tests are none is an
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
                return code_score(sample, limits, options.all_or_nothing, self.sandbox)
        except ValueError as error:
            return error

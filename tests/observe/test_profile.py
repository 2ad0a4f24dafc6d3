"""torch's profiler over some steps: what it cannot do is logged, and the run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_mega.config.schema import RunConfig
from grpo_mega.observe import profile


def test_a_profiler_that_does_not_start_is_said_and_the_steps_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def taken(**_: object) -> None:
        raise RuntimeError("another program has the counters")

    monkeypatch.setattr(profile, "profile", taken)
    config = RunConfig(name="mine", root=str(tmp_path), profile_steps="1:2")
    with profile.Profile(config, is_last=True, rank=0) as profiling:
        for step in (1, 2):
            profiling.before(step)
            profiling.after(step)
    assert ["profile: RuntimeError: another program" in message for message in caplog.messages] == [True]

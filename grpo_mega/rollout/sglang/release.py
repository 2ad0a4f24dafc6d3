"""Checks that a supported release of SGLang is installed, without the slow import."""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib.metadata import PackageNotFoundError, version

from grpo_mega.config.schema import RolloutConfig
from grpo_mega.rollout.sglang.supported import NEEDED, OLDEST

TESTED = "0.5.23"
"""Newest release that was tested."""


def check_installed(rollout: RolloutConfig) -> None:
    """Checks that `rollout.engine` is installed; an engine checks more when it starts (`supported.py`).

    Raises:
        ValueError: SGLang is absent, or too old for the configuration; with the command that installs it.
    """
    if rollout.engine != "sglang":
        return
    install = f"install it with `{sys.executable} -m pip install sglang=={TESTED}`"
    if not is_installed():
        raise ValueError(
            f"rollout.engine=sglang, and there is no SGLang here: {install} (with GPUs see docs/clusters.md), or set "
            "rollout.engine=embedded"
        )
    try:
        release = version("sglang")
    except PackageNotFoundError:  # a source tree of unknown release
        return
    if _numbers(release) < _numbers(OLDEST):
        raise ValueError(f"rollout.engine=sglang needs SGLang {OLDEST} or newer, and this is {release}: {install}")
    asked = {name: f"rollout.sglang.arguments.{name}" for name, given in rollout.sglang.arguments.items() if given}
    if rollout.sglang.routing_replay:
        asked["enable_return_routed_experts"] = "rollout.sglang.routing_replay"
    for argument, (_, oldest) in NEEDED.items():
        if argument in asked and _numbers(release) < _numbers(oldest):
            raise ValueError(f"{asked[argument]} needs SGLang {oldest} or newer, and this is {release}: {install}")


def is_installed() -> bool:
    """Whether a package sglang is installed; a folder of that name, such as a clone of its sources, does not count."""
    spec = importlib.util.find_spec("sglang")
    return spec is not None and spec.origin is not None


def _numbers(release: str) -> tuple[int, ...]:
    """The first three numbers of a release: (0, 5, 23) for 0.5.23.post1."""
    return tuple(int(number) for number in re.findall(r"\d+", release)[:3])

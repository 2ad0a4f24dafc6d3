"""What a release of SGLang supports: checked before a run starts, and again by the engine, which has imported SGLang.

`check_installed` only reads the version, as the import is slow; `supported` runs in the engine's process (`host.py`).
Nothing else of the trainer is imported here.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from grpo_mega.errors import InputError

if TYPE_CHECKING:
    from grpo_mega.config.schema import RolloutConfig

TESTED = "0.5.23"
"""Newest release that was tested."""
NOT_ALWAYS = ("disable_prefill_cuda_graph", "disable_piecewise_cuda_graph")
"""Server arguments by which the trainer turns features off; left out where the release lacks them, because it lacks the
feature or has a different name for it."""
OLDEST = "0.5.6"
"""First release that takes weights as bytes."""
NEEDED = {
    "enable_return_routed_experts": ("return_routed_experts", "0.5.9"),
    "enable_dp_attention": ("routed_dp_rank", "0.5.10"),
}
"""Server argument -> request parameter that it needs, and the first release with that parameter."""


def check_installed(rollout: RolloutConfig) -> None:
    """Checks that `rollout.engine` is installed, and recent enough for the configuration.

    Raises:
        InputError: SGLang is absent or too old; with the command that installs it.
    """
    if rollout.engine != "sglang":
        return
    install = f"install it with `{sys.executable} -m pip install sglang=={TESTED}`"
    if not is_installed():
        raise InputError(
            "rollout.engine=sglang",
            "SGLang is not installed here",
            f"{install} (with GPUs see docs/clusters.md), or set rollout.engine=embedded",
        )
    # A source tree has no version, so only the engine itself can find out what it lacks (`supported`).
    try:
        release = version("sglang")
    except PackageNotFoundError:
        return
    if _numbers(release) < _numbers(OLDEST):
        raise InputError("rollout.engine=sglang", f"it needs SGLang {OLDEST} or newer, and this is {release}", install)
    # Server argument -> setting that uses it. An argument that is set to false uses nothing.
    used = {name: f"rollout.sglang.arguments.{name}" for name, given in rollout.sglang.arguments.items() if given}
    if rollout.sglang.routing_replay:
        used["enable_return_routed_experts"] = "rollout.sglang.routing_replay"
    for argument, (_, oldest) in NEEDED.items():
        if argument in used and _numbers(release) < _numbers(oldest):
            raise InputError(used[argument], f"it needs SGLang {oldest} or newer, and this is {release}", install)


def is_installed() -> bool:
    """Whether a package sglang is installed; a folder of that name, such as a clone of its sources, does not count."""
    spec = importlib.util.find_spec("sglang")
    return spec is not None and spec.origin is not None


def _numbers(release: str) -> tuple[int, ...]:
    """The first three numbers of a release: (0, 5, 23) for 0.5.23.post1."""
    return tuple(int(number) for number in re.findall(r"\d+", release)[:3])


class EngineRefused(Exception):
    """A request that cannot be carried out; the engine's state is unchanged."""


def supported(arguments: dict[str, Any]) -> dict[str, Any]:
    """Server arguments for the installed release: `arguments` without those of `NOT_ALWAYS` that it lacks.

    Raises:
        EngineRefused: The release is too old for these arguments and would fail later with an unclear error, or it
            lacks an argument.
    """
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    known = [*inspect.signature(ServerArgs).parameters]
    arguments = {name: value for name, value in arguments.items() if name not in NOT_ALWAYS or name in known}
    # Features are looked up in the code rather than deduced from the version, which a source tree may not have.
    if not hasattr(FlattenedTensorBucket, "supports_multi_dtypes"):
        raise EngineRefused(f"SGLang {version('sglang')} does not take weights as bytes; install {OLDEST} or newer")
    # A parameter of requests that is missing would otherwise be noticed only when the first sample is requested.
    parameters = inspect.signature(Engine.async_generate).parameters
    for argument, (parameter, oldest) in NEEDED.items():
        if arguments.get(argument) and parameter not in parameters:
            raise EngineRefused(
                f"{argument}: SGLang {version('sglang')} does not support it; install {oldest} or newer"
            )
    for name in arguments:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            raise EngineRefused(
                f"rollout.sglang.arguments.{name}: SGLang {version('sglang')} has no such server argument"
                + (f"; did you mean {close[0]}?" if close else "")
            )
    return arguments

"""Refuses, with the reason, arguments that the installed release of SGLang does not support, before SGLang fails.

This runs in the engine's process (`host.py`), which has imported SGLang; `release.py` only reads the version.
"""

from __future__ import annotations

import inspect
from difflib import get_close_matches
from importlib.metadata import version
from typing import Any

NOT_ALWAYS = ("disable_prefill_cuda_graph", "disable_piecewise_cuda_graph")
"""Server arguments by which the trainer turns features off; left out where the release lacks them, because it lacks the
feature or has another name for it."""
OLDEST = "0.5.6"
"""First release that takes weights as bytes."""
NEEDED = {
    "enable_return_routed_experts": ("return_routed_experts", "0.5.9"),
    "enable_dp_attention": ("routed_dp_rank", "0.5.10"),
}
"""Server argument -> request parameter that it needs, and the first release with that parameter."""


class EngineRefused(Exception):
    """A request that cannot be carried out; the engine's state is unchanged."""


def supported(arguments: dict[str, Any]) -> dict[str, Any]:
    """Server arguments for the installed release: `arguments` without those of `NOT_ALWAYS` that it lacks.

    Raises:
        Refused: The release is too old for these arguments, or an argument does not exist in it.
    """
    arguments = {name: value for name, value in arguments.items() if name not in NOT_ALWAYS or name in _parameters()}
    _check_release(arguments)
    _check_names(arguments)
    return arguments


def _check_release(arguments: dict[str, Any]) -> None:
    """Refuses releases that would fail later with an unclear error."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    if not hasattr(FlattenedTensorBucket, "supports_multi_dtypes"):
        raise EngineRefused(f"SGLang {version('sglang')} does not take weights as bytes; install {OLDEST} or newer")
    parameters = inspect.signature(Engine.async_generate).parameters
    for argument, (parameter, oldest) in NEEDED.items():
        if arguments.get(argument) and parameter not in parameters:
            raise EngineRefused(
                f"{argument}: SGLang {version('sglang')} cannot be asked for it; install {oldest} or newer"
            )


def _check_names(arguments: dict[str, Any]) -> None:
    """Refuses server arguments that the installed release does not have."""
    for name in arguments:
        if name not in _parameters():
            close = get_close_matches(name, _parameters(), n=1)
            raise EngineRefused(
                f"rollout.sglang.arguments.{name}: SGLang {version('sglang')} has no such server argument"
                + (f"; did you mean {close[0]}?" if close else "")
            )


def _parameters() -> list[str]:
    """Names of the installed release's server arguments."""
    from sglang.srt.server_args import ServerArgs

    return [*inspect.signature(ServerArgs).parameters]

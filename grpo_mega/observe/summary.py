"""Writes summary.json: the results of a run, and the versions of its software."""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from grpo_mega.platform.files import write_atomic

SUMMARY = "summary.json"

logger = logging.getLogger(__name__)

ORDER = (
    "status",
    "stopped_by",
    "steps",
    "held_out_accuracy_before",
    "held_out_accuracy_after",
    "held_out_problems",
    "format_rate_before",
    "format_rate_after",
    "mean_length_before",
    "mean_length_after",
    "alarms",
    "tokens_trained",
    "tokens_generated",
    "seconds",
    "layout",
    "versions",
)
"""Order of the most important keys; other keys follow alphabetically."""

DECIDING = ("torch", "megatron-core")
"""Packages whose version can change results in the last bit."""

PACKAGES = ("torch", "megatron-core", "transformer-engine", "apex", "flash-attn-4", "sglang")


def write_summary(run_dir_path: Path, summary: dict[str, Any]) -> None:
    """Writes summary.json.

    Raises:
        ValueError: A value is not JSON (a tensor, NaN); names the key.
    """
    keys = [key for key in ORDER if key in summary] + sorted(summary.keys() - set(ORDER))
    for key in keys:
        try:
            json.dumps(summary[key], allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"summary field {key!r} cannot be written as JSON: {error}") from None
    write_atomic(run_dir_path / SUMMARY, json.dumps({key: summary[key] for key in keys}, indent=2) + "\n")


def how_it_ended(summary: Mapping[str, Any]) -> str:
    """How a run ended, in words; empty if its summary, which may be {}, does not say."""
    if stopped_by := summary.get("stopped_by"):
        return f"stopped by the alarm {stopped_by}"
    return str(summary.get("status", ""))


def versions() -> dict[str, str]:
    """Versions of Python and of those of `PACKAGES` that are installed, without importing them."""
    installed = {name: _version(name) for name in PACKAGES}
    return {"python": platform.python_version()} | {name: number for name, number in installed.items() if number}


def warn_of_other_versions(before: dict[str, str]) -> None:
    """Warns when `before`, an earlier result of `versions`, has other versions of `DECIDING` packages."""
    now = versions()
    for name in DECIDING:
        if before.get(name) != now.get(name):
            logger.warning(
                "this run was saved with %s %s and continues with %s: its numbers may differ in rounding; install %s "
                "to continue bit for bit",
                name, before.get(name, "absent"), now.get(name, "absent"), before.get(name, "absent"),
            )  # fmt: skip


def _version(name: str) -> str | None:
    try:
        package = distribution(name)
    except PackageNotFoundError:
        return None
    # PyPI has an unrelated package of that name; NVIDIA's Apex has apex.optimizers.
    if name == "apex" and not any(str(file).startswith("apex/optimizers/") for file in package.files or ()):
        return None
    return package.version

"""Checks that Transformer Engine can be used: installed, in a version that Megatron supports, and importable."""

from __future__ import annotations

import importlib
import importlib.util
import re
from importlib.metadata import PackageNotFoundError, version

from grpo_mega.errors import InputError

OLDEST, BEFORE = (2, 9), (2, 12)
"""Versions supported by megatron-core 0.16, from the first to below the second; pyproject.toml pins the same."""
INSTALL = "python -m pip install --no-build-isolation 'transformer-engine[pytorch]>=2.9,<2.12'"


def usable_transformer_engine() -> bool:
    """Whether Transformer Engine is installed and usable, on a machine with a GPU. Imports it, which takes seconds.

    Raises:
        InputError: It is installed but cannot be used; the message has the command that fixes or removes it.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return False
    try:
        release = version("transformer-engine")
    except PackageNotFoundError:
        # Some images have the module, built from source, without package metadata.
        release = str(getattr(importlib.import_module("transformer_engine"), "__version__", "of an unknown version"))
    # The first two numbers: (2, 11) for 2.11.0+abc; () for a text without numbers, which sorts first.
    numbers = tuple(int(number) for number in re.findall(r"\d+", release.split("+")[0])[:2])
    if not OLDEST <= numbers < BEFORE:
        raise InputError(
            f"Transformer Engine {release}",
            "megatron-core works with 2.9 to 2.11",
            f"{INSTALL}; or train without it, slower: python -m pip uninstall transformer-engine",
        )
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:
        # A library built for another torch or CUDA can raise anything on import.
        what = f"installed, but cannot be imported ({type(error).__name__}: {error})"
        fix = f"build it for the installed torch: {INSTALL}"
        raise InputError(f"Transformer Engine {release}", what, fix) from error
    return True

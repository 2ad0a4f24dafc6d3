"""Whether Megatron's layers can come from Transformer Engine: there, of a version that Megatron knows, and loadable."""

from __future__ import annotations

import importlib
import importlib.util
import re
from importlib.metadata import PackageNotFoundError, version

OLDEST, BEFORE = (2, 9), (2, 12)
"""Versions that megatron-core 0.16 declares to work with, the second excluded; pyproject.toml pins the same."""
INSTALL = "python -m pip install --no-build-isolation 'transformer-engine[pytorch]>=2.9,<2.12'"


def usable_transformer_engine() -> bool:
    """False when it is not installed. Loads it, which takes seconds; for machines with a GPU.

    Raises:
        ValueError: It is installed and cannot be used; says how to get one that can, or rid of it.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return False
    found = _version()
    if not OLDEST <= _numbers(found) < BEFORE:
        raise ValueError(
            f"Transformer Engine {found} is installed, and megatron-core works with 2.9 to 2.11: {INSTALL}; training "
            "works without any, slower: python -m pip uninstall transformer-engine"
        )
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # a library that does not fit torch's or CUDA's can raise anything
        raise ValueError(
            f"Transformer Engine {found} is installed and cannot be imported ({type(error).__name__}: {error}); build "
            f"it for the torch that is installed: {INSTALL}"
        ) from error
    return True


def _version() -> str:
    try:
        return version("transformer-engine")
    except PackageNotFoundError:  # built from source, some images have the module and not the package's name
        return str(getattr(importlib.import_module("transformer_engine"), "__version__", "of an unknown version"))


def _numbers(text: str) -> tuple[int, ...]:
    """(2, 11) of 2.11.0+abc; () of no version, which is below all."""
    return tuple(int(number) for number in re.findall(r"\d+", text.split("+")[0])[:2])

"""These tests need SGLang, and so an environment of their own: `make test-sglang`. They share jobs with other rooms."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

for room in ("rollout", "train", "evaluate"):
    sys.path.append(str(Path(__file__).resolve().parents[1] / room))


def _installed() -> bool:
    try:
        importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


collect_ignore_glob = [] if _installed() else ["test_*.py"]

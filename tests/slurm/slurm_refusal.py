"""A reward that cannot be imported on rank 0."""

from __future__ import annotations

import os

if os.environ["RANK"] != "0":
    pass

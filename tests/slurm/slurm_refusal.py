"""A reward that rank 0 alone cannot import."""

from __future__ import annotations

import os

import slurm_rewards

if os.environ["RANK"] != "0":
    one = slurm_rewards.disturbed

"""Ranks whose calls end only once one is under way in every process of all ranks; each prints the samples it then has.

Usage: together_job.py SECONDS ; TOGETHER is the folder of `made_environments.Together`.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing

import torch.distributed as dist
from test_conversation import HostileTokenizer, say

from grpo_mega import platform
from grpo_mega.config.schema import EnvironmentConfig
from grpo_mega.environment.conversation import Conversation

platform.join_processes(platform.start())
settings = EnvironmentConfig(
    path="made_environments:Together", open="", close="=", at_once=2, seconds=float(sys.argv[1])
)
with closing(Conversation(settings, HostileTokenizer(), 200, 0)) as conversation:
    # One rank holds them all.
    held = [say("x", number) for number in range(5)] if dist.get_rank() == 1 else []
    found = conversation.go_on(held, 200)
print(json.dumps([(sample.number, sample.finish_reason) for sample in found]))

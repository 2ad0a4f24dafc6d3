"""Ranks that start an environment which one of them cannot import; each prints how it was refused."""

from __future__ import annotations

from composed import composed

from grpo_mega import platform
from grpo_mega.data.tokenizer import CharTokenizer
from grpo_mega.environment.conversation import conversation_of
from grpo_mega.errors import InputError

environment = ["environment.path=on_the_first_rank:double", "environment.close='='", "environment.at_once=1"]
config = composed("experiment=tiny", *environment)
platform.join_processes(platform.start())
try:
    with conversation_of(config, CharTokenizer()):
        raise AssertionError("it was not refused")
except InputError as error:
    print(error)

"""What an environment without anything async says, asked in this process."""

from __future__ import annotations

from typing import Any

from grpo_mega.environment import episode
from grpo_mega.reward.user_worker import without_loop


def opening(*arguments: Any, **options: Any) -> str:
    return without_loop(episode.opening(*arguments, **options))


def reply(*arguments: Any, **options: Any) -> dict[str, Any]:
    return without_loop(episode.reply(*arguments, **options))


def reward(*arguments: Any, **options: Any) -> float | None:
    return without_loop(episode.reward(*arguments, **options))

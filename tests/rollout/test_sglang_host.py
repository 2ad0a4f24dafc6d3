"""What the process of an SGLang engine does by itself, without SGLang."""

from __future__ import annotations

from multiprocessing import Pipe
from threading import Thread

from limits import limit

from grpo_mega.rollout.sglang.host import Outbox


def test_an_engine_goes_on_while_nobody_listens_and_then_all_arrives_in_order() -> None:
    """More than fits into a pipe: a trainer that is itself sending would wait for ever for an engine that waits."""
    ours, theirs = Pipe()
    outbox = Outbox(theirs)
    messages = [("sample", number, "x" * 10**6) for number in range(5)]
    sender = Thread(target=lambda: [outbox.send(*message) for message in messages], daemon=True)
    sender.start()
    sender.join(limit(60))
    assert not sender.is_alive()
    assert [ours.recv() for _ in messages] == messages

"""Hostile programs, as root and as an ordinary user, in boxes of every mechanism: contained, and nothing is left."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from attacks import BEGIN, ENDED, HARMLESS, INSIDE
from runners import MECHANISMS, USERS, Runner, runner

QUICK = {("bubblewrap", "root"), ("landlock", "user"), ("bubblewrap", USERS[0])}
"""Mechanisms and users that `make test` tries; the others are in the long suite."""
CASES = [
    pytest.param(
        (mechanism, user), id=f"{mechanism}-{user}", marks=() if (mechanism, user) in QUICK else pytest.mark.long
    )
    for mechanism in MECHANISMS
    for user in USERS
]
WORKING = {"cpu_seconds": 60, "wall_seconds": 60.0}
"""For attacks that end by themselves, or by their memory: a fresh page of it costs some machines ten times as much."""
COMPUTING = WORKING | {"cpu_seconds": 1}
"""For attacks that only their CPU time ends."""
WAITING = COMPUTING | {"wall_seconds": 1.0}
"""For attacks that only the clock ends."""


class World:
    """What there is to attack, of one user: a server, sockets, a process, files, an environment."""

    def __init__(self, uid: int, stack: ExitStack) -> None:
        self.token = f"token{secrets.token_hex(8)}"
        self.folder = Path(tempfile.mkdtemp(prefix="sandbox-world-"))
        stack.callback(shutil.rmtree, self.folder)
        self.folder.chmod(0o777)
        self.own, secret, link = self.folder / "own", self.folder / "secret", self.folder / "link"
        secret.write_text("what nobody may read")
        link.symlink_to(secret)
        self.reset(uid)
        user: Any = {"user": uid, "group": uid, "extra_groups": []} if uid != os.geteuid() else {}
        environment = os.environ | {"SECRET": self.token}
        self.victim = subprocess.Popen(["sleep", "1000"], env=environment, cwd="/", **user)
        stack.callback(self.victim.wait)
        stack.callback(self.victim.kill)
        port, path, abstract, datagrams = (
            stack.enter_context(socket.socket(family, kind))
            for family, kind in (
                (socket.AF_INET, socket.SOCK_STREAM),
                (socket.AF_UNIX, socket.SOCK_STREAM),
                (socket.AF_UNIX, socket.SOCK_STREAM),
                (socket.AF_UNIX, socket.SOCK_DGRAM),
            )
        )
        port.bind(("127.0.0.1", 0))
        path.bind(str(self.folder / "socket"))
        (self.folder / "socket").chmod(0o777)
        abstract.bind(f"\0{self.token}")
        datagrams.bind(f"\0{self.token}-datagrams")
        for one in (port, path, abstract):
            one.listen(100)
        self.facts = {
            "token": self.token,
            "folder": str(self.folder),
            "own": str(self.own),
            "secret": str(secret),
            "link": str(link),
            "port": port.getsockname()[1],
            "socket": str(self.folder / "socket"),
            "abstract": self.token,
            "datagrams": f"{self.token}-datagrams",
            "victim": self.victim.pid,
        }

    def reset(self, uid: int) -> None:
        """Makes the user's own file as it was."""
        self.own.write_text("of the same user")
        os.chown(self.own, uid, uid)
        self.own.chmod(0o644)

    def unharmed(self) -> None:
        """Asserts that nothing was changed and nothing was left."""
        assert self.victim.poll() is None
        assert self.own.read_text() == "of the same user"
        assert self.own.stat().st_mode & 0o777 == 0o644
        assert sorted(os.listdir(self.folder)) == ["link", "own", "secret", "socket"]
        for folder in ("/tmp", "/var/tmp", "/dev/shm", "/", "/usr"):
            assert not [name for name in os.listdir(folder) if self.token in name]


@pytest.fixture(scope="module", params=CASES)
def attacked(request: pytest.FixtureRequest) -> Iterator[tuple[Runner, World]]:
    mechanism, user = request.param
    with runner(mechanism, user) as sandbox, ExitStack() as stack:
        warm = sandbox.run(source="print(42)")
        assert warm["stdout"] == "42\n", warm
        yield sandbox, World(sandbox.uid, stack)


@pytest.mark.parametrize("name", [*HARMLESS, *INSIDE])
def test_an_attack_is_contained(attacked: tuple[Runner, World], name: str) -> None:
    sandbox, world = attacked
    before = sandbox.alive()
    source = BEGIN + {**HARMLESS, **INSIDE}[name]
    limits = WAITING if "time" in ENDED.get(name, []) else WORKING
    if name in ("a loop", "ignoring signals"):
        limits = COMPUTING
    outcome = sandbox.run(source=source, stdin=json.dumps(world.facts) + "\n", limits=limits)
    assert "ESCAPED" not in outcome["stdout"], outcome["stdout"]
    assert outcome["status"] in ENDED.get(name, ["exited"]), outcome
    assert len(outcome["stdout"]) + len(outcome["stderr"]) <= 2 << 20
    assert sandbox.alive() == before, "processes were left, or the box was lost"
    world.unharmed()
    assert sandbox.run(source="print(42)")["stdout"] == "42\n"


@pytest.mark.long
@pytest.mark.parametrize("name", HARMLESS)
def test_without_a_sandbox_the_attack_succeeds(name: str) -> None:
    """Otherwise the test above would pass whatever the sandbox does."""
    with ExitStack() as stack:
        world = World(os.geteuid(), stack)
        done = subprocess.run(
            [sys.executable, "-c", BEGIN + HARMLESS[name]],
            input=json.dumps(world.facts) + "\n",
            capture_output=True,
            text=True,
            cwd=world.folder,
        )
        assert "ESCAPED" in done.stdout, (done.stdout, done.stderr)

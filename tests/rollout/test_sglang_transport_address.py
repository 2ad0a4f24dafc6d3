"""What listens for an engine's ranks does so on the job's interface, and nowhere else."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist
from forks import free_port
from limits import limit

from grpo_mega.platform import start
from grpo_mega.rollout.contract import EngineError

platform = start()  # before megatron.core is imported

from grpo_mega.rollout.sglang.transport import Network  # noqa: E402


def ask(method: str, **arguments: object) -> None:
    raise EngineError("no engine is asked for anything here")


@pytest.mark.parametrize("first_node", ["127.0.0.1", "127.0.0.2", "another machine"])
def test_the_store_of_the_weights_listens_where_the_job_does(first_node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if first_node == "another machine":  # of a documentation network: a route is looked up, nothing is sent
        first_node = "192.0.2.1"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((first_node, 9))
            except OSError:
                pytest.skip("no route leads out of this machine")
            expected = probe.getsockname()[0]
    else:
        expected = "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", first_node)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    network = Network(ask, None, platform, engine_rank=0, ranks=1, seconds=limit(20))
    for connection in (1, 2):
        where = network.opened()
        assert where["address"] == expected
        assert where["group"] == f"weights-{connection}"
        listening = {
            c.laddr.ip for c in psutil.Process(os.getpid()).net_connections("tcp") if c.laddr.port == where["port"]
        }
        assert listening == {expected}
        store = dist.TCPStore(where["address"], where["port"], is_master=False, timeout=timedelta(seconds=limit(20)))
        store.set("from an engine", "bytes")
        assert network._store
        assert network._store.get("from an engine") == b"bytes"

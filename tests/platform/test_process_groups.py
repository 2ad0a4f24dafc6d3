"""Process groups are suspended and resumed: planted ones here; tests/gpu has one of NCCL."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import distributed_c10d

from grpo_mega.platform import process_groups

GPU = torch.device("cuda", 3)


class Backend:
    """What torch's backends do, as far as it shows."""

    def __init__(self, number: int, calls: list[str], error: Exception | None = None, name: str = "nccl") -> None:
        self.number, self.calls, self.error = number, calls, error
        self.name = lambda: name

    def suspend(self) -> None:
        if self.error:
            raise self.error
        self.calls.append(f"suspend {self.number}")

    def resume(self) -> None:
        self.calls.append(f"resume {self.number}")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    process_groups._warn.cache_clear()
    return []


def plant(monkeypatch: pytest.MonkeyPatch, *backends: Backend, device: str = "cuda") -> None:
    """As many groups, in this order."""

    def group(backend: Backend) -> SimpleNamespace:
        return SimpleNamespace(_device_types=[torch.device(device)], _get_backend=lambda _: backend)

    groups = SimpleNamespace(pg_map=[group(backend) for backend in backends])
    monkeypatch.setattr(distributed_c10d, "_world", groups)


def test_all_that_were_used_are_suspended_in_the_order_in_which_they_were_made(
    monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    unused = RuntimeError("NCCL communicator not initialized")
    plant(monkeypatch, Backend(1, calls), Backend(2, calls, unused), Backend(3, calls, name="gloo"), Backend(4, calls))
    suspended = process_groups.suspend(GPU)
    assert calls == ["suspend 1", "suspend 4"]
    process_groups.resume(suspended)
    assert calls[2:] == ["resume 1", "resume 4"]


def test_groups_of_another_device_stay(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    plant(monkeypatch, Backend(1, calls), device="cpu")
    assert process_groups.suspend(GPU) == calls == []


def test_a_failure_of_nccl_is_not_hidden(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    plant(monkeypatch, Backend(1, calls, RuntimeError("NCCL error: invalid usage")))
    with pytest.raises(RuntimeError, match="invalid usage"):
        process_groups.suspend(GPU)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (AttributeError("no attribute 'suspend'"), "2.12 can"),
        (
            RuntimeError("suspend() requires NCCL 2.29.7 or later\nException raised from"),
            "requires NCCL 2.29.7 or later",
        ),
    ],
)
def test_what_cannot_be_suspended_stays_and_is_said_once(
    error: Exception,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    calls: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    plant(monkeypatch, Backend(1, calls, error), Backend(2, calls, error))
    with caplog.at_level(logging.WARNING):
        assert process_groups.suspend(GPU) == process_groups.suspend(GPU) == []
    (said,) = caplog.messages
    assert said.endswith(why)

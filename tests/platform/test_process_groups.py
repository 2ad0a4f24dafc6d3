"""Process groups are suspended and resumed: planted ones here; tests/gpu has one of NCCL."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.cuda.nccl
from torch._C._distributed_c10d import Backend
from torch.distributed import distributed_c10d

from grpo_mega.platform import process_groups

GPU = torch.device("cuda", 3)


class Planted:
    """What torch's backends do, as far as it shows."""

    def __init__(self, number: int, calls: list[str], error: Exception | None = None, name: str = "nccl") -> None:
        self.number, self.calls, self.error = number, calls, error
        self.name = lambda: name

    def suspend(self) -> None:
        if self.error:
            raise self.error
        self.calls.append(f"suspend {self.number}")

    def resume(self) -> None:
        if self.error:
            raise self.error
        self.calls.append(f"resume {self.number}")


@pytest.fixture
def calls() -> list[str]:
    return []


def plant(monkeypatch: pytest.MonkeyPatch, *backends: Planted, device: str = "cuda") -> None:
    """As many groups, in this order."""

    def group(backend: Planted) -> SimpleNamespace:
        return SimpleNamespace(_device_types=[torch.device(device)], _get_backend=lambda _: backend)

    groups = SimpleNamespace(pg_map=[group(backend) for backend in backends])
    monkeypatch.setattr(distributed_c10d, "_world", groups)


def test_all_that_were_used_are_suspended_in_the_order_in_which_they_were_made(
    monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    unused = RuntimeError("NCCL communicator not initialized")
    plant(monkeypatch, Planted(1, calls), Planted(2, calls, unused), Planted(3, calls, name="gloo"), Planted(4, calls))
    suspended: list = []
    process_groups.suspend(GPU, suspended)
    assert calls == ["suspend 1", "suspend 4"]
    process_groups.resume(suspended)
    assert calls[2:] == ["resume 1", "resume 4"]
    assert not suspended


def test_groups_of_another_device_stay(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    plant(monkeypatch, Planted(1, calls), device="cpu")
    process_groups.suspend(GPU, suspended := [])
    assert suspended == calls == []


def test_a_failure_of_nccl_is_not_hidden_and_what_was_suspended_can_be_resumed(
    monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    plant(monkeypatch, Planted(1, calls), Planted(2, calls, RuntimeError("NCCL error: invalid usage")))
    suspended: list = []
    with pytest.raises(RuntimeError, match="invalid usage"):
        process_groups.suspend(GPU, suspended)
    process_groups.resume(suspended)
    assert calls == ["suspend 1", "resume 1"]


def test_groups_for_which_there_was_no_room_are_resumed_later(
    monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    full = Planted(2, calls)
    plant(monkeypatch, Planted(1, calls), full, Planted(3, calls))
    process_groups.suspend(GPU, suspended := [])
    full.error = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        process_groups.resume(suspended)
    full.error = None
    process_groups.resume(suspended)
    assert calls[3:] == ["resume 1", "resume 2", "resume 3"]


@pytest.mark.parametrize(("version", "can"), [((2, 28, 9), False), ((2, 29, 7), True), ((2, 30, 1), True)])
def test_it_takes_nccl_2_29_7(monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...], can: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    assert process_groups.can_suspend() == (can and hasattr(Backend, "suspend"))

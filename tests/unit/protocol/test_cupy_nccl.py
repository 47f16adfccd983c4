"""NCCL through cupy, with a cupy that is not there."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
from slipstream.protocol.cupy_nccl import CupyNccl
from slipstream.protocol.errors import WeightSyncError
from slipstream.protocol.nccl_group import NcclGroup


class NcclError(RuntimeError):
    """What cupy raises for NCCL."""


class LostPeer:
    """A communicator of which a member died behind its creation."""

    made: list[LostPeer] = []

    def __init__(self, world_size: int, unique_id: bytes, rank: int) -> None:
        self.num_aborts = 0
        self.made.append(self)

    def broadcast(self, *_: object) -> None:
        """Enqueues what never ends."""

    def abort(self) -> None:
        self.num_aborts += 1


class RefusingPeer(LostPeer):
    """One that NCCL itself found out about."""

    def broadcast(self, *_: object) -> None:
        raise NcclError("unhandled system error")


class WaitingStream:
    """What a kernel that spins for ever was given to."""

    ptr = 1

    def __init__(self, *, non_blocking: bool) -> None:
        assert non_blocking

    def synchronize(self) -> None:
        raise AssertionError("this would wait for ever")


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    module = SimpleNamespace(NcclCommunicator=LostPeer, NcclError=NcclError, NCCL_UINT8=1)
    package, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    vars(cuda).update(
        nccl=module,
        runtime=SimpleNamespace(eventRecord=lambda event, stream: None),
        Device=lambda _: SimpleNamespace(use=lambda: None),
        Event=lambda: SimpleNamespace(ptr=3, done=False),
        Stream=WaitingStream,
        alloc=lambda _: SimpleNamespace(ptr=2),
    )
    vars(package)["cuda"] = cuda
    monkeypatch.setitem(sys.modules, "cupy", package)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setattr(LostPeer, "made", [])
    return module


def test_communicator_whose_warm_up_fails_is_aborted_before_it_is_finalised(
    nccl: SimpleNamespace,
) -> None:
    nccl.NcclCommunicator = RefusingPeer
    with pytest.raises(WeightSyncError, match="unhandled system error"):
        NcclGroup.join(CupyNccl(0), b"id", rank=0, world_size=2, deadline_s=30.0)
    assert [each.num_aborts for each in LostPeer.made] == [1]


@pytest.mark.usefixtures("nccl")
def test_communicator_whose_warm_up_never_ends_is_aborted() -> None:
    with pytest.raises(WeightSyncError, match="did not meet|was lost when all had met"):
        NcclGroup.join(CupyNccl(0), b"id", rank=0, world_size=2, deadline_s=0.2)
    assert [each.num_aborts for each in LostPeer.made] == [1]

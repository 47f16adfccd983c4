"""NCCL through cupy, with a cupy that is not there."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
from slipstream.protocol.cupy_nccl import CupyNccl
from slipstream.protocol.errors import WeightSyncError


class NcclError(RuntimeError):
    """What cupy raises for NCCL."""


class LostPeer:
    """A communicator of which a member died behind its creation."""

    made: list[LostPeer] = []

    def __init__(self, world_size: int, unique_id: bytes, rank: int) -> None:
        self.num_aborts = 0
        self.made.append(self)

    def broadcast(self, *_: object) -> None:
        raise NcclError("unhandled system error")

    def abort(self) -> None:
        self.num_aborts += 1


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = SimpleNamespace(NcclCommunicator=LostPeer, NcclError=NcclError, NCCL_UINT8=1)
    package, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    vars(cuda).update(
        nccl=nccl,
        Device=lambda _: SimpleNamespace(use=lambda: None),
        Stream=lambda *, non_blocking: SimpleNamespace(ptr=1, synchronize=lambda: None),
        alloc=lambda _: SimpleNamespace(ptr=2),
    )
    vars(package)["cuda"] = cuda
    monkeypatch.setitem(sys.modules, "cupy", package)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setattr(LostPeer, "made", [])


@pytest.mark.usefixtures("cupy")
def test_communicator_whose_warm_up_fails_is_aborted_before_it_is_finalised() -> None:
    with pytest.raises(WeightSyncError, match="unhandled system error"):
        CupyNccl(0).connect(b"id", rank=0, world_size=2)
    assert [each.num_aborts for each in LostPeer.made] == [1]

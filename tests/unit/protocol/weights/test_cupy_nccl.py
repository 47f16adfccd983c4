"""NCCL through cupy, with a cupy that is not there."""

import pytest
from slipstream.core.errors import WeightSyncError
from slipstream.protocol.weights.cupy_nccl import CupyNccl
from slipstream.protocol.weights.nccl_group import NcclGroup
from support.fakes import fake_cupy


def test_communicator_whose_warm_up_fails_is_aborted_before_it_is_finalised() -> None:
    with fake_cupy.installed() as cupy:
        cupy.broadcast_error = fake_cupy.NcclError("unhandled system error")
        with pytest.raises(WeightSyncError, match="unhandled system error"):
            NcclGroup.join(CupyNccl(0), b"id", rank=0, world_size=2, deadline_s=30.0)
        assert [each.num_aborts for each in cupy.communicators] == [1]


def test_communicator_whose_warm_up_never_ends_is_aborted() -> None:
    with fake_cupy.installed() as cupy:
        cupy.ends = False
        with pytest.raises(WeightSyncError, match="did not meet|was lost when all had met"):
            NcclGroup.join(CupyNccl(0), b"id", rank=0, world_size=2, deadline_s=0.2)
        assert [each.num_aborts for each in cupy.communicators] == [1]

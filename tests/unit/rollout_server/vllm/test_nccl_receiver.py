"""A worker's end of NCCL, without a GPU: cupy and torch's streams are fakes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from slipstream.protocol.weights.nccl_group import AGREED, agreed_settings
from slipstream.rollout_server.vllm import nccl_receiver
from slipstream.rollout_server.vllm.nccl_receiver import NcclReceiver
from slipstream.rollout_server.weights.bucket_receiver import Seat
from slipstream.v1 import weights_pb2
from support.fakes import fake_cupy
from vllm.utils import nccl

MEMBERSHIP = Seat(weights_pb2.Communicator(world_size=2), rank=1, join_deadline_s=30.0)


class Stream:
    """Counts itself."""

    made: list[Stream] = []

    def __init__(self, device: torch.device, priority: int) -> None:
        self.made.append(self)
        self.is_idle = True

    def query(self) -> bool:
        return self.is_idle


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_cupy.FakeCupy]:
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(Stream, "made", [])
    nccl_receiver._STREAMS.clear()
    with fake_cupy.installed() as cupy:
        yield cupy
    nccl_receiver._STREAMS.clear()


def join() -> NcclReceiver:
    return NcclReceiver(MEMBERSHIP, torch.device("cuda", 0))


def test_kernel_of_digests_is_loaded_before_the_others_wait(cupy: fake_cupy.FakeCupy) -> None:
    join().close()
    assert cupy.seen == ["digest 0 spans", "join"]


@pytest.mark.parametrize("has_no_cache", [True, False])
def test_settings_that_vllm_pins_for_its_own_communicators_are_not_ours(
    has_no_cache: bool, cupy: fake_cupy.FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM pins under `VLLM_BATCH_INVARIANT`; members that differ wait for each other for ever.

    NCCL before 2.29.7 has no NCCL_NO_CACHE, and vLLM then does not undo it.
    """
    for name in (*AGREED, "NCCL_NO_CACHE"):
        # Set first, so that it is put back whatever vLLM makes of it.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_PROTO", "LL")
    monkeypatch.setattr(nccl_receiver, "_LAUNCHED", {"NCCL_PROTO": "LL"})
    monkeypatch.setattr(nccl, "_unpinned_env", None)
    monkeypatch.setattr(nccl, "_nccl_has_no_cache", lambda: has_no_cache)
    nccl.pin_nccl_env({"NCCL_PROTO": "Simple", "NCCL_ALGO": "ring"})
    pinned = {"NCCL_PROTO": "simple", "NCCL_ALGO": "ring"}
    assert agreed_settings(os.environ) == pinned
    join().close()
    assert cupy.settings == [
        {"NCCL_PROTO": "ll", "NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    ]
    assert agreed_settings(os.environ) == pinned
    assert ("NCCL_NO_CACHE" in os.environ) == has_no_cache


def test_communicators_one_after_the_other_use_one_stream(cupy: fake_cupy.FakeCupy) -> None:
    for _ in range(3):
        join().close()
    assert [each.num_aborts for each in cupy.communicators] == [1, 1, 1]
    assert len(Stream.made) == 1
    # A communicator that could not be aborted waits there for ever.
    Stream.made[0].is_idle = False
    join().close()
    assert len(Stream.made) == 2

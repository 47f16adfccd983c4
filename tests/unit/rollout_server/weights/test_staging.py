"""Updates that arrive beside the live weights: their memory, and how much there may be of it."""

import threading
from collections.abc import Iterator, Sequence

import pytest
import torch
from slipstream.protocol.weights.buckets import TensorSpec, plan_buckets
from slipstream.protocol.weights.nccl_group import Wire
from slipstream.rollout_server import memory
from slipstream.rollout_server.weights.bucket_receiver import Incoming
from slipstream.rollout_server.weights.update_copies import Staging, room

CPU = torch.device("cpu")
GIB = 1 << 30


def incoming_of(*sizes: int) -> Incoming:
    tensors = [TensorSpec(f"t{place}", "float32", (size,)) for place, size in enumerate(sizes)]
    return Incoming(
        buckets=tuple(plan_buckets(tensors, 4)), bucket_deadline_s=1.0, own_buffers=True
    )


class Numbered:
    """A transport whose n-th bucket is full of n; it goes on when `may_go_on` is set."""

    enqueues = False

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def prepare(self, incoming: Incoming) -> Sequence[torch.Tensor]:
        return []

    def receive(self, incoming: Incoming) -> Iterator[torch.Tensor]:
        for place, _ in enumerate(incoming.buckets):
            self.may_go_on.wait(60)
            yield incoming.memory[place].fill_(place + 1)

    def digests(self) -> list[bytes]:
        return [b"digest"]

    def take_wire(self) -> Wire:
        return Wire()

    def close(self) -> None:
        pass


def stage(staging: Staging, incoming: Incoming) -> list[torch.Tensor]:
    staging.clear()
    staging.begin(Numbered(), incoming)
    while not staging.is_done():
        pass
    return list(staging.buffers)


def test_updates_arrive_in_memory_that_is_kept() -> None:
    staging, incoming = Staging(CPU), incoming_of(3, 500, 7)
    first = stage(staging, incoming)
    assert [buffer.numel() for buffer in first] == [b.num_bytes for b in incoming.buckets]
    for place, buffer in enumerate(first):
        assert buffer.unique().tolist() == [place + 1]
        assert buffer.data_ptr() % 8 == 0
    assert staging.held_bytes >= sum(bucket.num_bytes for bucket in incoming.buckets)
    again = stage(staging, incoming)
    assert [buffer.data_ptr() for buffer in again] == [buffer.data_ptr() for buffer in first]


def test_a_smaller_update_keeps_the_memory_and_a_larger_one_gets_more() -> None:
    staging = Staging(CPU)
    stage(staging, incoming_of(500, 500))
    held = staging.held_bytes
    stage(staging, incoming_of(3))
    assert staging.held_bytes == held
    assert stage(staging, incoming_of(500, 500, 500))[2].unique().tolist() == [3]
    assert staging.held_bytes > held


def test_the_next_update_is_not_written_by_one_that_was_abandoned() -> None:
    staging, late, incoming = Staging(CPU), Numbered(), incoming_of(3, 500)
    late.may_go_on.clear()
    staging.begin(late, incoming)
    abandoned = staging._thread
    assert abandoned is not None
    (buffers,) = [stage(staging, incoming)]
    for buffer in buffers:
        buffer.fill_(9)
    late.may_go_on.set()
    abandoned.join(60)
    assert [buffer.unique().tolist() for buffer in buffers] == [[9], [9]]


def test_workers_on_a_cpu_share_what_main_memory_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "slipstream.rollout_server.weights.update_copies.free_bytes", lambda: (5 * GIB, 20 * GIB)
    )
    assert room(CPU, 0, 1) == 3 * GIB
    assert room(CPU, 0, 2) == 3 * GIB // 2
    # What is kept already is used again.
    assert room(CPU, GIB, 2) == 3 * GIB // 2 + GIB


def test_free_memory_is_at_most_what_the_container_has_left(tmp_path, monkeypatch):
    machine_free, machine = memory.free_bytes()
    assert 0 < machine_free < machine
    limit, used = (tmp_path / name for name in ("max", "current"))
    stat = tmp_path / "stat"
    limit.write_text(f"{1 << 30}\n")
    used.write_text(f"{900 << 20}\n")
    stat.write_text(f"anon 5\ninactive_file {100 << 20}\n")
    monkeypatch.setattr(memory, "_CONTAINER_LIMITS", (limit,))
    monkeypatch.setattr(memory, "_CONTAINER_USE", used)
    monkeypatch.setattr(memory, "_CONTAINER_STAT", stat)
    assert memory.free_bytes() == (224 << 20, 1 << 30)

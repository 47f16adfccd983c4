"""Ranks of a trainer as threads of one process, for what is collective over them."""

import threading
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from slipstream.core.settings.sections import OffloadSection
from slipstream.learner.trainer.ranks.activity import Activity
from slipstream.learner.trainer.ranks.rendezvous import RankFlags
from slipstream.protocol.weights.buckets import Bucket, TensorSpec

from support.rigs.waiting import LIMIT_S


class Meeting:
    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.barrier = threading.Barrier(world_size, timeout=LIMIT_S)
        self.given: list[bytes] = [b""] * world_size
        self.store = dist.HashStore()


class ThreadRanks:
    """What `Ranks` gives, for one thread."""

    device = torch.device("cpu")

    def __init__(self, meeting: Meeting, rank: int, *, timeout_s: float = 30.0) -> None:
        self._meeting = meeting
        self.rank = rank
        self.timeout_s = timeout_s
        self.activity = Activity()
        self.world_size = meeting.world_size
        self.flags = RankFlags(meeting.store)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather_bytes(self, data: bytes) -> list[bytes]:
        self._meeting.given[self.rank] = data
        self._meeting.barrier.wait()
        parts = list(self._meeting.given)
        self._meeting.barrier.wait()
        return parts

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        assert (data is not None) == self.is_main
        return self.gather_bytes(data or b"")[0]


def run_ranks(
    world_size: int, work: Callable[[ThreadRanks], None], *, timeout_s: float = 30.0
) -> None:
    """Runs `work` on every rank; the first exception is raised here."""
    meeting = Meeting(world_size)
    errors = []

    def run(rank: int) -> None:
        try:
            work(ThreadRanks(meeting, rank, timeout_s=timeout_s))
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    if errors:
        raise errors[0]


class PlainModel:
    """The part of a policy that a stream of its weights needs."""

    def __init__(self, ranks: ThreadRanks) -> None:
        from slipstream.extensions.offload.trainer import HostMemory

        self.ranks = ranks
        self.memory = HostMemory(OffloadSection())

    def gather_parameters(self) -> None:
        """Does nothing: no rank holds only a shard of a parameter."""


def packed(bucket: Bucket, tensors: Mapping[TensorSpec, torch.Tensor]) -> bytes:
    """What a bucket holds, with zeros between the tensors."""
    data = bytearray(bucket.num_bytes)
    for span in bucket.spans:
        raw = tensors[span.tensor].view(torch.uint8).numpy().tobytes()
        data[span.offset_bytes : span.offset_bytes + len(raw)] = raw
    return bytes(data)


class PlainFilling:
    """Each tensor lies on the rank that sends it; `on_fill` is told of every bucket before."""

    fills_any = True

    def __init__(
        self,
        tensors: dict[TensorSpec, torch.Tensor],
        ranks: ThreadRanks,
        on_fill: Callable[[int], None] = lambda place: None,
    ) -> None:
        self.tensors = tuple(tensors)
        self.senders = tuple(sorted({spec.sender for spec in tensors}))
        self._data = tensors
        self._rank = ranks.rank
        self._on_fill = on_fill

    def prepare(self, buckets: Sequence[Bucket], lanes: Sequence[torch.Tensor]) -> None:
        self._buckets = buckets
        self._lanes = lanes

    def fill(self, place: int) -> None:
        self._on_fill(place)
        bucket = self._buckets[place]
        lane = self._lanes[place % len(self._lanes)]
        if self.senders[bucket.root] == self._rank:
            data = bytearray(packed(bucket, self._data))
            lane[: bucket.num_bytes] = torch.frombuffer(data, dtype=torch.uint8)

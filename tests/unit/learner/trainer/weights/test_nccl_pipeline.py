"""Nothing but the first bucket is put together before the wire: times of streams that are fakes."""

import json

import torch
from slipstream.core.settings.sections import WeightsSection
from slipstream.learner.trainer.weights.bucket_senders import NcclSender
from slipstream.learner.trainer.weights.weight_stream import WeightStream
from slipstream.protocol.weights.buckets import TensorSpec
from slipstream.protocol.weights.digests import HostDigests
from support.fakes import fake_streams
from support.ranks.thread_ranks import Meeting, PlainFilling, PlainModel, ThreadRanks

FILL = 2.0
DIGEST = 1.0
BROADCAST = 4.0


class Group:
    """Broadcasts take time; the receivers are there."""

    is_aborted = False

    def __init__(self) -> None:
        self.began: list[float] = []

    def broadcast(self, pointer, num_bytes, root, stream, *, deadline_s):
        link = fake_streams.Stream.by_handle[stream]
        self.began.append(link.time)
        link.work(BROADCAST)

    def abort(self) -> None:
        """Does nothing: the communicator has no members."""


class Digests(HostDigests):
    def add(self, place: int, pointer: int, stream: int = 0) -> None:
        super().add(place, pointer)
        fake_streams.Stream.by_handle[stream].work(DIGEST)


class OneOfSeveral(ThreadRanks):
    """A rank whose others only tell their digests."""

    def __init__(self, rank: int, others: dict[str, str]) -> None:
        super().__init__(Meeting(rank + 1), rank)
        self._others = others

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [json.dumps([self._others, 0.0]).encode(), data]


def begins(rank: int, senders: tuple[int, ...]) -> list[float]:
    """When a sending rank is ready for each broadcast; bucket n comes from sender `senders[n]`."""
    tensors = {
        TensorSpec(f"w{n}", "float32", (250,), sender): torch.full((250,), float(n))
        for n, sender in enumerate(senders)
    }

    def fill(place: int) -> None:
        if senders[place] == rank:
            torch.cuda.current_stream().work(FILL)

    with fake_streams.installed():
        ranks = OneOfSeveral(rank, {spec.name: "" for spec in tensors})
        filling = PlainFilling(tensors, ranks, on_fill=fill)
        stream = WeightStream(PlainModel(ranks), filling, bucket_bytes=1000)
        stream._digests = Digests(stream.buckets)
        stream._stream = torch.cuda.Stream()
        sender = NcclSender(WeightsSection(), torch.device("cpu"))
        sender._group = group = Group()
        stream.run(lambda place, bucket, data: sender.send(bucket, data))
        # A lower number is a higher priority, which matters where processors are scarce.
        assert sender._stream.priority < stream._stream.priority
    return group.began


def test_a_bucket_is_put_together_and_digested_while_others_travel() -> None:
    first = begins(0, (0,) * 5)
    assert first == [FILL + BROADCAST * n for n in range(5)]


def test_the_next_sender_is_ready_when_the_one_before_has_sent_its_last_bucket() -> (
    None
):
    senders = (0, 0, 0, 1, 1)
    assert begins(0, senders) == [FILL + BROADCAST * n for n in range(5)]
    # Rank 1 waits for none of its own work, not even for the two buckets that it fills itself.
    assert begins(1, senders) == [BROADCAST * n for n in range(5)]

"""In which order a pass over the weights fills, sends and digests its buckets."""

import torch
from slipstream.core.settings.sections import WeightsSection
from slipstream.learner.trainer.weights.weight_stream import (
    Release,
    WeightStream,
    bucket_bytes,
)
from slipstream.protocol.weights.buckets import Bucket, TensorSpec
from slipstream.protocol.weights.digests import (
    BucketDigests,
    HostDigests,
    tensor_digest,
)
from support.ranks.thread_ranks import PlainFilling, PlainModel, ThreadRanks, run_ranks
from torch import Tensor

# A bucket each.
TENSORS = {
    TensorSpec(f"w{n}", "float32", (250,)): torch.arange(250, dtype=torch.float32) + n
    for n in range(4)
}


class WatchedDigests:
    def __init__(self, digests: HostDigests, events: list[str]) -> None:
        self._digests = digests
        self._events = events

    def add(self, place: int, pointer: int, stream: int) -> None:
        self._events.append(f"digest {place}")
        self._digests.add(place, pointer, stream)

    def read(self, stream: int) -> list[list[bytes]]:
        self._events.append("read digests")
        return self._digests.read(stream)


def test_bucket_is_sent_before_its_digest_and_waits_only_for_the_lane_before() -> None:
    events: list[str] = []

    def send(place: int, bucket: Bucket, data: Tensor) -> Release:
        events.append(f"send {place}")
        return lambda: events.append(f"wait for {place}")

    def on_rank(ranks: ThreadRanks) -> None:
        filling = PlainFilling(
            TENSORS, ranks, on_fill=lambda place: events.append(f"fill {place}")
        )
        stream = WeightStream(PlainModel(ranks), filling, bucket_bytes=1000)
        digests: BucketDigests = WatchedDigests(HostDigests(stream.buckets), events)
        stream._digests = digests
        found = stream.run(send)
        expected = {
            spec.name: tensor_digest(data.numpy().data)
            for spec, data in TENSORS.items()
        }
        assert found.by_name == expected

    run_ranks(1, on_rank)
    assert events == [
        "fill 0",
        "send 0",
        "digest 0",
        "fill 1",
        "send 1",
        "digest 1",
        "wait for 0",
        "fill 2",
        "send 2",
        "digest 2",
        "wait for 1",
        "fill 3",
        "send 3",
        "digest 3",
        # Nothing more: whoever sends waits for the last ones.
        "read digests",
    ]


def test_what_was_filled_ahead_is_sent_at_once_and_never_after_the_weights_have_changed() -> (
    None
):
    events: list[str] = []
    tensors = dict(TENSORS)

    def send(place: int, bucket: Bucket, data: Tensor) -> Release:
        events.append(f"send {place}")
        return lambda: None

    def on_rank(ranks: ThreadRanks) -> None:
        filling = PlainFilling(
            tensors, ranks, on_fill=lambda place: events.append(f"fill {place}")
        )
        stream = WeightStream(PlainModel(ranks), filling, bucket_bytes=1000)
        before = stream.run()
        del events[:]
        stream.fill_ahead()
        stream.fill_ahead()
        assert events == ["fill 0", "fill 1"]
        assert stream.run(send).by_name == before.by_name
        assert events[2:] == [
            "send 0",
            "send 1",
            "fill 2",
            "send 2",
            "fill 3",
            "send 3",
        ]
        # A step of training, and the pass that tells its digests.
        stream.fill_ahead()
        for spec, data in TENSORS.items():
            tensors[spec] = data + 1
        changed = stream.run()
        assert changed.by_name == {
            spec.name: tensor_digest(data.numpy().data)
            for spec, data in tensors.items()
        }
        del events[:]
        assert stream.run(send).by_name == changed.by_name
        assert events[:2] == ["fill 0", "send 0"]

    run_ranks(1, on_rank)


def test_buckets_are_as_large_as_the_largest_tensor_if_that_is_more() -> None:
    weights = WeightsSection(bucket_mib=2)
    small = TensorSpec("a", "bfloat16", (3,))
    large = TensorSpec("b", "bfloat16", (1024, 1025))
    assert bucket_bytes(weights, [small]) == 2 << 20
    assert bucket_bytes(weights, [small, large, small]) == 2 * 1024 * 1025

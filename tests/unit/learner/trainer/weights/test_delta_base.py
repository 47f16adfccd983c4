"""What a sending rank finds to have changed, against a plain loop over the elements."""

from collections.abc import Callable, Iterator
from itertools import chain

import pytest
import torch
from slipstream.core.errors import RunFailed
from slipstream.core.settings.sections import DeltaSetting
from slipstream.learner.trainer.weights.delta_base import DeltaBase
from slipstream.learner.trainer.weights.weight_stream import Release, WeightStream
from slipstream.protocol.weights.buckets import Bucket, TensorSpec, plan_buckets
from slipstream.protocol.weights.deltas import content_name, on_the_wire, travels_whole
from slipstream.protocol.weights.digests import bucket_digest, bucket_tensor_digests
from slipstream.v1 import weights_pb2
from support.ranks.thread_ranks import PlainFilling, PlainModel, ThreadRanks, run_ranks
from support.references import plain_deltas
from torch import Tensor

CPU = torch.device("cpu")
Weights = dict[TensorSpec, Tensor]


def specs_of(dtype: str, *sizes: int) -> list[TensorSpec]:
    return [TensorSpec(f"w{n}", dtype, (size,)) for n, size in enumerate(sizes)]


def packed(bucket: Bucket, weights: Weights) -> bytes:
    """The bytes of a bucket; between tensors they are zero."""
    data = bytearray(bucket.num_bytes)
    for span in bucket.spans:
        raw = bytes(weights[span.tensor].view(torch.uint8).numpy())
        data[span.offset_bytes : span.offset_bytes + len(raw)] = raw
    return bytes(data)


class Receiver:
    """Holds the bytes of all buckets, as the payloads made them."""

    def __init__(self, buckets: tuple[Bucket, ...]) -> None:
        self.buckets, self.held = buckets, [b""] * len(buckets)
        self.payloads = 0

    def send(self, place: int, wire: Bucket, data: Tensor) -> Release:
        """Takes a bucket, whole or as a payload."""
        received = bytes(data.numpy())
        assert len(received) == wire.num_bytes
        if wire.num_bytes < self.buckets[place].num_bytes:
            self.payloads += 1
            received = plain_deltas.decode(self.held[place], received)
        self.held[place] = received
        return lambda: None

    @property
    def digests(self) -> tuple[bytes, ...]:
        return tuple(
            bucket_digest(bucket_tensor_digests(bucket, held))
            for bucket, held in zip(self.buckets, self.held, strict=True)
        )


def follow(weights, steps, *, bucket_bytes=3000, delta="host"):
    """Publishes before and after each step; returns the payloads in each of these publishes.

    A publish is a delta if there is an offer. What the receiver holds is compared each time.
    """
    found: list[int] = []

    def on_rank(ranks: ThreadRanks) -> None:
        stream = WeightStream(
            PlainModel(ranks), PlainFilling(weights, ranks), bucket_bytes=bucket_bytes, delta=delta
        )
        receiver = Receiver(stream.buckets)
        before: tuple[bytes, ...] = ()
        for _ in chain([None], steps):
            digests = stream.run()
            offer = stream.offer
            assert offer is None or offer.base == content_name(before)
            receiver.payloads = 0
            sent = stream.run(receiver.send, delta=offer)
            assert sent.buckets == digests.buckets == receiver.digests
            for bucket, held in zip(stream.buckets, receiver.held, strict=True):
                for span in bucket.spans:
                    part = slice(span.offset_bytes, span.offset_bytes + span.tensor.num_bytes)
                    assert held[part] == packed(bucket, weights)[part]
            assert (digests.buckets == before) == (sum(digests.changed) == 0 and bool(before))
            before = digests.buckets
            found.append(receiver.payloads)

    run_ranks(1, on_rank)
    return found


def adamw(weights: Weights, num_steps: int, *, learning_rate: float) -> Iterator[None]:
    """Steps on float32 masters, whose rounded values are the weights, as in training."""
    torch.manual_seed(0)
    masters = [torch.nn.Parameter(data.float()) for data in weights.values()]
    optimizer = torch.optim.AdamW(masters, lr=learning_rate)
    for _ in range(num_steps):
        for master in masters:
            master.grad = torch.randn_like(master)
        optimizer.step()
        for data, master in zip(weights.values(), masters, strict=True):
            data.copy_(master.detach())
        yield None


def random_weights(specs: list[TensorSpec]) -> Weights:
    torch.manual_seed(1)
    return {s: (0.02 * torch.randn(s.shape)).to(getattr(torch, s.dtype)) for s in specs}


@pytest.mark.parametrize("delta", ["host", "gpu"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_steps_of_adamw_arrive_bit_for_bit(dtype: str, delta: DeltaSetting) -> None:
    # Sizes that leave gaps between tensors, and blocks that are not full.
    weights = random_weights(specs_of(dtype, 1000, 3, 500, 2000, 7))
    payloads = follow(weights, adamw(weights, 10, learning_rate=1e-6), delta=delta)
    assert payloads[0] == 0
    if dtype == "bfloat16":
        assert min(payloads[1:]) >= 2


def changes(weights: Weights, *each: Callable[[Tensor], None]) -> Iterator[None]:
    for change in each:
        for data in weights.values():
            change(data)
        yield None


@pytest.mark.parametrize("delta", ["host", "gpu"])
def test_whatever_changed_arrives_bit_for_bit(delta: DeltaSetting) -> None:
    def set_bits(bits: int) -> Callable[[Tensor], None]:
        def change(data: Tensor) -> None:
            data.view(torch.int16)[::50] = bits

        return change

    weights = random_weights(specs_of("bfloat16", 1000, 2000))
    payloads = follow(
        weights,
        changes(
            weights,
            lambda data: None,
            # Zeros of both signs, and two NaNs.
            set_bits(0),
            set_bits(-0x8000),
            set_bits(0x7FC0),
            set_bits(0x7FC1),
            lambda data: data.view(torch.int16).bitwise_xor_(1),
            set_bits(1),
            # Nothing of one tensor, and too much of the other to be encoded before it is ordered.
            lambda data: data.view(torch.int16)[: len(data) // 2000 * 400].bitwise_xor_(1),
        ),
        delta=delta,
    )
    assert payloads == [0, 2, 2, 2, 2, 2, 0, 2, 2]


def test_half_of_a_float32_travels_where_only_that_half_changed() -> None:
    weights = random_weights(specs_of("float32", 700))
    low = changes(weights, lambda data: data.view(torch.int16)[::8].bitwise_xor_(1))
    assert follow(weights, low) == [0, 1]


def test_a_payload_is_that_of_the_plain_loop() -> None:
    buckets = tuple(plan_buckets(specs_of("bfloat16", 1000, 5, 300), 10_000))
    base = DeltaBase(buckets, [True], CPU, on_host=True)
    old, new = (random_weights([s.tensor for s in buckets[0].spans]) for _ in range(2))
    for data in new.values():
        data[:40] += 1
    lane = torch.tensor(list(packed(buckets[0], old)), dtype=torch.uint8)
    base.keep(0, lane)
    base.settle([0], sent=[b"digest"])
    lane = torch.tensor(list(packed(buckets[0], new)), dtype=torch.uint8)
    # What an earlier bucket left between two tensors is no change.
    lane[2010:2016] = 1
    base.count(0, lane)
    counts = base.counts()
    assert counts == [85]
    base.settle(counts)
    base.encode(0, lane)
    payload = plain_deltas.encode(packed(buckets[0], old), packed(buckets[0], new))
    assert bytes(lane[: len(payload)].numpy()) == payload


def test_weights_that_changed_after_they_were_counted_end_the_run() -> None:
    weights = random_weights(specs_of("bfloat16", 1000))

    def on_rank(ranks: ThreadRanks) -> None:
        stream = WeightStream(
            PlainModel(ranks), PlainFilling(weights, ranks), bucket_bytes=3000, delta="host"
        )
        stream.run(lambda *_: lambda: None)
        stream.run()
        next(iter(weights.values()))[3] += 1
        with pytest.raises(RunFailed, match="bucket 0 has 1 changed elements where 0 were counted"):
            stream.run(lambda *_: lambda: None, delta=stream.offer)

    run_ranks(1, on_rank)


def test_what_was_encoded_by_the_last_pass_is_sent_without_filling_anything() -> None:
    weights = random_weights(specs_of("bfloat16", 1000, 1000))
    filled: list[int] = []

    def on_rank(ranks: ThreadRanks) -> None:
        filling = PlainFilling(weights, ranks, on_fill=filled.append)
        stream = WeightStream(PlainModel(ranks), filling, bucket_bytes=3000, delta="gpu")
        receiver = Receiver(stream.buckets)
        stream.run(receiver.send)
        first, second = weights.values()
        first.view(torch.int16)[::100].bitwise_xor_(1)
        second.view(torch.int16)[::5].bitwise_xor_(1)
        digests = stream.run()
        del filled[:]
        assert stream.run(receiver.send, delta=stream.offer).by_name == digests.by_name
        # Too much of the second bucket has changed to be kept.
        assert filled == [1]
        assert receiver.payloads == 2
        assert receiver.digests == digests.buckets
        # The same weights once more: nothing changed since.
        assert list(stream.offer.changed) == [0, 0]
        assert stream.run(receiver.send, delta=stream.offer).buckets == receiver.digests
        # A whole publish after it is right as well, and so is a delta on that.
        first.view(torch.int16)[::50].bitwise_xor_(1)
        assert stream.run().buckets == stream.run(receiver.send).buckets == receiver.digests

    run_ranks(1, on_rank)


def test_there_is_no_offer_where_nothing_is_kept_or_nothing_was_sent_or_all_changed() -> None:
    weights = random_weights(specs_of("bfloat16", 1000))

    def on_rank(ranks: ThreadRanks) -> None:
        filling = PlainFilling(weights, ranks)
        off = WeightStream(PlainModel(ranks), filling, bucket_bytes=3000)
        off.run(lambda *_: lambda: None)
        assert off.offer is None
        stream = WeightStream(
            PlainModel(ranks), PlainFilling(weights, ranks), bucket_bytes=3000, delta="gpu"
        )
        stream.run()
        assert stream.offer is None
        assert stream.changed_share == 0
        stream.run(lambda *_: lambda: None)
        assert stream.offer == weights_pb2.Delta(base=stream.offer.base, changed=[0])
        for data in weights.values():
            data.view(torch.int16)[:250].bitwise_xor_(1)
        stream.run()
        assert stream.changed_share == 0.25
        assert stream.offer.changed == [250]
        for data in weights.values():
            data.view(torch.int16)[250:].bitwise_xor_(1)
        stream.run()
        assert stream.changed_share == 1
        assert stream.offer is None

    run_ranks(1, on_rank)


def test_each_sender_sends_the_payloads_of_its_own_buckets() -> None:
    weights = {
        TensorSpec(f"w{n}", "bfloat16", (1000,), sender): torch.randn(1000).bfloat16()
        for n, sender in enumerate([0, 0, 1])
    }
    held: list[Receiver] = []

    def on_rank(ranks: ThreadRanks) -> None:
        stream = WeightStream(
            PlainModel(ranks), PlainFilling(weights, ranks), bucket_bytes=3000, delta="host"
        )
        receiver = Receiver(stream.buckets)
        sizes: list[int] = []

        def send(place: int, wire: Bucket, data: Tensor) -> Release:
            sizes.append(wire.num_bytes)
            if stream.senders[wire.root] == ranks.rank:
                receiver.send(place, wire, data)
            return lambda: None

        digests = stream.run(send)
        ranks.gather_bytes(b"")
        if ranks.is_main:
            for data in weights.values():
                data.view(torch.int16)[::100].bitwise_xor_(1)
        ranks.gather_bytes(b"")
        digests = stream.run()
        assert list(stream.offer.changed) == [10, 10, 10]
        del sizes[:]
        wires = on_the_wire(stream.buckets, stream.offer.changed)
        stream.run(send, delta=stream.offer)
        assert sizes == [wire.num_bytes for wire in wires]
        assert not any(travels_whole(bucket, 10) for bucket in stream.buckets)
        own = [stream.senders[bucket.root] == ranks.rank for bucket in stream.buckets]
        got = [d for d, is_own in zip(receiver.digests, own, strict=True) if is_own]
        assert got == [d for d, is_own in zip(digests.buckets, own, strict=True) if is_own]
        held.append(receiver)

    run_ranks(2, on_rank)
    assert [receiver.payloads for receiver in held].count(0) == 0

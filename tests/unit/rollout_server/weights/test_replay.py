"""Copies of a plan, in which call an update is copied, and updates beside the live weights."""

import threading
from collections.abc import Iterator, Sequence

import pytest
import torch
from slipstream.core.errors import WeightSyncError
from slipstream.protocol.weights.buckets import TensorSpec, plan_buckets
from slipstream.rollout_server.weights.bucket_receiver import (
    BucketReceiver,
    Incoming,
    Staging,
    Take,
    Update,
)
from slipstream.rollout_server.weights.copy_plan import Copy, PlannedCopies, View
from support.rigs.waiting import LIMIT_S

# Elements of a tensor that is copied by itself.
LARGE = 9 << 20


def test_copies_of_all_kinds_are_made() -> None:
    tensors = [
        TensorSpec("large", "bfloat16", (LARGE // 1024, 512)),
        TensorSpec("gapped", "bfloat16", (8, 16)),
        TensorSpec("small", "bfloat16", (300,)),
        TensorSpec("widened", "bfloat16", (6, 4)),
    ]
    (bucket,) = plan_buckets(tensors, 2 * LARGE)
    buffer = torch.randint(0, 100, (bucket.num_bytes // 2,), dtype=torch.int16)
    buffer = buffer.to(torch.bfloat16).view(torch.uint8)
    parameters = {
        "large": torch.zeros(LARGE // 1024, 512, dtype=torch.bfloat16),
        "gapped": torch.zeros(8, 32, dtype=torch.bfloat16),
        "small": torch.zeros(300, dtype=torch.bfloat16),
        "widened": torch.zeros(6, 4, dtype=torch.float32),
    }
    targets = parameters | {"gapped": parameters["gapped"][:, :16]}
    copies = [
        Copy(
            dtype=torch.bfloat16,
            source=View(span.offset_bytes // 2, span.tensor.shape, strides),
            parameter=span.tensor.name,
            destination=View.of(targets[span.tensor.name]),
        )
        for span, strides in zip(
            bucket.spans, [(512, 1), (16, 1), (1,), (4, 1)], strict=True
        )
    ]
    replay = PlannedCopies((tuple(copies),), parameters)
    replay.run(0, buffer)
    typed = buffer.view(torch.bfloat16)
    for span in bucket.spans:
        start = span.offset_bytes // 2
        name = span.tensor.name
        shape = span.tensor.shape
        sent = typed[start : start + targets[name].numel()].view(shape)
        assert torch.equal(targets[name], sent.to(targets[name].dtype)), name
    assert not parameters["gapped"][:, 16:].any()


CPU = torch.device("cpu")
INCOMING = Incoming(buckets=(), bucket_deadline_s=1.0, own_buffers=False)


class Transport(BucketReceiver):
    def __init__(self) -> None:
        super().__init__(CPU)

    def prepare(self, incoming: Incoming) -> Sequence[torch.Tensor]:
        return []

    def close(self) -> None:
        pass


class TwoBuckets(Transport):
    """A transport whose buckets are one and two bytes; `seen` says what was asked of it."""

    def __init__(self, enqueues: bool) -> None:
        super().__init__()
        self.enqueues, self.seen = enqueues, list[str]()

    def receive(self, incoming: Incoming) -> Iterator[torch.Tensor]:
        self.seen.append("receive")
        yield torch.zeros(1, dtype=torch.uint8)
        yield torch.zeros(2, dtype=torch.uint8)

    def digests(self) -> list[bytes]:
        self.seen.append("digests")
        return [b"one", b"two"]


def ready(transport: TwoBuckets, take: Take, staging: Staging | None = None) -> Update:
    """An update of two buckets that can be received, or has been."""
    update = Update(INCOMING, staging, take, CPU)
    while update.prepare(transport) is None:
        pass
    return update


@pytest.mark.parametrize(
    ("enqueues", "in_the_first"), [(True, ["receive", "0: 1", "1: 2"]), (False, [])]
)
def test_only_a_transport_that_enqueues_receives_in_the_first_call(
    enqueues, in_the_first
):
    transport = TwoBuckets(enqueues)

    def take(place: int, buffer: torch.Tensor) -> None:
        transport.seen.append(f"{place}: {buffer.numel()}")

    copying = ready(transport, take)
    copying.begin()
    assert transport.seen == in_the_first
    copying.finish()
    assert transport.seen == ["receive", "0: 1", "1: 2", "digests"]
    assert copying.digests == [b"one", b"two"]
    assert min(copying.receive_s, copying.started_s, copying.began_s()) > 0


def test_what_is_staged_is_copied_in_the_first_call() -> None:
    transport = TwoBuckets(enqueues=False)
    staging = Staging(CPU)
    sizes: list[int] = []
    copying = ready(transport, lambda _, buffer: sizes.append(buffer.numel()), staging)
    copying.begin()
    assert sizes == [1, 2]
    copying.finish()
    assert (sizes, copying.digests, copying.receive_s) == (
        [1, 2],
        [b"one", b"two"],
        0.0,
    )


def test_an_error_of_the_first_call_is_raised_by_it() -> None:
    def take(place: int, buffer: torch.Tensor) -> None:
        raise WeightSyncError("the communicator is gone")

    with pytest.raises(WeightSyncError, match="is gone"):
        ready(TwoBuckets(enqueues=True), take).begin()


def incoming_of(*sizes: int) -> Incoming:
    tensors = [
        TensorSpec(f"t{place}", "float32", (size,)) for place, size in enumerate(sizes)
    ]
    return Incoming(
        buckets=tuple(plan_buckets(tensors, 4)), bucket_deadline_s=1.0, own_buffers=True
    )


class Numbered(Transport):
    """A transport whose n-th bucket is full of n; it goes on when `may_go_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def receive(self, incoming: Incoming) -> Iterator[torch.Tensor]:
        for place, _ in enumerate(incoming.buckets):
            self.may_go_on.wait(LIMIT_S)
            yield incoming.memory[place].fill_(place + 1)

    def digests(self) -> list[bytes]:
        return [b"digest"]


def stage(staging: Staging, incoming: Incoming) -> Sequence[torch.Tensor]:
    buffers, _ = staging.begin(Numbered(), incoming).result(LIMIT_S)
    return buffers


def test_a_smaller_update_keeps_the_memory_and_a_larger_one_gets_more() -> None:
    staging = Staging(CPU)
    stage(staging, incoming_of(500, 500))
    held_bytes = staging.held_bytes
    stage(staging, incoming_of(3))
    assert staging.held_bytes == held_bytes
    assert stage(staging, incoming_of(500, 500, 500))[2].unique().tolist() == [3]
    assert staging.held_bytes > held_bytes


def test_the_next_update_is_not_written_by_one_that_was_abandoned() -> None:
    staging = Staging(CPU)
    late = Numbered()
    incoming = incoming_of(3, 500)
    late.may_go_on.clear()
    abandoned = staging.begin(late, incoming)
    staging.abandon(abandoned)
    buffers = stage(staging, incoming)
    for buffer in buffers:
        buffer.fill_(9)
    late.may_go_on.set()
    abandoned.result(LIMIT_S)
    assert [buffer.unique().tolist() for buffer in buffers] == [[9], [9]]


def test_an_update_that_failed_on_its_way_is_none_that_is_done() -> None:
    class Broken(Numbered):
        def receive(self, incoming: Incoming) -> Iterator[torch.Tensor]:
            raise WeightSyncError("a bucket did not arrive")

    with pytest.raises(WeightSyncError, match="a bucket did not arrive"):
        ready(Broken(), lambda *_: None, Staging(CPU))

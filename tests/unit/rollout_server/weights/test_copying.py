"""In which of its two calls an update is copied."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from slipstream.core.errors import WeightSyncError
from slipstream.protocol.weights.nccl_group import Wire
from slipstream.rollout_server.weights.bucket_receiver import Incoming
from slipstream.rollout_server.weights.update_copies import Copying, Staging

CPU = torch.device("cpu")
INCOMING = Incoming(buckets=(), bucket_deadline_s=1.0, own_buffers=False)


@dataclass
class TwoBuckets:
    """A transport whose buckets are one and two bytes; `seen` says what was asked of it."""

    enqueues: bool
    seen: list[str] = field(default_factory=list)

    def prepare(self, incoming: Incoming) -> Sequence[torch.Tensor]:
        return []

    def receive(self, incoming: Incoming) -> Iterator[torch.Tensor]:
        self.seen.append("receive")
        yield torch.zeros(1, dtype=torch.uint8)
        yield torch.zeros(2, dtype=torch.uint8)

    def digests(self) -> list[bytes]:
        self.seen.append("digests")
        return [b"one", b"two"]

    def take_wire(self) -> Wire:
        return Wire()

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("enqueues", "in_the_first"), [(True, ["receive", "0: 1", "1: 2"]), (False, [])]
)
def test_only_a_transport_that_enqueues_receives_in_the_first_call(enqueues, in_the_first):
    transport = TwoBuckets(enqueues)

    def take(place: int, buffer: torch.Tensor) -> None:
        transport.seen.append(f"{place}: {buffer.numel()}")

    copying = Copying(take, transport, INCOMING, None, device=CPU)
    copying.begin()
    assert transport.seen == in_the_first
    assert copying.finish() == [b"one", b"two"]
    assert transport.seen == ["receive", "0: 1", "1: 2", "digests"]
    assert 0 < copying.receive_s <= copying.seconds()


def test_what_is_staged_is_copied_in_the_first_call() -> None:
    transport, staging = TwoBuckets(enqueues=False), Staging(CPU)
    staging.begin(transport, INCOMING)
    while not staging.is_done():
        pass
    sizes: list[int] = []
    parts = (lambda _, buffer: sizes.append(buffer.numel()), transport, INCOMING, staging)
    copying = Copying(*parts, device=CPU)
    copying.begin()
    assert sizes == [1, 2]
    assert copying.finish() == [b"one", b"two"]
    assert (sizes, copying.receive_s) == ([1, 2], 0.0)


def test_an_error_of_the_first_call_is_raised_by_it() -> None:
    def take(place: int, buffer: torch.Tensor) -> None:
        raise WeightSyncError("the communicator is gone")

    with pytest.raises(WeightSyncError, match="is gone"):
        Copying(take, TwoBuckets(enqueues=True), INCOMING, None, device=CPU).begin()

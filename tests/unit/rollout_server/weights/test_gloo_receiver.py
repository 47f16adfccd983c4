"""A worker's end of gloo."""

import threading

import pytest
import torch
from slipstream.core.errors import WeightSyncError
from slipstream.protocol.weights.buckets import layout_from_pb
from slipstream.rollout_server.weights.bucket_receiver import GlooReceiver, Incoming, Seat
from support.fakes.gloo_sender import GlooSender, layout_of
from support.rigs.waiting import LIMIT_S

# Less than the sender waits for a receiver.
LONG_S = LIMIT_S / 2
WEIGHTS = {name: torch.arange(1e6) for name in "abc"}
LAYOUT = layout_of(WEIGHTS, 4_000_000)
INCOMING = Incoming(tuple(layout_from_pb(LAYOUT)), LONG_S, own_buffers=True)


def test_a_worker_that_leaves_takes_no_bucket_and_frees_its_sender() -> None:
    sender = GlooSender("members-1")
    errors: list[RuntimeError] = []

    def send() -> None:
        try:
            sender.send(LAYOUT, WEIGHTS)
        except RuntimeError as error:
            errors.append(error)

    sending = threading.Thread(target=send)
    sending.start()
    transport = GlooReceiver(Seat(sender.communicator, 1, LONG_S), torch.device("cpu"))
    buckets = transport.receive(INCOMING)
    assert torch.equal(next(buckets).view(torch.float32), WEIGHTS["a"])
    transport.close()
    sending.join(LONG_S)
    assert len(errors) == 1
    with pytest.raises(WeightSyncError, match="the communicator was left"):
        next(buckets)

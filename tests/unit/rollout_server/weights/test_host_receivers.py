"""A worker's ends of gloo and of the file that its server has fetched."""

import os
import threading
from pathlib import Path

import pytest
import torch
from slipstream.core.errors import WeightSyncError
from slipstream.protocol.weights.buckets import layout_from_pb
from slipstream.rollout_server.weights.bucket_receiver import (
    GlooReceiver,
    Incoming,
    StorageReceiver,
)
from slipstream.v1 import weights_pb2
from support.fakes.gloo_sender import GlooSender, layout_of
from support.rigs.stored_versions import BUCKETS, digests_of, first_content
from support.rigs.waiting import LIMIT_S

CPU = torch.device("cpu")
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
    transport = GlooReceiver(sender.communicator, 1, LONG_S, CPU)
    buckets = transport.receive(INCOMING)
    assert torch.equal(next(buckets).view(torch.float32), WEIGHTS["a"])
    transport.close()
    sending.join(LONG_S)
    assert len(errors) == 1
    with pytest.raises(WeightSyncError, match="the communicator was left"):
        next(buckets)


CONTENT = first_content()


def of_file(path: Path | str) -> StorageReceiver:
    where = weights_pb2.Communicator(transport="storage", path=str(path))
    return StorageReceiver(where, 0, 1.0, CPU)


def incoming(*, own_buffers: bool) -> Incoming:
    return Incoming(BUCKETS, bucket_deadline_s=1.0, own_buffers=own_buffers)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(b"".join(data.tobytes() for data in CONTENT))
    return path


@pytest.mark.parametrize("own_buffers", [False, True])
def test_every_bucket_is_read_with_its_digest(file: Path, own_buffers: bool) -> None:
    receiver = of_file(file)
    # The file is read again for each update.
    for _ in range(2):
        arrays = [
            b.clone().numpy()
            for b in receiver.receive(incoming(own_buffers=own_buffers))
        ]
        assert all((a == b).all() for a, b in zip(arrays, CONTENT, strict=True))
        assert receiver.digests() == digests_of(CONTENT)
    receiver.close()
    with pytest.raises(WeightSyncError, match="closed"):
        list(receiver.receive(incoming(own_buffers=own_buffers)))


def test_a_file_that_is_too_short_is_an_error(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)
    receiver = of_file(file)
    with pytest.raises(WeightSyncError, match="end at byte"):
        list(receiver.receive(incoming(own_buffers=True)))


def test_an_order_without_a_fetched_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match="none were fetched"):
        of_file("")
    with pytest.raises(WeightSyncError, match="are gone"):
        of_file(tmp_path / "nothing")

"""What a worker reads from the file that its server has fetched."""

import os
from pathlib import Path

import pytest
import torch
from slipstream.core.errors import WeightSyncError
from slipstream.rollout_server.vllm.weight_receiver import TRANSPORTS
from slipstream.rollout_server.weights.bucket_receiver import Incoming, Seat
from slipstream.v1 import weights_pb2
from support.rigs.stored_versions import BUCKETS, digests_of, first_content

CONTENT = first_content()


def seat(path: Path | str) -> Seat:
    where = weights_pb2.Communicator(transport="storage", path=str(path))
    return Seat(where, rank=0, join_deadline_s=1.0)


def incoming(*, own_buffers: bool) -> Incoming:
    return Incoming(BUCKETS, bucket_deadline_s=1.0, own_buffers=own_buffers)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(b"".join(data.tobytes() for data in CONTENT))
    return path


@pytest.mark.parametrize("own_buffers", [False, True])
def test_every_bucket_is_read_with_its_digest(file: Path, own_buffers: bool) -> None:
    receiver = TRANSPORTS["storage"](seat(file), torch.device("cpu"))
    # The file is read again for each update.
    for _ in range(2):
        found = [b.clone().numpy() for b in receiver.receive(incoming(own_buffers=own_buffers))]
        assert all((a == b).all() for a, b in zip(found, CONTENT, strict=True))
        assert receiver.digests() == digests_of(CONTENT)
    receiver.close()
    with pytest.raises(WeightSyncError, match="closed"):
        list(receiver.receive(incoming(own_buffers=own_buffers)))


def test_a_file_that_is_too_short_is_an_error(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)
    receiver = TRANSPORTS["storage"](seat(file), torch.device("cpu"))
    with pytest.raises(WeightSyncError, match="end at byte"):
        list(receiver.receive(incoming(own_buffers=True)))


def test_an_order_without_a_fetched_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match="none were fetched"):
        TRANSPORTS["storage"](seat(""), torch.device("cpu"))
    with pytest.raises(WeightSyncError, match="are gone"):
        TRANSPORTS["storage"](seat(tmp_path / "nothing"), torch.device("cpu"))

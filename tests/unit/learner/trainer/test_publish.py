"""The sender and the way of a publish, against plain torch receivers in threads."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from fake_controller import FakeController, publish_order
from slipstream.learner.trainer.controller_client import ControllerClient
from slipstream.learner.trainer.export import ExportedWeights
from slipstream.learner.trainer.publish import publish
from slipstream.learner.trainer.weight_sender import GlooWeightSender
from slipstream.protocol.buckets import TensorSpec
from slipstream.protocol.config import Config, WeightsSection
from slipstream.protocol.config_file import parse_config
from slipstream.protocol.digests import tensor_digest
from slipstream.protocol.errors import ConfigError, WeightSyncError
from slipstream.v1 import trainer_pb2, weights_pb2
from torch import Tensor

BUCKETS = tuple(torch.arange(n, dtype=torch.float32).view(torch.uint8) for n in (3, 500_000, 1))
WEIGHTS = ExportedWeights(
    tensors=(TensorSpec("w", "float32", (3,)),),
    bucket_bytes=16,
    buckets=BUCKETS,
    tensor_digests=tuple((tensor_digest(bucket.numpy().data),) for bucket in BUCKETS),
)
SOON = WeightsSection(join_deadline_s=1.0, bucket_deadline_s=0.5)


class Receivers:
    """Threads that join a communicator as ranks 1, 2, ... and receive `buckets`."""

    def __init__(self, where: weights_pb2.Communicator, *, sizes: list[int] | None = None) -> None:
        self.received: list[list[Tensor]] = [[] for _ in range(where.world_size - 1)]
        self._where = where
        self._sizes = [b.numel() for b in BUCKETS] if sizes is None else sizes
        self._threads = [
            threading.Thread(target=self._receive, args=(rank,))
            for rank in range(1, where.world_size)
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(20)

    def _receive(self, rank: int) -> None:
        where = self._where
        store = dist.TCPStore(
            where.store_host, where.store_port, is_master=False, wait_for_workers=False
        )
        group = dist.ProcessGroupGloo(
            dist.PrefixStore(where.communicator_id, store),
            rank,
            where.world_size,
            timedelta(seconds=10),
        )
        for size in self._sizes:
            data = torch.empty(size, dtype=torch.uint8)
            group.broadcast(data, 0).wait()
            self.received[rank - 1].append(data)


def test_every_receiver_gets_every_bucket_and_the_communicator_is_kept() -> None:
    sender = GlooWeightSender(WeightsSection())
    where = sender.listen("members-1", 3)
    assert sender.communicator_id is None
    receivers = Receivers(where, sizes=2 * [b.numel() for b in BUCKETS])
    sender.connect()
    assert sender.communicator_id == "members-1"
    sender.send(BUCKETS)
    sender.send(BUCKETS)
    receivers.join()
    for received in receivers.received:
        assert all(torch.equal(a, b) for a, b in zip(received, 2 * BUCKETS, strict=True))
    sender.abort()


def test_store_listens_on_the_given_host_only() -> None:
    sender = GlooWeightSender(WeightsSection(host="127.0.0.1"))
    where = sender.listen("members-1", 2)
    with socket.create_connection(("127.0.0.1", where.store_port), timeout=5):
        pass
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", where.store_port), timeout=5)
    sender.abort()


def test_host_that_is_not_this_machine_is_refused_by_name() -> None:
    sender = GlooWeightSender(WeightsSection(host="192.0.2.1"))
    with pytest.raises(ConfigError, match=r"weights\.host must be an address of this machine"):
        sender.listen("members-1", 2)


def test_receiver_that_never_joins_costs_one_deadline() -> None:
    sender = GlooWeightSender(SOON)
    sender.listen("members-1", 2)
    with pytest.raises(WeightSyncError, match="1 workers joining members-1"):
        sender.connect()
    assert sender.communicator_id is None


def test_receiver_that_stops_taking_buckets_costs_one_deadline() -> None:
    sender = GlooWeightSender(SOON)
    receivers = Receivers(sender.listen("members-1", 2), sizes=[BUCKETS[0].numel()])
    sender.connect()
    large = torch.zeros(64 << 20, dtype=torch.uint8)
    with pytest.raises(WeightSyncError, match="bucket 1 of"):
        sender.send([BUCKETS[0], large])
    receivers.join()
    with pytest.raises(WeightSyncError, match="no communicator"):
        sender.send(BUCKETS)


def test_new_communicator_works_after_a_failed_one() -> None:
    sender = GlooWeightSender(SOON)
    sender.listen("members-1", 2)
    with pytest.raises(WeightSyncError):
        sender.connect()
    receivers = Receivers(sender.listen("members-2", 2))
    sender.connect()
    sender.send(BUCKETS)
    receivers.join()
    assert len(receivers.received[0]) == len(BUCKETS)
    sender.abort()


def config(address: str) -> Config:
    return parse_config(
        {
            "run": {"name": "publish", "steps": 1},
            "model": {"path": "model"},
            "algorithm": {"group_size": 2, "groups_per_step": 1, "learning_rate": 1e-3},
            "sampling": {"max_reply_tokens": 2, "max_episode_tokens": 8},
            "controller": {"address": address},
        },
        source="test",
    )


class Publisher:
    """A controller whose server behaves as `mode` says, and the trainer's side of it."""

    def __init__(self) -> None:
        self.mode = "receives"
        self.controller = FakeController([], on_start_publish=self._start)
        self.client = ControllerClient(config(self.controller.address))
        self.sender = GlooWeightSender(SOON)
        self.receivers: Receivers | None = None

    def publish(self, *, new_communicator: bool) -> None:
        order = publish_order(1, new_communicator=new_communicator, verify=False)[0].publish
        publish(order, WEIGHTS, sender=self.sender, client=self.client, probe=None, export_s=0.5)

    def _start(self, start: trainer_pb2.PublishStart) -> list[weights_pb2.Receiver]:
        if self.mode == "gives up":
            return []
        name = "another" if self.mode == "is replaced" else "server"
        if self.mode == "receives":
            self.receivers = Receivers(start.communicator)
        return [weights_pb2.Receiver(server_id=name, first_rank=1, num_workers=1)]


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = Publisher()
    with publisher.controller:
        yield publisher
        publisher.sender.abort()
        publisher.client.close()


def test_publish_reports_the_digests_and_the_bytes(publisher: Publisher) -> None:
    publisher.publish(new_communicator=True)
    assert publisher.receivers is not None
    publisher.receivers.join()
    (start,), (result,) = publisher.controller.starts, publisher.controller.results
    assert start.communicator.world_size == 2
    assert start.layout.tensors[0].name == "w"
    assert result.error == ""
    assert list(result.bucket_digests) == WEIGHTS.digests
    assert result.bytes_sent == sum(bucket.numel() for bucket in BUCKETS)
    assert result.export_s == 0.5
    assert result.send_s > 0


def test_publish_that_the_controller_gave_up_ends_there(publisher: Publisher) -> None:
    publisher.mode = "gives up"
    publisher.publish(new_communicator=True)
    assert len(publisher.controller.starts) == 1
    assert publisher.controller.results == []


def test_publish_reports_a_server_that_did_not_join(publisher: Publisher) -> None:
    publisher.mode = "is silent"
    publisher.publish(new_communicator=True)
    assert "workers joining" in publisher.controller.results[0].error
    publisher.mode = "receives"
    publisher.publish(new_communicator=True)
    assert publisher.controller.results[1].error == ""


def test_publish_does_not_wait_for_a_server_that_was_dropped(publisher: Publisher) -> None:
    publisher.mode = "is replaced"
    publisher.publish(new_communicator=True)
    assert publisher.controller.results[0].error == "server did not take part"


def test_publish_through_a_lost_communicator_asks_for_a_new_one(publisher: Publisher) -> None:
    publisher.publish(new_communicator=False)
    assert publisher.controller.starts == []
    assert "members-1 is gone" in publisher.controller.results[0].error

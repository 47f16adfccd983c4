"""Two publishes of two senders over gloo, the second of changes, to a server's own receivers."""

from __future__ import annotations

import threading

import torch
from slipstream.learner.trainer.controller_client import ControllerClient
from slipstream.learner.trainer.weights.bucket_sender import BucketSenders
from slipstream.learner.trainer.weights.publish import WeightPublisher
from slipstream.learner.trainer.weights.published import Published
from slipstream.learner.trainer.weights.weight_stream import WeightStream
from slipstream.protocol.settings.config import WeightsSection
from slipstream.protocol.settings.config_file import parse_config
from slipstream.protocol.weights.buckets import Bucket, TensorSpec, plan_buckets
from slipstream.protocol.weights.deltas import on_the_wire
from slipstream.protocol.weights.digests import bucket_digest, bucket_tensor_digests
from slipstream.rollout_server.weights.bucket_receiver import Incoming, Seat
from slipstream.rollout_server.weights.gloo_receiver import GlooReceiver
from slipstream.v1 import trainer_pb2, weights_pb2
from support.fakes.fake_controller import FakeController, publish_order
from support.ranks.thread_ranks import PlainFilling, PlainModel, ThreadRanks, run_ranks
from support.references import plain_deltas

LIMIT_S = 60.0
TENSORS = {
    TensorSpec(f"w{n}", "bfloat16", (size,), sender): torch.randn(size).bfloat16()
    for n, (size, sender) in enumerate([(3000, 0), (40_000, 0), (999, 0), (5000, 1), (7, 1)])
}
BUCKETS = tuple(plan_buckets(list(TENSORS), 20_000))
# One of a hundred elements of every tensor, at least one.
CHANGED = [sum(-(-span.tensor.shape[0] // 100) for span in bucket.spans) for bucket in BUCKETS]


class Server:
    """Holds the buckets that came last; each of its updates is received on a thread."""

    def __init__(self, where: weights_pb2.Communicator, rank: int) -> None:
        self.held: list[bytes] = [b""] * len(BUCKETS)
        self.sizes: list[int] = []
        self._where, self._rank = where, rank
        self._thread = threading.Thread(target=self._receive)
        self._thread.start()

    def _receive(self) -> None:
        receiver = GlooReceiver(Seat(self._where, self._rank, LIMIT_S), torch.device("cpu"))
        for buckets in (BUCKETS, on_the_wire(BUCKETS, CHANGED)):
            incoming = Incoming(buckets, LIMIT_S, own_buffers=False, digested=buckets == BUCKETS)
            for place, buffer in enumerate(receiver.receive(incoming)):
                self._take(place, BUCKETS[place], bytes(buffer.numpy()))
            # Payloads have none.
            assert bool(receiver.digests()) == incoming.digested

    def _take(self, place: int, bucket: Bucket, data: bytes) -> None:
        if len(data) < bucket.num_bytes:
            data = plain_deltas.decode(self.held[place], data)
        self.held[place] = data

    def digests(self) -> list[bytes]:
        """The digests of what it holds in the end."""
        self._thread.join(LIMIT_S)
        return [
            bucket_digest(bucket_tensor_digests(bucket, held))
            for bucket, held in zip(BUCKETS, self.held, strict=True)
        ]


def test_a_publish_of_changes_gives_all_receivers_the_new_weights() -> None:
    servers: list[Server] = []

    def start(message: trainer_pb2.PublishStart) -> list[weights_pb2.Receiver]:
        where = message.communicator
        servers.extend(Server(where, rank) for rank in range(2, where.world_size))
        return [weights_pb2.Receiver(server_id="server", num_workers=2)]

    weights = WeightsSection(join_deadline_s=LIMIT_S, bucket_deadline_s=LIMIT_S)
    with FakeController([], on_start_publish=start) as controller:
        client = ControllerClient(
            parse_config(
                {
                    "run": {"name": "publish", "steps": 1},
                    "model": {"path": "model"},
                    "algorithm": {"group_size": 2, "groups_per_step": 1, "learning_rate": 1e-3},
                    "sampling": {"max_reply_tokens": 2, "max_episode_tokens": 8},
                    "controller": {"address": controller.address},
                },
                source="test",
            )
        )

        def on_rank(ranks: ThreadRanks) -> None:
            stream = WeightStream(
                PlainModel(ranks), PlainFilling(TENSORS, ranks), bucket_bytes=20_000, delta="host"
            )
            senders = BucketSenders(weights, torch.device("cpu"), largest_bucket=1)
            publisher = WeightPublisher(Published(stream), senders, ranks=ranks, client=client)
            first = publish_order(1, new_communicator=True, verify=False)[0].publish
            first.receivers[0].num_workers = 2
            publisher.run(first, None)
            ranks.gather_bytes(b"")
            if ranks.is_main:
                for data in TENSORS.values():
                    data.view(torch.int16)[::100] ^= 1
            ranks.gather_bytes(b"")
            stream.run()
            second = publish_order(2, new_communicator=False, verify=False, begun=True)[0].publish
            assert stream.offer is not None
            assert list(stream.offer.changed) == CHANGED
            second.delta.CopyFrom(stream.offer)
            publisher.run(second, None)
            senders.abort()

        run_ranks(2, on_rank)
        client.close()
    whole, changes = controller.results
    assert (whole.error, changes.error) == ("", "")
    assert whole.bytes_sent == whole.whole_bytes == changes.whole_bytes
    assert changes.bytes_sent == sum(b.num_bytes for b in on_the_wire(BUCKETS, CHANGED))
    assert 15 * changes.bytes_sent < changes.whole_bytes
    # Each rank counts all broadcasts of which it is a member.
    assert changes.wire_bytes == changes.bytes_sent
    assert abs(changes.changed_share - 0.01) < 0.001
    assert list(whole.bucket_digests) != list(changes.bucket_digests)
    assert len(servers) == 2
    for server in servers:
        assert server.digests() == list(changes.bucket_digests)

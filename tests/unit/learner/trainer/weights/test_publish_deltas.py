"""Two publishes, the second one of changes, to the receivers of a server."""

import threading
from dataclasses import dataclass

import pytest
import torch
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.settings.config import WeightsSection
from slipstream.core.settings.sections import DeltaSetting
from slipstream.learner.trainer.controller_client import ControllerClient
from slipstream.learner.trainer.weights.publish import BucketSenders, WeightPublisher
from slipstream.learner.trainer.weights.published import Published
from slipstream.learner.trainer.weights.weight_stream import WeightStream
from slipstream.protocol.weights.buckets import Bucket, TensorSpec, plan_buckets
from slipstream.protocol.weights.deltas import on_the_wire
from slipstream.protocol.weights.digests import bucket_digest, bucket_tensor_digests
from slipstream.rollout_server.vllm.weights.weight_receiver import TRANSPORTS
from slipstream.rollout_server.weights.bucket_receiver import Incoming, Seat
from slipstream.v1 import trainer_pb2, weights_pb2
from support.fakes.fake_controller import FakeController, publish_order
from support.ranks.thread_ranks import PlainFilling, PlainModel, ThreadRanks, run_ranks
from support.references import plain_deltas

LIMIT_S = 60.0
SIZES = [(3000, 0), (40_000, 0), (999, 0), (5000, 1), (7, 1)]


@dataclass
class Scene:
    """The weights of some senders, of which the step changes one of a hundred elements."""

    transport: str
    num_senders: int

    def __post_init__(self) -> None:
        self.tensors = {
            TensorSpec(f"w{n}", "bfloat16", (size,), sender): torch.randn(size).bfloat16()
            for n, (size, sender) in enumerate(SIZES)
            if sender < self.num_senders
        }
        self.buckets = tuple(plan_buckets(list(self.tensors), 20_000))
        self.changed = [
            sum(-(-span.tensor.shape[0] // 100) for span in b.spans) for b in self.buckets
        ]
        self.payloads = on_the_wire(self.buckets, self.changed)

    def step(self) -> None:
        for data in self.tensors.values():
            data.view(torch.int16)[::100] ^= 1


class Server:
    """Holds the buckets that came last; each of its updates is received on a thread."""

    def __init__(self, scene: Scene, where: weights_pb2.Communicator, rank: int) -> None:
        self.held: list[bytes] = [b""] * len(scene.buckets)
        self._scene, self._where, self._rank = scene, where, rank
        self._thread = threading.Thread(target=self._receive)
        self._thread.start()

    def _receive(self) -> None:
        seat, whole = Seat(self._where, self._rank, LIMIT_S), self._scene.buckets
        receiver = TRANSPORTS[self._where.transport](seat, torch.device("cpu"))
        for buckets in (whole, self._scene.payloads):
            incoming = Incoming(buckets, LIMIT_S, own_buffers=False, digested=buckets is whole)
            for place, buffer in enumerate(receiver.receive(incoming)):
                self._take(place, whole[place], bytes(buffer.numpy()))
            # Payloads have none.
            assert bool(receiver.digests()) == incoming.digested
        receiver.close()

    def _take(self, place: int, bucket: Bucket, data: bytes) -> None:
        if len(data) < bucket.num_bytes:
            data = plain_deltas.decode(self.held[place], data)
        self.held[place] = data

    def digests(self) -> list[bytes]:
        """The digests of what it holds in the end."""
        self._thread.join(LIMIT_S)
        return [
            bucket_digest(bucket_tensor_digests(bucket, held))
            for bucket, held in zip(self._scene.buckets, self.held, strict=True)
        ]


@pytest.mark.parametrize("delta", ["gpu", "host"])
@pytest.mark.parametrize(("transport", "num_senders"), [("gloo", 2), ("gloo", 1), ("ipc", 1)])
def test_a_publish_of_changes_gives_all_receivers_the_new_weights(
    transport: str, num_senders: int, delta: DeltaSetting
) -> None:
    scene = Scene(transport, num_senders)
    servers: list[Server] = []

    def start(message: trainer_pb2.PublishStart) -> list[weights_pb2.Receiver]:
        where = message.communicator
        ranks = range(num_senders, where.world_size)
        servers.extend(Server(scene, where, rank) for rank in ranks)
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
            filling = PlainFilling(scene.tensors, ranks)
            stream = WeightStream(PlainModel(ranks), filling, bucket_bytes=20_000, delta=delta)
            size = stream.largest_bucket
            senders = BucketSenders(weights, torch.device("cpu"), largest_bucket=size)
            publisher = WeightPublisher(Published(stream), senders, ranks=ranks, client=client)
            first = publish_order(1, new_communicator=True, verify=False)[0].publish
            first.receivers[0].num_workers = 2
            first.bucket_deadline_s = LIMIT_S
            first.communicator.transport = transport
            publisher.run(first, None)
            ranks.gather_bytes(b"")
            if ranks.is_main:
                scene.step()
            ranks.gather_bytes(b"")
            stream.run()
            second = publish_order(2, new_communicator=False, verify=False, begun=True)[0].publish
            assert stream.offer is not None
            assert list(stream.offer.changed) == scene.changed
            second.communicator.transport = transport
            second.delta.CopyFrom(stream.offer)
            second.bucket_deadline_s = LIMIT_S
            publisher.run(second, None)
            senders.abort()

        run_ranks(num_senders, on_rank)
        client.close()
    whole, changes = controller.results
    assert (whole.error, changes.error) == ("", "")
    assert whole.bytes_sent == whole.whole_bytes == changes.whole_bytes
    assert changes.bytes_sent == sum(bucket.num_bytes for bucket in scene.payloads)
    assert 15 * changes.bytes_sent < changes.whole_bytes
    # Each rank counts all broadcasts of which it is a member.
    assert changes.wire_bytes == changes.bytes_sent
    assert abs(changes.changed_share - 0.01) < 0.001
    assert list(whole.bucket_digests) != list(changes.bucket_digests)
    assert len(servers) == 2
    for server in servers:
        assert server.digests() == list(changes.bucket_digests)

"""Publishes over NCCL, without a GPU: all members are threads, and the library is a fake one."""

import threading
import time
from collections.abc import Callable

import pytest
import torch
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.errors import WeightSyncError
from slipstream.core.settings.config import OffloadSection, WeightsSection
from slipstream.learner.trainer.controller_client import ControllerClient
from slipstream.learner.trainer.model.offload import HostMemory, Part
from slipstream.learner.trainer.weights.nccl_sender import NcclSender
from slipstream.learner.trainer.weights.publish import BucketSenders, WeightPublisher
from slipstream.learner.trainer.weights.published import Published
from slipstream.learner.trainer.weights.weight_stream import WeightStream
from slipstream.protocol.weights.buckets import TensorSpec, plan_buckets
from slipstream.protocol.weights.digests import bucket_digest, tensor_digest
from slipstream.protocol.weights.nccl_group import NcclGroup
from slipstream.v1 import trainer_pb2, weights_pb2
from support.fakes.fake_controller import FakeController, publish_order
from support.fakes.fake_nccl import FakeNccl, Meeting
from support.ranks.thread_ranks import PlainFilling, PlainModel, ThreadRanks, run_ranks

PATIENT = WeightsSection(join_deadline_s=60.0, bucket_deadline_s=30.0)
# Deadlines for a receiver that never joins, and for one that stops taking buckets.
NO_MEETING = PATIENT.model_copy(update={"join_deadline_s": 1.0})
NO_BUCKET = WeightsSection(join_deadline_s=60.0, bucket_deadline_s=0.5)
BUCKET_BYTES = 4_000
TENSORS = {
    TensorSpec(f"w{n}", "float32", (size,), sender): torch.arange(size, dtype=torch.float32) + n
    for n, (size, sender) in enumerate([(900, 0), (901, 0), (902, 0), (999, 1), (5, 1), (998, 1)])
}
BUCKETS = plan_buckets(list(TENSORS), BUCKET_BYTES)
EXPECTED = {spec.name: tensor_digest(tensor.numpy().data) for spec, tensor in TENSORS.items()}
DIGESTS = [bucket_digest(EXPECTED[span.tensor.name] for span in b.spans) for b in BUCKETS]


class HostStream:
    """A lane is free when all that was sent is there."""

    handle = 0

    def __init__(self) -> None:
        self.wait: Callable[[], None] = lambda: None

    def follow(self) -> None:
        """What the caller did is done."""

    def release(self) -> Callable[[], None]:
        return lambda: self.wait()


class SlowMemory(HostMemory):
    """Unused parameters are offloaded, and take `bring_s` to come back."""

    def __init__(self, bring_s: float) -> None:
        super().__init__(OffloadSection())
        self._bring_s = bring_s

    def _bring(self, part: Part) -> None:
        if self._users[part] == 1:
            time.sleep(self._bring_s)


class Fleet:
    """Two senders, a controller, and one receiver that takes `num_buckets` of each publish."""

    def __init__(self, weights: WeightsSection = PATIENT) -> None:
        self._weights = weights
        self.is_silent = False
        self.meetings: dict[bytes, Meeting] = {}
        self.num_ids = 0
        self.num_buckets = len(BUCKETS)
        self.is_empty = False
        self.receiver_deadline_s = 20.0
        self.bring_s = 0.0
        self.received: list[dict[str, bytes]] = []
        self.controller = FakeController([], on_start_publish=self._start)
        self.client = ControllerClient(
            parse_config(
                {
                    "run": {"name": "publish", "steps": 1},
                    "model": {"path": "model"},
                    "algorithm": {"group_size": 2, "groups_per_step": 1, "learning_rate": 1e-3},
                    "sampling": {"max_reply_tokens": 2, "max_episode_tokens": 8},
                    "controller": {"address": self.controller.address},
                },
                source="test",
            )
        )
        self.senders = [self._sender() for _ in range(2)]
        self._threads: list[threading.Thread] = []
        self._group: NcclGroup | None = None

    def _sender(self) -> BucketSenders:
        senders = BucketSenders(self._weights, torch.device("cpu"), largest_bucket=1)
        stream = HostStream()
        sender = NcclSender(
            self._weights, FakeNccl(self.meetings), stream, make_unique_id=self._unique_id
        )
        stream.wait = lambda: sender._group.wait()
        senders._made["nccl"] = sender
        return senders

    def _unique_id(self) -> bytes:
        self.num_ids += 1
        return b"id-%d" % self.num_ids

    def _start(self, start: trainer_pb2.PublishStart) -> list[weights_pb2.Receiver]:
        if self.is_empty:
            return []
        if not self.is_silent:
            thread = threading.Thread(target=self._receive, args=(start.communicator,))
            thread.start()
            self._threads.append(thread)
        return [weights_pb2.Receiver(server_id="server", first_rank=2, num_workers=1)]

    def _receive(self, where: weights_pb2.Communicator) -> None:
        if where.unique_id:
            self._group = NcclGroup.join(
                FakeNccl(self.meetings), where.unique_id, rank=2, world_size=3, deadline_s=20.0
            )
        group, found = self._group, {}
        assert group is not None
        try:
            for bucket in BUCKETS[: self.num_buckets]:
                data = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
                deadline_s = self.receiver_deadline_s
                group.broadcast(
                    data.data_ptr(), data.numel(), bucket.root, 0, deadline_s=deadline_s
                )
                group.wait()
                for span in bucket.spans:
                    raw = data[span.offset_bytes : span.offset_bytes + span.tensor.num_bytes]
                    found[span.tensor.name] = tensor_digest(raw.numpy().data)
        except WeightSyncError:
            return
        self.received.append(found)

    def publish(self, *, new_communicator: bool) -> None:
        order = publish_order(1, new_communicator=new_communicator, verify=False)[0].publish
        order.communicator.transport = "nccl"
        order.bucket_deadline_s = self._weights.bucket_deadline_s

        def on_rank(ranks: ThreadRanks) -> None:
            filling = PlainFilling(TENSORS, ranks)
            model = PlainModel(ranks)
            model.memory = SlowMemory(self.bring_s)
            stream = WeightStream(model, filling, bucket_bytes=BUCKET_BYTES)
            published = Published(stream)
            senders = self.senders[ranks.rank]
            publisher = WeightPublisher(published, senders, ranks=ranks, client=self.client)
            publisher.run(order, None)

        run_ranks(2, on_rank)
        for thread in self._threads:
            thread.join(20)

    def set_deadlines(self, weights: WeightsSection) -> None:
        for senders in self.senders:
            senders._made["nccl"]._weights = weights
        self._weights = weights

    def close(self) -> None:
        for senders in self.senders:
            senders.abort()
        if self._group is not None:
            self._group.abort()
        self.client.close()


@pytest.fixture
def fleet():
    fleet = Fleet()
    with fleet.controller:
        yield fleet
        fleet.close()


def test_two_senders_reach_the_receiver_and_keep_their_communicator(fleet: Fleet) -> None:
    fleet.publish(new_communicator=True)
    fleet.publish(new_communicator=False)
    assert fleet.num_ids == 1
    assert fleet.received == [EXPECTED, EXPECTED]
    for result in fleet.controller.results:
        assert result.error == ""
        assert list(result.bucket_digests) == DIGESTS
        assert result.wire_s > 0
        assert result.wire_bytes == sum(bucket.num_bytes for bucket in BUCKETS)
    (first, second) = fleet.controller.starts
    assert first.communicator.unique_id == b"id-1"
    assert first.communicator.num_senders == 2
    assert not second.communicator.unique_id


def test_receiver_that_stops_costs_one_deadline_and_a_new_communicator(fleet: Fleet) -> None:
    fleet.num_buckets = 2
    fleet.set_deadlines(NO_BUCKET)
    fleet.publish(new_communicator=True)
    (result,) = fleet.controller.results
    assert "was not done within 0.5 s" in result.error
    assert [s.for_transport("nccl").communicator_id for s in fleet.senders] == [None, None]
    fleet.num_buckets = len(BUCKETS)
    fleet.set_deadlines(PATIENT)
    fleet.publish(new_communicator=True)
    assert fleet.num_ids == 2
    assert fleet.controller.results[1].error == ""
    assert fleet.received[-1] == EXPECTED


def test_receiver_that_dies_while_all_meet_costs_no_sender_the_deadline() -> None:
    """NCCL wakes no member when another sender gives up."""
    fleet = Fleet(WeightsSection(join_deadline_s=60.0))
    fleet.is_silent, fleet.controller.still_there = True, list
    with fleet.controller:
        fleet.publish(new_communicator=True)
        (result,) = fleet.controller.results
        assert "did not meet before one of them was lost" in result.error
        # The threads that were left in it end.
        (meeting,) = fleet.meetings.values()
        with meeting.lock:
            meeting.members.add(2)
            meeting.lock.notify_all()
        fleet.close()


def test_sender_that_cannot_join_costs_no_other_one_the_deadline() -> None:
    # Beyond the limit of the test itself.
    fleet = Fleet(WeightsSection(join_deadline_s=3600.0))
    fleet.is_silent = True
    vars(fleet.senders[1].for_transport("nccl"))["_backend"] = FakeNccl({b"id-1": Meeting(2)})
    with fleet.controller:
        fleet.publish(new_communicator=True)
        (result,) = fleet.controller.results
        assert result.error == "the members disagree on their number"
        (meeting,) = fleet.meetings.values()
        with meeting.lock:
            meeting.members |= {1, 2}
            meeting.lock.notify_all()
        fleet.close()


def test_parameters_come_back_from_the_host_before_a_bucket_is_waited_for(fleet: Fleet) -> None:
    fleet.receiver_deadline_s, fleet.bring_s = 1.5, 2.0
    fleet.publish(new_communicator=True)
    (result,) = fleet.controller.results
    assert result.error == ""
    assert fleet.received == [EXPECTED]


def test_publishes_that_are_given_up_before_anybody_is_told_make_one_id(fleet: Fleet) -> None:
    fleet.is_empty = True
    for _ in range(3):
        fleet.publish(new_communicator=True)
    assert fleet.num_ids == 1
    fleet.is_empty = False
    fleet.publish(new_communicator=True)
    fleet.publish(new_communicator=True)
    assert fleet.num_ids == 2
    assert fleet.received == [EXPECTED, EXPECTED]


def test_sender_without_a_communicator_says_so() -> None:
    sender = NcclSender(NO_MEETING, FakeNccl({}), HostStream(), make_unique_id=lambda: b"id")
    with pytest.raises(WeightSyncError, match="no communicator to send through"):
        sender.send(BUCKETS[0], torch.zeros(BUCKETS[0].num_bytes, dtype=torch.uint8))
    with pytest.raises(WeightSyncError, match="no communicator to send through"):
        sender.finish()
    where = sender.announce("members-1", num_senders=1, world_size=2)
    with pytest.raises(WeightSyncError, match="did not meet within 1 s"):
        sender.connect(where, 0)
    assert sender.communicator_id is None

"""The senders and the way of a publish, against plain torch receivers in threads."""

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from slipstream.core.errors import ConfigError, WeightSyncError
from slipstream.core.settings.config import Config, WeightsSection
from slipstream.learner.trainer.controller_client import ControllerClient
from slipstream.learner.trainer.weights.gloo_sender import GlooSender
from slipstream.learner.trainer.weights.publish import BucketSenders, WeightPublisher
from slipstream.learner.trainer.weights.published import Published
from slipstream.learner.trainer.weights.weight_stream import WeightStream
from slipstream.protocol.weights.buckets import Bucket, TensorSpec, plan_buckets
from slipstream.protocol.weights.digests import bucket_digest, tensor_digest
from slipstream.v1 import trainer_pb2, weights_pb2
from support.fakes.fake_controller import FakeController, publish_order
from support.fakes.small_configs import small_config
from support.ranks.thread_ranks import PlainFilling, PlainModel, ThreadRanks, run_ranks
from torch import Tensor

BUCKET_BYTES = 4_000
# The first sender has three buckets, the second one two.
TENSORS = {
    TensorSpec(f"w{n}", "float32", (size,), sender): torch.arange(size, dtype=torch.float32) + n
    for n, (size, sender) in enumerate([(3, 0), (500_000, 0), (1, 0), (999, 1), (5, 1)])
}
BUCKETS = plan_buckets(list(TENSORS), BUCKET_BYTES)
ONE_SENDER = {
    TensorSpec(spec.name, spec.dtype, spec.shape): tensor
    for spec, tensor in TENSORS.items()
    if spec.sender == 0
}
ONE_BUCKETS = plan_buckets(list(ONE_SENDER), BUCKET_BYTES)
PATIENT = WeightsSection(join_deadline_s=60.0, bucket_deadline_s=30.0)
# Deadlines for receivers that never join, and for receivers that stop taking buckets.
NO_MEETING = PATIENT.model_copy(update={"join_deadline_s": 0.5})
NO_BUCKET = WeightsSection(join_deadline_s=60.0, bucket_deadline_s=0.5)


def digests_of(buckets: list[Bucket]) -> list[bytes]:
    data = {spec.name: tensor_digest(tensor.numpy().data) for spec, tensor in TENSORS.items()}
    return [bucket_digest(data[span.tensor.name] for span in b.spans) for b in buckets]


class Receivers:
    """Threads that join a communicator behind its senders and receive `buckets`."""

    def __init__(
        self, where: weights_pb2.Communicator, buckets: list[Bucket], *, delay_s: float = 0.0
    ) -> None:
        num_receivers = where.world_size - where.num_senders
        self.received: list[list[Tensor]] = [[] for _ in range(num_receivers)]
        self._where, self._buckets, self._delay_s = where, buckets, delay_s
        self._threads = [
            threading.Thread(target=self._receive, args=(n,)) for n in range(num_receivers)
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(20)

    def tensors(self, number: int) -> dict[str, Tensor]:
        """What receiver `number` got last, by name."""
        last = self.received[number][-len(self._buckets) :]
        return {
            span.tensor.name: data[span.offset_bytes :][: span.tensor.num_bytes].view(torch.float32)
            for bucket, data in zip(self._buckets, last, strict=True)
            for span in bucket.spans
        }

    def _receive(self, number: int) -> None:
        where = self._where
        time.sleep(self._delay_s)
        try:
            store = dist.TCPStore(
                where.store_host,
                where.store_port,
                is_master=False,
                wait_for_workers=False,
                # A receiver that comes late meets no sender, and gives up after 1 s.
                timeout=timedelta(seconds=1 if self._delay_s else 60),
            )
            group = dist.ProcessGroupGloo(
                dist.PrefixStore(where.communicator_id, store),
                where.num_senders + number,
                where.world_size,
                timedelta(seconds=60),
            )
            for bucket in self._buckets:
                data = torch.empty(bucket.num_bytes, dtype=torch.uint8)
                group.broadcast(data, bucket.root).wait()
                self.received[number].append(data)
        except RuntimeError:
            # The senders gave up, as some tests want it.
            return


def announce(sender: GlooSender, num_receivers: int) -> weights_pb2.Communicator:
    return sender.announce("members-1", num_senders=1, world_size=1 + num_receivers)


def send_all(sender: GlooSender) -> None:
    for bucket, tensor in zip(ONE_BUCKETS, ONE_SENDER.values(), strict=True):
        data = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
        data[: tensor.nbytes] = tensor.view(torch.uint8)
        sender.send(bucket, data)
    wire = sender.finish()
    assert wire.seconds > 0
    assert wire.num_bytes == sum(bucket.num_bytes for bucket in ONE_BUCKETS)


class Work:
    """A broadcast that is done when its `wait` is called, and the threads that called it."""

    def __init__(self) -> None:
        self.waiting: set[int] = set()

    def wait(self) -> None:
        self.waiting.add(threading.get_ident())

    @property
    def was_waited_for(self) -> bool:
        return bool(self.waiting)


class Group:
    """A communicator without another member."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def broadcast(self, *_: object) -> Work:
        self.works.append(Work())
        return self.works[-1]


def test_a_lane_is_free_while_the_bucket_of_the_other_one_travels() -> None:
    sender = GlooSender(WeightsSection())
    group = Group()
    vars(sender)["_group"] = group
    lanes = [torch.zeros(bucket.num_bytes, dtype=torch.uint8) for bucket in ONE_BUCKETS[:2]]
    first, second = (
        sender.send(bucket, lane) for bucket, lane in zip(ONE_BUCKETS[:2], lanes, strict=True)
    )
    first()
    assert [work.was_waited_for for work in group.works] == [True, False]
    second()
    assert [work.was_waited_for for work in group.works] == [True, True]


def test_the_thread_that_fills_a_lane_waits_for_its_bucket_itself() -> None:
    # On a GPU gloo copies a bucket back, behind which only the current stream of a thread that
    # waits goes on: after another thread's wait the copy may overwrite the lane's next bucket.
    sender, group = GlooSender(WeightsSection()), Group()
    vars(sender)["_group"] = group
    sender.send(ONE_BUCKETS[0], torch.zeros(ONE_BUCKETS[0].num_bytes, dtype=torch.uint8))()
    assert threading.get_ident() in group.works[0].waiting


def test_every_receiver_gets_every_bucket_and_the_communicator_is_kept() -> None:
    sender = GlooSender(WeightsSection())
    where = announce(sender, 2)
    assert sender.communicator_id is None
    receivers = Receivers(where, 2 * ONE_BUCKETS)
    sender.connect(where, 0)
    assert sender.communicator_id == "members-1"
    send_all(sender)
    send_all(sender)
    receivers.join()
    for number in range(2):
        assert len(receivers.received[number]) == 2 * len(ONE_BUCKETS)
        for tensor, expected in zip(
            receivers.tensors(number).values(), ONE_SENDER.values(), strict=True
        ):
            assert torch.equal(tensor, expected)
    sender.abort()


def test_store_listens_on_the_given_host_only() -> None:
    sender = GlooSender(WeightsSection(host="127.0.0.1"))
    where = announce(sender, 1)
    with socket.create_connection(("127.0.0.1", where.store_port), timeout=5):
        pass
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", where.store_port), timeout=5)
    sender.abort()


def test_host_that_is_not_this_machine_is_refused_by_name() -> None:
    sender = GlooSender(WeightsSection(host="192.0.2.1"))
    with pytest.raises(ConfigError, match=r"weights\.host must be an address of this machine"):
        announce(sender, 1)


def test_transport_that_cannot_be_is_refused() -> None:
    cpu = torch.device("cpu")
    senders = BucketSenders(WeightsSection(), cpu, largest_bucket=1)
    with pytest.raises(ConfigError, match=r"weights\.transport is nccl, but the trainer has no"):
        senders.for_transport("nccl")
    with pytest.raises(ConfigError, match="must be gloo, nccl or ipc, got 'mpi'"):
        senders.for_transport("mpi")
    assert senders.for_transport("gloo") is senders.for_transport("gloo")


def test_receiver_that_never_joins_costs_one_deadline() -> None:
    sender = GlooSender(NO_MEETING)
    where = announce(sender, 1)
    with pytest.raises(WeightSyncError, match="1 others joining members-1"):
        sender.connect(where, 0)
    assert sender.communicator_id is None


def test_meeting_that_was_given_up_leaves_no_thread_behind() -> None:
    """The end of the process would come upon it in torch's code, and be an abort."""
    sender = GlooSender(WeightsSection(join_deadline_s=60.0))
    where = announce(sender, 1)
    abandoned = threading.Event()
    abandoned.set()
    with pytest.raises(WeightSyncError, match="before one of them was lost"):
        sender.connect(where, 0, abandoned)
    until = time.monotonic() + 20
    while any(thread.name == "weight-sender" for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_leader_that_gives_a_meeting_up_frees_the_other_senders() -> None:
    """The leader's meeting place is gone; the other senders notice without a message."""
    leader, other = (GlooSender(WeightsSection(join_deadline_s=60.0)) for _ in range(2))
    where = leader.announce("members-1", num_senders=2, world_size=3)
    failures: queue.Queue[WeightSyncError] = queue.Queue()

    def follow() -> None:
        try:
            other.connect(where, 1)
        except WeightSyncError as error:
            failures.put(error)

    thread = threading.Thread(target=follow)
    thread.start()
    abandoned = threading.Event()
    threading.Timer(0.5, abandoned.set).start()
    with pytest.raises(WeightSyncError, match="before one of them was lost"):
        leader.connect(where, 0, abandoned)
    assert "2 others joining members-1" in str(failures.get(timeout=20))
    thread.join(20)


def test_receiver_that_stops_taking_buckets_costs_one_deadline() -> None:
    sender = GlooSender(NO_BUCKET)
    where = announce(sender, 1)
    receivers = Receivers(where, ONE_BUCKETS[:1])
    sender.connect(where, 0)
    (large,) = plan_buckets([TensorSpec("large", "float32", (16 << 20,))], 1)
    sender.send(ONE_BUCKETS[0], torch.zeros(ONE_BUCKETS[0].num_bytes, dtype=torch.uint8))
    sender.send(large, torch.zeros(large.num_bytes, dtype=torch.uint8))
    with pytest.raises(WeightSyncError, match="a bucket of 67108864 bytes from rank 0") as raised:
        sender.finish()
    assert "weights.bucket_deadline_s = " in str(raised.value)
    assert "/third_party/" not in str(raised.value)
    receivers.join()
    with pytest.raises(WeightSyncError, match="no communicator"):
        sender.send(large, torch.zeros(large.num_bytes, dtype=torch.uint8))


def test_new_communicator_works_after_a_failed_one() -> None:
    sender = GlooSender(NO_MEETING)
    where = announce(sender, 1)
    with pytest.raises(WeightSyncError):
        sender.connect(where, 0)
    sender._weights = PATIENT
    where = sender.announce("members-2", num_senders=1, world_size=2)
    receivers = Receivers(where, ONE_BUCKETS)
    sender.connect(where, 0)
    send_all(sender)
    receivers.join()
    assert len(receivers.received[0]) == len(ONE_BUCKETS)
    sender.abort()


def config(address: str) -> Config:
    return small_config(algorithm={"groups_per_step": 1}, controller={"address": address})


class Publish:
    """A controller whose servers behave as `mode` says, and the ranks of a trainer."""

    def __init__(self, num_senders: int = 1, weights: WeightsSection = PATIENT) -> None:
        self.mode = "receives"
        self._weights = weights
        self.num_senders = num_senders
        self.tensors = TENSORS if num_senders == 2 else ONE_SENDER
        self.buckets = BUCKETS if num_senders == 2 else ONE_BUCKETS
        self.controller = FakeController([], on_start_publish=self._start)
        self.client = ControllerClient(config(self.controller.address))
        self.receivers: Receivers | None = None
        self._all_receivers: list[Receivers] = []
        # The communicator that the trainer names after a publish.
        self.communicator_id: str | None = None
        self.senders = [
            BucketSenders(weights, torch.device("cpu"), largest_bucket=1)
            for _ in range(num_senders)
        ]
        self.on_fill: Callable[[int, int], None] = lambda rank, place: None

    def run(self, *, new_communicator: bool, begun: bool = False) -> None:
        order = publish_order(1, new_communicator=new_communicator, verify=False, begun=begun)
        order[0].publish.bucket_deadline_s = self._weights.bucket_deadline_s

        def on_rank(ranks: ThreadRanks) -> None:
            def on_fill(place: int) -> None:
                self.on_fill(ranks.rank, place)

            filling = PlainFilling(self.tensors, ranks, on_fill)
            stream = WeightStream(PlainModel(ranks), filling, bucket_bytes=BUCKET_BYTES)
            senders = self.senders[ranks.rank]
            publisher = WeightPublisher(Published(stream), senders, ranks=ranks, client=self.client)
            publisher.run(order[0].publish, None)
            if ranks.is_main:
                self.communicator_id = publisher.communicator_id

        run_ranks(self.num_senders, on_rank)

    def set_deadlines(self, weights: WeightsSection) -> None:
        for senders in self.senders:
            senders.for_transport("gloo")._weights = weights
        self._weights = weights

    def close(self) -> None:
        for sender in self.senders:
            sender.abort()
        self.client.close()
        for receivers in self._all_receivers:
            receivers.join()

    def _start(self, start: trainer_pb2.PublishStart) -> list[weights_pb2.Receiver]:
        if self.mode == "gives up":
            return []
        name = "another" if self.mode == "is replaced" else "server"
        if self.mode not in ("is replaced", "is silent"):
            taken = self.buckets[:1] if self.mode == "stops" else self.buckets
            delay_s = 1.5 if self.mode == "comes late" else 0.0
            self.receivers = Receivers(start.communicator, taken, delay_s=delay_s)
            self._all_receivers.append(self.receivers)
        return [weights_pb2.Receiver(server_id=name, first_rank=1, num_workers=1)]


@pytest.fixture(params=[1, 2], ids=["one-sender", "two-senders"])
def publish(request: pytest.FixtureRequest) -> Iterator[Publish]:
    publish = Publish(request.param)
    with publish.controller:
        yield publish
        publish.close()


def test_publish_reports_the_digests_and_the_bytes(publish: Publish) -> None:
    publish.run(new_communicator=True)
    assert publish.receivers is not None
    publish.receivers.join()
    (start,), (result,) = publish.controller.starts, publish.controller.results
    assert start.communicator.world_size == publish.num_senders + 1
    assert start.communicator.num_senders == publish.num_senders
    assert [t.sender for t in start.layout.tensors] == [s.sender for s in publish.tensors]
    assert result.error == ""
    assert list(result.bucket_digests) == digests_of(publish.buckets)
    assert result.bytes_sent == sum(bucket.num_bytes for bucket in publish.buckets)
    assert 0 < result.export_s < result.send_s
    assert 0 < result.wire_s < result.send_s
    assert result.wire_bytes == result.bytes_sent
    received = publish.receivers.tensors(0)
    assert {spec.name for spec in publish.tensors} == set(received)
    assert all(torch.equal(received[spec.name], t) for spec, t in publish.tensors.items())


def test_publish_that_has_begun_is_sent_without_asking_the_controller(publish: Publish) -> None:
    twice = publish.buckets + publish.buckets
    publish.buckets = twice
    publish.run(new_communicator=True)
    assert publish.communicator_id == "members-1"
    publish.run(new_communicator=False, begun=True)
    assert publish.receivers is not None
    publish.receivers.join()
    assert len(publish.receivers.received[0]) == len(twice)
    assert len(publish.controller.starts) == 1
    first, second = publish.controller.results
    assert (second.error, list(second.bucket_digests)) == ("", list(first.bucket_digests))


def test_publish_that_has_begun_fails_when_the_communicator_is_lost(publish: Publish) -> None:
    publish.run(new_communicator=False, begun=True)
    assert "no communicator" in publish.controller.results[0].error
    assert publish.communicator_id == ""


def test_publish_that_the_controller_gave_up_ends_there(publish: Publish) -> None:
    publish.mode = "gives up"
    publish.run(new_communicator=True)
    assert len(publish.controller.starts) == 1
    assert publish.controller.results == []


def test_publish_reports_once_a_server_that_did_not_join(publish: Publish) -> None:
    publish.mode = "is silent"
    publish.set_deadlines(NO_MEETING)
    publish.run(new_communicator=True)
    assert len(publish.controller.results) == 1
    assert "others joining" in publish.controller.results[0].error
    publish.mode = "receives"
    publish.set_deadlines(PATIENT)
    publish.run(new_communicator=True)
    assert publish.controller.results[1].error == ""


def test_server_that_comes_too_late_does_not_stop_the_next_publish(publish: Publish) -> None:
    publish.mode = "comes late"
    publish.set_deadlines(NO_MEETING)
    publish.run(new_communicator=True)
    assert "others joining" in publish.controller.results[0].error
    publish.mode = "receives"
    publish.set_deadlines(PATIENT)
    publish.run(new_communicator=True)
    assert publish.controller.results[1].error == ""


def test_receiver_that_dies_in_the_middle_is_reported_once_and_all_senders_abort(
    publish: Publish,
) -> None:
    publish.mode = "stops"
    publish.set_deadlines(NO_BUCKET)
    filled: list[tuple[int, int]] = []
    publish.on_fill = lambda rank, place: filled.append((rank, place))
    publish.run(new_communicator=True)
    (result,) = publish.controller.results
    assert result.error.startswith("bucket ")
    assert not result.bucket_digests
    assert [s.for_transport("gloo").communicator_id for s in publish.senders] == [
        None
    ] * publish.num_senders
    # Others may wait for the parts of a rank that cannot send any more.
    assert len(filled) == publish.num_senders * len(publish.buckets)
    publish.mode = "receives"
    publish.set_deadlines(PATIENT)
    publish.run(new_communicator=True)
    assert publish.controller.results[1].error == ""
    assert list(publish.controller.results[1].bucket_digests) == digests_of(publish.buckets)


def test_publish_does_not_wait_for_a_server_that_was_dropped(publish: Publish) -> None:
    publish.mode = "is replaced"
    publish.run(new_communicator=True)
    assert publish.controller.results[0].error == "server did not take part"


def test_publish_through_a_lost_communicator_asks_for_a_new_one(publish: Publish) -> None:
    publish.run(new_communicator=False)
    assert publish.controller.starts == []
    assert "members-1 is gone" in publish.controller.results[0].error


@pytest.mark.parametrize("num_senders", [1, 2])
def test_server_that_dies_while_all_meet_does_not_cost_the_deadline(num_senders: int) -> None:
    publish = Publish(num_senders, weights=WeightsSection(join_deadline_s=60.0))
    publish.mode = "is silent"
    publish.controller.still_there = list
    with publish.controller:
        publish.run(new_communicator=True)
        (result,) = publish.controller.results
        assert "before one of them was lost" in result.error
        publish.close()


class LateFailure(GlooSender):
    """Sends everything, and notices at the end that it did not arrive."""

    def finish(self) -> None:
        super().finish()
        raise WeightSyncError("the last bucket did not arrive")


def test_problem_of_one_sender_is_known_to_all_and_reported_once() -> None:
    publish = Publish(2)
    publish.senders[1]._made["gloo"] = LateFailure(PATIENT)
    with publish.controller:
        publish.run(new_communicator=True)
        (result,) = publish.controller.results
        assert result.error == "the last bucket did not arrive"
        assert not result.bucket_digests
        assert [s.for_transport("gloo").communicator_id for s in publish.senders] == [None, None]
        publish.close()

"""Publishes of a trainer's ranks to real receivers; NCCL's library is a fake one."""

import functools
import itertools
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from slipstream.core.errors import ConfigError, WeightSyncError
from slipstream.core.settings.sections import OffloadSection, WeightsSection
from slipstream.extensions.offload.trainer import HostMemory
from slipstream.learner.trainer.controller_client import ControllerClient
from slipstream.learner.trainer.model.model import MemoryPart
from slipstream.learner.trainer.weights.bucket_senders import (
    BucketSender,
    GlooSender,
    NcclSender,
    make_sender,
)
from slipstream.learner.trainer.weights.weight_publisher import (
    Published,
    WeightPublisher,
)
from slipstream.learner.trainer.weights.weight_stream import WeightStream
from slipstream.protocol.weights.buckets import Bucket, TensorSpec, plan_buckets
from slipstream.protocol.weights.digests import bucket_digest, bucket_tensor_digests
from slipstream.protocol.weights.nccl_group import NcclGroup
from slipstream.rollout_server.vllm.weight_receiver import TRANSPORTS
from slipstream.rollout_server.weights.bucket_receiver import Incoming
from slipstream.v1 import trainer_pb2, weights_pb2
from support.fakes import fake_nccl
from support.fakes.fake_controller import FakeController, publish_order
from support.fakes.small_configs import small_config
from support.ranks.thread_ranks import (
    PlainFilling,
    PlainModel,
    ThreadRanks,
    packed,
    run_ranks,
)
from support.rigs.waiting import LIMIT_S, wait_until

LONG_S = 60.0
BUCKET_BYTES = 20_000
CPU = torch.device("cpu")
HOST = "127.0.0.1"
PATIENT = WeightsSection(join_deadline_s=LONG_S, bucket_deadline_s=30.0)
# Deadlines for receivers that never join, and for receivers that stop taking buckets.
NO_MEETING = PATIENT.model_copy(update={"join_deadline_s": 0.5})
NO_BUCKET = PATIENT.model_copy(update={"bucket_deadline_s": 0.5})
NOBODY_CAME = r"joining|did not meet|did not join"
NUM_WORKERS = 2


class HostStream:
    """A lane is free when all that was sent is there."""

    cuda_stream = 0

    def __init__(self, *_: object, **__: object) -> None:
        self.wait: Callable[[], None] = lambda: None

    def wait_stream(self, _: "HostStream") -> None:
        """What the caller did is done."""

    def record_event(self) -> "HostStream":
        return self

    def wait_event(self, event: "HostStream") -> None:
        event.wait()


class NcclMember:
    """A receiver over the fake library."""

    def __init__(
        self,
        where: weights_pb2.Communicator,
        rank: int,
        deadline_s: float,
        _: torch.device,
    ) -> None:
        self._group = NcclGroup.join(
            0,
            where.unique_id,
            rank=rank,
            world_size=where.world_size,
            deadline_s=deadline_s,
        )

    def receive(self, incoming: Incoming) -> Iterator[torch.Tensor]:
        for bucket in incoming.buckets:
            data = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
            pointer = data.data_ptr()
            deadline_s = incoming.bucket_deadline_s
            self._group.broadcast(
                pointer, len(data), bucket.root, 0, deadline_s=deadline_s
            )
            self._group.wait()
            yield data

    def close(self) -> None:
        self._group.abort()


class Worker:
    """Receives some updates on a thread, and holds the buckets that came last."""

    def __init__(
        self, scene: "Scene", where: weights_pb2.Communicator, rank: int
    ) -> None:
        self.held: list[bytes] = [b""] * len(scene.buckets)
        self.num_buckets = 0
        self._scene = scene
        self._delay_s = scene.delay_s
        # A receiver that comes late meets no sender, and gives up after 1 s.
        self._joins = where, rank, 1.0 if scene.delay_s else LONG_S, CPU
        self._thread = threading.Thread(target=self._receive)
        self._thread.start()

    def digests(self) -> list[bytes]:
        """The digests of what it holds in the end."""
        self._thread.join(LONG_S)
        return digests_of(self._scene.buckets, self.held)

    def join(self) -> None:
        self._thread.join(LONG_S)

    def _receive(self) -> None:
        scene = self._scene
        time.sleep(self._delay_s)
        try:
            kind = (
                NcclMember if scene.transport == "nccl" else TRANSPORTS[scene.transport]
            )
            receiver: Any = kind(*self._joins)
            for buckets in scene.updates:
                incoming = Incoming(buckets, 20.0, own_buffers=False)
                taken = itertools.islice(receiver.receive(incoming), scene.num_taken)
                for place, data in enumerate(taken):
                    self.num_buckets += 1
                    self.held[place] = bytes(data.numpy())
            receiver.close()
        except WeightSyncError:
            # The senders gave up, as some tests want it.
            return


def digests_of(buckets: Sequence[Bucket], contents: Sequence[bytes]) -> list[bytes]:
    return [
        bucket_digest(bucket_tensor_digests(bucket, content))
        for bucket, content in zip(buckets, contents, strict=True)
    ]


class NotedMemory(HostMemory):
    """Notes how many publishes had started when a rank first made its parameters resident."""

    def __init__(self, scene: "Scene", rank: int) -> None:
        super().__init__(OffloadSection())
        self._scene = scene
        self._rank = rank

    def resident(self, *parts: MemoryPart) -> AbstractContextManager[None]:
        starts = len(self._scene.controller.starts)
        self._scene.starts_when_resident.setdefault(self._rank, starts)
        return super().resident(*parts)


class Scene:
    """A controller, the senders of a trainer, and the two workers of a server.

    `mode`: "receives", "gives up", "is silent", "is replaced".
    """

    def __init__(self, cupy, transport: str, num_senders: int, weights=PATIENT) -> None:
        self._cupy = cupy
        self.transport = transport
        self.num_senders = num_senders
        self._weights = weights
        random = torch.Generator().manual_seed(0)
        # A single bucket takes longer than others; two are of the second sender; two have padding.
        sizes = [(3000, 0), (400_000, 0), (999, 0), (9000, 1), (7, 1), (5000, 1)]
        self.tensors = {
            TensorSpec(f"w{n}", "bfloat16", (size,), sender): torch.randn(
                size, generator=random
            ).bfloat16()
            for n, (size, sender) in enumerate(sizes)
            if sender < num_senders
        }
        self.buckets = tuple(plan_buckets(list(self.tensors), BUCKET_BYTES))
        # The buckets of each update that a communicator's workers receive, and how many of them.
        self.updates: list[tuple[Bucket, ...]] = [self.buckets]
        self.num_taken: int | None = None
        self.mode = "receives"
        self.delay_s = 0.0
        self.on_fill: Callable[[int, int], None] = lambda rank, place: None
        self.workers: list[Worker] = []
        self._all_workers: list[Worker] = []
        # The publishes that the controller had started when a rank first made parameters resident.
        self.starts_when_resident: dict[int, int] = {}
        self.controller = FakeController([], on_start_publish=self._start)
        address = {"address": self.controller.address}
        config = small_config(algorithm={"groups_per_step": 1}, controller=address)
        self.client = ControllerClient(config)
        self.senders = [self._sender() for _ in range(num_senders)]
        # The communicator that the trainer names after a publish.
        self.communicator_id: str | None = None

    def run(
        self, *, new_communicator: bool, begun: bool = False
    ) -> trainer_pb2.PublishResult:
        """Publishes once; returns the newest result, an empty one without any."""

        def on_rank(ranks: ThreadRanks) -> None:
            self.publish(ranks, self.stream(ranks), new_communicator, begun=begun)

        run_ranks(self.num_senders, on_rank)
        results = self.controller.results
        return results[-1] if results else trainer_pb2.PublishResult()

    def stream(self, ranks: ThreadRanks) -> WeightStream:
        filling = PlainFilling(
            self.tensors, ranks, lambda place: self.on_fill(ranks.rank, place)
        )
        model = PlainModel(ranks)
        model.memory = NotedMemory(self, ranks.rank)
        return WeightStream(model, filling, bucket_bytes=BUCKET_BYTES)

    def publish(self, ranks, stream, new_communicator, *, begun=False):
        """One rank's part."""
        (directive,) = publish_order(
            1, new_communicator=new_communicator, verify=False, begun=begun
        )
        order = directive.publish
        order.communicator.transport = self.transport
        order.bucket_deadline_s = self._weights.bucket_deadline_s
        order.receivers[0].num_workers = NUM_WORKERS
        make = {self.transport: self.senders[ranks.rank]}.__getitem__
        publisher = WeightPublisher(
            Published(stream), make, ranks=ranks, client=self.client
        )
        publisher.run(order, None)
        if ranks.is_main:
            self.communicator_id = publisher.communicator_id

    def set_deadlines(self, weights: WeightsSection) -> None:
        for sender in self.senders:
            vars(sender)["_weights"] = weights
        self._weights = weights

    def connected(self) -> list[str | None]:
        return [sender.communicator_id for sender in self.senders]

    def contents(self) -> list[bytes]:
        """What all buckets hold, with zeros between the tensors."""
        return [packed(bucket, self.tensors) for bucket in self.buckets]

    def digests(self) -> list[bytes]:
        return digests_of(self.buckets, self.contents())

    def close(self) -> None:
        for sender in self.senders:
            sender.abort()
        self._cupy.end_meetings()
        self.client.close()
        for worker in self._all_workers:
            worker.join()

    def _sender(self) -> BucketSender:
        largest = max(bucket.num_bytes for bucket in self.buckets)
        device = torch.device("cuda", 0) if self.transport == "nccl" else CPU
        sender = make_sender(
            self.transport, self._weights, device, largest_bucket=largest, host=HOST
        )
        if isinstance(sender, NcclSender):
            sender._stream.wait = lambda: sender._group.wait()
        return sender

    def _start(self, start: trainer_pb2.PublishStart) -> list[weights_pb2.Receiver]:
        if self.mode == "gives up":
            return []
        where = start.communicator
        is_new = bool(where.store_host or where.unique_id)
        if is_new and self.mode == "receives":
            ranks = range(self.num_senders, where.world_size)
            self.workers = [Worker(self, where, rank) for rank in ranks]
            self._all_workers += self.workers
        name = "another" if self.mode == "is replaced" else "server"
        return [
            weights_pb2.Receiver(server_id=name, first_rank=1, num_workers=NUM_WORKERS)
        ]


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_nccl.FakeNccl]:
    monkeypatch.setattr(torch.cuda, "Stream", HostStream)
    monkeypatch.setattr(torch.cuda, "current_stream", HostStream)
    with fake_nccl.installed() as cupy:
        yield cupy


@pytest.fixture(
    params=[("gloo", 1), ("gloo", 2), ("ipc", 1), ("nccl", 2)],
    ids=lambda p: f"{p[0]}-{p[1]}",
)
def scene(request: pytest.FixtureRequest, cupy: fake_nccl.FakeNccl) -> Iterator[Scene]:
    scene = Scene(cupy, *request.param)
    with scene.controller:
        yield scene
        scene.close()


def test_publish_reports_the_digests_and_the_bytes(scene: Scene) -> None:
    result = scene.run(new_communicator=True)
    (start,) = scene.controller.starts
    assert start.communicator.world_size == scene.num_senders + NUM_WORKERS
    assert start.communicator.num_senders == scene.num_senders
    assert [t.sender for t in start.layout.tensors] == [s.sender for s in scene.tensors]
    assert result.error == ""
    assert list(result.bucket_digests) == scene.digests()
    assert result.bytes_sent == sum(bucket.num_bytes for bucket in scene.buckets)
    assert result.send_s > 0
    assert 0 < result.wire_s < result.send_s
    assert result.wire_bytes == result.bytes_sent
    assert [worker.digests() for worker in scene.workers] == [
        scene.digests()
    ] * NUM_WORKERS


def test_a_communicator_is_kept_and_a_publish_that_has_begun_asks_nobody(
    scene: Scene,
) -> None:
    scene.updates = 3 * [scene.buckets]
    scene.run(new_communicator=True)
    assert scene.communicator_id == "members-1"
    scene.run(new_communicator=False, begun=True)
    assert len(scene.controller.starts) == 1
    scene.run(new_communicator=False)
    _, last = scene.controller.starts
    assert not last.communicator.store_host and not last.communicator.unique_id
    for worker in scene.workers:
        assert worker.digests() == scene.digests()
        assert worker.num_buckets == 3 * len(scene.buckets)
    outcomes = [
        (result.error, list(result.bucket_digests))
        for result in scene.controller.results
    ]
    assert outcomes == 3 * [("", scene.digests())]


def test_publish_without_its_communicator_fails_or_asks_for_a_new_one(
    scene: Scene,
) -> None:
    assert "no communicator" in scene.run(new_communicator=False, begun=True).error
    assert scene.communicator_id == ""
    assert "members-1 is gone" in scene.run(new_communicator=False).error
    assert scene.controller.starts == []


def test_publish_that_the_controller_gave_up_ends_there(scene: Scene) -> None:
    scene.mode = "gives up"
    scene.run(new_communicator=True)
    assert len(scene.controller.starts) == 1
    assert scene.controller.results == []


@pytest.mark.parametrize("delay_s", [0.0, 1.5], ids=["never", "late"])
def test_a_server_that_does_not_join_in_time_is_reported_once_and_stops_no_other_publish(
    scene: Scene, delay_s: float
) -> None:
    scene.mode = "receives" if delay_s else "is silent"
    scene.delay_s = delay_s
    scene.set_deadlines(NO_MEETING)
    result = scene.run(new_communicator=True)
    assert len(scene.controller.results) == 1
    assert re.search(NOBODY_CAME, result.error)
    scene.mode = "receives"
    scene.delay_s = 0.0
    scene.set_deadlines(PATIENT)
    assert scene.run(new_communicator=True).error == ""


def test_receivers_that_die_in_the_middle_are_reported_once_and_all_senders_abort(
    scene,
):
    scene.num_taken = 1
    scene.set_deadlines(NO_BUCKET)
    filled: list[tuple[int, int]] = []
    scene.on_fill = lambda rank, place: filled.append((rank, place))
    result = scene.run(new_communicator=True)
    assert len(scene.controller.results) == 1
    assert result.error
    assert not result.bucket_digests
    assert scene.connected() == [None] * scene.num_senders
    # Other ranks may wait for the parts of a rank that cannot send any more.
    assert len(filled) == scene.num_senders * len(scene.buckets)
    scene.num_taken = None
    scene.set_deadlines(PATIENT)
    result = scene.run(new_communicator=True)
    assert (result.error, list(result.bucket_digests)) == ("", scene.digests())


def test_publish_does_not_wait_for_a_server_that_was_dropped(scene: Scene) -> None:
    scene.mode = "is replaced"
    assert scene.run(new_communicator=True).error == "server did not take part"


def test_server_that_dies_while_all_meet_does_not_cost_the_deadline(
    scene: Scene,
) -> None:
    scene.mode = "is silent"
    scene.controller.still_there = list
    error = scene.run(new_communicator=True).error
    # A rank may first see that another one has closed the place where all meet.
    assert re.search(
        "before one of them was lost|Connection was likely closed", error
    ), error


def test_parameters_are_on_the_device_before_any_member_waits_for_a_bucket(
    scene: Scene,
) -> None:
    assert scene.run(new_communicator=True).error == ""
    assert scene.starts_when_resident[0] == 0


def test_problem_of_one_sender_is_known_to_all_and_reported_once(cupy, monkeypatch):
    scene = Scene(cupy, "gloo", 2)
    sender = scene.senders[1]
    finish = sender.finish

    def fail_late() -> None:
        finish()
        raise WeightSyncError("the last bucket did not arrive")

    monkeypatch.setattr(sender, "finish", fail_late)
    with scene.controller:
        result = scene.run(new_communicator=True)
        assert result.error == "the last bucket did not arrive"
        assert not result.bucket_digests
        assert scene.connected() == [None, None]
        scene.close()


def test_sender_that_cannot_join_costs_no_other_one_the_deadline(cupy) -> None:
    """NCCL wakes no member when another sender gives up."""
    # Beyond the limit of the test itself.
    scene = Scene(cupy, "nccl", 2, WeightsSection(join_deadline_s=3600.0))
    scene.mode = "is silent"
    cupy.refused = {1}
    with scene.controller:
        result = scene.run(new_communicator=True)
        assert result.error == "no communicator of 4 members: refused"
        scene.close()


def test_publishes_that_are_given_up_before_anybody_is_told_make_one_id(cupy) -> None:
    scene = Scene(cupy, "nccl", 2)
    with scene.controller:
        scene.mode = "gives up"
        for _ in range(3):
            scene.run(new_communicator=True)
        assert cupy.num_ids == 1
        scene.mode = "receives"
        for _ in range(2):
            assert scene.run(new_communicator=True).error == ""
        assert cupy.num_ids == 2
        scene.close()


def announce(sender: GlooSender, num_receivers: int = 1) -> weights_pb2.Communicator:
    return sender.announce("members-1", num_senders=1, world_size=1 + num_receivers)


class Work:
    """A broadcast that is done when its `wait` is called, and the threads that called it."""

    def __init__(self) -> None:
        self.waiting: set[int] = set()

    def wait(self) -> None:
        self.waiting.add(threading.get_ident())


class Group:
    """A communicator without another member."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def broadcast(self, *_: object) -> Work:
        self.works.append(Work())
        return self.works[-1]


def test_a_lane_is_free_while_the_other_one_travels_and_its_own_thread_waits() -> None:
    # On a GPU gloo copies a bucket back, behind which only the current stream of a thread that
    # waits goes on: after another thread's wait the copy may overwrite the lane's next bucket.
    sender = GlooSender(WeightsSection(), host=HOST)
    group = Group()
    vars(sender)["_group"] = group
    buckets = plan_buckets([TensorSpec(name, "float32", (3,)) for name in "ab"], 12)
    first, second = (
        sender.send(bucket, torch.zeros(12, dtype=torch.uint8)) for bucket in buckets
    )
    thread_id = threading.get_ident()
    first()
    assert [thread_id in work.waiting for work in group.works] == [True, False]
    assert not group.works[1].waiting
    second()
    assert [thread_id in work.waiting for work in group.works] == [True, True]


def test_store_listens_on_the_given_host_only() -> None:
    sender = GlooSender(WeightsSection(), host=HOST)
    where = announce(sender)
    with socket.create_connection(("127.0.0.1", where.store_port), timeout=5):
        pass
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", where.store_port), timeout=5)
    sender.abort()


def test_transport_that_cannot_be_is_refused() -> None:
    make = functools.partial(
        make_sender, weights=WeightsSection(), device=CPU, largest_bucket=1, host=HOST
    )
    with pytest.raises(
        ConfigError, match=r"weights\.transport is nccl, but the trainer has no"
    ):
        make("nccl")
    with pytest.raises(ConfigError, match="must be gloo, nccl or ipc, got 'mpi'"):
        make("mpi")
    publisher: Any = WeightPublisher(None, make, ranks=None, client=None)  # type: ignore[arg-type]
    assert publisher._sender_of("gloo") is publisher._sender_of("gloo")
    elsewhere = GlooSender(WeightsSection(), host="192.0.2.1")
    with pytest.raises(
        ConfigError, match=r"learner\.master must be an address of this machine"
    ):
        announce(elsewhere)


def test_meeting_that_was_given_up_leaves_no_thread_behind() -> None:
    """The end of the process would come upon it in torch's code, and be an abort."""
    sender = GlooSender(PATIENT, host=HOST)
    where = announce(sender)
    abandoned = threading.Event()
    abandoned.set()
    with pytest.raises(WeightSyncError, match="before one of them was lost"):
        sender.connect(where, 0, abandoned)
    wait_until(
        lambda: (
            not any(thread.name == "weight-sender" for thread in threading.enumerate())
        )
    )


def test_leader_that_gives_a_meeting_up_frees_the_other_senders() -> None:
    """The leader's meeting place is gone; the other senders notice without a message."""
    leader = GlooSender(PATIENT, host=HOST)
    other = GlooSender(PATIENT, host=HOST)
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
    assert "2 others joining members-1" in str(failures.get(timeout=LIMIT_S))
    thread.join(LIMIT_S)


def test_bucket_that_nobody_takes_is_named_with_its_limit() -> None:
    sender = GlooSender(NO_BUCKET, host=HOST)
    where = announce(sender)
    receivers: list[object] = []

    def join() -> None:
        receivers.append(TRANSPORTS["gloo"](where, 1, LONG_S, CPU))

    joining = threading.Thread(target=join)
    joining.start()
    sender.connect(where, 0)
    joining.join(LONG_S)
    (large,) = plan_buckets([TensorSpec("large", "float32", (16 << 20,))], 1)
    sender.send(large, torch.zeros(large.num_bytes, dtype=torch.uint8))
    with pytest.raises(
        WeightSyncError, match="a bucket of 67108864 bytes from rank 0"
    ) as raised:
        sender.finish()
    assert "weights.bucket_deadline_s = " in str(raised.value)
    assert "/third_party/" not in str(raised.value)

"""Servers that come late, and those that fetch from storage, as the controller follows them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from slipstream.core.types import PolicyVersion, ServerId
from slipstream.extensions.stored_weights.controller import StoredPublisher
from slipstream.learner.controller.publishing.receivers import (
    MAX_FAILED_WHILE_NONE_SERVES,
)
from slipstream.learner.controller.run import ControlledRun
from slipstream.learner.controller.servers.session import (
    STALE,
    ServerKey,
    ServerSession,
)
from slipstream.protocol.codec import pack_logprobs, version_to_pb
from slipstream.v1 import fleet_pb2, status_pb2, trainer_pb2, weights_pb2
from support.rigs.publishing_scene import (
    DIGESTS,
    FAILED,
    LOADED,
    READY,
    SERVING,
    Scene,
    next_order,
    publishing,
    run_of,
    sent,
    serving,
)
from support.rigs.waiting import until


def texts(run: ControlledRun) -> list[str]:
    return [event.text for event in run.events.kept()]


async def two_that_serve(scene: Scene) -> ServerSession:
    """Adds server b, which serves version 0 as the scene's own does; version 1 is due for both."""
    await scene.serve()
    other = scene.joined("b")
    other.version = PolicyVersion(0, 0)
    other.become(fleet_pb2.SERVER_STATE_LOADING)
    other.become(fleet_pb2.SERVER_STATE_SERVING)
    return other


async def order_without(scene: Scene, late: ServerSession) -> str:
    """The question to `late`, which it has not answered when all others are sent weights."""
    preparing = scene.tasks.create_task(scene.publisher.prepare(scene.trainer))
    question = (await next_order(late)).prepare.publish_id
    scene.say(
        (await next_order(scene.session)).prepare.publish_id, READY, scene.session
    )
    order = await preparing
    assert [receiver.server_id for receiver in order.receivers] == ["a"]
    return question


async def test_a_server_that_is_not_ready_is_left_out_and_sent_weights_when_it_is() -> (
    None
):
    async with publishing(run_of(weights={"bucket_deadline_s": 0.3})) as scene:
        late = await two_that_serve(scene)
        question = await order_without(scene, late)
        # The late server goes on as it is.
        assert (late.is_serving, late.version) == (True, PolicyVersion(0, 0))
        (messages,) = [text for text in texts(scene.run) if "left out" in text]
        assert messages.startswith(
            "rollout server b is left out of the publish of version 1: not rea"
        )
        assert messages.endswith("it keeps version 0")
        assert late not in scene.publisher.due()
        # The late server is not asked again before its answer has come.
        scene.publisher.ask_ahead(PolicyVersion(0, 2))
        assert late.outbox.pop() is None
        changed = asyncio.create_task(scene.run.signal.changes(10, gather_s=0.0))
        await asyncio.sleep(0)
        scene.say(question, READY, late)
        await changed
        assert late in scene.publisher.due()
        order = await scene.publisher.prepare(scene.trainer)
        assert [receiver.server_id for receiver in order.receivers] == ["b"]
        scene.publisher.trainer_joined(1)


async def test_a_server_that_never_answers_is_sent_away() -> None:
    async with publishing(
        run_of(weights={"bucket_deadline_s": 0.3, "join_deadline_s": 0.6})
    ) as scene:
        late = await two_that_serve(scene)
        await order_without(scene, late)
        scene.publisher.trainer_joined(1)
    assert scene.fleet.find(late.key) is None
    assert not late.outbox.put(fleet_pb2.ControllerMessage())
    assert texts(scene.run)[-1] == (
        "rollout server b is gone: it did not say within 0.6 s (weights.join_deadline_s) that it "
        "is ready for new weights"
    )


async def test_a_run_in_which_no_server_ever_answers_ends() -> None:
    run = run_of(weights={"bucket_deadline_s": 0.001, "join_deadline_s": 0.002})
    async with publishing(run) as scene:
        for number in range(MAX_FAILED_WHILE_NONE_SERVES):
            assert not run.progress.is_over
            if number:
                scene.joined("a")
            assert await scene.publisher.prepare(trainer_pb2.NextRequest()) is None
            await until(lambda: not scene.fleet.sessions)
    assert run.progress.state == status_pb2.RUN_STATE_FAILED
    assert (
        "16 publishes in a row to a failed, the last one: it did not say"
        in run.progress.cause
    )


async def test_a_server_that_drains_while_its_answer_is_awaited_is_not_sent_away() -> (
    None
):
    async with publishing(
        run_of(weights={"bucket_deadline_s": 0.1, "join_deadline_s": 0.6})
    ) as scene:
        assert await scene.publisher.prepare(trainer_pb2.NextRequest()) is None
        scene.fleet.drains(scene.session, "SIGTERM")
    assert scene.fleet.find(scene.session.key) is scene.session


async def sent_to_both(scene, other):
    """A publish that the scene's own server has loaded and the other one not yet."""
    preparing = scene.tasks.create_task(scene.publisher.prepare(scene.trainer))
    for session in (scene.session, other):
        scene.say((await next_order(session)).prepare.publish_id, READY, session)
    order = await preparing
    scene.trainer.communicator_id = order.communicator.communicator_id
    assert scene.publisher.start(scene.start_of(order))
    return order.publish_id, await scene.served(order)


async def test_a_server_that_loads_for_long_holds_up_nobody_and_serves_when_it_has() -> (
    None
):
    async with publishing(run_of(weights={"bucket_deadline_s": 0.3})) as scene:
        late = await two_that_serve(scene)
        publish_id, receipt = await sent_to_both(scene, late)
        assert not receipt.discard_communicator
        assert late.state == fleet_pb2.SERVER_STATE_LOADING
        assert texts(scene.run)[-1] == (
            "rollout server b still loads version 1: the others and the trainer go on"
        )
        # The version that it has loaded is proved as ever, and then it serves.
        scene.say(publish_id, LOADED, late, bucket_digests=DIGESTS)
        scene.say(publish_id, SERVING, late)
        await until(lambda: late.is_serving)
        assert late.version == PolicyVersion(0, 1)
        # The communicator is as good as before.
        scene.make_version(2)
        scene.sent()
        while late.outbox.pop() is not None:
            pass
        preparing = scene.tasks.create_task(scene.publisher.prepare(scene.trainer))
        for session in (scene.session, late):
            scene.say((await next_order(session)).prepare.publish_id, READY, session)
        order = await preparing
        assert not order.new_communicator
        assert order.begun
        scene.publisher.trainer_joined(1)


@pytest.mark.parametrize("digests", [[], [b"another"]])
async def test_a_late_server_that_has_not_what_was_sent_is_stale_and_breaks_no_newer_communicator(
    digests: list[bytes],
) -> None:
    settings = {"bucket_deadline_s": 0.3, "join_deadline_s": 1.0}
    async with publishing(run_of(weights=settings)) as scene:
        late = await two_that_serve(scene)
        publish_id, _ = await sent_to_both(scene, late)
        scene.make_version(2)
        scene.sent()
        # The others go on in a communicator of their own.
        order = await scene.ordered()
        assert order.new_communicator
        scene.trainer.communicator_id = order.communicator.communicator_id
        assert scene.publisher.start(scene.start_of(order))
        await scene.served(order)
        assert late.state == fleet_pb2.SERVER_STATE_LOADING
        if digests:
            scene.say(publish_id, LOADED, late, bucket_digests=digests)
        await until(lambda: late.state == fleet_pb2.SERVER_STATE_STALE)
        assert late.cause == (
            "the digests of the loaded buckets are not those that were sent"
            if digests
            else "no answer within 2.3 s"
        )
        scene.make_version(3)
        scene.sent()
        assert not (await scene.ordered()).new_communicator
        scene.publisher.trainer_joined(1)


async def test_the_communicator_of_a_server_that_failed_late_is_not_used_again() -> (
    None
):
    async with serving(run_of(weights={"bucket_deadline_s": 0.3})) as scene:
        order = await scene.ordered()
        receipt = await scene.finish(order.publish_id)
        assert not receipt.discard_communicator
        # There is no other server that could serve meanwhile.
        assert "still loads" not in " ".join(texts(scene.run))
        scene.say(order.publish_id, fleet_pb2.PUBLISH_PHASE_FAILED, message="torn")
        await until(lambda: scene.session.state == fleet_pb2.SERVER_STATE_STALE)
        scene.session.retry_publish_s = 0.0
        scene.sent()
        again: weights_pb2.PublishOrder = await scene.ordered()
        assert again.new_communicator
        scene.publisher.trainer_joined(1)


async def test_a_server_that_fails_every_publish_costs_the_others_two() -> None:
    async with publishing(run_of()) as scene:
        broken = await two_that_serve(scene)

        async def failing(*sessions: ServerSession) -> list[str]:
            """A publish for which these are ready, and which cannot be sent: who was part of it."""
            for session in (scene.session, broken):
                session.retry_publish_s = 0.0
            order = await scene.started(*sessions)
            await scene.finish(order.publish_id, error="b did not come")
            return [receiver.server_id for receiver in order.receivers]

        # Version 1 is asked for through a communicator that the trainer has to build.
        for _ in range(2):
            assert await failing(scene.session, broken) == ["a", "b"]
        broken.retry_publish_s = scene.session.retry_publish_s = 0.0
        order = await scene.ordered()
        assert [receiver.server_id for receiver in order.receivers] == ["a"]
        assert scene.publisher.start(scene.start_of(order))
        await scene.served(order)
        # Server b now publishes alone, also when a new version is due for both.
        assert await failing(broken) == ["b"]
        scene.make_version(2)
        assert await failing(scene.session) == ["a"]
        scene.fleet.remove(broken, "sent away")
        again = scene.joined("b")
        scene.session.retry_publish_s = 0.0
        order = await scene.ordered()
        assert [receiver.server_id for receiver in order.receivers] == ["a"]
        assert again in scene.publisher.due()
        scene.publisher.trainer_joined(1)


LOGPROBS = pack_logprobs(np.zeros(1, np.float32))
FETCHED = fleet_pb2.PublishStages(fetched_bytes=10, fetch_s=2.0)


class Far:
    """A scene with one server, which reads storage."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        scene.fleet.remove(scene.session, "this run is by storage")
        self.publisher = StoredPublisher(
            scene.fleet, scene.run, scene.tasks, publisher=scene.publisher
        )
        self.far = self.joined("far")
        self.running = scene.tasks.create_task(self.publisher.run_forever())

    def joined(self, name: str) -> ServerSession:
        hello = fleet_pb2.ServerHello(
            server_id=name, engine_workers=1, from_storage=True
        )
        session = ServerSession(
            ServerKey(ServerId(name), 1), hello, clock=self.scene.fleet.clock
        )
        self.scene.fleet.add(session)
        return session

    def ask(self, *, can_store: bool = True) -> trainer_pb2.StoreOrder | None:
        version = version_to_pb(self.scene.run.progress.version)
        request = trainer_pb2.NextRequest(version=version, can_store=can_store)
        directive = self.publisher.order(request)
        return None if directive is None else directive.store

    def written(self, order: trainer_pb2.StoreOrder, **values: Any) -> list[str]:
        """The trainer's report; returns the manifests that are still needed."""
        stored = weights_pb2.StoredWeights(key=f"{order.folder}/manifest")
        probe = weights_pb2.Probe(expected_logprobs=LOGPROBS, tolerance=1.0)
        fields = {
            "stored": stored,
            "bucket_digests": DIGESTS,
            "probe": probe,
            "num_bytes": 5,
        }
        report = trainer_pb2.StoredReport(
            version=order.version, folder=order.folder, **fields | values
        )
        return list(self.publisher.stored(report).needed)

    def write(self) -> trainer_pb2.StoreOrder:
        """The trainer writes the newest version; returns its order."""
        order = self.ask()
        assert order is not None
        self.written(order)
        return order

    async def looks_at_all(self) -> None:
        """Returns when a server that came last serves, which is looked at behind all others."""
        last = self.joined("last")
        await self.loads(last, (await self.asked(last)).publish_id)

    def say(
        self, publish_id: str, phase: int, session: ServerSession, **values: Any
    ) -> None:
        self.scene.say(publish_id, phase, session, **values)

    async def asked(self, session: ServerSession) -> fleet_pb2.PreparePublish:
        message = await next_order(session)
        if message.HasField("probe_verdict"):
            message = await next_order(session)
        assert message.WhichOneof("message") == "prepare", message
        return message.prepare

    async def loads(self, session: ServerSession, publish_id: str) -> list[Any]:
        """Receive and commit of a server that has fetched; it serves afterwards."""
        self.say(publish_id, READY, session, stages=FETCHED)
        receive = (await next_order(session)).receive
        commit = (await next_order(session)).commit
        assert (receive.order.publish_id, commit.publish_id) == (publish_id, publish_id)
        self.say(
            publish_id,
            SERVING,
            session,
            bucket_digests=DIGESTS,
            probe_logprobs=LOGPROBS,
        )
        await until(lambda: session.is_serving)
        return [receive, commit]

    async def serve(self) -> None:
        """The first version, through storage, to the far server."""
        self.write()
        await self.loads(self.far, (await self.asked(self.far)).publish_id)
        sent(self.far)


@contextlib.asynccontextmanager
async def far_away(run: ControlledRun) -> AsyncIterator[Far]:
    async with publishing(run) as scene:
        far = Far(scene)
        yield far
        far.running.cancel()


@pytest.fixture
def run() -> ControlledRun:
    return run_of(weights={"storage_url": "memory://weights"})


async def test_a_server_is_told_to_load_when_it_has_fetched(run: ControlledRun) -> None:
    async with far_away(run) as scene:
        order = scene.ask()
        assert order.folder.startswith(run.progress.run_id + "/")
        scene.written(order)
        question = await scene.asked(scene.far)
        assert question.stored.key == f"{order.folder}/manifest"
        receive, commit = await scene.loads(scene.far, question.publish_id)
        assert receive.order.communicator.transport == "storage"
        assert list(commit.bucket_digests) == DIGESTS
        # The first publish to a server has a probe.
        assert commit.HasField("probe")
        assert scene.far.version == run.progress.version


async def test_the_trainer_writes_nothing_without_a_server_that_reads_there(
    run: ControlledRun,
) -> None:
    async with far_away(run) as scene:
        scene.scene.fleet.remove(scene.far, "gone")
        assert scene.ask() is None
        scene.far = scene.joined("far")
        assert scene.ask() is not None


async def test_one_version_is_written_at_a_time_and_once(run: ControlledRun) -> None:
    async with far_away(run) as scene:
        order = scene.ask()
        assert scene.ask(can_store=False) is None
        scene.written(order)
        assert scene.ask() is None
        scene.scene.make_version(1)
        again = scene.ask()
        assert again.folder != order.folder


async def test_the_trainer_publishes_to_no_server_that_reads_storage(
    run: ControlledRun,
) -> None:
    async with far_away(run) as scene:
        assert scene.scene.publisher.due() == []
        assert await scene.scene.publisher.prepare(trainer_pb2.NextRequest()) is None
        assert sent(scene.far) == []


async def test_a_fetch_that_fails_leaves_the_server_its_version(
    run: ControlledRun,
) -> None:
    async with far_away(run) as scene:
        await scene.serve()
        scene.scene.make_version(1)
        scene.write()
        question = await scene.asked(scene.far)
        scene.say(question.publish_id, FAILED, scene.far, message="the link is down")
        await until(lambda: scene.far.failed_publishes)
        assert scene.far.is_serving
        assert texts(run)[-1] == (
            "rollout server far keeps version 0: version 1 from storage: the link is down"
        )
        scene.far.retry_publish_s = 0.0
        await scene.loads(scene.far, (await scene.asked(scene.far)).publish_id)
        assert (scene.far.version, scene.far.failed_publishes) == (
            PolicyVersion(0, 1),
            0,
        )


async def test_a_server_that_never_answers_costs_no_other_anything(
    run: ControlledRun,
) -> None:
    run = run_of(
        weights={
            "storage_url": "memory://weights",
            "storage_deadline_s": 0.2,
            "join_deadline_s": 0.2,
            "bucket_deadline_s": 5.0,
        }
    )
    async with far_away(run) as scene:
        other = scene.joined("other")
        scene.write()
        await scene.asked(scene.far)
        await scene.loads(other, (await scene.asked(other)).publish_id)
        await until(lambda: scene.far.state == STALE)
        assert "no answer within 0.4 s" in scene.far.cause


async def test_manifests_from_which_a_server_fetches_are_needed(
    run: ControlledRun,
) -> None:
    async with far_away(run) as scene:
        scene.write()
        question = await scene.asked(scene.far)
        scene.scene.make_version(1)
        second = scene.ask()
        assert second is not None
        assert len(scene.written(second)) == 2
        await scene.loads(scene.far, question.publish_id)
        scene.scene.make_version(2)
        third = scene.ask()
        assert third is not None
        await scene.loads(scene.far, (await scene.asked(scene.far)).publish_id)
        assert scene.written(third) == [f"{third.folder}/manifest"]


async def test_a_report_of_another_order_changes_nothing(run: ControlledRun) -> None:
    async with far_away(run) as scene:
        order = scene.ask()
        assert order is not None
        # A different trainer has come, and is told to write anew.
        again = scene.ask()
        assert scene.written(order) == []
        assert scene.written(again) == [f"{again.folder}/manifest"]


async def test_storage_that_takes_nothing_fails_the_run(run: ControlledRun) -> None:
    async with far_away(run) as scene:
        for _ in range(16):
            assert not run.progress.has_failed
            scene.publisher._retry_s = 0.0
            order = scene.ask()
            assert order is not None
            scene.written(
                order, error="storage s3://b could not write x: no permission"
            )
        assert run.progress.has_failed
        assert (
            "16 versions in a row could not be written to storage" in run.progress.cause
        )
        assert run.progress.cause.endswith("no permission")


async def test_after_a_failed_write_the_trainer_is_told_again_later(
    run: ControlledRun,
) -> None:
    async with far_away(run) as scene:
        order = scene.ask()
        assert order is not None
        scene.written(order, error="the disk is full")
        assert texts(run)[-1] == "version 0 is not in storage: the disk is full"
        assert scene.ask() is None
        await until(scene.ask)


async def test_a_server_whose_version_is_too_old_for_a_lease_is_named_once(
    run: ControlledRun,
) -> None:
    async with far_away(run) as scene:
        await scene.serve()
        bound = run.config.algorithm.max_staleness
        scene.scene.make_version(bound + 1)
        run.signal.notify()
        message = (
            f"rollout server far gets no groups: its version 0 is too old for step {bound + 2} "
            f"(algorithm.max_staleness = {bound}); it has not fetched a newer one from storage yet"
        )
        await until(lambda: message in texts(run))
        await scene.looks_at_all()
        assert texts(run).count(message) == 1


async def test_a_server_that_is_evaluated_keeps_its_version(run: ControlledRun) -> None:
    async with far_away(run) as scene:
        await scene.serve()
        assert scene.scene.publisher.pin(scene.far)
        scene.scene.make_version(1)
        scene.write()
        await scene.looks_at_all()
        assert sent(scene.far) == []
        scene.scene.publisher.pinned.clear()
        await scene.loads(scene.far, (await scene.asked(scene.far)).publish_id)

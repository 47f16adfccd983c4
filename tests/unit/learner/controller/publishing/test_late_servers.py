"""Servers that are ready, or have loaded, after the others: who waits for them, and how long."""

import asyncio

import numpy as np
import pytest
from slipstream.core.types import PolicyVersion
from slipstream.learner.controller.publishing.delivery import MAX_FAILED_WHILE_NONE_SERVES
from slipstream.learner.controller.servers.server_states import ServerEvent
from slipstream.learner.controller.servers.session import ServerSession
from slipstream.protocol.codec import pack_logprobs
from slipstream.v1 import fleet_pb2, status_pb2, weights_pb2
from support.rigs.publishing_scene import (
    DIGESTS,
    LOADED,
    READY,
    SERVING,
    Scene,
    next_order,
    publishing,
    run_of,
)
from support.rigs.waiting import until


def texts(scene: Scene) -> list[str]:
    return [event.text for event in scene.run.events.kept()]


def say(scene: Scene, session: ServerSession, publish_id: str, phase: int) -> None:
    digests = DIGESTS if phase == LOADED else []
    scene.publisher.report(
        session, fleet_pb2.PublishReport(publish_id=publish_id, phase=phase, bucket_digests=digests)
    )


async def two_that_serve(scene: Scene) -> ServerSession:
    """Adds server b, which serves version 0 as the scene's own does; version 1 is due for both."""
    await scene.serve()
    other = scene.joined("b")
    other.version = PolicyVersion(0, 0)
    other.on(ServerEvent.RECEIVE)
    other.on(ServerEvent.PUBLISHED)
    return other


async def order_without(scene: Scene, late: ServerSession) -> str:
    """The question to `late`, which it has not answered when all others are sent weights."""
    preparing = scene.tasks.create_task(scene.publisher.prepare(scene.trainer))
    question = (await next_order(late)).prepare.publish_id
    say(scene, scene.session, (await next_order(scene.session)).prepare.publish_id, READY)
    order = await preparing
    assert order is not None
    assert [receiver.server_id for receiver in order.receivers] == ["a"]
    return question


async def test_a_server_that_is_not_ready_is_left_out_and_sent_weights_when_it_is() -> None:
    async with publishing(run_of(weights={"bucket_deadline_s": 0.3})) as scene:
        late = await two_that_serve(scene)
        question = await order_without(scene, late)
        # The late server goes on as it is.
        assert (late.is_serving, late.version) == (True, PolicyVersion(0, 0))
        (told,) = [text for text in texts(scene) if "left out" in text]
        assert told.startswith("rollout server b is left out of the publish of version 1: not rea")
        assert told.endswith("it keeps version 0")
        assert late not in scene.publisher.due()
        # The late server is not asked again before its answer has come.
        scene.publisher.ask_ahead(PolicyVersion(0, 2))
        assert late.outbox.pop() is None
        changed = asyncio.create_task(scene.run.signal.wait(10))
        await asyncio.sleep(0)
        say(scene, late, question, READY)
        await changed
        assert late in scene.publisher.due()
        order = await scene.publisher.prepare(scene.trainer)
        assert order is not None
        assert [receiver.server_id for receiver in order.receivers] == ["b"]
        scene.publisher.trainer_lost()


async def test_a_server_that_never_answers_is_sent_away_and_the_trainer_does_not_wait() -> None:
    async with publishing(
        run_of(weights={"bucket_deadline_s": 0.3, "join_deadline_s": 0.6})
    ) as scene:
        late = await two_that_serve(scene)
        await order_without(scene, late)
        assert scene.fleet.find(late.key) is late
        scene.publisher.trainer_lost()
    assert scene.fleet.find(late.key) is None
    assert not late.outbox.put(fleet_pb2.ControllerMessage())
    assert texts(scene)[-1] == (
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
            assert await scene.publisher.prepare() is None
            await until(lambda: not scene.fleet.sessions)
    assert run.progress.state == status_pb2.RUN_STATE_FAILED
    assert "16 publishes in a row to a failed, the last one: it did not say" in run.progress.cause


async def test_a_server_that_drains_while_its_answer_is_awaited_is_not_sent_away() -> None:
    async with publishing(
        run_of(weights={"bucket_deadline_s": 0.1, "join_deadline_s": 0.6})
    ) as scene:
        assert await scene.publisher.prepare() is None
        scene.fleet.drains(scene.session, "SIGTERM")
    assert scene.fleet.find(scene.session.key) is scene.session


async def sent_to_both(scene, other):
    """A publish that the scene's own server has loaded and the other one not yet."""
    preparing = scene.tasks.create_task(scene.publisher.prepare(scene.trainer))
    for session in (scene.session, other):
        say(scene, session, (await next_order(session)).prepare.publish_id, READY)
    order = await preparing
    assert order is not None
    publish_id = order.publish_id
    scene.trainer.communicator_id = order.communicator.communicator_id
    assert scene.publisher.start(scene.start_of(order))
    finishing = scene.finish(publish_id)
    say(scene, scene.session, publish_id, LOADED)
    receipt = await finishing
    say(scene, scene.session, publish_id, SERVING)
    await scene.until_serving()
    return publish_id, receipt


async def test_a_server_that_loads_for_long_holds_up_nobody_and_serves_when_it_has() -> None:
    async with publishing(run_of(weights={"bucket_deadline_s": 0.3})) as scene:
        late = await two_that_serve(scene)
        publish_id, receipt = await sent_to_both(scene, late)
        assert list(receipt.serving) == ["a"]
        assert not receipt.discard_communicator
        assert late.state == fleet_pb2.SERVER_STATE_LOADING
        assert texts(scene)[-1] == (
            "rollout server b still loads version 1: the others and the trainer go on"
        )
        # What it has loaded is proved as ever, and then it serves.
        say(scene, late, publish_id, LOADED)
        say(scene, late, publish_id, SERVING)
        await until(lambda: late.is_serving)
        assert late.version == PolicyVersion(0, 1)
        # The communicator is as good as before.
        scene.make_version(2)
        scene.sent()
        while late.outbox.pop() is not None:
            pass
        preparing = scene.tasks.create_task(scene.publisher.prepare(scene.trainer))
        for session in (scene.session, late):
            say(scene, session, (await next_order(session)).prepare.publish_id, READY)
        order = await preparing
        assert order is not None
        assert not order.new_communicator
        assert order.begun
        scene.publisher.trainer_lost()


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
        finishing = scene.finish(order.publish_id)
        say(scene, scene.session, order.publish_id, LOADED)
        await finishing
        say(scene, scene.session, order.publish_id, SERVING)
        await scene.until_serving()
        assert late.state == fleet_pb2.SERVER_STATE_LOADING
        if digests:
            report = fleet_pb2.PublishReport(
                publish_id=publish_id, phase=LOADED, bucket_digests=digests
            )
            scene.publisher.report(late, report)
        await until(lambda: late.state == fleet_pb2.SERVER_STATE_STALE)
        assert late.cause == (
            "the digests of the loaded buckets are not those that were sent"
            if digests
            else "no answer within 1 s"
        )
        scene.make_version(3)
        scene.sent()
        assert not (await scene.ordered()).new_communicator
        scene.publisher.trainer_lost()


async def test_the_communicator_of_a_server_that_failed_late_is_not_used_again() -> None:
    async with publishing(run_of(weights={"bucket_deadline_s": 0.3})) as scene:
        await scene.serve()
        order = await scene.ordered()
        receipt = await scene.finish(order.publish_id)
        assert not receipt.discard_communicator
        # There is no other server that could serve meanwhile.
        assert "still loads" not in " ".join(texts(scene))
        scene.say(order.publish_id, fleet_pb2.PUBLISH_PHASE_FAILED, message="torn")
        await until(lambda: scene.session.state == fleet_pb2.SERVER_STATE_STALE)
        scene.session.retry_publish_s = 0.0
        scene.sent()
        again: weights_pb2.PublishOrder = await scene.ordered()
        assert again.new_communicator
        scene.publisher.trainer_lost()


async def test_a_server_that_fails_every_publish_costs_the_others_two() -> None:
    async with publishing(run_of()) as scene:
        broken = await two_that_serve(scene)

        async def failing(*sessions: ServerSession) -> list[str]:
            """A publish for which these are ready, and which cannot be sent: who was part of it."""
            for session in (scene.session, broken):
                session.retry_publish_s = 0.0
            order = await scene.ordered(*sessions)
            assert scene.publisher.start(scene.start_of(order))
            await scene.finish(order.publish_id, error="b did not come")
            return [receiver.server_id for receiver in order.receivers]

        # Version 1 is asked for through a communicator that the trainer has to build.
        for _ in range(2):
            assert await failing(scene.session, broken) == ["a", "b"]
        broken.retry_publish_s = scene.session.retry_publish_s = 0.0
        order = await scene.ordered()
        assert [receiver.server_id for receiver in order.receivers] == ["a"]
        assert scene.publisher.start(scene.start_of(order))
        finishing = scene.finish(order.publish_id)
        scene.say(order.publish_id, LOADED, bucket_digests=DIGESTS)
        await finishing
        scene.say(order.publish_id, SERVING, probe_logprobs=pack_logprobs(np.zeros(1, np.float32)))
        await scene.until_serving()
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
        scene.publisher.trainer_lost()

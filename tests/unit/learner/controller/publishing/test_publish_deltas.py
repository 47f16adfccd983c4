"""Which publishes send only what changed: those whose receivers all serve what it changes."""

import asyncio

import pytest
from slipstream.learner.controller.run import Run
from slipstream.protocol.weights.deltas import content_name
from slipstream.v1 import fleet_pb2, weights_pb2
from support.rigs.publishing_scene import (
    DIGESTS,
    FAILED,
    LOADED,
    SERVING,
    next_order,
    publishing,
    run_of,
)
from support.rigs.waiting import LIMIT_S

NEW = [b"three", b"four"]
TAKES = fleet_pb2.PublishStages(takes_deltas=True)
# What the trainer says that it changed since it sent `DIGESTS`.
OFFER = weights_pb2.Delta(base=content_name(DIGESTS), changed=[5, 0])


@pytest.fixture
def run() -> Run:
    # Publishes without a probe can begin with the order.
    return run_of()


async def deliver(scene, *sessions, digests, **report):
    """A publish of these digests that all of them load and serve."""
    sessions = sessions or (scene.session,)
    scene.trainer.bucket_digests[:] = digests
    order = await scene.ordered(*sessions)
    if not order.begun:
        assert scene.publisher.start(scene.start_of(order))
    scene.trainer.communicator_id = order.communicator.communicator_id
    finishing = scene.finish(order.publish_id, bucket_digests=digests)
    values = {"bucket_digests": digests, "stages": TAKES, "probe_logprobs": bytes(4)} | report
    for session in sessions:
        scene.say(order.publish_id, LOADED, session, bucket_digests=digests)
    await finishing
    for session in sessions:
        scene.say(order.publish_id, SERVING, session, **values)
    async with asyncio.timeout(LIMIT_S):
        while not all(session.version == scene.run.progress.version for session in sessions):
            await asyncio.sleep(0)
    return order


async def test_a_server_that_serves_the_base_is_sent_only_what_changed(run: Run) -> None:
    async with publishing(run) as scene:
        first = await deliver(scene, digests=DIGESTS)
        assert not first.HasField("delta")
        scene.make_version(1)
        scene.trainer.delta.CopyFrom(OFFER)
        second = await deliver(scene, digests=NEW)
        assert second.begun
        assert second.delta == OFFER
        # Its server is told the same.
        assert (await next_order(scene.session)).receive.order.delta == OFFER


async def test_deltas_follow_each_other(run: Run) -> None:
    async with publishing(run) as scene:
        await deliver(scene, digests=DIGESTS)
        scene.trainer.delta.CopyFrom(OFFER)
        for step, (base, digests) in enumerate([(DIGESTS, NEW), (NEW, DIGESTS)], 1):
            scene.make_version(step)
            scene.trainer.delta.base = content_name(base)
            assert (await deliver(scene, digests=digests)).HasField("delta")


async def test_without_an_offer_everything_is_sent(run: Run) -> None:
    async with publishing(run) as scene:
        await deliver(scene, digests=DIGESTS)
        scene.make_version(1)
        assert not (await deliver(scene, digests=NEW)).HasField("delta")


async def test_a_server_that_takes_no_deltas_is_sent_everything(run: Run) -> None:
    async with publishing(run) as scene:
        await deliver(scene, digests=DIGESTS, stages=fleet_pb2.PublishStages())
        scene.make_version(1)
        scene.trainer.delta.CopyFrom(OFFER)
        assert not (await deliver(scene, digests=NEW)).HasField("delta")


async def test_a_server_that_joins_has_all_sent_everything_once(run: Run) -> None:
    async with publishing(run) as scene:
        await deliver(scene, digests=DIGESTS)
        scene.make_version(1)
        scene.trainer.delta.CopyFrom(OFFER)
        both = (scene.session, scene.joined("b"))
        assert not (await deliver(scene, *both, digests=NEW)).HasField("delta")
        scene.make_version(2)
        scene.trainer.delta.base = content_name(NEW)
        assert (await deliver(scene, *both, digests=DIGESTS)).HasField("delta")


async def test_a_server_that_missed_a_publish_is_sent_everything(run: Run) -> None:
    async with publishing(run) as scene:
        both = (scene.session, scene.joined("b"))
        await deliver(scene, *both, digests=DIGESTS)
        assert scene.publisher.pin(both[1])
        scene.make_version(1)
        scene.trainer.delta.CopyFrom(OFFER)
        assert (await deliver(scene, digests=NEW)).HasField("delta")
        scene.publisher.pinned.clear()
        scene.make_version(2)
        scene.trainer.delta.base = content_name(NEW)
        assert not (await deliver(scene, *both, digests=DIGESTS)).HasField("delta")


async def test_a_server_whose_delta_failed_is_sent_everything(run: Run) -> None:
    async with publishing(run) as scene:
        await deliver(scene, digests=DIGESTS)
        scene.make_version(1)
        scene.trainer.delta.CopyFrom(OFFER)
        order = await scene.ordered()
        assert order.HasField("delta")
        finishing = scene.finish(order.publish_id, bucket_digests=DIGESTS)
        scene.say(order.publish_id, FAILED, message="it broke")
        assert (await finishing).discard_communicator
        scene.session.retry_publish_s = 0.0
        # The trainer sent the same again as far as it knows: its base is what it sent.
        scene.trainer.delta.base = content_name(DIGESTS)
        assert not (await scene.ordered()).HasField("delta")


async def test_an_offer_for_another_version_is_not_taken(run: Run) -> None:
    async with publishing(run) as scene:
        await deliver(scene, digests=DIGESTS)
        scene.make_version(1)
        scene.trainer.delta.CopyFrom(OFFER)
        scene.trainer.version.step = 0
        assert not (await scene.ordered()).HasField("delta")


async def test_what_a_delta_saves_is_counted(run: Run) -> None:
    async with publishing(run) as scene:
        await deliver(scene, digests=DIGESTS)
        scene.make_version(1)
        order = await scene.ordered()
        sizes = {"bytes_sent": 30, "whole_bytes": 1000, "changed_share": 0.01}
        finishing = scene.finish(order.publish_id, **sizes)
        scene.say(order.publish_id, SERVING, bucket_digests=DIGESTS, stages=TAKES)
        await finishing
        gauges, summary = scene.publisher.totals.gauges(), scene.publisher.totals.summary()
        assert (gauges["weights_bytes"], gauges["weights_whole_bytes"]) == (30, 1000)
        assert gauges["weights_changed"] == 0.01
        assert summary["publishes_delta"] == 1
        assert summary["published_bytes"] + 970 == summary["published_whole_bytes"]

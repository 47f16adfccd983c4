"""Which servers are sent the adapters alone, as the controller follows what they hold."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import numpy as np
from slipstream.learner.controller.servers.session import LOADING, STALE, ServerSession
from slipstream.protocol.codec import pack_logprobs
from slipstream.v1 import weights_pb2
from support.rigs.publishing_scene import (
    DIGESTS,
    FAILED,
    LOADED,
    SERVING,
    Scene,
    nothing,
    publishing,
    run_of,
)


@contextlib.asynccontextmanager
async def adapted() -> AsyncIterator[Scene]:
    """A run that publishes adapters alone where it may."""
    lora = {"rank": 8, "publish": "adapters"}
    async with publishing(run_of(lora=lora, weights={"verify_every": 1000})) as scene:
        yield scene


async def publish(
    scene: Scene,
    *sessions: ServerSession,
    fails: str = "",
    scored: float = -1.0,
    meanwhile: Callable[[], None] = nothing,
) -> weights_pb2.PublishOrder:
    """Publishes the next version to `sessions`, which must be all servers that are due.

    `meanwhile` is called between commit and probe.
    """
    scene.make_version(scene.run.progress.version.step + 1)
    for session in sessions:
        session.retry_publish_s = 0.0
    order = await scene.ordered(*sessions)
    publish_id = order.publish_id
    scene.trainer.communicator_id = order.communicator.communicator_id
    if not order.begun:
        assert len(scene.publisher.start(scene.start_of(order))) == len(sessions)
    for session in sessions:
        phase = FAILED if fails == session.name else LOADED
        scene.say(publish_id, phase, session, bucket_digests=DIGESTS)
    logprobs = pack_logprobs(np.full(4, -1.0, dtype=np.float32))
    probe = weights_pb2.Probe(expected_logprobs=logprobs, tolerance=0.1)
    await scene.finish(publish_id, probe=probe)
    meanwhile()
    logprobs = pack_logprobs(np.full(4, scored, dtype=np.float32))
    for session in sessions:
        if fails != session.name:
            scene.say(publish_id, SERVING, session, probe_logprobs=logprobs)
    while any(session.state == LOADING for session in sessions):
        await asyncio.sleep(0)
    return order


async def test_a_server_is_sent_matrices_once_and_then_adapters_alone() -> None:
    async with adapted() as scene:
        first = scene.session
        orders = [await publish(scene, first) for _ in range(3)]
        assert [o.adapters_alone for o in orders] == [False, True, True]
        assert [o.verify for o in orders] == [True, False, False]
        # A publish that begins at once has the layout of the publish before.
        assert [o.begun for o in orders] == [False, False, True]
        # All members of a communicator are sent the same.
        second = scene.joined("b")
        both = await publish(scene, first, second)
        assert (both.adapters_alone, both.verify) == (False, True)
        assert (await publish(scene, first, second)).adapters_alone


async def test_adapters_that_failed_are_sent_alone_again_and_matrices_whole() -> None:
    async with adapted() as scene:
        session = scene.session
        assert not (await publish(scene, session, fails="a")).adapters_alone
        assert not (await publish(scene, session)).adapters_alone
        failed = await publish(scene, session, fails="a")
        assert failed.adapters_alone
        assert session.state == STALE
        again = await publish(scene, session)
        assert (again.adapters_alone, again.verify) == (True, True)


async def test_a_server_whose_probe_failed_is_sent_the_matrices_again() -> None:
    async with adapted() as scene:
        session = scene.session
        assert not (await publish(scene, session, scored=-3.0)).adapters_alone
        assert not (await publish(scene, session)).adapters_alone
        assert (await publish(scene, session, fails="a")).adapters_alone
        assert (await publish(scene, session, scored=-3.0)).adapters_alone
        assert session.state == STALE
        assert not (await publish(scene, session)).adapters_alone


async def test_another_trainer_and_another_server_epoch_begin_with_matrices() -> None:
    async with adapted() as scene:
        session = scene.session
        await publish(scene, session)
        assert (await publish(scene, session)).adapters_alone
        scene.publisher.trainer_joined(1)
        order = await publish(scene, session)
        assert (order.adapters_alone, order.verify) == (False, True)
        assert (await publish(scene, session)).adapters_alone
        scene.publisher.lost(session)
        assert not (await publish(scene, session)).adapters_alone


async def test_matrices_of_a_trainer_that_is_lost_before_their_proof_do_not_count() -> (
    None
):
    async with adapted() as scene:
        session = scene.session
        await publish(
            scene, session, meanwhile=lambda: scene.publisher.trainer_joined(1)
        )
        assert session.is_serving
        assert not (await publish(scene, session)).adapters_alone
        assert (await publish(scene, session)).adapters_alone

"""Which servers are sent the adapters alone, as the controller follows what they hold."""

import asyncio

import numpy as np
from slipstream.core.types import PolicyVersion
from slipstream.learner.controller.publishing.publish import Publisher
from slipstream.learner.controller.servers.fleet import Fleet
from slipstream.learner.controller.servers.session import ServerSession
from slipstream.protocol.codec import pack_logprobs, version_to_pb
from slipstream.v1 import fleet_pb2, trainer_pb2, weights_pb2
from support.rigs.publishing_scene import DIGESTS, joined, next_order, nothing, run_of
from support.rigs.waiting import LIMIT_S


def report_of(publish_id: str, phase: str) -> fleet_pb2.PublishReport:
    return fleet_pb2.PublishReport(
        publish_id=publish_id, phase=f"PUBLISH_PHASE_{phase}", bucket_digests=DIGESTS
    )


async def message_of(session: ServerSession, kind: str) -> fleet_pb2.ControllerMessage:
    """The next message of a kind; those before it are left out."""
    while not (message := await next_order(session)).HasField(kind):
        pass
    return message


class Adapted:
    """A run that publishes adapters alone where it may, with one publish after the other."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.run = run_of(lora={"rank": 8, "publish": "adapters"}, weights={"verify_every": 1000})
        self.fleet = Fleet(self.run)
        self.publisher = Publisher(self.fleet, self.run, tasks)
        self._tasks = tasks
        self._communicator_id = ""

    async def publish(self, *sessions, fails="", scored=-1.0, meanwhile=nothing):
        """Publishes the next version to `sessions`, which must be all servers that are due.

        `meanwhile` is called between commit and probe.
        """
        self.run.progress.reached(PolicyVersion(0, self.run.progress.version.step + 1))
        for session in sessions:
            session.retry_publish_s = 0.0
        trainer = trainer_pb2.NextRequest(
            version=version_to_pb(self.run.progress.version),
            communicator_id=self._communicator_id,
            bucket_digests=DIGESTS,
        )
        order = await self._ordered(sessions, trainer)
        publish_id, self._communicator_id = order.publish_id, order.communicator.communicator_id
        if not order.begun:
            start = trainer_pb2.PublishStart(publish_id=publish_id, communicator=order.communicator)
            assert len(self.publisher.start(start)) == len(sessions)
        for session in sessions:
            received = (await message_of(session, "receive")).receive
            assert received.order.adapters_alone == order.adapters_alone
            phase = "FAILED" if fails == session.name else "LOADED"
            self.publisher.publish_reported(session, report_of(publish_id, phase))
        logprobs = pack_logprobs(np.full(4, -1.0, dtype=np.float32))
        probe = weights_pb2.Probe(expected_logprobs=logprobs, tolerance=0.1)
        await self.publisher.finish(
            trainer_pb2.PublishResult(publish_id=publish_id, probe=probe, bucket_digests=DIGESTS)
        )
        served = report_of(publish_id, "SERVING")
        served.probe_logprobs = pack_logprobs(np.full(4, scored, dtype=np.float32))
        for session in sessions:
            if fails != session.name:
                await message_of(session, "commit")
                meanwhile()
                self.publisher.publish_reported(session, served)
        async with asyncio.timeout(LIMIT_S):
            while any(s.state == fleet_pb2.SERVER_STATE_LOADING for s in sessions):
                await asyncio.sleep(0)
        return order

    async def _ordered(self, sessions, trainer):
        preparing = self._tasks.create_task(self.publisher.prepare(trainer))
        for session in sessions:
            publish_id = (await message_of(session, "prepare")).prepare.publish_id
        while not preparing.done():
            for session in sessions:
                self.publisher.publish_reported(session, report_of(publish_id, "READY"))
            await asyncio.sleep(0)
        order = preparing.result()
        assert order is not None
        return order


async def test_a_server_is_sent_matrices_once_and_then_adapters_alone() -> None:
    async with asyncio.TaskGroup() as tasks:
        run = Adapted(tasks)
        first = joined(run.fleet, "a")
        orders = [await run.publish(first) for _ in range(3)]
        assert [o.adapters_alone for o in orders] == [False, True, True]
        assert [o.verify for o in orders] == [True, False, False]
        # A publish that begins at once has the layout of the publish before.
        assert [o.begun for o in orders] == [False, False, True]
        # All members of a communicator are sent the same.
        second = joined(run.fleet, "b")
        both = await run.publish(first, second)
        assert (both.adapters_alone, both.verify) == (False, True)
        assert (await run.publish(first, second)).adapters_alone


async def test_adapters_that_failed_are_sent_alone_again_and_matrices_whole() -> None:
    async with asyncio.TaskGroup() as tasks:
        run = Adapted(tasks)
        session = joined(run.fleet, "a")
        assert not (await run.publish(session, fails="a")).adapters_alone
        assert not (await run.publish(session)).adapters_alone
        failed = await run.publish(session, fails="a")
        assert failed.adapters_alone
        assert session.state == fleet_pb2.SERVER_STATE_STALE
        again = await run.publish(session)
        assert (again.adapters_alone, again.verify) == (True, True)


async def test_a_server_whose_probe_failed_is_sent_the_matrices_again() -> None:
    async with asyncio.TaskGroup() as tasks:
        run = Adapted(tasks)
        session = joined(run.fleet, "a")
        assert not (await run.publish(session, scored=-3.0)).adapters_alone
        assert not (await run.publish(session)).adapters_alone
        assert (await run.publish(session, fails="a")).adapters_alone
        assert (await run.publish(session, scored=-3.0)).adapters_alone
        assert session.state == fleet_pb2.SERVER_STATE_STALE
        assert not (await run.publish(session)).adapters_alone


async def test_another_trainer_and_another_server_epoch_begin_with_matrices() -> None:
    async with asyncio.TaskGroup() as tasks:
        run = Adapted(tasks)
        session = joined(run.fleet, "a")
        await run.publish(session)
        assert (await run.publish(session)).adapters_alone
        run.publisher.trainer_lost()
        order = await run.publish(session)
        assert (order.adapters_alone, order.verify) == (False, True)
        assert (await run.publish(session)).adapters_alone
        run.publisher.lost(session)
        assert not (await run.publish(session)).adapters_alone


async def test_matrices_of_a_trainer_that_is_lost_before_their_proof_do_not_count() -> None:
    async with asyncio.TaskGroup() as tasks:
        run = Adapted(tasks)
        session = joined(run.fleet, "a")
        await run.publish(session, meanwhile=run.publisher.trainer_lost)
        assert session.is_serving
        assert not (await run.publish(session)).adapters_alone
        assert (await run.publish(session)).adapters_alone

"""Orders of the controller in whatever order they come, and what the engine then serves."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from slipstream.core.types import PolicyVersion, ServerId
from slipstream.protocol.codec import version_to_pb
from slipstream.protocol.queue.base import TrajectorySender
from slipstream.rollout_server import weight_orders
from slipstream.rollout_server.engine_interface import EngineDied, LoadedWeights
from slipstream.rollout_server.episodes.dispatcher import Dispatcher
from slipstream.rollout_server.episodes.play import EpisodeServices, Identity
from slipstream.rollout_server.usage import EpochCounters
from slipstream.rollout_server.weight_orders import Phase, WeightOrders
from slipstream.v1 import fleet_pb2, weights_pb2
from support.fakes.fake_engine import DIGESTS, FakeEngine
from support.rigs.waiting import LIMIT_S

READY = fleet_pb2.PUBLISH_PHASE_READY
LOADED = fleet_pb2.PUBLISH_PHASE_LOADED
SERVING = fleet_pb2.PUBLISH_PHASE_SERVING
FAILED = fleet_pb2.PUBLISH_PHASE_FAILED
PROBE = weights_pb2.Probe(lengths=[])


class SlowEngine(FakeEngine):
    """Takes weights, and answers probes, when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.receiving, self.arrived, self.scored = (
            asyncio.Event(),
            asyncio.Event(),
            asyncio.Event(),
        )
        self.resumed = 0

    async def receive_weights(self, publish_id: str) -> LoadedWeights:
        self.receiving.set()
        await self.arrived.wait()
        return await super().receive_weights(publish_id)

    async def resume(self, version: PolicyVersion) -> None:
        self.resumed += 1
        await super().resume(version)

    async def teacher_forced_logprobs(self, sequences, adapters=()):
        await self.scored.wait()
        return self.probe


class Rig:
    """Weight orders that run, and all that it reported."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.engine = SlowEngine()
        self.reports: list[tuple[str, int]] = []
        self.reported = asyncio.Event()
        dispatcher = Dispatcher(
            tasks,
            Identity("r", ServerId("a"), 1, b"k" * 32),
            cast(EpisodeServices, None),
            cast(EpochCounters, None),
            cast(TrajectorySender, None),
            max_episodes=1,
            closed=lambda *_: None,
        )
        self.rested: list[int] = []
        self.orders = WeightOrders(
            self.engine,
            dispatcher,
            self._report,
            rested=lambda answer: self.rested.append(answer.number),
        )
        self.running = tasks.create_task(self.orders.run())

    def _report(self, report: fleet_pb2.PublishReport) -> None:
        self.reports.append((report.publish_id, report.phase))
        self.stages = report.stages
        self.reported.set()

    def order(self, **order: Any) -> None:
        self.orders.put(fleet_pb2.ControllerMessage(**order))

    def receive(self, publish_id: str) -> None:
        order = weights_pb2.PublishOrder(publish_id=publish_id)
        self.order(receive=fleet_pb2.ReceiveWeights(order=order))

    def commit(self, publish_id: str, probe: weights_pb2.Probe | None = None) -> None:
        version = version_to_pb(PolicyVersion(0, 1))
        self.order(
            commit=fleet_pb2.CommitPublish(
                publish_id=publish_id,
                version=version,
                bucket_digests=DIGESTS,
                probe=probe,
            )
        )

    async def until(self, publish_id: str, phase: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while (publish_id, phase) not in self.reports:
                self.reported.clear()
                await self.reported.wait()

    async def end(self) -> None:
        self.orders.close(carry_out=True)
        await asyncio.wait((self.running,))


@asynccontextmanager
async def rig_of() -> AsyncIterator[Rig]:
    """Gives a rig, and ends its orders."""
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        rig = Rig(tasks)
        yield rig
        await rig.end()


async def test_weights_of_a_publish_that_was_given_up_are_not_served_for_a_moment() -> (
    None
):
    async with rig_of() as rig:
        rig.receive("p1")
        rig.commit("p1")
        await rig.engine.receiving.wait()
        # The controller has waited long enough; the commit lies before this in the queue.
        rig.order(abort=fleet_pb2.AbortPublish(publish_id="p1"))
        rig.engine.arrived.set()
        await rig.until("p1", LOADED)
        rig.receive("p2")
        rig.commit("p2")
        await rig.until("p2", SERVING)
        assert rig.engine.resumed == 1
        assert rig.reports[:2] == [("p1", LOADED), ("p1", FAILED)]
        assert rig.orders.phase is Phase.SERVING


async def test_a_failure_is_reported_once_though_a_commit_was_on_its_way() -> None:
    async with rig_of() as rig:
        rig.engine.arrived.set()
        rig.engine.weights_error = "a bucket did not arrive"
        rig.receive("p1")
        rig.commit("p1")
        rig.order(prepare=fleet_pb2.PreparePublish(publish_id="p2"))
        await rig.until("p2", READY)
        assert rig.reports == [("p1", FAILED), ("p2", READY)]
        assert rig.engine.resumed == 0


@pytest.mark.parametrize(
    ("publish_id", "digests"),
    [("p1", [b"other"]), ("p2", DIGESTS)],
    ids=["digests", "publish"],
)
async def test_an_engine_stands_still_when_what_it_loaded_is_not_what_is_committed(
    publish_id: str, digests: list[bytes]
) -> None:
    async with rig_of() as rig:
        rig.engine.arrived.set()
        rig.receive("p1")
        await rig.until("p1", LOADED)
        pauses = rig.engine.num_pauses
        version = version_to_pb(PolicyVersion(0, 1))
        commit = fleet_pb2.CommitPublish(publish_id=publish_id, version=version)
        commit.bucket_digests.extend(digests)
        rig.order(commit=commit)
        await rig.until(publish_id, FAILED)
        assert rig.orders.phase is Phase.FAILED
        # Once more: an engine may have been let go on while nothing was let in.
        assert rig.engine.num_pauses == pauses + 1
        assert rig.engine.resumed == 0


async def test_a_server_says_that_a_verdict_came_too_late(monkeypatch) -> None:
    monkeypatch.setattr(weight_orders, "VERDICT_LIMIT_S", 0.01)
    async with rig_of() as rig:
        rig.engine.arrived.set()
        rig.engine.scored.set()
        rig.receive("p1")
        rig.commit("p1", PROBE)
        await rig.until("p1", SERVING)
        while rig.orders.phase is not Phase.FAILED:
            await asyncio.sleep(0)
        rig.order(probe_verdict=fleet_pb2.ProbeVerdict(publish_id="p1", passed=True))
        await rig.until("p1", FAILED)
        assert not rig.engine.running.is_set()


async def test_an_engine_that_does_not_answer_a_probe_is_taken_for_dead(
    monkeypatch,
) -> None:
    monkeypatch.setattr(weight_orders, "PROBE_LIMIT_S", 0.01)
    with pytest.RaisesGroup(EngineDied):
        async with rig_of() as rig:
            rig.engine.arrived.set()
            rig.receive("p1")
            rig.commit("p1", PROBE)
            await rig.until("p1", SERVING)


async def test_an_engine_rests_when_it_is_told_to_and_wakes_with_its_version() -> None:
    async with rig_of() as rig:
        rig.engine.arrived.set()
        rig.receive("p1")
        rig.commit("p1")
        await rig.until("p1", SERVING)
        rig.order(rest=fleet_pb2.Rest(number=7, give_back=True))
        while not rig.rested:
            await asyncio.sleep(0)
        assert (rig.rested, rig.engine.rests) == ([7], [True])
        assert not rig.engine.running.is_set()
        rig.order(wake=fleet_pb2.Wake())
        while not rig.engine.running.is_set():
            await asyncio.sleep(0)
        assert rig.engine.version == PolicyVersion(0, 1)


async def test_new_weights_wake_an_engine_that_rests() -> None:
    async with rig_of() as rig:
        rig.engine.arrived.set()
        for publish_id in ("p1", "p2"):
            rig.order(rest=fleet_pb2.Rest(number=1))
            rig.receive(publish_id)
            rig.commit(publish_id)
            await rig.until(publish_id, SERVING)
            assert rig.engine.running.is_set()


async def test_an_engine_that_new_weights_woke_is_not_resumed_again() -> None:
    async with rig_of() as rig:
        rig.engine.arrived.set()
        rig.order(rest=fleet_pb2.Rest(number=1))
        rig.receive("p1")
        rig.commit("p1")
        # vLLM, resumed without a pause, would compute the contexts of all replies again.
        rig.order(wake=fleet_pb2.Wake())
    assert rig.engine.resumed == 1


async def test_an_engine_with_weights_that_may_not_be_used_is_not_woken() -> None:
    async with rig_of() as rig:
        rig.engine.arrived.set()
        rig.receive("p1")
        await rig.until("p1", LOADED)
        rig.order(wake=fleet_pb2.Wake())
        rig.order(abort=fleet_pb2.AbortPublish(publish_id="p1", reason="a test"))
        rig.order(wake=fleet_pb2.Wake())
    assert rig.engine.resumed == 0


async def test_steps_under_way_are_a_part_of_the_pause() -> None:
    async with rig_of() as rig:
        rig.engine.arrived.set()
        late_s = time.monotonic() + 100.0
        steps_s = []
        # The first publish pauses nobody, and vLLM's loader does not say when it began.
        for publish_id, began_s in (("p1", late_s), ("p2", late_s), ("p3", 0.0)):
            rig.engine.began_s = began_s
            rig.receive(publish_id)
            rig.commit(publish_id)
            await rig.until(publish_id, SERVING)
            steps_s.append(rig.stages.steps_s)
    assert steps_s[::2] == [0.0, 0.0]
    assert 0.0 < steps_s[1] <= 100.0

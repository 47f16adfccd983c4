"""Calls that go to the controller and come back: by which leases, and of which versions."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest
from slipstream.core.types import PolicyVersion, Purpose, ServerId, VersionSpan
from slipstream.extensions.agent_recovery import controller
from slipstream.extensions.agent_recovery.call_store import CallStore
from slipstream.extensions.agent_recovery.controller import CallKeeping
from slipstream.extensions.agent_recovery.server import RemoteCallRecords
from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.leasing.leases import LeaseBook
from slipstream.learner.controller.records.history import RunHistory
from slipstream.learner.controller.run import ControlledRun
from slipstream.learner.controller.servers.session import ServerKey
from slipstream.protocol.access.checked_calls import CheckingInterceptor
from slipstream.rollout_server.agents.call_records import CallRecord, EpisodeName
from slipstream.rollout_server.engine_interface import FinishReason, Generation
from slipstream.rollout_server.episodes.play import ServiceFailed
from slipstream.v1 import calls_pb2, calls_pb2_grpc
from support.fakes.call_requests import call
from support.rigs.lease_rig import book_of
from support.rigs.publishing_scene import run_of
from support.rigs.waiting import until

FIRST = ServerKey(ServerId("first"), 9)
SECOND = ServerKey(ServerId("second"), 10)


@dataclass
class Scene:
    """The part of a controller with one open group, and a rollout server's way to it."""

    part: CallKeeping
    run: ControlledRun
    book: LeaseBook
    group: Group
    records: RemoteCallRecords
    stub: calls_pb2_grpc.CallRecordServiceStub

    def name(
        self, holder: ServerKey = FIRST, *, attempt: int = 0, member: int = 0
    ) -> EpisodeName:
        return EpisodeName(
            self.group.group_id,
            member,
            attempt,
            holder.epoch,
        )

    async def kept(self, name: EpisodeName, *, anew: bool = False) -> list[bytes]:
        records = await self.records.begin(name, anew=anew)
        return [record.request_digest for record in records]


def answered(request: bytes, *, step: int = 1, incarnation: int = 0) -> CallRecord:
    generation = Generation(
        np.array([1], dtype=np.uint32),
        np.array(
            [-1],
            dtype=np.float32,
        ),
        (VersionSpan(1, PolicyVersion(incarnation, step)),),
        FinishReason.STOP,
    )
    return CallRecord(
        request,
        b"",
        generation,
        0,
        False,
        {},
        200,
        (),
        b"answer",
    )


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    settings = {
        "run": {
            "name": "r",
            "dir": str(tmp_path),
            "steps": 100,
        }
    }
    run = run_of(agents={"recover": True}, **settings)
    run.config.run_dir.mkdir(
        parents=True,
        exist_ok=True,
    )
    run.progress.reached(PolicyVersion(0, 2))
    book = book_of(max_staleness=run.config.algorithm.max_staleness)
    group = book.lease(
        "e",
        0,
        0,
        FIRST,
        1,
    )
    part = CallKeeping(run, book)
    server = grpc.aio.server(interceptors=[CheckingInterceptor()])
    part.serve(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = calls_pb2_grpc.CallRecordServiceStub(channel)
        yield Scene(
            part,
            run,
            book,
            group,
            RemoteCallRecords(channel, ()),
            stub,
        )
    await server.stop(None)


async def test_calls_come_back_to_the_next_attempt_and_to_the_next_holder(
    scene: Scene,
) -> None:
    await scene.records.keep(
        scene.name(),
        1,
        answered(b"a"),
    )
    await scene.records.keep(
        scene.name(),
        2,
        answered(b"b"),
    )
    assert await scene.kept(scene.name(attempt=1)) == [
        b"a",
        b"b",
    ]
    assert await scene.kept(scene.name(member=1)) == []
    scene.book.orphan(FIRST)
    scene.book.reassign(scene.group, SECOND)
    assert await scene.kept(scene.name(SECOND)) == [
        b"a",
        b"b",
    ]
    await scene.records.keep(
        scene.name(SECOND),
        3,
        answered(b"c"),
    )
    assert await scene.kept(scene.name(SECOND)) == [
        b"a",
        b"b",
        b"c",
    ]


async def test_an_attempt_that_failed_by_itself_leaves_no_calls(scene: Scene) -> None:
    await scene.records.keep(
        scene.name(),
        1,
        answered(b"a"),
    )
    assert (
        await scene.kept(
            scene.name(attempt=1),
            anew=True,
        )
        == []
    )
    assert await scene.kept(scene.name(attempt=2)) == []


async def test_a_server_without_the_lease_keeps_nothing_and_gets_nothing(
    scene: Scene,
) -> None:
    await scene.records.keep(
        scene.name(),
        1,
        answered(b"a"),
    )
    scene.book.orphan(FIRST)
    scene.book.reassign(scene.group, SECOND)
    strangers = [
        scene.name(FIRST),
        scene.name(ServerKey(ServerId("third"), 11)),
        scene.name(SECOND, attempt=50),
        scene.name(SECOND, member=2),
        replace(scene.name(SECOND), group_id="g000009"),
    ]
    for stranger in strangers:
        with pytest.raises(ServiceFailed, match="has no open lease"):
            await scene.records.keep(stranger, 5, answered(b"x"))
        # Nor does it make others begin anew.
        for anew in (False, True):
            with pytest.raises(ServiceFailed, match="has no open lease"):
                await scene.kept(stranger, anew=anew)
    # A call that waits does not hold up the next join.
    await scene.records.send_all()
    assert await scene.kept(scene.name(SECOND)) == [b"a"]
    with pytest.raises(
        grpc.aio.AioRpcError,
        match="has no open lease",
    ):
        await scene.stub.Keep(
            call(
                1,
                group=scene.group.group_id,
                epoch=11,
            )
        )


async def test_an_evaluation_keeps_nothing(scene: Scene) -> None:
    group = scene.book.lease_episode(
        "e",
        FIRST,
        1,
        task_index=0,
    )
    assert group.purpose is Purpose.EVALUATION
    name = EpisodeName(group.group_id, 0, 0, FIRST.epoch)
    with pytest.raises(ServiceFailed, match="has no open lease"):
        await scene.records.keep(name, 1, answered(b"a"))
    with pytest.raises(ServiceFailed, match="has no open lease"):
        await scene.kept(name)


@pytest.mark.parametrize(
    ("version", "cause"),
    [
        (PolicyVersion(0, 3), "version 3 sampled one, the newest is"),
        (PolicyVersion(1, 1), "version 1 sampled one, the newest is"),
        (
            PolicyVersion(0, 0),
            "version 0 sampled one, step 4 may train the group, and max",
        ),
    ],
)
async def test_tokens_that_no_trajectory_may_have_make_the_episode_begin_anew(
    scene: Scene, version: PolicyVersion, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    # The group was leased at version 1.
    assert scene.run.config.algorithm.max_staleness == 2
    assert scene.group.deadline_step == 3
    await scene.records.keep(
        scene.name(),
        1,
        answered(b"a"),
    )
    late = answered(
        b"b",
        step=version.step,
        incarnation=version.incarnation,
    )
    await scene.records.keep(
        scene.name(),
        2,
        late,
    )
    assert await scene.kept(scene.name(attempt=1)) == []
    (event,) = [
        record.message for record in caplog.records if "begins anew" in record.message
    ]
    assert "without its 2 kept calls" in event
    assert cause in event
    assert await scene.kept(scene.name(attempt=2)) == []


async def test_calls_of_episodes_that_are_over_are_removed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "LOOK_S", 0.01)
    for member in range(2):
        await scene.records.keep(
            scene.name(member=member),
            1,
            answered(b"a"),
        )
    folder = scene.run.config.run_dir / "calls"
    assert len(list(folder.iterdir())) == 2
    (cleaning,) = scene.part.tasks().values()
    task = asyncio.create_task(cleaning)
    scene.group.failed.add(1)
    await until(lambda: len(list(folder.iterdir())) == 1)
    assert await scene.kept(scene.name()) == [b"a"]
    scene.book.remove(scene.group.group_id)
    await until(lambda: not list(folder.iterdir()))
    task.cancel()


async def test_a_run_that_goes_on_keeps_the_calls_and_a_finished_one_does_not(
    scene: Scene,
) -> None:
    await scene.records.keep(
        scene.name(),
        1,
        answered(b"a"),
    )
    scene.part.restore(RunHistory())
    assert await scene.kept(scene.name()) == [b"a"]
    scene.run.progress.stop("a client asked for it")
    assert scene.run.progress.may_go_on
    await scene.part.close_files()
    assert await scene.kept(scene.name()) == [b"a"]
    scene.book.remove(scene.group.group_id)
    scene.part.restore(RunHistory())
    assert not list((scene.run.config.run_dir / "calls").iterdir())


async def test_a_controller_that_keeps_no_calls_fails_the_episode() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    name = EpisodeName("g1", 0, 0, 9)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        records = RemoteCallRecords(channel, ())
        with pytest.raises(ServiceFailed, match=r"agents\.recover: Method not found"):
            await records.begin(name, anew=False)
        with pytest.raises(ServiceFailed, match=r"agents\.recover: Method not found"):
            await records.keep(name, 1, answered(b"a"))
        # The call is not sent before the next join, which it would hold up for ever.
        await records.send_all()
    await server.stop(None)


async def test_a_call_waits_for_a_controller_that_is_away(tmp_path: Path) -> None:
    taken: list[calls_pb2.KeepCallRequest] = []
    is_away = True

    class Keeper(calls_pb2_grpc.CallRecordServiceServicer):
        async def Keep(self, request, context):
            if is_away:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "away")
            taken.append(request)
            return calls_pb2.KeepCallResponse()

    server = grpc.aio.server()
    calls_pb2_grpc.add_CallRecordServiceServicer_to_server(Keeper(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    name = EpisodeName("g1", 0, 0, 9)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        records = RemoteCallRecords(channel, ())
        first = asyncio.create_task(
            records.keep(
                name,
                1,
                answered(b"a"),
            )
        )
        second = asyncio.create_task(
            records.keep(
                name,
                2,
                answered(b"b"),
            )
        )
        done, _ = await asyncio.wait(
            {first, second},
            timeout=0.5,
        )
        assert not done
        with pytest.raises(grpc.aio.AioRpcError):
            await records.send_all()
        # The episode was cancelled: the answer is kept all the same.
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first
        is_away = False
        await records.send_all()
        await second
        assert [request.record.request_digest for request in taken[:1]] == [b"a"]
        assert {request.record.request_digest for request in taken} == {
            b"a",
            b"b",
        }
        before = len(taken)
        await records.send_all()
        assert len(taken) == before
    await server.stop(None)


async def test_a_full_disk_is_told_once_and_costs_the_kept_calls_alone(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(CallStore, "keep", full)
        for number in (1, 2):
            await scene.records.keep(scene.name(), number, answered(b"a"))
    with monkeypatch.context() as disk:
        disk.setattr(CallStore, "calls", full)
        assert await scene.kept(scene.name(attempt=1)) == []
    texts = [event.text for event in scene.run.events.kept()]
    assert [text for text in texts if "cannot be kept" in text] == [
        "calls of agents cannot be kept, and are sampled again if lost: [Errno 28] No space left "
        "on device"
    ]
    assert sum("cannot be read" in text for text in texts) == 1
    await scene.records.keep(scene.name(attempt=1), 1, answered(b"b"))
    assert await scene.kept(scene.name(attempt=2)) == [b"b"]

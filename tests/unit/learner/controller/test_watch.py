"""The watches over the run and its leases, and what a start tells of checkpoints."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from slipstream.core.types import GroupId, ServerId
from slipstream.learner.controller import run as run_module
from slipstream.learner.controller.application import warn_of_checkpoints
from slipstream.learner.controller.events import EventLog
from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.publishing.publish import Publisher
from slipstream.learner.controller.records.journal import Journal, read_records
from slipstream.learner.controller.run import ControlledRun
from slipstream.learner.controller.servers.session import ServerKey
from slipstream.learner.controller.trajectories.intake import Intake
from slipstream.learner.controller.watch import CANCEL_LIMIT_S, LeaseWatch, RunWatch
from slipstream.v1 import status_pb2
from support.fakes.fake_trajectories import plain_group
from support.fakes.plain_trajectory import plain_trajectory
from support.fakes.small_checkpoints import save_checkpoint
from support.rigs.lease_rig import Rig, SoundJournal, books_of
from support.rigs.publishing_scene import Scene, run_of
from support.rigs.waiting import LIMIT_S


@dataclass
class Watched:
    """A run whose one server has served a version, under a watch."""

    scene: Scene
    watching: asyncio.Task[None]

    @classmethod
    async def start(cls, run: ControlledRun, tasks: asyncio.TaskGroup) -> Watched:
        scene = Scene(run, tasks)
        await scene.serve()
        books = books_of(run, fleet=scene.fleet, journal=SoundJournal())
        watch = RunWatch(run, books, scene.publisher, Intake(run, books))
        return cls(scene, tasks.create_task(watch.watch_forever()))

    async def until_over(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not self.scene.run.progress.is_over:
                await self.scene.run.signal.changes(1.0, gather_s=0.0)
        self.watching.cancel()


@pytest.mark.parametrize("begun", [True, False])
async def test_a_trainer_that_never_ends_a_publish_ends_the_run(*, begun: bool) -> None:
    weights = {"join_deadline_s": 0.05, "bucket_deadline_s": 0.05}
    run = run_of(controller={"stall_timeout_s": 0.2}, weights=weights)
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        watched = await Watched.start(run, tasks)
        scene = watched.scene
        if not begun:
            scene.trainer.communicator_id = ""
        order = await scene.ordered()
        assert order.begun == begun
        if not begun:
            assert scene.publisher.start(scene.start_of(order))
        # No server serves, and no message of the trainer will ever end the publish.
        assert not scene.fleet.serving()
        await watched.until_over()
        assert run.progress.state == status_pb2.RUN_STATE_FAILED
        assert run.progress.cause.startswith(
            f"the trainer did not end publish {order.publish_id} "
        )


async def test_a_trainer_that_fails_without_a_place_ends_the_run_if_no_other_is_heard_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_module, "HEARD_S", 0.0)
    run = run_of()
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        watched = await Watched.start(run, tasks)
        run.progress.fail_unless_heard("trainer rank 1: no such model")
        await watched.until_over()
    assert run.progress.cause == "trainer rank 1: no such model"


@pytest.mark.parametrize("num_servers", [1, 2])
async def test_before_a_stall_fails_the_run_its_leases_are_taken_back_once(
    tmp_path, num_servers, monkeypatch
):
    with Journal(tmp_path / "journal") as journal:
        rig = Rig(tmp_path, journal)
        events: list[tuple[str, str]] = []
        publisher = Publisher(rig.fleet, rig.run, None)  # type: ignore[arg-type]
        intake = Intake(rig.run, rig.books)
        monkeypatch.setattr(
            intake,
            "take_back",
            lambda group, cause: events.append((group.group_id, cause)),
        )
        watch = RunWatch(rig.run, rig.books, publisher, intake)
        progress = rig.run.progress
        clock = rig.run.clock
        progress.trainer_registered(())
        progress.waits_for("an episode")
        for number in range(num_servers):
            rig.serving(f"s{number}", 0, max_episodes=2)
        rig.scheduler.lease_all()
        watch._look_at_leases()

        def stalled(seconds: float) -> str:
            progress.moved()
            progress._idle.note(clock.now_s(), running=False)
            progress._idle.note(clock.now_s() - seconds, running=True)
            return watch._cause_to_fail()

        assert stalled(590) == ""
        assert events == []
        cause = stalled(601)
        if num_servers == 1:
            assert (
                cause
                == "nothing moved for 601 s of serving while waiting for an episode"
            )
            (group,) = rig.book.groups.values()
            group.closed = True
            assert stalled(601) == "", "what it has closed it gets back"
            assert [group_id for group_id, _ in events] == [group.group_id]
            return
        assert cause == ""
        group_ids = [
            group.group_id for group in rig.book.groups.values() if group.holder
        ]
        why = "nothing moved for 601 s of serving (controller.stall_timeout_s)"
        assert events == [(group_id, why) for group_id in group_ids]
        assert stalled(1190) == ""
        assert stalled(1201) == (
            "nothing moved for 1201 s of serving while waiting for an episode, though all leases "
            "were taken back once and given to other servers"
        )
        assert len(events) == len(group_ids)
        # A run that has moved may stall again.
        assert stalled(1) == ""
        watch._leases = LeaseWatch()
        watch._look_at_leases()
        assert stalled(601) == ""
        assert len(events) == 2 * len(group_ids)


async def test_a_member_without_progress_is_given_up_and_its_server_told_to_stop(
    tmp_path,
) -> None:
    with Journal(tmp_path / "journal") as journal:
        limits = {"max_attempts": 1}
        rig = Rig(tmp_path, journal, algorithm={"group_size": 4}, controller=limits)
        session = rig.serving("a", 0, max_episodes=4)
        await rig.lease()
        (group,) = rig.book.groups.values()
        for member in (0, 1, 3):
            reply = plain_trajectory(
                [1, 2, 3], (1, 2), group_id=group.group_id, member=member
            )
            rig.book.add(replace(reply, environment="e", server_id=ServerId("a")))
        Intake(rig.run, rig.books).take_back(group, "late")
        assert group.is_complete
        assert [trajectory.member for trajectory in group.in_order()] == [0, 1, 3]
        while (order := session.outbox.pop()) is not None:
            order_told = order
        assert (order_told.cancel.group_id, order_told.cancel.reason) == (
            group.group_id,
            "late",
        )
        await journal.durable()
    (record,) = [
        r for r in read_records(tmp_path / "journal") if r["kind"] == "gave_up"
    ]
    assert (record["group"], record["members"]) == (group.group_id, [2])


A = ServerKey(ServerId("a"), 1)
B = ServerKey(ServerId("b"), 1)


def group(name: str, holder: ServerKey | None = A) -> Group:
    return plain_group(group_id=GroupId(name), holder=holder)


def late(watch: LeaseWatch, groups: list[Group], **served_s: float) -> list[str]:
    clocks = {ServerKey(ServerId(name), 1): time_s for name, time_s in served_s.items()}
    return [group.group_id for group in watch.overdue(groups, clocks, limit_s=10.0)[0]]


def test_a_lease_is_overdue_once_when_its_server_served_for_so_long_without_an_end() -> (
    None
):
    watch = LeaseWatch()
    slow = group("slow")
    assert late(watch, [slow], a=100.0) == []
    assert late(watch, [slow], a=110.0) == []
    assert late(watch, [slow], a=110.1) == ["slow"]
    assert late(watch, [slow], a=125.0) == []


def test_an_attempt_that_ended_is_progress_whatever_came_of_it() -> None:
    watch = LeaseWatch()
    slow = group("slow")
    assert late(watch, [slow], a=0.0) == []
    slow.attempts[1] = 0
    assert late(watch, [slow], a=9.0) == []
    assert late(watch, [slow], a=18.0) == []
    slow.attempts[1] = 1
    assert late(watch, [slow], a=20.0) == []
    assert late(watch, [slow], a=30.1) == ["slow"]


def test_another_holder_has_its_own_time() -> None:
    watch = LeaseWatch()
    slow = group("slow")
    assert late(watch, [slow], a=0.0, b=50.0) == []
    assert late(watch, [slow], a=10.1, b=50.0) == ["slow"]
    slow.holder = None
    assert late(watch, [slow], a=30.0, b=50.0) == []
    slow.holder = B
    slow.num_leases = 2
    assert late(watch, [slow], a=30.0, b=50.0) == []
    assert late(watch, [slow], a=90.0, b=60.0) == []
    assert late(watch, [slow], a=90.0, b=60.1) == ["slow"]


def test_what_is_complete_or_handed_back_is_not_waited_for() -> None:
    watch = LeaseWatch()
    done = group("done")
    late(watch, [done], a=0.0)
    done.ended.update((0, 1))
    assert late(watch, [done], a=50.0) == []


def test_a_server_that_does_not_end_what_was_taken_back_is_told() -> None:
    watch = LeaseWatch()
    slow = group("slow")
    late(watch, [slow], a=0.0)
    assert late(watch, [slow], a=11.0) == ["slow"]
    assert watch.overdue([slow], {A: 11.0 + CANCEL_LIMIT_S}, limit_s=10.0)[1] == []
    assert watch.overdue([slow], {A: 11.1 + CANCEL_LIMIT_S}, limit_s=10.0)[1] == [A]


def test_a_lease_that_was_taken_back_and_given_to_the_same_server_is_a_new_one() -> (
    None
):
    watch = LeaseWatch()
    slow = group("slow")
    late(watch, [slow], a=0.0)
    assert late(watch, [slow], a=11.0) == ["slow"]
    # The server's cancelled episodes come back: still the same lease.
    slow.attempts[0] = 0
    assert late(watch, [slow], a=12.0) == []
    assert late(watch, [slow], a=30.0) == []
    slow.num_leases = 2
    assert late(watch, [slow], a=31.0) == []
    assert late(watch, [slow], a=41.1) == ["slow"]


async def test_nothing_is_owed_by_a_trainer_that_has_ended_its_publish(
    monkeypatch,
) -> None:
    run = run_of()
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        watched = await Watched.start(run, tasks)
        publisher = watched.scene.publisher
        monkeypatch.setattr(run.clock, "now_s", lambda: now_s)
        now_s = 0.0
        order = await watched.scene.ordered()
        assert not publisher.overdue()
        now_s = 1e6
        assert order.publish_id in publisher.overdue()
        publisher.trainer_joined(1)
        assert not publisher.overdue()
        assert order.begun
        watched.watching.cancel()


def texts(events: EventLog) -> list[str]:
    return [event.text for event in events.kept()]


def test_a_start_tells_what_it_passes_over(tmp_path: Path) -> None:
    events = EventLog()
    save_checkpoint(tmp_path, 30)
    warn_of_checkpoints(tmp_path, 30, events)
    assert texts(events) == []
    path = save_checkpoint(tmp_path, 40)
    (path / "manifest.json").unlink()
    warn_of_checkpoints(tmp_path, 40, events)
    assert texts(events) == [
        f"{path} is no whole checkpoint, it has no manifest.json: a resume begins from version 30"
    ]
    shutil.rmtree(path)
    warn_of_checkpoints(tmp_path, 40, events)
    assert texts(events)[1:] == [
        f"{path} is not there any more: a resume begins from version 30"
    ]
    shutil.rmtree(tmp_path)
    warn_of_checkpoints(tmp_path, 40, events)
    assert texts(events)[2:] == [
        f"{path} is not there any more: a resume begins from the start"
    ]

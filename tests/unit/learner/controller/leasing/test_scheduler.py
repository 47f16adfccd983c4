"""What the scheduler grants, with servers that only get orders."""

import asyncio
import errno
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from slipstream.core.errors import RunFailed
from slipstream.core.types import GroupId, ServerId, TrajectoryId
from slipstream.learner.controller.leasing import scheduler
from slipstream.learner.controller.leasing.scheduler import Scheduler
from slipstream.learner.controller.records.history import read_history
from slipstream.learner.controller.records.journal import Journal, read_records
from slipstream.learner.controller.servers.session import ServerKey
from slipstream.learner.controller.trajectories.intake import Intake
from slipstream.v1 import environment_pb2, fleet_pb2
from support.fakes.plain_trajectory import plain_trajectory
from support.fakes.slow_disk import SlowDisk, several_turns
from support.rigs.lease_rig import Rig, books_of
from support.rigs.publishing_scene import run_of
from support.rigs.waiting import LIMIT_S, until


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "journal") as journal:
        yield journal


@pytest.fixture
def rig(tmp_path: Path, journal: Journal) -> Rig:
    return Rig(tmp_path, journal)


async def test_a_lease_leaves_when_it_is_durable_and_nothing_is_missed_meanwhile(
    rig, monkeypatch
):
    disk = SlowDisk(monkeypatch)
    monkeypatch.setattr(scheduler, "RECHECK_S", 60.0)
    first = rig.serving("first", 0, max_episodes=2)
    disk.hold()
    leasing = asyncio.create_task(rig.scheduler.lease_forever())
    orders = aiter(first.outbox.messages())
    order = asyncio.ensure_future(anext(orders))
    await asyncio.to_thread(disk.wait_begun)
    second = rig.serving("second", 0, max_episodes=2)
    rig.run.signal.notify()
    await several_turns()
    assert not order.done()
    # Orders of a publish do not wait for the disk, others do.
    first.send(fleet_pb2.ControllerMessage(drain=fleet_pb2.Drain()))
    first.send(fleet_pb2.ControllerMessage(receive=fleet_pb2.ReceiveWeights()))
    first.send(fleet_pb2.ControllerMessage(commit=fleet_pb2.CommitPublish()))
    overtaking = [await order, await anext(orders)]
    assert [order.WhichOneof("message") for order in overtaking] == [
        "receive",
        "commit",
    ]
    order = asyncio.ensure_future(anext(orders))
    await several_turns()
    assert not order.done()
    disk.go_on()
    async with asyncio.timeout(LIMIT_S):
        leased = [await order, await anext(aiter(second.outbox.messages()))]
        assert (await anext(orders)).WhichOneof("message") == "drain"
    history = read_history(read_records(rig.folder))
    assert set(history.open_groups) == {message.lease.group_id for message in leased}
    leasing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leasing


async def test_leases_end_with_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(monkeypatch)
    rig = Rig(tmp_path, Journal(tmp_path / "journal"))
    session = rig.serving("a", 0)
    disk.fails = errno.EIO
    leasing = asyncio.create_task(rig.scheduler.lease_forever())
    await until(rig.journal.trouble, LIMIT_S)
    # The journal's watcher ends the run; no lease was sent that the journal does not hold.
    assert session.outbox.pop() is None
    leasing.cancel()
    with pytest.raises(RunFailed, match="Input/output error"), rig.journal:
        pass


async def test_a_lease_that_waits_for_the_disk_leaves_though_the_run_ends(
    rig, monkeypatch
):
    disk = SlowDisk(monkeypatch)
    session = rig.serving("a", 0, max_episodes=2)
    disk.hold()
    leasing = asyncio.create_task(rig.scheduler.lease_forever())
    await asyncio.to_thread(disk.wait_begun)
    leasing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leasing
    session.send(fleet_pb2.ControllerMessage(drain=fleet_pb2.Drain()))
    session.outbox.close()
    disk.go_on()
    async with asyncio.timeout(LIMIT_S):
        kinds = [m.WhichOneof("message") async for m in session.outbox.messages()]
    assert kinds == ["lease", "drain"]


async def test_a_due_group_that_no_server_may_finish_starts_afresh_under_a_new_deadline(
    rig,
):
    rig.book.step = 1
    new = rig.serving("new", 1)
    await rig.lease()
    first, second = rig.orders(new)
    assert (first.deadline_step, second.deadline_step) == (2, 2)
    rig.lose(new)
    old = rig.serving("old", 0)
    await rig.lease()
    # Step 1 waits for one of them; the other can wait for a server of version 1.
    (again,) = rig.orders(old)
    assert [group.group_id for group in rig.abandoned] == [second.group_id]
    assert (again.task_index, again.seed) == (second.task_index, second.seed)
    assert again.group_id not in (first.group_id, second.group_id)
    assert (again.deadline_step, list(again.members), again.first_attempt) == (
        1,
        [0, 1],
        0,
    )
    rig.journal.sync()
    history = read_history(read_records(rig.folder))
    assert set(history.open_groups) == {first.group_id, again.group_id}
    assert history.environments["e"].next_number == 2
    assert "leased afresh" in list(rig.run.events.kept())[-1].text


@pytest.fixture
def next_journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "again") as journal:
        yield journal


async def restarted(rig: Rig, folder: Path, journal: Journal) -> tuple[Rig, list[str]]:
    """Leases two groups to server "a"; then another controller, and the ids of these groups."""
    session = rig.serving("a", 0)
    await rig.lease()
    leased = [order.group_id for order in rig.orders(session)]
    again = Rig(folder, journal)
    again.book.restore(read_history(read_records(rig.folder)))
    return again, leased


async def test_after_a_restart_groups_wait_for_the_servers_that_may_have_finished_them(
    rig: Rig, tmp_path: Path, next_journal: Journal
) -> None:
    rig, (first, second) = await restarted(rig, tmp_path, next_journal)
    other = rig.serving("b", 0)
    await rig.lease()
    assert rig.orders(other) == []
    rig.book.awaited.joined("a", [f"{second}.0.0.5", f"{second}.1.0.5"])
    await rig.lease()
    assert [order.group_id for order in rig.orders(other)] == [first]
    for member, leased in enumerate(([], [second])):
        rig.book.awaited.arrived(f"{second}.{member}.0.5")
        await rig.lease()
        assert [order.group_id for order in rig.orders(other)] == leased


async def test_after_a_restart_groups_wait_for_a_server_whose_stream_was_lost_before(
    rig: Rig, tmp_path: Path, next_journal: Journal
) -> None:
    session = rig.serving("a", 0)
    await rig.lease()
    (first, second) = (order.group_id for order in rig.orders(session))
    rig.books.ledger.report(session.key, fleet_pb2.ServerReport(generated_tokens=7))
    rig.books.ledger.journal_servers(lost=session.key)
    rig.lose(session)
    rig.journal.sync()
    again = Rig(tmp_path, next_journal)
    again.book.restore(read_history(read_records(rig.folder)))
    other = again.serving("b", 0)
    await again.lease()
    assert again.orders(other) == []
    again.book.awaited.joined("a", [f"{second}.1.0.5"])
    await again.lease()
    assert [order.group_id for order in again.orders(other)] == [first]


async def test_a_server_that_joins_again_keeps_the_groups_of_what_it_has_finished(
    rig: Rig,
) -> None:
    session = rig.serving("a", 0)
    await rig.lease()
    (first, second) = (order.group_id for order in rig.orders(session))
    rig.lose(session)
    rig.book.awaited.joined("a", [f"{first}.0.0.5", f"{first}.1.0.5"])
    other = rig.serving("b", 0)
    await rig.lease()
    assert [order.group_id for order in rig.orders(other)] == [second]
    # Another process of its name has nothing.
    rig.book.awaited.joined("a", [])
    await rig.lease()
    assert [order.group_id for order in rig.orders(other)] == [first]


async def test_a_trajectory_of_two_sources_is_awaited_until_it_arrives(
    rig: Rig,
) -> None:
    session = rig.serving("a", 0)
    await rig.lease()
    (first, _) = (order.group_id for order in rig.orders(session))
    rig.lose(session)
    group = rig.book.groups[GroupId(first)]
    awaited = rig.book.awaited
    # Redis has it, and the answer to its server was lost.
    awaited.hold([f"{first}.0.0.5"])
    awaited.joined("a", [f"{first}.0.0.5"])
    awaited.joined("a", [])
    assert awaited.has(group)
    awaited.joined("a", [f"{first}.0.0.5"])
    awaited.arrived(f"{first}.0.0.5")
    assert not awaited.has(group)


async def test_after_a_restart_nobody_gets_a_group_of_which_a_trajectory_lies_in_the_queue(
    rig: Rig, tmp_path: Path, next_journal: Journal
) -> None:
    rig, (first, second) = await restarted(rig, tmp_path, next_journal)
    other = rig.serving("b", 0)
    rig.book.awaited.hold([f"{first}.0.0.5", f"{first}.1.0.5"])
    rig.book.awaited.joined("a", [])
    await rig.lease()
    assert [order.group_id for order in rig.orders(other)] == [second]
    # The limit begins again with each that comes: a long queue takes its time.
    rig.book.awaited.look(1000.0, 15.0)
    rig.book.awaited.arrived(f"{first}.0.0.5")
    rig.book.awaited.look(1015.1, 15.0)
    await rig.lease()
    assert rig.orders(other) == []
    rig.book.awaited.arrived(f"{first}.1.0.5")
    await rig.lease()
    assert [order.group_id for order in rig.orders(other)] == [first]


async def test_after_a_restart_a_lost_servers_groups_do_not_wait_for_a_long_queue(
    rig, tmp_path, next_journal
):
    rig, (first, second) = await restarted(rig, tmp_path, next_journal)
    other = rig.serving("b", 0)
    rig.book.awaited.hold([f"{second}.0.0.5", f"{second}.1.0.5"])
    rig.book.awaited.look(1000.0, 15.0)
    rig.book.awaited.arrived(f"{second}.0.0.5")
    rig.book.awaited.look(1015.1, 15.0)
    await rig.lease()
    assert [order.group_id for order in rig.orders(other)] == [first]


async def test_after_a_restart_a_server_that_does_not_come_back_is_not_awaited_for_ever(
    rig: Rig, tmp_path: Path, next_journal: Journal
) -> None:
    rig, leased = await restarted(rig, tmp_path, next_journal)
    other = rig.serving("b", 0)
    rig.book.awaited.look(1000.0, 15.0)
    rig.book.awaited.look(1015.0, 15.0)
    await rig.lease()
    assert rig.orders(other) == []
    rig.book.awaited.look(1015.1, 15.0)
    await rig.lease()
    assert [order.group_id for order in rig.orders(other)] == leased


async def test_what_a_server_put_into_the_queue_before_it_joined_again_is_awaited(
    rig: Rig, tmp_path: Path, next_journal: Journal
) -> None:
    rig, (first, second) = await restarted(rig, tmp_path, next_journal)
    intake = Intake(rig.run, rig.books)
    rig.books.ledger.receive(
        ServerKey(ServerId("a"), 5), TrajectoryId(f"{second}.0.0.5"), 4
    )
    session = rig.serving("a", 0)
    session.in_queue = [TrajectoryId(f"{first}.0.0.5"), TrajectoryId(f"{second}.0.0.5")]
    session.hello.undelivered.append(f"{second}.0.0.5")
    intake.joined(session)
    awaits = [
        rig.book.awaited.has(rig.book.groups[GroupId(g)]) for g in (first, second)
    ]
    # The second group's trajectory has come.
    assert awaits == [True, False]


async def test_a_server_that_names_trajectories_again_and_again_holds_up_no_queue(
    rig: Rig, tmp_path: Path, next_journal: Journal
) -> None:
    rig, (first, second) = await restarted(rig, tmp_path, next_journal)
    awaited = rig.book.awaited
    awaited.hold([f"{first}.0.0.5"])
    for now_s in (1000.0, 1010.0, 1015.1):
        awaited.joined("a", [f"{second}.0.0.5"])
        awaited.look(now_s, 15.0)
    assert not awaited.has(rig.book.groups[GroupId(first)])
    assert awaited.has(rig.book.groups[GroupId(second)])


async def test_an_interrupted_group_goes_on_where_its_deadline_allows_it(
    rig: Rig,
) -> None:
    session = rig.serving("a", 0)
    await rig.lease()
    leased = [order.group_id for order in rig.orders(session)]
    rig.lose(session)
    other = rig.serving("b", 0)
    await rig.lease()
    assert [order.group_id for order in rig.orders(other)] == leased
    assert rig.abandoned == []


async def test_without_a_server_an_interrupted_group_waits(rig: Rig) -> None:
    rig.book.step = 1
    session = rig.serving("a", 1)
    await rig.lease()
    rig.lose(session)
    await rig.lease()
    assert rig.abandoned == []
    assert rig.scheduler.lease_wait == "a rollout server that serves"


async def test_a_task_that_starts_afresh_waits_for_the_room_of_its_client(
    rig: Rig,
) -> None:
    rig.book.step = 1
    rig.entry.client_episodes = 4
    new = rig.serving("new", 1)
    await rig.lease()
    _, second = rig.orders(new)
    rig.lose(new)
    old = rig.serving("old", 0)
    rig.entry.client_episodes = 3
    await rig.lease()
    assert rig.orders(old) == []
    assert [group.group_id for group in rig.abandoned] == [second.group_id]
    assert (
        rig.scheduler.lease_wait
        == "an environment that is ready and has room for a group"
    )
    rig.entry.client_episodes = 4
    await rig.lease()
    assert [order.task_index for order in rig.orders(old)] == [second.task_index]


async def test_a_lease_names_the_adapter_of_its_environment(rig: Rig) -> None:
    rig.entry.spec.adapter = "math"
    rig.serving("a", 0, max_episodes=2)
    await rig.lease()
    (group,) = rig.book.groups.values()
    assert rig.scheduler.lease_message(group).sampling.adapter == "math"


def test_a_lease_has_the_temperature_of_its_environment() -> None:
    entries = {"hot": {"temperature": 1.3}, "weighed": {"loss_weight": 2.0}}
    run = run_of(
        sampling={"max_reply_tokens": 2, "max_episode_tokens": 8, "temperature": 0.7},
        extensions={"by_environment": {"environments": entries}},
    )
    books = books_of(run)
    for name in ("hot", "weighed", "plain"):
        books.environments.add(environment_pb2.EnvironmentSpec(name=name, weight=1.0))
    leasing = Scheduler(run, books, lambda _: None)
    key = ServerKey(ServerId("a"), 1)
    temperatures = {}
    for name in ("hot", "weighed", "plain"):
        group = books.leases.lease(name, 0, 0, key, 0)
        temperatures[name] = leasing.lease_message(group).sampling.temperature
        books.leases.remove(group.group_id)
    assert temperatures == {"hot": 1.3, "weighed": 0.7, "plain": 0.7}


async def test_what_the_next_lease_lacks_is_told_with_its_time(
    rig: Rig, monkeypatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 10.0, time=lambda: 0.0)
    monkeypatch.setattr(scheduler, "time", clock)
    session = rig.serving("a", 0, max_episodes=3)
    await rig.lease()
    assert rig.scheduler.lease_wait == "a rollout server with room for a group"
    session.hello.max_episodes = 100
    clock.monotonic = lambda: 12.5
    await rig.lease()
    assert rig.scheduler.lease_wait.startswith("a step: ")
    clock.monotonic = lambda: 13.0
    waited_s = {
        name: time_s for name, time_s in rig.scheduler.waited_s().items() if time_s
    }
    assert waited_s == {"slots": 2.5, "staleness": 0.5}
    assert len(rig.orders(session)) == 2


async def test_a_group_is_leased_only_while_the_queue_has_room_for_it(
    tmp_path, journal
):
    # A trajectory has at most 2048 + 24 * 8 bytes: three of them do not fit twice.
    rig = Rig(tmp_path, journal, queue={"max_bytes": 3 * 2240})
    session = rig.serving("a", 0)
    await rig.lease()
    assert len(rig.orders(session)) == 1
    assert rig.scheduler.lease_wait == "room in the queue (queue.max_bytes)"
    assert rig.scheduler.reserved_bytes == 2 * 2240
    rig.queue.waiting_bytes = 100
    assert rig.scheduler.reserved_bytes == 2 * 2240 + 100
    assert rig.scheduler.free_episodes == 0


async def test_a_group_goes_to_another_server_than_the_one_that_failed_it(
    rig: Rig,
) -> None:
    first = rig.serving("a", 0, max_episodes=8)
    rig.scheduler.lease_all(1)
    (group,) = rig.book.held_by(first.key)
    other = rig.serving("b", 0, max_episodes=2)

    def fail() -> None:
        rig.book.closed(group.group_id, group.holder, [])
        rig.book.run_again(group)
        rig.scheduler.lease_all(1)

    fail()
    assert group.holder == other.key, "though it has less room"
    fail()
    assert group.holder == first.key
    rig.fleet.remove(other, "gone")
    fail()
    assert group.holder == first.key, "there is no other server"


async def test_a_group_whose_compared_members_are_lost_is_leased_afresh(
    rig: Rig,
) -> None:
    first = rig.serving("a", 0, max_episodes=2)
    await rig.lease()
    (order,) = rig.orders(first)
    rig.book.add(
        plain_trajectory(
            [1, 2],
            (1, 1),
            group_id=GroupId(order.group_id),
            server_epoch=first.key.epoch,
            judged_lease=1,
        )
    )
    rig.lose(first)
    other = rig.serving("b", 0, max_episodes=2)
    await rig.lease()
    (again,) = rig.orders(other)
    assert [group.group_id for group in rig.abandoned] == [order.group_id]
    assert again.group_id != order.group_id
    assert (again.task_index, again.seed) == (order.task_index, order.seed)
    assert list(again.members) == [0, 1]

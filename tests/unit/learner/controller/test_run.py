"""The clock without stalls of the event loop, and the stopwatch."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream.learner.controller.publishing.publish import Publisher
from slipstream.learner.controller.run import LoopClock, Stopwatch
from slipstream.learner.controller.servers.fleet import Fleet
from slipstream.learner.controller.trajectories.intake import Intake
from slipstream.learner.controller.watch import RunWatch
from support.rigs.lease_rig import SoundJournal, books_of
from support.rigs.publishing_scene import joined, run_of
from support.rigs.waiting import LIMIT_S


def test_without_looks_it_is_the_time_of_the_system() -> None:
    assert LoopClock().at(12.5) == 12.5


def test_a_loop_that_turns_misses_nothing() -> None:
    clock = LoopClock()
    for tick in range(100):
        clock.look(tick / 4, tick / 4 + 0.5)
    assert clock.at(25.0) == 25.0


def test_it_stands_while_a_look_is_overdue_and_goes_on_from_there() -> None:
    clock = LoopClock()
    clock.look(10.0, 10.5)
    assert [clock.at(now) for now in (10.2, 10.5, 19.0)] == [10.2, 10.5, 10.5]
    clock.look(19.0, 19.5)
    assert [clock.at(now) for now in (19.0, 19.25, 40.0)] == [10.5, 10.75, 11.0]


async def test_a_server_is_not_silent_while_the_loop_stands_still() -> None:
    run = run_of(controller={"heartbeat_timeout_s": 0.6})
    fleet = Fleet(run)
    # However late the watch begins, hardly any time passes before it does.
    run.clock.look(now_s := time.monotonic(), now_s + 0.01)
    session = joined(fleet, "a")
    publisher = Publisher(fleet, run, None)  # type: ignore[arg-type]
    books = books_of(run, fleet=fleet, journal=SoundJournal())
    watch = RunWatch(run, books, publisher, Intake(run, books))
    watching = asyncio.create_task(watch.watch_forever())
    await asyncio.sleep(0)
    # The loop is blocked: no peer could be heard.
    time.sleep(1.5)
    await asyncio.sleep(0)
    assert fleet.find(session.key) is session
    # Now nothing but its own silence is left.
    async with asyncio.timeout(LIMIT_S):
        while fleet.find(session.key) is session:
            await run.signal.changes(1.0, gather_s=0.0)
    cause = fleet.departed[session.key.server_id].cause
    # Not of the time in which the loop was blocked.
    assert 0.6 <= float(cause.removeprefix("silent for ").removesuffix(" s")) < 1.5, (
        cause
    )
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching


async def test_a_report_that_came_while_the_loop_stood_still_is_not_late() -> None:
    clock = LoopClock()
    report: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    now_s = time.monotonic()
    clock.look(now_s, now_s + 0.05)
    waiting = asyncio.create_task(clock.wait([report], 0.2))
    await asyncio.sleep(0)
    time.sleep(0.4)
    # A message that gRPC has takes some turns of the loop like this.
    asyncio.get_running_loop().call_later(0.02, report.set_result, "loaded")
    now_s = time.monotonic()
    clock.look(now_s, now_s + 60.0)
    await waiting
    assert report.done()


async def test_a_report_that_never_comes_is_waited_for_until_its_limit() -> None:
    report: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    await LoopClock().wait([report], 0.05)
    assert not report.done()


changes = st.lists(
    st.tuples(st.integers(0, 100), st.booleans(), st.booleans()), max_size=20
)


@given(changes, st.integers(0, 100))
def test_only_time_in_which_it_runs_is_counted(changes, last):
    """Seconds until each change, whether it runs then, and whether there is progress before."""
    watch = Stopwatch()
    now = 0
    running = False
    expected = 0
    for passed, runs, progress in changes:
        now += passed
        expected += passed if running else 0
        assert watch.total_s(now) == expected
        if progress:
            watch.reset(now)
            expected = 0
        watch.note(now, running=runs)
        running = runs
    assert watch.total_s(now + last) == expected + (last if running else 0)

"""Waits with a limit, on the clock of an event loop that the test sets."""

import asyncio
from collections.abc import Callable

import pytest
from slipstream.core.waits import within


async def some_turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the clock of the running loop forward."""
    now_s = 1000.0

    def forward(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    # The loop does not run yet when fixtures are made.
    monkeypatch.setattr(asyncio.BaseEventLoop, "time", lambda _: now_s)
    return forward


async def test_a_wait_ends_after_its_limit(pass_time: Callable[[float], None]) -> None:
    waiting = asyncio.create_task(within(60.0, asyncio.Event().wait()))
    await some_turns()
    for _ in range(59):
        pass_time(1.0)
        await some_turns()
    assert not waiting.done()
    pass_time(1.0)
    assert await waiting is False


async def test_a_wait_leaves_out_time_in_which_the_process_stood_still(
    pass_time: Callable[[float], None],
) -> None:
    event = asyncio.Event()
    waiting = asyncio.create_task(within(60.0, event.wait()))
    await some_turns()
    pass_time(3600.0)
    await some_turns()
    assert not waiting.done()
    # The wait has as long as before: the hour counts as the second until its first look.
    for _ in range(58):
        pass_time(1.0)
        await some_turns()
    assert not waiting.done()
    event.set()
    assert await waiting is True


async def test_a_wait_of_a_moment_ends_at_once(
    pass_time: Callable[[float], None],
) -> None:
    assert await within(0.0, asyncio.Event().wait()) is False


async def test_a_wait_that_ends_slowly_after_its_limit_is_looked_at_no_more(
    pass_time: Callable[[float], None],
) -> None:
    failures: list[dict[str, object]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failures.append(context))
    closed = asyncio.Event()

    async def closes_slowly() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await closed.wait()

    waiting = asyncio.create_task(within(60.0, closes_slowly()))
    await some_turns()
    for _ in range(60):
        pass_time(1.0)
        await some_turns()
    # The next look is late, at a deadline that can no longer move.
    pass_time(10.0)
    await some_turns()
    assert not waiting.done()
    closed.set()
    assert await waiting is False
    assert not failures

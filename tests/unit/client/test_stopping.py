"""The signals that stop a command in order."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest
from slipstream.client.launch import children
from slipstream.client.launch.children import stop_signal
from support.rigs.waiting import LIMIT_S


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    """Signals that nothing else takes do not end this process."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_stops_in_order(number: signal.Signals) -> None:
    stop = asyncio.ensure_future(stop_signal())
    await asyncio.sleep(0)
    os.kill(os.getpid(), number)
    assert await asyncio.wait_for(stop, LIMIT_S) == number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_scheduler_or_terminal_may_send_its_signal_twice(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "SAME_ORDER_S", 30.0)
    stop = asyncio.ensure_future(stop_signal())
    await asyncio.sleep(0)
    os.kill(os.getpid(), number)
    await asyncio.wait_for(stop, LIMIT_S)
    # The signal's usual effect would end the process at once.
    assert signal.getsignal(number) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


async def test_a_later_signal_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "SAME_ORDER_S", 0.0)
    stop = asyncio.ensure_future(stop_signal())
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(LIMIT_S):
        await stop
        while signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            await asyncio.sleep(0.01)


async def test_a_command_behind_nohup_outlives_its_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = asyncio.ensure_future(stop_signal())
    await asyncio.sleep(0)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    stop.cancel()

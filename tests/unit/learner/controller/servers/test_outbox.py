"""What waits for a stream, and what that waits for."""

import asyncio

import pytest
from slipstream.learner.controller.servers import session
from slipstream.learner.controller.servers.session import Outbox
from support.rigs.waiting import LIMIT_S


async def test_what_waits_in_an_outbox_is_read_before_it_ends() -> None:
    box = Outbox[str]()
    assert box.put("first")
    assert box.put("second")
    box.close()
    assert not box.put("late")
    assert [message async for message in box.messages()] == ["first", "second"]


async def test_a_reader_of_an_outbox_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_MESSAGES", 1)
    box = Outbox[str]()
    reader = asyncio.ensure_future(anext(aiter(box.messages())))
    await asyncio.sleep(0)
    assert box.put("message")
    assert not box.put("one too many")
    assert await asyncio.wait_for(reader, LIMIT_S) == "message"
    assert box.pop() is None


async def test_who_stops_reading_does_not_cancel_what_a_message_comes_after() -> None:
    outbox = Outbox[str]()
    other = Outbox[str]()
    durable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    readers = []
    for box in (outbox, other):
        box.put("message", after=durable)
        readers.append(asyncio.ensure_future(anext(aiter(box.messages()))))
    await asyncio.sleep(0)
    readers[0].cancel()
    await asyncio.sleep(0)
    durable.set_result(None)
    assert await asyncio.wait_for(readers[1], LIMIT_S) == "message"


async def test_what_overtakes_passes_what_is_held_and_nothing_else() -> None:
    box = Outbox[str]()
    durable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    for message in ("first", "second"):
        box.put(message)
    box.put("held", after=durable)
    box.put("behind")
    box.put("overtakes", overtakes=True)
    messages = aiter(box.messages())
    assert [await anext(messages) for _ in range(3)] == ["first", "second", "overtakes"]
    box.close()
    durable.set_result(None)
    assert [message async for message in messages] == ["held", "behind"]


async def test_a_message_does_not_leave_when_what_it_comes_after_failed() -> None:
    box = Outbox[str]()
    durable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    box.put("message", after=durable)
    durable.set_exception(OSError("the disk"))
    with pytest.raises(OSError, match="the disk"):
        await anext(aiter(box.messages()))

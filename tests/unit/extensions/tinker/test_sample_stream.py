"""Samples on their stream: each is sent once and told once, and what comes of a lost stream."""

import asyncio
from typing import Any

import pytest
from slipstream.core.errors import ProtocolError
from slipstream.extensions.tinker import sample_stream
from slipstream.extensions.tinker.operations import NotReady
from slipstream.extensions.tinker.sample_stream import SampleStream
from slipstream.v1 import operations_pb2 as pb


class Call:
    """One stream to a controller that is none."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.told: list[str] = []
        self.results: asyncio.Queue[str] = asyncio.Queue()
        self.is_over = False
        self.takes = asyncio.Event()
        self.takes.set()

    async def write(self, operation: pb.Operation) -> None:
        await self.takes.wait()
        if self.is_over:
            raise asyncio.InvalidStateError
        self.sent.append(operation.id)
        self.told += operation.told

    def __aiter__(self) -> "Call":
        return self

    async def __anext__(self) -> pb.OperationResult:
        if name := await self.results.get():
            return pb.OperationResult(id=name, is_done=True)
        raise StopAsyncIteration

    def cancel(self) -> None:
        self.is_over = True


class Stub:
    """Opens streams, and nothing else."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def Sample(self, **_: object) -> Call:  # noqa: N802
        self.calls.append(Call())
        return self.calls[-1]


def sample(name: str, **settings: Any) -> pb.Operation:
    return pb.Operation(id=name, sample=pb.Sample(num_samples=1, **settings))


async def test_a_sample_is_sent_once_and_its_result_is_told_once() -> None:
    stub = Stub()
    stream = SampleStream(stub, ())
    for name in ("s:1", "s:1", "s:2"):
        assert await stream.send(sample(name)) == ""
    (call,) = stub.calls
    assert call.sent == ["s:1", "s:2"]
    assert not (await stream.result("s:1", 0.0)).is_done
    call.results.put_nowait("s:1")
    assert (await stream.result("s:1", 60.0)).id == "s:1"
    # The controller may still know of it.
    assert await stream.result("s:1", 60.0) is None
    # Which hears that the client has it with the next sample, once.
    assert call.told == []
    for name in ("s:3", "s:4"):
        await stream.send(sample(name))
    assert call.told == ["s:1"]
    await stream.close()


async def test_a_lost_stream_leaves_its_samples_to_the_controller() -> None:
    stub = Stub()
    stream = SampleStream(stub, ())
    await stream.send(sample("s:1"))
    waiting = asyncio.ensure_future(stream.result("s:1", 60.0))
    await asyncio.sleep(0)
    stub.calls[0].results.put_nowait("")
    assert await waiting is None
    await stream.send(sample("s:1"))
    stub.calls[1].results.put_nowait("s:1")
    assert (await stream.result("s:1", 60.0)).is_done
    stub.calls[1].is_over = True
    with pytest.raises(NotReady):
        await stream.send(sample("s:2"))
    await stream.close()


async def test_a_session_has_a_number_of_samples_and_other_sessions_theirs(monkeypatch) -> None:
    monkeypatch.setattr(sample_stream, "MAX_WAITING", 1)
    monkeypatch.setattr(sample_stream, "MAX_KEPT", 1)
    stub = Stub()
    stream = SampleStream(stub, ())
    await stream.send(sample("s:1"))
    assert "1 samples of session s wait" in await stream.send(sample("s:2"))
    for name in ("s:1", "t:1"):
        assert await stream.send(sample(name)) == ""
    for name in ("s:1", "t:1"):
        stub.calls[0].results.put_nowait(name)
    assert (await stream.result("t:1", 60.0)).is_done
    # The oldest result went: the controller has it for a while.
    assert await stream.result("s:1", 60.0) is None
    assert await stream.send(sample("s:2")) == ""
    await stream.close()


async def test_a_sample_out_of_bounds_is_not_sent() -> None:
    stub = Stub()
    with pytest.raises(ProtocolError, match="num_samples"):
        await SampleStream(stub, ()).send(
            pb.Operation(id="s", sample=pb.Sample(num_samples=1 << 20))
        )
    assert not stub.calls


async def test_a_controller_that_takes_nothing_keeps_no_sample_for_ever(monkeypatch) -> None:
    stub = Stub()
    stream = SampleStream(stub, ())
    await stream.send(sample("s:1"))
    (call,) = stub.calls
    call.takes.clear()
    # Its client goes while it is sent.
    sending = asyncio.ensure_future(stream.send(sample("s:2")))
    await asyncio.sleep(0)
    sending.cancel()
    await asyncio.wait([sending])
    monkeypatch.setattr(sample_stream, "SEND_S", 0.0)
    with pytest.raises(NotReady):
        await stream.send(sample("s:3"))
    call.takes.set()
    monkeypatch.undo()
    for name in ("s:2", "s:3"):
        assert await stream.result(name, 60.0) is None
        await stream.send(sample(name))
    assert call.sent == ["s:1", "s:2", "s:3"]
    await stream.close()

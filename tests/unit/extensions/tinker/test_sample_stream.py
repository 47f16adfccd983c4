"""Samples on their stream: each is sent once and told once, and what comes of a lost stream."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from slipstream.core.errors import ProtocolError
from slipstream.extensions.tinker import sample_stream
from slipstream.extensions.tinker.request_fields import Refused
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

    async def __aiter__(self) -> AsyncIterator[pb.OperationResult]:
        while name := await self.results.get():
            yield pb.OperationResult(id=name, is_done=True)

    def cancel(self) -> None:
        self.is_over = True


class Samples(SampleStream):
    """A stream of samples, with the calls that it has opened."""

    def __init__(self) -> None:
        super().__init__(self, ())
        self.calls: list[Call] = []

    def Sample(self, **_: object) -> Call:  # noqa: N802
        self.calls.append(Call())
        return self.calls[-1]

    async def ask(self, *names: str) -> None:
        for name in names:
            await self.send(pb.Operation(id=name, sample=pb.Sample(num_samples=1)))


@pytest.fixture
async def samples() -> AsyncIterator[Samples]:
    stream = Samples()
    yield stream
    await stream.close()


async def test_a_sample_is_sent_once_and_its_result_is_told_once(samples: Any) -> None:
    await samples.ask("s:1", "s:1", "s:2")
    (call,) = samples.calls
    assert call.sent == ["s:1", "s:2"]
    assert not (await samples.result("s:1", 0.0)).is_done
    call.results.put_nowait("s:1")
    assert (await samples.result("s:1", 60.0)).id == "s:1"
    # The controller may still know of it.
    assert await samples.result("s:1", 60.0) is None
    # Which hears that the client has it with the next sample, once.
    assert call.told == []
    await samples.ask("s:3", "s:4")
    assert call.told == ["s:1"]


async def test_a_sample_of_a_known_id_with_other_content_is_refused(
    samples: Any,
) -> None:
    await samples.ask("s:1")
    other = pb.Operation(id="s:1", sample=pb.Sample(num_samples=2))
    for _ in range(2):
        with pytest.raises(Refused, match="s:1 is known with other content") as refusal:
            await samples.send(other)
        assert refusal.value.status == 409
        samples.calls[0].results.put_nowait("s:1")
        while not samples._results:
            await asyncio.sleep(0)
    # A client that has the result may ask for something new.
    await samples.result("s:1", 60.0)
    await samples.send(other)
    assert samples.calls[0].sent == ["s:1", "s:1"]


async def test_a_lost_stream_leaves_its_samples_to_the_controller(samples: Any) -> None:
    await samples.ask("s:1")
    waiting = asyncio.ensure_future(samples.result("s:1", 60.0))
    await asyncio.sleep(0)
    samples.calls[0].results.put_nowait("")
    assert await waiting is None
    await samples.ask("s:1")
    samples.calls[1].results.put_nowait("s:1")
    assert (await samples.result("s:1", 60.0)).is_done
    samples.calls[1].is_over = True
    with pytest.raises(Refused, match="the controller does not answer"):
        await samples.ask("s:2")


async def test_a_session_has_a_number_of_samples_and_other_sessions_theirs(
    samples, monkeypatch
):
    monkeypatch.setattr(sample_stream, "MAX_WAITING", 1)
    monkeypatch.setattr(sample_stream, "MAX_KEPT", 1)
    await samples.ask("s:1")
    with pytest.raises(Refused, match="1 samples of session s wait"):
        await samples.ask("s:2")
    await samples.ask("s:1", "t:1")
    for name in ("s:1", "t:1"):
        samples.calls[0].results.put_nowait(name)
    assert (await samples.result("t:1", 60.0)).is_done
    # The oldest result went: the controller has it for a while.
    assert await samples.result("s:1", 60.0) is None
    await samples.ask("s:2")


async def test_a_sample_out_of_bounds_is_not_sent(samples: Any) -> None:
    with pytest.raises(ProtocolError, match="num_samples"):
        await samples.send(pb.Operation(id="s", sample=pb.Sample(num_samples=1 << 20)))
    assert not samples.calls


async def test_a_controller_that_takes_nothing_keeps_no_sample_for_ever(
    samples, monkeypatch
):
    await samples.ask("s:1")
    (call,) = samples.calls
    call.takes.clear()
    # The sample's client goes while it is sent.
    sending = asyncio.ensure_future(samples.ask("s:2"))
    await asyncio.sleep(0)
    sending.cancel()
    await asyncio.wait([sending])
    monkeypatch.setattr(sample_stream, "SEND_S", 0.0)
    with pytest.raises(Refused):
        await samples.ask("s:3")
    call.takes.set()
    monkeypatch.undo()
    for name in ("s:2", "s:3"):
        assert await samples.result(name, 60.0) is None
        await samples.ask(name)
    assert call.sent == ["s:1", "s:2", "s:3"]

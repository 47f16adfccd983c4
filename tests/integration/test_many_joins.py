"""A controller that thousands of servers have joined and left holds no more than one of a few."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from itertools import pairwise

from slipstream.learner.controller.events import MAX_EVENTS
from slipstream.learner.controller.records.history import read_history
from slipstream.learner.controller.records.journal import read_records
from slipstream.learner.controller.records.ledger import TokenLedger
from slipstream.learner.controller.servers.server_epochs import ServerEpochs
from slipstream.v1 import fleet_pb2, fleet_pb2_grpc
from support.rigs.fuzz_calls import server_hello
from support.rigs.live_run import LiveRun

EARLIER, JOINS, AT_ONCE = 2400, 800, 8
# An epoch keeps eight bytes; before, it kept eight objects.
MOST_OBJECTS, MOST_BYTES = 1.0, 100


async def come_and_go(channel, number: int, *, drains: bool) -> None:
    """One server that joins, reports tokens, and leaves in order or is lost."""
    # Half of them under names that come back, as those of a host do, half under new ones.
    name = f"server-{number if number % 4 < 2 else number % 40}"
    tokens = 100 + number % 7
    report = fleet_pb2.ServerReport(generated_tokens=tokens, ended_tokens=tokens)
    enough = asyncio.Event()

    async def messages():
        yield fleet_pb2.ServerMessage(hello=server_hello(name, epoch=(1 << 60) + number))
        yield fleet_pb2.ServerMessage(heartbeat=report)
        if drains:
            yield fleet_pb2.ServerMessage(draining=fleet_pb2.Draining(reason="enough"))
            yield fleet_pb2.ServerMessage(drained=report)
        await enough.wait()

    call = fleet_pb2_grpc.FleetServiceStub(channel).Join(messages())
    async for message in call:
        # The environments follow the welcome: the controller has added the server.
        if message.WhichOneof("message") == "environment":
            break
    enough.set()
    call.cancel()
    await call.code()


def held() -> tuple[int, int]:
    """Objects, and the bytes of the collector's objects, of this process."""
    gc.collect()
    return sys.getallocatedblocks(), sum(map(sys.getsizeof, gc.get_objects()))


def test_epochs_that_have_ended_take_no_room(tmp_path, caplog) -> None:
    # What the test runner keeps of the log would count as the controller's.
    caplog.set_level(logging.CRITICAL)
    with LiveRun(tmp_path) as run:
        events = run._controller._run.events
        journal = run._controller._endings._journal

        async def join(channel, first: int, most: int) -> None:
            before_tasks = len(asyncio.all_tasks())
            # The events of joining and leaving are the newest 10,000, before and after.
            for number in range(MAX_EVENTS + 1):
                events.add(f"event {number} of those that were there before")
            for number in range(first, most, AT_ONCE):
                here = range(number, number + AT_ONCE)
                await asyncio.gather(
                    *(come_and_go(channel, n, drains=n % 2 == 0) for n in here),
                )
            # What belongs to the calls ends a moment later.
            while len(asyncio.all_tasks()) > before_tasks or journal._pending:
                await asyncio.sleep(0.005)

        run.do(lambda channel: join(channel, 0, EARLIER))
        counts = [held()]
        for first in (EARLIER, EARLIER + JOINS):
            run.do(lambda channel, first=first: join(channel, first, first + JOINS))
            counts.append(held())
        ledger = run._controller._ledger
        live = ledger.snapshot()
    objects, sizes = zip(*counts, strict=True)
    # What grows once, such as an import of another test's thread, grows between two counts alone.
    assert min(now - then for then, now in pairwise(objects)) / JOINS < MOST_OBJECTS, objects
    assert min(now - then for then, now in pairwise(sizes)) / JOINS < MOST_BYTES, sizes
    assert run.code == 0
    assert live.difference == 0
    history = read_history(read_records(run.config.run_dir / "journal"))
    resumed = TokenLedger(ServerEpochs())
    resumed.restore(history)
    again = resumed.snapshot()
    assert again.difference == 0
    summary = run.summary()["ledger"]
    assert (again.generated, again.trained) == (summary["generated"], summary["trained"])
    assert again.lost == summary["lost"] + summary["queued"]

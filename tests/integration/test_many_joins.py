"""A controller that thousands of servers have joined and left holds no more than one of a few."""

import asyncio
import gc
import os
import sys
import time
from pathlib import Path

import pytest
from slipstream.learner.controller.events import MAX_EVENTS
from slipstream.learner.controller.records.history import read_history
from slipstream.learner.controller.records.journal import read_records
from slipstream.learner.controller.servers.server_epochs import ServerEpochs
from slipstream.protocol.queue.base import Tally
from slipstream.v1 import fleet_pb2, fleet_pb2_grpc
from support.rigs.completed import completed
from support.rigs.fuzz_calls import server_hello
from support.rigs.lease_rig import ledger_of
from support.rigs.live_run import LiveRun
from support.rigs.waiting import until

EARLIER = 2400
JOINS = 1200
AT_ONCE = 8
MOMENTS = 5
# An epoch keeps eight bytes; before, it kept eight objects.
MOST_OBJECTS = 1.0
MOST_BYTES = 100


async def come_and_go(channel, number: int, *, drains: bool) -> None:
    """One server that joins, reports tokens, and leaves in order or is lost."""
    # Half of them under names that come back, as those of a host do, half under new ones.
    name = f"server-{number if number % 4 < 2 else number % 40}"
    tokens = 100 + number % 7
    report = fleet_pb2.ServerReport(
        generated_tokens=tokens, ended_tokens=tokens, ended_episodes=1
    )
    report.sent.MergeFrom(Tally(1, tokens).to_pb())
    enough = asyncio.Event()

    async def messages():
        yield fleet_pb2.ServerMessage(
            hello=server_hello(name, epoch=(1 << 60) + number)
        )
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
    """The fewest objects, and bytes of the collector's objects, in some moments of this process."""
    found = []
    for _ in range(MOMENTS):
        # Calls that have ended leave what their threads still hold for a moment.
        time.sleep(0.2)
        gc.collect()
        blocks = sys.getallocatedblocks()
        found.append((blocks, sum(map(sys.getsizeof, gc.get_objects()))))
    return min(blocks for blocks, _ in found), min(size for _, size in found)


def main(folder: Path) -> None:
    """Takes the servers through the run; AssertionError says what of them is left."""
    with LiveRun(folder) as run:
        events = run._controller._run.events
        journal = run._controller.books.journal

        async def join(channel, first: int, most: int) -> None:
            before_tasks = len(asyncio.all_tasks())
            for number in range(first, most, AT_ONCE):
                here = range(number, number + AT_ONCE)
                await asyncio.gather(
                    *(come_and_go(channel, n, drains=n % 2 == 0) for n in here)
                )
            # The calls' state ends a moment later.
            await until(
                lambda: (
                    not (len(asyncio.all_tasks()) > before_tasks or journal._pending)
                )
            )
            # The newest events are kept: the same ones each time that objects are counted.
            for number in range(MAX_EVENTS + 1):
                events.add(f"event {number} of those that were there before")

        run.do(lambda channel: join(channel, 0, EARLIER))
        before = held()
        run.do(lambda channel: join(channel, EARLIER, EARLIER + JOINS))
        grown = [(now - then) / JOINS for now, then in zip(held(), before, strict=True)]
        ledger = run._controller.books.ledger
        live = ledger.snapshot()
    assert grown[0] < MOST_OBJECTS, grown
    assert grown[1] < MOST_BYTES, grown
    assert run.code == 0
    assert live.difference == 0
    history = read_history(read_records(run.config.run_dir / "journal"))
    resumed = ledger_of(ServerEpochs(), state=history)
    resumed.restore(history)
    again = resumed.snapshot()
    assert again.difference == 0
    summary = run.summary()["ledger"]
    assert (again.generated, again.trained) == (
        summary["generated"],
        summary["trained"],
    )
    assert again.lost == summary["lost"] + summary["queued"]


@pytest.mark.slow
def test_epochs_that_have_ended_take_no_room(tmp_path: Path) -> None:
    # In a process of its own: objects of other tests, and of the test runner, do not count.
    done = completed(
        [sys.executable, __file__, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    main(Path(sys.argv[1]))

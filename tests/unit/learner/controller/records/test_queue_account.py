from slipstream.core.types import TrajectoryId
from slipstream.learner.controller.leasing.lease_pass import WORDS, LeaseWait
from slipstream.learner.controller.records.ledger import AccountedReceiver
from slipstream.protocol.queue.base import Delivery
from support.fakes.memory_queue import MemoryQueue

A, B = TrajectoryId("a"), TrajectoryId("b")


async def test_what_was_delivered_lies_there_until_it_is_acknowledged() -> None:
    queue = MemoryQueue(100)
    sender, receiver = queue.sender(), AccountedReceiver(queue.receiver())
    await sender.put(A, b"12345", timeout_s=1)
    await sender.put(B, b"123", timeout_s=1)
    assert receiver.waiting_bytes == 0
    assert (await receiver.get()).trajectory_id == A
    assert (await receiver.get()).trajectory_id == B
    assert receiver.waiting_bytes == 8
    await receiver.acknowledge(x for x in (A, TrajectoryId("unknown")))
    assert receiver.waiting_bytes == 3
    # Acknowledged inside too: the generator was not used up before.
    assert queue.queued_bytes == 3


async def test_a_trajectory_that_comes_again_counts_once() -> None:
    class Twice:
        def __init__(self, queue: MemoryQueue) -> None:
            self._queue = queue

        async def get(self):
            return await self._queue.next(set())

        async def acknowledge(self, trajectory_ids) -> None:
            for trajectory_id in trajectory_ids:
                self._queue.forget(trajectory_id)

        async def aclose(self) -> None:
            raise AssertionError("who opened it closes it")

    queue = MemoryQueue(100)
    receiver = AccountedReceiver(Twice(queue))
    await queue.put(A, b"12345", 1)
    await receiver.get()
    await receiver.get()
    assert receiver.waiting_bytes == 5
    await receiver.acknowledge([A])
    await receiver.aclose()
    assert receiver.waiting_bytes == 0


async def test_a_settled_trajectory_that_comes_again_is_acknowledged_again() -> None:
    class Forgetful:
        """A queue whose sender never saw the answer, long ago."""

        def __init__(self, *names: str) -> None:
            self.coming = [Delivery(TrajectoryId(name), b"12345") for name in names]
            self.acknowledged: list[TrajectoryId] = []

        async def get(self) -> Delivery:
            return self.coming.pop(0)

        async def acknowledge(self, trajectory_ids) -> None:
            self.acknowledged += trajectory_ids

        async def aclose(self) -> None:
            raise AssertionError("who opened it closes it")

    first, odd, other = "g000000.0.0.1", "g000000.0.1.1", "g000000.1.0.1"
    queue = Forgetful(first, odd, first, odd, other)
    receiver = AccountedReceiver(queue)
    for name in (first, odd):
        assert (await receiver.get()).trajectory_id == name
        await receiver.acknowledge([TrajectoryId(name)])
    assert (await receiver.get()).trajectory_id == other
    assert queue.acknowledged == [first, odd, first, odd]
    assert receiver.waiting_bytes == 5


def test_every_reason_has_words_and_only_nothing_has_none() -> None:
    assert {wait for wait in LeaseWait if not WORDS[wait]} == {LeaseWait.NOTHING}

from slipstream.core.types import TrajectoryId
from slipstream.learner.controller.records.ledger import AccountedReceiver
from slipstream.protocol.queue.base import Delivery


class Scripted:
    """A receiver that gives deliveries of five bytes, by name."""

    def __init__(self, *names: str) -> None:
        self.coming = [Delivery(TrajectoryId(name), b"12345") for name in names]
        self.acknowledged: list[TrajectoryId] = []

    async def get(self) -> Delivery:
        return self.coming.pop(0)

    async def acknowledge(self, trajectory_ids) -> None:
        self.acknowledged += trajectory_ids


async def test_what_was_delivered_lies_there_until_it_is_acknowledged() -> None:
    queue = Scripted("a", "b")
    receiver = AccountedReceiver(queue)
    assert receiver.waiting_bytes == 0
    assert [(await receiver.get()).trajectory_id for _ in range(2)] == ["a", "b"]
    assert receiver.waiting_bytes == 10
    await receiver.acknowledge(TrajectoryId(x) for x in ("a", "unknown"))
    assert receiver.waiting_bytes == 5
    # Acknowledged inside too: the generator was not used up before.
    assert queue.acknowledged == ["a", "unknown"]


async def test_a_trajectory_that_comes_again_counts_once() -> None:
    receiver = AccountedReceiver(Scripted("a", "a"))
    await receiver.get()
    await receiver.get()
    assert receiver.waiting_bytes == 5
    await receiver.acknowledge([TrajectoryId("a")])
    assert receiver.waiting_bytes == 0


async def test_a_settled_trajectory_that_comes_again_is_acknowledged_again() -> None:
    """Its sender never saw the answer, long ago."""
    first = "g000000.0.0.1"
    odd = "g000000.0.1.1"
    other = "g000000.1.0.1"
    queue = Scripted(first, odd, first, odd, other)
    receiver = AccountedReceiver(queue)
    for name in (first, odd):
        assert (await receiver.get()).trajectory_id == name
        await receiver.acknowledge([TrajectoryId(name)])
    assert (await receiver.get()).trajectory_id == other
    assert queue.acknowledged == [first, odd, first, odd]
    assert receiver.waiting_bytes == 5

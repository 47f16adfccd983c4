"""The run's accounts: what became of every generated token, and the bytes that wait in the queue.

Servers, controller and journal count independently. At each hand-over the sender's and the
receiver's counts of the same trajectories are compared: a difference is a trajectory that was lost
or counted twice. A trajectory is acknowledged once the journal has its end on disk.
"""

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import grpc.aio
from slipstream.core.extension import queues, resolve
from slipstream.core.types import Trajectory, TrajectoryId
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.history import RunHistory, SeenIds
from slipstream.learner.controller.records.journal import Journal
from slipstream.learner.controller.records.kinds import ServerGaps, ServerTokens, TrajectoryEnd
from slipstream.learner.controller.records.state import RunState
from slipstream.learner.controller.run import ControlledRun
from slipstream.learner.controller.servers.server_epochs import ServerEpochs
from slipstream.learner.controller.servers.session import ServerKey
from slipstream.protocol.queue.base import (
    NOTHING,
    Delivery,
    Tally,
    TrajectoryReceiver,
    opener,
)
from slipstream.v1 import fleet_pb2, status_pb2, trajectory_pb2_grpc

FLUSH_S = 0.05
# Largest number of a field of the ledger.
MOST = 2**63 - 1
# Fates of tokens in the ledger; with the difference they add up to the generated tokens.
FATES = (
    "trained",
    "filtered",
    "failed",
    "cancelled",
    "quarantined",
    "evaluated",
    "set_aside",
    "queued",
    "in_flight",
    "lost",
)


class TokenLedger:
    """Accounts for each sampled token, from its sampling to its end; duplicates count once.

    It ends the trajectories that no batch takes: counts, journals and then acknowledges them.
    """

    def __init__(
        self,
        epochs: ServerEpochs,
        held: Callable[[], list[Trajectory]],
        journal: Journal,
        queue: "AccountedReceiver",
        state: RunState,
    ) -> None:
        """Takes the servers' counts, `epochs`, and the `state` that has the tokens of each end.

        `held` returns the received trajectories that are in no batch.
        """
        self._epochs = epochs
        self._held = held
        self._journal = journal
        self._queue = queue
        self._state = state
        self._seen = SeenIds()
        # Number of received trajectories; all trajectories that have ended or are in a batch.
        self._num_received, self._settled = 0, Tally()
        # The amount that the journal had at the writer's last count and lacks now.
        self._unread = Tally()
        # True while a batch is written: the journal's count may include this batch or not.
        self._is_writing = False
        self._told: set[str] = set()
        # Trajectories to acknowledge once the journal is flushed.
        self._ended: list[TrajectoryId] = []
        self._flush_wanted = asyncio.Event()

    def restore(self, history: RunHistory) -> None:
        """Takes over the journal's counts; all servers of earlier starts count as dead."""
        self._epochs.take_over(history.servers)
        self._seen = copy.deepcopy(history.ended)
        self._num_received = history.settled.trajectories
        self._settled = history.settled
        self._unread = history.unread

    def journal_servers(self, lost: ServerKey | None = None) -> None:
        """Journals the token counts of the server `lost`, and the gaps in them.

        Without `lost`, journals those of all connected servers whose counts changed since their
        last record. After a crash a controller cannot ask the engines for these counts.
        """
        counts = self._epochs.connected if lost is None else {lost: self._epochs.count(lost)}
        generated: list[ServerTokens] = []
        gaps: list[ServerGaps] = []
        for key, count in counts.items():
            if lost is None and count.reported == count.journaled:
                continue
            count.journaled = count.reported
            generated.append((*key, count.reported))
            if any(gap := count.journaled_gaps()):
                gaps.append((*key, gap))
        if generated:
            departed = lost is not None
            self._journal.append(kinds.Servers(generated=generated, departed=departed, gaps=gaps))
        if lost is not None:
            # Otherwise the records of many departures would wait in memory until the next step.
            self._flush_wanted.set()

    def report(self, key: ServerKey, report: fleet_pb2.ServerReport) -> None:
        """Stores the counters of a server's report."""
        self._epochs.join(key).report(report)

    def receive(
        self, key: ServerKey, trajectory_id: TrajectoryId, tokens: int, sent: Tally = NOTHING
    ) -> bool:
        """Notes a delivered trajectory; returns False if it was delivered before, else True.

        `tokens` is the number of its sampled tokens. `sent` is `Delivery.sent`.
        """
        if not self._seen.add(trajectory_id):
            return False
        self._num_received += 1
        self._epochs.receive(key, tokens, sent)
        return True

    def unreceived(self, trajectory_ids: Iterable[TrajectoryId]) -> list[TrajectoryId]:
        """Returns those of the ids under which no trajectory was delivered or has ended."""
        return [name for name in trajectory_ids if name not in self._seen]

    def end(self, trajectory: Trajectory, end: TrajectoryEnd, cause: str) -> None:
        """Counts and journals the end of a trajectory that no batch takes, and acknowledges it."""
        server = ServerKey(trajectory.server_id, trajectory.server_epoch)
        tokens = trajectory.num_sampled_tokens
        self.record(trajectory.trajectory_id, end, cause, tokens=tokens, server=server)

    def record(
        self,
        trajectory_id: TrajectoryId,
        end: TrajectoryEnd,
        cause: str,
        *,
        tokens: int,
        server: ServerKey,
    ) -> None:
        """Works like `end`, for a trajectory that may not be readable."""
        self._settled = self._settled.plus(tokens)
        self._journal.append(
            kinds.End(
                id=trajectory_id,
                end=end,
                cause=cause,
                tokens=tokens,
                server=server.server_id,
                epoch=server.epoch,
            )
        )
        self.acknowledge(trajectory_id)

    def acknowledge(self, trajectory_id: TrajectoryId) -> None:
        """Acknowledges a trajectory to the queue once the journal is flushed."""
        self._ended.append(trajectory_id)
        self._flush_wanted.set()

    async def flush(self) -> None:
        """Makes journaled ends durable, then acknowledges them, many at a time, until cancelled."""
        while True:
            await self._flush_wanted.wait()
            self._flush_wanted.clear()
            ended = self._ended
            self._ended = []
            await self._journal.durable()
            await self._queue.acknowledge(ended)
            await asyncio.sleep(FLUSH_S)

    def batch_begins(self, trajectories: Sequence[Trajectory]) -> None:
        """Counts the trajectories of a new batch as settled, just before the batch is journaled."""
        self._settled = self._settled.less(_amount(trajectories, sign=-1))
        self._is_writing = True

    def batch_written(self) -> None:
        """Notes that the journal has the newest batch."""
        self._is_writing = False

    def take_back(self, trajectories: Sequence[Trajectory]) -> None:
        """Counts trajectories of a set-aside batch that wait for another batch as not settled."""
        self._settled = self._settled.less(_amount(trajectories))

    def die(self, key: ServerKey) -> None:
        """Ends a server epoch: tokens that it generated but did not deliver count as lost."""
        self._epochs.count(key).dead = True

    def news(self) -> list[str]:
        """Returns a line for each hand-over whose two counts differ and that had no line yet."""
        gaps = {line.partition(":")[0]: line for line in self.snapshot().gaps}
        new = [line for place, line in gaps.items() if place not in self._told]
        self._told.update(gaps)
        return new

    def snapshot(self) -> status_pb2.Ledger:
        """Returns the present ledger; `difference` is 0 if no token is missing or counted twice."""
        generated = received = in_flight = travelling = lost_tokens = 0
        for count in self._epochs.counts():
            generated += count.generated
            received += count.received
            if count.dead:
                lost_tokens += count.generated - count.received - count.gap_tokens
            else:
                in_flight += count.in_flight
                travelling += count.ended - count.received
                travelling -= count.unsent.tokens + count.missing.tokens
        held_amount = _amount(self._held())
        journaled = self._journal.settled
        if self._is_writing:
            journaled = self._settled
        gaps = [
            (f"{name} of {key.server_id}, epoch {key.epoch:x}", gap)
            for name, key, gap in self._epochs.gaps()
        ]
        came = Tally(self._num_received, received)
        gaps += [
            ("intake to batch", came.less(held_amount, self._settled)),
            ("batch to journal", self._settled.less(journaled)),
            ("journal to restart", self._unread),
        ]
        difference = sum(gap.tokens for _, gap in gaps)
        # Not part of the difference: lost trajectories are missing above, duplicates count once.
        gaps.append(("queue to intake", self._queue.untaken))
        # The ledger has a field for each end.
        counts = {end.value: tokens for end, tokens in self._state.ends.items()} | {
            "generated": generated,
            "queued": travelling + held_amount.tokens + journaled.tokens - self._state.ends.total(),
            "in_flight": in_flight,
            "lost": lost_tokens - self._unread.tokens,
        }
        # Many epochs of servers that lie may report more in sum than a field holds.
        fitting: dict[str, Any] = {name: min(max(n, 0), MOST) for name, n in counts.items()}
        return status_pb2.Ledger(
            **fitting,
            difference=min(max(difference, -MOST), MOST),
            gaps=[_line(place, gap) for place, gap in gaps if any(gap)],
        )


def _amount(trajectories: Sequence[Trajectory], *, sign: int = 1) -> Tally:
    tokens = sum(trajectory.num_sampled_tokens for trajectory in trajectories)
    return Tally(sign * len(trajectories), sign * tokens)


def _line(place: str, gap: Tally) -> str:
    """Describes a difference of counts: the hand-over, and what was lost or counted twice there."""
    number = abs(gap.trajectories)
    noun = "trajectory" if number == 1 else "trajectories"
    fault = "lost" if sum(gap) > 0 else "twice"
    return f"{place}: {number} {noun} with {abs(gap.tokens)} tokens {fault}"


class AccountedReceiver:
    """A receiver that remembers which of its deliveries are not acknowledged yet."""

    def __init__(self, receiver: TrajectoryReceiver) -> None:
        """Wraps `receiver`, which the caller closes."""
        self._receiver = receiver
        self._waiting: dict[TrajectoryId, int] = {}
        # All ids that were ever acknowledged: the queue itself remembers the newest ones only.
        self._settled = SeenIds()
        self.given = Tally()
        self.waiting_bytes = 0

    @property
    def untaken(self) -> Tally:
        """The amount that left the queue without reaching `get`; below 0 for duplicates."""
        return self._receiver.given.less(self.given)

    @property
    def backlog(self) -> Sequence[TrajectoryId]:
        return self._receiver.backlog

    async def waiting(self) -> Sequence[TrajectoryId]:
        """Returns the trajectories that lie in the queue, like `TrajectoryReceiver.waiting`."""
        return await self._receiver.waiting()

    async def get(self) -> Delivery:
        """Returns the next delivery, like `TrajectoryReceiver.get`; repeated deliveries count once.

        A delivery that was acknowledged before is acknowledged again and not returned, since its
        sender has not received the first acknowledgement.
        """
        while True:
            delivery = await self._receiver.get()
            self.given = self.given.plus(delivery.tokens)
            if delivery.trajectory_id not in self._settled:
                break
            await self._receiver.acknowledge((delivery.trajectory_id,))
        self._forget(delivery.trajectory_id)
        self._waiting[delivery.trajectory_id] = len(delivery.data)
        self.waiting_bytes += len(delivery.data)
        return delivery

    async def acknowledge(self, trajectory_ids: Iterable[TrajectoryId]) -> None:
        """Acknowledges trajectories, like `TrajectoryReceiver.acknowledge`."""
        settled = tuple(trajectory_ids)
        await self._receiver.acknowledge(settled)
        for trajectory_id in settled:
            self._forget(trajectory_id)
            self._settled.add(trajectory_id)

    def _forget(self, trajectory_id: TrajectoryId) -> None:
        self.waiting_bytes -= self._waiting.pop(trajectory_id, 0)


async def open_receiver(
    stack: AsyncExitStack,
    server: grpc.aio.Server,
    journal: Journal,
    history: RunHistory,
    run: ControlledRun,
) -> TrajectoryReceiver:
    """Opens and returns the receiver of trajectories for `queue.kind`, which `stack` closes."""
    queue = queues()[run.config.queue.kind]
    opened: AbstractAsyncContextManager[TrajectoryReceiver]
    opened = resolve(queue.receiver)(run, server, journal, history)
    return await stack.enter_async_context(opened)


@asynccontextmanager
async def grpc_receiver(
    run: ControlledRun,
    server: grpc.aio.Server,
    _journal: Journal,
    _history: RunHistory,
) -> AsyncIterator[TrajectoryReceiver]:
    """Adds the receiver of trajectories that servers deliver by calls to `server`."""
    from slipstream.protocol.queue.grpc import GrpcReceiver

    servicer = GrpcReceiver(opener(run.progress.run_key))
    trajectory_pb2_grpc.add_TrajectoryServiceServicer_to_server(servicer, server)
    yield servicer

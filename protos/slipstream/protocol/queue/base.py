"""Defines the contract of every trajectory queue, its limit in bytes, and the seals of deliveries.

Consumes: encoded trajectories from rollout servers. Produces: the same trajectories for the
controller, each at least once. A sender waits while the queue holds too many unacknowledged bytes.
An acknowledgement, which the controller sends after it has written its journal, unblocks the
sender.

Seals are MACs, which prove to the controller which server epoch sent a delivery. The controller
draws one key for a run, derives a key for each server epoch, and sends that key to the server with
the welcome. No other process can seal for that epoch. The controller stores nothing for an epoch,
so it also recognises deliveries that waited while it was away.
"""

import asyncio
import functools
import hashlib
import hmac
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from slipstream.core.errors import ProtocolError, QueueError, TrajectoryQueueFull
from slipstream.core.types import TrajectoryId, TrajectoryName
from slipstream.protocol.bounds import shown
from slipstream.v1 import trajectory_pb2


class Tally(NamedTuple):
    """Numbers of trajectories and of their sampled tokens."""

    trajectories: int = 0
    tokens: int = 0

    @classmethod
    def from_pb(cls, message: trajectory_pb2.Amount) -> "Tally":
        """Returns the amount that a message holds."""
        return cls(message.trajectories, message.tokens)

    def to_pb(self) -> trajectory_pb2.Amount:
        """Returns the amount as a message; both numbers must be 0 or more."""
        return trajectory_pb2.Amount(trajectories=self.trajectories, tokens=self.tokens)

    def plus(self, tokens: int) -> "Tally":
        """Returns this amount plus one trajectory with `tokens` sampled tokens."""
        return Tally(self.trajectories + 1, self.tokens + tokens)

    def less(self, *amounts: "Tally") -> "Tally":
        """Returns this amount minus all of `amounts`; the difference may be negative."""
        trajectories = self.trajectories - sum(other.trajectories for other in amounts)
        return Tally(trajectories, self.tokens - sum(other.tokens for other in amounts))


NOTHING = Tally()


class EpochAmounts(dict[str, Tally]):
    """Amounts by server epoch, the hexadecimal last part of a trajectory's id."""

    def add(self, trajectory_id: TrajectoryId, tokens: int) -> Tally:
        """Counts a trajectory with `tokens` sampled tokens; returns the new amount of its epoch."""
        epoch = trajectory_id.rpartition(".")[2]
        self[epoch] = amount = self.get(epoch, NOTHING).plus(tokens)
        return amount


@dataclass(frozen=True)
class Delivery:
    """One trajectory from the queue; it may come again until it is acknowledged."""

    trajectory_id: TrajectoryId
    data: bytes
    # Sampled tokens, as its sender counts them.
    tokens: int = 0
    # All that the sender had put into the queue in this server epoch, this trajectory included:
    # the queue keeps the order of a sender. NOTHING if the sender does not report it.
    sent: Tally = NOTHING


class TrajectorySender(Protocol):
    """The rollout server's end of the queue."""

    @property
    def queued_bytes(self) -> int:
        """Number of bytes that were put and are not yet acknowledged."""

    # Amounts of the trajectories of all `put` calls that returned.
    taken: EpochAmounts

    @property
    def undelivered(self) -> Sequence[TrajectoryId]:
        """Trajectories that this process holds and the receiver may not have; the oldest first."""

    async def put(
        self, trajectory_id: TrajectoryId, data: bytes, *, timeout_s: float, tokens: int = 0
    ) -> None:
        """Stores one encoded trajectory; `tokens` is the number of its sampled tokens.

        Raises TrajectoryQueueFull when it is not stored within `timeout_s`, and QueueError when the
        trajectory can never fit, or the queue is lost.
        """


class TrajectoryReceiver(Protocol):
    """The controller's end of the queue."""

    # Amount of all deliveries that `get` returned, repeated ones included.
    given: Tally

    @property
    def backlog(self) -> Sequence[TrajectoryId]:
        """The trajectories that were in the queue when this receiver began; the oldest first."""

    async def waiting(self) -> Sequence[TrajectoryId]:
        """Returns the trajectories that lie in the queue; `get` may have returned some of them.

        Those that senders keep until they are acknowledged are not among them.
        """

    async def get(self) -> Delivery:
        """Waits for the next trajectory and returns it; an unacknowledged one may come again."""

    async def acknowledge(self, trajectory_ids: Iterable[TrajectoryId]) -> None:
        """Makes the queue and the senders drop these trajectories; ignores unknown ids.

        One that was on its way again meanwhile still comes; acknowledge it again.
        """


class ByteBudget:
    """Counts bytes in use; `acquire` waits for room, in the order of its calls."""

    def __init__(self, max_bytes: int) -> None:
        """Limits the bytes in use to `max_bytes`."""
        self.max_bytes = max_bytes
        self.used_bytes = 0
        # Held by the call that is the next to have room.
        self._turn, self._freed = asyncio.Lock(), asyncio.Event()

    async def acquire(self, num_bytes: int, *, timeout_s: float | None) -> None:
        """Waits until `num_bytes` are free, and counts them as used.

        Raises TrajectoryQueueFull after `timeout_s`; a `timeout_s` of None waits without a limit.
        Raises QueueError when `num_bytes` can never fit.
        """
        check_fits(num_bytes, self.max_bytes)
        try:
            async with asyncio.timeout(timeout_s), self._turn:
                while self.used_bytes + num_bytes > self.max_bytes:
                    self._freed.clear()
                    await self._freed.wait()
                self.used_bytes += num_bytes
        except TimeoutError:
            assert timeout_s is not None
            raise queue_full(num_bytes, timeout_s, self.used_bytes, self.max_bytes) from None

    def release(self, num_bytes: int) -> None:
        """Counts `num_bytes` as free again, and wakes the callers that now have room."""
        self.used_bytes -= num_bytes
        assert self.used_bytes >= 0
        self._freed.set()


def check_fits(num_bytes: int, max_bytes: int) -> None:
    """Raises QueueError when a trajectory is larger than the whole queue."""
    if num_bytes > max_bytes:
        raise QueueError(
            f"a trajectory of {num_bytes} bytes does not fit queue.max_bytes = {max_bytes}"
        )


def queue_full(
    num_bytes: int, timeout_s: float, used_bytes: int, max_bytes: int
) -> TrajectoryQueueFull:
    """Returns the error of a `put` that waited too long."""
    return TrajectoryQueueFull(
        f"no room for {num_bytes} bytes within {timeout_s:g} s: {used_bytes} of {max_bytes} bytes "
        "wait for the controller"
    )


SEAL_BYTES = 16
MAX_KEYS = 4096
# Seals of deliveries up to this size are checked on the event loop, of larger ones in a thread.
SMALL_BYTES = 256 << 10

# Returns a delivery without its seal, or None if the seal is not the named server's.
OpenSeal: TypeAlias = Callable[[TrajectoryId, bytes], bytes | None]


def server_key(run_key: bytes, epoch: int) -> bytes:
    """Returns the key of one server epoch, 32 bytes."""
    return hmac.digest(run_key, epoch.to_bytes(8, "little"), "sha256")


def seal(key: bytes, trajectory_id: TrajectoryId, data: bytes) -> bytes:
    """Returns `data` preceded by its seal, which is made with an epoch's `key`."""
    return _seal(key, trajectory_id, data) + data


def opener(run_key: bytes) -> OpenSeal:
    """Returns a function that opens the seals of all epochs, which the trajectory ids name."""
    # The keys of epochs that deliver now; making one again costs little.
    key_of = functools.lru_cache(MAX_KEYS)(functools.partial(server_key, run_key))

    def open_seal(trajectory_id: TrajectoryId, sealed: bytes) -> bytes | None:
        name = TrajectoryName.parse(trajectory_id)
        if name is None:
            return None
        data = sealed[SEAL_BYTES:]
        expected = _seal(key_of(name.epoch), trajectory_id, data)
        return data if hmac.compare_digest(expected, sealed[:SEAL_BYTES]) else None

    return open_seal


async def opened(open_seal: OpenSeal, request: trajectory_pb2.DeliverRequest) -> Delivery:
    """Returns the delivery in a request; raises ProtocolError if its seal is wrong."""
    trajectory_id = TrajectoryId(request.trajectory_id)
    sealed = request.trajectory
    if len(sealed) <= SMALL_BYTES:
        data = open_seal(trajectory_id, sealed)
    else:
        data = await asyncio.to_thread(open_seal, trajectory_id, sealed)
    if data is None:
        raise ProtocolError(
            f"trajectory {shown(trajectory_id)} is not sealed by the server that it names"
        )
    return Delivery(trajectory_id, data, request.tokens, Tally.from_pb(request.sent))


def _seal(key: bytes, trajectory_id: TrajectoryId, data: bytes) -> bytes:
    mac = hashlib.blake2b(key=key, digest_size=SEAL_BYTES)
    mac.update(trajectory_id.encode() + b"\0")
    mac.update(data)
    return mac.digest()

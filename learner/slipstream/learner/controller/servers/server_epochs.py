"""Token counts of every epoch of every rollout server that ever joined, in little memory.

An epoch is the number that a server draws for each time that it joins. Connected servers and the
newest 1,000 departed ones have a count each. The counts of all earlier epochs are one sum, and each
of these epochs takes eight bytes. The module uses no clock and no I/O.
"""

import bisect
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import msgspec
from slipstream.learner.controller.servers.session import ServerKey
from slipstream.protocol.queue.base import Tally
from slipstream.v1 import fleet_pb2

# Largest number of departed epochs with a count of their own.
MAX_APART = 1000


@dataclass(slots=True)
class EpochCount:
    """Token counts of one epoch of a server, or the sum over several departed epochs."""

    # The engine's own count in its last report.
    reported: int = 0
    in_flight: int = 0
    ended: int = 0
    # Tokens of received trajectories, and number of trajectories that this start received.
    received: int = 0
    num_received: int = 0
    # Number of trajectories that the server had sent up to the newest received one.
    num_sent: int = 0
    # Losses at the hand-overs: tokens that the engine generated and no record has, ended episodes
    # that were not sent, and trajectories that were sent before the newest received one and did
    # not arrive. A negative number means that something was counted twice.
    unrecorded: int = 0
    unsent: Tally = Tally()
    missing: Tally = Tally()
    # `reported` as the journal has it.
    journaled: int = 0
    # Whether the server was lost: its undelivered tokens will probably never arrive.
    dead: bool = False
    # Whether an earlier start of the controller has received some of the trajectories.
    is_earlier: bool = False

    def report(self, report: fleet_pb2.ServerReport) -> None:
        """Stores the counters of a report, which were all read at the same moment."""
        self.reported = report.generated_tokens
        self.in_flight = report.in_flight_tokens
        self.ended = report.ended_tokens
        self.unrecorded = self.reported - self.in_flight - self.ended
        self.unsent = Tally(report.ended_episodes, self.ended).less(
            Tally.from_pb(report.delivering), Tally.from_pb(report.sent)
        )

    def receive(self, tokens: int, sent: Tally) -> None:
        """Counts a trajectory that is received for the first time.

        `sent` is `Delivery.sent`: the trajectories and tokens that the server has sent so far.
        """
        self.received = self.received + tokens
        self.num_received = self.num_received + 1
        self.num_sent = max(self.num_sent, sent.trajectories)
        missing = sent.less(Tally(self.num_received, self.received))
        if self.is_earlier:
            # The journal has the tokens of all trajectories, and of some that were sent later.
            self.missing = Tally(1, missing.tokens) if missing.tokens > 0 else Tally()
        elif sent.trajectories:
            self.missing = missing if missing.trajectories > 0 else Tally()

    def journaled_gaps(self) -> tuple[int, int, int, int, int]:
        """Returns the losses at the hand-overs as numbers for the journal; see `take_gaps`."""
        return self.unrecorded, *self.unsent, *self.missing

    def take_gaps(self, numbers: Sequence[int]) -> None:
        """Restores the losses that an earlier start of the controller has journaled."""
        self.unrecorded, *unsent_and_missing = numbers
        self.unsent = Tally(*unsent_and_missing[:2])
        self.missing = Tally(*unsent_and_missing[2:])

    @property
    def gap_tokens(self) -> int:
        return self.unrecorded + self.unsent.tokens + self.missing.tokens

    @property
    def generated(self) -> int:
        """Number of generated tokens; for a dead server at least as many as it delivered."""
        seen = self.received + self.gap_tokens
        return max(self.reported, seen) if self.dead else self.reported


class _StoredEpochs(msgspec.Struct, array_like=True):
    connected: list[tuple[ServerKey, EpochCount]]
    departed: list[tuple[ServerKey, EpochCount]]
    names: list[tuple[int, ServerKey]]
    folded: EpochCount
    earlier: bytes


class ServerEpochs:
    """The token counts of all servers, by server and epoch.

    Life of an epoch: `join`, then `depart`; after 1,000 later departures its count is added to the
    sum of all earlier epochs. Tokens that arrive later count in that sum.
    """

    def __init__(self, *, max_apart: int = MAX_APART) -> None:
        self._max_apart = max_apart
        self.connected: dict[ServerKey, EpochCount] = {}
        self._departed: dict[ServerKey, EpochCount] = {}
        # Connected and departed servers, by epoch.
        self._names: dict[int, ServerKey] = {}
        self._folded = EpochCount(dead=True, is_earlier=True)
        # Epochs whose counts are folded, in rising order.
        self._earlier = array("Q")

    def stored(self) -> list[object]:
        """Returns the content as plain values, for `restored`."""
        return [
            list(self.connected.items()),
            list(self._departed.items()),
            list(self._names.items()),
            self._folded,
            self._earlier.tobytes(),
        ]

    @classmethod
    def restored(cls, stored: object) -> Self:
        """Returns the counts whose content `stored` returned."""
        content = msgspec.convert(stored, _StoredEpochs)
        epochs = cls()
        epochs.connected.update(content.connected)
        epochs._departed.update(content.departed)
        epochs._names.update(content.names)
        epochs._folded = content.folded
        epochs._earlier.frombytes(content.earlier)
        return epochs

    def join(self, key: ServerKey) -> EpochCount:
        """Adds the epoch of a connecting server, unless it is known, and returns its count."""
        count = self._departed.get(key) or self.connected.get(key)
        if count is None:
            count = self.connected[key] = EpochCount()
            self._names[key.epoch] = key
        return count

    def depart(self, key: ServerKey) -> None:
        """Notes that a server is no longer connected; ignores an unknown server."""
        count = self.connected.pop(key, None)
        if count is None:
            return
        self._departed[key] = count
        if len(self._departed) > self._max_apart:
            oldest = next(iter(self._departed))
            count = self._departed.pop(oldest)
            count.dead = True
            self._folded.reported += count.generated
            self._folded.received += count.received
            if self._names.get(oldest.epoch) == oldest:
                del self._names[oldest.epoch]
            bisect.insort(self._earlier, oldest.epoch)

    def all_died(self) -> None:
        """Notes that no server of an earlier start of the controller is still connected."""
        for key in list(self.connected):
            self.depart(key)
        for count in self._departed.values():
            count.dead = count.is_earlier = True

    def take_over(self, earlier: "ServerEpochs") -> None:
        """Takes over the counts of the previous start, whose servers are dead, before any joins."""
        earlier.all_died()
        self._departed = earlier._departed
        self._names = earlier._names
        self._folded = earlier._folded
        self._earlier = earlier._earlier

    def receive(
        self,
        key: ServerKey,
        tokens: int,
        sent: Tally,
    ) -> None:
        """Counts a trajectory of a server; see `EpochCount.receive`."""
        count = self.count(key)
        count.receive(tokens, Tally() if count is self._folded else sent)

    def count(self, key: ServerKey) -> EpochCount:
        """Returns a server's count of tokens; for an old epoch, the sum over all old epochs."""
        return self.connected.get(key) or self._departed.get(key) or self._folded

    def counts(self) -> Iterator[EpochCount]:
        """Yields the counts of connected and departed servers, and one for all older epochs."""
        yield from self.connected.values()
        yield from self._departed.values()
        yield self._folded

    def gaps(self) -> Iterator[tuple[str, ServerKey, Tally]]:
        """Yields (hand-over, server, difference) for each hand-over whose two counts differ.

        The difference is the sender's count less the receiver's.
        """
        for key, count in (*self.connected.items(), *self._departed.items()):
            differences = {
                "engine to record": Tally(0, count.unrecorded),
                "record to queue": count.unsent,
                "queue to intake": count.missing,
            }
            yield from ((name, key, gap) for name, gap in differences.items() if any(gap))

    @property
    def generated(self) -> int:
        return sum(count.generated for count in self.counts())

    def __contains__(self, key: ServerKey) -> bool:
        """Whether this server joined with this epoch; for old epochs the name is not compared."""
        if key in self.connected or key in self._departed:
            return True
        return key.epoch not in self._names and self._is_folded(key.epoch)

    def was_given(self, epoch: int) -> bool:
        """Whether any server joined with this epoch."""
        return epoch in self._names or self._is_folded(epoch)

    def server_of(self, epoch: int) -> ServerKey | None:
        """Returns the server that joined with an epoch, or None if its name is not known."""
        return self._names.get(epoch)

    def _is_folded(self, epoch: int) -> bool:
        place = bisect.bisect_left(self._earlier, epoch)
        return place < len(self._earlier) and self._earlier[place] == epoch

"""The ledger: the end of every generated token.

Engines count `generated`; the controller counts everything else. The two must agree.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from slipstream.learner.controller.records.ends import End
from slipstream.learner.controller.records.history import RunHistory
from slipstream.learner.controller.records.seen_ids import SeenIds
from slipstream.learner.controller.servers.server_states import ServerKey
from slipstream.protocol.types import ServerId, TrajectoryId
from slipstream.v1 import fleet_pb2, status_pb2


@dataclass(slots=True)
class EpochCount:
    """Tokens of one epoch of one server."""

    generated: int = 0
    in_flight: int = 0
    ended: int = 0
    received: int = 0
    dead: bool = False


class TokenLedger:
    """Counts sampled tokens from the engines to their ends; duplicates count once."""

    def __init__(self) -> None:
        self._epochs: dict[ServerKey, EpochCount] = {}
        self._ends: Counter[End] = Counter()
        self._seen = SeenIds()

    def restore(self, history: RunHistory) -> None:
        """Takes over the counts of the journal; all servers of earlier starts are dead."""
        self._seen = history.ended.copy()
        self._ends += history.ends
        for (name, epoch), tokens in history.servers.items():
            count = self._epoch(ServerKey(ServerId(name), epoch))
            count.generated, count.received = tokens.generated, tokens.received
            count.dead = True

    def generated_by_server(self) -> list[tuple[str, int, int]]:
        """Name, epoch and generated tokens of every server that is not dead."""
        return [
            (key.server_id, key.epoch, count.generated)
            for key, count in self._epochs.items()
            if not count.dead
        ]

    def generated_by(self, key: ServerKey) -> list[tuple[str, int, int]]:
        """The entry of one server in `generated_by_server`."""
        return [(key.server_id, key.epoch, self._epoch(key).generated)]

    def report(self, key: ServerKey, report: fleet_pb2.ServerReport) -> None:
        """Takes over the counters of a heartbeat."""
        count = self._epoch(key)
        count.generated = report.generated_tokens
        count.in_flight = report.in_flight_tokens
        count.ended = report.ended_tokens

    def receive(self, key: ServerKey, trajectory_id: TrajectoryId, tokens: int) -> bool:
        """Notes a delivered trajectory; False when it was delivered before."""
        if not self._seen.add(trajectory_id):
            return False
        self._epoch(key).received += tokens
        return True

    def end(self, end: End, tokens: int) -> None:
        """Notes the end of a trajectory."""
        self._ends[end] += tokens

    def die(self, key: ServerKey) -> None:
        """Ends a server epoch: tokens that it generated and did not deliver are lost."""
        self._epoch(key).dead = True

    @property
    def generated(self) -> int:
        """Number of tokens that the engines have generated, by their reports."""
        return sum(self._generated(count) for count in self._epochs.values())

    def trained(self) -> int:
        """Number of tokens that were trained on."""
        return self._ends[End.TRAINED]

    def snapshot(self) -> status_pb2.Ledger:
        """The ledger now; `difference` is 0 when every generated token is accounted for."""
        alive = [count for count in self._epochs.values() if not count.dead]
        dead = [count for count in self._epochs.values() if count.dead]
        received = sum(count.received for count in self._epochs.values())
        in_flight = sum(count.in_flight for count in alive)
        travelling = sum(count.ended - count.received for count in alive)
        queued = received - sum(self._ends.values()) + travelling
        lost = sum(self._generated(count) - count.received for count in dead)
        difference = self.generated - in_flight - queued - lost - sum(self._ends.values())
        return status_pb2.Ledger(
            generated=self.generated,
            trained=self._ends[End.TRAINED],
            filtered=self._ends[End.FILTERED],
            failed=self._ends[End.FAILED],
            cancelled=self._ends[End.CANCELLED],
            quarantined=self._ends[End.QUARANTINED],
            evaluated=self._ends[End.EVALUATED],
            set_aside=self._ends[End.SET_ASIDE],
            queued=max(queued, 0),
            in_flight=in_flight,
            lost=lost,
            difference=difference,
        )

    def _epoch(self, key: ServerKey) -> EpochCount:
        return self._epochs.setdefault(key, EpochCount())

    @staticmethod
    def _generated(count: EpochCount) -> int:
        # A dead server may have delivered more than its last heartbeat said.
        return max(count.generated, count.received) if count.dead else count.generated

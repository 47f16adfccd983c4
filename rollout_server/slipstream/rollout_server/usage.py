"""What a server tells of its use: tokens, busy time, memory."""

import os
import time

from slipstream.core.machine import process
from slipstream.core.types import TrajectoryId
from slipstream.protocol.queue.base import Tally
from slipstream.rollout_server.engine_interface import EngineUse
from slipstream.v1 import fleet_pb2


class UseClock:
    """Adds up the seconds of pauses, and those with at least one open request outside pauses."""

    def __init__(self) -> None:
        self._open = 0
        # A pause counts after the first `resume`: before it there is nothing to pause.
        self.is_paused = self._has_served = False
        # Both sums count up to the time `_counted_s`.
        self._counted_s = time.monotonic()
        self._busy_s = self._paused_s = 0.0

    @property
    def busy_s(self) -> float:
        """The seconds with an open request, up to now and without pauses."""
        self._count()
        return self._busy_s

    @property
    def paused_s(self) -> float:
        self._count()
        return self._paused_s

    def enter(self) -> None:
        """Records that a request was opened."""
        self._count()
        self._open += 1

    def leave(self) -> None:
        """Records that a request has ended."""
        self._count()
        self._open -= 1

    def pause(self) -> None:
        """Records that no request is served until `resume`."""
        self._count()
        self.is_paused = True

    def resume(self) -> None:
        """Records the end of a pause."""
        self._count()
        self.is_paused = False
        self._has_served = True

    def _count(self) -> None:
        before_s = self._counted_s
        self._counted_s = time.monotonic()
        if self.is_paused and self._has_served:
            self._paused_s += self._counted_s - before_s
        elif self._open and not self.is_paused:
            self._busy_s += self._counted_s - before_s


# Seconds between two scans of all processes: a scan takes too long for every heartbeat.
_LOOK_S = 5.0


class EpochCounters:
    """The counters of one server epoch.

    While no token is in flight between engine and episodes, two sums are equal. The first adds the
    tokens that the engine sampled and the tokens of replies that environments gave; the second adds
    the tokens of ended and of open episodes.
    """

    def __init__(self, use: EngineUse) -> None:
        """Takes the engine's counters at the start of the epoch, when no request is open."""
        self._start = use
        # Tokens that the engine had generated and returned at the last report.
        self._last_counts = (use.generated_tokens, use.returned_tokens)
        self._started_s = time.monotonic()
        # Tokens of replies that environments gave: no engine has counted them.
        self._given_tokens = 0
        self.all_ended = Tally()
        # Trajectories of ended episodes that the queue has not taken.
        self.delivering: dict[TrajectoryId, int] = {}
        # Sampled tokens of open episodes whose generation has returned.
        self.recorded_tokens = 0
        self.open_episodes = 0
        self.waiting_episodes = 0
        # Whether an episode ended without a trajectory, since the engine died or the server ends;
        # its tokens still count as open.
        self.is_broken_off = False
        # The resident bytes of this process and its descendants at the last scan, and its time.
        self._resident_bytes = 0
        self._looked_s = -_LOOK_S

    def sampled(self, num_tokens: int) -> None:
        """Counts `num_tokens` that a generation of an open episode returned."""
        self.recorded_tokens += num_tokens

    def given(self, num_tokens: int) -> None:
        """Counts `num_tokens` of a reply that an environment gave in an open episode."""
        self._given_tokens += num_tokens
        self.sampled(num_tokens)

    def ended(self, num_tokens: int) -> None:
        """Counts an episode that ended, normally or not, after `num_tokens` sampled tokens."""
        self.open_episodes -= 1
        self.recorded_tokens -= num_tokens
        self.all_ended = self.all_ended.plus(num_tokens)

    def resident_bytes(self) -> int:
        """Returns the bytes of this process and its descendants, as of at most 5 s ago.

        Shared pages count in each process that shares them.
        """
        now_s = time.monotonic()
        this = os.getpid()
        if now_s - self._looked_s >= _LOOK_S:
            processes = (process.Descendant(this, 0), *process.descendants(this))
            self._looked_s = now_s
            self._resident_bytes = sum(map(process.resident_bytes, processes))
        return self._resident_bytes

    def report(
        self,
        use: EngineUse,
        *,
        sent: Tally,
        queued_bytes: int,
        refused_agents: int = 0,
        is_last: bool = False,
    ) -> fleet_pb2.ServerReport:
        """Returns the counters as a message; `sent` is the total of this epoch.

        `use` has the engine's counters now, `queued_bytes` is the present size of the queue, and
        `refused_agents` counts calls from elsewhere since the process began.
        """
        counts = (use.generated_tokens, use.returned_tokens)
        # vLLM hands out the tokens of a step in parts, and counts them when all are handed out: it
        # may have returned tokens that it has not counted yet. Counters that stand since the last
        # report have settled.
        has_settled = is_last or counts == self._last_counts
        self._last_counts = counts
        inside = use.generated_tokens - use.returned_tokens
        inside -= self._start.generated_tokens - self._start.returned_tokens
        uncounted = max(-inside, 0)
        is_quiet = not use.open_requests and not self.is_broken_off
        if is_quiet and (has_settled or not uncounted):
            # Tokens inside the engine belong to open requests: a difference is an error, and shows.
            inside = 0
            uncounted = 0
        waiting = Tally(len(self.delivering), sum(self.delivering.values()))
        return fleet_pb2.ServerReport(
            generated_tokens=use.generated_tokens
            - self._start.generated_tokens
            + self._given_tokens
            + uncounted,
            drafted_tokens=use.drafted_tokens - self._start.drafted_tokens,
            accepted_tokens=use.accepted_tokens - self._start.accepted_tokens,
            in_flight_tokens=self.recorded_tokens + max(inside, 0),
            ended_tokens=self.all_ended.tokens,
            ended_episodes=self.all_ended.trajectories,
            delivering=waiting.to_pb(),
            sent=sent.to_pb(),
            open_episodes=self.open_episodes,
            waiting_episodes=self.waiting_episodes,
            queued_bytes=queued_bytes,
            busy_s=use.busy_s - self._start.busy_s,
            uptime_s=time.monotonic() - self._started_s,
            paused_s=use.paused_s - self._start.paused_s,
            resident_bytes=self.resident_bytes(),
            refused_agents=refused_agents,
        )

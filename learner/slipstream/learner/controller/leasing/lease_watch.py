"""Leases that make no progress although their server serves: pure state, no clock, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slipstream.core.types import GroupId
from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.servers.server_states import ServerKey

# Seconds of serving within which a server must end a cancelled lease.
CANCEL_LIMIT_S = 60.0


@dataclass
class _Mark:
    # Number of the group's lease.
    number: int
    # The last ended attempt of each member; a change is progress of the lease.
    ended: tuple[tuple[int, int], ...]
    # The server's clock at the last progress.
    served_s: float
    is_cancelled: bool = False


@dataclass(frozen=True)
class Overdue:
    """The leases and servers that are late."""

    # Groups whose leases must be taken back.
    groups: tuple[Group, ...]
    # Servers that did not end a cancelled lease in time.
    servers: tuple[ServerKey, ...]


class LeaseWatch:
    """Remembers when each lease made progress last, by the clock of its server.

    That clock runs only while the server serves: time in which the server loads weights, is stale,
    rests or waits for a publish does not count.
    """

    def __init__(self, limit_s: float) -> None:
        """Makes a lease overdue when no attempt of it ended in `limit_s` seconds of serving."""
        self._limit_s = limit_s
        self._marks: dict[GroupId, _Mark] = {}

    def overdue(self, groups: Iterable[Group], served_s: Mapping[ServerKey, float]) -> Overdue:
        """Returns each overdue lease once, and servers that still run it `CANCEL_LIMIT_S` later.

        `served_s`: seconds that each server has served.
        """
        late, stuck, marks = [], [], {}
        for group in groups:
            holder, number = group.holder, group.num_leases
            if holder is None or holder not in served_s or not group.running:
                continue
            ended, now_s = tuple(sorted(group.attempts.items())), served_s[holder]
            mark = self._marks.get(group.group_id)
            if mark is None or (mark.number, mark.ended) != (number, ended):
                is_cancelled = mark is not None and mark.is_cancelled and mark.number == number
                mark = _Mark(number, ended, now_s, is_cancelled)
            elif mark.is_cancelled:
                if now_s - mark.served_s > CANCEL_LIMIT_S:
                    stuck.append(holder)
            elif now_s - mark.served_s > self._limit_s:
                late.append(group)
                mark = _Mark(number, ended, now_s, is_cancelled=True)
            marks[group.group_id] = mark
        self._marks = marks
        return Overdue(tuple(late), tuple(dict.fromkeys(stuck)))

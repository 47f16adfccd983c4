"""Leases that make no progress although their server serves: pure state, no clock, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.servers.server_states import ServerKey
from slipstream.protocol.types import GroupId

# Seconds of serving in which a server must end what it was told to end.
CANCEL_LIMIT_S = 60.0


@dataclass
class _Mark:
    # Which of its leases.
    number: int
    # Attempts that ended: when one more does, the lease has made progress.
    ended: tuple[tuple[int, int], ...]
    # What the server's clock showed then.
    served_s: float
    is_cancelled: bool = False


@dataclass(frozen=True)
class Overdue:
    """What is to be done about leases."""

    # They are to be taken back.
    groups: tuple[Group, ...]
    # They did not end what they were told to end.
    servers: tuple[ServerKey, ...]


class LeaseWatch:
    """Remembers when each lease made progress last, by the clock of its server.

    That clock runs only while the server serves: time in which it loads weights, is stale or waits
    for a publish is nobody's delay.
    """

    def __init__(self, limit_s: float) -> None:
        """A lease is overdue when no attempt ended in `limit_s` of serving."""
        self._limit_s = limit_s
        self._marks: dict[GroupId, _Mark] = {}

    def overdue(self, groups: Iterable[Group], served_s: Mapping[ServerKey, float]) -> Overdue:
        """Each lease once, and each server that then keeps it; `served_s` are the clocks."""
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

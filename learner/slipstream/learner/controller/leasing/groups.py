"""Leased groups, and who runs them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from slipstream.protocol.types import GroupId, Purpose, ServerId, Trajectory


class ServerKey(NamedTuple):
    """One life of one rollout server; a tuple, since a controller hashes dozens a trajectory."""

    server_id: ServerId
    epoch: int


@dataclass(eq=False)
class Group:
    """A leased, untrained group, or a task under evaluation."""

    group_id: GroupId
    environment: str
    task_index: int
    seed: int
    purpose: Purpose
    size: int
    deadline_step: int
    holder: ServerKey | None
    finished: dict[int, Trajectory] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    # The first attempt of the present lease, and the first that no closed lease has begun.
    first_attempt: int = 0
    unused_attempt: int = 0
    # How many times it was given to a server.
    num_leases: int = 1
    # Members that are missing and that the holder will not run again.
    ended: set[int] = field(default_factory=set)
    # Whether the holder has closed the lease: what it finished may still be on its way.
    closed: bool = False
    # By member: servers that were lost with it, and trajectories of it that were quarantined.
    setbacks: Counter[int] = field(default_factory=Counter)
    # When it was leased, by the clock of its scheduler; None: by an earlier controller.
    leased_s: float | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every member is back with a reward."""
        return len(self.finished) == self.size

    @property
    def missing(self) -> list[int]:
        """The members that are not back yet."""
        return [member for member in range(self.size) if member not in self.finished]

    @property
    def num_missing(self) -> int:
        """Number of members that are not back yet."""
        return self.size - len(self.finished)

    @property
    def num_running(self) -> int:
        """Number of members that its holder still runs, or is to run."""
        return len(self.running) if self.ended else self.num_missing

    @property
    def running(self) -> list[int]:
        """The members that its holder still runs, or is to run."""
        return [member for member in self.missing if member not in self.ended]

    def may_end(self, epoch: int, attempt: int) -> bool:
        """Whether this attempt by this life of a server ends a member: no other one is made."""
        if self.holder is None:
            return True
        return self.holder.epoch == epoch and attempt >= self.first_attempt

    @property
    def next_attempt(self) -> int:
        """The first attempt number that no holder has used."""
        return max(self.unused_attempt, max(self.attempts.values(), default=-1) + 1)

    def in_order(self) -> list[Trajectory]:
        """The trajectories by member."""
        return [self.finished[member] for member in sorted(self.finished)]


@dataclass(eq=False)
class ClosingLease:
    """A lease that is over while its server still ends the episodes."""

    environment: str
    holder: ServerKey
    members: set[int]

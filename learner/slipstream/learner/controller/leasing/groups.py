"""Leased groups, and who runs them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from slipstream.protocol.types import GroupId, Purpose, ServerId, Trajectory


@dataclass(frozen=True)
class ServerKey:
    """One life of one rollout server."""

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
    def running(self) -> list[int]:
        """The members that its holder still runs, or is to run."""
        return [member for member in self.missing if member not in self.ended]

    def may_end(self, epoch: int) -> bool:
        """Whether this life of a server may say that a member is over: no other one runs it."""
        return self.holder is None or self.holder.epoch == epoch

    @property
    def next_attempt(self) -> int:
        """The first attempt number that no holder has used."""
        return max(self.attempts.values(), default=-1) + 1

    def in_order(self) -> list[Trajectory]:
        """The trajectories by member."""
        return [self.finished[member] for member in sorted(self.finished)]


@dataclass(eq=False)
class ClosingLease:
    """A lease that is over while its server still ends the episodes."""

    environment: str
    holder: ServerKey
    members: set[int]

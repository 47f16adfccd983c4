"""The finished episodes that have not arrived, which keep their groups from other servers.

The module uses no clock and no I/O.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from slipstream.learner.controller.leasing.groups import Group


class Awaited:
    """Finished episodes that have not arrived, and servers that may hold some.

    No other server gets their groups, which would then be sampled twice. After a restart each
    server that held a group is awaited until it has joined again. What it names then, and what lies
    in the queue, is awaited until it arrives. A server that joins again without a restart of the
    controller names what its lost stream did not deliver.
    """

    def __init__(self, servers: Iterable[str] = ()) -> None:
        """Takes the names of the servers that may join again."""
        self._servers = set(servers)
        # By the server that holds them, or "" for the queue.
        self._sources: dict[str, _Undelivered] = {}
        # Number of trajectories in `_sources` by group.
        self._groups: Counter[str] = Counter()
        # Time of the first `look`.
        self._began_s: float | None = None

    def has(self, group: Group) -> bool:
        """Whether trajectories of the group's members may still arrive."""
        if group.awaits in self._servers:
            return True
        return group.group_id in self._groups

    def joined(self, server: str, undelivered: Iterable[str]) -> None:
        """Notes that a server has joined, and the ids of the trajectories that it holds."""
        self._servers.discard(server)
        # What it named before, and names no more, is lost or has arrived.
        self._forget(server)
        self._add(server, undelivered)

    def hold(self, trajectory_ids: Iterable[str]) -> None:
        """Notes the ids of trajectories that lie in the queue."""
        self._add("", trajectory_ids)

    def arrived(self, trajectory_id: str) -> None:
        """Notes that a trajectory was delivered."""
        for source in list(self._sources):
            undelivered = self._sources[source]
            if trajectory_id not in undelivered.trajectory_ids:
                continue
            undelivered.trajectory_ids.discard(trajectory_id)
            undelivered.since_s = None
            self._count([trajectory_id], -1)
            if not undelivered.trajectory_ids:
                del self._sources[source]

    def look(self, now_s: float, limit_s: float) -> None:
        """Stops awaiting servers after `limit_s`, and trajectories once they stop arriving.

        The first call starts the limit for servers. The trajectories of a source are awaited until
        none of them has arrived for `limit_s` seconds, so the wait for a long queue is longer than
        the wait for servers.
        """
        if self._began_s is None:
            self._began_s = now_s
        if now_s > self._began_s + limit_s:
            self._servers.clear()
        for source in list(self._sources):
            undelivered = self._sources[source]
            if undelivered.since_s is None:
                undelivered.since_s = now_s
            if now_s > undelivered.since_s + limit_s:
                self._forget(source)

    def _add(self, source: str, trajectory_ids: Iterable[str]) -> None:
        undelivered = self._sources.setdefault(source, _Undelivered())
        new = set(trajectory_ids)
        new -= undelivered.trajectory_ids
        if new:
            undelivered.trajectory_ids |= new
            undelivered.since_s = None
            self._count(new, 1)

    def _forget(self, source: str) -> None:
        earlier = self._sources.pop(source, None)
        if earlier is not None:
            self._count(earlier.trajectory_ids, -1)

    def _count(self, trajectory_ids: Iterable[str], number: int) -> None:
        for trajectory_id in trajectory_ids:
            group_id, *_ = trajectory_id.split(".")
            self._groups[group_id] += number
            if not self._groups[group_id]:
                del self._groups[group_id]


@dataclass
class _Undelivered:
    trajectory_ids: set[str] = field(default_factory=set)
    # Time of the first `look` after the trajectories were named, or after one of them arrived.
    since_s: float | None = None

"""Which groups go to which servers, from one look at the state: pure but for the book it changes.

What a pass counts once it keeps true while it grants. It grants what a scan of all servers and all
groups before every single lease would grant.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.leasing.lease_waits import LeaseWait
from slipstream.learner.controller.leasing.leases import LeaseBook
from slipstream.learner.controller.servers.fleet import ServerSession
from slipstream.learner.controller.servers.server_states import ServerKey
from slipstream.learner.controller.tasks.environments import EnvironmentBook, EnvironmentEntry


@dataclass(frozen=True)
class Grant:
    """A group for a server."""

    session: ServerSession
    group: Group
    # Its number among the tasks of its environment; below 0: the task was leased before.
    number: int = -1
    # The group in whose place it starts.
    replaces: str = ""


@dataclass(frozen=True)
class Room:
    """Number of episodes that a serving server may be given."""

    session: ServerSession
    episodes: int

    @property
    def served_step(self) -> int:
        """The version that it serves."""
        assert self.session.version is not None
        return self.session.version.step


def rooms(
    sessions: Sequence[ServerSession], book: LeaseBook, reserved: Mapping[ServerKey, int]
) -> list[Room]:
    """The rooms of serving servers, largest first; `reserved` episodes are not for training."""
    taken = book.episodes_by_holder()
    found = [
        Room(s, s.hello.max_episodes - taken[s.key] - reserved.get(s.key, 0)) for s in sessions
    ]
    return sorted(found, key=lambda room: room.episodes, reverse=True)


def place_orphans(
    book: LeaseBook, environments: EnvironmentBook, by_room: Sequence[Room], limit: int
) -> list[Grant]:
    """Gives at most `limit` interrupted groups to servers that may finish them."""
    # Orphans of one kind differ for no server; each has its place in the order of the leases.
    kinds: dict[tuple[str, int, int], deque[tuple[int, Group]]] = {}
    for place, group in enumerate(book.orphans()):
        kind = (group.environment, group.deadline_step, group.num_missing)
        kinds.setdefault(kind, deque()).append((place, group))
    granted: list[Grant] = []
    smallest = min((episodes for *_, episodes in kinds), default=0)
    for room in by_room if kinds else ():
        if room.episodes < smallest:
            break
        suitable = [
            (episodes, queue)
            for (environment, _, episodes), queue in kinds.items()
            if queue
            and runs_on(environments, environment, room.session.key)
            and book.may_reassign(queue[0][1], room.served_step)
        ]
        left = room.episodes
        while fitting := [queue for episodes, queue in suitable if queue and episodes <= left]:
            if len(granted) == limit:
                return granted
            _, group = min(fitting, key=lambda queue: queue[0][0]).popleft()
            left -= group.num_missing
            book.reassign(group, room.session.key)
            granted.append(Grant(room.session, group))
    return granted


def give_up_stranded(
    book: LeaseBook,
    environments: EnvironmentBook,
    by_room: Sequence[Room],
    limit: int,
    give_up: Callable[[Group], None],
) -> int:
    """Gives up at most `limit` orphans that must start afresh; their number."""
    able: dict[str, set[int]] = {}
    given_up, due = 0, None
    for group in book.orphans():
        name = group.environment
        if name not in able:
            able[name] = {
                room.served_step
                for room in by_room
                if runs_on(environments, name, room.session.key)
            }
        if not book.is_stranded(group, able[name]):
            continue
        if due is None:
            due = {each.group_id for each in book.due()}
        if group.group_id in due:
            give_up(group)
            given_up, due = given_up + 1, None
            if given_up == limit:
                break
    return given_up


def runs_on(environments: EnvironmentBook, name: str, key: ServerKey) -> bool:
    """Whether a server can run episodes of an environment now."""
    entry = environments.entries.get(name)
    return entry is not None and entry.runs_on(key)


class NewLeases:
    """Grants new groups one after the other: `next` until it says why there is none."""

    def __init__(
        self,
        book: LeaseBook,
        environments: EnvironmentBook,
        by_room: Sequence[Room],
        again: list[Group],
        *,
        num_groups: float,
        num_episodes: int,
    ) -> None:
        """At most `num_groups`, and `num_episodes` that the queue has room for.

        A group of `again` was given up: its task is leased before any new one, and leaves the list.
        """
        self._book = book
        self._environments = environments
        self._again = again
        self._num_groups, self._num_episodes = num_groups, num_episodes
        self._num_servers = len(by_room)
        # The largest room first, and the first of several that are as large.
        self._heap = [(-room.episodes, place, room) for place, room in enumerate(by_room)]
        self._episodes = book.episodes_by_environment()
        # Versions of the servers that have room and were refused: nothing in a pass changes that.
        self._refused: set[int] = set()
        # Those of them of which the staleness rule allows no more.
        self._full: set[int] = set()

    def next(self) -> Grant | LeaseWait:
        """A new group; or why there is none."""
        if not self._num_servers:
            return LeaseWait.SERVER
        if self._num_groups < 1:
            return LeaseWait.PACE
        size = self._book.group_size
        while self._heap and -self._heap[0][0] >= size:
            free, place, room = self._heap[0]
            key, step = room.session.key, room.served_step
            may_lease = self._may_lease(step)
            old = self._first_again(key) if may_lease else None
            entry = self._environments.next_for(key, self._episodes, size) if may_lease else None
            if old is None and entry is None:
                self._refused.add(step)
                heapq.heappop(self._heap)
                continue
            if size > self._num_episodes:
                return LeaseWait.QUEUE
            if old is not None:
                grant = self._lease_again(room, old)
            else:
                assert entry is not None
                grant = self._lease_new(room, entry)
            heapq.heapreplace(self._heap, (free + size, place, room))
            self._num_groups -= 1
            self._num_episodes -= size
            self._episodes[grant.group.environment] += size
            return grant
        return self._why_none()

    def _why_none(self) -> LeaseWait:
        if any(self._may_lease(step) for step in self._refused):
            return LeaseWait.ENVIRONMENT
        return LeaseWait.STALENESS if self._refused else LeaseWait.SLOTS

    def _may_lease(self, step: int) -> bool:
        if step not in self._full and not self._book.may_lease(step):
            self._full.add(step)
        return step not in self._full

    def _first_again(self, key: ServerKey) -> Group | None:
        """The first task that is to start afresh and can on this server."""
        book = self._environments
        for group in self._again:
            entry = book.entries.get(group.environment)
            if entry is not None and book.may_run(entry, key, self._episodes, group.size):
                return group
        return None

    def _lease_again(self, room: Room, old: Group) -> Grant:
        self._again.remove(old)
        group = self._book.lease(
            old.environment, old.task_index, old.seed, room.session.key, room.served_step
        )
        return Grant(room.session, group, replaces=old.group_id)

    def _lease_new(self, room: Room, turn: EnvironmentEntry) -> Grant:
        number = turn.next_number
        task_index, seed = self._environments.next_task(turn)
        turn.groups_leased += 1
        group = self._book.lease(
            turn.spec.name, task_index, seed, room.session.key, room.served_step
        )
        return Grant(room.session, group, number)

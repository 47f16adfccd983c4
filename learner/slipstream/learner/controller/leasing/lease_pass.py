"""A pass over servers and groups that grants leases; it does no I/O.

A pass counts free slots and episodes once and updates these counts with each grant. The result is
the same as if all servers and all groups were scanned before every single lease.
"""

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from slipstream.core.types import GroupId
from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.leasing.leases import LeaseBook
from slipstream.learner.controller.servers.session import ServerKey, ServerSession
from slipstream.learner.controller.tasks import EnvironmentBook


class LeaseWait(Enum):
    """What the next lease waits for, as text for users.

    Each server is checked in this order; the reason is the last check that any server reached.
    """

    NOTHING = ""
    SERVER = "a rollout server that serves"
    SLOTS = "a rollout server with room for a group"
    STALENESS = "a step: more groups could not all be trained within max_staleness"
    ENVIRONMENT = "an environment that is ready and has room for a group"
    QUEUE = "room in the queue (queue.max_bytes)"


def batch_wait(book: LeaseBook) -> str:
    """Returns the groups for which the next batch waits, as a text for users."""
    due = book.due()
    if due:
        members = sum(len(group.missing) for group in due)
        return (
            f"{members} episodes that step {book.step + 1} cannot leave for later, "
            f"the first of group {due[0].group_id}"
        )
    training = book.training_groups()
    if not training:
        return (
            "a rollout server that serves, with an environment that is loaded, of the settings or "
            "of a client (slipstream submit)"
        )
    complete = sum(group.is_complete for group in training)
    return (
        f"groups for step {book.step + 1}: {complete} of "
        f"{book.groups_per_step} are complete, {len(training)} are leased"
    )


@dataclass(frozen=True)
class Grant:
    """The lease of a group to a server."""

    session: ServerSession
    group: Group
    # Number of the group in its environment, or -1 if the task was leased before.
    number: int = -1
    # The abandoned group whose task is leased again. None for a new task.
    replaces: GroupId | None = None


@dataclass(frozen=True)
class ServerRoom:
    """A serving server and the number of episodes for which it has free slots."""

    session: ServerSession
    episodes: int

    @property
    def served_step(self) -> int:
        """The training step of the version that the server serves."""
        assert self.session.version is not None
        return self.session.version.step


def rooms(
    sessions: Sequence[ServerSession], book: LeaseBook, reserved: Mapping[ServerKey, int]
) -> list[ServerRoom]:
    """Returns the free episode slots of `sessions`, less those in `reserved`, most slots first."""
    taken = book.episodes_by_holder()
    found = [
        ServerRoom(s, s.hello.max_episodes - taken[s.key] - reserved.get(s.key, 0))
        for s in sessions
    ]
    return sorted(found, key=lambda room: room.episodes, reverse=True)


def place_orphans(
    book: LeaseBook, environments: EnvironmentBook, by_room: Sequence[ServerRoom], limit: int
) -> list[Grant]:
    """Leases at most `limit` orphans (groups without a holder) to servers that may finish them."""
    # Orphans of one kind suit the same servers; each keeps its place in the order of the leases.
    kinds: dict[tuple[str, int, int, ServerKey | None], deque[tuple[int, Group]]] = {}
    for place, group in enumerate(book.orphans()):
        kind = (group.environment, group.deadline_step, group.num_missing, group.shunned)
        kinds.setdefault(kind, deque()).append((place, group))
    granted: list[Grant] = []
    smallest = min((episodes for _, _, episodes, _ in kinds), default=0)

    def suits(room: ServerRoom, environment: str, group: Group) -> bool:
        may_run = runs_on(environments, environment, room.session.key)
        return may_run and book.may_reassign(group, room.served_step)

    for room in by_room if kinds else ():
        if room.episodes < smallest:
            break
        key = room.session.key
        suitable = [
            (episodes, queue)
            for (environment, _, episodes, shunned), queue in kinds.items()
            if queue
            and suits(room, environment, queue[0][1])
            # The server that has failed the group gets it again only if no other may.
            and not (
                key == shunned
                and any(
                    other.session.key != shunned and suits(other, environment, queue[0][1])
                    for other in by_room
                )
            )
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


def abandon_stranded(
    book: LeaseBook,
    environments: EnvironmentBook,
    by_room: Sequence[ServerRoom],
    limit: int,
    abandon: Callable[[Group], None],
) -> int:
    """Abandons orphans that the next batch needs and no present server may finish.

    Abandons at most `limit` orphans and returns their number. Their tasks are then leased again, as
    new groups.
    """
    able: dict[str, set[int]] = {}
    num_abandoned, due = 0, None
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
            abandon(group)
            num_abandoned, due = num_abandoned + 1, None
            if num_abandoned == limit:
                break
    return num_abandoned


def runs_on(environments: EnvironmentBook, name: str, key: ServerKey) -> bool:
    """Whether a server can run episodes of an environment now."""
    entry = environments.entries.get(name)
    return entry is not None and entry.runs_on(key)


def lease_new(
    book: LeaseBook,
    environments: EnvironmentBook,
    by_room: Sequence[ServerRoom],
    record: Callable[[Grant], None],
    *,
    num_episodes: int,
    limit: int,
) -> tuple[list[Grant], LeaseWait | None]:
    """Leases at most `limit` new groups; the queue has room for `num_episodes` episodes.

    Returns the grants, and why there is not another one, or None at the limit. `record` journals
    each grant before the next one is chosen.
    """
    if not by_room:
        return [], LeaseWait.SERVER
    granted: list[Grant] = []
    size, episodes = book.group_size, book.episodes_by_environment()
    # Heap with the largest room first; among equal rooms the first in `by_room`.
    heap = [(-room.episodes, place, room) for place, room in enumerate(by_room)]
    # Versions of servers that have room and were refused; a refusal holds for the whole pass.
    refused: set[int] = set()
    # Versions for which the staleness rule allows no more groups.
    full: set[int] = set()

    def may_lease(step: int) -> bool:
        if step not in full and not book.may_lease(step):
            full.add(step)
        return step not in full

    def may_run(group: Group, key: ServerKey) -> bool:
        entry = environments.entries.get(group.environment)
        return entry is not None and environments.may_run(entry, key, episodes, group.size)

    while heap and -heap[0][0] >= size:
        if len(granted) == limit:
            return granted, None
        free, place, room = heap[0]
        key, step = room.session.key, room.served_step
        old = entry = None
        if may_lease(step):
            old = next((group for group in book.again if may_run(group, key)), None)
            entry = environments.next_for(key, episodes, size)
        if old is None and entry is None:
            refused.add(step)
            heapq.heappop(heap)
            continue
        if size > num_episodes:
            return granted, LeaseWait.QUEUE
        if old is not None:
            book.again.remove(old)
            group = book.lease(old.environment, old.task_index, old.seed, key, step)
            grant = Grant(room.session, group, replaces=old.group_id)
        else:
            assert entry is not None
            task_index, seed = environments.next_task(entry)
            group = book.lease(entry.spec.name, task_index, seed, key, step)
            grant = Grant(room.session, group, entry.counts.next_number)
        record(grant)
        granted.append(grant)
        heapq.heapreplace(heap, (free + size, place, room))
        num_episodes -= size
        episodes[group.environment] += size
    if any(may_lease(step) for step in refused):
        return granted, LeaseWait.ENVIRONMENT
    return granted, LeaseWait.STALENESS if refused else LeaseWait.SLOTS

"""Decides which server starts which group, and when.

A pass counts free slots and episodes once and updates these counts with each grant. The result is
the same as if all servers and all groups were scanned before every single lease.

Consumes: the state of the lease book, the fleet and the environments. Produces: leases. Waits for:
the run's signal, the journal. Unblocked by: a server that becomes ready, an arrived trajectory, a
new version; a completed write of the journal.
"""

import asyncio
import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from slipstream.core.configuration.config_file import largest_trajectory_bytes
from slipstream.core.environment_rules import temperatures_of
from slipstream.core.types import GroupId, Purpose
from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.leasing.leases import LeaseBook
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.journal import Journal
from slipstream.learner.controller.records.ledger import AccountedReceiver, TokenLedger
from slipstream.learner.controller.records.state import RunState
from slipstream.learner.controller.run import ControlledRun, Stopwatch
from slipstream.learner.controller.servers.fleet import Fleet
from slipstream.learner.controller.servers.session import ServerKey, ServerSession
from slipstream.learner.controller.tasks import EnvironmentBook
from slipstream.v1 import environment_pb2, fleet_pb2, trajectory_pb2


@dataclass(frozen=True)
class Books:
    """The leases, environments, servers, journal with its state, tokens and queue of a run.

    A run has one object of each, which several parts of the controller share.
    """

    leases: LeaseBook
    environments: EnvironmentBook
    fleet: Fleet
    journal: Journal
    # The state that only appending to the journal changes.
    state: RunState
    ledger: TokenLedger
    queue: AccountedReceiver


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


# The lease of a group to a server.
Grant: TypeAlias = tuple[ServerSession, Group]

RECHECK_S = 1.0
# Bound that lets the event loop serve other tasks between two passes.
MAX_GRANTS_IN_A_PASS = 64


class Scheduler:
    """Leases groups to all serving servers, as far as staleness and the queue allow."""

    def __init__(self, run: ControlledRun, books: Books, abandon: Callable[[Group], None]) -> None:
        self._run = run
        self._progress = run.progress
        self._config = run.config
        self._temperatures = temperatures_of(self._config)
        self._largest_bytes = largest_trajectory_bytes(self._config)
        self._book = books.leases
        self._environments = books.environments
        self._fleet = books.fleet
        self._journal = books.journal
        self._queue = books.queue
        self._abandon = abandon
        self._wait = LeaseWait.NOTHING
        self._waits = {wait: Stopwatch() for wait in LeaseWait}
        # Number of episodes that an evaluation is about to start on each server; no training
        # lease takes their slots.
        self.reserved: dict[ServerKey, int] = {}

    async def lease_forever(self) -> None:
        """Grants all allowed leases after each change of the state, until the task is cancelled.

        Tries again after `RECHECK_S` seconds without a change. A client's own loop has no leases
        of tasks.
        """
        client_loop = self._config.controller.client_loop
        while True:
            if self._progress.is_over or client_loop or not self._progress.has_trainer:
                self._note(LeaseWait.NOTHING)
            elif (durable := self.lease_all()) is not None:
                # The state may have changed meanwhile. Streams wait for `durable` too.
                await asyncio.shield(durable)
                continue
            await self._run.signal.changes(RECHECK_S)

    def lease_all(self, limit: int = MAX_GRANTS_IN_A_PASS) -> asyncio.Future[None] | None:
        """Grants at most `limit` leases, which are sent once their records are durable.

        Abandoned groups also count towards `limit`. Returns a future that is done when the records
        are durable, or None if no lease was granted and no group abandoned.
        """
        granted: list[Grant] = []
        num_abandoned = 0
        if self._book.orphans():
            rooms = self._rooms()
            num_abandoned = self._abandon_torn(limit)
            granted = self._place_orphans(rooms, limit - num_abandoned)
            if num_left := limit - len(granted) - num_abandoned:
                num_abandoned += self._abandon_stranded(rooms, num_left)
        if len(granted) + num_abandoned < limit:
            granted += self._lease_new(limit - len(granted))
        if not granted and not num_abandoned:
            return None
        durable = self._journal.durable()
        for session, group in granted:
            message = fleet_pb2.ControllerMessage(lease=self.lease_message(group))
            session.send(message, after=durable)
        return durable

    def _record(
        self,
        session: ServerSession,
        group: Group,
        number: int = -1,
        replaces: GroupId | None = None,
    ) -> Grant:
        """Journals a lease and returns it.

        `number` is that of the group in its environment, or -1 if the task was leased before.
        `replaces` is the abandoned group whose task is leased again, or None for a new task.
        """
        group.leased_s = time.monotonic()
        self._journal.append(
            kinds.GroupLease(
                group=group.group_id,
                environment=group.environment,
                task=group.task_index,
                number=number,
                seed=group.seed,
                deadline=group.deadline_step,
                server=session.name,
                epoch=session.key.epoch,
                members=list(group.missing),
                replaces=replaces,
            )
        )
        return session, group

    def _rooms(self) -> list[ServerRoom]:
        """Returns the free episode slots of all serving servers, without `reserved`, most first."""
        episodes = self._book.episodes_by_holder()
        rooms = [
            ServerRoom(s, s.hello.max_episodes - episodes[s.key] - self.reserved.get(s.key, 0))
            for s in self._fleet.serving()
        ]
        return sorted(rooms, key=lambda room: room.episodes, reverse=True)

    def _runs_on(self, environment: str, key: ServerKey) -> bool:
        """Whether a server can run episodes of an environment now."""
        entry = self._environments.entries.get(environment)
        return entry is not None and entry.runs_on(key)

    def _place_orphans(self, rooms: Sequence[ServerRoom], limit: int) -> list[Grant]:
        """Leases at most `limit` groups without a holder to servers that may finish them."""
        # Orphans of one kind suit the same servers; each keeps its place among all leases.
        alike: dict[tuple[str, int, int, ServerKey | None], deque[tuple[int, Group]]] = {}
        for place, group in enumerate(self._book.orphans()):
            kind = (group.environment, group.deadline_step, group.num_missing, group.shunned)
            alike.setdefault(kind, deque()).append((place, group))
        granted: list[Grant] = []
        smallest = min((episodes for _, _, episodes, _ in alike), default=0)

        def suits(room: ServerRoom, group: Group) -> bool:
            may_run = self._runs_on(group.environment, room.session.key)
            return may_run and self._book.may_reassign(group, room.served_step)

        for room in rooms if alike else ():
            if room.episodes < smallest:
                break
            key = room.session.key
            suitable = [
                (episodes, queue)
                for (_, _, episodes, shunned), queue in alike.items()
                if queue
                and suits(room, queue[0][1])
                # The server that has failed the group gets it again only if no other may.
                and not (
                    key == shunned
                    and any(
                        other.session.key != shunned and suits(other, queue[0][1])
                        for other in rooms
                    )
                )
            ]
            free_episodes = room.episodes
            while fitting := [
                queue for episodes, queue in suitable if queue and episodes <= free_episodes
            ]:
                if len(granted) == limit:
                    return granted
                _, group = min(fitting, key=lambda queue: queue[0][0]).popleft()
                free_episodes -= group.num_missing
                self._book.reassign(group, key)
                granted.append(self._record(room.session, group))
        return granted

    def _abandon_torn(self, limit: int) -> int:
        """Abandons at most `limit` groups that lack members with which others were compared.

        Returns their number. Their tasks are then leased again, as new groups.
        """
        torn = self._book.torn()[:limit]
        for group in torn:
            self._abandon(group)
            self._book.again.append(group)
            self._run.events.add(
                f"group {group.group_id} is leased afresh: {len(group.missing)} of its episodes "
                "are lost, and judge_group compared the others with them"
            )
        return len(torn)

    def _abandon_stranded(self, rooms: Sequence[ServerRoom], limit: int) -> int:
        """Abandons orphans that the next batch needs and no present server may finish.

        Abandons at most `limit` orphans and returns their number. Their tasks are then leased
        again, as new groups.
        """
        able: dict[str, set[int]] = {}
        num_abandoned = 0
        due = None
        for group in self._book.orphans():
            name = group.environment
            if name not in able:
                able[name] = {r.served_step for r in rooms if self._runs_on(name, r.session.key)}
            if not able[name] or any(self._book.may_reassign(group, s) for s in able[name]):
                continue
            if due is None:
                due = {due_group.group_id for due_group in self._book.due()}
            if group.group_id in due:
                self._abandon(group)
                self._book.again.append(group)
                self._run.events.add(
                    f"group {group.group_id} is leased afresh: step {self._book.step + 1} waits "
                    f"for it, and no server can finish it by step {group.deadline_step + 1}"
                )
                num_abandoned = num_abandoned + 1
                due = None
                if num_abandoned == limit:
                    break
        return num_abandoned

    def _lease_new(self, limit: int) -> list[Grant]:
        """Leases at most `limit` new groups and notes why no further lease is granted."""
        versions = self._fleet.versions
        if versions and not self._book.may_lease(max(version.step for version in versions)):
            # The most frequent case comes first, and needs no look at the servers.
            self._note(LeaseWait.STALENESS)
            return []
        granted, wait = self._fill_rooms(self._rooms(), limit)
        if wait is not None:
            self._note(wait)
        return granted

    def _fill_rooms(
        self, rooms: Sequence[ServerRoom], limit: int
    ) -> tuple[list[Grant], LeaseWait | None]:
        """Leases at most `limit` new groups to servers with room for them.

        Returns the grants, and why there is not another one, or None at the limit. Each grant is
        journaled before the next one is chosen.
        """
        if not rooms:
            return [], LeaseWait.SERVER
        book = self._book
        environments = self._environments
        granted: list[Grant] = []
        sizes = book.group_sizes
        episodes = book.episodes_by_environment()
        # The evaluation episodes that would start now if the queue had room.
        evaluated_soon = sum(
            min(waiting, session.hello.max_episodes)
            for key, waiting in self.reserved.items()
            if (session := self._fleet.find(key)) is not None
        )
        num_episodes = self.free_episodes - evaluated_soon
        # Heap with the largest room first; among equal rooms the first in `rooms`.
        heap = [(-room.episodes, place, room) for place, room in enumerate(rooms)]
        # Versions of servers that have room and were refused; a refusal holds for the whole pass.
        refused: set[int] = set()

        def may_run(group: Group, key: ServerKey) -> bool:
            entry = environments.entries.get(group.environment)
            return entry is not None and environments.may_run(entry, key, episodes, group.size)

        while heap and -heap[0][0] >= sizes.smallest:
            if len(granted) == limit:
                return granted, None
            free, place, room = heap[0]
            session = room.session
            key = room.session.key
            step = room.served_step
            old = entry = None
            if book.may_lease(step):
                old = next((group for group in book.again if may_run(group, key)), None)
                entry = environments.next_for(key, episodes, sizes)
            if old is None and entry is None:
                refused.add(step)
                heapq.heappop(heap)
                continue
            name = entry.spec.name if entry is not None else ""
            size = sizes.of(name if old is None else old.environment)
            if size > -free:
                # The server keeps its room until the next pass: smaller groups would take it again
                # and again.
                heapq.heappop(heap)
                continue
            if size > num_episodes:
                return granted, LeaseWait.QUEUE
            if old is not None:
                book.again.remove(old)
                group = book.lease(old.environment, old.task_index, old.seed, key, step)
                grant = self._record(session, group, replaces=old.group_id)
            else:
                assert entry is not None
                task_index, seed = environments.next_task(entry)
                group = book.lease(entry.spec.name, task_index, seed, key, step)
                grant = self._record(session, group, entry.counts.next_number)
            granted.append(grant)
            heapq.heapreplace(heap, (free + size, place, room))
            num_episodes -= size
            episodes[group.environment] += size
        if any(book.may_lease(step) for step in refused):
            return granted, LeaseWait.ENVIRONMENT
        return granted, LeaseWait.STALENESS if refused else LeaseWait.SLOTS

    def lease_message(self, group: Group) -> fleet_pb2.Lease:
        """Returns the message that leases the missing members of `group` to its holder."""
        spec = environment_pb2.EnvironmentSpec()
        prompt = group.prompt
        if prompt is None:
            spec = self._environments.entries[group.environment].spec
        return fleet_pb2.Lease(
            group_id=group.group_id,
            environment=group.environment,
            task_index=group.task_index,
            seed=group.seed,
            members=group.missing,
            deadline_step=group.deadline_step,
            purpose=trajectory_pb2.EpisodePurpose.Name(group.purpose.value),
            sampling=self._sampling(group) if prompt is None else prompt.sampling,
            max_attempts=group.first_attempt + self._config.controller.max_attempts,
            first_attempt=group.first_attempt,
            timeout_s=spec.timeout_s,
            chat_template_kwargs_json=spec.chat_template_kwargs_json,
            prompt_token_ids=b"" if prompt is None else prompt.token_ids,
            has_reference=self._config.needs_reference,
        )

    def send_evaluation(self, session: ServerSession, groups: Sequence[Group]) -> None:
        """Sends leases of evaluation episodes, once their records are durable.

        After a restart the evaluation round begins again. Without the records, the controller would
        not know the server of trajectories that still arrive, and would quarantine them.
        """
        for group in groups:
            self._journal.append(
                kinds.EvaluationLease(
                    group=group.group_id,
                    environment=group.environment,
                    task=group.task_index,
                    version=group.deadline_step,
                    server=session.name,
                    epoch=session.key.epoch,
                )
            )
        durable = self._journal.durable()
        for group in groups:
            message = fleet_pb2.ControllerMessage(lease=self.lease_message(group))
            session.send(message, after=durable)

    def _sampling(self, group: Group) -> fleet_pb2.SamplingSettings:
        settings = self._config.sampling.to_pb()
        settings.ignore_eos = self._config.debug.ignore_eos
        settings.adapter = self._environments.entries[group.environment].spec.adapter
        settings.temperature = self._temperatures.get(group.environment, settings.temperature)
        if group.purpose is Purpose.EVALUATION:
            evaluation = next(e for e in self._config.evaluations if e.name == group.environment)
            settings.temperature = evaluation.temperature
            if evaluation.top_p is not None:
                settings.top_p = evaluation.top_p
            if evaluation.max_reply_tokens is not None:
                settings.max_reply_tokens = evaluation.max_reply_tokens
        return settings

    @property
    def free_episodes(self) -> int:
        """The number of episodes beyond the promised ones that fit into the queue."""
        return self._free_bytes() // self._largest_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the queue that are occupied, or reserved for leased episodes."""
        return self._config.queue.max_bytes - self._free_bytes()

    @property
    def lease_wait(self) -> str:
        """The reason why the next lease waits, as text; "" if no lease is wanted."""
        return self._wait.value

    def waited_s(self) -> dict[str, float]:
        """Returns the seconds in which the next lease has waited since the start, by reason."""
        now_s = time.monotonic()
        return {wait.name.lower(): watch.total_s(now_s) for wait, watch in self._waits.items()}

    def _free_bytes(self) -> int:
        """Returns the unreserved bytes of the queue; below 0 while failed attempts' ones wait."""
        reserved = self._book.promised_episodes * self._largest_bytes
        return self._config.queue.max_bytes - self._queue.waiting_bytes - reserved

    def _note(self, wait: LeaseWait) -> None:
        self._wait = wait
        now_s = time.monotonic()
        for reason, watch in self._waits.items():
            watch.note(now_s, running=reason is wait)

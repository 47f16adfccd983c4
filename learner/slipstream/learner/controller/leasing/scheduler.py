"""Decides which server starts which group, and when.

Consumes: the state of the lease book, the fleet and the environments. Produces: leases. Waits for:
the run's signal, the journal. Unblocked by: a server that becomes ready, an arrived trajectory, a
new version; a completed write of the journal.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.core import staleness
from slipstream.core.configuration.config_file import largest_trajectory_bytes
from slipstream.core.types import Purpose
from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.leasing.lease_pass import (
    Grant,
    LeaseWait,
    abandon_stranded,
    lease_new,
    place_orphans,
    rooms,
)
from slipstream.learner.controller.leasing.leases import LeaseBook
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.journal import Journal
from slipstream.learner.controller.records.ledger import AccountedReceiver, Endings, TokenLedger
from slipstream.learner.controller.records.state import RunState
from slipstream.learner.controller.run import Run, Stopwatch
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
    # What only appending to the journal changes.
    state: RunState
    ledger: TokenLedger
    queue: AccountedReceiver
    endings: Endings


RECHECK_S = 1.0
# Bound that lets the event loop serve other tasks between two passes.
MAX_GRANTS_IN_A_PASS = 64


class Scheduler:
    """Leases groups to all serving servers, as far as staleness and the queue allow."""

    def __init__(self, run: Run, books: Books, abandon: Callable[[Group], None]) -> None:
        self._run, self._progress = run, run.progress
        self._config = run.config
        self._largest_bytes = largest_trajectory_bytes(self._config)
        self._book, self._environments = books.leases, books.environments
        self._fleet, self._journal, self._queue = books.fleet, books.journal, books.queue
        self._abandon = abandon
        self._wait = LeaseWait.NOTHING
        self._waits = {wait: Stopwatch() for wait in LeaseWait}
        # Number of episodes that an evaluation is about to start on each server; no training
        # lease takes their slots.
        self.reserved: dict[ServerKey, int] = {}

    async def lease_forever(self, *, recheck_s: float = RECHECK_S) -> None:
        """Grants all allowed leases after each change of the state, until the task is cancelled.

        Tries again after `recheck_s` seconds without a change. A client's own loop has no leases
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
            await self._run.signal.changes(recheck_s)

    def lease_all(self, limit: int = MAX_GRANTS_IN_A_PASS) -> asyncio.Future[None] | None:
        """Grants at most `limit` leases, which are sent once their records are durable.

        Abandoned groups also count towards `limit`. Returns a future that is done when the records
        are durable, or None if no lease was granted and no group abandoned.
        """
        granted: list[Grant] = []
        num_abandoned = 0
        if self._book.orphans():
            by_room = rooms(self._fleet.serving(), self._book, self.reserved)
            granted = place_orphans(self._book, self._environments, by_room, limit)
            for grant in granted:
                self._record(grant)
            if left := limit - len(granted):
                num_abandoned = abandon_stranded(
                    self._book, self._environments, by_room, left, self._start_afresh
                )
        if len(granted) + num_abandoned < limit:
            granted += self._lease_new(limit - len(granted))
        if not granted and not num_abandoned:
            return None
        durable = self._journal.durable()
        for grant in granted:
            message = fleet_pb2.ControllerMessage(lease=self.lease_message(grant.group))
            grant.session.send(message, after=durable)
        return durable

    def _record(self, grant: Grant) -> None:
        group, session = grant.group, grant.session
        group.leased_s = time.monotonic()
        self._journal.append(
            kinds.Lease(
                group=group.group_id,
                environment=group.environment,
                task=group.task_index,
                number=grant.number,
                seed=group.seed,
                deadline=group.deadline_step,
                server=session.name,
                epoch=session.key.epoch,
                members=list(group.missing),
                replaces=grant.replaces,
            )
        )

    def _start_afresh(self, group: Group) -> None:
        self._abandon(group)
        self._book.again.append(group)
        self._run.events.add(
            f"group {group.group_id} is leased afresh: step {self._book.step + 1} waits "
            f"for it, and no server can finish it by step {group.deadline_step + 1}"
        )

    def _lease_new(self, limit: int) -> list[Grant]:
        """Leases at most `limit` new groups and notes why no further lease is granted."""
        versions = self._fleet.versions
        if versions and not self._book.may_lease(max(version.step for version in versions)):
            # This is the most frequent case, and needs no look at the servers.
            self._note(LeaseWait.STALENESS)
            return []
        by_room = rooms(self._fleet.serving(), self._book, self.reserved)
        # The evaluation episodes that would start now if the queue had room.
        evaluated_soon = sum(
            min(waiting, session.hello.max_episodes)
            for key, waiting in self.reserved.items()
            if (session := self._fleet.find(key)) is not None
        )
        room = self.free_episodes - evaluated_soon
        granted, wait = lease_new(
            self._book, self._environments, by_room, self._record, num_episodes=room, limit=limit
        )
        if wait is not None:
            self._note(wait)
        return granted

    def lease_message(self, group: Group) -> fleet_pb2.Lease:
        """Returns the message that leases the missing members of `group` to its holder."""
        spec, prompt = environment_pb2.EnvironmentSpec(), group.prompt
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
        if group.purpose is Purpose.EVALUATION:
            own = next(e for e in self._config.evaluations if e.name == group.environment)
            settings.temperature = own.temperature
            if own.top_p is not None:
                settings.top_p = own.top_p
            if own.max_reply_tokens is not None:
                settings.max_reply_tokens = own.max_reply_tokens
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
        limit, waiting = self._config.queue.max_bytes, self._queue.waiting_bytes
        promised = self._book.promised_episodes
        return staleness.free_bytes(limit, waiting, promised, self._largest_bytes)

    def _note(self, wait: LeaseWait) -> None:
        self._wait = wait
        now_s = time.monotonic()
        for each, watch in self._waits.items():
            watch.note(now_s, running=each is wait)

"""Leases: which server starts which group now. Also the watch over the whole run.

Consumes: the state of the lease book, the fleet and the environments. Produces: leases.
Waits for: the run's signal. Unblocked by: a server that serves, a trajectory that came back, a new
version.
"""

from __future__ import annotations

import asyncio
import json
import time

from slipstream.learner.controller.environments import EnvironmentBook, EnvironmentEntry
from slipstream.learner.controller.fleet import Fleet, ServerSession
from slipstream.learner.controller.journal import Journal
from slipstream.learner.controller.lease_waits import WORDS, LeaseWait, WaitTimer
from slipstream.learner.controller.leases import Group, LeaseBook, ServerKey
from slipstream.learner.controller.progress import RunProgress
from slipstream.learner.controller.queue_account import AccountedReceiver
from slipstream.protocol import reservation
from slipstream.protocol.config import Config
from slipstream.protocol.config_file import largest_trajectory_bytes
from slipstream.protocol.types import Purpose
from slipstream.v1 import environment_pb2, fleet_pb2, trajectory_pb2

WATCH_S = 0.25
RECHECK_S = 1.0


class Scheduler:
    """Keeps every serving server busy, as far as the staleness promise allows."""

    def __init__(
        self,
        progress: RunProgress,
        book: LeaseBook,
        environments: EnvironmentBook,
        fleet: Fleet,
        journal: Journal,
        queue: AccountedReceiver,
    ) -> None:
        self._progress = progress
        self._config = progress.config
        self._queue = queue
        self._largest_bytes = largest_trajectory_bytes(self._config)
        self._book = book
        self._environments = environments
        self._fleet = fleet
        self._journal = journal
        self._wait = LeaseWait.NOTHING
        self._queue_waits = WaitTimer(LeaseWait.QUEUE)
        # Episodes that an evaluation is about to start on a server: training leaves them room.
        self.reserved: dict[ServerKey, int] = {}

    async def lease_forever(self) -> None:
        """Grants what may be granted, whenever something changed, until it is cancelled."""
        while True:
            may_lease = not self._progress.is_over and not self._progress.solved
            if self._progress.trainer_registered and may_lease:
                self.lease_all()
            else:
                self._note(LeaseWait.NOTHING)
            await self._progress.signal.wait(self._recheck_s())

    async def watch_forever(self) -> None:
        """Removes silent servers and fails a run that cannot go on, until it is cancelled."""
        while True:
            await asyncio.sleep(WATCH_S)
            self._fleet.remove_silent()
            if not self._fleet.serving():
                # Nothing can move now: the clock stands still.
                self._progress.moved_s = time.monotonic()
            if not self._progress.is_over:
                cause = self._cause_to_fail()
                if cause:
                    self._progress.fail(cause)

    def lease_all(self) -> None:
        """Grants leases while servers, environments and rules allow; durable, then sent."""
        granted: list[tuple[ServerSession, Group, int]] = []
        for session in self._by_room():
            for group in self._book.orphans():
                version = session.version
                assert version is not None
                entry = self._environments.entries.get(group.environment)
                if (
                    entry is not None
                    and entry.runs_on(session.key)
                    and len(group.missing) <= self._room(session)
                    and self._book.may_reassign(group, version.step)
                ):
                    self._book.reassign(group, session.key)
                    granted.append((session, group, -1))
        while not isinstance(lease := self._next_lease(), LeaseWait):
            granted.append(lease)
        self._note(lease)
        if not granted:
            return
        for session, group, number in granted:
            self._journal.append(
                "lease",
                group=group.group_id,
                environment=group.environment,
                task=group.task_index,
                number=number,
                seed=group.seed,
                deadline=group.deadline_step,
                server=session.name,
                epoch=session.key.epoch,
                members=list(group.missing),
            )
        self._journal.sync()
        for session, group, _ in granted:
            if group.leased_s is None:
                group.leased_s = time.monotonic()
            session.send(fleet_pb2.ControllerMessage(lease=self.lease_message(group)))

    def lease_message(self, group: Group) -> fleet_pb2.Lease:
        """A lease as its server reads it."""
        entry = self._environments.entries[group.environment]
        return fleet_pb2.Lease(
            group_id=group.group_id,
            environment=group.environment,
            task_index=group.task_index,
            seed=group.seed,
            members=group.missing,
            deadline_step=group.deadline_step,
            purpose=trajectory_pb2.EpisodePurpose.Name(group.purpose.value),
            sampling=self._sampling(group),
            max_attempts=group.next_attempt + self._config.controller.max_attempts,
            first_attempt=group.next_attempt,
            timeout_s=entry.spec.timeout_s,
        )

    def grant_evaluation(self, session: ServerSession, group: Group) -> None:
        """Sends the lease of an episode that is measured; a restart begins its round again."""
        self._journal.append(
            "evaluation_lease",
            group=group.group_id,
            environment=group.environment,
            task=group.task_index,
            version=group.deadline_step,
            server=session.name,
            epoch=session.key.epoch,
        )
        session.send(fleet_pb2.ControllerMessage(lease=self.lease_message(group)))

    def _sampling(self, group: Group) -> fleet_pb2.SamplingSettings:
        sampling = self._config.sampling
        settings = fleet_pb2.SamplingSettings(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_reply_tokens=sampling.max_reply_tokens,
            max_turns=sampling.max_turns,
            max_episode_tokens=sampling.max_episode_tokens,
            ignore_eos=sampling.ignore_eos,
            max_prompt_tokens=sampling.max_prompt_tokens or 0,
        )
        if group.purpose is Purpose.EVALUATION:
            own = next(e for e in self._config.evaluations if e.name == group.environment)
            settings.temperature = own.temperature
            if own.top_p is not None:
                settings.top_p = own.top_p
            if own.max_reply_tokens is not None:
                settings.max_reply_tokens = own.max_reply_tokens
        return settings

    def room(self, session: ServerSession) -> int:
        """Episodes that a server can take on now."""
        return session.hello.max_episodes - self._book.open_episodes(session.key)

    def _room(self, session: ServerSession) -> int:
        return self.room(session) - self.reserved.get(session.key, 0)

    def _by_room(self) -> list[ServerSession]:
        return sorted(self._fleet.serving(), key=self._room, reverse=True)

    def may_send(self, episodes: int) -> bool:
        """Whether the queue has room for so many more episodes, beside all that was promised."""
        return reservation.may_promise(self._free_bytes(), episodes, self._largest_bytes)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the queue that are used, and that leased episodes may still need."""
        return self._config.queue.max_bytes - self._free_bytes()

    @property
    def lease_wait(self) -> str:
        """What the next lease waits for, in words; empty: none is wanted."""
        return WORDS[self._wait]

    def gauges(self) -> dict[str, float]:
        """Numbers of the leases; docs/metrics.md says what each name means."""
        return {
            "reserved_bytes": float(self.reserved_bytes),
            "lease_queue_wait_s": self._queue_waits.total_s(time.monotonic()),
        }

    def _free_bytes(self) -> int:
        return reservation.free_bytes(
            self._config.queue.max_bytes,
            self._queue.waiting_bytes,
            self._book.promised_episodes,
            self._largest_bytes,
        )

    def _note(self, wait: LeaseWait) -> None:
        self._wait = wait
        self._queue_waits.note(wait, time.monotonic())

    def _next_lease(self) -> tuple[ServerSession, Group, int] | LeaseWait:
        """A new group, with its number among those of its environment; or why there is none."""
        sessions = self._by_room()
        if not sessions:
            return LeaseWait.SERVER
        if not self._is_time():
            return LeaseWait.PACE
        wait = LeaseWait.SLOTS
        group_size = self._book.group_size
        open_episodes = self._book.episodes_by_environment()
        for session in sessions:
            version = session.version
            assert version is not None
            if self._room(session) < group_size:
                continue
            if not self._book.may_lease(version.step):
                wait = max(wait, LeaseWait.STALENESS)
                continue
            entry = self._environments.next_for(session.key, open_episodes, group_size)
            if entry is None:
                wait = max(wait, LeaseWait.ENVIRONMENT)
                continue
            if not self.may_send(group_size + self._evaluated_soon()):
                return LeaseWait.QUEUE
            number = entry.next_number
            task_index, seed = self._environments.next_task(entry)
            entry.groups_leased += 1
            name = entry.spec.name
            group = self._book.lease(name, task_index, seed, session.key, version.step)
            return session, group, number
        return wait

    def _evaluated_soon(self) -> int:
        """Episodes of evaluations that would start now if the queue had room."""
        return sum(
            min(waiting, session.hello.max_episodes)
            for key, waiting in self.reserved.items()
            if (session := self._fleet.find(key)) is not None
        )

    def _is_time(self) -> bool:
        """Whether the pace of the run has room for one more group."""
        pace = self._progress.pace
        limit = pace.limit(time.monotonic()) if pace is not None else None
        # One that waits for a server keeps no place.
        leased = sum(group.holder is not None for group in self._book.training_groups())
        return limit is None or leased < limit

    def _recheck_s(self) -> float:
        """How soon to look again without a signal."""
        pace = self._progress.pace
        sooner = pace.recheck_s() if pace is not None else None
        return RECHECK_S if sooner is None else min(sooner, RECHECK_S)

    def _cause_to_fail(self) -> str:
        settings, now = self._config.controller, time.monotonic()
        training = self._environments.training()
        suspended = environment_pb2.ENVIRONMENT_STATE_SUSPENDED
        if training and all(entry.state == suspended for entry in training):
            causes = "; ".join(f"{entry.spec.name}: {entry.cause}" for entry in training)
            return f"no environment is left: {causes}"
        unloadable = [entry for entry in training if self._nowhere(entry)]
        if training and len(unloadable) == len(training):
            causes = "; ".join(f"{entry.spec.name}: {entry.cause}" for entry in training)
            return f"no environment could be loaded: {causes}"
        if not self._fleet.sessions:
            empty = now - self._fleet.empty_since_s
            if empty > settings.fleet_timeout_s:
                return f"no rollout server was connected for {empty:.0f} s"
            return ""
        idle = now - self._progress.moved_s
        waits_for_fleet = self._progress.trainer_registered and bool(self._fleet.serving())
        if waits_for_fleet and training and idle > settings.stall_timeout_s:
            return f"nothing moved for {idle:.0f} s while waiting for {self._progress.waiting_for}"
        return ""

    def _nowhere(self, entry: EnvironmentEntry) -> bool:
        sessions = self._fleet.sessions.values()
        return (
            entry.client_episodes is None
            and not entry.loaded_on
            and bool(sessions)
            and all(session.key in entry.failed_on for session in sessions)
        )


def environment_spec(
    config: Config, name: str, *, search_path: str
) -> environment_pb2.EnvironmentSpec:
    """The wire form of a configured environment or evaluation."""
    for section in config.environments:
        if section.name == name:
            return environment_pb2.EnvironmentSpec(
                name=name,
                reference=section.reference,
                args_json=json.dumps(section.args),
                weight=section.weight,
                timeout_s=section.timeout_s,
                num_workers=section.num_workers,
                search_path=search_path,
                purpose=trajectory_pb2.EPISODE_PURPOSE_TRAINING,
            )
    evaluation = next(section for section in config.evaluations if section.name == name)
    return environment_pb2.EnvironmentSpec(
        name=name,
        reference=evaluation.reference,
        args_json=json.dumps(evaluation.args),
        weight=1.0,
        timeout_s=evaluation.timeout_s,
        num_workers=evaluation.num_workers,
        search_path=search_path,
        purpose=trajectory_pb2.EPISODE_PURPOSE_EVALUATION,
    )

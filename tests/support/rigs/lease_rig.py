"""A scheduler with everything that it looks at, and servers that only get orders."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from slipstream.core.group_sizes import GroupSizes, group_sizes_of
from slipstream.core.types import PolicyVersion
from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.leasing.leases import LeaseBook
from slipstream.learner.controller.leasing.scheduler import Books, Scheduler
from slipstream.learner.controller.leasing.shares import Mixture
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.journal import Journal
from slipstream.learner.controller.records.kinds import Record, TrajectoryEnd, fields_of
from slipstream.learner.controller.records.ledger import AccountedReceiver, TokenLedger
from slipstream.learner.controller.records.state import RunState
from slipstream.learner.controller.run import ControlledRun
from slipstream.learner.controller.servers.fleet import Fleet
from slipstream.learner.controller.servers.server_epochs import ServerEpochs
from slipstream.learner.controller.servers.session import ServerSession
from slipstream.learner.controller.tasks import EnvironmentBook, EnvironmentEntry
from slipstream.protocol.queue.base import Tally
from slipstream.protocol.queue.grpc import GrpcReceiver
from slipstream.v1 import environment_pb2, fleet_pb2, trajectory_pb2

from support.fakes.queue_seals import without_seal
from support.rigs.publishing_scene import joined, run_of

STEPS = 10


def book_of(
    *,
    group_size: int = 2,
    own_group_sizes: Mapping[str, int] = MappingProxyType({}),
    **sizes: int,
) -> LeaseBook:
    """An empty lease book; where `sizes` say nothing else, a step has one group of two members."""
    plain = {
        "groups_per_step": 1,
        "max_staleness": 1,
        "num_steps": 9,
        "attempts_per_lease": 7,
    }
    group_sizes = GroupSizes(group_size, own_group_sizes)
    return LeaseBook(group_sizes=group_sizes, **plain | sizes)


def take_batch(book: LeaseBook, **facts: Any) -> list[Group] | None:
    """Takes the next batch by the `facts` of a mixture; None if it is not ready."""
    choice = book.choose_batch(Mixture(**facts))
    if choice is None or choice.awaited:
        return None
    return book.take_batch(choice)


def books_of(run: ControlledRun, **given: object) -> Books:
    """Empty books of a run, with a queue of 1000 bytes; `given` has the journal, and other books.

    Without a journal nothing may be recorded.
    """
    algorithm = run.config.algorithm
    fleet = Fleet(run)
    state = given.get("state", RunState())
    made: dict[str, Any] = {
        "leases": book_of(
            groups_per_step=algorithm.groups_per_step,
            group_size=algorithm.group_size,
            own_group_sizes=group_sizes_of(run.config).of_environments,
            max_staleness=algorithm.max_staleness,
            num_steps=run.config.run.steps,
        ),
        "environments": EnvironmentBook(state, seed=0),
        "fleet": fleet,
        "journal": None,
        "state": state,
        "queue": AccountedReceiver(GrpcReceiver(without_seal)),
    }
    made |= given
    epochs = made["fleet"].epochs
    held_by = made["leases"].held
    ledger = TokenLedger(epochs, held_by, made["journal"], made["queue"], made["state"])
    books = Books(ledger=ledger, **made)
    if books.journal is not None:
        books.journal.state = books.state
    return books


def ledger_of(
    epochs: ServerEpochs,
    *held: int,
    records: list[dict[str, Any]] | None = None,
    state: RunState | None = None,
) -> TokenLedger:
    """A ledger whose groups hold trajectories of `held` tokens, and whose journal has all ends.

    What the ledger journals is appended to `records`.
    """

    class WholeJournal:
        @property
        def settled(self) -> Tally:
            return ledger._settled

        def append(self, record: Record) -> None:
            records.append(json.loads(json.dumps(fields_of(record))))

    there: list[Any] = [SimpleNamespace(num_sampled_tokens=tokens) for tokens in held]
    journal: Any = WholeJournal()
    queue = AccountedReceiver(GrpcReceiver(without_seal))
    state = RunState() if state is None else state
    ledger = TokenLedger(epochs, lambda: there, journal, queue, state)
    return ledger


def note_end(ledger: TokenLedger, how: TrajectoryEnd, tokens: int) -> None:
    """Ends a trajectory of `tokens` tokens, as a record of its end does."""
    ledger._settled = ledger._settled.plus(tokens)
    ledger._state.ends[how] += tokens


class SoundJournal:
    """A journal that has no trouble, and records nothing."""

    def trouble(self) -> str:
        return ""


class Rig:
    """One step with one group at a time, where a test says nothing else."""

    def __init__(
        self,
        folder: Path,
        journal: Journal,
        kind: type[Scheduler] = Scheduler,
        *,
        algorithm: Mapping[str, object] | None = None,
        state: RunState | None = None,
        **changes: dict[str, object],
    ) -> None:
        sizes = {"group_size": 2, "groups_per_step": 1, "max_staleness": 1} | dict(
            algorithm or {}
        )
        self.run = run_of(
            run={"name": "r", "steps": STEPS, "dir": str(folder)},
            algorithm={**sizes, "learning_rate": 1e-3},
            **changes,
        )
        self.books = books_of(self.run, journal=journal, state=state or RunState())
        self.book, self.environments = self.books.leases, self.books.environments
        self.fleet = self.books.fleet
        self.queue = self.books.queue
        self.folder = folder / "journal"
        self.journal = journal
        self.journal.append(kinds.Start(format=1, run_id="r"))
        self.abandoned: list[Group] = []
        self.scheduler = kind(self.run, self.books, self._abandon)
        self.entry = self.add_environment("e", 1.0)

    def _abandon(self, group: Group) -> None:
        self.abandoned.append(group)
        self.book.remove(group.group_id)

    def add_environment(self, name: str, weight: float) -> EnvironmentEntry:
        return self.environments.add(
            environment_pb2.EnvironmentSpec(
                name=name,
                weight=weight,
                purpose=trajectory_pb2.EPISODE_PURPOSE_TRAINING,
            )
        )

    def serving(
        self,
        name: str,
        version: int,
        max_episodes: int = 8,
        environments: tuple[str, ...] = ("e",),
    ) -> ServerSession:
        session = joined(self.fleet, name, max_episodes=max_episodes)
        session.state = fleet_pb2.SERVER_STATE_SERVING
        session.version = PolicyVersion(0, version)
        session.changed()
        for environment in environments:
            self.environments.entries[environment].loaded(session.key, 5)
        return session

    def lose(self, session: ServerSession) -> None:
        self.fleet.remove(session, "test")
        self.environments.server_lost(session.key)
        self.book.orphan(session.key)

    async def lease(self) -> None:
        if (durable := self.scheduler.lease_all()) is not None:
            await durable

    def orders(self, session: ServerSession) -> list[fleet_pb2.Lease]:
        sent = []
        while (message := session.outbox.pop()) is not None:
            sent.append(message.lease)
        return sent

"""Tasks that differ from those at the last start, or between processes."""

from collections.abc import Sequence
from typing import Any

import pytest
from slipstream.core.types import GroupId
from slipstream.learner.controller.leasing.groups import Group, Purpose
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.state import RunState
from slipstream.learner.controller.run import ControlledRun
from slipstream.learner.controller.servers.session import ServerSession
from slipstream.learner.controller.services.environment_service import (
    EnvironmentServicer,
)
from slipstream.learner.controller.tasks import EnvironmentEntry
from slipstream.v1 import environment_pb2, fleet_pb2
from support.rigs.lease_rig import books_of
from support.rigs.publishing_scene import joined, run_of


class Records:
    """A journal that is only appended to."""

    def __init__(self) -> None:
        self.records: list[kinds.Record] = []
        self.state = RunState()

    def append(self, record: kinds.Record) -> None:
        self.state.apply(record)
        self.records.append(record)


class Scene:
    """One environment in a run that began with the records of an earlier start."""

    def __init__(self, *earlier: kinds.Record) -> None:
        self.run: ControlledRun = run_of(
            environments=[{"name": "e", "reference": "ours:Sums"}]
        )
        self.journal = Records()
        books = books_of(self.run, journal=self.journal)
        for record in earlier:
            books.state.apply(record)
        self.fleet = books.fleet
        self.withdrawn: list[str] = []
        intake: Any = self
        self.servicer = EnvironmentServicer(self.run, books, intake)
        self.entry: EnvironmentEntry = books.environments.entries["e"]

    def withdraw(self, groups: Sequence[Group], cause: str) -> None:
        self.withdrawn.append(cause)

    def report(self, session: ServerSession, digest: str, num_tasks: int = 5) -> None:
        report = fleet_pb2.EnvironmentReport(
            environment="e", num_tasks=num_tasks, digest=digest
        )
        self.servicer.environment_reported(session, report)

    @property
    def told(self) -> list[str]:
        return [
            event.text
            for event in self.run.events.kept()
            if "environment e" in event.text
        ]


LEASE = kinds.GroupLease(
    "g0", "e", number=3, task=2, seed=7, deadline=1, server="s", epoch=1
)


def tasks(digest: str) -> kinds.Tasks:
    return kinds.Tasks(environment="e", num_tasks=5, digest=digest)


def test_a_resumed_run_with_the_same_tasks_goes_on() -> None:
    scene = Scene(tasks("abc"), LEASE)
    scene.report(joined(scene.fleet, "a"), "abc")
    assert (scene.entry.counts.next_number, scene.told, scene.journal.records) == (
        4,
        [],
        [],
    )


def test_a_resumed_run_with_other_tasks_says_so_and_begins_them_afresh() -> None:
    scene = Scene(tasks("abc"), LEASE)
    assert scene.entry.counts.next_number == 4
    scene.report(joined(scene.fleet, "a"), "def", num_tasks=6)
    assert scene.told == [
        "the tasks of environment e have changed since the run began: there are 6 now; 0 open "
        "groups are withdrawn, and each task comes afresh"
    ]
    assert scene.withdrawn == ["the tasks of environment e have changed"]
    assert (scene.entry.counts.next_number, scene.entry.is_ready) == (0, True)
    # A third start goes on from there.
    again = Scene(tasks("abc"), LEASE, *scene.journal.records)
    assert (again.entry.counts.next_number, again.entry.counts.digest) == (0, "def")


def test_an_abandoned_group_does_not_keep_the_number_of_a_task_that_changed() -> None:
    scene = Scene(tasks("abc"), LEASE)
    scene.journal.append(LEASE)
    book = scene.servicer._book
    book.again.append(Group(GroupId("g0"), "e", 2, 7, Purpose.TRAINING, 2, 1, None))
    scene.report(joined(scene.fleet, "a"), "def", num_tasks=6)
    assert book.again == []
    assert scene.journal.state.open_groups == {}


@pytest.mark.parametrize("is_same", [True, False])
def test_a_process_with_other_tasks_cannot_run_the_environment(is_same: bool) -> None:
    scene = Scene()
    first = joined(scene.fleet, "a")
    scene.report(first, "abc")
    second = first if is_same else joined(scene.fleet, "b")
    scene.report(second, "def")
    where = (
        "in another process of this server" if is_same else "on other rollout servers"
    )
    assert scene.entry.failed_on[second.key].startswith(
        f"it has other tasks than {where}"
    )
    assert second.key not in scene.entry.loaded_on
    assert scene.entry.counts.digest == "abc"


def test_a_server_with_another_number_of_tasks_cannot_run_the_environment() -> None:
    scene = Scene()
    scene.report(joined(scene.fleet, "a"), "abc")
    other = joined(scene.fleet, "b")
    scene.report(other, "abc", num_tasks=2)
    assert scene.entry.failed_on[other.key] == (
        "it has 2 tasks here and 5 on other rollout servers: all hosts must have the same data"
    )
    assert scene.told[-1].startswith("environment e on b: it has 2 tasks here and ")


def test_a_latecomer_is_still_level_with_the_others_after_a_restart() -> None:
    scene = Scene(LEASE)
    scene.entry.state = environment_pb2.ENVIRONMENT_STATE_READY
    spec = environment_pb2.EnvironmentSpec(name="late", weight=2.0)
    late = scene.servicer._enter(spec)
    assert late.share == scene.entry.share == 1.0
    # An environment that leaves and comes again is behind by nothing.
    assert scene.servicer._enter(spec).share == 1.0
    again = Scene(LEASE, *scene.journal.records)
    assert again.servicer._environments.add(spec).share == again.entry.share == 1.0

import dataclasses
from pathlib import Path

import pytest
from slipstream.core.types import PolicyVersion, TrajectoryId, VersionSpan
from slipstream.learner.controller.records.journal import Journal
from slipstream.learner.controller.run import ControlledRun
from slipstream.learner.controller.servers.session import ServerKey
from slipstream.learner.controller.trajectories.inspection import (
    MAX_IN_A_ROW,
    MAX_SERVERS,
    Inspector,
)
from slipstream.protocol.codec import encode_trajectory
from slipstream.protocol.queue.base import Delivery
from slipstream.v1.environment_pb2 import EnvironmentSpec
from support.fakes.fake_trajectories import GOOD
from support.rigs.controller_runs import make_config
from support.rigs.lease_rig import books_of

KEY = ServerKey(GOOD.server_id, GOOD.server_epoch)


def refuse(inspector: Inspector, number: int, *, epoch: int = KEY.epoch) -> None:
    """Lets a server deliver what nobody can read."""
    trajectory_id = TrajectoryId(f"g{number:06d}.0.0.{epoch:x}")
    inspector.refuse(Delivery(trajectory_id, b"\xff"), "broken")


def inspected(
    folder: Path,
    *,
    serves: str = "",
    oldest: int = 2,
    staleness: int = 2,
    before: int = 0,
    **changes: str,
) -> tuple[bool, ControlledRun, Inspector]:
    """Whether a trajectory of a group of step 2 is taken while environment e has adapter `serves`.

    `changes` are fields of the trajectory; `before` is the number of those that nobody can read.
    """
    run = ControlledRun(make_config(folder, algorithm__max_staleness=staleness), "r")
    run.progress.reached(PolicyVersion(0, 2))
    with Journal(folder / "journal") as journal:
        books = books_of(run, journal=journal)
        books.environments.entries.clear()
        books.environments.add(EnvironmentSpec(name="e", adapter=serves))
        group_id = books.leases.lease("e", 3, 4, KEY, 2).group_id
        # The bound of leases that are new from now on.
        books.leases.max_staleness = 0
        books.fleet.epochs.join(KEY)
        spans = (VersionSpan(2, PolicyVersion(0, oldest)),)
        changed = {"group_id": group_id, "version_spans": spans} | changes
        trajectory = dataclasses.replace(GOOD, **changed)
        inspector = Inspector(run, books, run_again=lambda *_: None)
        for number in range(before):
            refuse(inspector, 50 + number)
        delivery = Delivery(trajectory.trajectory_id, encode_trajectory(trajectory))
        return inspector.take(delivery) is not None, run, inspector


# The trajectory may be trained by step 6.
@pytest.mark.parametrize(("oldest", "quarantined"), [(2, 0), (1, 1)])
def test_a_trajectory_is_judged_by_the_promise_of_the_run_not_by_the_bound_of_new_leases(
    tmp_path: Path, oldest: int, quarantined: int
) -> None:
    is_taken, _, inspector = inspected(tmp_path, oldest=oldest, staleness=4)
    assert is_taken == (not quarantined)
    assert inspector.num_quarantined == quarantined


@pytest.mark.parametrize(
    ("adapter", "cause"), [("math", ""), ("", "adapter '' sampled it")]
)
def test_what_another_adapter_sampled_is_quarantined(tmp_path, adapter, cause):
    is_taken, run, inspector = inspected(tmp_path, serves="math", adapter=adapter)
    assert is_taken != bool(cause)
    assert inspector.num_quarantined == bool(cause)
    assert cause in " ".join(event.text for event in run.events.kept())


def test_a_late_trajectory_of_a_withdrawn_group_is_not_held_against_its_server(
    tmp_path,
):
    # The client that served it came back with another adapter; its groups were withdrawn.
    is_taken, _, inspector = inspected(
        tmp_path, serves="code", adapter="math", group_id="g000001"
    )
    assert is_taken
    assert inspector.num_quarantined == 0


def test_a_server_that_produces_nothing_else_ends_the_run_where_it_is_the_last(
    tmp_path,
) -> None:
    is_taken, run, inspector = inspected(tmp_path, before=MAX_IN_A_ROW - 1)
    # The good one in between begins the count again.
    assert is_taken
    for number in range(MAX_IN_A_ROW):
        assert not run.progress.has_failed
        refuse(inspector, 100 + number)
    assert run.progress.cause.endswith("the last 16 in a row: broken")
    assert inspector.num_quarantined == 2 * MAX_IN_A_ROW - 1


def test_servers_that_are_long_gone_are_not_counted_for_ever(tmp_path: Path) -> None:
    _, run, inspector = inspected(tmp_path)
    for epoch in range(1, MAX_SERVERS + 50):
        refuse(inspector, 1, epoch=epoch)
    assert len(inspector._in_a_row) == MAX_SERVERS
    assert inspector.num_quarantined == MAX_SERVERS + 49
    assert not run.progress.has_failed

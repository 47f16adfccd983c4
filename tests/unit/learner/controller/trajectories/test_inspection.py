import dataclasses
from pathlib import Path

import pytest
from slipstream.core.types import PolicyVersion, VersionSpan
from slipstream.learner.controller.leasing.scheduler import Books
from slipstream.learner.controller.records.journal import Journal
from slipstream.learner.controller.run import Run
from slipstream.learner.controller.servers.session import ServerKey
from slipstream.learner.controller.trajectories.inspection import Inspector
from slipstream.protocol.codec import encode_trajectory
from slipstream.protocol.queue.base import Delivery
from slipstream.v1.environment_pb2 import EnvironmentSpec
from support.fakes.fake_trajectories import GOOD
from support.rigs.controller_runs import make_config
from support.rigs.lease_rig import books_of

KEY = ServerKey(GOOD.server_id, GOOD.server_epoch)


def inspector_of(run: Run, books: Books) -> Inspector:
    return Inspector(run, books, run_again=lambda *_: None)


@pytest.mark.parametrize(("oldest", "quarantined"), [(2, 0), (1, 1)])
def test_a_trajectory_is_judged_by_the_promise_of_the_run_not_by_the_bound_of_new_leases(
    tmp_path: Path, oldest: int, quarantined: int
) -> None:
    config = make_config(tmp_path, algorithm__max_staleness=4)
    run = Run.of(config, "r")
    run.progress.reached(PolicyVersion(0, 2))
    with Journal(tmp_path / "journal") as journal:
        books = books_of(run, journal=journal)
        # The trajectory may be trained by step 6.
        group = books.leases.lease("e", 3, 4, KEY, 2)
        books.leases.max_staleness = 0
        books.fleet.epochs.join(KEY)
        spans = (VersionSpan(2, PolicyVersion(0, oldest)),)
        trajectory = dataclasses.replace(GOOD, group_id=group.group_id, version_spans=spans)
        inspector = inspector_of(run, books)
        taken = inspector.take(Delivery(trajectory.trajectory_id, encode_trajectory(trajectory)))
        assert (taken is None) == bool(quarantined)
        assert inspector.quarantine.total == quarantined


def inspected(
    tmp_path: Path, adapter: str, sampled_by: str, group_id: str = ""
) -> tuple[bool, Run, Inspector]:
    """Whether a trajectory is taken while environment e has `adapter`; of a new group, or not."""
    run = Run.of(make_config(tmp_path), "r")
    run.progress.reached(PolicyVersion(0, 2))
    with Journal(tmp_path / "journal") as journal:
        books = books_of(run, journal=journal)
        books.environments.entries.clear()
        books.environments.add(EnvironmentSpec(name="e", adapter=adapter))
        group_id = group_id or books.leases.lease("e", 3, 4, KEY, 2).group_id
        books.fleet.epochs.join(KEY)
        spans = (VersionSpan(2, PolicyVersion(0, 2)),)
        trajectory = dataclasses.replace(
            GOOD, group_id=group_id, version_spans=spans, adapter=sampled_by
        )
        inspector = inspector_of(run, books)
        delivery = Delivery(trajectory.trajectory_id, encode_trajectory(trajectory))
        return inspector.take(delivery) is not None, run, inspector


@pytest.mark.parametrize(("adapter", "cause"), [("math", ""), ("", "adapter '' sampled it")])
def test_what_another_adapter_sampled_is_quarantined(tmp_path, adapter, cause):
    is_taken, run, inspector = inspected(tmp_path, "math", adapter)
    assert is_taken != bool(cause)
    assert inspector.quarantine.total == bool(cause)
    assert cause in " ".join(event.text for event in run.events.kept())


def test_a_late_trajectory_of_a_withdrawn_group_is_not_held_against_its_server(tmp_path):
    # The client that served it came back with another adapter; its groups were withdrawn.
    is_taken, _, inspector = inspected(tmp_path, "code", "math", group_id="g000001")
    assert is_taken
    assert inspector.quarantine.total == 0

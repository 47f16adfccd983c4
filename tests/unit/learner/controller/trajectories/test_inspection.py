import dataclasses
from pathlib import Path

import pytest
from slipstream.core.types import PolicyVersion, VersionSpan
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


def inspected(
    folder: Path, *, serves: str = "", oldest: int = 2, staleness: int = 2, **changes: str
) -> tuple[bool, Run, Inspector]:
    """Whether a trajectory of a group of step 2 is taken while environment e has adapter `serves`.

    `changes` are fields of the trajectory.
    """
    run = Run.of(make_config(folder, algorithm__max_staleness=staleness), "r")
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
        delivery = Delivery(trajectory.trajectory_id, encode_trajectory(trajectory))
        return inspector.take(delivery) is not None, run, inspector


# The trajectory may be trained by step 6.
@pytest.mark.parametrize(("oldest", "quarantined"), [(2, 0), (1, 1)])
def test_a_trajectory_is_judged_by_the_promise_of_the_run_not_by_the_bound_of_new_leases(
    tmp_path: Path, oldest: int, quarantined: int
) -> None:
    is_taken, _, inspector = inspected(tmp_path, oldest=oldest, staleness=4)
    assert is_taken == (not quarantined)
    assert inspector.quarantine.total == quarantined


@pytest.mark.parametrize(("adapter", "cause"), [("math", ""), ("", "adapter '' sampled it")])
def test_what_another_adapter_sampled_is_quarantined(tmp_path, adapter, cause):
    is_taken, run, inspector = inspected(tmp_path, serves="math", adapter=adapter)
    assert is_taken != bool(cause)
    assert inspector.quarantine.total == bool(cause)
    assert cause in " ".join(event.text for event in run.events.kept())


def test_a_late_trajectory_of_a_withdrawn_group_is_not_held_against_its_server(tmp_path):
    # The client that served it came back with another adapter; its groups were withdrawn.
    is_taken, _, inspector = inspected(tmp_path, serves="code", adapter="math", group_id="g000001")
    assert is_taken
    assert inspector.quarantine.total == 0

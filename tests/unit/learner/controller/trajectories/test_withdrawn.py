"""What becomes of the trajectories of a group that is withdrawn."""

import dataclasses
from pathlib import Path

from slipstream.learner.controller.records.journal import Journal, read_records
from slipstream.learner.controller.records.ledger import Endings
from slipstream.learner.controller.servers.server_states import ServerKey
from slipstream.learner.controller.trajectories.intake import Intake
from support.fakes.fake_trajectories import GOOD
from support.rigs.lease_rig import books_of
from support.rigs.publishing_scene import run_of


def test_what_a_group_holds_ends_when_its_environment_does_not_come_again(tmp_path: Path) -> None:
    # A batch that was set aside has put a trajectory back into its group before.
    run = run_of(algorithm={"group_size": 2, "groups_per_step": 1, "max_staleness": 1})
    with Journal(tmp_path) as journal:
        books = books_of(run, journal=journal)
        group = books.leases.lease("served", 0, 0, ServerKey("s", 1), 0)
        held = dataclasses.replace(
            GOOD, group_id=group.group_id, member=0, environment="served", task_index=0, seed=0
        )
        books.leases.add(held)
        intake = Intake(run, books, Endings(journal, books.ledger, books.queue))
        intake.withdraw_restored(group.group_id)
        assert books.leases.groups == {}
        assert books.ledger.snapshot().cancelled == held.num_sampled_tokens
    ends = [record for record in read_records(tmp_path) if record["kind"] == "end"]
    assert [end["id"] for end in ends] == [held.trajectory_id]

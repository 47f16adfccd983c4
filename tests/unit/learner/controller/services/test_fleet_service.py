"""The status of a run, which clients read."""

from pathlib import Path
from types import SimpleNamespace

from slipstream.core.types import PolicyVersion
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.history import read_history
from slipstream.learner.controller.records.journal import Journal, read_records
from slipstream.learner.controller.services.fleet_service import StatusServicer
from support.rigs.lease_rig import Rig


def test_the_newest_checkpoint_is_told_before_and_after_a_restart(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal") as journal:
        rig = Rig(tmp_path, journal)
        status = StatusServicer(rig.run, rig.books, rig.scheduler, SimpleNamespace(newest={}))
        assert status.status().checkpoint_step == 0
        journal.append(kinds.Checkpoint(version=PolicyVersion(0, 3)))
        assert status.status().checkpoint_step == 3
    with Journal(tmp_path / "journal") as journal:
        again = Rig(tmp_path, journal, state=read_history(read_records(tmp_path / "journal")))
        status = StatusServicer(again.run, again.books, again.scheduler, SimpleNamespace(newest={}))
        assert status.status().checkpoint_step == 3

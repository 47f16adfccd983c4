from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from controller_runs import make_config
from fake_trajectories import GOOD
from slipstream.learner.controller.events import EventLog
from slipstream.learner.controller.leasing.leases import LeaseBook
from slipstream.learner.controller.progress import RunProgress
from slipstream.learner.controller.records.journal import Journal
from slipstream.learner.controller.records.ledger import TokenLedger
from slipstream.learner.controller.servers.fleet import Fleet
from slipstream.learner.controller.servers.server_epochs import ServerEpochs
from slipstream.learner.controller.servers.server_states import ServerKey
from slipstream.learner.controller.trajectories.endings import Endings
from slipstream.learner.controller.trajectories.inspection import Inspector
from slipstream.protocol.codec import encode_trajectory
from slipstream.protocol.queue.base import Delivery
from slipstream.protocol.queue.memory import MemoryQueue
from slipstream.protocol.types import PolicyVersion, VersionSpan

KEY = ServerKey(GOOD.server_id, GOOD.server_epoch)


@pytest.mark.parametrize(("oldest", "quarantined"), [(2, 0), (1, 1)])
def test_a_trajectory_is_judged_by_the_promise_of_the_run_not_by_the_bound_of_new_leases(
    tmp_path: Path, oldest: int, quarantined: int
) -> None:
    config = make_config(tmp_path, algorithm__max_staleness=4)
    progress, ledger = RunProgress("r", config, EventLog()), TokenLedger(ServerEpochs())
    progress.version = PolicyVersion(0, 2)
    book = LeaseBook(
        attempts_per_lease=7, groups_per_step=1, group_size=2, max_staleness=4, num_steps=9
    )
    # The trajectory may be trained by step 6.
    group = book.lease("e", 3, 4, KEY, 2)
    book.max_staleness = 0
    fleet = Fleet(progress)
    fleet.epochs.join(KEY)
    trajectory = dataclasses.replace(
        GOOD,
        group_id=group.group_id,
        version_spans=(VersionSpan(2, PolicyVersion(0, oldest)),),
    )
    with Journal(tmp_path / "journal") as journal:
        journal.append("start", format=1, run_id="r")
        inspector = Inspector(
            progress,
            book,
            fleet,
            journal,
            ledger,
            Endings(journal, ledger, MemoryQueue(10).receiver()),
            run_again=lambda *_: None,
        )
        taken = inspector.take(Delivery(trajectory.trajectory_id, encode_trajectory(trajectory)))
        assert (taken is None) == bool(quarantined)
        assert inspector.quarantine.total == quarantined


def test_a_delivery_that_cannot_be_set_aside_is_refused_all_the_same(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    config.run_dir.mkdir()
    (config.run_dir / "quarantine").touch()
    events, ledger = EventLog(), TokenLedger(ServerEpochs())
    progress = RunProgress("r", config, events)
    book = LeaseBook(
        groups_per_step=1, group_size=2, max_staleness=4, num_steps=9, attempts_per_lease=3
    )
    fleet = Fleet(progress)
    fleet.epochs.join(KEY)
    with Journal(tmp_path / "journal") as journal:
        endings = Endings(journal, ledger, MemoryQueue(10).receiver())
        inspector = Inspector(
            progress, book, fleet, journal, ledger, endings, run_again=lambda *_: None
        )
        assert inspector.take(Delivery(GOOD.trajectory_id, b"junk")) is None
    assert inspector.quarantine.total == 1
    assert events._events[0].text.endswith("quarantine: File exists)")

"""What publishing is said to have cost."""

from __future__ import annotations

from slipstream.learner.controller.publishing.publish_totals import PublishTotals
from slipstream.v1 import fleet_pb2, trainer_pb2


def wire(*, trainer_s: float, server_s: float) -> float:
    totals = PublishTotals()
    totals.sent(trainer_pb2.PublishResult(wire_s=trainer_s))
    totals.served(
        fleet_pb2.PublishReport(stages=fleet_pb2.PublishStages(wire_s=server_s)),
        told_s=1.0,
        unserved_s=1.0,
    )
    return totals.gauges()["weights_wire_s"]


def test_wire_is_the_time_of_the_side_that_did_not_wait_for_the_other() -> None:
    assert wire(trainer_s=0.5, server_s=0.25) == 0.25
    assert wire(trainer_s=0.25, server_s=0.5) == 0.25


def test_wire_that_a_server_cannot_time_is_the_trainers() -> None:
    assert wire(trainer_s=0.5, server_s=0.0) == 0.5


def test_a_server_was_paused_no_longer_than_the_controller_saw() -> None:
    totals = PublishTotals()
    stages = fleet_pb2.PublishStages(
        prepare_s=1e8, pause_s=1e8, receive_s=0.25, resume_s=1e8, steps_s=1e8, staged=True
    )
    report = fleet_pb2.PublishReport(paused_s=1e8, stages=stages)
    totals.served(report, told_s=2.0, unserved_s=3.0)
    assert totals.summary()["pause_s"] == totals.gauges()["pause_s"] == 3.0
    names = ("publish_prepare_s", "publish_stop_s", "publish_receive_s", "publish_resume_s")
    names += ("publish_steps_s", "publish_staged")
    assert [totals.gauges()[name] for name in names] == [2.0, 2.0, 0.25, 2.0, 2.0, 1.0]

"""What publishing is said to have cost."""

from __future__ import annotations

from slipstream.learner.controller.publishing.publish_totals import PublishTotals
from slipstream.v1 import fleet_pb2, trainer_pb2


def wire(*, trainer_s: float, server_s: float) -> float:
    totals = PublishTotals()
    totals.sent(trainer_pb2.PublishResult(wire_s=trainer_s))
    totals.served(fleet_pb2.PublishReport(stages=fleet_pb2.PublishStages(wire_s=server_s)))
    return totals.gauges()["weights_wire_s"]


def test_wire_is_the_time_of_the_side_that_did_not_wait_for_the_other() -> None:
    assert wire(trainer_s=0.5, server_s=0.25) == 0.25
    assert wire(trainer_s=0.25, server_s=0.5) == 0.25


def test_wire_that_a_server_cannot_time_is_the_trainers() -> None:
    assert wire(trainer_s=0.5, server_s=0.0) == 0.5

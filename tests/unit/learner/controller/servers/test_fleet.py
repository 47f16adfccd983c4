from __future__ import annotations

import pytest
from publishing_scene import joined, nothing, progress_of
from slipstream.learner.controller.servers.fleet import Fleet, FleetHandlers


@pytest.mark.parametrize(("kind", "waiting"), [("grpc", 700), ("redis", 400)])
async def test_bytes_of_a_queue_that_all_servers_share_are_counted_once(
    kind: str, waiting: int
) -> None:
    fleet = Fleet(progress_of(queue={"kind": kind}))
    fleet.handlers = FleetHandlers(*[nothing] * 7)
    # Of one queue the newest of two looks.
    for name, num_bytes in (("a", 300), ("b", 400)):
        joined(fleet, name).report.queued_bytes = num_bytes
    assert fleet.queued_bytes == waiting
    assert fleet.gauges()["queued_bytes"] == waiting

"""Servers that are turned away: what the controller keeps of them."""

from types import SimpleNamespace

import grpc.aio
import pytest
from slipstream.learner.controller.loop_clock import LoopClock
from slipstream.learner.controller.services.fleet_service import FleetServicer
from slipstream.learner.controller.tasks.relay import Relay
from slipstream.v1 import fleet_pb2


class Aborted(Exception):
    """The stream was refused."""


class Context:
    """A stream of which only the refusal matters."""

    async def abort(self, *_: object, **__: object) -> None:
        raise Aborted

    async def abort_with_status(self, *_: object) -> None:
        raise Aborted


async def test_processes_that_are_turned_away_again_and_again_take_no_more_memory() -> None:
    first = fleet_pb2.ServerHello(server_id="s", process=1, host="here")
    older = SimpleNamespace(name="s", hello=first)
    events: list[str] = []
    run = SimpleNamespace(progress=None, events=SimpleNamespace(warn=events.append))
    fleet = SimpleNamespace(sessions={"s": older})
    servicer = FleetServicer(fleet, run, Relay(str, print, LoopClock()))  # type: ignore[arg-type]
    context: grpc.aio.ServicerContext = Context()  # type: ignore[assignment]
    for process in range(2, 1502):
        hello = fleet_pb2.ServerHello(server_id="s", process=process, host="there")
        for _ in range(2):
            with pytest.raises(Aborted):
                await servicer._check_name_is_free(hello, context)
    assert len(events) == 1500
    assert len(servicer._turned_away) <= 1000

"""The gRPC service for rollout servers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc.aio
from slipstream.learner.controller.services.environment_service import EnvironmentServicer
from slipstream.learner.controller.services.joining import FleetServicer
from slipstream.v1 import fleet_pb2, fleet_pb2_grpc


class FleetService(fleet_pb2_grpc.FleetServiceServicer):
    """Hands the calls of rollout servers to the parts that answer them."""

    def __init__(self, fleet: FleetServicer, environments: EnvironmentServicer) -> None:
        self._fleet = fleet
        self._relay = environments.relay

    async def Join(  # noqa: N802
        self,
        request_iterator: AsyncIterator[fleet_pb2.ServerMessage],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[fleet_pb2.ControllerMessage | bytes]:
        """Serves one server until its stream ends."""
        async with aclosing(self._fleet.join(request_iterator, context)) as messages:
            async for message in messages:
                yield message

    async def CallEnvironments(  # noqa: N802
        self,
        request_iterator: AsyncIterator[fleet_pb2.EnvironmentCall],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[fleet_pb2.EnvironmentAnswer]:
        """Relays a server's calls to environments that clients serve."""
        async with aclosing(self._relay.call_environments(request_iterator)) as answers:
            async for answer in answers:
                yield answer

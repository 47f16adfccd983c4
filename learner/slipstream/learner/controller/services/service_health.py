"""The controller's answers to gRPC health checks and reflection."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection


class ServiceHealth:
    """Answers for all services at once."""

    def __init__(self, server: grpc.aio.Server, modules: Sequence[ModuleType]) -> None:
        """Adds both services to `server`; `modules` define the controller's services."""
        names = [s.full_name for m in modules for s in m.DESCRIPTOR.services_by_name.values()]
        self._names = [*names, ""]
        self._servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server)

    async def tell(self, *, serving: bool) -> None:
        """Sets the health of all services until the next call."""
        answers = health_pb2.HealthCheckResponse
        status = answers.SERVING if serving else answers.NOT_SERVING
        for name in self._names:
            await self._servicer.set(name, status)

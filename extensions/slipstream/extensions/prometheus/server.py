"""Serves /metrics of a rollout server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

from prometheus_client.registry import Collector
from slipstream.core.settings.config import Config
from slipstream.core.types import ServerId
from slipstream.extensions.prometheus.endpoint import metrics_endpoint
from slipstream.rollout_server.engine_interface import Engine
from slipstream.rollout_server.part import ServerPart


class ServerMetricsPart(ServerPart):
    """Serves /metrics with the load of the engine."""

    def __init__(self, config: Config, server: ServerId) -> None:
        self._config = config
        self._server = server

    @asynccontextmanager
    async def beside(self, engine: Engine) -> AsyncIterator[None]:
        load = cast(Collector, engine.requests)
        collectors = [load]
        async with metrics_endpoint(
            self._config, "rollout_server", collectors, server=self._server
        ):
            yield

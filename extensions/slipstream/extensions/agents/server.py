"""The part of a rollout server that lets in agents from elsewhere."""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager

from slipstream.core.settings.config import Config
from slipstream.core.types import ServerId
from slipstream.extensions.agents.agent_port import HostPort
from slipstream.rollout_server.engine_interface import Engine
from slipstream.rollout_server.part import ServerPart


class AgentsPart(ServerPart):
    """Opens the port of agents."""

    def __init__(self, config: Config, server: ServerId) -> None:  # noqa: ARG002 - all share a port
        self._port = HostPort(config)

    def beside(self, engine: Engine) -> AbstractAsyncContextManager[None]:  # noqa: ARG002
        return self._port.opened()

    def worker_variables(self) -> Mapping[str, str]:
        return self._port.worker_variables()

    def refused_agents(self) -> int:
        return self._port.num_refused

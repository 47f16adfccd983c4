"""The port by which agents from elsewhere reach the workers of one rollout server."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from slipstream.client.agent_front import AgentFront, agent_front
from slipstream.core.settings.config import Config


class HostPort:
    """Opens the port, which it shares with the run's other servers of the host."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._front: AgentFront | None = None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Serves agents inside the block; raises ConfigError if nothing can listen there."""
        async with agent_front(self._config) as front:
            self._front = front
            yield

    def worker_variables(self) -> Mapping[str, str]:
        """Returns the variables by which workers know their address, once it is opened."""
        return {} if self._front is None else self._front.address.variables()

    @property
    def num_refused(self) -> int:
        return 0 if self._front is None else self._front.refusals.num_refused

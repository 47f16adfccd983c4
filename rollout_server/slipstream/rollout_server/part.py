"""What a part of a rollout server may do for its episodes, its weights and those who watch it."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Protocol

import grpc.aio
from slipstream.rollout_server.agents.call_records import CallRecords
from slipstream.rollout_server.engine_interface import Engine
from slipstream.rollout_server.episodes.play import References
from slipstream.v1 import fleet_pb2


class Fetches(Protocol):
    """Fetches versions for one session of a server, and completes the orders to load them."""

    def start(self, order: fleet_pb2.PreparePublish) -> None:
        """Begins to fetch the version of `order`; abandons an unfinished fetch."""

    def completed(self, message: fleet_pb2.ControllerMessage) -> fleet_pb2.ControllerMessage:
        """Returns each message of the controller, an order to load with what was fetched."""

    def note(self, report: fleet_pb2.PublishReport) -> None:
        """Handles the report of a publish."""

    def close(self) -> None:
        """Abandons an unfinished fetch."""


class ServerPart:
    """A part of a rollout server; it overrides the methods for what it takes part in."""

    def beside(self, engine: Engine) -> AbstractAsyncContextManager[None]:
        """Returns a context for the time from the first call to the controller to the end."""
        return nullcontext()

    def references(self) -> References | None:
        """Returns what gives log-probabilities of reference models; called once, in the loop.

        Raises ConfigError if it cannot be opened.
        """
        return None

    def fetches(
        self,
        report: Callable[[fleet_pb2.PublishReport], None],
        group: asyncio.TaskGroup,
    ) -> Fetches | None:
        """Returns what fetches versions for one session, which reports on publishes by `report`.

        Its tasks run in `group`. None if the part fetches none.
        """
        return None

    def call_records(
        self, channel: grpc.aio.Channel, metadata: Sequence[tuple[str, str]]
    ) -> CallRecords | None:
        """Returns what keeps the answered calls of agents; None if the part keeps none.

        Called once; `metadata` goes with each call to the controller by `channel`.
        """
        return None

    async def before_join(self) -> None:
        """Sends the controller what it must have before it leases to this server again.

        Raises AioRpcError while the controller is away; the server then tries again.
        """

    def worker_variables(self) -> Mapping[str, str]:
        """Returns variables for each worker of environments; asked inside `beside`."""
        return {}

    def refused_agents(self) -> int:
        """Returns how many calls of agents from elsewhere were refused so far."""
        return 0

    async def aclose(self) -> None:
        """Closes what `references` has opened."""

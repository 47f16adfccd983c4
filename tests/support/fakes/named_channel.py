"""Channels whose calls all name our release and the run of `make_config`, as its parts do."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from slipstream.protocol.access.security import Credentials, call_metadata, open_channel

RUN_ID = "r-0001"
OPEN = Credentials()
SHAPES = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class NamedChannel:
    def __init__(
        self,
        channel: Any,  # noqa: ANN401
        run_id: str = RUN_ID,
        credentials: Credentials = OPEN,
    ) -> None:
        self._channel = channel
        self._named = call_metadata(credentials, run_id)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        method = getattr(self._channel, name)
        return self._naming(method) if name in SHAPES else method

    def _naming(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: object, **options: object) -> Callable[..., Any]:
            call = make(*args, **options)

            def named(*given: object, metadata: Any = (), **more: object) -> Any:  # noqa: ANN401
                return call(*given, metadata=(*(metadata or ()), *self._named), **more)

            return named

        return method


@asynccontextmanager
async def open_named(
    address: str, run_id: str = RUN_ID, credentials: Credentials = OPEN
) -> AsyncIterator[Any]:
    async with open_channel(address, credentials) as channel:
        yield NamedChannel(channel, run_id, credentials)

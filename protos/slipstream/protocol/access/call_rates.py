"""Limits on the calls of each host under each role, so that no holder of a token stops a run."""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc
from slipstream.protocol.access.checked_calls import Context, Handler, handler_like, shape_of
from slipstream.protocol.rich_errors import Reason, abort

# Calls a second of one host under one role, calls at once, and calls that may wait for their turn.
# A thousand servers of one host join with four calls each.
CALLS_PER_S, MOST_AT_ONCE, MOST_WAITING = 200.0, 2000, 2000
# Largest number of hosts that are remembered; the one that called longest ago goes first.
MAX_HOSTS = 4096


class CallRates:
    """Carries calls out at a steady rate after the first ones; refuses them when too many wait."""

    def __init__(
        self,
        calls_per_s: float = CALLS_PER_S,
        most_at_once: int = MOST_AT_ONCE,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self._interval_s = 1 / calls_per_s
        self._at_once_s = most_at_once * self._interval_s
        self._waiting_s = most_waiting * self._interval_s
        # The time by which the calls of each role and host are carried out at the steady rate.
        self._until_s: dict[tuple[str | None, str], float] = {}

    def limited(self, handler: Handler, role: str | None) -> Handler:
        """Returns a handler that first waits for its turn among the calls of its caller's host."""
        inner: Callable[..., Any] = getattr(handler, shape_of(handler))

        async def call(request: object, context: Context) -> object:
            await self._turn(context, role)
            return await inner(request, context)

        async def stream(request: object, context: Context) -> AsyncIterator[object]:
            await self._turn(context, role)
            async with aclosing(inner(request, context)) as responses:
                async for response in responses:
                    yield response

        behavior = stream if inspect.isasyncgenfunction(inner) else call
        converters = handler.request_deserializer, handler.response_serializer
        return handler_like(handler, behavior, *converters)

    async def _turn(self, context: Context, role: str | None) -> None:
        host = context.peer().rpartition(":")[0]
        now_s = time.monotonic()
        before_s = max(self._until_s.pop((role, host), -math.inf), now_s - self._at_once_s)
        until_s = before_s + self._interval_s
        is_refused = until_s > now_s + self._waiting_s
        self._until_s[role, host] = before_s if is_refused else until_s
        if len(self._until_s) > MAX_HOSTS:
            del self._until_s[next(iter(self._until_s))]
        if is_refused:
            text = f"too many calls of {host} under the token of a {role or 'run'}"
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            await abort(context, code, text, Reason.TOO_MANY_CALLS)
        await asyncio.sleep(until_s - now_s)

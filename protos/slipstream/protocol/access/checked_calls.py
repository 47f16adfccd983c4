"""Checks incoming calls: each message is checked before its handler gets it.

A small message is decoded on the event loop, a large one in a thread. A message out of its bounds
ends its call with INVALID_ARGUMENT and one line. A handler may return bytes: a message that it has
encoded itself. A handler that fails ends its own call with INTERNAL and one line, and its traceback
is logged.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import Message
from slipstream.core.errors import ProtocolError
from slipstream.protocol.bounds import decode
from slipstream.protocol.rich_errors import Reason, abort

# grpc's classes are generic in their type stubs only.
if TYPE_CHECKING:
    Handler: TypeAlias = grpc.RpcMethodHandler[Any, Any]
    Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
    Interceptor: TypeAlias = grpc.aio.ServerInterceptor[Any, Any]
else:
    Handler = Context = Any
    Interceptor = grpc.aio.ServerInterceptor

_PACKAGE = "/slipstream."
# Largest message that is checked on the event loop, which it blocks for 20 ms at most.
SMALL_BYTES = 64 << 10
# Hosts whose refused calls are told in the log in one minute.
MAX_TOLD = 20

logger = logging.getLogger(__name__)


class _Decoded:
    """An iterator over the decoded and checked requests of a stream."""

    def __init__(self, kind: type[Message], requests: AsyncIterator[bytes]) -> None:
        self._kind = kind
        self._requests = requests

    def __aiter__(self) -> _Decoded:
        return self

    async def __anext__(self) -> Message:
        data = await anext(self._requests)
        # Most requests are small: a coroutine for each would cost as much as its checks.
        if len(data) <= SMALL_BYTES:
            return decode(self._kind, data)
        return await _decoded(self._kind, data)


async def _decoded(kind: type[Message], data: bytes) -> Message:
    if len(data) <= SMALL_BYTES:
        return decode(kind, data)
    return await asyncio.to_thread(decode, kind, data)


class _NotOfCallersWhoLeft(logging.Filter):
    """Drops gRPC's log records about answers to callers that have left."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError))


logging.getLogger("grpc._cython.cygrpc").addFilter(_NotOfCallersWhoLeft())


class CheckingInterceptor(Interceptor):
    """Checks the requests of all methods of the package `slipstream`; ignores other packages.

    A handler gets its requests as arguments: `context.read` would give their bytes.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Returns the call's handler, wrapped in the checks if its package is `slipstream`."""
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or not method.startswith(_PACKAGE):
            return handler
        method_descriptor = descriptor_pool.Default().FindMethodByName(method[1:].replace("/", "."))
        kind = message_factory.GetMessageClass(method_descriptor.input_type)
        encode: Any = handler.response_serializer

        def serialize(response: Message | bytes) -> bytes:
            data: bytes = response if isinstance(response, bytes) else encode(response)
            return data

        streams = handler.request_streaming, handler.response_streaming
        shape = "_".join("stream" if is_stream else "unary" for is_stream in streams)
        inner = getattr(handler, shape)

        async def call(request: Message | _Decoded, context: Context) -> object:
            if not inspect.isasyncgenfunction(inner):
                return await inner(request, context)
            async with aclosing(inner(request, context)) as responses:
                async for response in responses:
                    await context.write(response)
            return None

        async def checked(request: Any, context: Context) -> object:  # noqa: ANN401
            if not handler.request_streaming:
                return await call(await _decoded(kind, request), context)
            # gRPC's generator of requests would keep itself and an unread call in memory.
            source: Any = aiter(request)
            try:
                return await call(_Decoded(kind, source), context)
            finally:
                # A reader that was just cancelled closes the generator instead.
                with suppress(RuntimeError):
                    await source.aclose()

        make = getattr(grpc, f"{shape}_rpc_method_handler")
        # Requests are decoded by `checked`: gRPC answers UNKNOWN to every error of a deserializer.
        checked_handler: Handler = make(_guarded(checked, method), None, serialize)
        return checked_handler


def _guarded(inner: Callable[..., Any], method: str) -> Callable[..., Any]:
    """Returns a behavior whose failure ends its own call only.

    gRPC keeps the exception that ends a call, and the exception's frames keep the call: a reference
    cycle, which would leave a hundred objects of a refused call to the garbage collector. So the
    exception is raised again here, from a frame that holds nothing.
    """

    async def call(request: object, context: Context) -> object:
        try:
            return await inner(request, context)
        except Exception as error:  # noqa: BLE001 - the edge: it ends this call
            ending = await _ending(context, method, error)
        del request, context
        try:
            raise ending
        finally:
            del ending

    return call


async def _ending(context: Context, method: str, error: Exception) -> BaseException:
    """Ends a call that failed; returns the exception to raise, without frames and causes."""
    cause: BaseException = error
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    try:
        if isinstance(cause, grpc.aio.AbortError):
            raise cause
        if isinstance(cause, grpc.aio.BaseError) and not isinstance(cause, grpc.aio.UsageError):
            # A write failed, or the server has stopped: the caller is gone.
            raise asyncio.CancelledError("the caller is gone") from None
        if isinstance(cause, ProtocolError):
            code = grpc.StatusCode.INVALID_ARGUMENT
            text = str(cause)
            await abort(context, code, text, Reason.PROTOCOL)
        logger.error("%s failed", method, exc_info=error)
        line = f"{method} failed: {type(cause).__name__}: {cause}".splitlines()[0]
        await abort(
            context,
            grpc.StatusCode.INTERNAL,
            line[:500],
            Reason.WRONG_STATE,
        )
    except (grpc.aio.AbortError, asyncio.CancelledError) as ending:
        _strip(error)
        _strip(ending)
        return ending


def _strip(error: BaseException) -> None:
    """Removes traceback, context and causes from an error: they would keep its call alive."""
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    linked_errors = (error.__context__, error.__cause__, *inner)
    error.__traceback__ = error.__context__ = error.__cause__ = None
    for other in linked_errors:
        if other is not None:
            _strip(other)


class Refusals:
    """Refuses and counts calls, and tells so in the log.

    Each host is told once a minute, and at most `MAX_TOLD` hosts are.
    """

    def __init__(self, minute: Callable[[], int] = lambda: int(time.monotonic() // 60)) -> None:
        """Takes a function that returns the number of the current minute."""
        self._minute_of = minute
        self._minute = -1
        self._told: set[str] = set()
        # Refused calls so far, told or not.
        self.num_refused = 0

    def refusing(
        self, handler: Handler, code: grpc.StatusCode, text: str, reason: Reason
    ) -> Handler:
        """Returns a handler that refuses the call at its head, and tells so in the log."""

        async def refuse(_: object, context: Context) -> None:
            host = context.peer().rpartition(":")[0]
            self.tell(host or "a caller that has left", text)
            await abort(context, code, text, reason)

        # gRPC calls the handler of a stream of requests before it reads one.
        responses = "stream" if handler.response_streaming else "unary"
        make = getattr(grpc, f"stream_{responses}_rpc_method_handler")
        refusing_handler: Handler = make(
            refuse, handler.request_deserializer, handler.response_serializer
        )
        return refusing_handler

    def tell(self, host: str, text: str) -> None:
        """Counts a refused call of `host`; logs it unless the minute had enough of such lines."""
        self.num_refused += 1
        if (minute := self._minute_of()) != self._minute:
            self._minute, self._told = minute, set()
        if host not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(host)
            logger.warning("a call of %s is refused: %s", host, text)

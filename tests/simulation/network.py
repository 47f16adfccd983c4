"""Streams between simulated processes behind the interfaces of gRPC's channels and servers.

All calls of a pair of processes share one connection, as over HTTP/2: messages of one call keep
their order, those of several calls do not. A partition holds messages back, which a network does
that repeats what was lost; `reset` breaks the connection, and each end learns that at its own time.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
from grpc.aio import EOF, Metadata

from simulation.virtual_loop import PROCESS, Process, VirtualLoop

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


class Network:
    """All connections; `trace` gets a line for each message that arrives."""

    def __init__(
        self, loop: VirtualLoop, seed: int, trace: Callable[[str], None]
    ) -> None:
        self.loop, self.random, self.trace = (
            loop,
            random.Random(f"network/{seed}"),
            trace,
        )
        # A message on its way outlives its sender.
        self.context = contextvars.copy_context()
        self.servers: dict[str, SimulatedServer] = {}
        # Longest time of a message on its way.
        self.delay_s = 0.02
        self.links: dict[tuple[Process, Process], Link] = {}
        # Called with the error of each handler that raises one, and its method.
        self.on_error: Callable[[str, Exception], None] = lambda *_: None
        # Called with each message that arrives: its method, who gets it, and the message.
        self.on_arrival: Callable[[str, Process, Any], None] = lambda *_: None
        # Pairs of process names without a way, in this direction, and the messages held back.
        self.cut: set[tuple[str, str]] = set()
        self._held: list[Callable[[], None]] = []
        self._started: list[asyncio.Event] = []

    def link(self, client: Process, server: Process) -> Link:
        link = self.links.get((client, server))
        if link is None or link.is_broken:
            link = self.links[client, server] = Link(self, client, server)
        return link

    def heal(self) -> None:
        """Ends all partitions; what was held back arrives."""
        self.cut.clear()
        messages = self._held
        self._held = []
        for call in messages:
            call()

    def hold(self, call: Callable[[], None]) -> None:
        self._held.append(call)

    def reset(self, process: Process, *, half_open_s: float = 0.0) -> None:
        """Breaks all connections of a process; peers learn it up to `half_open_s` later."""
        for ends, link in list(self.links.items()):
            if process in ends:
                link.reset(half_open_s)
                self.links.pop(ends, None)

    def started(self) -> None:
        for event in self._started:
            event.set()

    async def until_served(self, address: str) -> None:
        while address not in self.servers:
            event = asyncio.Event()
            self._started.append(event)
            await event.wait()
            self._started.remove(event)


class Link:
    """The connection of one client process to one server process."""

    def __init__(self, network: Network, client: Process, server: Process) -> None:
        self.network = network
        self.client = client
        self.server = server
        self.is_broken = False
        self.calls: dict[SimulatedCall, None] = {}

    def reset(self, half_open_s: float) -> None:
        self.is_broken = True
        loop = self.network.loop
        rnd = self.network.random
        for call in list(self.calls):
            for lose in (call.client_loses, call.server_loses):
                after_s = rnd.uniform(0.0, half_open_s + 0.01)
                loop.call_later(after_s, lose, context=self.network.context)
        self.calls.clear()


class Pipe:
    """One direction of one call: messages arrive in order, each after a delay of its own."""

    def __init__(
        self, link: Link, method: str, sender: Process, receiver: Process
    ) -> None:
        self._link = link
        self._method = method
        self._sender = sender
        self._receiver = receiver
        self._way = (sender.name, receiver.name)
        self._name = f"{self._way} {method}"
        self._last_s = 0.0

    def send(self, arrive: Callable[[Any], None], message: Any) -> None:
        if not self._sender.is_alive or self._link.is_broken:
            return
        network = self._link.network
        if network.cut and self._way in network.cut:
            network.hold(lambda: self._depart(network, arrive, message))
        else:
            self._depart(network, arrive, message)

    def _depart(
        self, network: Network, arrive: Callable[[Any], None], message: Any
    ) -> None:
        delay_s = network.random.uniform(0.0005, network.delay_s)
        self._last_s = max(self._last_s + 1e-6, network.loop.now_s + delay_s)
        network.loop.call_at(
            self._last_s, self._land, network, arrive, message, context=network.context
        )

    def _land(
        self, network: Network, arrive: Callable[[Any], None], message: Any
    ) -> None:
        if self._link.is_broken or not self._receiver.is_alive:
            return
        is_data = isinstance(message, bytes)
        size = len(message) if is_data else 0
        network.trace(f"{network.loop.now_s:.6f} {self._name} {size}")
        if is_data:
            network.on_arrival(self._method, self._receiver, message)
        self._receiver.run(arrive, message)


class SimulatedCall:
    """One call, of any shape; the client's methods are those of gRPC's asynchronous calls."""

    def __init__(
        self,
        channel: SimulatedChannel,
        method: str,
        shape: str,
        coders: tuple[Any, Any],
        *,
        request: Any = None,
        metadata: Any = None,
        timeout: float | None = None,
        wait_for_ready: bool | None = None,
    ) -> None:
        self._channel = channel
        self._method = method
        self._shape = shape
        self._serialize, self._deserialize = coders
        self.metadata = tuple(metadata or ())
        self.network = channel.network
        self.loop = channel.network.loop
        self.client = channel.process
        self.link: Link | None = None
        # Messages that the client has received, then EOF or an error.
        self._received: list[Any] = []
        self._changed = asyncio.Event()
        self._status: Any = None
        self._is_cancelled = False
        self.handler: asyncio.Task | None = None
        # Messages that the handler has received.
        self.requests: list[Any] = []
        self.requests_changed: asyncio.Event | None = None
        self._ended_requests = False
        self._early: list[Any] = []
        self.deadline_s = None if timeout is None else self.loop.now_s + timeout
        if timeout is not None:
            self.loop.call_later(timeout, self._late)
        self._task = self.loop.create_task(self._open(request, wait_for_ready))

    async def _open(self, request: Any, wait_for_ready: bool | None) -> None:
        if wait_for_ready:
            await self.network.until_served(self._channel.address)
        else:
            await asyncio.sleep(
                self.network.random.uniform(0.0005, self.network.delay_s)
            )
        server = self.network.servers.get(self._channel.address)
        if server is None or not server.process.is_alive:
            self._finish(UNAVAILABLE, "failed to connect to all addresses")
            return
        if self._status is not None:
            return
        self.link = self.network.link(self.client, server.process)
        self.link.calls[self] = None
        self._up = Pipe(self.link, self._method, self.client, server.process)
        self._down = Pipe(self.link, self._method, server.process, self.client)
        self._up.send(lambda _: server.accept(self), None)
        for message in self._early:
            self._up.send(self._request, message)
        if request is None:
            return
        if not hasattr(request, "__aiter__"):
            self._send(request)
            self._up.send(self._request, EOF)
            return
        async for message in request:
            if self._status is not None:
                return
            self._send(message)
        self._up.send(self._request, EOF)

    # The client's end.

    def _send(self, message: Any) -> None:
        data = self._serialize(message)
        if self.link is None:
            self._early.append(data)
        else:
            self._up.send(self._request, data)

    async def write(self, message: Any) -> None:
        if self._status is not None:
            raise asyncio.InvalidStateError("the call is over")
        self._send(message)

    async def done_writing(self) -> None:
        self._up.send(self._request, EOF)

    async def read(self) -> Any:
        while not self._received:
            if self._is_cancelled:
                raise asyncio.CancelledError
            if self._status is not None:
                return self._end()
            self._changed.clear()
            await self._changed.wait()
        return self._received.pop(0)

    def _end(self) -> Any:
        code, details, trailing = self._status
        if code is grpc.StatusCode.OK:
            return EOF
        raise grpc.aio.AioRpcError(code, Metadata(), Metadata(*trailing), details)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._messages()

    async def _messages(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not EOF:
            yield message

    def __await__(self) -> Any:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        try:
            message = await self.read()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self._end() if message is EOF else message

    def cancel(self) -> bool:
        if self._status is not None:
            return False
        self._is_cancelled = True
        self._finish(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
        if self.link is not None:
            self._up.send(lambda _: self.server_loses(), None)
        return True

    def _late(self) -> None:
        if self._status is None and self.client.is_alive:
            self.client.run(
                self._finish, grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"
            )
            if self.link is not None:
                self._up.send(lambda _: self.server_loses(), None)

    def client_loses(self) -> None:
        """The client learns that the connection is broken."""
        if self.client.is_alive:
            self.client.run(self._finish, UNAVAILABLE, "the connection was lost")

    def _finish(self, code: grpc.StatusCode, details: str, trailing: Any = ()) -> None:
        if self._status is None:
            self._status = (code, details, trailing)
            self._changed.set()
            if self.link is not None and code is not grpc.StatusCode.CANCELLED:
                self.link.calls.pop(self, None)
            if code is not grpc.StatusCode.OK:
                self._task.cancel()

    # The server's end.

    def _request(self, data: Any) -> None:
        if self._ended_requests:
            return
        self._ended_requests = data is EOF
        self.requests.append(data)
        if self.requests_changed is not None:
            self.requests_changed.set()

    def server_loses(self) -> None:
        """The handler learns that its caller is gone."""
        if self.link is not None and self.link.server.is_alive:
            self.link.server.run(self._hang_up)

    def _hang_up(self) -> None:
        self._request(EOF)
        if self.handler is not None:
            self.handler.cancel()

    def respond(self, data: bytes) -> None:
        self._down.send(self._respond, data)

    def _respond(self, data: bytes) -> None:
        if self._status is None:
            self._received.append(self._deserialize(data))
            self._changed.set()

    def finish(
        self, code: grpc.StatusCode, details: str = "", trailing: Any = ()
    ) -> None:
        self._down.send(lambda _: self._finish(code, details, trailing), None)


class Context:
    """The handler's view of a call."""

    def __init__(self, call: SimulatedCall, serialize: Any) -> None:
        self._call = call
        self._serialize = serialize

    def invocation_metadata(self) -> Any:
        return self._call.metadata

    def peer(self) -> str:
        return f"sim:{self._call.client.name}"

    def time_remaining(self) -> float | None:
        deadline_s = self._call.deadline_s
        return None if deadline_s is None else deadline_s - self._call.loop.now_s

    async def send_initial_metadata(self, metadata: Any) -> None:
        pass

    async def write(self, message: Any) -> None:
        data = message if isinstance(message, bytes) else self._serialize(message)
        self._call.respond(data)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing: Any = ()
    ) -> None:
        self._call.finish(code, details, trailing)
        raise grpc.aio.AbortError


class SimulatedServer:
    """Serves the handlers that were added while its process lives."""

    def __init__(self, network: Network) -> None:
        process = PROCESS.get()
        assert process is not None
        self.process = process
        self._network = network
        self._methods: dict[str, Any] = {}
        self._handlers: list[asyncio.Task] = []
        self.address = ""
        process.at_end.append(self._end)

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        pass

    def add_registered_method_handlers(
        self, service: str, methods: dict[str, Any]
    ) -> None:
        self._methods |= {
            f"/{service}/{name}": handler for name, handler in methods.items()
        }

    async def start(self) -> None:
        self._network.servers[self.address] = self
        self._network.started()

    async def stop(self, grace: float | None) -> None:
        self._end()
        if grace:
            await asyncio.sleep(grace)
        for handler in self._handlers:
            handler.cancel()
        await asyncio.sleep(0)

    def _end(self) -> None:
        if self._network.servers.get(self.address) is self:
            del self._network.servers[self.address]

    def accept(self, call: SimulatedCall) -> None:
        call.requests_changed = asyncio.Event()
        task = asyncio.get_running_loop().create_task(self._serve(call))
        call.handler = task
        self._handlers.append(task)

    async def _serve(self, call: SimulatedCall) -> None:
        handler = self._methods[call._method]
        context = Context(call, handler.response_serializer)
        try:
            argument: Any = self._messages(call, handler)
            if not handler.request_streaming:
                argument = await anext(argument)
            behave = (
                handler.stream_stream
                or handler.unary_stream
                or handler.unary_unary
                or handler.stream_unary
            )
            found = behave(argument, context)
            if inspect.isasyncgen(found):
                async for message in found:
                    await context.write(message)
            else:
                answer = await found
                if not handler.response_streaming:
                    await context.write(answer)
            call.finish(grpc.StatusCode.OK)
        except grpc.aio.AbortError:
            pass
        except Exception as error:  # noqa: BLE001 - told to the caller
            if self.process.is_alive:
                self._network.on_error(call._method, error)
            call.finish(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")
        except asyncio.CancelledError:
            call.finish(UNAVAILABLE, "the server stops")
            raise

    async def _messages(self, call: SimulatedCall, handler: Any) -> AsyncIterator[Any]:
        assert call.requests_changed is not None
        while True:
            while not call.requests:
                call.requests_changed.clear()
                await call.requests_changed.wait()
            data = call.requests.pop(0)
            if data is EOF:
                return
            yield handler.request_deserializer(data)


class SimulatedChannel:
    """A channel of the process that opens it."""

    def __init__(self, network: Network, address: str) -> None:
        process = PROCESS.get()
        assert process is not None
        self.network = network
        self.address = address
        self.process = process

    def _shape(
        self, method: str, shape: str, serializer: Any, deserializer: Any
    ) -> Any:
        def call(request: Any = None, **named: Any) -> SimulatedCall:
            return SimulatedCall(
                self,
                method,
                shape,
                (serializer, deserializer),
                request=request,
                **named,
            )

        return call

    def unary_unary(
        self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Any:
        return self._shape(
            method, "unary_unary", request_serializer, response_deserializer
        )

    unary_stream = stream_stream = stream_unary = unary_unary

    async def close(self, grace: float | None = None) -> None:
        pass

    async def __aenter__(self) -> SimulatedChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

"""The HTTP server of a port on loopback and of episodes' sockets: agents reach the model by it.

Consumes: HTTP requests of agents, parts of replies. Produces: calls of episodes, HTTP responses.
Waits for: a request, its body, the parts of its reply. Unblocked by: their arrival, a client that
hangs up, or the end of the episode.
"""

import asyncio
import contextlib
import hmac
import json
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import uvicorn
from slipstream.client.agent_address import HostAddress
from slipstream.client.agent_exchange import CallExchange, PendingCall, TooManyCalls
from slipstream.client.agent_socket import EpisodeSocket
from slipstream.client.environment import BRANCH_NAME, Endpoint
from slipstream.client.environment_loader import environment_failed
from slipstream.client.relay_inside import ADDRESS
from slipstream.core.errors import ProtocolError
from slipstream.core.machine.process import most_connections
from slipstream.protocol.bounds import check_bounds
from slipstream.v1 import environment_pb2 as pb
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

LOOPBACK = "127.0.0.1"
MAX_BODY_BYTES = 8 << 20
# Bytes of a request before its body.
MAX_HEAD_BYTES = 64 << 10
# Seconds within which a request must be complete, from its first byte or from its connection on.
REQUEST_LIMIT_S = 60.0
MAX_CONNECTIONS = 2048
# Connections of one episode's socket; all sockets of a process share MAX_CONNECTIONS.
MAX_SOCKET_CONNECTIONS = 128
MIN_SOCKET_CONNECTIONS = 4
# Most requests that a connection sends ahead of the answers to earlier ones.
MAX_AHEAD = 16
# Seconds after which an agent should repeat a call that was refused for now (Retry-After).
RETRY_S = 1
# Seconds for which an idle connection stays open. Clients close idle connections earlier.
KEEP_ALIVE_S = 300
# Request headers that are passed on to the rollout server; none of them can hold a secret.
PASSED_HEADERS = {b"accept", b"anthropic-beta", b"anthropic-version", b"content-type"}
PASSED_HEADERS |= {b"user-agent", b"x-request-id"}
# Hop-by-hop headers, which concern one connection only and are not passed on.
HOP_HEADERS = {"connection", "keep-alive", "transfer-encoding", "upgrade"}
# Clients demand a key; a socket asks for none.
NO_KEY = "no-key-is-needed"

Scope: TypeAlias = Mapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[dict[str, Any]]]
Send: TypeAlias = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass(eq=False)
class _Refusal(Exception):
    """An error response; `kind` and `code` become the fields `type` and `code` of its JSON body."""

    status: int
    kind: str
    code: str
    message: str


class BoundedConnection(HttpToolsProtocol):
    """A connection that may be closed while it is idle, and has a deadline for each request."""

    def __init__(
        self,
        *,
        limit_s: float,
        most: int,
        resting: "dict[BoundedConnection, None]",
        **options: Any,  # noqa: ANN401 - uvicorn's
    ) -> None:
        """Takes the seconds in which a request must be complete, and the idle connections.

        `resting` begins with the connection that has been idle longest. That connection is closed
        when a new one makes more than `most` connections.
        """
        super().__init__(**options)
        self._limit_s = limit_s
        self._most = most
        self._resting = resting
        self._deadline: asyncio.TimerHandle | None = None
        # Bytes since a head was whole or a part of a body came.
        self._num_held = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._resting[self] = None
        self._begin()
        if len(self.connections) > self._most:
            oldest = next(iter(self._resting))
            del self._resting[oldest]
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._num_held += len(data)
        super().data_received(data)
        if self._num_held > MAX_HEAD_BYTES or len(self.pipeline) > MAX_AHEAD:
            self.transport.abort()
        self._look(is_begun=True)

    def on_headers_complete(self) -> None:
        self._num_held = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_held = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look(is_begun=False)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._resting.pop(self, None)
        self._end()

    def _look(self, *, is_begun: bool) -> None:
        """Records whether the connection is idle; starts or cancels the deadline of its request."""
        cycle = self.cycle
        is_open = cycle is not None and not cycle.response_complete
        # Data after the head of a refused request are read and dropped.
        if is_open:
            self._resting.pop(self, None)
        else:
            self._resting.setdefault(self)
        if is_open and (self.pipeline or not cycle.more_body):
            self._end()
        elif self._deadline is None and (is_begun or is_open):
            self._begin()

    def _begin(self) -> None:
        self._deadline = self.loop.call_later(self._limit_s, self.transport.abort)

    def _end(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Installs no signal handlers: the program that owns the event loop has its own."""
        yield


def bounded_server(
    application: Callable[[Scope, Receive, Send], Awaitable[None]],
    *,
    limit_s: float = REQUEST_LIMIT_S,
    max_connections: int = MAX_CONNECTIONS,
    port: int = 0,
) -> uvicorn.Config:
    """Returns the settings of a server on loopback that holds little for whoever has no key.

    Heads have a size, requests a deadline, connections a number, at most half of what the process
    may open. The body is read where `application` asks for it.
    """
    return uvicorn.Config(
        application,
        host=LOOPBACK,
        port=port,
        interface="asgi3",
        http=partial(  # type: ignore[arg-type]
            BoundedConnection, limit_s=limit_s, most=most_connections(max_connections), resting={}
        ),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
    )


class Gateway:
    """Serves the endpoints of a process's open episodes, as tasks of the running event loop."""

    def __init__(self, host_address: HostAddress | None = None) -> None:
        """Takes the address by which other hosts reach this one, where there is one.

        It opens nothing: the port is opened for the first episode that is reached by address.
        """
        self._host_address = host_address
        self._exchanges: dict[str, tuple[CallExchange, Endpoint]] = {}
        self._sockets: dict[str, EpisodeSocket] = {}
        self._server = _Server(bounded_server(self._serve))
        self._socket: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Closes every connection, the port and all sockets."""
        for served in self._sockets.values():
            served.close()
        self._sockets.clear()
        self._server.should_exit = self._server.force_exit = True
        try:
            if self._serving is not None:
                await self._serving
        finally:
            if self._socket is not None:
                self._socket.close()

    def open(
        self, exchange: CallExchange, *, by_socket: bool = False, by_url: bool = False
    ) -> Endpoint:
        """Returns the endpoint of a new episode, whose calls go to `exchange`.

        If `by_socket`, it is a unix socket of its own, and no port; if `by_url`, an address for
        other hosts. Raises OSError if there is no free port, or no place for the socket, and
        EnvironmentFailed if other hosts do not reach this one.
        """
        if by_url and self._host_address is None:
            raise environment_failed(
                "its agents call from beyond this host (needs_url): set agents.listen"
            )
        if by_socket:
            state = ServerState()
            connection = self._socket_connections(exchange, state)
            served = EpisodeSocket(connection, state.connections)
            endpoint = Endpoint(ADDRESS, NO_KEY, served.path)
            self._sockets[served.path] = served
            return endpoint
        port = self._port()
        if by_url and self._host_address is not None:
            token = self._host_address.new_path(port)
            url = f"{self._host_address.url}/{token}"
        else:
            token = secrets.token_urlsafe(16)
            url = f"http://{LOOPBACK}:{port}/{token}"
        endpoint = Endpoint(url, f"sk-slipstream-{secrets.token_urlsafe(32)}")
        self._exchanges[token] = (exchange, endpoint)
        return endpoint

    def forget(self, endpoint: Endpoint) -> None:
        """Refuses all later calls to `endpoint`; its socket and all connections of it are gone."""
        if endpoint.socket_path:
            served = self._sockets.pop(endpoint.socket_path, None)
            if served is not None:
                served.close()
        else:
            self._exchanges.pop(endpoint.anthropic_url.rpartition("/")[2], None)

    def _port(self) -> int:
        """Returns the port on loopback, which is opened by the first call."""
        if self._socket is None:
            # asyncio sets TCP_NODELAY only where the protocol is named; without it every answer of
            # two parts waits 40 ms for an acknowledgement.
            listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            listening.bind((LOOPBACK, 0))
            listening.listen(2048)
            self._socket = listening
            self._serving = asyncio.get_running_loop().create_task(
                self._server.serve(sockets=[listening])
            )
        port: int = self._socket.getsockname()[1]
        return port

    def _socket_connections(
        self, exchange: CallExchange, state: ServerState
    ) -> Callable[[], BoundedConnection]:
        """Returns what makes the connections of a socket, all of whose calls go to `exchange`."""
        loop = asyncio.get_running_loop()
        config = bounded_server(partial(self._serve_socket, exchange))
        resting: dict[BoundedConnection, None] = {}

        def connection() -> BoundedConnection:
            share = most_connections(MAX_CONNECTIONS) // max(1, len(self._sockets))
            return BoundedConnection(
                limit_s=REQUEST_LIMIT_S,
                most=max(MIN_SOCKET_CONNECTIONS, min(MAX_SOCKET_CONNECTIONS, share)),
                resting=resting,
                config=config,
                server_state=state,
                app_state={},
                _loop=loop,
            )

        return connection

    async def _serve_socket(
        self, exchange: CallExchange, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answers a request on an episode's socket, whose key, if any, is not looked at."""
        path: str = scope["path"]
        await _exchanged(
            lambda: (exchange, _call(scope, path.removeprefix("/"))), scope, receive, send
        )

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _exchanged(lambda: self._accept(scope), scope, receive, send)

    def _accept(self, scope: Scope) -> tuple[CallExchange, pb.AgentCall]:
        """Returns a request's exchange, and the call without its body; raises _Refusal."""
        path: str = scope["path"]
        token, _, rest = path.removeprefix("/").partition("/")
        entry = self._exchanges.get(token)
        head = scope["headers"]
        _check_head(scope)
        key = b"" if entry is None else entry[1].api_key.encode()
        names = (b"authorization", b"x-api-key")
        shown = [value.removeprefix(b"Bearer ") for name, value in head if name in names]
        if entry is None or not any(hmac.compare_digest(value, key) for value in shown):
            raise _over()
        return entry[0], _call(scope, rest)


async def _exchanged(
    accept: Callable[[], tuple[CallExchange, pb.AgentCall]],
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Passes a request to the exchange that `accept` returns with the call, or sends a refusal."""
    try:
        exchange, request = accept()
        with exchange.reading() as count:
            body = await _body(scope, receive, count)
            if body is None:
                return
            if exchange.has_ended:
                raise _over()
            request.body = body
            call = exchange.open(request)
    except _Refusal as refusal:
        await _refuse(send, refusal)
    except TooManyCalls:
        what = "the episode has too many open calls; wait for one of them"
        await _refuse(send, _Refusal(429, "rate_limit_error", "rate_limit_exceeded", what))
    else:
        await _relay(exchange, call, receive, send)


def _check_head(scope: Scope) -> None:
    """Raises _Refusal for a request whose path and headers are too long."""
    path: str = scope["path"]
    num_bytes = len(path)
    for name, value in scope["headers"]:
        num_bytes += len(name) + len(value)
    if num_bytes > MAX_HEAD_BYTES:
        what = f"the headers of a request have at most {MAX_HEAD_BYTES} bytes"
        raise _Refusal(400, "invalid_request_error", "invalid_request", what)


def _call(scope: Scope, rest: str) -> pb.AgentCall:
    """Returns the call of a request, without its body; raises _Refusal.

    `rest` is the path of the request below the episode's address, without a slash before it.
    """
    _check_head(scope)
    branch = ""
    if rest.startswith("b/"):
        branch, _, rest = rest.removeprefix("b/").partition("/")
        if BRANCH_NAME.fullmatch(branch) is None:
            raise _Refusal(404, "not_found_error", "not_found", f"no branch {branch[:64]!r}")
    if not rest.startswith("v1/"):
        what = "the endpoint has only paths below /v1"
        raise _Refusal(404, "not_found_error", "not_found", what)
    query = scope["query_string"].decode("latin-1")
    request = pb.AgentCall(
        method=scope["method"],
        path=f"/{rest}?{query}" if query else f"/{rest}",
        headers=[
            pb.HttpHeader(name=name.decode("latin-1"), value=value.decode("latin-1"))
            for name, value in scope["headers"]
            if name in PASSED_HEADERS
        ],
        branch=branch,
    )
    try:
        check_bounds(request)
    except ProtocolError as error:
        raise _Refusal(400, "invalid_request_error", "invalid_request", str(error)) from None
    return request


async def _relay(exchange: CallExchange, call: PendingCall, receive: Receive, send: Send) -> None:
    """Sends the parts of a reply as they come; a client that hangs up ends its call."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        call.parts.put_nowait(None)

    watching = asyncio.get_running_loop().create_task(watch())
    is_begun = False
    try:
        while True:
            part = await call.parts.get()
            try:
                if part is None:
                    break
                if not is_begun:
                    headers = [
                        (
                            header.name.lower().encode("latin-1"),
                            header.value.encode("latin-1", "replace"),
                        )
                        for header in part.headers
                        if header.name.lower() not in HOP_HEADERS
                    ]
                    start = {"type": "http.response.start", "status": part.status or 500}
                    await send(start | {"headers": headers})
                    is_begun = True
                body = {"type": "http.response.body", "body": part.body}
                await send(body | {"more_body": not part.is_last})
            finally:
                call.parts.task_done()
            if part.is_last:
                return
        if is_begun:
            await send({"type": "http.response.body"})
        else:
            await _refuse(send, _over())
    finally:
        watching.cancel()
        exchange.close(call)


async def _body(scope: Scope, receive: Receive, count: Callable[[bytes], None]) -> bytes | None:
    """Returns a request's body, of which `count` gets each part, or None if the client hung up."""
    headers = dict(scope["headers"])
    if headers.get(b"content-encoding", b"identity") != b"identity":
        what = "the body must have no content-encoding"
        raise _Refusal(415, "invalid_request_error", "unsupported_media_type", what)
    length = headers.get(b"content-length", b"0")
    parts: list[bytes] = []
    size = int(length) if length.isdigit() else 0
    received = 0
    while max(size, received) <= MAX_BODY_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        count(parts[-1])
        received += len(parts[-1])
        if not message.get("more_body", False):
            return b"".join(parts)
    what = f"the body of a request has at most {MAX_BODY_BYTES} bytes, got {max(size, received)}"
    raise _Refusal(413, "request_too_large", "request_too_large", what)


def _over() -> _Refusal:
    what = "this is no endpoint of an open episode, or its api_key is missing"
    return _Refusal(401, "authentication_error", "invalid_api_key", what)


async def _refuse(send: Send, refusal: _Refusal) -> None:
    error = {"type": refusal.kind, "code": refusal.code, "message": refusal.message, "param": None}
    body = json.dumps({"type": "error", "error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if refusal.status == 429:
        headers.append((b"retry-after", b"%d" % RETRY_S))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

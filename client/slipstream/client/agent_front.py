"""The port of a host at which agents from elsewhere call; it passes calls to the host's workers.

Consumes: connections, with TLS where the run has a certificate. Produces: the same bytes at the
gateway of a worker, and back. Waits for: a handshake and the head of one request, both with a
deadline; then for either side. Unblocked by: their bytes, their end, or the deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

from slipstream.client.agent_address import HostAddress
from slipstream.client.agent_gateway import LOOPBACK, MAX_CONNECTIONS, MAX_HEAD_BYTES
from slipstream.core.errors import ConfigError
from slipstream.core.machine.address import address_parts, is_unspecified
from slipstream.core.machine.process import most_connections
from slipstream.core.settings.config import Config
from slipstream.core.settings.sections import SecuritySection
from slipstream.protocol.access.checked_calls import Refusals
from slipstream.protocol.access.run_token import run_credentials

# Seconds for a TLS handshake and the head of a request together.
HEAD_LIMIT_S = 20.0
# Connections that have not shown a path of ours yet. The oldest goes when another one comes.
MAX_UNPROVEN = 128
CHUNK_BYTES = 65536
# Headers of one connection, which are not passed on: a connection carries one request, since the
# next one may be another worker's.
_OF_CONNECTION = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"upgrade"})


class AgentFront:
    """Passes the calls of agents from elsewhere; `refusals` counts those that it refuses."""

    def __init__(self, address: HostAddress, tls: ssl.SSLContext | None) -> None:
        self.address = address
        self._tls = tls
        self._prefix = urlsplit(address.url).path.rstrip("/").encode()
        self._most = most_connections(MAX_CONNECTIONS)
        # The tasks of connections, and of those that have shown no path of ours, the oldest first.
        self._serving: set[asyncio.Task[None]] = set()
        self._unproven: dict[asyncio.Task[None], None] = {}
        self.refusals = Refusals()

    @contextlib.asynccontextmanager
    async def serving(self, listen: str) -> AsyncIterator[None]:
        """Serves at the address `listen` inside the block; raises ConfigError if it cannot."""
        claim = _claim(listen, self.address.key)
        try:
            listening = _shared_socket(listen)
        except OSError as error:
            claim.close()
            raise ConfigError(
                f"agents.listen: nothing can listen at {listen}: {error.strerror or error}"
            ) from error
        server = await asyncio.start_server(
            self._serve,
            sock=listening,
            limit=MAX_HEAD_BYTES,
        )
        try:
            yield
        finally:
            server.close()
            for task in self._serving:
                task.cancel()
            await asyncio.gather(*self._serving, return_exceptions=True)
            claim.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        host = str(peer[0]) if peer else "a caller that has left"
        if len(self._serving) >= self._most:
            self.refusals.tell(host, f"{self._most} calls of agents are open")
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        self._unproven[task] = None
        if len(self._unproven) > MAX_UNPROVEN:
            oldest = next(iter(self._unproven))
            del self._unproven[oldest]
            self.refusals.tell(host, f"{MAX_UNPROVEN} connections have shown no path yet")
            oldest.cancel()
        try:
            async with asyncio.timeout(HEAD_LIMIT_S):
                if self._tls is not None:
                    await writer.start_tls(self._tls, ssl_handshake_timeout=HEAD_LIMIT_S)
                head = await reader.readuntil(b"\r\n\r\n")
            path, passed_head = self._read_head(head)
            port = self.address.port_of(path)
            if port is None:
                self.refusals.tell(host, "its path is of no open episode")
                await self._refuse(writer)
                return
            self._unproven.pop(task, None)
            await self._join(port, passed_head, reader, writer)
        except (TimeoutError, asyncio.LimitOverrunError, asyncio.IncompleteReadError) as error:
            self.refusals.tell(host, f"it sent no whole head of a request: {type(error).__name__}")
        except (ssl.SSLError, ConnectionError) as error:
            if task in self._unproven:
                self.refusals.tell(host, f"its connection broke: {error}")
        finally:
            self._unproven.pop(task, None)
            self._serving.discard(task)
            writer.close()

    def _read_head(self, head: bytes) -> tuple[str, bytes]:
        """Returns the first part of a request's path, and the head to pass on."""
        request, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
        method, _, rest = request.partition(b" ")
        target = rest.removeprefix(self._prefix)
        path = target.removeprefix(b"/").partition(b"/")[0]
        passed = [b"%s %s" % (method, target)]
        for line in lines:
            name = line.partition(b":")[0].strip().lower()
            if name not in _OF_CONNECTION:
                passed.append(line)
        passed += [b"connection: close", b"", b""]
        return path.decode("latin-1"), b"\r\n".join(passed)

    async def _join(
        self,
        port: int,
        head: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Passes bytes both ways until one of both sides has ended."""
        try:
            answers, worker = await asyncio.open_connection(LOOPBACK, port)
        except OSError:
            await self._refuse(writer)
            return
        try:
            worker.write(head)
            async with asyncio.TaskGroup() as group:
                sides = [
                    group.create_task(_pass(reader, worker)),
                    group.create_task(_pass(answers, writer)),
                ]
                await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
                for side in sides:
                    side.cancel()
        finally:
            worker.close()

    async def _refuse(self, writer: asyncio.StreamWriter) -> None:
        error = {
            "type": "authentication_error",
            "code": "invalid_api_key",
            "message": "this is no endpoint of an open episode",
            "param": None,
        }
        body = json.dumps({"type": "error", "error": error}).encode()
        writer.write(
            b"HTTP/1.1 401 Unauthorized\r\ncontent-type: application/json\r\n"
            b"connection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )
        async with asyncio.timeout(HEAD_LIMIT_S):
            await writer.drain()


def _claim(address: str, key: bytes) -> socket.socket:
    """Returns a socket whose name, until it is closed, tells that a port is for those with `key`.

    Raises ConfigError where it is for others: the kernel would give them some of the calls.
    """
    port = address_parts(address)[1]
    name = f"slipstream-agents-{port}-"
    owner = f"{name}{hashlib.sha256(key).hexdigest()[:32]}"
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    claim.bind(f"\0{owner}-{secrets.token_hex(8)}")
    for line in Path("/proc/net/unix").read_text(errors="replace").splitlines():
        claimed = line.rpartition("@")[2]
        if claimed.startswith(name) and not claimed.startswith(owner):
            claim.close()
            raise ConfigError(
                f"agents.listen: port {port} of this host is another run's: give each its own"
            )
    return claim


def front_key(config: Config) -> bytes:
    """Returns the key of all servers of a run, any of which may get a call of another's worker.

    Before the run has a token it is drawn.
    """
    token = run_credentials(config).token or secrets.token_hex(32)
    return hmac.new(token.encode(), b"agents", hashlib.sha256).digest()


def _shared_socket(address: str) -> socket.socket:
    """Returns a socket that other servers of this user and host may share; raises OSError."""
    host, port = address_parts(address)
    (family, *_, place), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # The unspecified address of IPv6 takes callers by IPv4 too.
    takes_both = family == socket.AF_INET6 and is_unspecified(host) and socket.has_dualstack_ipv6()
    return socket.create_server(
        place,
        family=family,
        reuse_port=True,
        backlog=512,
        dualstack_ipv6=takes_both,
    )


async def _pass(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while data := await source.read(CHUNK_BYTES):
            target.write(data)
            await target.drain()


def tls_of(security: SecuritySection) -> ssl.SSLContext | None:
    """Returns the TLS of the run's certificate, None without one; raises OSError for its files."""
    if security.tls_certificate is None:
        return None
    authority = security.tls_client_ca
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority)
    context.load_cert_chain(security.tls_certificate, security.tls_key)
    if authority is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


@contextlib.asynccontextmanager
async def agent_front(config: Config) -> AsyncIterator[AgentFront]:
    """Serves agents from elsewhere inside the block at `agents.listen`.

    Raises ConfigError if nothing can listen there.
    """
    listen = config.agents.listen
    assert listen is not None
    tls = tls_of(config.security)
    scheme = "http" if tls is None else "https"
    url = config.agents.url or f"{scheme}://{listen}"
    url = url.replace("{host}", socket.gethostname()).rstrip("/")
    address = HostAddress(url, front_key(config))
    front = AgentFront(address, tls)
    async with front.serving(listen):
        yield front

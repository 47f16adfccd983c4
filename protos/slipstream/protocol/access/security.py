"""Opens gRPC servers and channels, which off loopback need TLS and a token."""

import hmac
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import parse_qsl, urlencode, urlsplit

import grpc
import grpc.aio
from grpc.experimental import ChannelOptions
from slipstream.core.errors import ConfigError
from slipstream.core.machine.address import address_parts
from slipstream.core.machine.address import is_loopback as is_loopback_host
from slipstream.core.machine.process import most_connections
from slipstream.core.settings.config import Config
from slipstream.core.settings.sections import QueueEnd, QueueSection, SecuritySection
from slipstream.protocol.access.checked_calls import (
    CheckingInterceptor,
    Handler,
    Interceptor,
    Refusals,
)
from slipstream.protocol.access.tokens import (
    NAMELESS,
    OF_ANY_RELEASE,
    RIGHTS,
    RUN_KEY,
    TOKEN_KEY,
    check_own,
    is_bound,
    may_call,
    read_secret,
    read_text,
    read_tokens,
    role_token,
)
from slipstream.protocol.release import RELEASE, RELEASE_KEY, other_release
from slipstream.protocol.rich_errors import Reason

MAX_MESSAGE_BYTES = 64 << 20
# Largest request; the largest `max_message_bytes` of a method is a little smaller.
MAX_REQUEST_BYTES = 33 << 20
MAX_STREAMS = 4096

# Begins the cause of a call whose controller has a certificate that no retry makes good.
UNTRUSTED = "the controller's certificate is refused"
_UNTRUSTED = re.compile(r"CERTIFICATE_VERIFY_FAILED: (.+?)(?:: OK)?$|(Hostname Verif.+ failed)")

# Words that redis-py takes for "no".
_NO = ("0", "f", "false", "n", "no")

_COMMON_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # gRPC waits for this one too; its default is a minute.
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Pings that a busy machine delayed arrive together, which must not close the connection.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    # A controller may move to another address of its name; gRPC asks for it every 30 s, which is as
    # long as callers try.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # The variables for web proxies are not meant for the hosts of a run.
    ("grpc.enable_http_proxy", 0),
    # With this option two servers on one port would silently share its connections.
    ("grpc.so_reuseport", 0),
)
CHANNEL_OPTIONS = (*_COMMON_OPTIONS, ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES))
SERVER_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    # A small message could decompress to any size, after its own size was checked.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # Per connection, which all servers of one process share; gRPC has no limit of its own.
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    # A connection that says nothing; gRPC waits for two minutes.
    ("grpc.server_handshake_timeout_ms", 20_000),
)
_BLOCKING_OPTIONS = (*CHANNEL_OPTIONS, (ChannelOptions.SingleThreadedUnaryStream, 1))


@dataclass(frozen=True)
class Credentials:
    """The contents of the files that `SecuritySection` names."""

    certificate: bytes | None = None
    key: bytes | None = None
    ca: bytes | None = None
    token: str | None = None
    client_ca: bytes | None = None
    # The further lines of the token file, which the controller accepts or takes back.
    further_tokens: tuple[str, ...] = ()
    # Opens /metrics only.
    metrics_token: str | None = None

    @property
    def has_tls(self) -> bool:
        return self.certificate is not None

    @classmethod
    def load(cls, section: SecuritySection) -> Self:
        """Reads the files; raises ConfigError for a missing file or an invalid token."""

        def read(name: str) -> bytes | None:
            path: Path | None = getattr(section, name)
            return None if path is None else read_secret(path, f"security.{name}")

        def tokens(name: str) -> tuple[str | None, ...]:
            path: Path | None = getattr(section, name)
            return (None,) if path is None else read_tokens(path, f"security.{name}")

        token, *further = tokens("token_file")
        return cls(
            certificate=read("tls_certificate"),
            key=read("tls_key"),
            ca=read("tls_ca"),
            client_ca=read("tls_client_ca"),
            token=token,
            further_tokens=tuple(filter(None, further)),
            metrics_token=tokens("metrics_token_file")[0],
        )


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach `address` ("host:port" or "unix:path")."""
    if address.startswith("unix:"):
        return True
    return is_loopback_host(address_parts(address)[0])


def check_address(address: str, credentials: Credentials, *, what: str) -> None:
    """Raises ConfigError unless `address` is loopback or the credentials have TLS and a token."""
    has_tls = credentials.has_tls or bool(credentials.ca)
    has_token = bool(credentials.token)
    needed = {"tls_certificate and tls_key, or tls_ca": has_tls, "token_file": has_token}
    _check_needed(address, what, needed)


def check_metrics_address(address: str, credentials: Credentials) -> None:
    """Raises ConfigError unless /metrics at `address` is loopback, or has TLS and its own token."""
    has_token = bool(credentials.metrics_token)
    needed = {"tls_certificate and tls_key": credentials.has_tls, "metrics_token_file": has_token}
    _check_needed(address, "tracking.prometheus", needed)


def _check_needed(address: str, what: str, needed: Mapping[str, bool]) -> None:
    for setting, is_there in needed.items():
        if not (is_there or is_loopback(address)):
            raise ConfigError(f"{what} {address} is not loopback: set security.{setting}")


def create_server(
    credentials: Credentials, *, run_id: str | None = None, refusals: Refusals | None = None
) -> grpc.aio.Server:
    """Creates a gRPC server that checks callers' tokens, if there are any, and messages' bounds.

    With `run_id` it also refuses calls that name another run, or none. `refusals` counts refused
    calls. A handler that fails ends its own call only. Raises ConfigError if a token is a role's,
    since the tokens of other roles cannot be derived from it.
    """
    tokens = () if credentials.token is None else (credentials.token, *credentials.further_tokens)
    access = AccessInterceptor(run_id, tokens, refusals or Refusals())
    options = (*SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", most_connections()))
    return grpc.aio.server(interceptors=[access, CheckingInterceptor()], options=options)


def bind(server: grpc.aio.Server, address: str, credentials: Credentials) -> int:
    """Binds `address` and returns the port. Raises ConfigError when it is taken or not allowed."""
    check_address(address, credentials, what="the address")
    try:
        if credentials.has_tls and not address.startswith("unix:"):
            assert credentials.key is not None
            assert credentials.certificate is not None
            tls = grpc.ssl_server_credentials(
                [(credentials.key, credentials.certificate)],
                root_certificates=credentials.client_ca,
                require_client_auth=credentials.client_ca is not None,
            )
            return server.add_secure_port(address, tls)
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address}: is the port in use?") from error


def open_channel(address: str, credentials: Credentials) -> grpc.aio.Channel:
    """Opens a channel to `address`. Raises ConfigError if `check_address` refuses the address.

    The channel uses TLS if the credentials have a CA or a certificate, except on a unix socket. The
    client presents its certificate to a controller that asks for one.
    """
    if tls := _caller_tls(address, credentials):
        return grpc.aio.secure_channel(address, tls, options=CHANNEL_OPTIONS)
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def open_blocking_channel(address: str, credentials: Credentials) -> grpc.Channel:
    """Opens a channel like `open_channel`, for code that is not asynchronous.

    A stream's answers are read in the thread that asks for them, because grpc's own thread would
    have to wake that thread for each answer.
    """
    if tls := _caller_tls(address, credentials):
        return grpc.secure_channel(address, tls, options=_BLOCKING_OPTIONS)
    return grpc.insecure_channel(address, options=_BLOCKING_OPTIONS)


def _caller_tls(address: str, credentials: Credentials) -> grpc.ChannelCredentials | None:
    """Returns the TLS of a channel, None for one without; raises like `check_address`."""
    check_address(address, credentials, what="the controller")
    if address.startswith("unix:") or not (credentials.ca or credentials.has_tls):
        return None
    return grpc.ssl_channel_credentials(
        root_certificates=credentials.ca or credentials.certificate,
        private_key=credentials.key,
        certificate_chain=credentials.certificate,
    )


def cause_of(code: grpc.StatusCode, details: str | None) -> str:
    """Returns in one line why a call failed: gRPC's words, or a certificate's fault and remedy."""
    words = " ".join((details or code.name).split())
    if (match := _UNTRUSTED.search(words)) is None:
        return words
    fault = match[1] or match[2]
    if "certificate has expired" in fault or match[2]:
        what = "deploy/make_certificates.sh issues a new one, which a controller reads at its start"
    else:
        what = "is security.tls_ca its authority?"
    return f"{UNTRUSTED} ({fault}): {what}"


def redis_url_of(queue: QueueSection, end: QueueEnd) -> str:
    """Returns `redis_url` with the user and password of `end`.

    Raises ConfigError if only the other end has a user, and if a password file is missing or empty.
    For an address that is not loopback, also raises it if the URL lacks
    TLS, or has options that switch off checks of the certificate.
    """
    assert queue.redis_url is not None, "its section has checked that"
    parts = urlsplit(queue.redis_url)
    if parts.scheme == "redis" and not is_loopback(f"{parts.hostname}:0"):
        raise ConfigError(f"queue.redis_url: {parts.hostname} is not loopback: use rediss://")
    query = dict(parse_qsl(parts.query.lower()))
    for option, weak in (("ssl_cert_reqs", ("none", "optional")), ("ssl_check_hostname", _NO)):
        if query.get(option) in weak and not is_loopback(f"{parts.hostname}:0"):
            raise ConfigError(
                f"queue.redis_url: {option}={query[option]} would let anybody answer as "
                f"{parts.hostname}: leave it out"
            )
    user = queue.user_of(end)
    other = queue.controller or queue.rollout_server
    if user is None and other is not None:
        raise ConfigError(f"queue.{end} is needed: the other end's user is not for this one")
    if user is None:
        return queue.redis_url
    what = f"queue.{end}.password_file"
    password = read_text(user.password_file, what).strip()
    if not password:
        raise ConfigError(f"{what}: {user.password_file} is empty")
    between = "&" if parts.query else "?"
    entries = urlencode({"username": user.user, "password": password})
    return f"{queue.redis_url}{between}{entries}"


def without_password(config: Config) -> Config:
    """Returns the settings with *** for a password in `queue.redis_url`, for messages."""
    if config.queue.redis_url is None:
        return config
    url = re.sub(r"(?<=://)([^:@/]*):[^@]*@", r"\1:***@", config.queue.redis_url)
    url = re.sub(r"([?&]password)=[^&]*", r"\1=***", url)
    queue = config.queue.model_copy(update={"redis_url": url})
    return config.model_copy(update={"queue": queue})


def call_metadata(
    credentials: Credentials, run_id: str | None = None
) -> tuple[tuple[str, str], ...]:
    """Returns the metadata that every call must carry: our release, the token, the run's id."""
    token = () if credentials.token is None else ((TOKEN_KEY, f"Bearer {credentials.token}"),)
    return (RELEASE_KEY, RELEASE), *token, *(() if run_id is None else ((RUN_KEY, run_id),))


class AccessInterceptor(Interceptor):
    """Refuses calls of another run or release, or without a token whose role may make them.

    Without a run's id every run's calls pass, and without tokens everybody's. A call that names no
    run may only call `NAMELESS` methods, one of another release those `OF_ANY_RELEASE`, and one of
    no release those of clients.
    """

    def __init__(self, run_id: str | None, tokens: Sequence[str], refusals: Refusals) -> None:
        """Takes the lines of the token file; raises ConfigError if one is a role's token."""
        check_own(tokens)
        self._run_id = run_id
        self._refusals = refusals
        refused = {line[1:] for line in tokens if line.startswith("-")}
        # Values that callers may show, and their roles: None for the run's own token.
        self._expected = [
            (f"Bearer {token}".encode(), role)
            for line in tokens
            if not line.startswith("-")
            for token, role in [(line, None), *((role_token(line, r), r) for r in RIGHTS)]
            if token not in refused
        ]

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Returns the call's handler, or a handler that refuses the call and reads nothing."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        refusing = self._refusals.refusing
        method = str(handler_call_details.method)
        metadata = dict(handler_call_details.invocation_metadata or ())
        if self._expected:
            # Tokens are compared in constant time.
            shown = str(metadata.get(TOKEN_KEY, "")).encode()
            roles = [role for token, role in self._expected if hmac.compare_digest(shown, token)]
            if not roles:
                # A caller without a token learns of no run.
                text = "the token is missing or wrong (security.token_file)"
                code = grpc.StatusCode.UNAUTHENTICATED
                reason = Reason.WRONG_TOKEN
                return refusing(handler, code, text, reason)
            if not any(may_call(role, method) for role in roles):
                text = f"the token of a {roles[0]} does not open {method} (docs/security.md)"
                code = grpc.StatusCode.PERMISSION_DENIED
                reason = Reason.NOT_OF_THE_ROLE
                return refusing(handler, code, text, reason)
        run_named = metadata.get(RUN_KEY, "")
        ours = self._run_id
        # A client may be somebody's own program, which has no release.
        is_free = ours is None or may_call("client", method)
        shown_release = str(metadata.get(RELEASE_KEY, RELEASE if is_free else ""))
        text = other_release(shown_release, of_worker=ours is None)
        if text and is_bound(method, OF_ANY_RELEASE):
            code = grpc.StatusCode.FAILED_PRECONDITION
            reason = Reason.PROTOCOL
            handler = refusing(handler, code, text, reason)
        if ours is not None and run_named != ours and (run_named or is_bound(method, NAMELESS)):
            text = f"a call names its run in {RUN_KEY}"
            if run_named:
                text = f"this is the controller of another run than {run_named!s}"
            code = grpc.StatusCode.FAILED_PRECONDITION
            reason = Reason.OTHER_RUN
            handler = refusing(handler, code, text, reason)
        return handler

"""Checks TLS files and tokens of callers: the run's token opens all methods, a role's only some.

A role's token is `ROLE.` and, in hexadecimal, the HMAC-SHA256 of `slipstream ROLE` with the run's
token as the key. So the controller keeps one secret, and a host gets only the token of its role;
deploy/make_certificates.sh writes the tokens of all roles.

The first line of a token file is the token that its owner sends. The controller also accepts the
tokens in further lines. A file is read again when it changes. To replace the token during a run,
write the new token into the first line, and keep the old one below it until all hosts have the new
token. A line `-TOKEN` in the controller's file takes back a role's token that a line above it made.
"""

from __future__ import annotations

import hmac
import logging
import os
import ssl
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import overload

from slipstream.core.errors import ConfigError
from slipstream.core.machine.address import address_parts
from slipstream.core.machine.files import read_regular
from slipstream.core.settings.config import Config
from slipstream.core.settings.sections import SecuritySection

MIN_TOKEN_CHARACTERS = 32
# Lines of a token file; each call is compared with the tokens of all.
MAX_TOKENS = 64
TOKEN_KEY, RUN_KEY = "authorization", "slipstream-run"

_PREFIX = "/slipstream.v1."
_READS = ("StatusService/GetStatus", "StatusService/Watch", "EnvironmentService/ListEnvironments")
# Methods that tell a caller which run it has found, so that they can be called without its id.
NAMELESS = (*_READS, "StatusService/GetSetup")
# Methods that each role may call in addition to `_READS`: all methods of a service, or one.
RIGHTS: dict[str, tuple[str, ...]] = {
    "trainer": ("TrainerService/", "StatusService/StopRun", "StatusService/GetSetup"),
    "rollout-server": ("FleetService/", "TrajectoryService/", "StatusService/GetSetup"),
    "client": ("EnvironmentService/",),
    "reader": (),
}

logger = logging.getLogger(__name__)


def role_token(token: str, role: str) -> str:
    """Returns the token of `role`; `token` is the run's token, or the token of `role` already."""
    if role_of(token) == role:
        return token
    return f"{role}.{hmac.digest(token.encode(), f'slipstream {role}'.encode(), 'sha256').hex()}"


def role_of(token: str) -> str | None:
    """Returns the role of a role's token, or None for the run's own token."""
    role, dot, _ = token.partition(".")
    return role if dot and role in RIGHTS else None


def needs_run(method: str) -> bool:
    """Whether calls of `method` must name the run by its id in the metadata `RUN_KEY`."""
    return method.startswith(_PREFIX) and method.removeprefix(_PREFIX) not in NAMELESS


def may_call(role: str | None, method: str) -> bool:
    """Whether the holder of a token may call `method`, such as /slipstream.v1.FleetService/Join.

    `role` is the token's role, or None for the run's own token, which opens every method. Methods
    of other packages, such as gRPC's health check, are open to all.
    """
    if role is None or not method.startswith(_PREFIX):
        return True
    return method.removeprefix(_PREFIX).startswith((*_READS, *RIGHTS[role]))


def read_secret(path: Path, what: str) -> bytes:
    """Returns the bytes of the file of a setting; raises ConfigError if it cannot be read."""
    try:
        return read_regular(path)
    except OSError as error:
        raise ConfigError(f"{what}: {path}: {error.strerror}") from error


def read_text(path: Path, what: str) -> str:
    """Returns the text of the file of a setting; raises ConfigError if there is none."""
    try:
        return read_secret(path, what).decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{what} must hold text in UTF-8, {path} does not") from None


def read_tokens(path: Path, what: str = "security.token_file") -> tuple[str, ...]:
    """Returns the tokens of a file, one per line.

    A line that takes back a role's token begins with "-". Raises ConfigError, which names the
    setting `what`, if the file cannot be read, or a token is too short or has characters other than
    printable ASCII, or if another line than that of a role's token begins with "-".
    """
    text = read_text(path, what)
    lines = tuple(line.strip() for line in text.strip().splitlines()) or ("",)
    if len(lines) > MAX_TOKENS:
        raise ConfigError(f"{what} must hold at most {MAX_TOKENS} lines, {path} has {len(lines)}")
    for line in lines:
        if not (line.isascii() and line.isprintable()):
            raise ConfigError(f"{what} must hold printable ASCII characters, {path} has others")
        if len(line) < MIN_TOKEN_CHARACTERS:
            raise ConfigError(
                f"{what} must hold at least {MIN_TOKEN_CHARACTERS} characters a line, {path} has "
                f"{len(line)}"
            )
        if line.startswith("-") and (line is lines[0] or role_of(line[1:]) is None):
            raise ConfigError(
                f"{what}: a line of {path} begins with -, which takes back a role's token that a "
                "line above it made"
            )
    return lines


def check_own(lines: Sequence[str]) -> None:
    """Raises ConfigError unless the tokens, `read_tokens`' lines, are the run's own.

    The tokens of roles are made from the run's: with a role's token in its place, a controller
    would refuse every call.
    """
    for role in filter(None, map(role_of, lines)):
        raise ConfigError(
            f"security.token_file: the controller needs the run's own token, this is that of a "
            f"{role}"
        )


def is_open_to_all(path: Path | None) -> bool:
    """Whether every account of the machine may read the file, if there is one."""
    return path is not None and bool(path.stat().st_mode & stat.S_IROTH)


class Tokens:
    """The tokens of one process; a token file is read again when it changes."""

    def __init__(self, lines: Sequence[str], path: Path | None = None) -> None:
        self._lines, self._path = tuple(lines), path
        self._is_controllers = False
        self._seen = self._look()

    @classmethod
    def read(cls, path: Path) -> Tokens:
        """Reads a token file; raises ConfigError if it cannot be read or has an invalid token."""
        # The file's state is read before its text, so that a change in between is noticed later.
        tokens = cls((), path)
        tokens._lines = read_tokens(path)
        return tokens

    def serve(self) -> None:
        """Holds the tokens, and those of later contents of the file, to be the run's own.

        Raises ConfigError if they are not; warns of a file that everybody may read.
        """
        check_own(self._lines)
        self._is_controllers = True
        if is_open_to_all(self._path):
            logger.warning("every account may read security.token_file %s", self._path)

    @property
    def lines(self) -> tuple[str, ...]:
        """The current tokens; if the file has changed and is invalid, they stay as they were."""
        if self._path is not None and (seen := self._look()) != self._seen:
            self._seen = seen
            try:
                found = read_tokens(self._path)
                if self._is_controllers:
                    check_own(found)
                self._lines = found
            except ConfigError as error:
                logger.warning("the token stays as it was: %s", error)
        return self._lines

    def _look(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self._path) if self._path is not None else None
        except OSError:
            return None
        return found and (found.st_mtime_ns, found.st_size, found.st_ino)


class CallMetadata(Sequence[tuple[str, str]]):
    """Metadata of gRPC calls: the token that is current when read, and the run's id, if known."""

    def __init__(self, tokens: Tokens | None, run_id: str | None = None) -> None:
        self._tokens = tokens
        self._run = ((RUN_KEY, run_id),) if run_id is not None else ()

    def _now(self) -> tuple[tuple[str, str], ...]:
        if self._tokens is None:
            return self._run
        return ((TOKEN_KEY, f"Bearer {self._tokens.lines[0]}"), *self._run)

    @overload
    def __getitem__(self, index: int) -> tuple[str, str]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[str, str]]: ...
    def __getitem__(self, index: int | slice) -> tuple[str, str] | Sequence[tuple[str, str]]:
        return self._now()[index]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())


def check_certificates(security: SecuritySection) -> None:
    """Raises ConfigError if TLS files cannot be loaded, or certificate and key do not match."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate, key, authority = security.tls_certificate, security.tls_key, security.tls_ca
    files = f"security.tls_certificate {certificate} and tls_key {key}"
    try:
        if certificate is not None:
            # An empty password, since no person is there to type one.
            context.load_cert_chain(certificate, key, password=lambda: "")
        for name, file in (("tls_ca", authority), ("tls_client_ca", security.tls_client_ca)):
            if file is not None:
                files = f"security.{name} {file}"
                context.load_verify_locations(file)
    except ssl.SSLError as error:
        reason = (error.reason or "no PEM file").lower().replace("_", " ")
        raise ConfigError(f"{files} cannot be used: {reason}") from error


def check_own_certificate(config: Config) -> None:
    """Raises ConfigError if clients would refuse this machine's certificate as the controller's.

    Clients verify the host of `controller.address` and the signature by `security.tls_ca`. Without
    this check the trainer ranks would wait for a controller that each of them refuses.
    """
    security, address = config.security, config.controller.address
    check_certificates(security)
    if not address.startswith("unix:"):
        check_shown(security, address)


def check_shown(security: SecuritySection, address: str | None) -> None:
    """Raises ConfigError if clients would refuse this machine's certificate.

    Without `address`, the controller's, any name in the certificate is fine.
    """
    if security.tls_certificate is None:
        return
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(security.tls_certificate, security.tls_key, password=lambda: "")
    client = ssl.create_default_context(cafile=security.tls_ca or security.tls_certificate)
    # gRPC takes any certificate in the file for an authority.
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if security.tls_client_ca is not None:
        # Trainer ranks show the controller's own certificate.
        client.load_cert_chain(security.tls_certificate, security.tls_key, password=lambda: "")
        server.verify_mode = ssl.CERT_REQUIRED
        server.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        server.load_verify_locations(security.tls_client_ca)
    client.check_hostname = address is not None
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    host = address_parts(address)[0] if address is not None else None
    asking = client.wrap_bio(back, there, server_hostname=host)
    answering = server.wrap_bio(there, back, server_side=True)
    for end in (asking, answering, asking, answering):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            judge = f"every client of controller.address {address}" if address else "every client"
            if end is answering:
                judge = f"security.tls_client_ca {security.tls_client_ca}, where ranks show it"
            raise ConfigError(
                f"security.tls_certificate {security.tls_certificate} is refused by {judge}: "
                f"{error.verify_message.rstrip('.')}; make_certificates.sh issues a new one"
            ) from None

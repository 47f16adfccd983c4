"""Checks TLS files and tokens of callers: the run's token opens all methods, a role's only some.

A role's token is `ROLE.` and, in hexadecimal, the HMAC-SHA256 of `slipstream ROLE` with the run's
token as the key. So the controller keeps one secret, and a host gets only the token of its role;
deploy/make_certificates.sh writes the tokens of all roles.

The first line of a token file is the token that its owner sends. The controller also accepts the
tokens in further lines. A line `-TOKEN` in the controller's file takes back a role's token that a
line above it made. Files are read when a process starts.
"""

import hmac
import ssl
import stat
from collections.abc import Sequence
from pathlib import Path

from slipstream.core.errors import ConfigError
from slipstream.core.machine.address import address_parts
from slipstream.core.machine.files import read_regular
from slipstream.core.settings.config import Config
from slipstream.core.settings.sections import SecuritySection

MIN_TOKEN_CHARACTERS = 32
# Lines of a token file; each call is compared with the tokens of all.
MAX_TOKENS = 64
TOKEN_KEY = "authorization"
RUN_KEY = "slipstream-run"

_PREFIX = "/slipstream.v1."
_READS = ("StatusService/GetStatus", "StatusService/Watch", "EnvironmentService/ListEnvironments")
# Methods that tell a caller which run it has found, so that they can be called without its id.
NAMELESS = (*_READS, "StatusService/GetSetup")
# Methods that callers of another release may call: who upgrades must see and stop the run.
OF_ANY_RELEASE = (*NAMELESS, "StatusService/StopRun", "StatusService/DrainServer")
# Methods that each role may call in addition to `_READS`: all methods of a service, or one.
RIGHTS: dict[str, tuple[str, ...]] = {
    "trainer": ("TrainerService/", "StatusService/StopRun", "StatusService/GetSetup"),
    "rollout-server": (
        "FleetService/",
        "TrajectoryService/",
        "CallRecordService/",
        "StatusService/GetSetup",
    ),
    "client": ("EnvironmentService/",),
    "reader": (),
}


def role_token(token: str, role: str) -> str:
    """Returns the token of `role`; `token` is the run's token, or the token of `role` already."""
    if role_of(token) == role:
        return token
    return f"{role}.{hmac.digest(token.encode(), f'slipstream {role}'.encode(), 'sha256').hex()}"


def role_of(token: str) -> str | None:
    """Returns the role of a role's token, or None for the run's own token."""
    role, dot, _ = token.partition(".")
    return role if dot and role in RIGHTS else None


def is_bound(method: str, free: Sequence[str]) -> bool:
    """Whether `method` is one of ours and not among `free`, `NAMELESS` or `OF_ANY_RELEASE`."""
    return method.startswith(_PREFIX) and method.removeprefix(_PREFIX) not in free


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


def check_certificates(security: SecuritySection) -> None:
    """Raises ConfigError if TLS files cannot be loaded, or certificate and key do not match."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate = security.tls_certificate
    key = security.tls_key
    authority = security.tls_ca
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
    security = config.security
    address = config.controller.address
    check_certificates(security)
    if security.tls_certificate is None or address.startswith("unix:"):
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
    there = ssl.MemoryBIO()
    back = ssl.MemoryBIO()
    asking = client.wrap_bio(back, there, server_hostname=address_parts(address)[0])
    answering = server.wrap_bio(there, back, server_side=True)
    for end in (asking, answering, asking, answering):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            judge = f"every client of controller.address {address}"
            if end is answering:
                judge = f"security.tls_client_ca {security.tls_client_ca}, where ranks show it"
            raise ConfigError(
                f"security.tls_certificate {security.tls_certificate} is refused by {judge}: "
                f"{error.verify_message.rstrip('.')}; make_certificates.sh issues a new one"
            ) from None

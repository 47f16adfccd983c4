"""Checks the form of network addresses, opens listening sockets and keeps free ports."""

import ipaddress
import os
import random
import re
import socket
from collections import deque

from slipstream.core.errors import ConfigError

# Ports below every usual range from which the kernel assigns ports.
UNASSIGNED_PORTS = range(10000, 32768)
FREE_PORT_ATTEMPTS = 100
# Number of ports that one process keeps: more than it draws before it uses them.
KEPT_PORTS = 64

# Descriptors of bound sockets: a socket object that lives to the end would warn there.
_kept: deque[int] = deque()
_FORM = re.compile(r"(?P<host>[^\s/]+):(?P<port>\d{1,5})")


def address_parts(address: str) -> tuple[str, int]:
    """Returns host and port; raises ConfigError for another form or a port above 65535."""
    match = _FORM.fullmatch(address)
    if match is None or int(match["port"]) > 65535 or not is_host(match["host"]):
        raise ConfigError(f"an address is host:port with a port up to 65535, got {address!r}")
    return match["host"].strip("[]"), int(match["port"])


def is_host(text: str) -> bool:
    """Whether a text can be a host's name or address; an IPv6 address may be in brackets."""
    if (text[:1], text[-1:]) == ("[", "]"):
        text = text[1:-1]
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return bool(text) and not set(text) & set("[]/ ")


def is_loopback(host: str) -> bool:
    """Whether `host` is a loopback address or "localhost"."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_unspecified(host: str) -> bool:
    """Whether a host to listen at means every address of the machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def listen(host: str, port: int = 0) -> socket.socket:
    """Returns a socket on the first address of `host`, port 0 being any; raises OSError."""
    (family, *_, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return socket.create_server(address, family=family)


def free_port(host: str) -> int:
    """Returns a port that is free, and keeps it while this process lives or draws few others.

    Meanwhile only a socket that listens with SO_REUSEADDR, as servers do, can use the port, and
    neither the kernel nor another call, in any process, chooses it. Raises ConfigError if none of
    at most `FREE_PORT_ATTEMPTS` ports is free.
    """
    attempts = min(FREE_PORT_ATTEMPTS, len(UNASSIGNED_PORTS))
    for port in random.SystemRandom().sample(UNASSIGNED_PORTS, attempts):
        probe = socket.socket(family_of(host))
        try:
            # Without SO_REUSEADDR, a port that another process keeps is refused.
            probe.bind((host, port))
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _kept.append(probe.detach())
            while len(_kept) > KEPT_PORTS:
                os.close(_kept.popleft())
            return port
        except OSError as error:
            cause = error.strerror
            probe.close()
    raise ConfigError(f"no free port on {host} among {attempts} that were tried: {cause}")


def family_of(host: str) -> socket.AddressFamily:
    """Returns the family of an IP address, and IPv4 for a name."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET

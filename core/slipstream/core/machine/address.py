"""Checks the form of network addresses, and opens listening sockets."""

import ipaddress
import re
import socket

from slipstream.core.errors import ConfigError

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


def listen(host: str, port: int = 0) -> socket.socket:
    """Returns a socket on the first address of `host`, port 0 being any; raises OSError."""
    (family, *_, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return socket.create_server(address, family=family)


def check_address_form(address: str) -> str:
    """Returns `address` unchanged. Raises ConfigError like `address_parts`."""
    address_parts(address)
    return address

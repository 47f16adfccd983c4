"""Restricts the sockets of torch, gloo and NCCL, which have neither TLS nor a token.

The sockets listen only on the interface by which the other processes are reached. Public addresses
are refused.
"""

import hmac
import ipaddress
import socket
from collections.abc import MutableMapping

import psutil
from slipstream.core.errors import ConfigError
from slipstream.core.machine.address import address_parts
from slipstream.core.settings.config import Config
from slipstream.protocol.access.tokens import role_token

# Variable with the secret by which a trainer's ranks recognise each other; the command that starts
# them sets it.
RENDEZVOUS_VARIABLE = "SLIPSTREAM_RENDEZVOUS"


def describe_exposure(config: Config) -> str:
    """Returns, as text, what other machines reach without TLS and token, or "" if nothing.

    Raises ConfigError for a public address of the rendezvous or of the weight transport. A name
    that cannot be resolved here is not checked: connecting to it will fail with an error.
    """
    host, port = address_parts(config.learner.master)
    exposed = f"learner.master {host} (port {port or 'any'}; weights at any port)"
    try:
        (*_, socket_address), *_ = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return exposed
    address = ipaddress.ip_address(str(socket_address[0]).partition("%")[0])
    if address.is_global:
        raise ConfigError(
            f"learner.master {host} is a public address, and torch, gloo and NCCL have neither TLS "
            "nor a token: use an address of a private network"
        )
    return "" if address.is_loopback else exposed


def narrow_sockets(environ: MutableMapping[str, str], *, gloo: str, nccl: str) -> None:
    """Sets, in `environ`, the interfaces by which gloo and NCCL reach the other processes.

    gloo connects to the host `gloo`, NCCL to the host `nccl`. Call this before they open their
    first sockets. Variables that are already set stay. If no interface is found, gloo and NCCL
    choose one.
    """
    for name, host, exactly in (("GLOO", gloo, ""), ("NCCL", nccl, "=")):
        interface = interface_to(host)
        if interface is not None:
            environ.setdefault(f"{name}_SOCKET_IFNAME", f"{exactly}{interface}")


def local_address(host: str, port: int = 1) -> str:
    """Returns this machine's address from which `host` is reached.

    Raises OSError if `host` has no address or there is no route to it.
    """
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # The call sends nothing, and lets the kernel choose the route.
        probe.connect(target)
        return str(probe.getsockname()[0])


def interface_to(host: str) -> str | None:
    """Returns the network interface from which `host` is reached, or None if it is not known."""
    try:
        address = ipaddress.ip_address(local_address(host))
    except (OSError, ValueError):
        return None
    if address.is_loopback:
        return "lo"
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            is_internet = entry.family in (socket.AF_INET, socket.AF_INET6)
            if is_internet and ipaddress.ip_address(entry.address.partition("%")[0]) == address:
                # Additional addresses of an interface may have a label after a colon.
                return name.partition(":")[0]
    return None


def rendezvous_secret(token: str | None, run_name: str) -> str:
    """Returns the value of `RENDEZVOUS_VARIABLE`, equal on all nodes; with a token it is a secret.

    Nodes that have the run's token and nodes that have the trainer's token get the same value.
    """
    key = "" if token is None else role_token(token, "trainer")
    return hmac.digest(key.encode(), run_name.encode(), "sha256").hex()

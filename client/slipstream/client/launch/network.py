"""Checks the interfaces by which trainer ranks of several nodes meet and exchange tensors."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import psutil
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config, address_parts

# Variable -> whether it takes the beginning of a name, as NCCL does.
INTERFACES = {"NCCL_SOCKET_IFNAME": True, "GLOO_SOCKET_IFNAME": False}


def check_interfaces(config: Config, environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns which interface leads to the ranks' meeting place; None if one node has all ranks.

    Raises ConfigError for a variable that names no interface, and for a host without an address.
    """
    learner = config.learner
    if learner.ranks_per_node in (None, learner.world_size):
        return None
    present = psutil.net_if_addrs()
    for variable, takes_beginning in INTERFACES.items():
        value = environ.get(variable, "")
        if value and not _match(value, list(present), takes_beginning=takes_beginning):
            raise ConfigError(
                f"{variable}={value} names no interface of this host, which has "
                f"{', '.join(present)}: unset it, or name one of these"
            )
    host, _ = address_parts(learner.master)
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            # This sends nothing, and lets the kernel choose the way.
            probe.connect(address)
            ours = probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(
            f"learner.master {learner.master} cannot be reached from this host: {error.strerror}"
        ) from error
    name = next((n for n, parts in present.items() if any(p.address == ours for p in parts)), "")
    return f"{name or ours} leads to learner.master {learner.master}"


def _match(value: str, present: list[str], *, takes_beginning: bool) -> list[str]:
    """Returns the interfaces that a value of such a variable selects."""
    excludes, value = value.startswith("^"), value.removeprefix("^")
    is_exact, value = value.startswith("=") or not takes_beginning, value.removeprefix("=")
    # NCCL allows a port behind a name.
    wanted = [part.partition(":")[0] for part in value.split(",") if part]
    return [
        name
        for name in present
        if any(name == w if is_exact else name.startswith(w) for w in wanted) != excludes
    ]

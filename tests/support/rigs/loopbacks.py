"""The loopback addresses that this machine has."""

import random
import socket

import pytest


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


LOOPBACKS = [
    "127.0.0.1",
    pytest.param(
        "::1", marks=pytest.mark.skipif(not _has_ipv6(), reason="no IPv6 here")
    ),
]


def own_loopback() -> str:
    """An address of this host on which other tests that run now take no port."""
    draw = random.SystemRandom()
    return ".".join(["127", *(str(draw.randrange(1, 255)) for _ in range(3))])

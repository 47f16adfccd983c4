"""Checks before anything starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from slipstream.client import preflight
from slipstream.client.preflight import free_port
from slipstream.protocol.errors import ConfigError


def test_a_free_port_is_none_that_the_kernel_gives_to_others() -> None:
    first, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    for _ in range(20):
        port = free_port("127.0.0.1")
        assert port < int(first)
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_a_port_in_use_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = free_port("127.0.0.1")
    monkeypatch.setattr(preflight, "UNASSIGNED_PORTS", range(taken, taken + 1))
    monkeypatch.setattr(preflight, "FREE_PORT_ATTEMPTS", 1)
    with (
        socket.create_server(("127.0.0.1", taken)),
        pytest.raises(ConfigError, match=r"no free port on 127\.0\.0\.1"),
    ):
        free_port("127.0.0.1")

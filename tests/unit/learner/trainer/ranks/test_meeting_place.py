"""The ranks' meeting place: who does not answer is named, and nobody waits for ever."""

from __future__ import annotations

import socket
import time
from datetime import timedelta

import pytest
from slipstream.learner.trainer.ranks import parallel
from slipstream.learner.trainer.ranks.parallel import Launch
from slipstream.protocol.errors import ConfigError


def test_a_listener_that_is_no_store_is_given_up_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parallel, "CONNECT_GRACE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        started = time.monotonic()
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} did not answer like rank 0"):
            parallel._meeting_place(Launch(1, 2, 1), timedelta(seconds=1))
        assert time.monotonic() - started < 20


def test_rank_0_says_that_its_port_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(ConfigError, match=f"got 127.0.0.1:{port}: .*in use"):
            parallel._meeting_place(Launch(0, 2, 0), timedelta(seconds=1))

"""Which callers a listener hears, and which it drops."""

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest
from slipstream.protocol.weights.handover import LINE_BYTES, Callers

LONG_S = 30.0


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def connect(listener: socket.socket) -> socket.socket:
    return socket.create_connection(listener.getsockname(), timeout=LONG_S)


def listen(heard: Callers, seconds: float) -> None:
    with pytest.raises(TimeoutError):
        heard.next(time.monotonic() + seconds)


def test_a_line_in_pieces_is_one_call_with_what_follows_it(listener: socket.socket) -> None:
    with Callers(listener) as heard, connect(listener) as caller:
        caller.sendall(b"who ")
        listen(heard, 0.05)
        caller.sendall(b"I am\nmore")
        call = heard.next(time.monotonic() + LONG_S)
    assert (call.line, call.rest) == (b"who I am", b"more")
    # The connection belongs to the receiver now.
    assert call.connection.fileno() >= 0
    call.connection.close()


def test_silent_ones_beyond_a_number_push_out_the_first(listener: socket.socket) -> None:
    few = Callers(listener, most_silent=2)
    with few as heard, connect(listener) as first, connect(listener) as second:
        listen(heard, 0.05)
        # Ready together with the one that pushes it out.
        first.sendall(b"x")
        with connect(listener):
            listen(heard, 0.05)
            assert first.recv(1) == b""
            second.setblocking(False)
            with pytest.raises(BlockingIOError):
                second.recv(1)


def test_an_endless_line_is_not_kept(listener: socket.socket) -> None:
    with Callers(listener) as heard, connect(listener) as caller:
        caller.sendall(bytes(LINE_BYTES + 1))
        listen(heard, 0.2)
        # What it did not read any more makes the end a reset.
        with contextlib.suppress(ConnectionResetError):
            assert caller.recv(1) == b""


def test_no_silent_one_is_left_behind(listener: socket.socket) -> None:
    with connect(listener) as caller:
        with Callers(listener) as heard:
            listen(heard, 0.05)
        assert caller.recv(1) == b""

"""Gives programs in a sandbox without network the address of their model, by Python alone.

    python3 relay_inside.py SOCKET PROGRAM ARGUMENTS...
    python3 relay_inside.py SOCKET --detach

Any Python from 3.8 on will do.
It listens at `ADDRESS`, in the sandbox's own network namespace, and passes each connection to the
unix socket SOCKET, which lies in the sandbox by a bind mount. The first form runs PROGRAM and ends
as it does; the second returns once the address can be reached, and leaves the relay running.

Consumes: connections. Produces: the same bytes at the socket, and back. Waits for: the next
connection, bytes of either side. Unblocked by: the program's end, or a side that hangs up.
"""

import contextlib
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import threading

PORT = 8731
ADDRESS = f"http://127.0.0.1:{PORT}"
MAX_CONNECTIONS = 128
CHUNK_BYTES = 65536
# Exit status for wrong use and for a sandbox that cannot have a relay, as of a shell.
REFUSED = 125
_GET_FLAGS = 0x8913
_SET_FLAGS = 0x8914
_IS_UP = 1


def network() -> str:
    """Returns the name of this process's network namespace, or "" where /proc is hidden."""
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


def main(arguments: "list[str]") -> int:
    """Runs the relay, and the program beside it; returns the exit status."""
    if len(arguments) < 2:
        return _refused("give SOCKET and PROGRAM, or SOCKET and --detach")
    path = arguments[0]
    outside = os.environ.get("SLIPSTREAM_NETWORK", "")
    if outside and network() == outside:
        return _refused(
            "the sandbox shares the network of its host, where others would reach the model: "
            "give it a network namespace of its own (bwrap --unshare-net, docker --network none)"
        )
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(path)
        raise_loopback()
        listening = socket.create_server(("127.0.0.1", PORT), backlog=MAX_CONNECTIONS)
    except OSError as error:
        return _refused(f"no way from {ADDRESS} to {path}: {error}")
    if arguments[1] == "--detach":
        if os.fork():
            return 0
        os.setsid()
        _leave_output()
        _serve(listening, path)
    threading.Thread(target=_serve, args=(listening, path), daemon=True).start()
    return _run(arguments[1:])


def _refused(reason: str) -> int:
    sys.stderr.write(f"relay: {reason}\n")
    return REFUSED


def raise_loopback() -> None:
    """Turns the interface lo on, which a new namespace has turned off."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh14x", b"lo", 0)
        reply = fcntl.ioctl(control, _GET_FLAGS, request)
        _, flags = struct.unpack("16sh14x", reply)
        if not flags & _IS_UP:
            request = struct.pack("16sh14x", b"lo", flags | _IS_UP)
            fcntl.ioctl(control, _SET_FLAGS, request)


def _leave_output() -> None:
    """Lets go of the caller's pipes, whose readers wait for their end."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)


def _run(command: "list[str]") -> int:
    try:
        program = subprocess.Popen(command)
    except OSError as error:
        return _refused(f"{command[0]}: {error}")

    def end(number: int, _: object) -> None:
        program.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)
    status = program.wait()
    # A shell tells a signal in this way.
    return status if status >= 0 else 128 - status


def _serve(listening: socket.socket, path: str) -> None:
    places = threading.Semaphore(MAX_CONNECTIONS)
    while True:
        # Connections beyond the places wait in the kernel.
        places.acquire()
        client, _ = listening.accept()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_join, args=(client, path, places), daemon=True).start()


def _join(client: socket.socket, path: str, places: threading.Semaphore) -> None:
    """Passes bytes both ways until both sides have ended, or one of them is broken."""
    try:
        # Without a socket the episode is over: its client sees a closed connection.
        with client, contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as model:
            model.connect(path)
            back = threading.Thread(target=_pass, args=(model, client), daemon=True)
            back.start()
            _pass(client, model)
            back.join()
    finally:
        places.release()


def _pass(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(CHUNK_BYTES):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        # A reader of either side must not wait for it.
        for side in (source, target):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

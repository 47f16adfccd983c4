"""Compares answers with replies, each comparison in a process of its own.

The program has a socket as its stdin. Each message on it carries one end of another socket, on
which a line, a JSON object, gets a line in return. For example, {"answer": "1/2", "reply": "It is
0.5.", "limit_s": 10} gets {"readable": true, "right": true}.

The program imports what comparisons need once and forks itself for each of them. So a comparison
that takes long or much memory ends alone, and the next one pays for no import.
"""

import contextlib
import gc
import json
import logging
import os
import resource
import signal
import socket
import sys
from types import FrameType

from slipstream.core.machine.process import die_with_parent
from slipstream.environments.math_judge.answer_kinds import judge

# Memory limit of one comparison, enough for sympy.
MAX_MEMORY_BYTES = 4 << 30
# Bytes that the program writes on its stdin when it is ready.
READY = b"ready"
# Seconds of processor after which a comparison gives way to others.
POLITE_AFTER_S = 1.0
_NICENESS = 10
# Comparisons that use much of what the packages have.
_FIRST_COMPARISONS = (
    ("x^2 + 2x + 1", "$(x + 1)^2$"),
    (r"\frac{2\pi}{3}", r"$\frac{\pi}{3}$"),
    (r"3\sqrt{2}", r"$\frac{6}{\sqrt{2}}$"),
    ("1/2", "0.5"),
)


def main() -> None:
    """Forks a process for each socket that arrives, until the parent closes its own."""
    die_with_parent()
    control = socket.socket(fileno=os.dup(0))
    # Output of the packages goes to stderr.
    os.dup2(2, 1)
    # math-verify warns of the missing time limit at the first call.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # The packages compile and remember at first use, which is paid for here.
    for answer, reply in _FIRST_COMPARISONS:
        judge(answer, reply)
    # Objects of this process stay in pages that all comparisons share.
    gc.freeze()
    # The kernel takes the processes of comparisons away when they end.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with contextlib.suppress(BrokenPipeError):
        control.send(READY)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 16, 1)
        if not message:
            return
        for descriptor in descriptors:
            connection = socket.socket(fileno=descriptor)
            if _forked(connection) == 0:
                control.close()
                _compare(connection)
            connection.close()


def _forked(connection: socket.socket) -> int:
    """Returns 0 in a new process, else another number. Tells the caller if there can be none."""
    try:
        return os.fork()
    except OSError as error:
        with contextlib.suppress(OSError):
            connection.sendall(json.dumps({"failed": str(error)}).encode() + b"\n")
        return -1


def _compare(connection: socket.socket) -> None:
    """Answers the request on a socket, and ends the process."""
    status = 1
    try:
        die_with_parent()
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
        signal.signal(signal.SIGVTALRM, _give_way)
        signal.setitimer(signal.ITIMER_VIRTUAL, POLITE_AFTER_S)
        with connection, connection.makefile("rw", encoding="utf-8") as stream:
            request = json.loads(stream.readline())
            # The kernel ends this process at its limit, whatever it computes then.
            signal.setitimer(signal.ITIMER_REAL, request["limit_s"])
            verdict = judge(request["answer"], request["reply"], request["question"])
            stream.write(json.dumps(verdict._asdict()) + "\n")
            stream.flush()
        status = 0
    except (MemoryError, RecursionError):
        # A reply like this has no answer that can be read.
        status = 2
    finally:
        sys.stderr.flush()
        os._exit(status)


def _give_way(number: int, frame: FrameType | None) -> None:
    os.nice(_NICENESS)


if __name__ == "__main__":
    main()

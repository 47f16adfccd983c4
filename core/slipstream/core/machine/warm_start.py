"""Environment workers as forks of one process, which has imported what a worker needs.

To import it takes a second of a core, a fork some milliseconds. `WarmParent` is the side of a
rollout server; `become_worker` is that of the process that forks, which is itself a worker's
program, so that a worker finds there what it would have imported.

A message on their socket is a `WarmStart` with three descriptors: the worker's log, the record of
its calls, and the file for its keeper's last words. The answer is "0 PID" with a descriptor of the
keeper, or the number of the error why there is none. A keeper writes the cause of an end, if it has
one, and then "ended STATUS", a wait status.
"""

import asyncio
import contextlib
import errno
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from slipstream.core.errors import SlipstreamError
from slipstream.core.machine.keeper import Bounds, Keeper
from slipstream.core.machine.process import die_with_parent

_MAX_MESSAGE_BYTES = 1 << 16
_NUM_DESCRIPTORS = 3
# Before a wait status, behind the cause of an end.
ENDED = "ended "
# Attempts of a process that forks to stay, after which its worker is started without it.
_MAX_BEGINS = 2
# Seconds in which it answers, on a busy machine; with its first answer it has imported all.
_ANSWER_LIMIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """What a worker is told at its start, and the limits that its keeper holds it to."""

    address: str
    token: str
    bounds: Bounds


class NoWarmParent(SlipstreamError):
    """The process that forks workers does not stay; workers can be started without it."""


class ForkedKeeper:
    """The keeper of a forked worker, as its server sees it; its use needs a running event loop."""

    def __init__(self, pid: int, handle: int, last_words: int) -> None:
        """Takes `handle`, a descriptor of the process `pid`; `last_words` stays the caller's."""
        self.pid = pid
        # -N for signal N; None while the keeper runs.
        self.returncode: int | None = None
        self._handle = handle
        self._last_words = last_words
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(handle, self._has_ended)

    def _has_ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._handle)
        os.close(self._handle)
        last_words = os.pread(self._last_words, _MAX_MESSAGE_BYTES, 0).decode(errors="replace")
        _, mark, status = last_words.rpartition(ENDED)
        # A keeper that was killed says nothing.
        self.returncode = os.waitstatus_to_exitcode(int(status)) if mark else -signal.SIGKILL
        self._ended.set()

    async def wait(self) -> int:
        """Waits for the end of the keeper, and returns the exit code of its worker."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def tell(self, number: signal.Signals) -> None:
        """Sends a signal to the keeper, unless it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)


class WarmParent:
    """Starts workers of one interpreter; its process is started when it is first needed."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        """`command` is that of a worker, before its arguments; `variables` are those of workers."""
        self._command = command
        self._variables = variables
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    async def start(
        self, worker: WarmStart, *, log: int, record: int, last_words: int
    ) -> ForkedKeeper:
        """Starts a worker and returns its keeper; a cancelled call leaves none.

        The process that forks prints into the log of its first worker. Raises OSError if the
        machine lacks processes or descriptors, and NoWarmParent.
        """
        # The caller may close its own meanwhile.
        descriptors = [os.dup(descriptor) for descriptor in (log, record, last_words)]
        asking = asyncio.create_task(
            asyncio.to_thread(self._ask, worker, descriptors), name="forks a worker"
        )
        try:
            pid, handle = await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(_end_unwanted)
            raise
        return ForkedKeeper(pid, handle, last_words)

    def close(self) -> None:
        """Ends the process that forks, and so all its workers."""
        with self._lock:
            self._end()

    def _ask(self, worker: WarmStart, descriptors: Sequence[int]) -> tuple[int, int]:
        message = json.dumps(asdict(worker)).encode()
        try:
            with self._lock:
                for _ in range(_MAX_BEGINS):
                    if self._process is None:
                        self._begin(descriptors[0])
                    with contextlib.suppress(ConnectionError, TimeoutError):
                        socket.send_fds(self._socket, [message], descriptors)
                        answer, handles, *_ = socket.recv_fds(self._socket, _MAX_MESSAGE_BYTES, 1)
                        if handles:
                            os.set_inheritable(handles[0], False)
                            return int(answer.split()[1]), handles[0]
                        if answer:
                            # A descriptor that finds no place here is lost.
                            number = int(answer.split()[0]) or errno.EMFILE
                            raise OSError(number, os.strerror(number))
                    self._end()
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        raise NoWarmParent("the process that forks workers has ended, or does not answer")

    def _begin(self, log: int) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_ANSWER_LIMIT_S)
        with theirs, contextlib.ExitStack() as at_failure:
            at_failure.callback(self._socket.close)
            self._process = subprocess.Popen(
                [*self._command, "--forks", str(theirs.fileno())],
                env=dict(self._variables),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                # Ctrl-C is for the server alone. A session of its own would make it an orphan.
                process_group=0,
            )
            at_failure.pop_all()

    def _end(self) -> None:
        process = self._process
        self._process = None
        if process is not None:
            self._socket.close()
            process.kill()
            process.wait()


def _end_unwanted(asking: asyncio.Task[tuple[int, int]]) -> None:
    if asking.cancelled() or asking.exception() is not None:
        return
    _, handle = asking.result()
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, signal.SIGTERM)
    os.close(handle)


def become_worker(descriptor: int) -> tuple[WarmStart, int] | None:
    """Forks a keeper with a worker for each message on the socket `descriptor`.

    Returns what a worker is told, and the descriptor of its record, in each worker. Returns None in
    this process once the server has closed the socket, or has ended. Blocks.
    """
    # What is imported stays: forks share its memory until they write to it.
    gc.collect()
    gc.freeze()
    parent = os.getpid()
    asks = socket.socket(fileno=descriptor)
    while True:
        message, descriptors, *_ = socket.recv_fds(asks, _MAX_MESSAGE_BYTES, _NUM_DESCRIPTORS)
        if not message:
            return None
        handles = []
        try:
            if len(descriptors) < _NUM_DESCRIPTORS:
                raise OSError(errno.EMFILE, "descriptors were lost")
            if (pid := os.fork()) == 0:
                asks.close()
                worker = _told(message)
                return worker, _kept(worker.bounds, parent, *descriptors)
            handles.append(os.pidfd_open(pid))
            answer = b"0 %d" % pid
        except OSError as error:
            answer = b"%d" % (error.errno or errno.EIO)
        # The server may have ended meanwhile: the next message is then empty.
        with contextlib.suppress(OSError):
            socket.send_fds(asks, [answer], handles)
        for received in (*descriptors, *handles):
            os.close(received)
        with contextlib.suppress(ChildProcessError):
            # A keeper that has ended keeps its number until here.
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _told(message: bytes) -> WarmStart:
    fields = json.loads(message)
    return WarmStart(**fields | {"bounds": Bounds(**fields["bounds"])})


def _kept(bounds: Bounds, parent: int, log: int, record: int, last_words: int) -> int:
    """Becomes the keeper; returns, with the descriptor of the record, in the worker alone."""
    try:
        os.setsid()
        die_with_parent(signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(127)
        for number in (1, 2):
            os.dup2(log, number)
        os.close(log)
        keeper = Keeper(bounds)
        if keeper.begin():
            # A worker may not say why it has ended.
            os.close(last_words)
            return record
        status = keeper.keep()
        os.write(last_words, f"{keeper.cause}\n{ENDED}{status}".encode())
        os._exit(0)
    except BaseException:  # noqa: BLE001 - the caller's code is for a worker alone
        sys.excepthook(*sys.exc_info())
        os._exit(127)

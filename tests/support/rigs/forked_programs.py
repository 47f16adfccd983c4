"""Programs that a process forks which has imported what they need: they start in milliseconds.

A forked program has variables, working folder, session and streams of its own, ends as Python ends,
and has no parent but the process that forked it. `Forks` is the side of the tests; this file, run
as a script, is the process that forks.
"""

import asyncio
import atexit
import gc
import importlib
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MESSAGE_BYTES = 1 << 20


class ForkedProgram:
    """A program that another process has forked, with those methods of Popen that tests need."""

    def __init__(self, pid: int, code_of: Callable[[int], int]) -> None:
        """`code_of` gives the exit code of a program that has ended; it is asked for once."""
        self.pid = pid
        self._code_of = code_of
        self._end = os.pidfd_open(pid)
        self._code: int | None = None

    def wait(self, limit_s: float) -> int:
        """The exit code, negative for a signal; raises TimeoutExpired after `limit_s`."""
        if (code := self._ended(max(0.0, limit_s))) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", limit_s)
        return code

    def send_signal(self, number: int) -> None:
        if self._code is None:
            signal.pidfd_send_signal(self._end, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, limit_s: float) -> int | None:
        if self._code is None:
            poll = select.poll()
            poll.register(self._end, select.POLLIN)
            if not poll.poll(limit_s * 1000):
                return None
            self._code = self._code_of(self.pid)
            os.close(self._end)
        return self._code


class AwaitedProgram(ForkedProgram):
    """The same with those of asyncio's processes."""

    @property
    def returncode(self) -> int | None:
        """None as long as the program runs."""
        return self._ended(0.0)

    async def wait(self) -> int:  # type: ignore[override]
        """The exit code, negative for a signal."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        if self.returncode is None:
            # Every waiter has a descriptor of its own: a loop knows one reader of each.
            seen = os.dup(self._end)
            loop.add_reader(seen, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(seen)
                os.close(seen)
        code = self.returncode
        assert code is not None
        return code


class Forks:
    """Starts its process when a program is first asked for; it ends with this one, or by `close`.

    Programs may be started from several threads.
    """

    def __init__(self, *modules: str, entry: str) -> None:
        """`modules` are imported once, with one thread for each library of numbers.

        `entry` is `module:function`, which a program calls for its exit code; "" means that the
        first argument of each program is the path of its script.
        """
        self._modules = modules
        self._entry = entry
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The process that forks; None before the first program."""
        return None if self._process is None else self._process.pid

    def run(
        self,
        arguments: Sequence[str],
        *,
        limit_s: float,
        cwd: Path | None = None,
        environ: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """A program from its start to its end and to that of all who have its output open.

        It is killed after `limit_s`, which raises TimeoutExpired.
        """
        until_s = time.monotonic() + limit_s
        pipes = os.pipe(), os.pipe()
        try:
            pid = self._start(arguments, (pipes[0][1], pipes[1][1]), cwd, environ)
        finally:
            for _, writer in pipes:
                os.close(writer)
        program = ForkedProgram(pid, self._code_of)
        try:
            out, err = _read_all([reader for reader, _ in pipes], until_s)
            code = program.wait(until_s - time.monotonic())
        except (TimeoutError, subprocess.TimeoutExpired):
            program.kill()
            program.wait(limit_s)
            raise subprocess.TimeoutExpired(list(arguments), limit_s) from None
        finally:
            for reader, _ in pipes:
                os.close(reader)
        return subprocess.CompletedProcess(list(arguments), code, out, err)

    def start(
        self, arguments: Sequence[str], *, out: int, err: int, cwd: Path | None = None
    ) -> AwaitedProgram:
        """Starts a program in a session of its own, its output in two open files."""
        return AwaitedProgram(
            self._start(arguments, (out, err), cwd, None, new_session=True),
            self._code_of,
        )

    def close(self) -> None:
        """Ends the process; programs go on."""
        if self._process is not None:
            # Copies of the descriptor in processes that this one has forked do not count.
            self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._process.wait()
            self._process = None

    def _start(
        self,
        arguments: Sequence[str],
        output: tuple[int, int],
        cwd: Path | None,
        environ: dict[str, str] | None,
        *,
        new_session: bool = False,
    ) -> int:
        request = {
            "arguments": list(arguments),
            "environ": dict(os.environ if environ is None else environ),
            "cwd": str(cwd or os.getcwd()),
            "new_session": new_session,
        }
        return self._ask(request, output)

    def _code_of(self, pid: int) -> int:
        return self._ask({"reap": pid}, ())

    def _ask(self, request: dict[str, Any], descriptors: Sequence[int]) -> int:
        with self._lock:
            if self._process is None:
                self._begin()
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            answer = self._socket.recv(MESSAGE_BYTES)
        assert answer, "the process that forks programs has died"
        return int(json.loads(answer))

    def _begin(self) -> None:
        # Threads of numpy or torch would not survive the forks.
        threads = dict.fromkeys(
            ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
        )
        self._socket, child_socket = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET
        )
        with child_socket:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    __file__,
                    str(child_socket.fileno()),
                    self._entry,
                    *self._modules,
                ],
                env=os.environ | threads | {"PYTHONPATH": os.pathsep.join(sys.path)},
                pass_fds=[child_socket.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        atexit.register(self.close)


def _read_all(descriptors: Sequence[int], until_s: float) -> list[str]:
    """What comes from each until its end; TimeoutError at `until_s` of the monotonic clock."""
    read: dict[int, bytearray] = {descriptor: bytearray() for descriptor in descriptors}
    with selectors.DefaultSelector() as selector:
        for descriptor in descriptors:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, until_s - time.monotonic()))
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                if part := os.read(key.fd, 65536):
                    read[key.fd] += part
                else:
                    selector.unregister(key.fd)
    return [part.decode() for part in read.values()]


def _serve(asked: socket.socket, modules: Sequence[str]) -> dict[str, Any] | None:
    """Forks until the tests are over; in a forked process, returns what it shall do."""
    for module in modules:
        importlib.import_module(module)
    # An imported module stays: programs share its memory until they write to it.
    gc.collect()
    gc.freeze()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, (
        f"cannot fork: the imports have started {len(threads) - 1} threads"
    )
    while True:
        message, descriptors, _, _ = socket.recv_fds(asked, MESSAGE_BYTES, 2)
        if not message:
            return None
        request = json.loads(message)
        if "reap" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1])
        elif (answer := os.fork()) == 0:
            asked.close()
            _become(request, descriptors)
            return request
        for descriptor in descriptors:
            os.close(descriptor)
        asked.send(json.dumps(answer).encode())


def _become(request: dict[str, Any], output: Sequence[int]) -> None:
    if request["new_session"]:
        os.setsid()
    for number, descriptor in enumerate(output, start=1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])


def _main(descriptor: str, entry: str, *modules: str) -> int:
    request = _serve(socket.socket(fileno=int(descriptor)), modules)
    if request is None:
        return 0
    arguments = request["arguments"]
    if entry:
        module, _, function = entry.partition(":")
        sys.argv = [module, *arguments]
        return int(getattr(sys.modules[module], function)())
    import runpy

    sys.argv = list(arguments)
    sys.path[0] = str(Path(arguments[0]).parent)
    runpy.run_path(arguments[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    # Places in which Python looks for modules of this name: not among the tests' own.
    sys.path[0] = str(Path(sys.executable).parent)
    sys.exit(_main(*sys.argv[1:]))

"""Asks the program that compares answers, which runs beside the environment.

Consumes right answers and replies; produces verdicts. A comparison waits for a free place, and then
for the program's line or for its time limit.
"""

import asyncio
import json
import os
import socket
import sys
import time
import weakref

# The program that compares.
PROGRAM = "slipstream.environments.math_program"
READY = b"ready"
# Seconds for importing sympy on a busy machine.
START_LIMIT_S = 300.0
# Characters at the end of a reply that are read: parsing takes long, and the answer comes last.
MAX_CHARACTERS = 4000
LINE_BYTES = 1 << 16
# A comparison that takes longer gives its place to the next one, and goes on beside it.
QUICK_S = 1.0
# Most comparisons that go on at one time.
MAX_OPEN = 32


class MathJudge:
    """Compares answers in processes of their own, which a program forks that is always warm.

    A comparison that takes long, or much memory, neither changes nor holds up another verdict.
    """

    def __init__(self, *, timeout_s: float) -> None:
        """`timeout_s` limits one comparison."""
        self._timeout_s = timeout_s
        self._program: _Program | None = None
        self._starting = asyncio.Lock()
        self._open = asyncio.Semaphore(MAX_OPEN)
        self._quick = asyncio.Semaphore(max(2, min(8, os.cpu_count() or 1)))

    async def compare(self, answer: str, reply: str, question: str = "") -> dict[str, bool]:
        """Compares `reply` with `answer`. Raises RuntimeError if the program cannot run.

        In the result `right` says that they are equal, `readable` that an answer of the kind of
        `answer` was found in the reply, and `judge_timeout` that the comparison was abandoned. Only
        the question says whether (2, 5) is a point or an interval.
        """
        result = {"right": False, "readable": False, "judge_timeout": False}
        request = {
            "answer": answer,
            "reply": _read_part(reply),
            "question": question[-MAX_CHARACTERS:],
            "limit_s": self._timeout_s,
        }
        line = json.dumps(request).encode() + b"\n"
        async with self._open:
            try:
                verdict = await self._ask(line)
                if verdict is None and self._program is not None and self._program.has_ended:
                    # Somebody ended the program, which is no fault of this reply.
                    verdict = await self._ask(line)
            except TimeoutError:
                return result | {"judge_timeout": True}
        # Without a line, this reply most likely took too much memory.
        return result if verdict is None else result | verdict

    async def _ask(self, request: bytes) -> dict[str, bool] | None:
        """Returns the verdict on a request, or None if its process ended without one."""
        program = await self._running_program()
        await self._quick.acquire()
        has_place = True
        reader, writer = await program.connected()
        try:
            began_s = time.monotonic()
            writer.write(request)
            reading = asyncio.ensure_future(reader.readline())
            try:
                await asyncio.wait([reading], timeout=min(QUICK_S, self._timeout_s))
                self._quick.release()
                has_place = False
                async with asyncio.timeout(max(0.0, self._timeout_s - QUICK_S)):
                    line = await reading
            finally:
                reading.cancel()
        except ConnectionError:
            return None
        finally:
            if has_place:
                self._quick.release()
            writer.close()
        if not line.endswith(b"\n"):
            # The kernel may end a comparison at its limit before this process wakes.
            if time.monotonic() - began_s >= self._timeout_s:
                raise TimeoutError
            return None
        verdict: dict[str, bool] = json.loads(line)
        if "failed" in verdict:
            raise RuntimeError(f"{PROGRAM} cannot start a comparison: {verdict['failed']}")
        return verdict

    async def _running_program(self) -> "_Program":
        """Returns the program when it is ready. A caller that gives up leaves it starting."""
        async with self._starting:
            if self._program is not None and self._program.has_ended:
                self._program.close()
                self._program = None
            if self._program is None:
                self._program = await _Program.started()
            await self._program.is_ready()
            return self._program

    async def close(self) -> None:
        """Ends the program, which the next comparison would start again."""
        if self._program is not None:
            await self._program.end()
            self._program = None


class _Program:
    """The running program, and the socket through which it gets those of comparisons."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._was_ready = False
        # The program ends when its socket is closed, at the latest with this object.
        self.close = weakref.finalize(self, control.close)

    @classmethod
    async def started(cls) -> "_Program":
        """Starts the program."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                PROGRAM,
                stdin=theirs.fileno(),
            )
        ours.setblocking(False)
        return cls(process, ours)

    async def is_ready(self) -> None:
        """Waits until the program has imported what it needs.

        Raises RuntimeError if it ends before, or needs longer than `START_LIMIT_S`.
        """
        if self._was_ready:
            return
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(START_LIMIT_S):
                message = await loop.sock_recv(self._control, len(READY))
        except TimeoutError as error:
            raise RuntimeError(f"{PROGRAM} was not ready within {START_LIMIT_S:g} s") from error
        if message != READY:
            status = await self._process.wait()
            raise RuntimeError(f"{PROGRAM} ended when it was started: exit status {status}")
        self._was_ready = True

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    @property
    def pid(self) -> int:
        return self._process.pid

    async def end(self) -> None:
        """Ends the program and waits for its end."""
        self.close()
        await self._process.wait()

    async def connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Returns the streams of a new comparison. Raises ConnectionError if the program ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"compare"], [theirs.fileno()])
        return await asyncio.open_unix_connection(sock=ours, limit=LINE_BYTES)


def _read_part(reply: str) -> str:
    """Returns the end of a reply, or what begins with its last box if that stands before."""
    start = max(0, len(reply) - MAX_CHARACTERS)
    box = reply.rfind("\\boxed", 0, start)
    if box >= 0 and "\\boxed" not in reply[start:]:
        # A box is the answer, however much is written behind it.
        start = box
    return reply[start : start + MAX_CHARACTERS]

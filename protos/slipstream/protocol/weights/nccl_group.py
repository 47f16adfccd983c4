"""A communicator of NCCL that never waits for a dead member longer than a deadline.

NCCL itself waits for ever: a broadcast whose peer died is enqueued like any other and its stream
never completes. So a thread of ours watches the collectives, and aborts the communicator when none
of them ends in time; that releases the streams, and the GPU stays usable. It alone aborts, whoever
asks for it: an abort that blocks holds nobody else for long.

Pointers and streams are CUDA's handles, as integers. A group has one user thread; `abort` may be
called by any. `cupy_nccl.CupyNccl` is the backend; its calls let other threads run.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from slipstream.protocol.errors import WeightSyncError
from slipstream.protocol.weights.waits import reason, wait_for

logger = logging.getLogger(__name__)

_WATCH_PERIOD_S = 0.005
_WAIT_PERIOD_S = 0.0001
# A thread that began a call this long ago is inside NCCL, where an abort reaches it. Before, the
# communicator could be freed under it.
_ENTER_LIMIT_S = 0.2
# How long `abort` waits for the thread that aborts.
_ABORT_LIMIT_S = 5.0


class Communicator(Protocol):
    """What this module calls of cupy's NcclCommunicator, each call in a thread of the device."""

    def broadcast(self, pointer: int, num_bytes: int, root: int, stream: int) -> None:
        """Enqueues; WeightSyncError when NCCL refuses."""
        ...

    def abort(self) -> None:
        """Releases whoever waits in it, on this side; nothing else may be called afterwards."""
        ...


class Mark(Protocol):
    """A place in a stream."""

    def is_done(self) -> bool:
        """Whether the stream has come here; does not wait."""
        ...

    def seconds_since(self, before: Mark) -> float:
        """Time of the device between two marks that are done."""
        ...


class NcclBackend(Protocol):
    """One device and the library."""

    def connect(self, unique_id: bytes, *, rank: int, world_size: int) -> Communicator:
        """Waits for all members without a limit; WeightSyncError when NCCL fails."""
        ...

    def warm_up_room(self) -> Room:
        """For a first broadcast, which opens the connections between the members."""
        ...

    def mark(self, stream: int) -> Mark:
        """Marks what `stream` was given so far."""
        ...

    def use(self) -> None:
        """Makes the device the calling thread's."""
        ...


@dataclass(frozen=True)
class Room:
    """Some memory and a stream of its own."""

    pointer: int
    num_bytes: int
    stream: int


@dataclass(frozen=True)
class Wire:
    """Broadcasts that are done: device time from the first one's start to the last one's end.

    In the first one this member also waits until all others have come: the shortest time of all
    members is that since the last one came.
    """

    seconds: float = 0.0
    num_bytes: int = 0


@dataclass
class _Pending:
    what: str
    num_bytes: int
    begin: Mark
    deadline_s: float
    # None while NCCL has not taken it yet, which may wait too.
    end: Mark | None = None


class NcclGroup:
    """This process' membership; `join` makes it, `abort` ends it, whatever happened before.

    There is no other end: destroying is a collective, in which a dead member is waited for.
    """

    def __init__(self, backend: NcclBackend, communicator: Communicator) -> None:
        self._backend = backend
        self._communicator = communicator
        self._lock = threading.Lock()
        self._is_aborted = False
        self._cause = ""
        self._pending: deque[_Pending] = deque()
        # When the oldest pending collective became that.
        self._since_s = 0.0
        # Of the broadcasts that are done: where the first began, where the last ended, their bytes.
        self._done: tuple[Mark, Mark, int] | None = None
        # When the call began that is in NCCL now.
        self._calling_since_s: float | None = None
        self._stopped, self._gone = threading.Event(), threading.Event()
        atexit.register(self.abort)
        threading.Thread(target=self._watch, name="nccl-watchdog", daemon=True).start()

    @classmethod
    def join(
        cls,
        backend: NcclBackend,
        unique_id: bytes,
        *,
        rank: int,
        world_size: int,
        deadline_s: float,
        abandoned: threading.Event | None = None,
    ) -> NcclGroup:
        """Waits for all members; WeightSyncError after the deadline, or when it is `abandoned`.

        A constructor that waits cannot be interrupted: its thread is left behind, and aborts the
        communicator should it still come about. From then on the group knows it: a member may die
        before the first broadcast, which NCCL needs to open the connections.
        """
        answers: queue.Queue[NcclGroup | WeightSyncError] = queue.Queue(maxsize=1)
        lock, made = threading.Lock(), list[NcclGroup]()
        is_abandoned = False

        def connect() -> None:
            backend.use()
            try:
                group = cls(backend, backend.connect(unique_id, rank=rank, world_size=world_size))
                with lock:
                    made.append(group)
                    if is_abandoned:
                        group.abort()
                group._warm_up(deadline_s)
                answers.put(group)
            except WeightSyncError as error:
                answers.put(error)

        threading.Thread(target=connect, name="nccl-join", daemon=True).start()
        try:
            answer = wait_for(answers, deadline_s, abandoned)
        except queue.Empty:
            with lock:
                is_abandoned = True
            for group in made:
                group.abort()
            raise WeightSyncError(
                f"the {world_size} members of a communicator did not meet "
                f"{reason(deadline_s, abandoned)}"
            ) from None
        if isinstance(answer, WeightSyncError):
            raise answer
        return answer

    def broadcast(
        self, pointer: int, num_bytes: int, root: int, stream: int, *, deadline_s: float
    ) -> None:
        """Enqueues the broadcast of `num_bytes` at `pointer`, which `root` fills before.

        It must end within `deadline_s` of the one before it, or of now if there is none: then the
        communicator is aborted. WeightSyncError when it is aborted already.
        """
        what = f"the broadcast of {num_bytes} bytes from rank {root}"
        with self._lock:
            self._check()
            pending = _Pending(what, num_bytes, self._backend.mark(stream), deadline_s)
            self._advance()
            if not self._pending:
                self._since_s = time.monotonic()
            self._pending.append(pending)
            self._calling_since_s = time.monotonic()
        try:
            self._communicator.broadcast(pointer, num_bytes, root, stream)
        finally:
            with self._lock:
                self._calling_since_s = None
        with self._lock:
            self._check()
            pending.end = self._backend.mark(stream)

    def wait(self) -> None:
        """Until every broadcast so far is done; WeightSyncError when one was not in time."""
        while True:
            with self._lock:
                self._check()
                self._advance()
                if not self._pending:
                    return
            time.sleep(_WAIT_PERIOD_S)

    def take_wire(self) -> Wire:
        """Of the broadcasts since the last call."""
        with self._lock:
            done, self._done = self._done, None
        if done is None:
            return Wire()
        first, last, num_bytes = done
        return Wire(last.seconds_since(first), num_bytes)

    @property
    def is_aborted(self) -> bool:
        """Whether it is over."""
        return self._is_aborted

    def abort(self) -> None:
        """Leaves; streams that wait for a broadcast of it go on, with whatever lies there."""
        with self._lock:
            self._end("it was aborted")
        if not self._gone.wait(_ABORT_LIMIT_S):
            logger.warning("a communicator is not aborted after %g s: left behind", _ABORT_LIMIT_S)

    def _warm_up(self, deadline_s: float) -> None:
        room = self._backend.warm_up_room()
        try:
            self.broadcast(room.pointer, room.num_bytes, 0, room.stream, deadline_s=deadline_s)
            self.wait()
        except WeightSyncError as error:
            self.abort()
            raise WeightSyncError(f"a member was lost when all had met: {error}") from error
        self.take_wire()

    def _check(self) -> None:
        if self._is_aborted:
            raise WeightSyncError(f"the communicator is gone: {self._cause}")

    def _advance(self) -> None:
        """Takes out what is done, in order; the caller holds the lock."""
        while self._pending:
            oldest = self._pending[0]
            if oldest.end is None or not oldest.end.is_done():
                return
            self._pending.popleft()
            first, _, num_bytes = self._done or (oldest.begin, None, 0)
            self._done = (first, oldest.end, num_bytes + oldest.num_bytes)
            self._since_s = time.monotonic()

    def _end(self, cause: str) -> None:
        """Lets the watchdog abort, once; no call begins any more. The caller holds the lock."""
        if self._is_aborted:
            return
        self._is_aborted, self._cause = True, cause
        self._pending.clear()
        self._stopped.set()

    def _abort(self) -> None:
        """In the watchdog's thread, as its last act."""
        while True:
            with self._lock:
                since_s = self._calling_since_s
            if since_s is None or time.monotonic() - since_s > _ENTER_LIMIT_S:
                break
            time.sleep(_WAIT_PERIOD_S)
        try:
            self._communicator.abort()
        except WeightSyncError as error:
            logger.warning("a communicator could not be aborted: %s", error)
        self._gone.set()
        atexit.unregister(self.abort)

    def _watch(self) -> None:
        try:
            self._abort_late_ones()
        finally:
            # Also when the device fails.
            with self._lock:
                self._end("its watchdog failed")
            self._abort()

    def _abort_late_ones(self) -> None:
        self._backend.use()
        while not self._stopped.wait(_WATCH_PERIOD_S):
            with self._lock:
                self._advance()
                if not self._pending or self._is_aborted:
                    continue
                oldest = self._pending[0]
                if time.monotonic() - self._since_s > oldest.deadline_s:
                    cause = f"{oldest.what} was not done within {oldest.deadline_s:g} s"
                    logger.warning("aborting a communicator: %s", cause)
                    self._end(cause)

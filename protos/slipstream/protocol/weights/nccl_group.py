"""A communicator of NCCL that waits for a dead member only until a deadline.

NCCL itself waits forever: a broadcast whose peer died is enqueued like any other, and its stream
never completes. A watchdog thread therefore watches the collectives, and aborts the communicator if
the oldest collective does not end in time. The abort releases the streams, and the GPU stays
usable. Only the watchdog calls NCCL's abort, which may block, so that no other thread hangs in it.

Pointers and streams are CUDA's handles, as integers. One thread uses a group; any thread may call
`abort`. NCCL is called through cupy, without torch; its calls release the GIL.
"""

import atexit
import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from slipstream.core.errors import WeightSyncError
from slipstream.protocol.weights.publish_waits import Unanswered, on_thread, reason

logger = logging.getLogger(__name__)

# Bytes of a warm-up broadcast.
_WARM_UP_BYTES = 16
_WATCH_PERIOD_S = 0.005
_WAIT_PERIOD_S = 0.0001
# A thread that began a call this long ago is inside NCCL, where an abort reaches it. An earlier
# abort could free the communicator before the thread enters NCCL.
_ENTER_LIMIT_S = 0.2
# Seconds that `abort` waits for the watchdog's abort.
ABORT_LIMIT_S = 5.0
# Without cuMem, NCCL can register buffers of any allocator, and vLLM's communicators have the same
# setting. A member with cuMem and one without wait for each other for ever. NVLS needs a fabric
# manager and does not speed up a broadcast.
NCCL_ENVIRONMENT = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
# Variables that decide by which algorithm and in what pieces members talk. NCCL does not compare
# them, and members that differ wait for each other for ever. Settings for the devices of one host
# may differ.
AGREED = (
    *NCCL_ENVIRONMENT,
    "NCCL_CUMEM_HOST_ENABLE",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_NTHREADS",
    "NCCL_BUFFSIZE",
    "NCCL_LL_BUFFSIZE",
    "NCCL_LL128_BUFFSIZE",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS",
)


def make_unique_id() -> bytes:
    """Returns the id by which members of a new communicator meet; the leader calls it."""
    from cupy.cuda import nccl

    return bytes(nccl.get_unique_id())


def set_nccl_environment(environ: MutableMapping[str, str]) -> None:
    """Sets the variables of `NCCL_ENVIRONMENT` that the user left unset.

    Call it before the process's first communicator.
    """
    for name, value in NCCL_ENVIRONMENT.items():
        environ.setdefault(name, value)


def agreed_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the NCCL variables of `environ` that must be equal on all members of a group.

    Unset variables are left out. Values are in lower case: NCCL does not distinguish Ring from
    ring.
    """
    return {name: environ[name].lower() for name in AGREED if environ.get(name)}


@dataclass(frozen=True)
class Wire:
    """The bytes of completed broadcasts, and the seconds from their first start to their last end.

    In the first broadcast a member also waits for all others, so the member that arrived last has
    the shortest time.
    """

    seconds: float = 0.0
    num_bytes: int = 0


@dataclass
class _Pending:
    what: str
    num_bytes: int
    # A CUDA event.
    begin: Any
    deadline_s: float
    # A CUDA event, None until NCCL has taken the broadcast; that call may wait too.
    end: Any = None


class NcclGroup:
    """This process's membership in a communicator; `join` creates it, `abort` ends it.

    Each transfer calls `broadcast` for every bucket, then `wait`, then `take_wire`. Only `abort`
    ends a group: destroying a communicator is a collective that would wait for a dead member.
    """

    def __init__(self, device: int, communicator: Any) -> None:  # noqa: ANN401 - of cupy
        self._device = device
        self._communicator = communicator
        self._lock = threading.Lock()
        self.is_aborted = False
        self._cause = ""
        self._pending: deque[_Pending] = deque()
        # Time at which the oldest pending collective became the oldest.
        self._since_s = 0.0
        # Start of the first completed broadcast, end of the last one, and bytes of all.
        self._done: tuple[Any, Any, int] | None = None
        # Start time of the call that is now inside NCCL.
        self._calling_since_s: float | None = None
        self._stopped, self._gone = threading.Event(), threading.Event()
        atexit.register(self.abort)
        threading.Thread(target=self._watch, name="nccl-watchdog", daemon=True).start()

    @classmethod
    def join(
        cls,
        device: int,
        unique_id: bytes,
        *,
        rank: int,
        world_size: int,
        deadline_s: float,
        abandoned: threading.Event | None = None,
    ) -> "NcclGroup":
        """Joins a communicator; returns the group once all members have joined.

        `device` is the CUDA device's index in this process. Raises WeightSyncError after the
        deadline or once `abandoned` is set. NCCL's constructor cannot be interrupted: its thread is
        then left behind, and aborts the communicator if it is created later. The watchdog also
        watches the first broadcast, which opens the connections, because a member may die before
        this.
        """
        lock = threading.Lock()
        groups = list[NcclGroup]()
        is_abandoned = False

        def connect() -> NcclGroup:
            from cupy.cuda import nccl

            use_device(device)
            with _errors_of_nccl(f"no communicator of {world_size} members"):
                group = cls(device, nccl.NcclCommunicator(world_size, unique_id, rank))
            with lock:
                groups.append(group)
                if is_abandoned:
                    group.abort()
            memory, stream = _warm_up_room(device)
            try:
                group.broadcast(memory.ptr, _WARM_UP_BYTES, 0, stream.ptr, deadline_s=deadline_s)
                group.wait()
            except WeightSyncError as error:
                group.abort()
                raise WeightSyncError(f"a member was lost when all had met: {error}") from error
            group.take_wire()
            return group

        try:
            return on_thread(connect, deadline_s, abandoned, name="nccl-join")
        except Unanswered:
            with lock:
                is_abandoned = True
            for group in groups:
                group.abort()
            raise WeightSyncError(
                f"the {world_size} members of a communicator did not meet "
                f"{reason(deadline_s, abandoned)}"
            ) from None

    def broadcast(
        self, pointer: int, num_bytes: int, root: int, stream: int, *, deadline_s: float
    ) -> None:
        """Enqueues the broadcast of `num_bytes` at `pointer` on `stream`; rank `root` has the data.

        The watchdog aborts the communicator if the broadcast is not done `deadline_s` seconds after
        the previous broadcast ended, or after this call began if no broadcast was pending. Raises
        WeightSyncError if the communicator is aborted.
        """
        from cupy.cuda import nccl

        what = f"the broadcast of {num_bytes} bytes from rank {root}"
        with self._lock:
            self._check()
            pending = _Pending(what, num_bytes, _recorded(stream), deadline_s)
            self._advance()
            if not self._pending:
                self._since_s = time.monotonic()
            self._pending.append(pending)
            self._calling_since_s = time.monotonic()
        try:
            with _errors_of_nccl(what):
                kind = nccl.NCCL_UINT8
                self._communicator.broadcast(pointer, pointer, num_bytes, kind, root, stream)
        finally:
            with self._lock:
                self._calling_since_s = None
        with self._lock:
            self._check()
            pending.end = _recorded(stream)

    def wait(self) -> None:
        """Waits until all broadcasts are done. Raises WeightSyncError if a broadcast is late."""
        while True:
            with self._lock:
                self._check()
                self._advance()
                if not self._pending:
                    return
            time.sleep(_WAIT_PERIOD_S)

    def take_wire(self) -> Wire:
        """Returns time and bytes of the broadcasts that ended since the last call."""
        from cupy.cuda import get_elapsed_time

        with self._lock:
            done = self._done
            self._done = None
        if done is None:
            return Wire()
        first, last, num_bytes = done
        return Wire(float(get_elapsed_time(first, last)) / 1e3, num_bytes)

    def abort(self, *, limit_s: float = ABORT_LIMIT_S) -> None:
        """Aborts the communicator; streams waiting for a broadcast continue with undefined data.

        A communicator that is not aborted within `limit_s` is left behind.
        """
        with self._lock:
            self._end("it was aborted")
        if not self._gone.wait(limit_s):
            logger.warning("a communicator is not aborted after %g s: left behind", limit_s)

    def _check(self) -> None:
        if self.is_aborted:
            raise WeightSyncError(f"the communicator is gone: {self._cause}")

    def _advance(self) -> None:
        """Removes completed broadcasts, in order; the caller holds the lock."""
        while self._pending:
            oldest = self._pending[0]
            if oldest.end is None or not oldest.end.done:
                return
            self._pending.popleft()
            first, _, num_bytes = self._done or (oldest.begin, None, 0)
            self._done = (first, oldest.end, num_bytes + oldest.num_bytes)
            self._since_s = time.monotonic()

    def _end(self, cause: str) -> None:
        """Makes the watchdog abort once and stops new calls; the caller holds the lock."""
        if self.is_aborted:
            return
        self.is_aborted = True
        self._cause = cause
        self._pending.clear()
        self._stopped.set()

    def _watch(self) -> None:
        """Aborts the communicator when a broadcast is late, or `_end` was called."""
        try:
            use_device(self._device)
            while not self._stopped.wait(_WATCH_PERIOD_S):
                with self._lock:
                    self._advance()
                    if not self._pending or self.is_aborted:
                        continue
                    oldest = self._pending[0]
                    if time.monotonic() - self._since_s > oldest.deadline_s:
                        cause = f"{oldest.what} was not done within {oldest.deadline_s:g} s"
                        logger.warning("aborting a communicator: %s", cause)
                        self._end(cause)
        finally:
            # The abort also runs when the device fails.
            with self._lock:
                self._end("its watchdog failed")
            while True:
                with self._lock:
                    since_s = self._calling_since_s
                if since_s is None or time.monotonic() - since_s > _ENTER_LIMIT_S:
                    break
                time.sleep(_WAIT_PERIOD_S)
            try:
                with _errors_of_nccl("the abort"):
                    self._communicator.abort()
            except WeightSyncError as error:
                logger.warning("a communicator could not be aborted: %s", error)
            self._gone.set()
            atexit.unregister(self.abort)


def use_device(device: int) -> None:
    """Makes the CUDA device with this index the calling thread's current device."""
    import cupy

    cupy.cuda.Device(device).use()


@functools.cache
def _warm_up_room(device: int) -> Any:  # noqa: ANN401 - cupy has no types
    """Returns memory and a stream on `device`, which must be the current device."""
    import cupy

    return cupy.cuda.alloc(_WARM_UP_BYTES), cupy.cuda.Stream(non_blocking=True)


def _recorded(stream: int) -> Any:  # noqa: ANN401 - cupy has no types
    """Returns a CUDA event at the end of the work enqueued on `stream` so far."""
    import cupy

    event = cupy.cuda.Event()
    cupy.cuda.runtime.eventRecord(event.ptr, stream)
    return event


@contextlib.contextmanager
def _errors_of_nccl(what: str) -> Iterator[None]:
    """Raises WeightSyncError, which begins with `what`, for an error of NCCL in the block."""
    from cupy.cuda import nccl

    try:
        yield
    except nccl.NcclError as error:
        raise WeightSyncError(f"{what}: {error}") from error

"""A thread of ours that fails where it cannot help it, as when there is no memory left."""

from __future__ import annotations

import ctypes
import threading

from slipstream.rollout_server.episodes.worker_logs import WorkerLogs

_LIMIT_S = 30.0


def end_writing(logs: WorkerLogs) -> None:
    """The thread that writes what workers print fails at its next step; returns when it has."""
    (thread,) = (t for t in threading.enumerate() if t.name == "worker-logs")
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(MemoryError)
    )
    with logs.output("wakes-it.log"):
        pass
    thread.join(_LIMIT_S)
    assert not thread.is_alive()

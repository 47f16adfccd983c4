"""A thread of ours that fails where it cannot help it, as when there is no memory left."""

import ctypes
import os
import threading

from slipstream.rollout_server.episodes.worker_gateway import WorkerLogs

from support.rigs.waiting import LIMIT_S


def end_writing(logs: WorkerLogs) -> None:
    """The thread that writes what workers print fails at its next step; returns when it has."""
    (thread,) = (t for t in threading.enumerate() if t.name == "worker-logs")
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(MemoryError)
    )
    # No function of Python's own is called before the thread has its error: while one is traced, as
    # a measurement of coverage does, Python 3.11 would enter none until then, and wait for ever.
    os.write(logs._wake_write, b"+")
    thread.join(LIMIT_S)
    assert not thread.is_alive()

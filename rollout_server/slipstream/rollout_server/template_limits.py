"""Limits of a chat template, which is a program that comes with a model."""

import contextlib
import resource
import signal
import threading
from collections.abc import Iterator

import psutil

# Seconds of processor time that a template may take for one conversation, and bytes of memory that
# it may take when it is tried. Any working template needs a thousandth.
PROCESSOR_S, MEMORY_BYTES = 10.0, 1 << 30
# Seconds after which a template that goes on is ended again.
_AGAIN_S = 0.1


class TemplateTooSlow(Exception):
    """Raised in a template that takes more than its processor time."""


@contextlib.contextmanager
def limited_time() -> Iterator[None]:
    """Raises TemplateTooSlow in a block that takes more than `PROCESSOR_S` of processor time.

    It counts the time of all threads, and has an effect in the main thread only.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise TemplateTooSlow(f"it took more than {PROCESSOR_S:g} s of processor time")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, PROCESSOR_S, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """Lets allocations in a block fail that take `MEMORY_BYTES` more than the process has.

    It holds for all threads, so use it only while the process does nothing else.
    """
    before, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = psutil.Process().memory_info().vms + MEMORY_BYTES
    if before != resource.RLIM_INFINITY:
        limit = min(limit, before)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, most))

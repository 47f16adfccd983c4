"""Torch's streams of CUDA without a GPU: they only tell what time it is when they come to a place.

Work takes the time that `Stream.work` is told, behind all that the stream was given and waits for.
A host that waits in between is an error: it could not give the next piece of work in time.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest
import torch


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.time = (stream or _current[-1]).time

    def elapsed_time(self, end: Event) -> float:
        return end.time - self.time

    def synchronize(self) -> None:
        raise AssertionError("the host waits for an event")


class Stream:
    """`time` is when all that it was given is done."""

    _handles = itertools.count(1)
    by_handle: dict[int, Stream] = {}

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.cuda_stream = next(self._handles)
        self.priority = priority
        self.time = 0.0
        self.by_handle[self.cuda_stream] = self

    def work(self, duration: float) -> None:
        self.time += duration

    def wait_event(self, event: Event) -> None:
        self.time = max(self.time, event.time)

    def wait_stream(self, other: Stream) -> None:
        self.time = max(self.time, other.time)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        raise AssertionError("the host waits for a stream")


_current: list[Stream] = []


@contextlib.contextmanager
def _on(stream: Stream) -> Iterator[None]:
    _current.append(stream)
    yield
    _current.pop()


@contextlib.contextmanager
def installed() -> Iterator[Stream]:
    """Replaces torch's CUDA streams; yields the stream that is current at first."""
    _current[:] = [Stream()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "stream", _on)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: _current[-1])
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        yield _current[0]
    _current.clear()
    Stream.by_handle.clear()

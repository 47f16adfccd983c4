"""Work that is counted instead of timed: the same on every machine, however busy it is.

A test of cost compares counts of two sizes, or a count with a limit. What C code does within one
line counts as that line: its cost is told by the size of what it is given.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Work:
    """The lines of Python that ran in one thread since it was made."""

    def __init__(self) -> None:
        self.num_lines = 0

    def trace(self, frame: FrameType, event: str, arg: object) -> Callable[..., object]:
        """A trace function as `sys.settrace` takes it."""
        self.num_lines += event == "line"
        return self.trace


@contextmanager
def counted() -> Iterator[Work]:
    """Counts the lines that this thread runs within the context, in functions called there."""
    work = Work()
    before = sys.gettrace()
    sys.settrace(work.trace)
    try:
        yield work
    finally:
        sys.settrace(before)


def num_lines(doing: Callable[[], object]) -> int:
    """The number of lines that `doing` runs."""
    with counted() as work:
        doing()
    return work.num_lines

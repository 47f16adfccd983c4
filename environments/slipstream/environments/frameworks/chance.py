"""Random numbers of one task, in place of the process's."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator


class Chance:
    """The numbers that `random` and numpy give while it is in use; it goes on where it stopped.

    Frameworks draw from the random numbers of the whole process, which all episodes share.
    """

    def __init__(self, seed: int) -> None:
        import numpy

        self._python = random.Random(seed).getstate()
        self._numpy = numpy.random.RandomState(seed % 2**32).get_state()

    @contextlib.contextmanager
    def in_use(self, *, keep: bool = True) -> Iterator[None]:
        """Takes the place of the process's numbers; without `keep` it stays where it is."""
        import numpy

        python_outside, numpy_outside = random.getstate(), numpy.random.get_state()
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)
        try:
            yield
        finally:
            if keep:
                self._python, self._numpy = random.getstate(), numpy.random.get_state()
            random.setstate(python_outside)
            numpy.random.set_state(numpy_outside)

"""The split of tasks into train and held out by a hash of each, and random numbers of a task."""

import contextlib
import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.environments.arguments import check_at_least, check_choice

SPLITS = ("train", "heldout")


@dataclass(frozen=True)
class Split:
    """Holds out one task in `heldout_one_in` by its hash, whatever the seed or order."""

    name: str
    heldout_one_in: int

    def __post_init__(self) -> None:
        """Raises ConfigError for an invalid argument."""
        check_choice("split", self.name, SPLITS)
        check_at_least("heldout_one_in", self.heldout_one_in, 2)

    def has(self, task: str) -> bool:
        """Whether a task belongs to this split."""
        digest = hashlib.blake2b(task.encode(), digest_size=8).digest()
        is_heldout = int.from_bytes(digest, "big") % self.heldout_one_in == 0
        return is_heldout == (self.name == "heldout")


class Chance:
    """A state of `random` and numpy that is in force inside `with`, and goes on where it stopped.

    Frameworks draw from the random numbers of the whole process, which all episodes share.
    """

    def __init__(self, seed: int) -> None:
        import numpy

        self._python = random.Random(seed).getstate()
        self._numpy = numpy.random.RandomState(seed % 2**32).get_state()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Takes the place of the process's numbers."""
        import numpy

        python_outside, numpy_outside = random.getstate(), numpy.random.get_state()
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)
        try:
            yield
        finally:
            self._python, self._numpy = random.getstate(), numpy.random.get_state()
            random.setstate(python_outside)
            numpy.random.set_state(numpy_outside)

"""Tasks that are held out and tasks that are trained, told apart by a hash of each task alone."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.environments.frameworks.packages import check_at_least, check_choice

SPLITS = ("train", "heldout")


@dataclass(frozen=True)
class Split:
    """One in `heldout_one_in` tasks is held out: no seed and no other order brings it back."""

    name: str
    heldout_one_in: int

    def __post_init__(self) -> None:
        """ConfigError names an argument that cannot be."""
        check_choice("split", self.name, SPLITS)
        check_at_least("heldout_one_in", self.heldout_one_in, 2)

    def has(self, task: str) -> bool:
        """Whether a task belongs to this split."""
        digest = hashlib.blake2b(task.encode(), digest_size=8).digest()
        is_heldout = int.from_bytes(digest, "big") % self.heldout_one_in == 0
        return is_heldout == (self.name == "heldout")


@dataclass(frozen=True)
class Seeds:
    """The seeds of a split from `first` on: `num_tasks` of them, or without end."""

    split: Split
    first: int
    num_tasks: int | None

    def __post_init__(self) -> None:
        """ConfigError names an argument that cannot be."""
        check_at_least("seed", self.first, 0)
        check_at_least("num_tasks", self.num_tasks, 1)

    def draw(self) -> list[int] | Iterator[int]:
        """Returns the seeds, as a list if they have an end."""
        drawn = (seed for seed in itertools.count(self.first) if self.split.has(str(seed)))
        return drawn if self.num_tasks is None else list(itertools.islice(drawn, self.num_tasks))

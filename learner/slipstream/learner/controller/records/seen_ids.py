"""Compact sets of trajectory ids, about a byte for each, and the step of each group."""

from __future__ import annotations

import functools
import re
from array import array

from slipstream.core.types import MAX_KEPT, GroupId, TrajectoryId, TrajectoryName

# Groups of one page; a forged id costs at most one page.
PAGE = 256
# Number of members of a group that share a word.
WORD = 64
_NUMBERED = re.compile(r"(g|e[0-9]+-)(0[0-9]{5}|[1-9][0-9]{5,11})")


class SeenIds:
    """An exact set of trajectory ids that takes about a byte per id.

    Most ids are the first attempt of a member by the only server that ran its group. Such an id is
    one bit, stored next to the epoch of that server. All others are kept as text.
    """

    def __init__(self) -> None:
        # Epochs and bits, by the kind of group, page of its number and word of its member.
        self._pages: dict[tuple[str, int, int], tuple[array[int], array[int]]] = {}
        self._others: set[TrajectoryId] = set()

    def add(self, trajectory_id: TrajectoryId) -> bool:
        """Adds an id; returns False if the set already has it."""
        place = _place(trajectory_id)
        if place is not None:
            page, index, epoch, bit = place
            if page not in self._pages:
                zeros = bytes(8 * PAGE)
                self._pages[page] = array("Q", zeros), array("Q", zeros)
            epochs, bits = self._pages[page]
            if not bits[index]:
                epochs[index] = epoch
            if epochs[index] == epoch:
                is_new = not bits[index] & bit
                bits[index] |= bit
                return is_new
        is_new = trajectory_id not in self._others
        self._others.add(trajectory_id)
        return is_new

    def __contains__(self, trajectory_id: TrajectoryId) -> bool:
        """Whether the id was added."""
        if not self._pages and not self._others:
            return False
        place = _place(trajectory_id)
        if place is not None and place[0] in self._pages:
            page, index, epoch, bit = place
            epochs, bits = self._pages[page]
            if epochs[index] == epoch and bits[index] & bit:
                return True
        return trajectory_id in self._others


def group_number(group_id: str) -> int | None:
    """Returns the number in the id of a training group, or None for any other text."""
    numbered = _NUMBERED.fullmatch(group_id)
    return int(numbered[2]) if numbered is not None and numbered[1] == "g" else None


class GroupSteps:
    """The step that trains each group, stored in four bytes per group."""

    def __init__(self) -> None:
        self._steps = array("i")

    def add(self, group_id: GroupId, step: int) -> None:
        """Notes the step that trains a group; group numbers have no gaps."""
        number = group_number(group_id)
        assert number is not None, group_id
        self._steps.extend([-1] * (number + 1 - len(self._steps)))
        self._steps[number] = step

    def discard(self, group_id: GroupId) -> None:
        """Forgets the step of a group whose batch was set aside."""
        self.add(group_id, -1)

    def get(self, group_id: GroupId) -> int | None:
        """Returns the step of the group, or None if it is in no batch or is no training group."""
        number = group_number(group_id)
        if number is None or number >= len(self._steps) or self._steps[number] < 0:
            return None
        return self._steps[number]


def _place(trajectory_id: str) -> tuple[tuple[str, int, int], int, int, int] | None:
    """Returns (page, index in the page, epoch, bit) of a first attempt's id, or None for others."""
    return _find_place(trajectory_id) if len(trajectory_id) <= MAX_KEPT else None


# A delivered id is looked up in several sets, one after the other.
@functools.lru_cache(maxsize=32)
def _find_place(trajectory_id: str) -> tuple[tuple[str, int, int], int, int, int] | None:
    name = TrajectoryName.parse(trajectory_id)
    if name is None or name.attempt:
        return None
    numbered = _NUMBERED.fullmatch(name.group_id)
    if numbered is None or trajectory_id != f"{name.group_id}.{name.member}.0.{name.epoch:x}":
        return None
    page, index = divmod(int(numbered[2]), PAGE)
    word, bit = divmod(name.member, WORD)
    return (numbered[1], page, word), index, name.epoch, 1 << bit

"""Rules of leases in their plain form, which the scheduler applies to counts and step by step."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slipstream.core.staleness import AnyGroup, due_groups, holds


@dataclass(frozen=True)
class PlainGroup:
    """A leased group of which nothing but the rules' facts is known."""

    group_id: str
    deadline_step: int
    is_complete: bool


def may_lease(
    deadlines: Iterable[int], step: int, groups_per_step: int, new_deadline: int
) -> bool:
    """Whether one more group with `new_deadline` keeps the invariant."""
    counts = Counter([*deadlines, new_deadline])
    return new_deadline >= step and holds(counts, step, groups_per_step)


def must_start_afresh(
    group: AnyGroup,
    groups: Sequence[AnyGroup],
    step: int,
    groups_per_step: int,
    may_be_finished: Iterable[bool],
) -> bool:
    """Whether an interrupted group is abandoned and its task leased again with a new deadline.

    `may_be_finished` has, for each server that could run the group now, whether it may finish it.
    While no batch waits for the group, a server with newer weights may still join.
    """
    verdicts = list(may_be_finished)
    if not verdicts or any(verdicts):
        return False
    return group in due_groups(groups, step, groups_per_step)

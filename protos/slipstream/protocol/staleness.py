"""The rules that keep the staleness promise, as pure functions.

Step s trains version s into version s + 1. A group that is leased on a server of version u may be
trained by steps up to its deadline min(u + max_staleness, last step), because its oldest token was
sampled by version u or a newer one.

**Invariant.** While the batch of step s is formed, for every d >= s - 1:

    number of leased, untrained groups with deadline <= d   <=   (d - s + 1) * groups_per_step

With d = s - 1 it says that no group has expired; with larger d, that all can still be trained in
time. It is kept by `may_lease` (before a lease) and `choose_batch` (before a step), so neither can
break the promise, and as long as servers finish what they were leased the next batch can always be
formed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LeasedGroup:
    """A leased, untrained group, as far as the rules look at it."""

    group_id: str
    deadline_step: int
    complete: bool


def deadline(served_step: int, max_staleness: int, num_steps: int) -> int:
    """The last step that may train a group which a server of version `served_step` starts now."""
    return min(served_step + max_staleness, num_steps - 1)


def holds(deadlines: Iterable[int], step: int, groups_per_step: int) -> bool:
    """Whether the invariant holds for `deadlines` while the batch of `step` is being formed.

    It is enough to look where the left side grows: at the deadlines themselves. O(n log n).
    """
    return all(
        count <= (d - step + 1) * groups_per_step
        for count, d in enumerate(sorted(deadlines), start=1)
    )


def may_lease(deadlines: Iterable[int], step: int, groups_per_step: int, new_deadline: int) -> bool:
    """Whether one more group with `new_deadline` keeps the invariant."""
    return new_deadline >= step and holds([*deadlines, new_deadline], step, groups_per_step)


def may_lease_counted(
    counts: Mapping[int, int], step: int, groups_per_step: int, new_deadline: int
) -> bool:
    """The same as `may_lease` for the number of groups of each deadline, of which there are few."""
    if new_deadline < step:
        return False
    count = 0
    for d in sorted({*counts, new_deadline}):
        count += counts.get(d, 0) + (d == new_deadline)
        if count > (d - step + 1) * groups_per_step:
            return False
    return True


def may_finish(deadline_step: int, served_step: int, max_staleness: int, num_steps: int) -> bool:
    """Whether a server of version `served_step` may run members of a group that was leased before.

    Their tokens are no older than `served_step`, and the group is trained by its deadline.
    """
    return deadline_step <= deadline(served_step, max_staleness, num_steps)


def is_stranded(may_be_finished: Iterable[bool]) -> bool:
    """Whether servers could run an interrupted group now, and none of them may finish it."""
    verdicts = list(may_be_finished)
    return bool(verdicts) and not any(verdicts)


def must_start_afresh(
    group: LeasedGroup,
    groups: Sequence[LeasedGroup],
    step: int,
    groups_per_step: int,
    may_be_finished: Iterable[bool],
) -> bool:
    """Whether an interrupted group is given up and its task leased again, under a new deadline.

    `may_be_finished` has an entry for each server that could run it now: whether it `may_finish`
    it. While no batch waits for the group, a server with newer weights may still come.
    """
    if not is_stranded(may_be_finished):
        return False
    due = due_groups(groups, step, groups_per_step)
    return any(each.group_id == group.group_id for each in due)


def choose_batch(
    groups: Sequence[LeasedGroup], step: int, groups_per_step: int
) -> list[LeasedGroup] | None:
    """The batch of `step`: complete groups, those due first; None while it cannot be formed.

    `groups` are all leased, untrained groups in the order of their leases. Among the possible
    choices the earliest deadlines leave the fewest groups with deadline <= d for every d, so if
    these do not keep the invariant for the next step, no choice does, and the controller must wait
    for the groups that are due.
    """
    complete = sorted(
        (group for group in groups if group.complete), key=lambda group: group.deadline_step
    )
    if len(complete) < groups_per_step:
        return None
    chosen = complete[:groups_per_step]
    taken = {group.group_id for group in chosen}
    if not holds(
        (group.deadline_step for group in groups if group.group_id not in taken),
        step + 1,
        groups_per_step,
    ):
        return None
    order = {group.group_id: index for index, group in enumerate(groups)}
    return sorted(chosen, key=lambda group: order[group.group_id])


def due_groups(groups: Sequence[LeasedGroup], step: int, groups_per_step: int) -> list[LeasedGroup]:
    """The incomplete groups that the batch of `step` waits for: they cannot be left for later."""
    due: list[LeasedGroup] = []
    for count, group in enumerate(
        sorted(groups, key=lambda group: (group.deadline_step, not group.complete)), start=1
    ):
        if count > (group.deadline_step - step) * groups_per_step and not group.complete:
            due.append(group)
    return due


def lag(trained_step: int, sampled_step: int) -> int:
    """Lag of a token: the version being trained when it is used, less that which sampled it."""
    return trained_step - sampled_step

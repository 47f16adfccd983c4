"""The rule for interrupted groups in one function, which the scheduler applies step by step."""

from collections.abc import Iterable, Sequence

from slipstream.core.staleness import LeasedGroup, due_groups, is_stranded


def must_start_afresh(
    group: LeasedGroup,
    groups: Sequence[LeasedGroup],
    step: int,
    groups_per_step: int,
    may_be_finished: Iterable[bool],
) -> bool:
    """Whether an interrupted group is abandoned and its task leased again with a new deadline.

    `may_be_finished` has the result of `may_finish` for each server that could run the group now.
    While no batch waits for the group, a server with newer weights may still join.
    """
    if not is_stranded(may_be_finished):
        return False
    due = due_groups(groups, step, groups_per_step)
    return any(each.group_id == group.group_id for each in due)

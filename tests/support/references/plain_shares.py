"""What a batch owes each environment, judged by exchanges of single groups."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slipstream.core.staleness import holds


@dataclass(frozen=True)
class MixedGroup:
    """The facts about a leased, untrained group that shares need; `holder` is a server or None."""

    group_id: str
    environment: str
    deadline_step: int
    is_complete: bool
    holder: str | None = None


@dataclass(frozen=True)
class Moment:
    """All that the choice of one batch could know; servers that work hold the groups of `held`."""

    groups: Sequence[MixedGroup]
    step: int
    groups_per_step: int
    weights: Mapping[str, float]
    owed: Mapping[str, float]
    ended: Mapping[str, int]
    working_servers: frozenset[str]

    def keeps_staleness(self, chosen: Sequence[MixedGroup]) -> bool:
        """Whether the groups that `chosen` leaves can all be trained in time."""
        rest = Counter(
            group.deadline_step for group in self.groups if group not in chosen
        )
        return holds(rest, self.step + 1, self.groups_per_step)

    def is_available(self, group: MixedGroup) -> bool:
        """Whether a batch may have the group now or wait for it."""
        return group.is_complete or group.holder in self.working_servers


def share_faults(moment: Moment, chosen: Sequence[MixedGroup]) -> list[str]:
    """Returns a line for each environment that is owed a group which the batch could have had.

    An environment is short if a whole seat or more is missing to its share and to what was owed
    before. Then no group of it may be left that could replace one of an environment that got its
    share, unless so many of its groups ended that it is not waited for.
    """
    available = [group for group in moment.groups if moment.is_available(group)]
    names = sorted({group.environment for group in available})
    total = sum(moment.weights[name] for name in names)
    seats = Counter(group.environment for group in chosen)
    due = {
        name: moment.owed.get(name, 0.0)
        + moment.groups_per_step * moment.weights[name] / total
        for name in names
    }
    faults = []
    for name in names:
        for spare in available:
            if spare.environment != name or spare in chosen:
                continue
            num_passed = 0
            if not spare.is_complete:
                num_passed = moment.ended.get(name, 0) // 2
            if seats[name] + num_passed >= due[name] - 1.0 - 1e-9:
                continue
            for member in chosen:
                rest = [group for group in chosen if group != member]
                has_share = seats[member.environment] >= due[member.environment] + 1e-9
                is_other = member.environment != name
                if has_share and is_other and moment.keeps_staleness([spare, *rest]):
                    faults.append(
                        f"{name} has {seats[name]} groups of {due[name]:.2f}, and "
                        f"{spare.group_id} could replace {member.group_id}"
                    )
                    break
    return faults

"""The choice of a batch in which each environment has its share of the groups.

**Share.** Each environment that has groups for a batch is due its weight, divided by the sum of
their weights, of the batch's seats, and what was owed before. Seat by seat the one to which most is
due gets a group. If its groups end first, the rest of its due goes to the others by their weights.
What rounding leaves is owed to the next batch, and nothing else is: an environment without groups
is owed nothing for that time.

**Waiting.** An environment has its complete groups, and then the unfinished ones that servers hold
which serve or take weights: a batch waits for those to which it has dealt a seat. For two groups
that ended without being trained since the last batch, an environment without a complete group lets
one seat pass. Seats that pass go to the complete groups of the others, which owe nothing for them.
So an environment holds a batch up for at most twice its seats in groups that end so, and one whose
groups are all filtered stops nothing. Each awaited group is completed, ends, or loses its server,
so that each wait ends.

**Staleness.** A share never moves a group past its deadline: where the invariant of
`slipstream.core.staleness` needs early groups in the batch, these replace later ones. If too few
groups are complete, or groups are due, no batch is formed whatever the shares are.

The module uses no clock and no I/O, and no order but that of the leases and of names.
"""

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from slipstream.core import staleness
from slipstream.learner.controller.servers.session import ServerKey

# Ended groups of an environment in place of which it lets one seat of a batch pass.
ENDED_PER_SEAT = 2
# The weight of an environment whose client has not come again since the controller was started.
ABSENT_WEIGHT = 1.0


class MixedGroup(staleness.LeasedGroup, Protocol):
    """The facts about a leased, untrained group that shares need."""

    environment: str
    holder: ServerKey | None


AnyGroup = TypeVar("AnyGroup", bound=MixedGroup)


@dataclass(frozen=True)
class Mixture:
    """The facts about the environments of a run from which their shares of a batch follow."""

    # The weight of each environment that is trained, by name.
    weights: Mapping[str, float] = field(default_factory=dict)
    # Seats that rounding owes to environments after the last batch, by name.
    owed: Mapping[str, float] = field(default_factory=dict)
    # Groups that ended without being trained since the last batch, by environment.
    ended: Mapping[str, int] = field(default_factory=dict)
    # The servers for whose groups a batch may wait.
    working_servers: Collection[ServerKey] = ()


@dataclass(frozen=True)
class BatchChoice(Generic[AnyGroup]):
    """The groups of a batch, in lease order; it waits for those that are not complete."""

    groups: list[AnyGroup]
    # Seats that are owed after this batch, by environment.
    owed: dict[str, float]

    @property
    def awaited(self) -> list[AnyGroup]:
        return [group for group in self.groups if not group.is_complete]


@dataclass
class _Supply:
    """The groups that an environment has for a batch, as places in the order of the leases."""

    name: str
    weight: float
    # Seats that are due to the environment.
    due: float = 0.0
    num_passes: int = 0
    complete: deque[int] = field(default_factory=deque)
    unfinished: deque[int] = field(default_factory=deque)

    @property
    def is_empty(self) -> bool:
        return not self.complete and not self.unfinished

    @property
    def claim(self) -> tuple[float, float]:
        """What decides who gets the next seat."""
        return self.due, self.weight

    def take(self) -> int | None:
        """Takes the place of the next group; None if the environment lets this seat pass."""
        self.due -= 1.0
        if self.complete:
            return self.complete.popleft()
        if self.num_passes:
            self.num_passes -= 1
            return None
        return self.unfinished.popleft()


def choose(
    groups: Sequence[AnyGroup], step: int, groups_per_step: int, mixture: Mixture
) -> BatchChoice[AnyGroup] | None:
    """Returns the batch of `step`, by shares as far as staleness allows.

    `groups` are all leased, untrained groups in lease order. Returns None if too few groups are
    complete, or if the batch must wait for groups that are due.
    """
    earliest = staleness.choose_batch(groups, step, groups_per_step)
    if earliest is None:
        return None
    supplies = _supplies(groups, mixture)
    owed = {**mixture.owed}
    if len(supplies) == 1:
        return BatchChoice(earliest, owed)
    _divide(groups_per_step, supplies)
    due = {supply.name: supply.due for supply in supplies}
    places = _deal(supplies, groups_per_step)
    for supply in supplies:
        owed[supply.name] = supply.due
    _deal_passed(places, supplies, groups_per_step)
    _keep_staleness(places, groups, step, groups_per_step, due)
    batch = [groups[place] for place in sorted(places)]
    return BatchChoice(batch, owed)


def _supplies(groups: Sequence[AnyGroup], mixture: Mixture) -> list[_Supply]:
    """Returns the groups of each environment that has any, by name, earliest deadline first."""
    supplies: dict[str, _Supply] = {}

    def deadline(place: int) -> int:
        return groups[place].deadline_step

    for place in sorted(range(len(groups)), key=deadline):
        group = groups[place]
        name = group.environment
        is_held = group.holder in mixture.working_servers
        if not group.is_complete and not is_held:
            continue
        if name not in supplies:
            supplies[name] = _Supply(
                name=name,
                weight=mixture.weights.get(name, ABSENT_WEIGHT),
                due=mixture.owed.get(name, 0.0),
                num_passes=mixture.ended.get(name, 0) // ENDED_PER_SEAT,
            )
        supply = supplies[name]
        if group.is_complete:
            supply.complete.append(place)
        else:
            supply.unfinished.append(place)
    return [supplies[name] for name in sorted(supplies)]


def _deal(supplies: Sequence[_Supply], num_seats: int) -> set[int]:
    """Deals the seats of a batch; returns the places of the groups that have one."""
    places: set[int] = set()
    for _ in range(num_seats):
        place = _take_next(supplies)
        if place is not None:
            places.add(place)
    return places


def _deal_passed(places: set[int], supplies: Sequence[_Supply], num_seats: int) -> None:
    """Deals the seats that were let pass to complete groups."""
    finished = [supply for supply in supplies if supply.complete]
    for supply in finished:
        supply.unfinished.clear()
    num_passed = num_seats - len(places)
    _divide(num_passed, finished)
    while len(places) < num_seats:
        place = _take_next(finished)
        assert place is not None
        places.add(place)


def _take_next(supplies: Sequence[_Supply]) -> int | None:
    """Takes the group of the next seat; returns its place, or None for a seat that is let pass."""
    # Of equal claims the first by name counts.
    nearest = max(_present(supplies), key=lambda supply: supply.claim)
    place = nearest.take()
    if nearest.is_empty and nearest.due > 0.0:
        rest = nearest.due
        nearest.due = 0.0
        _divide(rest, supplies)
    return place


def _divide(num_seats: float, supplies: Sequence[_Supply]) -> None:
    """Adds `num_seats` to what is due to environments that have groups, by their weights."""
    present = _present(supplies)
    total = sum(supply.weight for supply in present)
    for supply in present:
        share = supply.weight / total
        supply.due += num_seats * share


def _present(supplies: Sequence[_Supply]) -> list[_Supply]:
    return [supply for supply in supplies if not supply.is_empty]


def _keep_staleness(
    places: set[int],
    groups: Sequence[AnyGroup],
    step: int,
    groups_per_step: int,
    due: Mapping[str, float],
) -> None:
    """Replaces the fewest of `places` by early complete groups, until the next step has time.

    `due` has the seats of each environment. A group of the one that has most beyond them is
    replaced by a group of the one that has fewest.
    """
    rest: Counter[int] = Counter()
    balance = {**due}
    for place, group in enumerate(groups):
        if place in places:
            balance[group.environment] -= 1.0
        else:
            rest[group.deadline_step] += 1

    def leaves(place: int) -> tuple[float, int, bool]:
        group = groups[place]
        return balance[group.environment], -group.deadline_step, group.is_complete

    def comes(place: int) -> tuple[float, int, int]:
        group = groups[place]
        return -balance[group.environment], group.deadline_step, place

    while overfull := staleness.overfull_deadlines(+rest, step + 1, groups_per_step):
        # Each exchange helps at all of these deadlines.
        late_places = []
        early_places = []
        for place, group in enumerate(groups):
            if place in places and group.deadline_step > overfull[-1]:
                late_places.append(place)
            elif place not in places and group.is_complete and group.deadline_step <= overfull[0]:
                early_places.append(place)
        late = min(late_places, key=leaves)
        early = min(early_places, key=comes)
        places.remove(late)
        places.add(early)
        rest[groups[late].deadline_step] += 1
        rest[groups[early].deadline_step] -= 1
        balance[groups[late].environment] += 1.0
        balance[groups[early].environment] -= 1.0

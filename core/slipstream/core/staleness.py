"""The rules of leases, as pure functions: the lag of trained tokens, and room in the queue.

**Lag.** Step s trains version s into version s + 1; a token's lag is s minus the version that
sampled it. A group leased to a server of version u may be trained by steps up to its deadline
min(u + max_staleness, last step). Its oldest token was sampled by version u or a newer version.

**Invariant.** While the batch of step s is formed, for every d >= s - 1:

    number of leased, untrained groups with deadline <= d   <=   (d - s + 1) * groups_per_step

For d = s - 1 the invariant says that no group has expired; for larger d, that all groups can still
be trained in time. `holds` (before a lease) and `choose_batch` (before a step) keep the
invariant. As long as servers finish their leased groups, the next batch can always be formed.

**Queue.** A trajectory waits in the queue from its end until the journal has its outcome.
Trajectories of a batch wait for each other, so a queue that is full before a batch is complete
would never empty. A lease is granted only if, with this lease,

    bytes in the queue  +  episodes that may still be sent * largest trajectory  <=  size

Episodes that may still be sent are the undelivered members of leased groups, and the members of
ended leases until the server closes the lease. The trajectory of a failed attempt waits in the
queue in addition to the reservation of its retry, until its own journal record acknowledges it;
that record waits for nothing else. So there is no deadlock if the queue has room for one batch of
largest trajectories. While fewer groups are leased than a step trains, there is room for one more
group. As many complete groups as a step trains make a batch.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Protocol, TypeVar


class LeasedGroup(Protocol):
    """The facts about a leased, untrained group that the rules need."""

    deadline_step: int

    @property
    def is_complete(self) -> bool: ...


AnyGroup = TypeVar("AnyGroup", bound=LeasedGroup)


def deadline(served_step: int, max_staleness: int, num_steps: int) -> int:
    """Returns the last step that may train a group leased to a server of version `served_step`."""
    return min(served_step + max_staleness, num_steps - 1)


def overfull_deadlines(counts: Mapping[int, int], step: int, groups_per_step: int) -> list[int]:
    """Returns the deadlines at which the module's invariant is broken while `step` is formed.

    `counts` has the number of leased, untrained groups with each deadline. Only these are checked
    as d, since the left side grows only there.
    """
    places = sorted(counts)
    totals = accumulate(counts[d] for d in places)
    return [
        d
        for d, total in zip(places, totals, strict=True)
        if total > (d - step + 1) * groups_per_step
    ]


def holds(counts: Mapping[int, int], step: int, groups_per_step: int) -> bool:
    """Whether the module's invariant holds while the batch of `step` is formed.

    `counts` has the number of leased, untrained groups with each deadline.
    """
    return not overfull_deadlines(counts, step, groups_per_step)


def choose_batch(
    groups: Sequence[AnyGroup], step: int, groups_per_step: int
) -> list[AnyGroup] | None:
    """Returns the batch of `step`: complete groups with the earliest deadlines, in lease order.

    `groups` are all leased, untrained groups in lease order. Returns None if the controller must
    wait: too few groups are complete, or the invariant would not hold for the next step. Then no
    other choice would keep the invariant, since this choice leaves the fewest groups with deadline
    <= d for every d.
    """
    complete = [place for place, group in enumerate(groups) if group.is_complete]
    if len(complete) < groups_per_step:
        return None
    complete.sort(key=lambda place: groups[place].deadline_step)
    batch_places = set(complete[:groups_per_step])
    deadlines = Counter(
        g.deadline_step for place, g in enumerate(groups) if place not in batch_places
    )
    if not holds(deadlines, step + 1, groups_per_step):
        return None
    return [groups[place] for place in sorted(batch_places)]


def due_groups(groups: Iterable[AnyGroup], step: int, groups_per_step: int) -> list[AnyGroup]:
    """Returns the incomplete groups that the batch of `step` must wait for, by deadline."""
    by_deadline = sorted(groups, key=lambda group: (group.deadline_step, not group.is_complete))
    return [
        group
        for count, group in enumerate(by_deadline, start=1)
        if count > (group.deadline_step - step) * groups_per_step and not group.is_complete
    ]


# Bytes that each of a trajectory's two texts may have in addition to the bytes of its tokens.
_TEXT_BYTES = 256
_TEXT_BYTES_PER_TOKEN = 5


def max_text_bytes(num_tokens: int) -> int:
    """Returns the largest size of a prompt's or reply's text with `num_tokens` tokens, in bytes."""
    return _TEXT_BYTES + _TEXT_BYTES_PER_TOKEN * num_tokens

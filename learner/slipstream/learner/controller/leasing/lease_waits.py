"""The reasons why no group is leased at this moment, for people and for metrics."""

from __future__ import annotations

from enum import IntEnum

from slipstream.learner.controller.leasing.leases import LeaseBook


class LeaseWait(IntEnum):
    """What the next lease lacks; where it lacks several things, the largest number counts."""

    NOTHING = 0
    SERVER = 1
    SLOTS = 2
    STALENESS = 3
    ENVIRONMENT = 4
    QUEUE = 5


WORDS = {
    LeaseWait.NOTHING: "",
    LeaseWait.SERVER: "a rollout server that serves",
    LeaseWait.SLOTS: "a rollout server with room for a group",
    LeaseWait.STALENESS: "a step: more groups could not all be trained within max_staleness",
    LeaseWait.ENVIRONMENT: "an environment that is ready and has room for a group",
    LeaseWait.QUEUE: "room in the queue (queue.max_bytes)",
}


def batch_wait(book: LeaseBook) -> str:
    """What the next batch waits for, in words."""
    due = book.due()
    if due:
        members = sum(len(group.missing) for group in due)
        return (
            f"{members} episodes that step {book.step + 1} cannot leave for later, "
            f"the first of group {due[0].group_id}"
        )
    training = book.training_groups()
    if not training:
        return "a rollout server that serves, with an environment that is loaded"
    complete = sum(group.is_complete for group in training)
    return (
        f"groups for step {book.step + 1}: {complete} of "
        f"{book.groups_per_step} are complete, {len(training)} are leased"
    )

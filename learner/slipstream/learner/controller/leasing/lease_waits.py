"""Why no group is leased at this moment, for people and for metrics."""

from __future__ import annotations

from enum import IntEnum


class LeaseWait(IntEnum):
    """What the next lease lacks; of several servers' reasons the largest is told."""

    NOTHING = 0
    SERVER = 1
    SLOTS = 2
    STALENESS = 3
    ENVIRONMENT = 4
    QUEUE = 5
    PACE = 6


WORDS = {
    LeaseWait.NOTHING: "",
    LeaseWait.SERVER: "a rollout server that serves",
    LeaseWait.SLOTS: "a rollout server with room for a group",
    LeaseWait.STALENESS: "a step: more groups could not all be trained within max_staleness",
    LeaseWait.ENVIRONMENT: "an environment that is ready and has room for a group",
    LeaseWait.QUEUE: "room in the queue (queue.max_bytes)",
    LeaseWait.PACE: "the trainer: enough groups are leased to keep it busy (lease_policy)",
}

"""The states of a rollout server, and how each follows from what happens: a pure function.

JOINING --receive--> LOADING --published--> SERVING --receive--> LOADING ...
any of them --failed--> STALE --receive--> LOADING
any of them --drain--> DRAINING, which nothing but its end leaves
all of them --lost--> DEAD
all of them --left--> LEFT
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from slipstream.protocol.types import ServerId
from slipstream.v1 import fleet_pb2

JOINING = fleet_pb2.SERVER_STATE_JOINING
LOADING = fleet_pb2.SERVER_STATE_LOADING
SERVING = fleet_pb2.SERVER_STATE_SERVING
STALE = fleet_pb2.SERVER_STATE_STALE
DRAINING = fleet_pb2.SERVER_STATE_DRAINING
DEAD = fleet_pb2.SERVER_STATE_DEAD
LEFT = fleet_pb2.SERVER_STATE_LEFT


class ServerEvent(Enum):
    """What moves a server from one state to another."""

    # It was told to receive new weights.
    RECEIVE = "receive"
    # It has loaded them whole, and they were proved.
    PUBLISHED = "published"
    # A publish to it failed, in whatever phase.
    FAILED = "failed"
    # It leaves: of its own, or because it was told to.
    DRAIN = "drain"
    # Its stream ended, or it was silent, in the middle of something.
    LOST = "lost"
    # It is gone in order: it had drained, and told its last counters.
    LEFT = "left"


# What ends every other state, and what nothing leaves.
_ENDS = {ServerEvent.LOST: DEAD, ServerEvent.LEFT: LEFT}
_NEXT = {
    (JOINING, ServerEvent.RECEIVE): LOADING,
    (SERVING, ServerEvent.RECEIVE): LOADING,
    (STALE, ServerEvent.RECEIVE): LOADING,
    (LOADING, ServerEvent.PUBLISHED): SERVING,
}


def next_state(state: fleet_pb2.ServerState, event: ServerEvent) -> fleet_pb2.ServerState:
    """The state after `event`; ValueError where it cannot happen.

    A server that drains may finish the publish that it is part of: others would lose it. That makes
    it no server that serves.
    """
    if state in _ENDS.values():
        return state
    if event in _ENDS:
        return _ENDS[event]
    if state == DRAINING or event is ServerEvent.DRAIN:
        return DRAINING
    if event is ServerEvent.FAILED:
        return STALE
    following = _NEXT.get((state, event))
    if following is None:
        name = fleet_pb2.ServerState.Name(state)
        raise ValueError(f"a rollout server in the state {name} cannot {event.value}")
    return following


class ServerKey(NamedTuple):
    """One epoch of one rollout server; a tuple: a controller hashes dozens for a trajectory."""

    server_id: ServerId
    epoch: int

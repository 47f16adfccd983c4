"""The states of a rollout server and their transitions: a pure function.

JOINING --receive--> LOADING --published--> SERVING --receive--> LOADING ...
any of them --failed--> STALE --receive--> LOADING
any of them --drain--> DRAINING, which only `lost` and `left` end
all of them --lost--> DEAD
all of them --left--> LEFT
"""

from enum import Enum
from typing import NamedTuple

from slipstream.core.types import ServerId
from slipstream.v1 import fleet_pb2

JOINING = fleet_pb2.SERVER_STATE_JOINING
LOADING = fleet_pb2.SERVER_STATE_LOADING
SERVING = fleet_pb2.SERVER_STATE_SERVING
STALE = fleet_pb2.SERVER_STATE_STALE
DRAINING = fleet_pb2.SERVER_STATE_DRAINING
DEAD = fleet_pb2.SERVER_STATE_DEAD
LEFT = fleet_pb2.SERVER_STATE_LEFT


class ServerEvent(Enum):
    """The events that move a server from one state to another."""

    # The server was told to receive new weights.
    RECEIVE = "receive"
    # The server has loaded the whole weights, and a probe, if asked for, has passed.
    PUBLISHED = "published"
    # A publish to the server failed, in any phase.
    FAILED = "failed"
    # The server leaves, on its own or by an order.
    DRAIN = "drain"
    # The stream ended or was silent for too long before the server had drained.
    LOST = "lost"
    # The server left normally: it had drained and reported its last counters.
    LEFT = "left"


# Events that end every other state; nothing leaves the states that they lead to.
_ENDS = {ServerEvent.LOST: DEAD, ServerEvent.LEFT: LEFT}
_NEXT = {
    (JOINING, ServerEvent.RECEIVE): LOADING,
    (SERVING, ServerEvent.RECEIVE): LOADING,
    (STALE, ServerEvent.RECEIVE): LOADING,
    (LOADING, ServerEvent.PUBLISHED): SERVING,
}


def next_state(state: fleet_pb2.ServerState, event: ServerEvent) -> fleet_pb2.ServerState:
    """Returns the state after `event`; raises ValueError if `event` cannot happen in `state`.

    A DRAINING server may finish a publish in which it takes part, because otherwise the other
    receivers would lose that publish. It stays DRAINING.
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
    """One epoch of one rollout server; a tuple, as it is hashed dozens of times per trajectory."""

    server_id: ServerId
    epoch: int

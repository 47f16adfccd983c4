from itertools import product

import pytest
from slipstream.learner.controller.servers.session import (
    DEAD,
    DRAINING,
    JOINING,
    LEFT,
    LOADING,
    SERVING,
    STALE,
    ServerEvent,
    next_state,
)
from slipstream.v1 import fleet_pb2

RECEIVE, PUBLISHED, FAILED, DRAIN, LOST, LEAVE = ServerEvent
# The next state after receive, published, failed, drain, lost and left; None: cannot happen.
TABLE = {
    JOINING: (LOADING, None, STALE, DRAINING, DEAD, LEFT),
    LOADING: (None, SERVING, STALE, DRAINING, DEAD, LEFT),
    SERVING: (LOADING, None, STALE, DRAINING, DEAD, LEFT),
    STALE: (LOADING, None, STALE, DRAINING, DEAD, LEFT),
    DRAINING: (DRAINING, DRAINING, DRAINING, DRAINING, DEAD, LEFT),
    DEAD: (DEAD,) * 6,
    LEFT: (LEFT,) * 6,
}


def test_the_table_has_every_state_and_every_event() -> None:
    unspecified = fleet_pb2.SERVER_STATE_UNSPECIFIED
    assert set(TABLE) == set(fleet_pb2.ServerState.values()) - {unspecified}
    assert {len(row) for row in TABLE.values()} == {len(ServerEvent)}


@pytest.mark.parametrize(("state", "event"), list(product(TABLE, ServerEvent)))
def test_every_event_in_every_state_leads_where_the_table_says(state, event: ServerEvent) -> None:
    expected = TABLE[state][list(ServerEvent).index(event)]
    if expected is None:
        with pytest.raises(ValueError, match=f"cannot {event.value}"):
            next_state(state, event)
    else:
        assert next_state(state, event) == expected

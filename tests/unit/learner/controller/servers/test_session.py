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
    next_state,
)
from slipstream.v1 import fleet_pb2

# The state that a server is to come to, and for each state what follows; None: cannot happen.
TARGETS = (LOADING, SERVING, STALE, DRAINING, DEAD, LEFT)
TABLE = {
    JOINING: (LOADING, None, STALE, DRAINING, DEAD, LEFT),
    LOADING: (None, SERVING, STALE, DRAINING, DEAD, LEFT),
    SERVING: (LOADING, None, STALE, DRAINING, DEAD, LEFT),
    STALE: (LOADING, None, STALE, DRAINING, DEAD, LEFT),
    DRAINING: (DRAINING, DRAINING, DRAINING, DRAINING, DEAD, LEFT),
    DEAD: (DEAD,) * 6,
    LEFT: (LEFT,) * 6,
}


def test_the_table_has_every_state_and_every_target() -> None:
    unspecified = fleet_pb2.SERVER_STATE_UNSPECIFIED
    assert set(TABLE) == set(fleet_pb2.ServerState.values()) - {unspecified}
    assert {len(row) for row in TABLE.values()} == {len(TARGETS)}


@pytest.mark.parametrize(("state", "target"), list(product(TABLE, TARGETS)))
def test_every_state_and_target_lead_where_the_table_says(state, target) -> None:
    expected = TABLE[state][TARGETS.index(target)]
    if expected is None:
        name = fleet_pb2.ServerState.Name(target)
        with pytest.raises(ValueError, match=f"cannot be {name}"):
            next_state(state, target)
    else:
        assert next_state(state, target) == expected

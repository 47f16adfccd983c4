import numpy as np
import pytest
from slipstream.core.types import GroupId, ServerId, TrajectoryId, TrajectoryName
from slipstream.learner.controller.servers.server_epochs import ServerEpochs
from slipstream.learner.controller.servers.session import ServerKey
from slipstream.learner.controller.trajectories.inspection import read_claim
from slipstream.protocol.queue.base import Delivery
from slipstream.v1 import trajectory_pb2

KEY = ServerKey(ServerId("a"), 0xF)
KNOWN = ServerEpochs()
KNOWN.join(KEY)
ID = TrajectoryId("g7.1.2.f")


def test_a_claim_is_read_as_far_as_it_goes() -> None:
    message = trajectory_pb2.Trajectory(
        server_id="b",
        server_epoch=3,
        run_lengths=[4, 5, 6, 7],
        will_retry=True,
        run_id="r",
    )
    data = message.SerializeToString()
    assert read_claim(Delivery(ID, data), KNOWN, largest_bytes=1 << 20) == (
        KEY,
        12,
        True,
    )
    assert TrajectoryName.parse(ID) == TrajectoryName(GroupId("g7"), 1, 2, 0xF)
    server, *_ = read_claim(Delivery(ID, data), ServerEpochs(), largest_bytes=1 << 20)
    assert server == ServerKey(ServerId("b"), 3)
    garbage = read_claim(Delivery(ID, b"\xff"), KNOWN, largest_bytes=1 << 20)
    assert garbage == (KEY, 0, False)
    nameless = Delivery(TrajectoryId("what"), b"\xff")
    server, *_ = read_claim(nameless, KNOWN, largest_bytes=1 << 20)
    assert server.server_id == "unknown"


def test_a_claim_of_more_tokens_than_a_trajectory_can_have_is_cut() -> None:
    message = trajectory_pb2.Trajectory(run_lengths=np.full(9, 2**32 - 1).tolist())
    delivery = Delivery(ID, message.SerializeToString())
    _, tokens, _ = read_claim(delivery, ServerEpochs(), largest_bytes=1 << 20)
    assert tokens == 8 << 20


@pytest.mark.parametrize(
    "text",
    ["", "g", "g.1.2", "g.1.2.xyz", "g.-1.2.f", "g.1.2.f.3", "g.1.2.f\n", ".1.2.f"],
)
def test_what_is_no_id_of_a_trajectory_has_no_name(text: str) -> None:
    assert TrajectoryName.parse(text) is None

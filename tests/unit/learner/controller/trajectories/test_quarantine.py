import numpy as np
import pytest
from slipstream.core.types import ServerId, TrajectoryId, TrajectoryName
from slipstream.learner.controller.servers.server_epochs import ServerEpochs
from slipstream.learner.controller.servers.session import ServerKey
from slipstream.learner.controller.trajectories.inspection import Claim, read_claim
from slipstream.protocol.queue.base import Delivery
from slipstream.v1 import trajectory_pb2

KEY = ServerKey(ServerId("a"), 0xF)
KNOWN = ServerEpochs()
KNOWN.join(KEY)
ID = TrajectoryId("g7.1.2.f")


def test_a_claim_is_read_as_far_as_it_goes() -> None:
    message = trajectory_pb2.Trajectory(
        server_id="b", server_epoch=3, run_lengths=[4, 5, 6, 7], will_retry=True, run_id="r"
    )
    data = message.SerializeToString()
    assert read_claim(Delivery(ID, data), KNOWN, largest_bytes=1 << 20) == Claim(
        TrajectoryName("g7", 1, 2, 0xF), KEY, 12, True
    )
    assert read_claim(
        Delivery(ID, data), ServerEpochs(), largest_bytes=1 << 20
    ).server == ServerKey(ServerId("b"), 3)
    garbage = read_claim(Delivery(ID, b"\xff"), KNOWN, largest_bytes=1 << 20)
    assert (garbage.server, garbage.tokens, garbage.will_retry) == (KEY, 0, False)
    nameless = read_claim(Delivery(TrajectoryId("what"), b"\xff"), KNOWN, largest_bytes=1 << 20)
    assert (nameless.name, nameless.server.server_id) == (None, "unknown")


def test_a_claim_of_more_tokens_than_a_trajectory_can_have_is_cut() -> None:
    message = trajectory_pb2.Trajectory(run_lengths=np.full(9, 2**32 - 1).tolist())
    assert (
        read_claim(
            Delivery(ID, message.SerializeToString()), ServerEpochs(), largest_bytes=1 << 20
        ).tokens
        == 8 << 20
    )


@pytest.mark.parametrize(
    "text", ["", "g", "g.1.2", "g.1.2.xyz", "g.-1.2.f", "g.1.2.f.3", "g.1.2.f\n", ".1.2.f"]
)
def test_what_is_no_id_of_a_trajectory_has_no_name(text: str) -> None:
    assert TrajectoryName.parse(text) is None

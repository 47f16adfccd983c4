import pytest
from slipstream.core.errors import ProtocolError
from slipstream.learner.trainer.batches.batch import Batch, read_order
from slipstream.protocol.codec import trajectory_to_pb
from slipstream.v1 import trainer_pb2 as pb
from support.fakes.fake_controller import (
    batch_order,
    make_batch,
    publish_order,
    stop_order,
)


def nothing(_: Batch) -> frozenset[int]:
    return frozenset()


BATCH = make_batch(3, num_groups=2, group_size=4, vocab_size=9, max_tokens=12)


def test_batch_arrives_as_it_was_sent() -> None:
    order = read_order(batch_order(BATCH, chunk_size=3), nothing)
    assert isinstance(order, type(BATCH))
    assert (order.step, order.batch_id) == (3, "batch-3")
    assert [trajectory_to_pb(t) for t in order.trajectories] == [
        trajectory_to_pb(t) for t in BATCH.trajectories
    ]


def test_other_orders_are_one_message() -> None:
    assert read_order(stop_order("done"), nothing) == pb.StopOrder(reason="done")
    without_model = pb.StopOrder(reason="bad", without_model=True)
    assert read_order(stop_order("bad", without_model=True), nothing) == without_model
    assert read_order([pb.Directive(wait=pb.WaitOrder())], nothing) == pb.WaitOrder()
    publish = publish_order(1, new_communicator=True, verify=False)
    assert read_order(publish, nothing) == publish[0].publish


def test_batch_with_a_chunk_missing_is_refused() -> None:
    with pytest.raises(
        ProtocolError, match="2 groups of 8 trajectories were announced"
    ):
        read_order(batch_order(BATCH, chunk_size=3)[:-1], nothing)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [pb.Directive()],
        batch_order(BATCH)[1:],
        [*batch_order(BATCH), *stop_order()],
    ],
)
def test_answer_that_does_not_fit_together_is_refused(
    messages: list[pb.Directive],
) -> None:
    with pytest.raises(ProtocolError):
        read_order(messages, nothing)

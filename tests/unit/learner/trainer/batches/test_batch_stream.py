"""What a rank keeps of a batch that comes in messages, and which messages do not fit together."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from slipstream.core.errors import ProtocolError
from slipstream.core.types import RoutedExperts
from slipstream.learner.trainer.batches.batch import (
    Batch,
    on_every_rank,
    read_order,
    read_stored,
)
from slipstream.protocol.codec import trajectory_to_pb
from slipstream.v1 import trainer_pb2 as pb
from support.fakes.fake_controller import batch_order, make_batch

LAYERS = 3
TOP_K = 2
EXPERTS = 8


def with_experts(step: int = 3) -> Batch:
    draw = np.random.default_rng(step)
    plain = make_batch(
        step,
        num_groups=2,
        group_size=3,
        vocab_size=9,
        max_tokens=12,
    )
    trajectories = []
    for trajectory in plain.trajectories:
        shape = (len(trajectory.token_ids), LAYERS, TOP_K)
        expert_ids = draw.integers(EXPERTS, size=shape, dtype=np.uint8)
        experts = RoutedExperts(expert_ids, EXPERTS)
        trajectories.append(dataclasses.replace(trajectory, routed_experts=experts))
    return dataclasses.replace(plain, trajectories=tuple(trajectories))


BATCH = with_experts()
PLAIN = make_batch(
    3,
    num_groups=1,
    group_size=2,
    vocab_size=9,
    max_tokens=9,
)


def of_second_and_fifth(batch: Batch) -> frozenset[int]:
    assert len(batch.lengths) == 6
    return frozenset({1, 4})


def stored(batch: Batch) -> pb.RecordedBatch:
    messages = [trajectory_to_pb(trajectory) for trajectory in batch.trajectories]
    header = batch_order(batch)[0].batch
    return pb.RecordedBatch(header=header, trajectories=messages)


def from_wire(batch: Batch) -> Batch:
    order = read_order(batch_order(batch, chunk_size=4), of_second_and_fifth)
    assert isinstance(order, Batch)
    return order


def from_file(batch: Batch) -> Batch:
    return read_stored(stored(batch), of_second_and_fifth)


SOURCES = pytest.mark.parametrize("read", [from_wire, from_file])


@SOURCES
def test_a_rank_keeps_the_experts_of_what_it_trains_and_all_else_of_every_trajectory(
    read,
):
    batch = read(BATCH)
    assert batch.recorded_here == {1, 4}
    pairs = zip(batch.trajectories, BATCH.trajectories, strict=True)
    for place, (received, sent) in enumerate(pairs):
        experts = received.routed_experts
        assert experts is not None
        expected_ids = sent.routed_experts.expert_ids
        assert experts.expert_ids.shape == expected_ids.shape
        if place in (1, 4):
            assert np.array_equal(experts.expert_ids, expected_ids)
        else:
            # Only the shape is there, in one byte.
            assert experts.expert_ids.strides == (0, 0, 0)
            assert not experts.is_recorded.any()
        without = dataclasses.replace(received, routed_experts=None)
        expected = dataclasses.replace(sent, routed_experts=None)
        assert trajectory_to_pb(without) == trajectory_to_pb(expected)


@SOURCES
def test_a_batch_without_experts_asks_for_no_share(read):
    batch = read(PLAIN)
    assert batch.recorded_here is None
    assert all(trajectory.routed_experts is None for trajectory in batch.trajectories)


def test_recorded_tokens_are_counted_where_their_experts_are():
    lengths = BATCH.lengths
    num_tokens = sum(lengths) - len(lengths)
    assert BATCH.recorded_tokens() == (num_tokens, num_tokens)
    num_tokens = lengths[1] + lengths[4] - 2
    assert from_wire(BATCH).recorded_tokens() == (num_tokens, num_tokens)


def order_of(batch: Batch) -> list[pb.Directive]:
    """The header, all trajectories and all experts, in a message each."""
    return batch_order(batch, chunk_size=6)


def with_first_experts_of(trajectory: int) -> list[pb.Directive]:
    messages = order_of(BATCH)
    messages[-1].chunk.experts[0].trajectory = trajectory
    return messages


@pytest.mark.parametrize(
    ("messages", "cause"),
    [
        (order_of(BATCH)[:-1], "the experts of 6 trajectories did not come"),
        (
            with_first_experts_of(6),
            "experts of trajectory 6 came twice, or unannounced",
        ),
        (
            with_first_experts_of(2),
            "experts of trajectory 2 came twice, or unannounced",
        ),
        (with_first_experts_of(1), "the checksum|must have"),
        ([*order_of(BATCH), order_of(BATCH)[1]], "trajectories came behind experts"),
        (
            [*order_of(PLAIN), order_of(BATCH)[-1]],
            "experts came that no trajectory has announced",
        ),
    ],
)
def test_experts_that_do_not_fit_their_trajectories_are_refused(messages, cause):
    with pytest.raises(ProtocolError, match=f"batch batch-3: .*({cause})"):
        read_order(messages, of_second_and_fifth)


@pytest.mark.parametrize("fault", ["checksum", "bytes"])
def test_damaged_experts_are_refused_by_who_keeps_them(fault):
    messages = order_of(BATCH)
    experts = messages[-1].chunk.experts[1]
    if fault == "checksum":
        experts.checksum += 1
    else:
        experts.expert_ids = experts.expert_ids[:-1]
    with pytest.raises(ProtocolError, match="the checksum of the experts is wrong"):
        read_order(messages, of_second_and_fifth)


class Wire:
    """Rank 0 and another one, of which each broadcast of the first reaches the second."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def first(self, data: bytes | None) -> bytes:
        assert data is not None
        self.sent.append(data)
        return data

    def second(self, data: bytes | None) -> bytes:
        assert data is None
        return self.sent.pop(0)


def test_every_rank_gets_one_message_at_a_time_and_the_end():
    wire = Wire()
    messages = batch_order(BATCH, chunk_size=2)
    sizes = [message.ByteSize() for message in messages]
    first = SimpleNamespace(world_size=2, broadcast_bytes=wire.first)
    assert list(on_every_rank(messages, first)) == messages
    assert [len(data) for data in wire.sent] == [*sizes, 0]
    second = SimpleNamespace(world_size=2, broadcast_bytes=wire.second)
    assert list(on_every_rank(None, second)) == messages
    assert wire.sent == []


def test_a_single_order_is_one_broadcast():
    wire = Wire()
    ranks = SimpleNamespace(world_size=2, broadcast_bytes=wire.first)
    order = [pb.Directive(wait=pb.WaitOrder())]
    assert (
        read_order(on_every_rank(order, ranks), of_second_and_fifth) == pb.WaitOrder()
    )
    assert len(wire.sent) == 1


def test_a_finished_batch_keeps_no_experts_for_its_probe():
    batch = from_wire(BATCH).without_experts()
    assert all(trajectory.routed_experts is None for trajectory in batch.trajectories)
    assert batch.lengths == BATCH.lengths

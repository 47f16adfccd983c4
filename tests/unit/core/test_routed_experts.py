import dataclasses
import hashlib

import numpy as np
import pytest
from slipstream.core.errors import ProtocolError
from slipstream.core.models.model_sizes import ModelSizes
from slipstream.core.types import RoutedExperts, Trajectory, expert_dtype
from slipstream.protocol.codec import (
    decode_trajectory,
    encode_trajectory,
    experts_from_pb,
    trajectory_from_pb,
    trajectory_to_pb,
)
from slipstream.v1 import trajectory_pb2 as pb
from support.fakes.fake_trajectories import make_trajectory


def with_experts(ids: np.ndarray, num_experts: int) -> Trajectory:
    trajectory = make_trajectory(2, 2)
    return dataclasses.replace(
        trajectory, routed_experts=RoutedExperts(ids, num_experts)
    )


def test_ids_travel_as_one_byte_with_up_to_255_experts_and_as_two_beyond() -> None:
    ids = np.arange(4).reshape(4, 1, 1)
    small = trajectory_to_pb(with_experts(ids.astype(np.uint8), 255)).routed_experts
    large = trajectory_to_pb(with_experts(ids.astype(np.uint16), 256)).routed_experts
    assert small.expert_ids == b"\0\1\2\3"
    assert large.expert_ids == b"\0\0\1\0\2\0\3\0"
    assert (large.num_layers, large.top_k, large.num_experts) == (1, 1, 256)
    assert expert_dtype(255) == np.uint8
    assert expert_dtype(256) == np.uint16


def test_a_token_costs_what_the_budget_of_the_queue_counts() -> None:
    plain = make_trajectory(512, 512)
    for num_experts, per_token in ((128, 48 * 8), (512, 48 * 8 * 2)):
        ids = np.zeros((1024, 48, 8), expert_dtype(num_experts))
        routed = dataclasses.replace(
            plain, routed_experts=RoutedExperts(ids, num_experts)
        )
        more = len(encode_trajectory(routed)) - len(encode_trajectory(plain))
        fields = {
            "num_hidden_layers": 48,
            "num_experts_per_tok": 8,
            "num_experts": num_experts,
        }
        assert ModelSizes.of(fields).routing_bytes_per_token == per_token
        assert 1024 * per_token <= more <= 1024 * per_token + 32


def test_nothing_of_it_is_on_the_wire_when_nobody_asked() -> None:
    data = encode_trajectory(make_trajectory(2, 2))
    # The digest of the same trajectory, encoded before there was such a field.
    assert hashlib.blake2b(data, digest_size=8).hexdigest() == "51e2d466decd0639"
    assert decode_trajectory(data).routed_experts is None


def test_every_flipped_bit_of_an_expert_is_noticed() -> None:
    ids = np.arange(8, dtype=np.uint8).reshape(4, 1, 2)
    message = trajectory_to_pb(with_experts(ids, 200))
    expert_ids = message.routed_experts.expert_ids
    for bit in range(8 * len(expert_ids)):
        damaged = bytearray(expert_ids)
        damaged[bit // 8] ^= 1 << bit % 8
        message.routed_experts.expert_ids = bytes(damaged)
        with pytest.raises(ProtocolError, match="checksum"):
            trajectory_from_pb(message)


def test_parts_are_put_together_and_what_is_missing_is_marked() -> None:
    first = np.array([[[0, 1]], [[2, 3]]], dtype=np.uint8)
    second = np.array([[[3, 1]]], dtype=np.uint8)
    for num_experts, missing in ((4, 255), (256, 65535)):
        routed = RoutedExperts.of_parts([first, second], num_experts, num_tokens=5)
        assert routed.expert_ids.dtype == expert_dtype(num_experts)
        assert routed.expert_ids.tolist() == [
            [[0, 1]],
            [[2, 3]],
            [[3, 1]],
            [[missing, missing]],
            [[missing, missing]],
        ]
        assert routed.is_recorded.tolist() == [True, True, True, False, False]


def test_a_token_without_one_of_its_experts_is_not_recorded() -> None:
    ids = np.zeros((3, 2, 2), np.uint8)
    ids[1, 1, 0] = 255
    assert RoutedExperts(ids, 4).is_recorded.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({}, None),
        (
            {"num_tokens": 3},
            "experts of 3 tokens, 1 layers, 2 of 4 each, must have 6 bytes, got 8",
        ),
        ({"num_layers": 2}, "must have 16 bytes, got 8"),
        ({"num_experts": 300}, "must have 16 bytes, got 8"),
        ({"num_experts": 3}, "expert 3 of 3 experts"),
        ({"top_k": 0, "num_layers": 0}, "0 layers, 0 of 4 each"),
        ({"top_k": 8, "num_tokens": 1, "num_layers": 1}, "8 of 4 each"),
        ({"num_experts": 65536}, "experts must be at most 65535, got 65536"),
    ],
)
def test_experts_of_another_size_are_refused(
    changes: dict[str, int], cause: str | None
) -> None:
    sizes = {"num_tokens": 4, "num_layers": 1, "top_k": 2, "num_experts": 4} | changes
    token_ids = bytes(4 * sizes.pop("num_tokens"))
    experts = {"expert_ids": bytes([0, 1, 2, 3, 3, 0, 255, 255]), **sizes}
    message = pb.Trajectory(token_ids=token_ids, routed_experts=experts)
    if cause is None:
        assert experts_from_pb(message).expert_ids[0].tolist() == [[0, 1]]
        return
    with pytest.raises(ProtocolError, match=cause):
        experts_from_pb(message)

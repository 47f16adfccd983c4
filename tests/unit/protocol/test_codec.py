import dataclasses
import zlib
from collections.abc import Iterator
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from slipstream.core.errors import ProtocolError
from slipstream.core.settings.tables import BYTES_PER_TOKEN, TRAJECTORY_OVERHEAD_BYTES
from slipstream.core.staleness import max_text_bytes
from slipstream.core.types import (
    SAMPLED_ARRAYS,
    Branch,
    PolicyVersion,
    ReferenceLogprobs,
    RoutedExperts,
    Status,
    TokenSequence,
    Trajectory,
    VersionSpan,
)
from slipstream.protocol.codec import (
    MAX_TRAJECTORY_BYTES,
    decode_trajectory,
    encode_trajectory,
    merge_spans,
    pack_tokens,
    trajectory_from_pb,
    trajectory_to_pb,
    unpack_logprobs,
    unpack_tokens,
)
from slipstream.v1 import trajectory_pb2 as pb
from support.fakes.fake_trajectories import make_trajectory, trajectories
from support.rigs.fuzz_budget import times


def plain(value: object) -> object:
    """`value` with each array as its type, shape and bytes."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, Trajectory | RoutedExperts | ReferenceLogprobs):
        return {
            field.name: plain(getattr(value, field.name)) for field in fields(value)
        }
    return value


@given(trajectories())
@settings(max_examples=times(300))
def test_a_trajectory_comes_back_as_it_was_sent(trajectory: Trajectory) -> None:
    assert plain(decode_trajectory(encode_trajectory(trajectory))) == plain(trajectory)


def drawn_values(thing: object, place: str = "") -> Iterator[tuple[str, object]]:
    """The fields of a trajectory and of the records in it, by their places."""
    for field in fields(thing):
        value = getattr(thing, field.name)
        yield f"{place}{field.name}", repr(plain(value))
        for part in value if isinstance(value, tuple) else [value]:
            if dataclasses.is_dataclass(part):
                yield from drawn_values(part, f"{place}{field.name}.")


def test_the_round_trip_draws_several_values_of_every_field() -> None:
    values: dict[str, set[object]] = {}

    @given(trajectories())
    @settings(max_examples=1000, database=None)
    def draw(trajectory: Trajectory) -> None:
        for place, value in drawn_values(trajectory):
            values.setdefault(place, set()).add(value)

    draw()
    assert values.keys() > {"branches.reward", "reference.logprobs", "failure.message"}
    constant = [place for place, drawn in values.items() if len(drawn) < 2]
    assert not constant


def test_nobody_can_leave_out_a_field_of_a_trajectory_but_optional_values_of_tokens() -> (
    None
):
    left_out = {
        field.name
        for field in fields(Trajectory)
        if field.default is not dataclasses.MISSING
        or field.default_factory is not dataclasses.MISSING
    }
    optional = {name for name, is_required in SAMPLED_ARRAYS.items() if not is_required}
    assert left_out == optional


def test_every_flipped_bit_in_the_arrays_is_noticed() -> None:
    earned = np.array([0, 0.5, 0, 1], np.float32)
    trajectory = dataclasses.replace(
        make_trajectory(4, 4), token_rewards=earned, teacher_prompt=bytes(8)
    )
    message = trajectory_to_pb(trajectory)
    for name in ("token_ids", "behavior_logprobs", "token_rewards", "teacher_prompt"):
        full_value = getattr(message, name)
        for bit in range(8 * len(full_value)):
            damaged = bytearray(full_value)
            damaged[bit // 8] ^= 1 << bit % 8
            changed = pb.Trajectory()
            changed.CopyFrom(message)
            setattr(changed, name, bytes(damaged))
            with pytest.raises(ProtocolError, match="checksum"):
                trajectory_from_pb(changed)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"run_lengths": (3, 4)}, "runs of 7 tokens, but 8 tokens"),
        ({"run_lengths": (5, 3)}, "4 values of behavior_logprobs for 3 sampled tokens"),
        ({"version_spans": ()}, "the version spans do not cover its 4 sampled tokens"),
        (
            {"behavior_logprobs": np.array([-1, -2, -np.inf, -3], np.float32)},
            "a value of behavior_logprobs is not a finite number",
        ),
        (
            {"token_rewards": np.zeros(3, np.float32)},
            "3 values of token_rewards for 4 sampled",
        ),
        ({"prompt_logprobs": bytes(16)}, "4 values of prompt_logprobs for runs "),
        (
            {"token_rewards": np.array([0, np.nan, 0, 1], np.float32)},
            "a value of token_rewards is not a finite number",
        ),
        (
            {"branches": (Branch(1), Branch(1))},
            "must have an even number of runs, got 1",
        ),
        (
            {"branches": (Branch(2), Branch(0))},
            "must have an even number of runs, got 0",
        ),
        ({"branches": (Branch(2), Branch(2))}, "branches of 4 runs, but 2 runs"),
        (
            {"branches": (Branch(2),), "teacher_prompt": bytes(4)},
            "is of one conversation",
        ),
        (
            {"teacher_prompt": bytes(3)},
            "a teacher's prompt of 3 bytes is no list of tokens",
        ),
        (
            {
                "run_lengths": (2, 2, 2, 2),
                "branches": (Branch(2, 1.0, "a", 1.0), Branch(2, 1.0, "a", 2.0)),
            },
            "branches of one name must have one reward",
        ),
    ],
)
def test_a_trajectory_that_does_not_fit_together_is_refused_by_name(changes, cause):
    trajectory = dataclasses.replace(make_trajectory(4, 4), **changes)
    with pytest.raises(ProtocolError, match=cause) as caught:
        decode_trajectory(encode_trajectory(trajectory))
    assert str(caught.value).startswith("g000123.3.0.1234567890abcdef: ")


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 1e308, -1000001.0])
def test_a_reward_that_cannot_be_trained_is_refused(reward: float) -> None:
    data = encode_trajectory(dataclasses.replace(make_trajectory(4, 4), reward=reward))
    with pytest.raises(
        ProtocolError, match=r"^Trajectory.reward must be between -1e\+06 and 1e"
    ):
        decode_trajectory(data)


def test_a_message_with_a_reward_that_is_no_number_is_refused_whoever_read_its_bytes() -> (
    None
):
    nan = float("nan")
    for changes in ({"reward": nan}, {"branches": (Branch(2, 1.0, "a", nan),)}):
        wrong = trajectory_to_pb(dataclasses.replace(make_trajectory(4, 4), **changes))
        with pytest.raises(
            ProtocolError, match="1234567890abcdef: reward nan is not a finite num"
        ):
            trajectory_from_pb(wrong)


@pytest.mark.parametrize("share", [float("nan"), float("-inf"), 1e7])
def test_a_share_that_cannot_be_trained_is_refused(share: float) -> None:
    wrong = dataclasses.replace(make_trajectory(4, 4), branches=(Branch(2, share),))
    with pytest.raises(
        ProtocolError, match=r"branches\[0\]\.share must be between -1e\+06"
    ):
        decode_trajectory(encode_trajectory(wrong))
    with pytest.raises(ProtocolError, match="share nan is not a finite number"):
        trajectory_from_pb(
            trajectory_to_pb(
                dataclasses.replace(wrong, branches=(Branch(2, float("nan")),))
            )
        )


def test_empty_version_spans_are_refused_however_many_they_are() -> None:
    message = trajectory_to_pb(make_trajectory(4, 4))
    message.version_spans.add()
    with pytest.raises(ProtocolError, match="a version span is empty"):
        decode_trajectory(message.SerializeToString())
    message.version_spans.extend([pb.VersionSpan()] * 5000)
    with pytest.raises(
        ProtocolError, match="version_spans must have at most 4096 elements"
    ):
        decode_trajectory(message.SerializeToString())


@pytest.mark.parametrize("field", ["purpose", "status"])
def test_unknown_kinds_are_refused(field: str) -> None:
    message = trajectory_to_pb(make_trajectory(1, 1))
    setattr(message, field, 0)
    with pytest.raises(ProtocolError, match="g000123: 0 is not a valid"):
        trajectory_from_pb(message)


def test_arrays_of_broken_length_are_refused() -> None:
    with pytest.raises(
        ProtocolError, match="token ids must be a multiple of 4 bytes, got 5"
    ):
        unpack_tokens(b"12345")
    with pytest.raises(
        ProtocolError, match="log-probabilities must be a multiple of 4"
    ):
        unpack_logprobs(b"123")


def test_tokens_travel_as_four_bytes_little_endian() -> None:
    assert pack_tokens(np.array([1, 258], np.uint32)) == b"\1\0\0\0\2\1\0\0"


def test_a_trajectory_above_the_limit_is_refused_on_both_sides() -> None:
    large = dataclasses.replace(
        make_trajectory(1, 1), reply_text="x" * MAX_TRAJECTORY_BYTES
    )
    with pytest.raises(ProtocolError, match=r"has \d+ bytes, more than 33554432"):
        encode_trajectory(large)
    data = trajectory_to_pb(large).SerializeToString()
    with pytest.raises(ProtocolError, match="must have at most 33554432 bytes, got 33"):
        decode_trajectory(data)


@pytest.mark.parametrize(
    ("num_context", "num_sampled"), [(0, 512), (128, 384), (1024, 7168)]
)
def test_a_token_costs_at_most_eight_and_a_half_bytes_on_the_wire(
    num_context, num_sampled
):
    trajectory = make_trajectory(num_context, num_sampled, num_versions=3)
    request = pb.DeliverRequest(
        trajectory=encode_trajectory(trajectory), trajectory_id=trajectory.trajectory_id
    )
    assert request.ByteSize() / (num_context + num_sampled) <= 8.5


def test_neighbouring_spans_of_one_version_are_joined_and_empty_ones_left_out() -> None:
    old = PolicyVersion(0, 1)
    new = PolicyVersion(0, 2)
    spans = [(2, old), (0, new), (3, old), (1, new), (0, old), (4, new)]
    merged = merge_spans([VersionSpan(*span) for span in spans])
    assert merged == (VersionSpan(5, old), VersionSpan(5, new))


def test_a_trajectory_knows_its_identity_and_its_sampled_tokens() -> None:
    trajectory = dataclasses.replace(
        make_trajectory(2, 3),
        run_lengths=(1, 2, 1, 1),
        version_spans=(
            VersionSpan(2, PolicyVersion(0, 7)),
            VersionSpan(1, PolicyVersion(0, 6)),
        ),
    )
    assert trajectory.trajectory_id == "g000123.3.0.1234567890abcdef"
    assert trajectory.sampled_mask().tolist() == [False, True, True, False, True]
    assert trajectory.has_reward
    assert not dataclasses.replace(trajectory, status=Status.FAILED).has_reward


def test_a_trajectory_is_one_sequence_for_each_branch() -> None:
    plain = make_trajectory(4, 6)
    assert plain.sequences == (
        TokenSequence(
            Branch(2), tokens=slice(0, 10), runs=slice(0, 2), sampled=slice(0, 6)
        ),
    )
    branches = (Branch(4), Branch(2, 0.5, "reviewer"))
    tree = dataclasses.replace(plain, run_lengths=(1, 2, 1, 3, 2, 1), branches=branches)
    first, second = tree.sequences
    assert first == (branches[0], slice(0, 7), slice(0, 4), slice(0, 5))
    assert second == (branches[1], slice(7, 10), slice(4, 6), slice(5, 6))


def test_versions_are_ordered_by_incarnation_first_and_written_shortly() -> None:
    assert PolicyVersion(0, 9) < PolicyVersion(1, 2)
    assert (str(PolicyVersion(0, 9)), str(PolicyVersion(1, 2))) == ("9", "2/1")


def with_reference(logprobs, top_ids, top_logprobs) -> bytes:
    """A trajectory of two sampled tokens with these log-probabilities of a reference."""
    reference = ReferenceLogprobs(
        np.array(logprobs, np.float32),
        np.array(top_ids, np.uint32),
        np.array(top_logprobs, np.float32),
    )
    return encode_trajectory(
        dataclasses.replace(make_trajectory(1, 2), reference=reference)
    )


@pytest.mark.parametrize(
    ("top_ids", "top_logprobs", "cause"),
    [
        ([[1, 2], [3, 3]], [[-1, -1], [-1, -1]], "names a token twice"),
        ([[1, 2], [3, 4]], [[-0.5, -0.6], [-1, -1]], "add up to 1.15"),
        ([[1, 2], [3, 4]], [[-0.5, -3], [0.5, -9]], "is 0.5, above 0"),
        ([[1, 2], [3, 4]], [[-0.5, -3], [np.nan, -9]], "is nan, above 0"),
        ([[1, 2], [3, 4]], [[-0.5, -3], [-np.inf, -9]], "is not a finite number"),
        ([[1, 2]], [[-0.5, -3]], r"must have \[8, 16, 16\] bytes, got \[8, 8, 8\]"),
    ],
)
def test_log_probabilities_that_no_reference_can_give_are_refused(
    top_ids, top_logprobs, cause
):
    with pytest.raises(ProtocolError, match=cause):
        decode_trajectory(with_reference([-1, -2], top_ids, top_logprobs))


def test_changed_log_probabilities_of_a_reference_break_the_checksum() -> None:
    data = with_reference([-1, -2], [[1, 2], [3, 4]], [[-1, -2], [-2, -3]])
    message = pb.Trajectory.FromString(data)
    message.reference.top_ids = message.reference.top_ids[::-1]
    with pytest.raises(ProtocolError, match="checksum"):
        trajectory_from_pb(message)


def test_a_sampled_first_token_has_no_prediction_that_could_be_wrong() -> None:
    reference = ReferenceLogprobs(
        np.zeros(2, np.float32),
        np.array([[0, 0], [1, 2]], np.uint32),
        -np.ones((2, 2), np.float32),
    )
    first = dataclasses.replace(make_trajectory(0, 2), reference=reference)
    assert decode_trajectory(encode_trajectory(first)).reference is not None
    second = dataclasses.replace(make_trajectory(1, 2), reference=reference)
    with pytest.raises(ProtocolError, match="names a token twice"):
        decode_trajectory(encode_trajectory(second))


def test_a_reward_of_every_token_fits_what_a_lease_reserves() -> None:
    size = 4000
    trajectory = dataclasses.replace(
        make_trajectory(1, size - 1),
        token_rewards=np.full(size - 1, -0.1, np.float32),
        prompt_text="p" * max_text_bytes(size),
        reply_text="r" * max_text_bytes(size),
    )
    assert (
        len(encode_trajectory(trajectory))
        <= TRAJECTORY_OVERHEAD_BYTES + BYTES_PER_TOKEN * size
    )


def test_a_message_of_before_there_were_rewards_of_tokens_is_read() -> None:
    """Field 35 is left out by older journals, and their checksums are without it."""
    trajectory = make_trajectory(4, 4)
    message = trajectory_to_pb(trajectory)
    assert 35 not in {field.number for field, _ in message.ListFields()}
    array = zlib.crc32(pack_tokens(trajectory.token_ids))
    assert message.checksum == zlib.crc32(message.behavior_logprobs, array)
    assert trajectory_from_pb(message).token_rewards is None

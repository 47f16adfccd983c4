import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream.core.errors import ConfigError
from slipstream.protocol.weights.buckets import (
    ALIGNMENT_BYTES,
    ITEM_BYTES,
    TensorSpec,
    adapter_buckets,
    layout_from_pb,
    layout_to_pb,
    num_tensors,
    plan_buckets,
    weight_buckets,
)

layouts = st.lists(
    st.builds(
        TensorSpec,
        st.text(max_size=5),
        st.sampled_from(sorted(ITEM_BYTES)),
        st.lists(st.integers(0, 20), max_size=3).map(tuple),
        st.integers(0, 2),
    ),
    max_size=30,
)


@given(layouts, st.integers(1, 2_000))
def test_every_tensor_lies_once_in_order_aligned_in_a_bucket_of_its_sender(
    tensors, bucket_bytes
):
    buckets = plan_buckets(tensors, bucket_bytes)
    assert [span.tensor for bucket in buckets for span in bucket.spans] == tensors
    for bucket in buckets:
        assert {span.tensor.sender for span in bucket.spans} == {bucket.root}
        end = 0
        for span in bucket.spans:
            assert span.offset_bytes % ALIGNMENT_BYTES == 0
            assert span.offset_bytes >= end
            end = span.offset_bytes + span.tensor.num_bytes
        assert end <= bucket.num_bytes < end + ALIGNMENT_BYTES
        assert end <= bucket_bytes or len(bucket.spans) == 1


@given(layouts, st.integers(1, 2_000))
def test_a_bucket_is_closed_only_when_the_next_tensor_does_not_fit_or_is_another_senders(
    tensors: list[TensorSpec], bucket_bytes: int
) -> None:
    buckets = plan_buckets(tensors, bucket_bytes)
    for bucket, following in zip(buckets, buckets[1:], strict=False):
        is_full = bucket.num_bytes + following.spans[0].tensor.num_bytes > bucket_bytes
        assert is_full or bucket.root != following.root


@given(layouts, st.integers(1, 2_000))
def test_both_sides_cut_the_same_buckets(
    tensors: list[TensorSpec], bucket_bytes: int
) -> None:
    message = layout_to_pb(tensors, bucket_bytes)
    received = type(message).FromString(message.SerializeToString())
    assert layout_from_pb(received) == plan_buckets(tensors, bucket_bytes)


def test_adapters_have_buckets_of_their_own_after_those_of_weights() -> None:
    weights = [TensorSpec("w", "float32", (3,))]
    adapters = [
        TensorSpec("a", "float32", (2, 1), 1),
        TensorSpec("b", "float32", (1, 2), 1),
    ]
    message = layout_to_pb(weights, 1_000, adapters=adapters, adapter_scale=1.5)
    received = type(message).FromString(message.SerializeToString())
    first, second = layout_from_pb(received)
    assert [span.tensor.name for span in first.spans] == ["w"]
    assert [span.tensor.name for span in second.spans] == ["a", "b"]
    assert (first.root, second.root) == (0, 1)
    assert weight_buckets(received) == [first]
    assert adapter_buckets(received) == [second]
    assert received.adapter_scale == 1.5
    alone = layout_to_pb((), 1_000, adapters=adapters)
    assert layout_from_pb(alone) == [second]


def test_each_named_adapter_has_the_same_buckets() -> None:
    weights = [TensorSpec("w", "float32", (3,))]
    adapters = [TensorSpec("a", "float32", (4,)), TensorSpec("b", "float32", (4,))]
    message = layout_to_pb(
        weights, 16, adapters=adapters, adapter_names=["code", "math", "prose"]
    )
    first, *later = layout_from_pb(message)
    assert [span.tensor.name for span in first.spans] == ["w"]
    assert [bucket.spans[0].tensor.name for bucket in later] == ["a", "b"] * 3
    assert num_tensors(message) == 7
    assert num_tensors(layout_to_pb(weights, 16, adapters=adapters)) == 3


def test_little_is_left_for_the_last_bucket() -> None:
    # In MiB; the first bucket is full, each part ends with a whole tensor.
    sizes = [300, 300, 200, 160, 40, 60, 20, 20, 20, 15]
    tensors = [
        TensorSpec(f"w{n}", "float32", (size << 18,)) for n, size in enumerate(sizes)
    ]
    buckets = plan_buckets(tensors, 600 << 20)
    # Three quarters of 535 are 401; at least 64 of the 135 that are left then come last.
    assert [[span.tensor.name for span in b.spans] for b in buckets] == [
        ["w0", "w1"],
        ["w2", "w3", "w4"],
        ["w5"],
        ["w6", "w7", "w8", "w9"],
    ]
    assert [bucket.num_bytes >> 20 for bucket in buckets] == [600, 400, 60, 75]
    assert [span.offset_bytes >> 20 for span in buckets[-1].spans] == [0, 20, 40, 60]
    # 128 are not cut, nor is one tensor.
    assert len(plan_buckets([tensors[4], tensors[5], tensors[6]], 400 << 20)) == 1
    assert len(plan_buckets(tensors[:1], 400 << 20)) == 1


def test_a_bucket_without_room_and_an_unknown_type_are_refused() -> None:
    with pytest.raises(ConfigError, match="bucket_bytes must be at least 1, got 0"):
        plan_buckets([], 0)
    with pytest.raises(
        ConfigError, match="tensor a has element type int8, known are float32"
    ):
        plan_buckets([TensorSpec("a", "int8", (1,))], 10)

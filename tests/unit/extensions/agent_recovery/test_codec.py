"""A record and its message."""

import dataclasses
import zlib

import numpy as np
import pytest
from slipstream.core.errors import ProtocolError
from slipstream.core.kept_tokens import KeptTokens
from slipstream.core.types import PolicyVersion, VersionSpan
from slipstream.extensions.agent_recovery import call_codec
from slipstream.extensions.agent_recovery.call_codec import record_from_pb, record_to_pb
from slipstream.protocol.bounds import decode
from slipstream.rollout_server.agents.call_records import CallRecord
from slipstream.rollout_server.engine_interface import FinishReason, Generation
from slipstream.v1 import calls_pb2 as pb

# Fields of a generation that no later attempt needs.
NOT_KEPT = {"cached_tokens", "prompt_logprobs"}


def full(dtype: type = np.uint8) -> CallRecord:
    """A record in which each kept field has another value than an empty one."""
    return CallRecord(
        request_digest=b"r" * 32,
        prompt_digest=b"p" * 32,
        generation=Generation(
            np.array(
                [3, 70000, 5],
                dtype=np.uint32,
            ),
            np.array(
                [-0.5, -1.25, -3e-4],
                dtype=np.float32,
            ),
            (
                VersionSpan(
                    1,
                    PolicyVersion(1, 4),
                ),
                VersionSpan(2, PolicyVersion(1, 5)),
            ),
            FinishReason.LENGTH,
            expert_ids=np.arange(24, dtype=dtype).reshape(
                4,
                3,
                2,
            ),
            stop_text="\u00e9nd",
            kept_tokens=KeptTokens.of_sets(
                [
                    [3, 4],
                    [],
                    [5],
                ]
            ),
        ),
        experts_from=6,
        is_cut=True,
        reply={
            "role": "assistant",
            "content": "\u00e9",
            "tool_calls": [{"id": "c1"}],
        },
        status=200,
        headers=(("content-type", "text/event-stream"), ("x-a", "b")),
        body=b"data: {}\n\n" * 1000,
    )


def plain(value: object) -> object:
    if isinstance(value, KeptTokens):
        return value.packed()
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tolist()
    if dataclasses.is_dataclass(value):
        fields = {
            field.name: getattr(
                value,
                field.name,
            )
            for field in dataclasses.fields(value)
        }
        return {
            name: plain(part) for name, part in fields.items() if name not in NOT_KEPT
        }
    return value


@pytest.mark.parametrize(
    "dtype",
    [np.uint8, np.uint16],
)
def test_every_field_comes_back(dtype: type) -> None:
    record = full(dtype)
    assert all(
        plain(
            getattr(
                record,
                field.name,
            )
        )
        for field in dataclasses.fields(record)
    )
    message = decode(
        pb.CallRecord,
        record_to_pb(record).SerializeToString(),
    )
    assert plain(record_from_pb(message)) == plain(record)
    assert len(message.compressed_body) < len(record.body) / 10


def test_a_record_of_a_plain_engine_comes_back_without_experts_and_kept_tokens() -> (
    None
):
    record = full()
    generation = dataclasses.replace(
        record.generation,
        expert_ids=None,
        kept_tokens=None,
    )
    record = dataclasses.replace(record, generation=generation)
    back = record_from_pb(record_to_pb(record)).generation
    assert (back.expert_ids, back.kept_tokens) == (None, None)


def test_parts_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {
        "behavior_logprobs": b"\0" * 8,
        "finish_reason": "tired",
        "reply_json": "{",
        "compressed_body": b"no",
    }
    for name, value in changes.items():
        message = record_to_pb(full())
        setattr(message, name, value)
        with pytest.raises(ProtocolError):
            record_from_pb(message)
    message = record_to_pb(full())
    message.version_spans[0].length = 2
    with pytest.raises(
        ProtocolError, match="3 tokens has 3 log-probabilities and spans of 4"
    ):
        record_from_pb(message)
    message = record_to_pb(full())
    message.routed_experts.top_k = 5
    with pytest.raises(ProtocolError, match="no rows of 15"):
        record_from_pb(message)
    monkeypatch.setattr(call_codec, "MAX_BODY_BYTES", 99)
    message = record_to_pb(full())
    message.compressed_body = zlib.compress(b"x" * 100)
    with pytest.raises(ProtocolError, match="longer than 99 bytes"):
        record_from_pb(message)

"""Conversion between a `CallRecord` and its message."""

import json
import zlib
from typing import Any

import numpy as np
from slipstream.core.errors import ProtocolError
from slipstream.core.kept_tokens import KeptTokens
from slipstream.core.types import ExpertArray, VersionSpan
from slipstream.protocol.codec import (
    pack_logprobs,
    unpack_logprobs,
    unpack_tokens,
    version_from_pb,
    version_to_pb,
)
from slipstream.rollout_server.agents.call_records import CallRecord
from slipstream.rollout_server.engine_interface import FinishReason, Generation
from slipstream.v1 import calls_pb2 as pb
from slipstream.v1 import environment_pb2, trajectory_pb2

# An answer has many short events of one form, which the fastest level shrinks enough.
_LEVEL = 1
# Most bytes of an answer's body: a few for each byte of the largest message of tokens.
MAX_BODY_BYTES = 1 << 28


def record_to_pb(record: CallRecord) -> pb.CallRecord:
    """Returns the message of a record."""
    generation = record.generation
    message = pb.CallRecord(
        request_digest=record.request_digest,
        prompt_digest=record.prompt_digest,
        token_ids=generation.token_ids.astype("<u4").tobytes(),
        behavior_logprobs=pack_logprobs(generation.logprobs),
        version_spans=[
            trajectory_pb2.VersionSpan(length=span.length, version=version_to_pb(span.version))
            for span in generation.version_spans
        ],
        finish_reason=generation.finish_reason.value,
        stop_text=generation.stop_text,
        is_cut=record.is_cut,
        experts_from=record.experts_from,
        reply_json=json.dumps(record.reply),
        status=record.status,
        headers=[
            environment_pb2.HttpHeader(name=name, value=value) for name, value in record.headers
        ],
        compressed_body=zlib.compress(record.body, _LEVEL),
    )
    if generation.kept_tokens is not None:
        message.kept_tokens = generation.kept_tokens.packed()
    expert_ids = generation.expert_ids
    if expert_ids is not None:
        _, num_layers, top_k = expert_ids.shape
        message.routed_experts.expert_ids = expert_ids.tobytes()
        message.routed_experts.num_layers = num_layers
        message.routed_experts.top_k = top_k
        message.routed_experts.num_experts = np.iinfo(expert_ids.dtype).max
    return message


def record_from_pb(message: pb.CallRecord) -> CallRecord:
    """Returns the record in a message. Raises ProtocolError if its parts do not fit."""
    token_ids = unpack_tokens(message.token_ids)
    logprobs = unpack_logprobs(message.behavior_logprobs)
    spans = tuple(
        VersionSpan(span.length, version_from_pb(span.version)) for span in message.version_spans
    )
    num_tokens = len(token_ids)
    if len(logprobs) != num_tokens or sum(span.length for span in spans) != num_tokens:
        raise ProtocolError(
            f"a call of {num_tokens} tokens has {len(logprobs)} log-probabilities and spans of "
            f"{sum(span.length for span in spans)} tokens"
        )
    expert_ids: ExpertArray | None = None
    if message.HasField("routed_experts"):
        experts = message.routed_experts
        is_small = experts.num_experts <= np.iinfo(np.uint8).max
        flat: Any = np.frombuffer(experts.expert_ids, dtype=np.uint8 if is_small else np.uint16)
        width = experts.num_layers * experts.top_k
        if not width or len(flat) % width:
            raise ProtocolError(f"{len(flat)} ids of experts are no rows of {width}")
        expert_ids = flat.reshape(-1, experts.num_layers, experts.top_k)
    kept_tokens = None
    if message.kept_tokens:
        kept_tokens = KeptTokens.unpacked(message.kept_tokens, num_tokens)
    try:
        finish_reason = FinishReason(message.finish_reason)
        reply = json.loads(message.reply_json)
        body = _inflated(message.compressed_body)
    except (ValueError, zlib.error) as error:
        raise ProtocolError(f"a call cannot be read: {error}") from error
    return CallRecord(
        request_digest=message.request_digest,
        prompt_digest=message.prompt_digest,
        generation=Generation(
            token_ids,
            logprobs,
            spans,
            finish_reason,
            expert_ids=expert_ids,
            stop_text=message.stop_text,
            kept_tokens=kept_tokens,
        ),
        experts_from=message.experts_from,
        is_cut=message.is_cut,
        reply=reply,
        status=message.status,
        headers=tuple((header.name, header.value) for header in message.headers),
        body=body,
    )


def _inflated(data: bytes) -> bytes:
    """Returns the bytes that `data` has compressed. Raises ValueError if they are too many."""
    inflater = zlib.decompressobj()
    body = inflater.decompress(data, MAX_BODY_BYTES)
    if not inflater.eof:
        raise ValueError(f"its answer is cut off, or longer than {MAX_BODY_BYTES} bytes")
    return body

"""Conversion between `Trajectory` and its wire form.

Arrays travel as packed little-endian bytes: four for a context token, eight for a sampled token (id
and log-probability). If experts are recorded, the ids of each token's experts are added.
"""

import functools
import hashlib
import itertools
import math
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from slipstream.core.errors import ProtocolError
from slipstream.core.kept_tokens import KeptTokens
from slipstream.core.types import (
    SAMPLED_ARRAYS,
    Branch,
    ExpertArray,
    Failure,
    FailureKind,
    ImagePlace,
    LogprobArray,
    PolicyVersion,
    Purpose,
    ReferenceLogprobs,
    RoutedExperts,
    Status,
    TokenArray,
    Trajectory,
    VersionSpan,
    check_reference,
    expert_dtype,
)
from slipstream.protocol.bounds import decode, max_message_bytes
from slipstream.v1 import trainer_pb2
from slipstream.v1 import trajectory_pb2 as pb

MAX_TRAJECTORY_BYTES = max_message_bytes(pb.Trajectory)
# Metadata of the trainer's calls; see trainer.proto.
TRAINER_EPOCH = "slipstream-trainer-epoch"
# Controllers that do not know `RELEASE_KEY` compare it in the hello of a server.
PROTOCOL_VERSION = 15
_TOKENS = np.dtype("<u4")
_LOGPROBS = np.dtype("<f4")
_MAX_LAYERS = 65535
_OTHER_FIELDS = {"token_ids", "checksum", *SAMPLED_ARRAYS}
# Fields that have the same name and value in both forms, and whether they hold several values.
_PLAIN = {
    field.name: field.is_repeated
    for field in pb.Trajectory.DESCRIPTOR.fields
    if field.message_type is None and field.enum_type is None and field.name not in _OTHER_FIELDS
}
# To look a member up by its value takes longer than to decode a small message.
_PURPOSES = functools.cache(Purpose)
_STATUSES = functools.cache(Status)


def _faults(trajectory: Trajectory) -> Iterator[str]:
    """Yields the parts of a trajectory that do not match, and the numbers that are not finite."""
    yield from _token_faults(trajectory)
    yield from _branch_faults(trajectory)
    if trajectory.reference is not None:
        fault = check_reference(trajectory.reference, trajectory.unpredicted())
        if fault:
            yield fault
    yield from _image_faults(trajectory)
    yield from _prompt_faults(trajectory)
    if trajectory.kept_tokens and sum(trajectory.run_lengths) == len(trajectory.token_ids):
        kept_tokens = KeptTokens.unpacked(trajectory.kept_tokens, trajectory.num_sampled_tokens)
        is_kept = kept_tokens.has(trajectory.token_ids[trajectory.sampled_mask()])
        if not is_kept.all():
            yield f"its kept tokens lack sampled token {int(np.argmin(is_kept))}"


def _token_faults(trajectory: Trajectory) -> Iterator[str]:
    """Yields what is wrong with the runs of tokens, the values of sampled ones and the reward."""
    sampled = trajectory.num_sampled_tokens
    runs = trajectory.run_lengths
    num_tokens = len(trajectory.token_ids)
    if sum(runs) != num_tokens:
        yield f"runs of {sum(runs)} tokens, but {num_tokens} tokens"
    arrays = {
        field: array
        for field in SAMPLED_ARRAYS
        if (array := getattr(trajectory, field)) is not None
    }
    for field, array in arrays.items():
        if len(array) != sampled:
            yield f"{len(array)} values of {field} for {sampled} sampled tokens"
    if any(span.length == 0 for span in trajectory.version_spans):
        yield "a version span is empty"
    if sum(span.length for span in trajectory.version_spans) != sampled:
        yield f"the version spans do not cover its {sampled} sampled tokens"
    if not math.isfinite(trajectory.reward):
        yield f"reward {trajectory.reward} is not a finite number"
    for field, array in arrays.items():
        if not np.logical_and.reduce(np.isfinite(array)):
            yield f"a value of {field} is not a finite number"


def _branch_faults(trajectory: Trajectory) -> Iterator[str]:
    """Yields what is wrong with the runs, shares and rewards of the branches."""
    runs_by_branch = [branch.num_runs for branch in trajectory.branches]
    for num_runs in runs_by_branch:
        if num_runs == 0 or num_runs % 2:
            yield f"a branch must have an even number of runs, got {num_runs}"
    if runs_by_branch and sum(runs_by_branch) != len(trajectory.run_lengths):
        yield f"branches of {sum(runs_by_branch)} runs, but {len(trajectory.run_lengths)} runs"
    rewards = {branch.name: branch.reward for branch in trajectory.branches}
    for branch in trajectory.branches:
        if not math.isfinite(branch.share):
            yield f"share {branch.share} is not a finite number"
        if branch.reward is not None and not math.isfinite(branch.reward):
            yield f"reward {branch.reward} is not a finite number"
        if branch.reward != rewards[branch.name]:
            yield "branches of one name must have one reward"


def _image_faults(trajectory: Trajectory) -> Iterator[str]:
    """Yields what is wrong with the places of images among the tokens."""
    if any(place.image >= len(trajectory.images) for place in trajectory.image_places):
        yield f"a place names an image beyond its {len(trajectory.images)}"
    offsets = [*(place.offset for place in trajectory.image_places), len(trajectory.token_ids)]
    if any(offset >= end for offset, end in itertools.pairwise(offsets)):
        yield "the places of images are not in the order of its tokens"


def _prompt_faults(trajectory: Trajectory) -> Iterator[str]:
    """Yields what is wrong with the scores of the prompt, and with the prompt of a teacher."""
    runs = trajectory.run_lengths
    scored = len(unpack_logprobs(trajectory.prompt_logprobs))
    if scored and runs[:1] != (scored + 1,):
        yield f"{scored} values of prompt_logprobs for runs {runs[:1]}"
    if len(trajectory.teacher_prompt) % 4:
        yield f"a teacher's prompt of {len(trajectory.teacher_prompt)} bytes is no list of tokens"
    if trajectory.teacher_prompt and trajectory.branches:
        yield "a teacher's prompt is of one conversation, and it has branches"


def version_to_pb(version: PolicyVersion) -> pb.PolicyVersion:
    """Returns the wire form of a policy version."""
    return pb.PolicyVersion(incarnation=version.incarnation, step=version.step)


def version_from_pb(message: pb.PolicyVersion) -> PolicyVersion:
    """Returns the policy version that `message` encodes."""
    return PolicyVersion(message.incarnation, message.step)


def pack_tokens(token_ids: TokenArray) -> bytes:
    """Returns the token ids as bytes: four bytes each, little endian."""
    return np.ascontiguousarray(token_ids, dtype="<u4").tobytes()


def unpack_tokens(data: bytes) -> TokenArray:
    """Reverses `pack_tokens`. Raises ProtocolError when the length is no multiple of four."""
    return _unpacked(data, _TOKENS, "token ids").astype(np.uint32, copy=False)


def pack_logprobs(logprobs: LogprobArray) -> bytes:
    """Returns the log-probabilities as bytes: float32, little endian."""
    return np.ascontiguousarray(logprobs, dtype="<f4").tobytes()


def unpack_logprobs(data: bytes) -> LogprobArray:
    """Reverses `pack_logprobs`. Raises ProtocolError when the length is no multiple of four."""
    return _unpacked(data, _LOGPROBS, "log-probabilities").astype(np.float32, copy=False)


def _unpacked(data: bytes, kind: np.dtype[Any], what: str) -> np.ndarray[Any, Any]:
    if len(data) % 4:
        raise ProtocolError(f"{what} must be a multiple of 4 bytes, got {len(data)}")
    return np.frombuffer(data, dtype=kind)


def experts_to_pb(experts: RoutedExperts, place: int) -> trainer_pb2.RecordedExperts:
    """Returns the wire form of the experts of the trajectory that is at `place` in its batch."""
    data = _pack_experts(experts)
    return trainer_pb2.RecordedExperts(trajectory=place, expert_ids=data, checksum=zlib.crc32(data))


def _pack_experts(experts: RoutedExperts) -> bytes:
    ids = experts.expert_ids
    return ids.astype(ids.dtype.newbyteorder("<"), copy=False).tobytes()


def trajectory_to_pb(trajectory: Trajectory, *, with_experts: bool = True) -> pb.Trajectory:
    """Returns the wire form of a trajectory; without its experts' ids, only their shape is there.

    `experts_to_pb` returns the rest. The checksum is that of the arrays in the message.
    """
    routed = reference = failure = None
    if (experts := trajectory.routed_experts) is not None:
        _, num_layers, top_k = experts.expert_ids.shape
        routed = pb.RoutedExperts(
            expert_ids=_pack_experts(experts) if with_experts else b"",
            num_layers=num_layers,
            top_k=top_k,
            num_experts=experts.num_experts,
        )
    if (scored := trajectory.reference) is not None:
        reference = pb.ReferenceLogprobs(
            logprobs=pack_logprobs(scored.logprobs),
            top_k=scored.top_k,
            top_ids=pack_tokens(scored.top_ids),
            top_logprobs=pack_logprobs(scored.top_logprobs),
        )
    if (failed := trajectory.failure) is not None:
        kind = pb.FailureKind.Name(failed.kind.value)
        failure = pb.Failure(kind=kind, message=failed.message)
    arrays = {name: getattr(trajectory, name) for name in SAMPLED_ARRAYS}
    sampled: dict[str, Any] = {
        name: pack_logprobs(array) for name, array in arrays.items() if array is not None
    }
    message = pb.Trajectory(
        **{name: getattr(trajectory, name) for name in _PLAIN},
        **sampled,
        purpose=pb.EpisodePurpose.Name(trajectory.purpose.value),
        status=pb.EpisodeStatus.Name(trajectory.status.value),
        failure=failure,
        token_ids=pack_tokens(trajectory.token_ids),
        metrics=trajectory.metrics,
        version_spans=[
            pb.VersionSpan(length=span.length, version=version_to_pb(span.version))
            for span in trajectory.version_spans
        ],
        routed_experts=routed,
        branches=[pb.Branch(**vars(branch)) for branch in trajectory.branches],
        reference=reference,
        image_places=[pb.ImagePlace(**place._asdict()) for place in trajectory.image_places],
    )
    message.checksum = _checksum(message)
    return message


def _checksum(message: pb.Trajectory) -> int:
    reference = message.reference
    arrays = (
        message.token_ids,
        *(getattr(message, name) for name in SAMPLED_ARRAYS),
        message.routed_experts.expert_ids,
        reference.logprobs,
        reference.top_ids,
        reference.top_logprobs,
        *message.images,
        message.kept_tokens,
        message.teacher_prompt,
    )
    return functools.reduce(lambda checksum, array: zlib.crc32(array, checksum), arrays, 0)


def trajectory_from_pb(message: pb.Trajectory) -> Trajectory:
    """Returns the trajectory that `message` encodes.

    Raises ProtocolError for a wrong checksum, unknown enum values, or parts that do not match.
    """
    if _checksum(message) != message.checksum:
        raise ProtocolError(f"group {message.group_id}: the checksum of the arrays is wrong")
    try:
        purpose = _PURPOSES(message.purpose)
        status = _STATUSES(message.status)
        failure = (
            Failure(FailureKind(message.failure.kind), message.failure.message)
            if message.HasField("failure")
            else None
        )
    except ValueError as error:
        raise ProtocolError(f"group {message.group_id}: {error}") from error
    fields: dict[str, Any] = {
        name: tuple(getattr(message, name)) if is_repeated else getattr(message, name)
        for name, is_repeated in _PLAIN.items()
    } | {
        name: unpack_logprobs(data)
        for name, is_required in SAMPLED_ARRAYS.items()
        if (data := getattr(message, name)) or is_required
    }
    trajectory = Trajectory(
        **fields,
        purpose=purpose,
        status=status,
        failure=failure,
        metrics=dict(message.metrics),
        token_ids=unpack_tokens(message.token_ids),
        version_spans=tuple(
            VersionSpan(span.length, version_from_pb(span.version))
            for span in message.version_spans
        ),
        routed_experts=experts_from_pb(message),
        branches=tuple(
            Branch(
                branch.num_runs,
                branch.share,
                branch.name,
                branch.reward if branch.HasField("reward") else None,
            )
            for branch in message.branches
        ),
        reference=_reference(message),
        image_places=tuple(ImagePlace(place.offset, place.image) for place in message.image_places),
    )
    for fault in _faults(trajectory):
        raise ProtocolError(f"{trajectory.trajectory_id}: {fault}")
    return trajectory


def experts_from_pb(message: pb.Trajectory) -> RoutedExperts | None:
    """Returns the recorded experts, if any, that a trajectory holds; raises ProtocolError."""
    if not message.HasField("routed_experts"):
        return None
    dimensions = _expert_dimensions(message)
    routed = message.routed_experts
    return _unpack_experts(routed.expert_ids, dimensions, routed.num_experts)


def experts_elsewhere(message: pb.Trajectory) -> RoutedExperts | None:
    """Takes the experts, if any, out of a trajectory whose ids come in a message of their own.

    The result has their shape, is "not recorded" throughout and takes no memory. Raises
    ProtocolError for a shape that cannot be.
    """
    if not message.HasField("routed_experts"):
        return None
    dimensions = _expert_dimensions(message)
    num_experts = message.routed_experts.num_experts
    message.ClearField("routed_experts")
    return RoutedExperts.not_here(dimensions, num_experts)


def experts_in_place(
    record: trainer_pb2.RecordedExperts, announced: RoutedExperts
) -> RoutedExperts:
    """Returns the experts whose shape was `announced`; raises ProtocolError if they misfit."""
    data = record.expert_ids
    if zlib.crc32(data) != record.checksum:
        raise ProtocolError("the checksum of the experts is wrong")
    return _unpack_experts(data, announced.expert_ids.shape, announced.num_experts)


def _expert_dimensions(message: pb.Trajectory) -> tuple[int, ...]:
    """Returns the shape [tokens, layers, experts per token]; raises ProtocolError."""
    routed = message.routed_experts
    num_layers = routed.num_layers
    top_k = routed.top_k
    num_experts = routed.num_experts
    if not (1 <= top_k <= num_experts and 1 <= num_layers <= _MAX_LAYERS):
        raise ProtocolError(f"experts of {num_layers} layers, {top_k} of {num_experts} each")
    return len(message.token_ids) // 4, num_layers, top_k


def _unpack_experts(data: bytes, dimensions: tuple[int, ...], num_experts: int) -> RoutedExperts:
    dtype = expert_dtype(num_experts)
    num_tokens, num_layers, top_k = dimensions
    expected = math.prod(dimensions) * dtype.itemsize
    if len(data) != expected:
        raise ProtocolError(
            f"experts of {num_tokens} tokens, {num_layers} layers, {top_k} of {num_experts} each, "
            f"must have {expected} bytes, got {len(data)}"
        )
    ids: ExpertArray = np.frombuffer(data, dtype=np.uint8)
    if dtype != np.uint8:
        ids = np.frombuffer(data, dtype="<u2").astype(np.uint16, copy=False)
    # "Not recorded", the largest value, becomes 0.
    unknown = ids + dtype.type(1) > num_experts
    if unknown.any():
        raise ProtocolError(f"expert {ids[unknown][0]} of {num_experts} experts")
    return RoutedExperts(ids.reshape(dimensions), num_experts)


def _reference(message: pb.Trajectory) -> ReferenceLogprobs | None:
    if not message.HasField("reference"):
        return None
    reference = message.reference
    sampled = len(message.behavior_logprobs) // 4
    sizes = [4 * sampled, 4 * sampled * reference.top_k, 4 * sampled * reference.top_k]
    got = [len(reference.logprobs), len(reference.top_ids), len(reference.top_logprobs)]
    if got != sizes:
        raise ProtocolError(
            f"group {message.group_id}: the reference's arrays for {sampled} sampled tokens and "
            f"top_k {reference.top_k} must have {sizes} bytes, got {got}"
        )
    shape = (sampled, reference.top_k)
    return ReferenceLogprobs(
        unpack_logprobs(reference.logprobs),
        unpack_tokens(reference.top_ids).reshape(shape),
        unpack_logprobs(reference.top_logprobs).reshape(shape),
    )


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """Returns a trajectory's bytes for a queue. Raises ProtocolError if they exceed 32 MiB."""
    data = trajectory_to_pb(trajectory).SerializeToString()
    if len(data) > MAX_TRAJECTORY_BYTES:
        raise ProtocolError(
            f"trajectory {trajectory.trajectory_id} has {len(data)} bytes, "
            f"more than {MAX_TRAJECTORY_BYTES}"
        )
    return data


def decode_trajectory(data: bytes) -> Trajectory:
    """Reverses `encode_trajectory`. Raises ProtocolError for any other bytes."""
    return trajectory_from_pb(decode(pb.Trajectory, data))


def merge_spans(spans: list[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Joins neighbouring spans of the same version and leaves out empty spans."""
    grouped = itertools.groupby(
        (span for span in spans if span.length), key=lambda span: span.version
    )
    return tuple(VersionSpan(sum(span.length for span in run), version) for version, run in grouped)


def passes_digest(adapter: str, ids: Iterable[str]) -> bytes:
    """Returns 16 bytes that stand for passes of an adapter, "" without several, in their order."""
    return hashlib.blake2b("\n".join((adapter, *ids)).encode(), digest_size=16).digest()

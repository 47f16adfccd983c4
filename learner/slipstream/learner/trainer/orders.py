"""The controller's orders to the trainer, as values that every rank gets."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from google.protobuf.proto import parse_length_prefixed, serialize_length_prefixed
from slipstream.core.errors import ProtocolError
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.protocol.bounds import one_line
from slipstream.protocol.codec import trajectory_from_pb
from slipstream.v1 import trainer_pb2, weights_pb2


@dataclass(frozen=True)
class Stop:
    """The order to make no more steps."""

    reason: str
    # Whether the trainer leaves without exporting its model.
    without_model: bool = False


@dataclass(frozen=True)
class Wait:
    """The order to ask again, because there is nothing to do yet."""


Order: TypeAlias = Batch | weights_pb2.PublishOrder | trainer_pb2.StoreOrder | Stop | Wait


def pack_directives(directives: Iterable[trainer_pb2.Directive]) -> bytes:
    """Packs the messages of one answer, each behind its length."""
    buffer = io.BytesIO()
    for directive in directives:
        serialize_length_prefixed(directive, buffer)
    return buffer.getvalue()


def unpack_directives(data: bytes) -> list[trainer_pb2.Directive]:
    """Inverts `pack_directives`."""
    buffer = io.BytesIO(data)
    directives = []
    while (message := parse_length_prefixed(trainer_pb2.Directive, buffer)) is not None:
        directives.append(message)
    return directives


def read_order(directives: Sequence[trainer_pb2.Directive]) -> Order:
    """Reads the order of an answer; ProtocolError when its messages do not fit together."""
    if not directives:
        raise ProtocolError("the controller answered Next without an order")
    first = directives[0]
    kind = first.WhichOneof("directive")
    if kind == "batch":
        return _read_batch(first.batch, directives[1:])
    if kind == "publish":
        return first.publish
    if kind == "store":
        return first.store
    if kind == "stop":
        return Stop(first.stop.reason, first.stop.without_model)
    if kind == "wait":
        return Wait()
    raise ProtocolError(f"an answer begins with an order, got {kind}")


def _read_batch(header: trainer_pb2.BatchHeader, chunks: Sequence[trainer_pb2.Directive]) -> Batch:
    batch_id = one_line(header.batch_id, 128)
    if any(chunk.WhichOneof("directive") != "chunk" for chunk in chunks):
        raise ProtocolError(f"batch {batch_id}: something else than a chunk follows")
    try:
        trajectories = tuple(
            trajectory_from_pb(message) for chunk in chunks for message in chunk.chunk.trajectories
        )
    except ProtocolError as error:
        # The message may contain names that nothing has checked.
        raise ProtocolError(one_line(f"batch {batch_id}: {error}", 1000)) from error
    batch = Batch(header.step, header.batch_id, trajectories)
    found = (len(set(batch.group_ids)), len(trajectories))
    if found != (header.num_groups, header.num_trajectories):
        raise ProtocolError(
            f"batch {batch_id}: {header.num_groups} groups of {header.num_trajectories} "
            f"trajectories were announced, {found[0]} of {found[1]} came"
        )
    return batch

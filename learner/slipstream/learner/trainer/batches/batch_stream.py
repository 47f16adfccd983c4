"""The messages of one answer of the controller, as every rank gets them one by one from rank 0.

Consumes: the messages of `Next` on rank 0. Produces: an order on every rank. Waits for: the
controller, through rank 0. Unblocked by: a message, or the limit of the call.

A rank holds one message at a time beside what it keeps. All ranks keep tokens, log-probabilities
and rewards of the whole batch, which their advantages need. Recorded experts are a hundred times
as long: they come last, and each rank keeps those of the sequences that it trains.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Protocol, TypeAlias

from slipstream.core.errors import ProtocolError
from slipstream.core.types import RoutedExperts, Trajectory
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.ranks.parallel import Ranks
from slipstream.protocol.bounds import one_line
from slipstream.protocol.codec import experts_elsewhere, experts_in_place, trajectory_from_pb
from slipstream.v1 import trainer_pb2 as pb
from slipstream.v1 import trajectory_pb2, weights_pb2

Order: TypeAlias = (
    Batch
    | weights_pb2.PublishOrder
    | pb.StoreOrder
    | pb.Pass
    | pb.SaveOrder
    | pb.StopOrder
    | pb.WaitOrder
)
# Batch without experts -> indices of the sequences whose experts this rank keeps.
Share = Callable[[Batch], Set[int]]
_SINGLE = ("publish", "store", "compute", "save", "stop", "wait")


def on_every_rank(
    directives: Iterable[pb.Directive] | None, ranks: Ranks
) -> Iterator[pb.Directive]:
    """Yields rank 0's `directives` on every rank; the other ranks pass None. Collective."""
    if ranks.world_size == 1:
        assert directives is not None
        yield from directives
        return
    messages = None if directives is None else iter(directives)
    while True:
        data = None
        if messages is not None:
            message = next(messages, None)
            # An order is never empty: an empty message marks the end.
            data = b"" if message is None else message.SerializeToString()
        received = ranks.broadcast_bytes(data)
        if not received:
            return
        yield pb.Directive.FromString(received)


def read_order(directives: Iterable[pb.Directive], share: Share) -> Order:
    """Returns the order in an answer; raises ProtocolError if its messages do not fit together.

    `share` is asked once for a batch with recorded experts.
    """
    messages = iter(directives)
    first = next(messages, None)
    if first is None:
        raise ProtocolError("the controller answered Next without an order")
    kind = first.WhichOneof("directive")
    if kind == "batch":
        try:
            return _read_batch(first.batch, _chunks(messages), share)
        except ProtocolError as error:
            # The message may contain names that nothing has checked.
            batch_id = one_line(first.batch.batch_id, 128)
            raise ProtocolError(one_line(f"batch {batch_id}: {error}", 1000)) from error
    if kind not in _SINGLE:
        raise ProtocolError(f"an answer begins with an order, got {kind}")
    order: Order = getattr(first, kind)
    return order


def _chunks(messages: Iterator[pb.Directive]) -> Iterator[pb.TrajectoryChunk]:
    for message in messages:
        if message.WhichOneof("directive") != "chunk":
            raise ProtocolError("something else than a chunk follows")
        yield message.chunk


def _read_batch(
    header: pb.BatchHeader, chunks: Iterator[pb.TrajectoryChunk], share: Share
) -> Batch:
    trajectories: list[Trajectory] = []
    passes: list[pb.Pass] = []
    first_experts: list[pb.RecordedExperts] = []
    for chunk in chunks:
        trajectories.extend(map(_without_experts, chunk.trajectories))
        passes.extend(chunk.passes)
        if chunk.experts:
            first_experts = [*chunk.experts]
            break
    batch = Batch(
        step=header.step,
        batch_id=header.batch_id,
        trajectories=tuple(trajectories),
        given=header.given if header.HasField("given") else None,
        passes=tuple(passes),
    )
    _check_counts(header, batch)
    if not any(trajectory.routed_experts is not None for trajectory in trajectories):
        if first_experts:
            raise ProtocolError("experts came that no trajectory has announced")
        return batch
    return _with_experts(batch, share(batch), first_experts, chunks)


def _without_experts(message: trajectory_pb2.Trajectory) -> Trajectory:
    announced = experts_elsewhere(message)
    trajectory = trajectory_from_pb(message)
    if announced is None:
        return trajectory
    return dataclasses.replace(trajectory, routed_experts=announced)


def _check_counts(header: pb.BatchHeader, batch: Batch) -> None:
    if len(batch.passes) != header.given.num_passes:
        raise ProtocolError(
            f"{header.given.num_passes} passes were announced, {len(batch.passes)} came"
        )
    num_groups = len(set(batch.group_ids))
    num_trajectories = len(batch.trajectories)
    if (num_groups, num_trajectories) != (header.num_groups, header.num_trajectories):
        raise ProtocolError(
            f"{header.num_groups} groups of {header.num_trajectories} trajectories were "
            f"announced, {num_groups} of {num_trajectories} came"
        )


def _with_experts(
    batch: Batch,
    sequences: Set[int],
    first_experts: Iterable[pb.RecordedExperts],
    chunks: Iterator[pb.TrajectoryChunk],
) -> Batch:
    """Returns the batch with the experts of `sequences`; those of the others are dropped."""
    trajectories = [*batch.trajectories]
    awaited = {p for p, t in enumerate(trajectories) if t.routed_experts is not None}
    trained = {batch.owners[index] for index in sequences}

    def keep(records: Iterable[pb.RecordedExperts]) -> None:
        for record in records:
            place = record.trajectory
            if place not in awaited:
                raise ProtocolError(f"experts of trajectory {place} came twice, or unannounced")
            awaited.remove(place)
            announced = trajectories[place].routed_experts
            if place in trained and announced is not None:
                experts = experts_in_place(record, announced)
                trajectories[place] = dataclasses.replace(
                    trajectories[place], routed_experts=experts
                )

    keep(first_experts)
    for chunk in chunks:
        if chunk.trajectories or chunk.passes:
            raise ProtocolError("trajectories came behind experts")
        keep(chunk.experts)
    if awaited:
        raise ProtocolError(f"the experts of {len(awaited)} trajectories did not come")
    return dataclasses.replace(
        batch, trajectories=tuple(trajectories), recorded_here=frozenset(sequences)
    )


class Contents(Protocol):
    """A recorded batch, whose trajectories can be read twice."""

    @property
    def header(self) -> pb.BatchHeader:
        """The step and the id of the batch, and what a client orders in place of groups."""

    @property
    def trajectories(self) -> Iterable[trajectory_pb2.Trajectory]:
        """The trajectories with their experts."""

    @property
    def passes(self) -> Iterable[pb.Pass]:
        """The passes of a client's step."""


def read_stored(contents: Contents, share: Share) -> Batch:
    """Returns a recorded batch with the experts of this rank's share alone, as `read_order` does.

    Raises ProtocolError if it is damaged.
    """
    header = contents.header
    is_given = header.HasField("given")
    trajectories = map(trajectory_from_pb, contents.trajectories)
    batch = Batch(
        step=header.step,
        batch_id=header.batch_id,
        trajectories=tuple(map(_with_shape, trajectories)),
        given=header.given if is_given else None,
        passes=tuple(contents.passes) if is_given else (),
    )
    if all(trajectory.routed_experts is None for trajectory in batch.trajectories):
        return batch
    sequences = frozenset(share(batch))
    trained = {batch.owners[index] for index in sequences}
    messages = zip(contents.trajectories, batch.trajectories, strict=True)
    trajectories_here = tuple(
        trajectory_from_pb(message) if place in trained else light
        for place, (message, light) in enumerate(messages)
    )
    return dataclasses.replace(batch, trajectories=trajectories_here, recorded_here=sequences)


def _with_shape(trajectory: Trajectory) -> Trajectory:
    """Returns the trajectory with no more than the shape of its experts."""
    experts = trajectory.routed_experts
    if experts is None:
        return trajectory
    shape = RoutedExperts.not_here(experts.expert_ids.shape, experts.num_experts)
    return dataclasses.replace(trajectory, routed_experts=shape)

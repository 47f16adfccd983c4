"""Fills buckets with the weights of all ranks, by `export_plan` or by Bridge's export.

Both ways are collective: every rank fills every bucket in turn, even a rank that holds no part of
the bucket.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import Protocol

import torch
import torch.distributed as dist
from slipstream.core.errors import RunFailed
from slipstream.learner.trainer.model.policy import Policy
from slipstream.learner.trainer.weights.export import adapter_tensors, hf_tensors
from slipstream.learner.trainer.weights.export_plan import (
    Piece,
    UnknownMapping,
    exported_type,
    plan_adapters,
    plan_matrices,
)
from slipstream.protocol.weights.buckets import Bucket, TensorSpan, TensorSpec
from torch import Tensor

# Size from which a block is copied separately: it takes longer than starting the next copy.
_LARGE_BYTES = 16 << 20
# A copy with gaps is split into at most this many contiguous blocks.
_MOST_BLOCKS = 64


class Copies:
    """A fixed list of (target, source) tensor copies; a copy may convert the element type.

    On a GPU, torch runs a list of copies in a few kernels if all are contiguous, else in one kernel
    per copy. Large blocks that keep their element type are copied one by one instead, since the
    kernels for lists reach only two thirds of the speed of a plain copy.
    """

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._dense: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._alone: list[tuple[Tensor, Tensor]] = []
        for target, source in pairs:
            blocks = list(dense_blocks(target, source))
            if not blocks:
                self._alone.append((target, source))
            for target_block, source_block in blocks:
                if target.dtype == source.dtype and target_block.nbytes >= _LARGE_BYTES:
                    self._alone.append((target_block, source_block))
                    continue
                self._dense[0].append(target_block)
                self._dense[1].append(source_block)

    def run(self) -> None:
        """Makes all copies on the current CUDA stream."""
        if self._dense[0]:
            torch._foreach_copy_(*self._dense)
        for target, source in self._alone:
            target.copy_(source)


def dense_blocks(target: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields a copy as a few contiguous pieces, such as fused heads, or nothing if it has more."""
    if target.is_contiguous() and source.is_contiguous():
        yield target, source
    elif target.dim() > 1 and len(target) <= _MOST_BLOCKS:
        blocks = list(zip(target.unbind(), source.unbind(), strict=True))
        if all(t.is_contiguous() and s.is_contiguous() for t, s in blocks):
            yield from blocks


class ExportedPart(Enum):
    """The part of the policy that is exported."""

    # All weights, with the adapters' products added to the matrices.
    MERGED = "merged"
    # All weights without the adapters' products; these matrices never change.
    MATRICES = "matrices"
    ADAPTERS = "adapters"


class Filling(Protocol):
    """Fills buckets with weights: call `prepare` once, then `fill` in each pass."""

    tensors: tuple[TensorSpec, ...]
    # Trainer ranks that send; `TensorSpec.sender` is an index into this tuple.
    senders: tuple[int, ...]
    # True if any bucket can be filled at any time; False if a pass must fill all of them in order.
    fills_any: bool

    def prepare(self, buckets: Sequence[Bucket], lanes: Sequence[Tensor]) -> None:
        """Assigns bucket k to the memory `lanes[k % len(lanes)]`; lanes are uint8 tensors."""

    def fill(self, place: int) -> None:
        """Fills bucket number `place` on its sender, on the current CUDA stream; collective."""


class BridgeFilling:
    """Fills buckets by Bridge's export, which builds every tensor on every rank; rank 0 sends."""

    fills_any = False

    def __init__(
        self,
        policy: Policy,
        kind: ExportedPart,
        *,
        senders: tuple[int, ...],
    ) -> None:
        """Prepares the export; `senders` must begin with rank 0, and the others fill no buckets."""
        self._policy = policy
        self._kind = kind
        self.senders = senders
        self.tensors = tuple(
            TensorSpec(name, _name_of(tensor.dtype), tuple(tensor.shape))
            for name, tensor in exported(policy, kind)
        )

    def prepare(self, buckets: Sequence[Bucket], lanes: Sequence[Tensor]) -> None:
        self._buckets = buckets
        self._lanes = lanes

    def fill(self, place: int) -> None:
        if place == 0:
            self._pending = exported(self._policy, self._kind)
        lane = self._lanes[place % len(self._lanes)]
        for span in self._buckets[place].spans:
            name, tensor = next(self._pending)
            if name != span.tensor.name:
                raise RunFailed(f"the export gave {name} where it gave {span.tensor.name} before")
            if self._policy.ranks.is_main:
                _place_of(span, lane).copy_(tensor)
        if place == len(self._buckets) - 1:
            assert next(self._pending, None) is None


class _Gather:
    """Parts of a bucket that the ranks of `group` send to the lead, the group's first rank.

    The other ranks pack them. The lead unpacks them into the bucket, and copies its own parts there
    directly.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        # Pieces and spans, with their places among the packed elements.
        self._pieces: list[tuple[Piece, TensorSpan, int]] = []
        self.num_elements, self.num_others = 0, dist.get_world_size(group) - 1

    def add(self, piece: Piece, span: TensorSpan) -> None:
        self._pieces.append((piece, span, self.num_elements))
        self.num_elements += piece.part.numel()

    def prepare(
        self,
        lane: Tensor,
        packed: Tensor,
        gathered: Tensor,
        *,
        is_lead: bool,
    ) -> None:
        """Takes the memory for the bucket, for this rank's elements, and for those of others."""
        own_elements = packed[: self.num_elements]
        rest = gathered[: self.num_elements * self.num_others]
        self._sent = own_elements.view(torch.uint8)
        self._received = None
        if is_lead:
            # Nothing is copied for the lead's own parts.
            other_parts = rest.view(torch.uint8).view(self.num_others, -1).unbind()
            self._received = [self._sent, *other_parts]
        self._before = Copies(self._own(lane) if is_lead else self._packing(own_elements))
        self._after = Copies(self._unpacking(rest, lane) if is_lead else ())

    def run(self, lead: int) -> None:
        self._before.run()
        dist.gather(
            self._sent,
            self._received,
            dst=lead,
            group=self._group,
        )
        self._after.run()

    def _packing(self, packed: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for piece, _, offset in self._pieces:
            part = piece.part
            yield packed[offset : offset + part.numel()].view(part.shape), part

    def _own(self, lane: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for piece, span, _ in self._pieces:
            yield from _placed(piece, span, lane, piece.part)

    def _unpacking(self, gathered: Tensor, lane: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for piece, span, offset in self._pieces:
            for number, source in enumerate(gathered.view(self.num_others, -1), 1):
                part = source[offset : offset + piece.part.numel()]
                yield from _placed(piece, span, lane, part, number)


def _placed(
    piece: Piece,
    span: TensorSpan,
    lane: Tensor,
    part: Tensor,
    number: int = 0,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the copy of rank `number`'s part of a tensor to its place in `lane`, if it has any."""
    place = _place_of(span, lane)
    of_part = list(piece.shape)
    dim = piece.dim or 0
    of_part[dim] = part.numel() // (place.numel() // piece.shape[dim])
    start = number * of_part[dim]
    # Rows beyond the shape are padding.
    length = min(of_part[dim], piece.shape[dim] - start)
    if length <= 0:
        return
    target = place.narrow(dim, start, length)
    if target.is_contiguous() and target.numel() == part.numel():
        # A part that is no view of its tensor's shape has the same order of elements.
        yield target.view(part.shape), part
    else:
        yield target, part.view(of_part).narrow(dim, 0, length)


class PlannedFilling:
    """Gathers the first copy of each parameter on one of the ranks that hold it, the lead.

    The lead then sends it. Besides the lanes, each rank of a group needs memory for its part of a
    bucket, and the lead also for the parts of the other ranks.
    """

    fills_any = True

    def __init__(
        self,
        policy: Policy,
        pieces: Sequence[Piece],
        *,
        senders: tuple[int, ...],
    ) -> None:
        """Plans which rank sends which tensor; collective.

        Without `senders`, all leads send. If a lead is not among `senders`, all ranks raise
        UnknownMapping.
        """
        self._rank = policy.ranks.rank
        self._dtype = policy.dtype
        first = [p for p in pieces if policy.ranks.has_first_copy(of_experts=p.is_expert)]
        self._pieces = {piece.name: piece for piece in first}
        led = [[p.name, p.shape] for p in first if dist.get_rank(p.group) == 0]
        by_rank = [json.loads(data) for data in policy.ranks.gather_bytes(json.dumps(led).encode())]
        leads = tuple(rank for rank, names in enumerate(by_rank) if names)
        self.senders = senders or leads
        if not set(leads) <= set(self.senders):
            raise UnknownMapping(f"ranks {leads} hold weights, but ranks {senders} send")
        self.tensors = tuple(
            TensorSpec(
                name,
                _name_of(exported_type(name, self._dtype)),
                tuple(shape),
                sender,
            )
            for sender, rank in enumerate(self.senders)
            for name, shape in by_rank[rank]
        )

    def prepare(self, buckets: Sequence[Bucket], lanes: Sequence[Tensor]) -> None:
        self._leads = [self.senders[bucket.root] for bucket in buckets]
        # Copies by this rank of whole tensors, and its parts to gather, of each bucket.
        self._whole: list[Copies] = []
        self._gathers: list[list[_Gather]] = []
        for place, bucket in enumerate(buckets):
            lane = lanes[place % len(lanes)]
            is_lead = self._leads[place] == self._rank
            by_group = dict[dist.ProcessGroup, _Gather]()
            copies: list[tuple[Tensor, Tensor]] = []
            for span in bucket.spans:
                piece = self._pieces.get(span.tensor.name)
                if piece is None:
                    continue
                if piece.num_parts > 1:
                    by_group.setdefault(piece.group, _Gather(piece.group)).add(piece, span)
                elif is_lead:
                    copies += _placed(piece, span, lane, piece.part)
            self._whole.append(Copies(copies))
            self._gathers.append(list(by_group.values()))
        every = list(itertools.chain(*self._gathers))
        device = lanes[0].device
        of_own = max((g.num_elements for g in every), default=0)
        of_others = max((g.num_elements * g.num_others for g in every), default=0)
        packed = torch.empty(of_own, dtype=self._dtype, device=device)
        gathered = torch.empty(of_others, dtype=self._dtype, device=device)
        for place, gathers in enumerate(self._gathers):
            lane = lanes[place % len(lanes)]
            is_lead = self._leads[place] == self._rank
            for gather in gathers:
                gather.prepare(lane, packed, gathered, is_lead=is_lead)

    def fill(self, place: int) -> None:
        self._whole[place].run()
        for gather in self._gathers[place]:
            gather.run(self._leads[place])


def exported(policy: Policy, kind: ExportedPart) -> Iterator[tuple[str, Tensor]]:
    """Yields name and tensor, on the device, of each weight by Bridge's export; collective."""
    if kind is ExportedPart.ADAPTERS:
        return adapter_tensors(policy, policy.dtype, to_host=False)
    weights = hf_tensors(
        policy,
        policy.dtype,
        to_host=False,
        merge=kind is ExportedPart.MERGED,
    )
    draft_weights = {} if policy.drafts is None else policy.drafts.published()
    return itertools.chain(
        weights, ((name, tensor.to(policy.dtype)) for name, tensor in draft_weights.items())
    )


def plan_filling(
    policy: Policy, kind: ExportedPart, *, senders: tuple[int, ...] = ()
) -> PlannedFilling:
    """Returns a filling by a plan for a `kind` of weights; collective.

    If `senders` is given, the result has exactly these senders. If any mapping is unknown on any
    rank, all ranks raise the same UnknownMapping. The plan is not compared with Bridge's export
    here: see `open_stream`.
    """
    pieces: list[Piece] = []
    problem = ""
    try:
        if kind is ExportedPart.ADAPTERS:
            pieces = plan_adapters(policy)
        else:
            pieces = plan_matrices(policy, merged=kind is ExportedPart.MERGED)
        if policy.drafts is not None:
            group = policy.ranks.tp_group
            pieces += [
                Piece(
                    name,
                    tensor,
                    tuple(tensor.shape),
                    None,
                    group,
                    is_expert=False,
                )
                for name, tensor in policy.drafts.published().items()
            ]
    except UnknownMapping as error:
        problem = str(error)
    for rank_problem in policy.ranks.gather_bytes(problem.encode()):
        if rank_problem:
            raise UnknownMapping(rank_problem.decode())
    return PlannedFilling(policy, pieces, senders=senders)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _place_of(span: TensorSpan, lane: Tensor) -> Tensor:
    tensor = span.tensor
    data = lane[span.offset_bytes : span.offset_bytes + tensor.num_bytes]
    return data.view(getattr(torch, tensor.dtype)).view(tensor.shape)

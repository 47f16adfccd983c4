"""Groups of sequences with similar lengths, and the keys that their queries see: pure functions.

Attention without TransformerEngine calls torch's kernel once for each group. The mask of a long
sequence would take gigabytes, so its queries are cut into blocks, whose masks are made when needed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.batches.micro_batch import gathered_places, zigzag
from torch import Tensor

# A mask of this many scores takes 32 MiB, or 128 MiB if a kernel needs it in float32.
MOST_SCORES = 1 << 25


# This rank's index among the context parallel ranks, and their number.
LengthSplit = tuple[int, int]


@dataclass(frozen=True)
class Masks:
    """The attention window, and the memory that masks may take."""

    # Number of tokens before a query that the query sees; None for all of them.
    window: int | None = None
    # Queries times keys of one call with a mask. More are cut into blocks of queries.
    most_scores: int = MOST_SCORES


@dataclass(frozen=True)
class Band:
    """The attention mask of consecutive queries, causal or windowed; `mask` builds the tensor."""

    # Tokens from the first key to the first query.
    offset: int
    window: int | None

    def mask(self, group: LengthGroup) -> Tensor:
        """Returns [1, 1, queries, keys], true for the keys that each query of `group` sees."""
        device = group.keys.device
        queries = torch.arange(group.queries.shape[1], device=device)[:, None] + self.offset
        keys = torch.arange(group.keys.shape[1], device=device)
        mask = keys <= queries
        if self.window is not None:
            mask &= keys >= queries - self.window
        return mask[None, None]


@dataclass(frozen=True)
class LengthGroup:
    """Sequences of similar length, or a block of one sequence, for one call of the kernel."""

    # [sequences, longest]: indices of this rank's tokens, and which of them are not padding.
    queries: Tensor
    is_query: Tensor
    # [sequences, longest]: indices of all tokens of each sequence.
    keys: Tensor
    # [sequences, 1, queries, keys]: which keys a query sees; None for causal attention.
    mask: Tensor | None
    # The rule of a block's mask; None if `mask` holds the mask.
    band: Band | None = None

    def to(self, device: torch.device) -> LengthGroup:
        """Returns the group with its tensors on `device`."""
        mask = None if self.mask is None else self.mask.to(device)
        queries, is_query = self.queries.to(device), self.is_query.to(device)
        return LengthGroup(queries, is_query, self.keys.to(device), mask, self.band)


def rows(tokens: Tensor, places: Tensor) -> Tensor:
    """Returns `tokens` at the indices `places` [sequences, length], as [sequences, length, ...]."""
    return tokens.index_select(0, places.flatten()).view(*places.shape, *tokens.shape[1:])


def mixed_in_rows(mix: Callable[..., Tensor], tokens: Sequence[Tensor], packed: Megatron) -> Tensor:
    """Applies `mix` to packed `tokens` laid out as [sequences, length, ...]; packs the results.

    Each sequence must be whole on this rank. Trailing padding must have no effect on `mix`.
    """
    assert packed is not None, "only packed sequences are laid out in rows"
    bounds = tuple(packed.cu_seqlens_q.tolist())
    groups, order = length_groups(bounds, (0, 1), Masks(), tokens[0].device)
    parts = [
        mix(*(rows(each, group.queries) for each in tokens))[group.is_query] for group in groups
    ]
    return torch.cat(parts).index_select(0, order)


def _seen(queries: Tensor, keys: Tensor, is_key: Tensor, window: int | None) -> Tensor:
    """Returns which of the `keys` each of the `queries` sees, [sequences, 1, queries, keys].

    Both arguments are indices [sequences, length] of the same tokens; no query sees padding.
    """
    distance = queries[:, :, None] - keys[:, None]
    mask = (distance >= 0) & is_key[:, None]
    if window is not None:
        mask &= distance <= window
    return mask[:, None]


# The cache holds separate groups for layers with and without a window.
@functools.lru_cache(maxsize=32)
def length_groups(
    bounds: tuple[int, ...], split: LengthSplit, masks: Masks, device: torch.device
) -> tuple[list[LengthGroup], Tensor]:
    """Groups sequences of similar length, so that few kernel calls with little padding suffice.

    `bounds` has the start of each sequence, and the end of the last. Returns the groups, and for
    each of this rank's tokens its index in the groups' concatenated queries. Sequences whose masks
    would be too large are cut into blocks.
    """
    rank, size = split
    by_class: dict[int, list[tuple[int, int]]] = {}
    for start, end in itertools.pairwise(bounds):
        if end > start:
            by_class.setdefault((end - start - 1).bit_length(), []).append((start, end))
    groups: list[LengthGroup] = []
    for members in by_class.values():
        longest = max(end - start for start, end in members)
        is_short = masks.window is None or longest <= masks.window + 1
        needs_mask = size > 1 or not is_short
        if needs_mask and len(members) * longest * longest // size > masks.most_scores:
            for member in members:
                groups += _blocks(member, bounds, split, masks, device)
            continue
        whole, is_token = _places(members)
        if size == 1:
            mask = None if is_short else _seen(whole, whole, is_token, masks.window)
            group = LengthGroup(whole, is_token, whole, mask)
        else:
            own, is_own = _places([(start // size, end // size) for start, end in members])
            mask = _seen(zigzag(bounds, rank, size)[own], whole, is_token, masks.window)
            keys = gathered_places(bounds, size)[whole]
            group = LengthGroup(own, is_own, keys, mask)
        groups.append(group)
    found = [group.queries[group.is_query] for group in groups]
    return [group.to(device) for group in groups], torch.cat(found).argsort().to(device)


def _blocks(
    member: tuple[int, int],
    bounds: tuple[int, ...],
    split: LengthSplit,
    masks: Masks,
    device: torch.device,
) -> list[LengthGroup]:
    """Returns the queries of one sequence in blocks, each with the keys that it sees.

    `member` has the bounds of the sequence. The queries of a block are consecutive.
    """
    (start, end), (rank, size) = member, split
    # All blocks are views of the same places.
    keys = gathered_places(bounds, size)[start:end].to(device)[None]
    queries = torch.arange(start // size, end // size)[None]
    length = queries.shape[1]
    chunk = length // 2 if size > 1 else length
    # Places in the sequence at which this rank's two chunks begin.
    firsts = (rank * chunk, (2 * size - 1 - rank) * chunk) if size > 1 else (0,)
    step = max(1, masks.most_scores // (end - start))
    groups = []
    for number, first in enumerate(firsts):
        for done in range(0, chunk, step):
            count = min(step, chunk - done)
            at = first + done
            least = 0 if masks.window is None else max(0, at - masks.window)
            own = queries[:, number * chunk + done :][:, :count]
            seen = keys[:, least : at + count]
            is_query = torch.ones_like(own, dtype=torch.bool)
            groups.append(LengthGroup(own, is_query, seen, None, Band(at - least, masks.window)))
    return groups


@functools.lru_cache(maxsize=16)
def path_groups(
    bounds: tuple[int, ...], key_bounds: tuple[int, ...], device: torch.device
) -> tuple[list[LengthGroup], Tensor]:
    """Groups segments with similar numbers of queries and keys.

    A segment's queries are its last tokens: query i of n sees all keys but the last n - 1 - i.
    `bounds` has the start of each segment's queries, and the end of the last; `key_bounds` is the
    same for keys. Returns the groups, and for each query its index in the groups' concatenated
    queries.
    """
    by_class: dict[tuple[int, int], list[tuple[tuple[int, int], tuple[int, int]]]] = {}
    for queries, keys in zip(
        itertools.pairwise(bounds), itertools.pairwise(key_bounds), strict=True
    ):
        sizes = [end - start for start, end in (queries, keys)]
        kind = ((sizes[0] - 1).bit_length(), (sizes[1] - 1).bit_length())
        by_class.setdefault(kind, []).append((queries, keys))
    groups, found = [], []
    for members in by_class.values():
        own, is_own = _places([queries for queries, _ in members])
        seen, is_seen = _places([keys for _, keys in members])
        lengths = torch.tensor([(q[1] - q[0], k[1] - k[0]) for q, k in members])
        before = (lengths[:, 1] - lengths[:, 0])[:, None, None]
        rows, columns = torch.arange(own.shape[1]), torch.arange(seen.shape[1])
        mask = (columns <= before + rows[:, None]) & is_seen[:, None]
        group = LengthGroup(own, is_own, seen, mask[:, None])
        groups.append(group.to(device))
        found.append(own[is_own])
    return groups, torch.cat(found).argsort().to(device)


def _places(members: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Returns the positions from start to end of each member, padded with the last position.

    The shape is [members, longest]. The second tensor is true where a position is not padding.
    """
    starts, ends = torch.tensor(members).unbind(1)
    places = starts[:, None] + torch.arange(int((ends - starts).max()))
    return torch.minimum(places, ends[:, None] - 1), places < ends[:, None]

"""The tokens that sampled tokens were drawn from, where `top_p`, `top_k` or `min_p` cut.

Packed, the numbers of tokens come first, one for each sampled token, then their ids: the lowest of
each set, and the distances to the next ones. Each number takes seven bits a byte, lowest first; the
highest bit says that another byte follows. 20 random tokens of 151,936 take 43 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Self

import numpy as np
import numpy.typing as npt
from slipstream.core.errors import ProtocolError

# Most tokens of a set: records have room for this many. A run with `top_k` has that many at most.
MAX_KEPT_TOKENS = 1024
# Most bytes of a packed id below 2^21, and of a packed number of tokens.
BYTES_PER_ID = 3
BYTES_PER_COUNT = 2

# Most bytes of any packed number.
_MAX_BYTES = 5
# The bit of a byte which says that another one follows, and the number of bits below it.
_FOLLOWED = 0x80
_BITS = 7

IdArray = npt.NDArray[np.int64]


def fit_a_record(top_k: int, vocabulary: int) -> bool:
    """Whether no set is larger than `MAX_KEPT_TOKENS`; a `top_k` of 0 sets no limit."""
    return min(top_k or vocabulary, vocabulary) <= MAX_KEPT_TOKENS


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """Sets of token ids, one for each of several sampled tokens.

    `counts` is int64 [sampled tokens]; 0 means that the token was drawn from all tokens. `ids` is
    int64 [sum of counts]: the sets one after the other, each in ascending order.
    """

    counts: IdArray
    ids: IdArray

    @classmethod
    def of_sets(cls, sets: Sequence[Sequence[int]]) -> Self:
        """Joins sets of ids, whose order has no meaning."""
        counts = np.fromiter(
            map(len, sets),
            dtype=np.int64,
            count=len(sets),
        )
        joined_ids = np.fromiter(
            chain.from_iterable(sets),
            dtype=np.int64,
            count=int(counts.sum()),
        )
        owners = _owners(counts)
        is_greater = np.diff(joined_ids) > 0
        is_of_next_set = np.diff(owners) > 0
        if (is_greater | is_of_next_set).all():
            return cls(counts, joined_ids)
        order = np.lexsort((joined_ids, owners))
        return cls(counts, joined_ids[order])

    @classmethod
    def of_all(cls, num_tokens: int) -> Self:
        """Returns the sets of `num_tokens` tokens that were drawn from all tokens."""
        counts = np.zeros(num_tokens, dtype=np.int64)
        return cls(counts, counts[:0])

    @classmethod
    def joined(cls, parts: Sequence[KeptTokens]) -> Self:
        """Returns the sets of consecutive tokens as one object."""
        if not parts:
            return cls.of_all(0)
        return cls(
            counts=np.concatenate([part.counts for part in parts]),
            ids=np.concatenate([part.ids for part in parts]),
        )

    @classmethod
    def unpacked(cls, data: bytes, num_tokens: int) -> Self:
        """Reverses `packed` for `num_tokens` sampled tokens; b"" stands for `of_all`.

        Raises ProtocolError for bytes that `packed` does not give, and for sets that are larger
        than `MAX_KEPT_TOKENS`.
        """
        if not data:
            return cls.of_all(num_tokens)
        numbers = _numbers(data)
        counts = numbers[:num_tokens]
        distances = numbers[num_tokens:]
        num_ids = int(counts.sum())
        if len(counts) != num_tokens or num_ids != len(distances):
            raise ProtocolError(
                f"the kept tokens of {num_tokens} sampled tokens have {len(numbers)} numbers, "
                f"of which {num_ids} should be ids"
            )
        width = int(counts.max(initial=0))
        if width > MAX_KEPT_TOKENS:
            raise ProtocolError(
                f"a sampled token has {width} kept tokens, more than {MAX_KEPT_TOKENS}"
            )
        is_lowest = np.zeros(num_ids, dtype=np.bool_)
        is_lowest[_first_places(counts)] = True
        if not distances[~is_lowest].all():
            raise ProtocolError("kept tokens name a token twice")
        sums = np.cumsum(distances)
        # The sum of all distances before a set.
        offsets = (sums - distances)[is_lowest]
        sizes = counts[counts > 0]
        return cls(counts, sums - np.repeat(offsets, sizes))

    @staticmethod
    def packed_counts(data: bytes, num_tokens: int) -> IdArray:
        """Returns the `counts` of `unpacked` without the ids, in a fraction of the time."""
        if not data:
            return np.zeros(num_tokens, dtype=np.int64)
        if not num_tokens:
            return np.zeros(0, dtype=np.int64)
        most_bytes = num_tokens * BYTES_PER_COUNT
        first_bytes = data[:most_bytes]
        digits = np.frombuffer(first_bytes, dtype=np.uint8)
        ends = np.flatnonzero(digits < _FOLLOWED)
        if len(ends) < num_tokens:
            raise ProtocolError(
                f"kept tokens have {len(ends)} numbers for {num_tokens} sampled tokens"
            )
        last_byte = ends[num_tokens - 1]
        return _numbers(first_bytes[: last_byte + 1])

    def packed(self) -> bytes:
        """Returns the sets as bytes; b"" if every token was drawn from all tokens."""
        if not len(self.ids):
            return b""
        distances = np.diff(self.ids, prepend=0)
        lowest = _first_places(self.counts)
        distances[lowest] = self.ids[lowest]
        numbers = np.concatenate([self.counts, distances])
        return _bytes(numbers)

    def cut(self, start: int, end: int) -> Self:
        """Returns the sets of the sampled tokens `start` to `end`."""
        first_id = int(self.counts[:start].sum())
        last_id = int(self.counts[:end].sum())
        return type(self)(self.counts[start:end], self.ids[first_id:last_id])

    def has(self, token_ids: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.bool_]:
        """Returns a flag for each of the sampled tokens `token_ids`: whether its set has it."""
        owners = _owners(self.counts)
        is_sampled = self.ids == token_ids[owners]
        has_token: npt.NDArray[np.bool_] = self.counts == 0
        has_token[owners[is_sampled]] = True
        return has_token

    def table(self, width: int) -> npt.NDArray[np.int32]:
        """Returns the sets as rows, int32 [sampled tokens, width]: each id plus 1, then zeros."""
        rows = np.zeros((len(self.counts), width), dtype=np.int32)
        columns = np.arange(width)
        is_kept = columns < self.counts[:, None]
        rows[is_kept] = self.ids + 1
        return rows

    @property
    def width(self) -> int:
        """The number of tokens in the largest set."""
        return int(self.counts.max(initial=0))


def _owners(counts: IdArray) -> IdArray:
    """Returns the sampled token of each id."""
    tokens = np.arange(len(counts))
    return np.repeat(tokens, counts)


def _first_places(counts: IdArray) -> IdArray:
    """Returns the place of the lowest id of each set that is not empty."""
    starts: IdArray = np.cumsum(counts) - counts
    return starts[counts > 0]


def _bytes(numbers: IdArray) -> bytes:
    bits = _BITS * np.arange(1, _MAX_BYTES)
    limits = 1 << bits
    largest = numbers.max()
    limits = limits[limits <= largest]
    lengths = np.ones_like(numbers)
    for limit in limits:
        lengths += numbers >= limit
    ends = np.cumsum(lengths)
    starts = ends - lengths
    data = np.empty(ends[-1], dtype=np.uint8)
    data[starts] = numbers % _FOLLOWED
    for place in range(1, len(limits) + 1):
        # Most numbers are short.
        longer = np.flatnonzero(lengths > place)
        shifted = numbers[longer] >> _BITS * place
        places = starts[longer] + place
        data[places] = shifted % _FOLLOWED
        data[places - 1] += _FOLLOWED
    return data.tobytes()


def _numbers(data: bytes) -> IdArray:
    digits = np.frombuffer(data, dtype=np.uint8)
    is_last = digits < _FOLLOWED
    if not is_last[-1]:
        raise ProtocolError("kept tokens end within a number")
    ends = np.flatnonzero(is_last)
    lengths = np.diff(ends, prepend=-1)
    starts = ends + 1 - lengths
    longest = lengths.max()
    if longest > _MAX_BYTES:
        raise ProtocolError(f"a number of kept tokens has more than {_MAX_BYTES} bytes")
    values = digits % _FOLLOWED
    numbers = values[starts].astype(np.int64)
    for place in range(1, longest):
        # Most numbers are short.
        longer = np.flatnonzero(lengths > place)
        place_values = values[starts[longer] + place].astype(np.int64)
        numbers[longer] += place_values << _BITS * place
    return numbers

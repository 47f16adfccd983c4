"""The assignment of sequences to micro batches and data-parallel ranks: a pure function.

Full micro batches leave no room unused, and ranks with equal work do not wait for each other at the
end of a step. These two aims conflict, because attention costs the square of a sequence's length: a
micro batch of one long sequence costs more than many short sequences with as many tokens.
"""

import bisect
import heapq
import math
from collections.abc import Sequence

import numpy as np
from slipstream.core.errors import ConfigError

# Micro batches of each data-parallel rank: each a list of sequence indices, possibly empty.
Plan = list[list[list[int]]]
_Bins = list[list[int]]
# Cost of one token without attention. Costs are whole numbers, so that rounding decides nothing.
_UNITS = 64


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    max_tokens: int,
    dp_size: int,
    multiple: int = 1,
    attention_length: float = math.inf,
    squares: Sequence[int] | None = None,
) -> Plan:
    """Assigns sequences to micro batches of at most `max_tokens`, the same number for each rank.

    There are as few micro batches as the search finds. The ranks get about equal work, and so do
    the n-th micro batches of all ranks, as far as the token limit allows. A sequence of l tokens
    costs l + l² / `attention_length`; `squares` replaces l² for each sequence. The number of micro
    batches of a rank is a multiple of `multiple`; some may be empty to reach this multiple. The
    same arguments give the same plan. Raises ConfigError if a sequence is longer than `max_tokens`.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    too_long = int(sizes.max(initial=0))
    if too_long > max_tokens:
        raise ConfigError(
            f"a sequence of {too_long} tokens does not fit learner.micro_batch_tokens {max_tokens}"
        )
    pairs = sizes * (sizes / attention_length)
    if squares is not None:
        pairs = np.asarray(squares) / attention_length
    costs = np.rint(_UNITS * (sizes + pairs)).astype(np.int64)
    longest_first = np.argsort(-sizes, kind="stable")
    # Below, a sequence is its place in this order.
    of_size = sizes[longest_first].tolist()
    of_cost = costs[longest_first].tolist()

    def levelled(places: Sequence[int], number: int) -> _Bins | None:
        """Returns `number` micro batches, balanced by cost or else by tokens; None without room."""
        own_sizes = [of_size[p] for p in places]
        own_costs = [of_cost[p] for p in places]
        bins = _level(own_sizes, own_costs, max_tokens, number)
        bins = bins or _level(own_sizes, own_sizes, max_tokens, number)
        return bins and [[places[index] for index in members] for members in bins]

    def planned(number: int) -> Plan | None:
        """Splits sequences over ranks, then over `number` micro batches each, costliest first.

        Without room for that, splits them over all micro batches, and these over ranks: this fills
        micro batches best. Returns None without room for that either.
        """
        shares = _level(of_size, of_cost, max_tokens * number, dp_size) or []
        plan = [bins for share in shares if (bins := levelled(share, number)) is not None]
        if len(plan) == dp_size:
            return [
                sorted(bins, key=lambda m: -sum(of_cost[place] for place in m)) for bins in plan
            ]
        every = levelled(range(len(of_size)), number * dp_size)
        return None if every is None else _deal(every, of_cost, dp_size)

    def per_rank(number: int) -> int:
        return round_up(max(1, number), dp_size * multiple) // dp_size

    fewest = per_rank(-(-sum(of_size) // max_tokens))
    plan = planned(fewest)
    if plan is None:
        packed = _first_fit(of_size, max_tokens)
        number = per_rank(len(packed))
        plan = planned(number) if number > fewest else None
        packed += [[] for _ in range(number * dp_size - len(packed))]
        plan = plan or _deal(packed, of_cost, dp_size)
    indices = longest_first.tolist()
    return [[sorted(indices[place] for place in members) for members in bins] for bins in plan]


def round_up(number: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple


def _level(
    sizes: list[int],
    costs: list[int],
    max_tokens: int,
    number: int,
) -> _Bins | None:
    """Puts each sequence into the cheapest of `number` micro batches with room; None without."""
    bins: _Bins = [[] for _ in range(number)]
    room = [max_tokens] * number
    # Keys are cost * number + place: whole numbers compare faster than pairs.
    cheapest = list(range(number))
    # Micro batches without room for the current sequence, roomiest first; a shorter one may fit.
    narrow: list[tuple[int, int]] = []
    for place, size in enumerate(sizes):
        while narrow and -narrow[0][0] >= size:
            heapq.heappush(cheapest, heapq.heappop(narrow)[1])
        while cheapest and room[cheapest[0] % number] < size:
            key = heapq.heappop(cheapest)
            heapq.heappush(narrow, (-room[key % number], key))
        if not cheapest:
            return None
        key = cheapest[0]
        bins[key % number].append(place)
        room[key % number] -= size
        heapq.heapreplace(cheapest, key + costs[place] * number)
    return bins


def _first_fit(sizes: list[int], max_tokens: int) -> _Bins:
    """Fills one micro batch after another, each time with the longest sequence that still fits."""
    size_of = sizes.__getitem__
    ascending = sorted(range(len(sizes)), key=size_of)
    bins: _Bins = []
    while ascending:
        members: list[int] = []
        room = max_tokens
        while (num_fitting := bisect.bisect_right(ascending, room, key=size_of)) > 0:
            members.append(ascending.pop(num_fitting - 1))
            room -= sizes[members[-1]]
        bins.append(members)
    return bins


def _deal(bins: _Bins, costs: list[int], dp_size: int) -> Plan:
    """Deals micro batches in rounds; in each round the least loaded rank gets the costliest."""
    totals = [sum(costs[index] for index in members) for members in bins]
    order = sorted(range(len(bins)), key=lambda place: -totals[place])
    ranks: Plan = [[] for _ in range(dp_size)]
    loads = [0] * dp_size
    for start in range(0, len(order), dp_size):
        least_first = sorted(range(dp_size), key=loads.__getitem__)
        for place, rank in zip(order[start : start + dp_size], least_first, strict=True):
            ranks[rank].append(bins[place])
            loads[rank] += totals[place]
    return ranks

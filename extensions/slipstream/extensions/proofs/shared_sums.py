"""Two ranks of a context parallel layout in threads of one process, which share their sums."""

import threading
from collections import defaultdict

import torch
from slipstream.core.errors import RunFailed
from slipstream.learner.algorithms.inputs import SequenceSums
from torch import Tensor

NUM_RANKS = 2
UNEQUAL = "one rank asks for sums over sequences, another does not"


class SumExchange:
    """Adds up the sums of the ranks, in the order in which each rank asks for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._rounds: defaultdict[int, dict[int, Tensor]] = defaultdict(dict)
        self._ended: set[int] = set()

    def total(self, rank: int, number: int, sums: Tensor) -> Tensor:
        """Returns the total of the sums that the ranks ask for as their `number`-th.

        Blocks until the other rank asks, too. Raises RunFailed if it ends without.
        """
        with self._changed:
            parts = self._rounds[number]
            parts[rank] = sums
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(parts) == NUM_RANKS or bool(self._ended))
            if len(parts) < NUM_RANKS:
                raise RunFailed(UNEQUAL)
            return torch.stack([parts[place] for place in range(NUM_RANKS)]).sum(0)

    def ends(self, rank: int) -> None:
        """Notes that a rank asks for no more sums."""
        with self._changed:
            self._ended.add(rank)
            self._changed.notify_all()


class SharedSums(SequenceSums):
    """Sums over the tokens of both ranks."""

    def __init__(
        self, ids: Tensor, mask: Tensor, number: int, *, rank: int, exchange: SumExchange
    ) -> None:
        super().__init__(ids, mask, number)
        self._rank = rank
        self._exchange = exchange
        self._num_asked = 0

    def _sums(self, values: Tensor) -> Tensor:
        sums = super()._sums(values)
        self._num_asked += 1
        return self._exchange.total(self._rank, self._num_asked, sums)

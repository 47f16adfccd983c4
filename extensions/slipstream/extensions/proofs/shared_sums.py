"""Two ranks of a parallel layout in threads of one process, which share their sums."""

import threading
from collections import defaultdict

import torch
from slipstream.core.errors import RunFailed
from slipstream.learner.algorithms.inputs import BatchSums, SequenceSums
from torch import Tensor

NUM_RANKS = 2
UNEQUAL = "one rank asks for sums over sequences, another does not"


class SumExchange:
    """Gives each rank the tensors of all, in the order in which each rank asks for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._rounds: defaultdict[int, dict[int, Tensor]] = defaultdict(dict)
        self._num_asked = [0] * NUM_RANKS
        self._ended: set[int] = set()

    def parts(self, rank: int, own_part: Tensor) -> list[Tensor]:
        """Returns the tensors that the ranks give at their next call, in the order of ranks.

        Blocks until the other rank asks, too. Raises RunFailed if it ends without.
        """
        with self._changed:
            self._num_asked[rank] += 1
            number = self._num_asked[rank]
            parts = self._rounds[number]
            parts[rank] = own_part
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(parts) == NUM_RANKS or bool(self._ended))
            if len(parts) < NUM_RANKS:
                raise RunFailed(UNEQUAL)
            return [parts[place] for place in range(NUM_RANKS)]

    def total(self, rank: int, own_part: Tensor) -> Tensor:
        """Returns the sum of the tensors that the ranks give; blocks and raises as `parts`."""
        parts = self.parts(rank, own_part)
        return torch.stack(parts).sum(0)

    def ends(self, rank: int) -> None:
        """Notes that a rank asks for no more sums."""
        with self._changed:
            self._ended.add(rank)
            self._changed.notify_all()


class SharedSums(SequenceSums):
    """Sums over the tokens of both ranks."""

    def __init__(
        self,
        ids: Tensor,
        mask: Tensor,
        number: int,
        *,
        rank: int,
        exchange: SumExchange,
    ) -> None:
        super().__init__(ids, mask, number)
        self._rank = rank
        self._exchange = exchange

    def _sums(self, values: Tensor) -> Tensor:
        sums = super()._sums(values)
        return self._exchange.total(self._rank, sums)


class SharedBatch(BatchSums):
    """Numbers of the trained tokens of both ranks."""

    def __init__(
        self,
        mask: Tensor,
        *,
        rank: int,
        exchange: SumExchange,
    ) -> None:
        super().__init__(mask)
        self._rank = rank
        self._exchange = exchange

    def _sum(self, trained: Tensor) -> Tensor:
        total = super()._sum(trained)
        return self._exchange.total(self._rank, total)

    def _sorted(self, trained: Tensor) -> Tensor:
        parts = self._exchange.parts(self._rank, trained)
        return torch.cat(parts).sort().values

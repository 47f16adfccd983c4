"""The kept tokens of sampled tokens that a scheduler has not output yet, as rows of arrays.

vLLM cuts a small array for each request out of a step's kept tokens. With hundreds of requests that
takes a good part of the time of a small model's step. Here a step is written into one table, and a
request gets the sets of all its tokens at once, when they leave.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from vllm.v1.outputs import SamplingMaskLists

IntArray = npt.NDArray[np.int64]


class HeldSets:
    """Sets of kept tokens by request and token; each request has room for `num_tokens` tokens."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._num_rows = 0
        # The size of each set, [requests, tokens].
        self._counts = np.zeros(
            (0, num_tokens),
            dtype=np.int64,
        )
        # The ids of each set, [requests, tokens, room for ids].
        self._ids = np.zeros(
            (0, num_tokens, 1),
            dtype=np.int32,
        )

    def add_rows(self, number: int) -> None:
        """Makes room for `number` further requests, behind the others."""
        self._num_rows += number
        self._make_room(width=0)

    def hold(
        self,
        rows: IntArray,
        places: IntArray,
        step_sets: SamplingMaskLists,
        step_rows: IntArray,
    ) -> None:
        """Writes the sets of a step's rows `step_rows` to the tokens `places` of requests `rows`.

        Each request samples one token in the step at most.
        """
        offsets = step_sets.offsets
        assert offsets is not None, "those of a step have offsets"
        starts = offsets[step_rows]
        ends = offsets[step_rows + 1]
        counts = ends - starts
        self._counts[rows, places] = counts
        width = int(counts.max(initial=0))
        if not width:
            return
        self._make_room(width)
        columns = np.arange(width)
        sources = starts[:, None] + columns
        # Behind a short set stands any other id, which `sets` leaves out.
        last_source = len(step_sets.token_ids) - 1
        sources = np.minimum(sources, last_source)
        self._ids[rows, places, :width] = step_sets.token_ids[sources]

    def sets(
        self,
        rows: Sequence[int],
        num_held: Sequence[int],
    ) -> list[SamplingMaskLists]:
        """Returns the sets of the first `num_held` tokens of each of the requests `rows`."""
        places = np.arange(self._num_tokens)
        held_ends = np.asarray(num_held)
        is_held = places < held_ends[:, None]
        counts = np.where(is_held, self._counts[rows], 0)
        width = int(counts.max(initial=0))
        columns = np.arange(width)
        is_kept = columns < counts[:, :, None]
        row_ids = self._ids[rows]
        kept_ids = row_ids[:, :, :width][is_kept]
        set_ends = counts.cumsum(axis=1)
        row_ends = set_ends[:, -1].cumsum()
        ids_by_row = np.split(kept_ids, row_ends[:-1])
        offsets = np.pad(set_ends, ((0, 0), (1, 0)))
        return [
            SamplingMaskLists(
                token_ids=ids,
                offsets=row_offsets[: number + 1],
            )
            for ids, row_offsets, number in zip(ids_by_row, offsets, num_held, strict=True)
        ]

    def _make_room(self, width: int) -> None:
        """Grows the arrays to twice what is needed, so that requests seldom move them."""
        num_rows, num_tokens, room = self._ids.shape
        has_rows = self._num_rows <= num_rows
        has_width = width <= room
        if has_rows and has_width:
            return
        new_num_rows = num_rows if has_rows else 2 * self._num_rows
        new_room = room if has_width else 2 * width
        counts = np.zeros(
            (new_num_rows, num_tokens),
            dtype=np.int64,
        )
        counts[:num_rows] = self._counts
        self._counts = counts
        ids = np.zeros(
            (new_num_rows, num_tokens, new_room),
            dtype=np.int32,
        )
        ids[:num_rows, :, :room] = self._ids
        self._ids = ids

"""Sets of kept tokens that wait for their requests' outputs."""

import random
from itertools import chain

import numpy as np
import pytest
from slipstream.extensions.fast_decoding.server.held_sets import HeldSets
from vllm.v1.outputs import SamplingMaskLists

NUM_TOKENS = 4


def step_of(sets: list[list[int]]) -> SamplingMaskLists:
    every_id = [*chain(*sets)]
    sizes = [len(ids) for ids in sets]
    return SamplingMaskLists(
        token_ids=np.array(every_id, dtype=np.int32),
        offsets=np.cumsum([0, *sizes]),
    )


@pytest.mark.parametrize("seed", range(5))
def test_each_request_gets_the_sets_of_its_own_tokens_in_their_order(seed: int) -> None:
    chosen = random.Random(seed)
    kept_sets = HeldSets(NUM_TOKENS)
    num_rows = 0
    for largest_set in (1, 3, 40):
        # The arrays grow in both directions.
        kept_sets.add_rows(2)
        num_rows += 2
        sets_by_row: dict[int, list[list[int]]] = {row: [] for row in range(num_rows)}
        for place in range(NUM_TOKENS):
            # A step has the requests in an order of its own.
            rows = chosen.sample(range(num_rows), num_rows)
            step_sets: list[list[int]] = []
            for row in rows:
                size = chosen.randrange(largest_set + 1)
                ids = sorted(chosen.sample(range(100), size))
                step_sets.append(ids)
                sets_by_row[row].append(ids)
            kept_sets.hold(
                rows=np.array(rows),
                places=np.full(num_rows, place),
                step_sets=step_of(step_sets),
                step_rows=np.arange(num_rows),
            )
        asked_rows = chosen.sample(range(num_rows), 2)
        num_held = [NUM_TOKENS, 1 + seed % NUM_TOKENS]
        answers = kept_sets.sets(asked_rows, num_held)
        for row, number, answer in zip(asked_rows, num_held, answers, strict=True):
            expected_sets = sets_by_row[row][:number]
            assert answer.to_nested_list() == expected_sets


def test_a_step_in_which_nothing_is_recorded_leaves_empty_sets() -> None:
    kept_sets = HeldSets(NUM_TOKENS)
    kept_sets.add_rows(1)
    row = np.array([0])
    for place, ids in enumerate([[7, 8], []]):
        kept_sets.hold(
            rows=row,
            places=np.array([place]),
            step_sets=step_of([ids]),
            step_rows=row,
        )
    (answer,) = kept_sets.sets([0], [2])
    assert answer.to_nested_list() == [[7, 8], []]

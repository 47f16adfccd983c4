from __future__ import annotations

import torch
from slipstream.learner.trainer.algorithms.objectives import SequenceSums
from support.fakes.packed import micro_batch


def test_sums_and_means_run_over_the_trained_tokens_of_each_sequence() -> None:
    batch = micro_batch(
        [0.0] * 6, mask=[True, False, True, True, False, False], sequence_ids=[0, 0, 0, 1, 1, 2]
    )
    sequences = SequenceSums(batch, None)
    values = torch.tensor([1.0, 50.0, 3.0, 5.0, 60.0, 70.0])
    assert sequences.sums(values).tolist() == [4.0, 4.0, 4.0, 5.0, 5.0, 0.0]
    assert sequences.means(values).tolist() == [2.0, 2.0, 2.0, 5.0, 5.0, 0.0]


def test_sums_carry_no_gradient() -> None:
    batch = micro_batch([0.0] * 2)
    assert not SequenceSums(batch, None).sums(torch.ones(2, requires_grad=True)).requires_grad

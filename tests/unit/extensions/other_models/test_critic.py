import dataclasses

import numpy as np
import pytest
import torch
from slipstream.extensions.other_models.trainer import (
    ValueSum,
    explained_variance,
    value_loss,
)
from slipstream.learner.trainer.batches.training_sequence import MicroBatch
from support.fakes import packed


def micro_batch(old: list[float], returns: list[float], mask: list[bool]) -> MicroBatch:
    plain = packed.micro_batch([0.0] * len(mask), mask=mask, loss_weights=[7.0] * len(mask))
    estimates = {"values": torch.tensor(old), "returns": torch.tensor(returns)}
    return dataclasses.replace(plain, **estimates)


def test_the_loss_is_half_the_squared_error_of_the_trained_tokens() -> None:
    batch = micro_batch([0.0, 0.0, 0.0], [1.0, -1.0, 50.0], [True, True, False])
    values = torch.tensor([0.5, 1.0, 0.0], requires_grad=True)
    loss, sums = value_loss(values, batch, clip=0.0)
    # (0.5^2 + 2^2) / 2
    assert loss.item() == pytest.approx(2.125)
    loss.backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-0.5, 2.0, 0.0])
    assert sums.tolist() == pytest.approx([2.125, 2.0, 0.0, 1.5])
    assert not sums.requires_grad


@pytest.mark.parametrize(
    ("value", "loss", "slope", "is_clipped"),
    [
        # Within 0.2 of the old value, which is 1: as without a bound. The return is 2.
        (1.1, 0.5 * 0.9**2, -0.9, False),
        # Beyond the bound towards the return: the error at 1.2 counts, and nothing is gained.
        (1.5, 0.5 * 0.8**2, 0.0, True),
        # Beyond it away from the return: its own error counts, and pulls it back.
        (0.5, 0.5 * 1.5**2, -1.5, False),
        # The value is so far beyond the clip that its own error is larger again.
        (3.0, 0.5 * 1.0**2, 1.0, False),
    ],
)
def test_a_value_gains_nothing_beyond_its_bound(value, loss, slope, is_clipped):
    values = torch.tensor([value], requires_grad=True)
    found, sums = value_loss(values, micro_batch([1.0], [2.0], [True]), clip=0.2)
    found.backward()
    assert found.item() == pytest.approx(loss)
    assert values.grad is not None
    assert values.grad.item() == pytest.approx(slope)
    assert sums[ValueSum.CLIPPED].item() == is_clipped


def test_explained_variance_tells_perfect_values_from_a_constant() -> None:
    returns = np.array([0.0, 1.0, 2.0, 5.0], dtype=np.float32)
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(returns + 3, returns) == pytest.approx(1.0)
    assert explained_variance(np.full(4, 9.0, dtype=np.float32), returns) == 0.0
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert explained_variance(returns, np.ones(4, dtype=np.float32)) == 0.0

"""How much two changes of weights are alike."""

import math

import pytest
import torch
from slipstream.learner.trainer.weight_changes import (
    ChangeLikeness,
    WeightChange,
    Weights,
)


def weights(first: float, second: float) -> Weights:
    return {
        "first": torch.tensor([first]),
        "second": torch.tensor([[second]], dtype=torch.bfloat16),
    }


def test_a_likeness_has_the_cosine_over_all_tensors_and_both_norms() -> None:
    change = WeightChange(
        before=weights(1.0, 1.0),
        after=weights(4.0, 5.0),
    )
    original = WeightChange(
        before=weights(0.0, 2.0),
        after=weights(2.0, 2.0),
    )
    likeness = ChangeLikeness.between(change, original)
    assert likeness.norm == pytest.approx(5.0)
    assert likeness.original_norm == pytest.approx(2.0)
    assert likeness.cosine == pytest.approx(0.6)
    assert str(likeness) == "cosine 0.600000, norm 5.000e+00 for 2.000e+00"


def test_weights_that_stay_have_no_direction() -> None:
    change = WeightChange(
        before=weights(1.0, 1.0),
        after=weights(1.0, 1.0),
    )
    original = WeightChange(
        before=weights(1.0, 1.0),
        after=weights(1.0, 2.0),
    )
    likeness = ChangeLikeness.between(change, original)
    assert math.isnan(likeness.cosine)
    assert str(likeness) == "cosine none, norm 0.000e+00 for 1.000e+00"

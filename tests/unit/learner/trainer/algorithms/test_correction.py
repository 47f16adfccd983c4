from __future__ import annotations

import math

import pytest
import torch
from slipstream.core.settings.algorithm_section import CorrectionSection
from slipstream.learner.trainer.algorithms.correction import Correction, correct
from slipstream.learner.trainer.algorithms.objectives import SequenceSums
from support.fakes.packed import micro_batch

# Two sequences: ratios 1.5 and 4, and 0.5 and 0.25.
RATIOS = [1.5, 4.0, 0.5, 0.25]
IDS = [0, 0, 1, 1]


def corrected(ratios: list[float] = RATIOS, **settings) -> Correction:
    batch = micro_batch([-1.0] * len(ratios), sequence_ids=IDS)
    policy = torch.tensor([-1.0 + math.log(ratio) for ratio in ratios], requires_grad=True)
    section = CorrectionSection.model_validate(settings)
    return correct(policy, batch.behavior_logprobs, section, SequenceSums(batch, None))


def test_token_weights_are_the_ratios_cut_at_the_cap() -> None:
    found = corrected(cap=2.0)
    assert found.weights.tolist() == pytest.approx([1.5, 2.0, 0.5, 0.25])
    assert found.ratios.tolist() == pytest.approx(RATIOS)
    assert found.is_capped.tolist() == [False, True, False, False]
    assert not found.weights.requires_grad


def test_sequence_weights_are_the_products_of_the_ratios_cut_at_the_cap() -> None:
    found = corrected(weight="sequence", cap=2.0)
    assert found.weights.tolist() == pytest.approx([2.0, 2.0, 0.125, 0.125])
    assert found.ratios.tolist() == pytest.approx([6.0, 6.0, 0.125, 0.125])
    assert found.is_capped.tolist() == [True, True, False, False]


def test_without_weights_every_token_counts_once() -> None:
    found = corrected(weight="none")
    assert found.weights.tolist() == [1.0] * 4
    assert not found.is_capped.any()


def test_icepop_masks_tokens_outside_the_band_and_weighs_those_within() -> None:
    found = corrected(weight="token", cap=5.0, token_band=[0.5, 3.0])
    # The ends belong to the band.
    assert found.weights.tolist() == pytest.approx([1.5, 0.0, 0.5, 0.0])
    assert found.is_token_masked.tolist() == [False, True, False, True]
    assert not found.is_sequence_masked.any()


def test_geometric_mask_leaves_whole_sequences_out() -> None:
    # Geometric means sqrt(6) = 2.45 and sqrt(1/8) = 0.35.
    found = corrected(weight="none", sequence_band=[0.3, 2.0])
    assert found.weights.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert found.is_sequence_masked.tolist() == [True, True, False, False]
    found = corrected(weight="none", sequence_band=[0.4, 2.5])
    assert found.weights.tolist() == [1.0, 1.0, 0.0, 0.0]


def test_masks_and_weights_combine() -> None:
    found = corrected(weight="token", cap=2.0, token_band=[0.4, 9.0], sequence_band=[0.3, 2.0])
    assert found.weights.tolist() == pytest.approx([0.0, 0.0, 0.5, 0.0])


@pytest.mark.parametrize("weight", ["none", "token", "sequence"])
@pytest.mark.parametrize("delta", [-1e3, 1e3])
def test_log_ratios_of_any_size_give_finite_weights(weight: str, delta: float) -> None:
    batch = micro_batch([0.0] * 4, sequence_ids=IDS)
    section = CorrectionSection(weight=weight, cap=1e9, sequence_band=(0.0, 1e9))
    found = correct(
        torch.full((4,), delta), batch.behavior_logprobs, section, SequenceSums(batch, None)
    )
    assert torch.isfinite(found.weights).all()
    if weight != "none":
        assert found.ratios.tolist() == pytest.approx([math.exp(math.copysign(20, delta))] * 4)

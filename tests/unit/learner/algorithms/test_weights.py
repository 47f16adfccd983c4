import dataclasses
import math

import pytest
import torch
from slipstream.learner.algorithms.inputs import TokenWeights
from support.fakes.packed import algorithm, loss_inputs, weights_of

# Two sequences: ratios 1.5 and 4, and 0.5 and 0.25.
RATIOS = [1.5, 4.0, 0.5, 0.25]
IDS = [0, 0, 1, 1]


def corrected(log_ratios: list[float] | None = None, weight: str = "token", **args) -> TokenWeights:
    gaps = [math.log(ratio) for ratio in RATIOS] if log_ratios is None else log_ratios
    proximal = torch.tensor([-1.0 + gap for gap in gaps])
    policy = torch.full((4,), 9.0, requires_grad=True)
    tokens = loss_inputs(policy, proximal, behavior=torch.full((4,), -1.0), sequence_ids=IDS)
    return weights_of(algorithm(weight=weight, weight_args=args), tokens)


def test_token_weights_are_the_ratios_cut_at_the_cap() -> None:
    found = corrected(cap=2.0)
    assert found.weights.tolist() == pytest.approx([1.5, 2.0, 0.5, 0.25])
    assert found.reports["importance_ratio_max"].tolist() == pytest.approx(RATIOS)
    assert found.reports["importance_capped_fraction"].tolist() == [False, True, False, False]
    assert not found.weights.requires_grad


def test_sequence_weights_are_the_products_of_the_ratios_cut_at_the_cap() -> None:
    found = corrected(weight="sequence", cap=2.0)
    assert found.weights.tolist() == pytest.approx([2.0, 2.0, 0.125, 0.125])
    assert found.reports["importance_ratio_max"].tolist() == pytest.approx([6.0, 6.0, 0.125, 0.125])
    assert found.reports["importance_capped_fraction"].tolist() == [True, True, False, False]


def test_without_weights_every_token_counts_once() -> None:
    found = corrected(weight="none")
    assert found.weights.tolist() == [1.0] * 4
    assert not found.reports


def test_icepop_masks_tokens_outside_the_band_and_weighs_those_within() -> None:
    found = corrected(weight="token", cap=5.0, token_band=[0.5, 3.0])
    # The ends belong to the band.
    assert found.weights.tolist() == pytest.approx([1.5, 0.0, 0.5, 0.0])
    assert found.reports["masked_token_fraction"].tolist() == [False, True, False, True]
    assert "masked_sequence_fraction" not in found.reports


def test_masks_and_weights_combine() -> None:
    found = corrected(weight="token", cap=2.0, token_band=[0.4, 9.0], sequence_band=[0.3, 2.0])
    assert found.weights.tolist() == pytest.approx([0.0, 0.0, 0.5, 0.0])


@pytest.mark.parametrize("weight", ["none", "token", "sequence"])
@pytest.mark.parametrize("delta", [-1e3, 1e3])
def test_log_ratios_of_any_size_give_finite_weights(weight: str, delta: float) -> None:
    cap = {} if weight == "none" else {"cap": 1e9}
    found = corrected([delta] * 4, weight, sequence_band=[0.0, 1e9], **cap)
    assert torch.isfinite(found.weights).all()
    if weight != "none":
        ratios = found.reports["importance_ratio_max"].tolist()
        assert ratios == pytest.approx([math.exp(math.copysign(20, delta))] * 4)


def test_weights_may_lead_to_the_present_policy_but_not_at_given_tokens() -> None:
    policy, behavior = torch.tensor([math.log(1.5), math.log(3.0)]), torch.zeros(2)
    tokens = loss_inputs(policy, torch.full((2,), 7.0), behavior=behavior)
    given = dataclasses.replace(tokens, is_given=torch.tensor([False, True]))
    found = weights_of(algorithm(weight_args={"to": "present"}), given)
    assert found.weights.tolist() == pytest.approx([1.5, 1.0])

import dataclasses
import math

import pytest
import torch
from slipstream.core.errors import RunFailed
from slipstream.learner.algorithms import losses
from slipstream.learner.algorithms.inputs import LossInputs, SequenceSums, TokenWeights
from slipstream.learner.algorithms.losses import kl_estimate, top_k_divergence
from support.fakes.packed import algorithm, loss_inputs, terms_of, weights_of
from torch import Tensor

ESTIMATORS = ("k1", "k2", "k3")


def test_k3_of_policies_that_hardly_differ_is_not_lost_in_rounding() -> None:
    policy = torch.linspace(-3.0, -0.5, 100)
    reference = policy + 1e-4
    # r^2 / 2 + r^3 / 6, of what the numbers really are apart.
    log_ratio = (reference - policy).double()
    expected = log_ratio.square() / 2 + log_ratio**3 / 6
    estimate = kl_estimate(policy, reference, "k3")
    torch.testing.assert_close(estimate.double(), expected, rtol=1e-2, atol=0.0)
    assert (estimate > 0).all()


def softmax_policies() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(6, dtype=torch.float64).log_softmax(-1)
    return logits, reference


def gradient(value: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(value, logits)
    return gradient


@pytest.mark.parametrize("delta", [-1e3, 1e3])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_log_ratios_of_any_size_give_finite_estimates(estimator, delta: float) -> None:
    policy = torch.tensor([delta], requires_grad=True)
    estimate = kl_estimate(policy, torch.zeros(1), estimator)
    estimate.sum().backward()
    assert torch.isfinite(estimate).all()
    assert policy.grad is not None and torch.isfinite(policy.grad).all()


@pytest.mark.parametrize("estimator", ["forward_top_k", "reverse_top_k"])
def test_all_tokens_but_one_give_the_divergence_of_the_whole_vocabulary(
    estimator,
) -> None:
    logits, reference = softmax_policies()
    policy = logits.log_softmax(-1)
    divergence = top_k_divergence(policy[None, :-1], reference[None, :-1], estimator)
    likelier, other = (
        (reference, policy) if estimator == "forward_top_k" else (policy, reference)
    )
    expected = (likelier.exp() * (likelier - other)).sum()
    assert divergence.item() == pytest.approx(expected.item(), abs=1e-9)
    (ours,) = torch.autograd.grad(divergence.sum(), logits, retain_graph=True)
    torch.testing.assert_close(ours, gradient(expected, logits))


@pytest.mark.parametrize("estimator", ["forward_top_k", "reverse_top_k"])
def test_certain_policies_and_references_give_finite_divergences_and_gradients(
    estimator,
) -> None:
    for policy, reference in (
        ([0.0, -60.0], [-0.7, -0.7]),
        ([-40.0, -50.0], [0.0, -9999.0]),
    ):
        values = torch.tensor([policy], requires_grad=True)
        divergence = top_k_divergence(values, torch.tensor([reference]), estimator)
        assert divergence.isfinite().all()
        assert gradient(divergence.sum(), values).isfinite().all()


LOSSES = ("ppo", "gspo", "cispo", "sapo", "reinforce")


def slope(values: Tensor, policy: Tensor) -> list[float]:
    return gradient(values.sum(), policy).tolist()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.1, 1.0, -1.1, -1.1, ""),
        (1.5, 1.0, -1.3, 0.0, "high"),
        (1.5, -1.0, 1.5, 1.5, ""),
        (0.5, 1.0, -0.5, -0.5, ""),
        (0.5, -1.0, 0.8, 0.0, "low"),
        (5.0, -1.0, 3.0, 0.0, "dual"),
        (5.0, 1.0, -1.3, 0.0, "high"),
        (2.9, -2.0, 5.8, 5.8, ""),
    ],
)
def test_ppo_clips_the_side_that_would_gain_and_bounds_the_other(
    ratio: float, advantage: float, loss: float, gradient: float, clipped: str
) -> None:
    policy = torch.tensor([-1.0 + math.log(ratio)], requires_grad=True)
    settings = algorithm(
        loss_args={"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0}
    )
    tokens = loss_inputs(policy, torch.tensor([-1.0]), torch.tensor([advantage]))
    terms = terms_of(settings, tokens)
    assert terms.losses.item() == pytest.approx(loss)
    assert slope(terms.losses, policy) == pytest.approx([gradient])
    marks = {name: mark.item() for name, mark in terms.reports.items()}
    assert marks == {
        "clip_fraction": clipped in ("low", "high"),
        "clip_fraction_low": clipped == "low",
        "clip_fraction_high": clipped == "high",
        "dual_clip_fraction": clipped == "dual",
    }


def test_cispo_cuts_the_weight_and_keeps_the_gradient() -> None:
    policy = torch.tensor(
        [math.log(1.1), math.log(4), math.log(0.1)], requires_grad=True
    )
    advantages = torch.tensor([1.0, 2.0, -1.0])
    terms = losses.cispo(
        loss_inputs(policy, torch.zeros(3), advantages), clip_low=0.5, clip_high=1.0
    )
    assert slope(terms.losses, policy) == pytest.approx([-1.1, -2 * 2.0, 0.5])
    assert terms.losses.tolist() == pytest.approx(
        [-1.1 * math.log(1.1), -4 * math.log(4), 0.5 * math.log(0.1)]
    )
    assert terms.reports["clip_fraction_high"].tolist() == [False, True, False]
    assert terms.reports["clip_fraction_low"].tolist() == [False, False, True]


@pytest.mark.parametrize("delta", [-1e3, 1e3])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("loss", LOSSES)
def test_log_ratios_of_any_size_give_finite_losses_and_gradients(
    loss, advantage, delta
):
    policy = torch.tensor([delta, delta], requires_grad=True)
    tokens = loss_inputs(policy, torch.zeros(2), torch.full((2,), advantage))
    terms = terms_of(algorithm(loss=loss), tokens)
    terms.losses.sum().backward()
    assert torch.isfinite(terms.losses).all()
    assert policy.grad is not None and torch.isfinite(policy.grad).all()


def test_sums_and_means_run_over_the_trained_tokens_of_each_sequence() -> None:
    mask = torch.tensor([True, False, True, True, False, False])
    sequences = SequenceSums(torch.tensor([0, 0, 0, 1, 1, 2]), mask, 3)
    values = torch.tensor([1.0, 50.0, 3.0, 5.0, 60.0, 70.0])
    assert sequences.sums(values).tolist() == [4.0, 4.0, 4.0, 5.0, 5.0, 0.0]
    assert sequences.means(values).tolist() == [2.0, 2.0, 2.0, 5.0, 5.0, 0.0]


# Two sequences: ratios 1.5 and 4, and 0.5 and 0.25.
RATIOS = [1.5, 4.0, 0.5, 0.25]
IDS = [0, 0, 1, 1]


def corrected(
    log_ratios: list[float] | None = None, weight: str = "token", **args
) -> TokenWeights:
    gaps = [math.log(ratio) for ratio in RATIOS] if log_ratios is None else log_ratios
    proximal = torch.tensor([-1.0 + gap for gap in gaps])
    policy = torch.full((4,), 9.0, requires_grad=True)
    tokens = loss_inputs(
        policy, proximal, behavior=torch.full((4,), -1.0), sequence_ids=IDS
    )
    return weights_of(algorithm(weight=weight, weight_args=args), tokens)


def test_token_weights_are_the_ratios_cut_at_the_cap() -> None:
    weights = corrected(cap=2.0)
    assert weights.weights.tolist() == pytest.approx([1.5, 2.0, 0.5, 0.25])
    assert weights.reports["importance_ratio_max"].tolist() == pytest.approx(RATIOS)
    assert weights.reports["importance_capped_fraction"].tolist() == [
        False,
        True,
        False,
        False,
    ]
    assert not weights.weights.requires_grad


def test_sequence_weights_are_the_products_of_the_ratios_cut_at_the_cap() -> None:
    weights = corrected(weight="sequence", cap=2.0)
    assert weights.weights.tolist() == pytest.approx([2.0, 2.0, 0.125, 0.125])
    assert weights.reports["importance_ratio_max"].tolist() == pytest.approx(
        [6.0, 6.0, 0.125, 0.125]
    )
    assert weights.reports["importance_capped_fraction"].tolist() == [
        True,
        True,
        False,
        False,
    ]


def test_icepop_masks_tokens_outside_the_band_and_weighs_those_within() -> None:
    weights = corrected(weight="token", cap=5.0, token_band=[0.5, 3.0])
    # The ends belong to the band.
    assert weights.weights.tolist() == pytest.approx([1.5, 0.0, 0.5, 0.0])
    assert weights.reports["masked_token_fraction"].tolist() == [
        False,
        True,
        False,
        True,
    ]
    assert "masked_sequence_fraction" not in weights.reports


@pytest.mark.parametrize("weight", ["none", "token", "sequence"])
@pytest.mark.parametrize("delta", [-1e3, 1e3])
def test_log_ratios_of_any_size_give_finite_weights(weight: str, delta: float) -> None:
    cap = {} if weight == "none" else {"cap": 1e9}
    weights = corrected([delta] * 4, weight, sequence_band=[0.0, 1e9], **cap)
    assert torch.isfinite(weights.weights).all()
    if weight != "none":
        ratios = weights.reports["importance_ratio_max"].tolist()
        assert ratios == pytest.approx([math.exp(math.copysign(20, delta))] * 4)


def test_weights_may_lead_to_the_present_policy_but_not_at_given_tokens() -> None:
    policy = torch.tensor([math.log(1.5), math.log(3.0)])
    behavior = torch.zeros(2)
    tokens = loss_inputs(policy, torch.full((2,), 7.0), behavior=behavior)
    tokens_given = dataclasses.replace(tokens, is_given=torch.tensor([False, True]))
    weights = weights_of(algorithm(weight_args={"to": "present"}), tokens_given)
    assert weights.weights.tolist() == pytest.approx([1.5, 1.0])


def test_cispo_has_no_lower_bound_with_a_clip_of_one() -> None:
    policy = torch.tensor([-9.0], requires_grad=True)
    terms = losses.cispo(
        loss_inputs(policy, torch.zeros(1)), clip_low=1.0, clip_high=1.0
    )
    assert slope(terms.losses, policy) == pytest.approx([-math.exp(-9)])
    assert not terms.reports["clip_fraction_low"].any()


def test_masks_and_weights_combine() -> None:
    weights = corrected(
        weight="token", cap=2.0, token_band=[0.4, 9.0], sequence_band=[0.3, 2.0]
    )
    assert weights.weights.tolist() == pytest.approx([0.0, 0.0, 0.5, 0.0])


def split_tokens() -> LossInputs:
    """Seven tokens of two sequences, one of them given, whose three policies differ."""
    torch.manual_seed(2)
    behavior = -torch.rand(7, dtype=torch.float64) - 0.5
    versions = behavior + 0.3 * torch.randn(7, dtype=torch.float64)
    proximal = versions + 0.5 * torch.randn(7, dtype=torch.float64)
    is_given = torch.arange(7) == 6
    behavior = torch.where(is_given, proximal, behavior)
    versions = torch.where(is_given, proximal, versions)
    tokens = loss_inputs(
        proximal + 0.1,
        proximal,
        behavior=behavior,
        versions=versions,
        sequence_ids=[0, 0, 0, 0, 1, 1, 1],
    )
    return dataclasses.replace(tokens, is_given=is_given)


@pytest.mark.parametrize("to", ["proximal", "present"])
def test_factors_without_bounds_are_the_whole_ratio(to: str) -> None:
    tokens = split_tokens()
    unbounded = {"engine_cap": 1e9, "staleness_cap": 1e9, "to": to}
    split = weights_of(algorithm(weight="split", weight_args=unbounded), tokens).weights
    token = weights_of(
        algorithm(weight="token", weight_args={"cap": 1e9, "to": to}), tokens
    )
    torch.testing.assert_close(split, token.weights, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("name", ["engine", "staleness"])
def test_each_factor_has_bounds_of_its_own(name: str) -> None:
    tokens = split_tokens()
    versions = tokens.version_logprobs
    assert versions is not None
    log_ratios = {
        "engine": versions - tokens.behavior_logprobs,
        "staleness": tokens.proximal_logprobs - versions,
    }
    (other,) = log_ratios.keys() - {name}
    arguments = {
        f"{other}_cap": 1e9,
        f"{name}_cap": 1.1,
        f"{name}_token_band": [0.7, 1.5],
        f"{name}_sequence_band": [0.95, 2.0],
    }
    result = weights_of(algorithm(weight="split", weight_args=arguments), tokens)
    expected = []
    for places in ([0, 1, 2, 3], [4, 5, 6]):
        mean = math.exp(
            sum(float(log_ratios[name][place]) for place in places) / len(places)
        )
        for place in places:
            ratio = math.exp(float(log_ratios[name][place]))
            factor = min(ratio, 1.1) * (0.7 <= ratio <= 1.5) * (0.95 <= mean <= 2.0)
            expected.append(factor * math.exp(float(log_ratios[other][place])))
    assert result.weights.tolist() == pytest.approx(expected, rel=1e-12)
    # Some are outside and some inside of each bound, or it would not be tried.
    assert 0 < result.reports[f"{name}_capped_fraction"].sum() < 7
    assert 0 < result.reports[f"{name}_masked_token_fraction"].sum() < 7
    assert 0 < result.reports[f"{name}_masked_sequence_fraction"].sum() < 7
    gaps = log_ratios[name].abs().tolist()
    assert result.reports[f"{name}_gap_max"].tolist() == pytest.approx(gaps)
    assert f"{other}_masked_token_fraction" not in result.reports


def test_a_token_counts_as_capped_if_either_factor_is() -> None:
    tokens = split_tokens()
    caps = {"engine_cap": 1.05, "staleness_cap": 1.3}
    reports = weights_of(algorithm(weight="split", weight_args=caps), tokens).reports
    by_engine = reports["engine_capped_fraction"]
    by_lag = reports["staleness_capped_fraction"]
    # Each caps a token that the other does not.
    assert (by_engine & ~by_lag).any()
    assert (by_lag & ~by_engine).any()
    assert torch.equal(reports["importance_capped_fraction"], by_engine | by_lag)


def test_a_split_without_scores_by_versions_is_a_fault() -> None:
    tokens = dataclasses.replace(split_tokens(), version_logprobs=None)
    with pytest.raises(
        RunFailed, match="no log-probabilities by the versions that sampled"
    ):
        weights_of(algorithm(weight="split"), tokens)

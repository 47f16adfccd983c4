import math

import pytest
import torch
from slipstream.learner.algorithms import losses
from slipstream.learner.algorithms.inputs import SequenceSums
from support.fakes.packed import algorithm, loss_inputs, terms_of
from torch import Tensor

LOSSES = ("ppo", "gspo", "cispo", "sapo", "reinforce")


def slope(values: Tensor, policy: Tensor) -> list[float]:
    (found,) = torch.autograd.grad(values.sum(), policy)
    return found.tolist()


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
    settings = algorithm(loss_args={"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0})
    tokens = loss_inputs(policy, torch.tensor([-1.0]), torch.tensor([advantage]))
    found = terms_of(settings, tokens)
    assert found.losses.item() == pytest.approx(loss)
    assert slope(found.losses, policy) == pytest.approx([gradient])
    marks = {name: mark.item() for name, mark in found.reports.items()}
    assert marks == {
        "clip_fraction": clipped in ("low", "high"),
        "clip_fraction_low": clipped == "low",
        "clip_fraction_high": clipped == "high",
        "dual_clip_fraction": clipped == "dual",
    }


def test_without_dual_clip_the_loss_of_a_negative_advantage_has_no_bound() -> None:
    found = losses.ppo(loss_inputs(torch.tensor([5.0]).log(), torch.zeros(1), -torch.ones(1)))
    assert found.losses.item() == pytest.approx(5.0)
    assert "dual_clip_fraction" not in found.reports


def test_gspo_takes_the_geometric_mean_of_a_sequence_for_all_its_tokens() -> None:
    # Ratios 2 and 1/8 of one sequence: sqrt(1/4) = 0.5; and 3 of another.
    policy = torch.tensor([math.log(2), -math.log(8), math.log(3)], requires_grad=True)
    tokens = loss_inputs(policy, torch.zeros(3), -torch.ones(3), sequence_ids=[0, 0, 1])
    found = losses.gspo(tokens, clip_low=1.0, clip_high=9.0).losses
    assert found.tolist() == pytest.approx([0.5, 0.5, 3.0])


def test_cispo_cuts_the_weight_and_keeps_the_gradient() -> None:
    policy = torch.tensor([math.log(1.1), math.log(4), math.log(0.1)], requires_grad=True)
    advantages = torch.tensor([1.0, 2.0, -1.0])
    found = losses.cispo(
        loss_inputs(policy, torch.zeros(3), advantages), clip_low=0.5, clip_high=1.0
    )
    assert slope(found.losses, policy) == pytest.approx([-1.1, -2 * 2.0, 0.5])
    assert found.losses.tolist() == pytest.approx(
        [-1.1 * math.log(1.1), -4 * math.log(4), 0.5 * math.log(0.1)]
    )
    assert found.reports["clip_fraction_high"].tolist() == [False, True, False]
    assert found.reports["clip_fraction_low"].tolist() == [False, False, True]


def test_cispo_has_no_lower_bound_with_a_clip_of_one() -> None:
    policy = torch.tensor([-9.0], requires_grad=True)
    found = losses.cispo(loss_inputs(policy, torch.zeros(1)), clip_low=1.0, clip_high=1.0)
    assert slope(found.losses, policy) == pytest.approx([-math.exp(-9)])
    assert not found.reports["clip_fraction_low"].any()


def test_reinforce_is_the_policy_gradient() -> None:
    policy = torch.tensor([-2.0, -3.0], requires_grad=True)
    found = losses.reinforce(loss_inputs(policy, policy.detach(), torch.tensor([0.5, -1.0])))
    assert found.tolist() == [1.0, -3.0]
    assert slope(found, policy) == [-0.5, 1.0]


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_has_the_policy_gradient_at_ratio_one(loss: str) -> None:
    """The gradient is minus the advantage if the policy is the anchor: signs and scales agree."""
    policy = torch.tensor([-2.0, -0.5, -1.0], requires_grad=True)
    advantages = torch.tensor([1.5, -0.5, 0.0])
    found = terms_of(algorithm(loss=loss), loss_inputs(policy, policy.detach(), advantages))
    assert slope(found.losses, policy) == pytest.approx([-1.5, 0.5, 0.0])


@pytest.mark.parametrize("delta", [-1e3, 1e3])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("loss", LOSSES)
def test_log_ratios_of_any_size_give_finite_losses_and_gradients(loss, advantage, delta):
    policy = torch.tensor([delta, delta], requires_grad=True)
    tokens = loss_inputs(policy, torch.zeros(2), torch.full((2,), advantage))
    found = terms_of(algorithm(loss=loss), tokens)
    found.losses.sum().backward()
    assert torch.isfinite(found.losses).all()
    assert policy.grad is not None
    assert torch.isfinite(policy.grad).all()


def test_sums_and_means_run_over_the_trained_tokens_of_each_sequence() -> None:
    mask = torch.tensor([True, False, True, True, False, False])
    sequences = SequenceSums(torch.tensor([0, 0, 0, 1, 1, 2]), mask, 3)
    values = torch.tensor([1.0, 50.0, 3.0, 5.0, 60.0, 70.0])
    assert sequences.sums(values).tolist() == [4.0, 4.0, 4.0, 5.0, 5.0, 0.0]
    assert sequences.means(values).tolist() == [2.0, 2.0, 2.0, 5.0, 5.0, 0.0]


def test_sums_carry_no_gradient() -> None:
    tokens = loss_inputs(torch.zeros(2), torch.zeros(2))
    assert not tokens.sequences.sums(torch.ones(2, requires_grad=True)).requires_grad

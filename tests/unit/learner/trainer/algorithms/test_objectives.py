from __future__ import annotations

import math

import pytest
import torch
from slipstream.learner.trainer.algorithms.objectives import (
    SequenceSums,
    cispo_losses,
    clipped_losses,
    reinforce_losses,
    sapo_losses,
    sequence_ratio,
    token_losses,
)
from support.fakes.packed import algorithm, micro_batch
from torch import Tensor

LOSSES = ("ppo", "gspo", "cispo", "sapo", "reinforce")


def sums(number: int, sequence_ids: list[int] | None = None) -> SequenceSums:
    return SequenceSums(micro_batch([0.0] * number, sequence_ids=sequence_ids), None)


def slope(losses: Tensor, policy: Tensor) -> list[float]:
    (found,) = torch.autograd.grad(losses.sum(), policy)
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
    settings = algorithm(clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    found = token_losses(policy, torch.tensor([-1.0]), torch.tensor([advantage]), settings, sums(1))
    assert found.losses.item() == pytest.approx(loss)
    assert slope(found.losses, policy) == pytest.approx([gradient])
    assert found.is_clipped_low.item() == (clipped == "low")
    assert found.is_clipped_high.item() == (clipped == "high")
    assert found.is_dual_clipped.item() == (clipped == "dual")


def test_without_dual_clip_the_loss_of_a_negative_advantage_has_no_bound() -> None:
    found = clipped_losses(torch.tensor([5.0]), torch.tensor([-1.0]), 0.2, 0.2)
    assert found.losses.tolist() == [5.0]
    assert not found.is_dual_clipped.any()


def test_gspo_takes_the_geometric_mean_of_a_sequence_for_all_its_tokens() -> None:
    # Ratios 2 and 1/8 of one sequence: sqrt(1/4) = 0.5; and 3 of another.
    policy = torch.tensor([math.log(2), -math.log(8), math.log(3)], requires_grad=True)
    found = sequence_ratio(policy, torch.zeros(3), sums(3, [0, 0, 1]))
    assert found.tolist() == pytest.approx([0.5, 0.5, 3.0])


def test_gspo_has_value_and_gradient_of_the_sequence_loss_of_its_paper() -> None:
    """Mean over sequences of -min(s A, clip(s) A) with s = exp(mean log ratio)."""
    torch.manual_seed(0)
    policy = (0.3 * torch.randn(7, dtype=torch.float64)).requires_grad_()
    ids, lengths = [0, 0, 0, 1, 1, 2, 2], [3, 2, 2]
    advantage = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    settings = algorithm(loss="gspo", clip_low=0.05, clip_high=0.1, aggregation="sequence_mean")
    found = token_losses(policy, torch.zeros(7), advantage[ids], settings, sums(7, ids)).losses
    weights = torch.tensor([1 / lengths[i] for i in ids], dtype=torch.float64)
    expected = torch.zeros((), dtype=torch.float64)
    for i, part in enumerate(policy.split(lengths)):
        ratio = part.mean().exp()
        clipped = ratio.clamp(0.95, 1.1)
        expected = expected - torch.minimum(ratio * advantage[i], clipped * advantage[i])
    assert (found * weights).sum().item() == pytest.approx(expected.item())
    assert slope(found * weights, policy) == pytest.approx(slope(expected, policy))


def test_cispo_cuts_the_weight_and_keeps_the_gradient() -> None:
    policy = torch.tensor([math.log(1.1), math.log(4), math.log(0.1)], requires_grad=True)
    advantages = torch.tensor([1.0, 2.0, -1.0])
    found = cispo_losses(policy, torch.zeros(3), advantages, 0.5, 1.0)
    assert slope(found.losses, policy) == pytest.approx([-1.1, -2 * 2.0, 0.5])
    assert found.losses.tolist() == pytest.approx(
        [-1.1 * math.log(1.1), -4 * math.log(4), 0.5 * math.log(0.1)]
    )
    assert found.is_clipped_high.tolist() == [False, True, False]
    assert found.is_clipped_low.tolist() == [False, False, True]


def test_cispo_has_no_lower_bound_with_a_clip_of_one() -> None:
    policy = torch.tensor([-9.0], requires_grad=True)
    found = cispo_losses(policy, torch.zeros(1), torch.ones(1), 1.0, 1.0)
    assert slope(found.losses, policy) == pytest.approx([-math.exp(-9)])
    assert not found.is_clipped_low.any()


def test_sapo_is_the_policy_gradient_at_ratio_one_and_fades_away_from_it() -> None:
    ratio = torch.tensor([1.0, 3.0, 1.0, 3.0], requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -2.0, -2.0])
    found = sapo_losses(ratio, advantages, 1.0, 2.0)
    sigmoid_2, sigmoid_4 = 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(-4))
    assert found.tolist() == pytest.approx([-2.0, -4 * sigmoid_2, 2.0, 4 * sigmoid_4])
    faded = [4 * sigmoid_2 * (1 - sigmoid_2), 4 * sigmoid_4 * (1 - sigmoid_4)]
    assert slope(found, ratio) == pytest.approx([-1.0, -faded[0], 2.0, 2 * faded[1]], rel=1e-5)


def test_reinforce_is_the_policy_gradient() -> None:
    policy = torch.tensor([-2.0, -3.0], requires_grad=True)
    found = reinforce_losses(policy, torch.tensor([0.5, -1.0]))
    assert found.tolist() == [1.0, -3.0]
    assert slope(found, policy) == [-0.5, 1.0]


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_has_the_policy_gradient_at_ratio_one(loss: str) -> None:
    """The gradient is minus the advantage if the policy is the anchor: signs and scales agree."""
    policy = torch.tensor([-2.0, -0.5, -1.0], requires_grad=True)
    advantages = torch.tensor([1.5, -0.5, 0.0])
    found = token_losses(policy, policy.detach(), advantages, algorithm(loss=loss), sums(3))
    assert slope(found.losses, policy) == pytest.approx([-1.5, 0.5, 0.0])


@pytest.mark.parametrize("loss", ["ppo", "sapo", "reinforce"])
def test_gradients_are_those_of_the_values(loss: str) -> None:
    # Away from the corners at ratios 0.8, 1.2 and 3.
    policy = torch.tensor([0.1, 0.5, -0.1, -0.7, 1.4, 1.4], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, 2.0, -1.0, -2.0, -1.0, 1.0], dtype=torch.float64)
    settings = algorithm(loss=loss, **({"dual_clip": 3.0} if loss == "ppo" else {}))
    anchor = torch.zeros(6, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda p: token_losses(p, anchor, advantages, settings, sums(6)).losses, policy
    )


@pytest.mark.parametrize("delta", [-1e3, 1e3])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("loss", LOSSES)
def test_log_ratios_of_any_size_give_finite_losses_and_gradients(
    loss: str, advantage: float, delta: float
) -> None:
    policy = torch.tensor([delta, delta], requires_grad=True)
    found = token_losses(
        policy, torch.zeros(2), torch.full((2,), advantage), algorithm(loss=loss), sums(2)
    )
    found.losses.sum().backward()
    assert torch.isfinite(found.losses).all()
    assert policy.grad is not None
    assert torch.isfinite(policy.grad).all()


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

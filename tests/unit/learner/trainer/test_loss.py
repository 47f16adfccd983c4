from __future__ import annotations

import math

import pytest
import torch
from slipstream.learner.trainer.loss import Objective, Sum, clipped_loss
from slipstream.learner.trainer.packing import MicroBatch
from torch import Tensor

USUAL = Objective(clip_low=0.2, clip_high=0.2, importance_cap=2.0)


def micro_batch(
    behavior: list[float], advantages: list[float], mask: list[bool], lags: list[int] | None = None
) -> MicroBatch:
    number = len(mask)
    nothing = torch.zeros(number, dtype=torch.int64)
    return MicroBatch(
        token_ids=nothing,
        position_ids=nothing,
        targets=nothing,
        loss_mask=torch.tensor(mask),
        loss_weights=torch.ones(number),
        advantages=torch.tensor(advantages),
        behavior_logprobs=torch.tensor(behavior),
        lags=torch.tensor(lags or [0] * number),
        sequence_ids=nothing,
        cu_seqlens=torch.tensor([0, number], dtype=torch.int32),
        max_seqlen=number,
        indices=(0,),
    )


def test_first_mini_batch_weighs_the_policy_gradient_by_the_truncated_importance_weight() -> None:
    # exp(log 1.5) = 1.5 is kept; exp(log 4) = 4 is cut to 2; the third token is context.
    behavior = [-1.0 - math.log(1.5), -1.0 - math.log(4), 0.0]
    policy = torch.full((3,), -1.0, requires_grad=True)
    batch = micro_batch(behavior, [2.0, -1.0, 9.0], [True, True, False], [0, 1, 0])
    found = clipped_loss(policy, torch.ones(3), None, batch, USUAL)
    assert found.loss.item() == pytest.approx(-(1.5 * 2.0 + 2.0 * -1.0))
    found.loss.backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([-3.0, 2.0, 0.0])
    assert found.num_tokens.item() == 2
    sums = found.sums.tolist()
    assert sums[Sum.LOSS] == pytest.approx(-1.0)
    assert sums[Sum.TOKENS] == 2
    assert sums[Sum.ENTROPY] == 2
    assert sums[Sum.CLIPPED] == 0
    assert sums[Sum.WEIGHT] == pytest.approx(3.5)
    assert sums[Sum.CAPPED] == 1
    assert sums[Sum.KL] == pytest.approx(0.5 - math.log(1.5) + 3 - math.log(4))
    assert sums[Sum.GAP] == pytest.approx(math.log(1.5))
    assert sums[Sum.GAP_TOKENS] == 1
    assert found.max_gap.item() == pytest.approx(math.log(1.5))


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "slope", "is_clipped"),
    [
        (math.log(1.1), 1.0, -1.1, -1.1, 0),
        (math.log(1.5), 1.0, -1.2, 0.0, 1),
        (math.log(1.5), -1.0, 1.5, 1.5, 0),
        (math.log(0.5), 1.0, -0.5, -0.5, 0),
        (math.log(0.5), -1.0, 0.8, 0.0, 1),
    ],
)
def test_later_mini_batch_clips_the_ratio_on_the_side_that_would_gain(
    log_ratio: float, advantage: float, loss: float, slope: float, is_clipped: int
) -> None:
    policy = torch.tensor([-1.0 + log_ratio], requires_grad=True)
    batch = micro_batch([-1.0], [advantage], [True])
    found = clipped_loss(policy, torch.ones(1), torch.tensor([-1.0]), batch, USUAL)
    found.loss.backward()
    assert found.loss.item() == pytest.approx(loss)
    assert policy.grad is not None
    assert policy.grad.item() == pytest.approx(slope)
    assert found.sums[Sum.CLIPPED] == is_clipped


def test_clip_range_may_be_wider_above_than_below() -> None:
    policy, old = torch.tensor([math.log(1.25)]), torch.zeros(1)
    batch = micro_batch([0.0], [1.0], [True])
    wide = Objective(clip_low=0.2, clip_high=0.3, importance_cap=2.0)
    assert clipped_loss(policy, old, old, batch, wide).loss.item() == pytest.approx(-1.25)
    assert clipped_loss(policy, old, old, batch, USUAL).loss.item() == pytest.approx(-1.2)


def test_no_cap_takes_the_ratio_against_the_behavior_policy() -> None:
    policy = torch.tensor([-1.0 + math.log(1.5), -1.0], requires_grad=True)
    batch = micro_batch([-1.0, -1.0], [1.0, 1.0], [True, True])
    found = clipped_loss(policy, torch.ones(2), None, batch, Objective(0.2, 0.2, 0.0))
    found.loss.backward()
    assert found.loss.item() == pytest.approx(-1.2 - 1.0)
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([0.0, -1.0])
    assert found.sums[Sum.WEIGHT] == 2
    assert found.sums[Sum.CAPPED] == 0


@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("gap", [-1e3, 1e3])
def test_log_ratios_of_any_size_give_finite_losses_and_gradients(gap: float, cap: float) -> None:
    policy = torch.tensor([gap], requires_grad=True)
    batch = micro_batch([0.0], [-1.0], [True])
    for old in (None, torch.zeros(1)):
        found = clipped_loss(policy, torch.ones(1), old, batch, Objective(0.2, 0.2, cap))
        found.loss.backward()
        assert policy.grad is not None
        assert torch.isfinite(torch.cat([found.sums, policy.grad.double()])).all()


def test_micro_batch_without_trained_tokens_has_no_loss_and_no_gradient() -> None:
    policy = torch.tensor([-3.0, -2.0], requires_grad=True)
    batch = micro_batch([0.0, 0.0], [1.0, 1.0], [False, False])
    found = clipped_loss(policy, torch.ones(2), None, batch, USUAL)
    found.loss.backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == [0.0, 0.0]
    assert found.sums.tolist() == [0.0] * len(Sum)
    assert found.max_gap.item() == 0.0


def test_loss_and_gradient_equal_a_dense_computation_of_the_same_formula() -> None:
    torch.manual_seed(1)
    number = 200
    policy = (torch.randn(number) - 2).requires_grad_()
    old, behavior = policy.detach() + 0.3 * torch.randn(number), torch.randn(number) - 2
    advantages, mask = torch.randn(number), torch.rand(number) < 0.6
    batch = micro_batch(behavior.tolist(), advantages.tolist(), mask.tolist())
    clipped_loss(policy, torch.ones(number), old, batch, USUAL).loss.backward()
    found, policy.grad = policy.grad, None
    dense(policy, old, behavior, advantages, mask).backward()
    assert found is not None
    assert policy.grad is not None
    torch.testing.assert_close(found, policy.grad)


def dense(
    policy: Tensor, old: Tensor, behavior: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor:
    total = torch.zeros(())
    for i in mask.nonzero().flatten().tolist():
        weight = min(math.exp(old[i] - behavior[i]), 2.0)
        ratio = torch.exp(policy[i] - old[i])
        clipped = torch.clamp(ratio, 0.8, 1.2)
        total = total - weight * torch.minimum(ratio * advantages[i], clipped * advantages[i])
    return total

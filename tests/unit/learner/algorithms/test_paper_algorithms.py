"""The algorithms of deploy/algorithms are those of their papers."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from slipstream.learner.algorithms.episodes import RewardedEpisode, ScoredEpisode
from slipstream.learner.algorithms.inputs import BatchSums, LossInputs, SequenceSums

from deploy.algorithms import alp, difficulty, dppo, gmpo, maxrl

FOLDER = Path(gmpo.__file__).parent


def tokens_of(logprobs, older, advantages, ids, mask=None):
    """Tokens of sequences `ids`; `older` is the proximal and the behavior policy."""
    mask = torch.ones(len(ids), dtype=torch.bool) if mask is None else mask
    zeros = torch.zeros(len(ids), dtype=torch.int64)
    return LossInputs(
        logprobs=logprobs,
        proximal_logprobs=older,
        behavior_logprobs=older,
        advantages=advantages,
        mask=mask,
        is_given=torch.zeros_like(mask),
        lags=zeros,
        versions=zeros,
        reference_logprobs=None,
        entropy=torch.zeros(len(ids)),
        sequences=SequenceSums(torch.tensor(ids), mask, max(ids) + 1),
        batch=BatchSums(mask),
    )


def scored(group_id: str, reward: float, cost: float = 0.0) -> ScoredEpisode:
    return ScoredEpisode(group_id, reward, np.array([cost, 0.0]))


def rewarded(reward: float, *reply_tokens: int, limit: int = 100) -> RewardedEpisode:
    return RewardedEpisode(reward, {}, False, reply_tokens, limit, "sums", 0)


def test_gmpo_has_the_value_and_gradient_of_the_papers_geometric_mean() -> None:
    old = torch.tensor([-1.0, -1.2, -0.5, -2.0, -1.0, -3.0, -0.7], dtype=torch.float64)
    moved = torch.tensor([0.1, 0.9, -0.6, -0.9, 0.2, 0.7, 0.0], dtype=torch.float64)
    lengths = (3, 3, 1)
    advantages = (1.5, -2.0, 0.5)
    ids = [0, 0, 0, 1, 1, 1, 2]
    token_values = torch.tensor(advantages, dtype=torch.float64)[ids]

    ours = (old + moved).requires_grad_()
    terms = gmpo.loss(tokens_of(ours, old, token_values, ids))
    shares = 1 / (3 * torch.tensor(lengths, dtype=torch.float64)[ids])
    (terms.losses * shares).sum().backward()

    # Eq. 4 of the paper: sgn(A) times the root of the product of |min(r A, clip(r) A)|.
    theirs = (old + moved).requires_grad_()
    ratios = (theirs - old).exp()
    objectives = torch.minimum(
        ratios * token_values,
        ratios.clamp(math.exp(-0.4), math.exp(0.4)) * token_values,
    )
    roots = [
        part.abs().prod() ** (1 / length) * math.copysign(1, advantage)
        for part, length, advantage in zip(
            objectives.split(lengths), lengths, advantages, strict=True
        )
    ]
    loss = -torch.stack(roots).mean()
    loss.backward()

    assert (terms.losses * shares).sum().item() == pytest.approx(loss.item(), abs=1e-12)
    assert ours.grad is not None and theirs.grad is not None
    assert ours.grad.tolist() == pytest.approx(theirs.grad.tolist(), abs=1e-12)
    # By hand: of 0.1, 0.9 and -0.6 only 0.9 is cut with A > 0, so the mean is -0.1 / 3.
    assert terms.losses[0].item() == pytest.approx(-1.5 * math.exp(-0.1 / 3), abs=1e-12)
    assert terms.reports["gmpo_clipped"].tolist() == [0, 1, 0, 1, 0, 0, 0]


def test_gmpo_stays_finite_and_reads_no_masked_token() -> None:
    moved = torch.tensor([50.0, -50.0, 7.0], requires_grad=True)
    mask = torch.tensor([True, True, False])
    inputs = tokens_of(
        moved, torch.zeros(3), torch.tensor([-1.0, -1.0, 1.0]), [0, 0, 0], mask
    )
    losses = gmpo.loss(inputs).losses
    losses[mask].sum().backward()
    assert (
        losses.isfinite().all()
        and moved.grad is not None
        and moved.grad.isfinite().all()
    )
    # The mean of 50 and -0.4 is limited to 20.
    assert losses[:2].tolist() == pytest.approx([math.exp(20)] * 2)


def test_dppo_leaves_out_tokens_that_moved_too_far_with_their_advantage() -> None:
    policy = torch.tensor([0.5, 0.5, 0.3, 0.3, 0.02], dtype=torch.float64)
    behavior = torch.tensor([0.3, 0.3, 0.5, 0.5, 0.01], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0], dtype=torch.float64)
    logprobs = policy.log().requires_grad_()
    weights = dppo.weight(
        tokens_of(logprobs, behavior.log(), advantages, [0] * 5), bound=0.15
    )
    # PPO would clip the last one, whose ratio is 2; the total variation is only 0.01.
    assert weights.weights.tolist() == pytest.approx([0, 5 / 3, 0, 0.6, 2])
    assert weights.reports["dppo_masked"].tolist() == [1, 0, 1, 0, 0]
    assert not weights.weights.requires_grad

    (-weights.weights * advantages * logprobs).sum().backward()
    theirs = policy.log().requires_grad_()
    ratios = (theirs - behavior.log()).exp()
    mask = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0])
    (-mask * ratios * advantages).sum().backward()
    assert logprobs.grad is not None and theirs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(theirs.grad.tolist(), abs=1e-12)


def test_maxrl_divides_by_the_mean_of_the_group() -> None:
    episodes = [
        *(scored("hard", reward) for reward in (1, 0, 0, 0)),
        *(scored("easy", reward) for reward in (1, 1, 1, 0)),
        *(scored("never", 0) for _ in range(2)),
    ]
    expected = [3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1, 0, 0]
    assert maxrl.advantage(episodes).tolist() == pytest.approx(expected)
    order = [9, 4, 0, 7, 1, 8, 2, 6, 3, 5]
    mixed = maxrl.advantage([episodes[place] for place in order])
    assert mixed.tolist() == pytest.approx([expected[place] for place in order])
    assert maxrl.advantage([]).shape == (0,)


def test_maxrl_refuses_rewards_below_0() -> None:
    with pytest.raises(ValueError, match="rewards of 0 or more, got -0.5"):
        maxrl.advantage([scored("one", 1), scored("one", 0, cost=0.5)])


def test_alp_takes_more_for_a_token_of_an_easy_task() -> None:
    easy = [rewarded(1, 50), rewarded(1, 100), rewarded(1, 20, 30), rewarded(0, 10)]
    # Three of four are solved: 0.2 * 0.75 for the whole limit of 100 tokens.
    assert alp.reward(easy, beta=0.2) == pytest.approx([0.925, 0.85, 0.925, -0.015])
    hard = [rewarded(0, 100)] * 4
    assert alp.reward(hard, beta=0.2) == pytest.approx([-0.05] * 4)
    graded = [rewarded(0.6, 100), rewarded(0.4, 100)]
    assert alp.reward(graded, beta=0.2, solved_at=0.5) == pytest.approx([0.5, 0.3])
    assert alp.reward(easy, beta=0) == [1, 1, 1, 0]


@pytest.mark.parametrize(
    ("num_right", "is_kept"), [(0, False), (1, False), (2, True), (8, True), (9, False)]
)
def test_difficulty_keeps_groups_in_between(num_right: int, is_kept: bool) -> None:
    group = [rewarded(float(place < num_right), 5) for place in range(10)]
    assert difficulty.filter(group, low=0.2, high=0.8) is is_kept


def test_difficulty_leaves_out_a_group_in_which_no_episode_counts() -> None:
    assert difficulty.filter([], low=0.0, high=1.0) is False


def test_the_guide_shows_the_file_and_names_all() -> None:
    guide = (FOLDER.parents[1] / "docs" / "guides" / "own-algorithms.md").read_text()
    assert f"```python\n{Path(gmpo.__file__).read_text()}```" in guide
    assert all(f"/{path.name})" in guide for path in FOLDER.glob("*.py"))

"""Advantages, losses and corrections against verl's own code, on padded batches of its shape."""

import numpy as np
import pytest
import torch
from slipstream.learner.algorithms.advantages import token_advantages
from slipstream.learner.algorithms.episodes import ScoredEpisode
from slipstream.learner.algorithms.inputs import LossInputs
from slipstream.learner.algorithms.losses import kl_estimate
from slipstream.learner.trainer.algorithms.loss import loss_weights
from support.fakes.packed import algorithm, loss_inputs, terms_of, weights_of
from support.references.verl_formulas import ActorConfig, core_algos, rollout_correction
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore")

LENGTHS = [5, 3, 1, 4, 2, 6]
GROUPS = ["a", "a", "a", "b", "b", "b"]
WIDTH = max(LENGTHS)
MASK = torch.tensor([[float(t < length) for t in range(WIDTH)] for length in LENGTHS])
NUM_TOKENS = sum(LENGTHS)
IDS = [i for i, length in enumerate(LENGTHS) for _ in range(length)]


def padded(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def packed(matrix: Tensor) -> Tensor:
    return matrix[MASK.bool()]


def ratios(log_ratio: Tensor) -> LossInputs:
    proximal = packed(log_ratio)
    zeros = torch.zeros(NUM_TOKENS)
    return loss_inputs(zeros, proximal, behavior=zeros, sequence_ids=IDS)


def rewards() -> tuple[list[float], list[np.ndarray]]:
    random = np.random.default_rng(3)
    return random.normal(size=6).tolist(), [
        random.normal(size=n) * 0.1 for n in LENGTHS
    ]


def verl_rewards() -> Tensor:
    outcome, costs = rewards()
    rows = []
    for reward, cost in zip(outcome, costs, strict=True):
        row = torch.from_numpy(-cost)
        row[-1] += reward
        rows.append(row)
    return padded(rows)


def ours(kind: str, values: list[np.ndarray] | None = None, **settings) -> np.ndarray:
    outcome, costs = rewards()
    critic_values = values if values is not None else [None] * 6
    episodes = [
        ScoredEpisode(*parts)
        for parts in zip(GROUPS, outcome, costs, critic_values, strict=True)
    ]
    advantages = token_advantages(
        algorithm(advantage=kind, advantage_args=settings), episodes, where="a test"
    )
    return np.concatenate([advantage.advantages for advantage in advantages])


# verl divides by n - 1, we by n: of a group's members, and of all tokens.
MEMBERS = (3 / 2) ** 0.5
TOKENS = (NUM_TOKENS / (NUM_TOKENS - 1)) ** 0.5


@pytest.mark.parametrize(
    ("kind", "formula", "settings", "scale"),
    [
        ("grpo", "compute_grpo_outcome_advantage", {}, MEMBERS),
        (
            "dr_grpo",
            "compute_grpo_outcome_advantage",
            {"norm_adv_by_std_in_grpo": False},
            1,
        ),
        ("rloo", "compute_rloo_outcome_advantage", {}, 1),
        (
            "reinforce_pp_baseline",
            "compute_reinforce_plus_plus_baseline_outcome_advantage",
            {},
            TOKENS,
        ),
        (
            "reinforce_pp",
            "compute_reinforce_plus_plus_outcome_advantage",
            {"config": ActorConfig()},
            TOKENS,
        ),
    ],
)
def test_advantages_are_verls(
    kind: str, formula: str, settings: dict, scale: float
) -> None:
    arguments = (
        {} if kind == "reinforce_pp" else {"index": np.array(GROUPS, dtype=object)}
    )
    expected, _ = getattr(core_algos(), formula)(
        token_level_rewards=verl_rewards(),
        response_mask=MASK.double(),
        **arguments,
        **settings,
    )
    assert ours(kind) == pytest.approx(
        scale * packed(expected).numpy(), rel=1e-4, abs=1e-6
    )


def test_gae_is_verls() -> None:
    values = [np.random.default_rng(length).normal(size=length) for length in LENGTHS]
    expected, returns = core_algos().compute_gae_advantage_return(
        token_level_rewards=verl_rewards(),
        values=padded([torch.from_numpy(row) for row in values]),
        response_mask=MASK.double(),
        gamma=0.9,
        lam=0.8,
    )
    estimates = ours("gae", values, gamma=0.9, lam=0.8)
    assert estimates == pytest.approx(
        TOKENS * packed(expected).numpy(), rel=1e-4, abs=1e-6
    )
    raw = ours("gae", values, gamma=0.9, lam=0.8, normalize=False)
    assert raw + np.concatenate(values) == pytest.approx(packed(returns).numpy())


AGGREGATIONS = {
    "token_mean": ("token-mean", {}),
    "sequence_mean": ("seq-mean-token-mean", {}),
    "fixed": ("seq-mean-token-sum-norm", {"loss_scale_factor": 7}),
}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(
    ("loss", "settings", "name", "config"),
    [
        ("ppo", {"clip_high": 0.28}, "vanilla", {"clip_ratio_high": 0.28}),
        ("ppo", {"dual_clip": 1.5}, "vanilla", {"clip_ratio_c": 1.5}),
        ("gspo", {"clip_low": 0.1}, "gspo", {"clip_ratio_low": 0.1}),
        (
            "cispo",
            {"clip_low": 1.0, "clip_high": 0.5},
            "cispo",
            {"clip_ratio_low": 1.0, "clip_ratio_high": 0.5},
        ),
        ("sapo", {"tau_negative": 2.0}, "sapo", {"tau_neg": 2.0}),
    ],
)
def test_losses_and_gradients_are_verls(loss, settings, name, config, aggregation):
    torch.manual_seed(5)
    mode, scale = AGGREGATIONS[aggregation]
    if name == "sapo":
        # verl aggregates it in one way only.
        aggregation = "sequence_mean"
    old = torch.randn(6, WIDTH) - 3
    advantages = torch.randn(6, WIDTH)
    policy = (old + 0.5 * torch.randn(6, WIDTH)).requires_grad_()
    weights = torch.rand(6, WIDTH)
    expected, _ = core_algos().get_policy_loss_fn(name)(
        old_log_prob=old,
        log_prob=policy,
        advantages=advantages,
        response_mask=MASK,
        loss_agg_mode=mode,
        config=ActorConfig(**config, global_batch_info=scale),
        rollout_is_weights=weights,
    )
    (slope,) = torch.autograd.grad(expected, policy)
    tokens = loss_inputs(
        packed(policy), packed(old), packed(advantages), sequence_ids=IDS
    )
    parts = terms_of(algorithm(loss=loss, loss_args=settings), tokens)
    counts = loss_weights(LENGTHS, aggregation, fixed_tokens=7)
    token_counts = torch.tensor(
        [w for w, n in zip(counts, LENGTHS, strict=True) for _ in range(n)]
    )
    found = (packed(weights) * token_counts * parts.losses).sum() / NUM_TOKENS
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, policy)[0], slope)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_divergences_are_verls(estimator) -> None:
    torch.manual_seed(2)
    # verl cuts k3 at 10.
    policy = torch.rand(50) - 2
    reference = torch.rand(50) - 2
    expected = core_algos().kl_penalty(policy, reference, estimator)
    torch.testing.assert_close(kl_estimate(policy, reference, estimator), expected)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_truncated_importance_weights_are_verls(level: str) -> None:
    log_ratio = torch.randn(6, WIDTH)
    expected, _ = rollout_correction().compute_rollout_correction_weights(
        log_ratio, MASK, rollout_is=level, rollout_is_threshold=2.0
    )
    weights = weights_of(algorithm(weight=level), ratios(log_ratio))
    torch.testing.assert_close(weights.weights, packed(expected))


@pytest.mark.parametrize(
    ("ours", "verls"), [("token_band", "token_k1"), ("sequence_band", "seq_mean_k1")]
)
def test_masks_are_verls(ours: str, verls: str) -> None:
    torch.manual_seed(4)
    log_ratio = torch.randn(6, WIDTH)
    # verl's statistic is the ratio of sampler to learner: the band is upside down.
    expected, _ = rollout_correction().compute_rollout_rejection_mask(
        log_ratio, MASK, rollout_rs=verls, rollout_rs_threshold=f"{1 / 1.5}_{1 / 0.8}"
    )
    settings = algorithm(weight="none", weight_args={ours: [0.8, 1.5]})
    weights = weights_of(settings, ratios(log_ratio))
    assert 0 < expected.sum() < NUM_TOKENS
    assert weights.weights.tolist() == packed(expected).tolist()

import dataclasses
import itertools
import math
import sys
from pathlib import Path

import pytest
import torch
from slipstream.core.settings.algorithm_section import AlgorithmSection
from slipstream.learner.algorithms.columns import OF_ALL_STEPS, TAKEN
from slipstream.learner.algorithms.losses import step_columns
from slipstream.learner.trainer.algorithms.loss import (
    TokenLoss,
    policy_loss,
)
from slipstream.learner.trainer.algorithms.step_statistics import StepStatistics
from slipstream.learner.trainer.batches.training_sequence import with_tensors
from support.fakes.packed import algorithm, micro_batch
from support.references.documented_metrics import tables
from torch import Tensor

USUAL = algorithm()
COLUMNS = step_columns(USUAL, has_reference=False)
BEHAVIOR = {"loss_args": {"ratio": "behavior"}, "weight": "none"}


def loss_of(policy, batch, settings=USUAL, *, old=None, entropy=None):
    entropies = torch.ones(len(policy)) if entropy is None else entropy
    columns = step_columns(settings, has_reference=False)
    return policy_loss(policy, entropies, old, batch, [settings], columns, group=None)


def reported(values: TokenLoss, settings: AlgorithmSection) -> dict[str, float]:
    """Sums of the reports over the tokens, and of the largest ones their values."""
    columns = step_columns(settings, has_reference=False)
    sums, _, largest = values.statistics[:, len(OF_ALL_STEPS) :].tolist()
    values = zip(columns, sums, largest, strict=True)
    return {c.name: m if c.name.endswith("_max") else s for c, s, m in values}


def of_all_steps(statistics: Tensor) -> dict[str, tuple[float, float]]:
    """Sums and numbers of tokens of the columns of all steps."""
    sums, numbers, _ = statistics[:, : len(OF_ALL_STEPS)].tolist()
    return {c.name: pair for c, *pair in zip(OF_ALL_STEPS, sums, numbers, strict=True)}


def gradient(found: TokenLoss, policy: Tensor) -> list[float]:
    (values,) = torch.autograd.grad(found.loss, policy)
    return values.tolist()


@pytest.mark.parametrize("weight", ["token", "sequence", "none"])
@pytest.mark.parametrize("loss", ["reinforce", "ppo"])
def test_tokens_that_no_policy_sampled_have_a_ratio_of_one(
    weight: str, loss: str
) -> None:
    policy = torch.tensor([-1.0, -3.0], requires_grad=True)
    batch = micro_batch([math.nan, math.nan], [1.0, 0.5], lags=[0, 2])
    found = loss_of(policy, batch, algorithm(loss=loss, weight=weight))
    assert gradient(found, policy) == pytest.approx([-1.0, -0.5])
    sums = of_all_steps(found.statistics)
    of_context = ("loss", "entropy", "kl_reference", "trained_tokens")
    assert [sums.pop(name)[1] for name in of_context] == [2] * 4
    assert not any(map(any, sums.values()))


def test_statistics_are_sums_over_the_trained_tokens() -> None:
    behavior = [-1.0 - math.log(1.5), -1.0 - math.log(4), 0.0]
    policy = torch.full((3,), -1.0)
    batch = micro_batch(
        behavior,
        [2.0, -1.0, 9.0],
        [True, True, False],
        lags=[0, 9, 0],
        reference=[-2.0, -1.0, 3.0],
    )
    loss = loss_of(policy, batch)
    sums = of_all_steps(loss.statistics)
    expected = {
        "loss": [-1.0, 2],
        "trained_tokens": [2, 2],
        "entropy": [2, 2],
        "logprob_unequal_tokens": [1, 1],
        "importance_weight_mean": [3.5, 2],
        "effective_sample_size": [2.25 + 4, 2],
        "kl": [0.5 - math.log(1.5) + 3 - math.log(4), 2],
        "kl_reference": [math.exp(-1) - 1 + 1, 2],
        "logprob_gap_mean": [math.log(1.5), 1],
        "logprob_gap_max": [math.log(1.5), 1],
        "logprob_gap_tokens": [1, 1],
        "logprob_gap_lag_7": [math.log(4), 1],
    }
    assert {name: sums.pop(name) for name in expected} == {
        name: pytest.approx(pair, rel=1e-5) for name, pair in expected.items()
    }
    assert not any(map(any, sums.values()))
    largest = [column.name for column in OF_ALL_STEPS].index("logprob_gap_max")
    assert loss.statistics[2, largest] == pytest.approx(math.log(1.5))
    assert reported(loss, USUAL) == pytest.approx(
        {
            "clip_fraction": 0,
            "clip_fraction_high": 0,
            "clip_fraction_low": 0,
            "importance_capped_fraction": 1,
            "importance_ratio_max": 4,
        }
    )


def test_masks_and_clips_are_counted() -> None:
    # Ratios to the proximal policy 1.5, 0.5, 9; proximal to behavior 1, 1, 10.
    policy = torch.tensor([math.log(1.5), math.log(0.5), math.log(9)])
    batch = micro_batch(
        [0.0, 0.0, -math.log(10)], [1.0, -1.0, -1.0], sequence_ids=[0, 0, 1]
    )
    settings = algorithm(
        loss_args={"dual_clip": 3.0},
        weight_args={"token_band": [0.5, 1.9], "sequence_band": [0.5, 9.0]},
    )
    loss = loss_of(policy, batch, settings, old=torch.zeros(3))
    counts = reported(loss, settings)
    assert counts["clip_fraction_high"] == 1
    assert counts["clip_fraction_low"] == 1
    assert counts["clip_fraction"] == 2
    assert counts["dual_clip_fraction"] == 1
    assert counts["masked_token_fraction"] == 1
    assert counts["masked_sequence_fraction"] == 1
    assert of_all_steps(loss.statistics)["importance_weight_mean"][0] == 2


def test_ratio_to_the_behavior_policy_clips_in_the_first_mini_batch_too() -> None:
    """Learner and sampler differ before the first step: taking one for the other clips nothing."""
    policy = torch.tensor([-1.0 + math.log(1.5), -1.0], requires_grad=True)
    batch = micro_batch([-1.0, -1.0])
    loss = loss_of(policy, batch, algorithm(**BEHAVIOR))
    assert loss.loss.item() == pytest.approx(-1.2 - 1.0)
    assert gradient(loss, policy) == pytest.approx([0.0, -1.0])
    assert of_all_steps(loss.statistics)["importance_weight_mean"][0] == 2
    proximal = loss_of(policy, batch, algorithm(weight="none"))
    assert gradient(proximal, policy) == pytest.approx([-1.0, -1.0])


def test_reinforce_is_weighted_by_the_present_policy_in_later_mini_batches_too() -> (
    None
):
    policy = torch.tensor([math.log(1.5)], requires_grad=True)
    settings = algorithm(loss="reinforce", weight_args={"to": "present"})
    loss = loss_of(
        policy, micro_batch([0.0]), settings, old=torch.tensor([math.log(0.1)])
    )
    assert gradient(loss, policy) == pytest.approx([-1.5])


def test_divergence_in_the_loss_pulls_towards_the_reference_with_the_same_weight() -> (
    None
):
    # Weight 1.5; k2 = (log 2)^2 / 2 with slope log 2. No advantage: only the divergence acts.
    policy = torch.tensor([-1.0, -1.0], requires_grad=True)
    reference = [-1.0 - math.log(2), -1.0 + math.log(2)]
    batch = micro_batch([-1.0 - math.log(1.5)] * 2, [0.0, 0.0], reference=reference)
    settings = algorithm(kl={"coefficient": 0.1, "estimator": "k2"})
    loss = loss_of(policy, batch, settings)
    assert loss.loss.item() == pytest.approx(2 * 0.1 * 1.5 * math.log(2) ** 2 / 2)
    pull = 0.1 * 1.5 * math.log(2)
    assert gradient(loss, policy) == pytest.approx([pull, -pull])


def test_divergence_in_the_reward_is_no_part_of_the_loss() -> None:
    policy = torch.tensor([-1.0], requires_grad=True)
    batch = micro_batch([-1.0], reference=[-3.0])
    settings = algorithm(
        kl={"coefficient": 0.1, "placement": "reward", "estimator": "k1"}
    )
    assert gradient(loss_of(policy, batch, settings), policy) == [-1.0]


def test_entropy_bonus_raises_the_entropy() -> None:
    """One step down the gradient of the loss, with nothing but the bonus in it."""
    logits = torch.tensor([[2.0, 0.0, -1.0]], requires_grad=True)

    def entropy() -> tuple[Tensor, Tensor]:
        logprobs = logits.log_softmax(-1)
        return logprobs[:, 0], -(logprobs.exp() * logprobs).sum(-1)

    policy, before = entropy()
    batch = micro_batch(policy.tolist(), [0.0])
    loss = loss_of(policy, batch, algorithm(entropy_coefficient=0.5), entropy=before)
    assert loss.loss.item() == pytest.approx(-0.5 * before.item())
    loss.loss.backward()
    assert logits.grad is not None
    with torch.no_grad():
        logits -= 0.1 * logits.grad
    assert entropy()[1].item() > before.item()


def test_weights_of_the_aggregation_multiply_every_part_of_the_loss() -> None:
    policy = torch.tensor([-1.0, -1.0])
    settings = algorithm(
        entropy_coefficient=0.5, kl={"coefficient": 1.0, "estimator": "k2"}
    )
    plain = micro_batch([-1.0, -1.0], reference=[-2.0, -2.0])
    heavy = micro_batch([-1.0, -1.0], reference=[-2.0, -2.0], loss_weights=[3.0, 0.0])
    single = loss_of(policy, plain, settings).loss.item() / 2
    assert single == pytest.approx(-1 + 0.5 - 0.5)
    assert loss_of(policy, heavy, settings).loss.item() == pytest.approx(3 * single)


@pytest.mark.parametrize("settings", [USUAL, algorithm(**BEHAVIOR)])
@pytest.mark.parametrize("gap", [-1e3, 1e3])
def test_log_ratios_of_any_size_give_finite_losses_gradients_and_statistics(
    gap, settings
):
    batch = micro_batch([0.0], [-1.0], reference=[0.0])
    for old in (None, torch.zeros(1)):
        policy = torch.tensor([gap], requires_grad=True)
        loss = loss_of(policy, batch, settings, old=old)
        everything = [*gradient(loss, policy), *loss.statistics[:2].flatten().tolist()]
        assert all(math.isfinite(value) for value in everything)


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", "sapo", "reinforce"])
def test_everything_stays_on_the_device_of_the_micro_batch(loss: str) -> None:
    """On `meta`, which refuses tensors of another device as a GPU does."""
    settings = algorithm(
        loss=loss,
        entropy_coefficient=0.1,
        kl={"coefficient": 0.1},
        weight="sequence",
        weight_args={"token_band": [0.5, 2.0], "sequence_band": [0.5, 2.0]},
    )
    batch = with_tensors(
        micro_batch([-1.0] * 3, reference=[-1.0] * 3), lambda t: t.to("meta")
    )
    policy = torch.zeros(3, device="meta", requires_grad=True)
    found = loss_of(policy, batch, settings, old=policy.detach(), entropy=policy)
    found.loss.backward()
    for tensor in (found.num_tokens, found.statistics):
        assert tensor.device.type == "meta"


@pytest.mark.parametrize("estimator", ["forward_top_k", "reverse_top_k"])
def test_the_divergence_over_likely_tokens_weighs_and_masks_like_the_loss(
    estimator: str,
) -> None:
    settings = algorithm(
        advantage="none",
        kl={"coefficient": 2.0, "estimator": estimator},
        loss="reinforce",
    )
    torch.manual_seed(0)
    # The columns of a token: the sampled token, then the reference's two likely ones.
    policy = (torch.rand(3, 3) / 4).log().requires_grad_()
    likely = (torch.rand(3, 2) / 4).log()
    # The weights are 1.5, 2 (of 4) and, as context, nothing.
    behavior = (policy[:, 0].detach() - torch.tensor([1.5, 4.0, 1.0]).log()).tolist()
    batch = dataclasses.replace(
        micro_batch(behavior, [0.0, 0.0, 0.0], [True, True, False]),
        top_ids=torch.zeros(3, 2, dtype=torch.int64),
        top_logprobs=likely,
    )
    loss = loss_of(policy, batch, settings)

    def with_rest(values: Tensor) -> Tensor:
        return torch.cat([values.exp(), 1 - values.exp().sum(-1, keepdim=True)], dim=1)

    full_likely = with_rest(likely)
    other = with_rest(policy[:, 1:])
    if estimator == "reverse_top_k":
        full_likely, other = other, full_likely
    divergence = (full_likely * (full_likely.log() - other.log())).sum(-1)
    expected = 2.0 * (1.5 * divergence[0] + 2.0 * divergence[1])
    torch.testing.assert_close(loss.loss, expected, rtol=0, atol=1e-6)
    (gradient,) = torch.autograd.grad(expected, policy)
    (values,) = torch.autograd.grad(loss.loss, policy)
    torch.testing.assert_close(values, gradient, rtol=0, atol=1e-6)
    assert values[:2, 1:].all()
    assert not values[2].any()


class OneRank:
    """Ranks of a world of one: sums over all are its own."""

    counts = True

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def max(self, values: torch.Tensor) -> torch.Tensor:
        return values


def found(behavior: list[float], lags: list[int]):
    batch = micro_batch(behavior, lags=lags)
    return loss_of(torch.zeros(len(lags)), batch).statistics


def test_step_adds_up_its_mini_batches() -> None:
    step = StepStatistics(columns=COLUMNS)
    # Ratios 1 and 4 (cut to 2), then 1: weights 1, 2, 1.
    assert step.add([found([0.0, -math.log(4)], [0, 1])], OneRank()) == pytest.approx(
        -3
    )
    assert step.add([found([0.0], [0])], OneRank()) == pytest.approx(-1)
    metrics = step.metrics()
    assert metrics["loss"] == pytest.approx(-4 / 3)
    assert metrics["trained_tokens"] == 3
    assert metrics["importance_weight_mean"] == pytest.approx(4 / 3)
    assert metrics["importance_ratio_max"] == pytest.approx(4)
    assert metrics["importance_capped_fraction"] == pytest.approx(1 / 3)
    assert metrics["effective_sample_size"] == pytest.approx(4**2 / (3 * 6))
    assert metrics["logprob_gap_mean"] == 0
    assert metrics["logprob_gap_tokens"] == 2
    assert metrics["logprob_gap_lag_1"] == pytest.approx(math.log(4))
    assert "logprob_gap_lag_2" not in metrics


def test_tokens_of_lag_0_with_other_bits_are_counted_once() -> None:
    # The smallest number of float32 above 0.
    smallest = 1e-45
    step = StepStatistics(2, columns=COLUMNS)
    for _ in range(2):
        step.add([found([0.0, -smallest, -0.5, math.nan], [0, 0, 1, 0])], OneRank())
    assert step.metrics()["logprob_unequal_tokens"] == 1


def test_metrics_of_sampled_tokens_leave_out_given_ones() -> None:
    alone = StepStatistics(columns=COLUMNS)
    beside = StepStatistics(columns=COLUMNS)
    alone.add([found([0.1, -math.log(4)], [0, 1])], OneRank())
    beside.add(
        [found([math.nan, 0.1, -math.log(4), math.nan], [0, 0, 1, 1])], OneRank()
    )
    ours = beside.metrics()
    theirs = alone.metrics()
    assert (ours.pop("trained_tokens"), theirs.pop("trained_tokens")) == (4, 2)
    # The loss of each given token is -1: its ratio and its advantage are 1.
    assert ours.pop("loss") == pytest.approx((2 * theirs.pop("loss") - 2) / 4)
    assert ours == theirs


def test_tokens_of_several_passes_are_counted_once() -> None:
    once = StepStatistics(columns=COLUMNS)
    twice = StepStatistics(2, COLUMNS)
    for step in (once, twice, twice):
        step.add([found([0.0, -math.log(4)], [0, 1])], OneRank())
    assert twice.metrics() == once.metrics()


def test_step_without_a_trained_token_has_finite_metrics() -> None:
    step = StepStatistics(columns=COLUMNS)
    nothing = micro_batch([0.0], mask=[False])
    loss = loss_of(torch.zeros(1), nothing)
    assert step.add([loss.statistics], OneRank()) == 0
    assert all(math.isfinite(value) for value in step.metrics().values())
    assert {*step.metrics()} - {column.name for column in COLUMNS} < TAKEN


def test_a_step_without_sampled_tokens_compares_no_policies() -> None:
    """As of demonstrations alone: a gap or weight of 0 would be a claim."""
    step = StepStatistics(columns=COLUMNS)
    demonstrated = micro_batch([math.nan, math.nan], [1.0, 0.5])
    step.add([loss_of(torch.zeros(2), demonstrated).statistics], OneRank())
    metrics = step.metrics()
    assert metrics["trained_tokens"] == 2
    assert metrics["logprob_gap_tokens"] == 0
    compared = {
        "importance_weight_mean",
        "effective_sample_size",
        "kl",
        "importance_ratio_max",
    }
    assert not metrics.keys() & (compared | {"logprob_gap_mean", "logprob_gap_max"})


def test_a_step_without_tokens_of_the_newest_version_has_no_gap_at_lag_0() -> None:
    step = StepStatistics(columns=COLUMNS)
    older = micro_batch([-1.5, -1.0], [1.0, 0.5], lags=[1, 2])
    step.add([loss_of(torch.full((2,), -1.0), older).statistics], OneRank())
    metrics = step.metrics()
    assert not metrics.keys() & {"logprob_gap_mean", "logprob_gap_max"}
    assert metrics["logprob_gap_lag_1"] == 0.5
    assert metrics["kl"] > 0


def test_values_of_ones_own_functions_that_are_not_finite_are_counted_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a token that no policy sampled, too."""
    source = "def {}(tokens):\n    return tokens.logprobs * (0 / tokens.advantages)\n"
    for kind in ("loss", "weight"):
        (tmp_path / f"own_nan_{kind}.py").write_text(source.format(kind))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    policy = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    # 0 / 0 at the second token, and at the third, which is context.
    batch = micro_batch([-1.0, math.nan, -1.0], [1.0, 0.0, 0.0], [True, True, False])
    for kind in ("loss", "weight"):
        settings = algorithm(**{kind: f"own_nan_{kind}:{kind}"})
        step = StepStatistics(columns=step_columns(settings, has_reference=False))
        step.add([loss_of(policy, batch, settings).statistics], OneRank())
        function = f"{kind} own_nan_{kind}:{kind}"
        assert step.fault == f"{function} gave 1 tokens a value that is not finite"


def test_decoupled_ppo_weighs_by_the_proximal_policy_and_clips_around_it() -> None:
    # behavior -> proximal 1.5 (the weight), proximal -> policy 1.1 (the ratio).
    policy = torch.tensor([-1.0 + math.log(1.1)], requires_grad=True)
    batch = micro_batch([-1.0 - math.log(1.5)])
    loss = loss_of(policy, batch, old=torch.tensor([-1.0]))
    assert loss.loss.item() == pytest.approx(-1.5 * 1.1)
    assert gradient(loss, policy) == pytest.approx([-1.5 * 1.1])


def test_every_metric_of_a_step_has_a_row_of_the_page() -> None:
    documented = set(itertools.chain.from_iterable(tables("A step in metrics.jsonl")))
    assert documented >= TAKEN

"""What is told of functions that have passed their proof."""

import functools
from collections.abc import Callable

import pytest
import torch
from slipstream.core.settings.algorithm_section import AlgorithmSection
from slipstream.extensions.proofs.facts import facts_of_filter, facts_of_tokens
from slipstream.extensions.proofs.token_proof import TokenProof
from slipstream.learner.algorithms.functions import Function
from slipstream.learner.algorithms.inputs import LossInputs
from torch import Tensor


def facts(function: Callable[[LossInputs], Tensor], kind: str = "loss") -> list[str]:
    return facts_of_tokens(
        TokenProof(Function(kind, "mine:own", functools.partial(function)))
    )


def reinforce(tokens: LossInputs) -> Tensor:
    return -tokens.advantages * tokens.logprobs


def wrong_sign(tokens: LossInputs) -> Tensor:
    return tokens.advantages * tokens.logprobs


def imitates(tokens: LossInputs) -> Tensor:
    return -tokens.logprobs


def detached_divergence(tokens: LossInputs) -> Tensor:
    with torch.no_grad():
        divergence = tokens.logprobs - tokens.proximal_logprobs
    return reinforce(tokens) + divergence


def first_half(tokens: LossInputs) -> Tensor:
    return reinforce(tokens) * (tokens.advantages > 1)


def test_a_right_loss_makes_good_tokens_likelier() -> None:
    assert facts(reinforce) == [
        "loss mine:own: on policy a token becomes, of positive advantage likelier, of negative "
        "advantage less likely"
    ]


def test_a_loss_of_wrong_sign_is_seen_in_its_facts() -> None:
    (fact,) = facts(wrong_sign)
    assert fact.endswith(
        "of positive advantage less likely, of negative advantage likelier"
    )


def test_a_loss_without_advantages_is_told() -> None:
    assert "loss mine:own: its gradient does not depend on advantages" in facts(
        imitates
    )


def test_a_term_without_a_gradient_is_told() -> None:
    *_, fact = facts(detached_divergence)
    assert "tokens move it by more or less than their gradient" in fact


def test_tokens_that_stay_are_counted() -> None:
    (fact, *_) = facts(first_half)
    assert "unchanged (" in fact
    assert fact.endswith("of negative advantage unchanged")


def test_the_range_of_weights_is_told_on_policy_and_far_from_it() -> None:
    def weight(tokens: LossInputs) -> Tensor:
        return (tokens.logprobs - tokens.behavior_logprobs).exp().clamp(max=2).detach()

    (fact,) = facts(weight, "weight")
    assert fact.startswith("weight mine:own: weights from 1 to 1 on policy, from ")
    assert " to 2 where ratios are far" in fact


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("none", "keeps 3 of 3 groups of equal rewards"),
        ("unequal_rewards", "keeps 0 of 3 groups of equal rewards"),
    ],
)
def test_a_filter_tells_how_many_groups_it_keeps(name: str, told: str) -> None:
    (fact,) = facts_of_filter(AlgorithmSection(groups_per_step=1, filter=name))
    assert told in fact

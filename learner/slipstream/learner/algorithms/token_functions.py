"""Calls losses and weights; checks their results, and that their inputs stay unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from slipstream.core.settings.algorithm_section import AlgorithmSection
from slipstream.learner.algorithms.functions import Function, function_of
from slipstream.learner.algorithms.inputs import LossInputs, SequenceSums, TokenTerms, TokenWeights
from torch import Tensor


class Reduce(Enum):
    """How the values of a column's tokens become one number of a step."""

    MEAN = "mean"
    LARGEST = "largest"
    # The number of tokens whose value is not finite: a fault of a user's function, no metric.
    FAULTS = "faults"


@dataclass(frozen=True)
class Column:
    """Numbers of tokens that a step reduces to one: a report of a function, or its faults."""

    name: str
    reduce: Reduce

    @classmethod
    def of_report(cls, name: str) -> Column:
        """Returns the column of a report, whose name says how it is reduced."""
        return cls(name, Reduce.LARGEST if name.endswith("_max") else Reduce.MEAN)


def token_terms(function: Function, tokens: LossInputs, where: str) -> TokenTerms:
    """Returns the losses of a micro batch; raises RunFailed for a faulty function."""
    found = _called(function, tokens, where)
    terms = TokenTerms(found) if isinstance(found, Tensor) else found
    if not isinstance(terms, TokenTerms):
        raise function.fault(f"the result is neither a tensor nor TokenTerms: {found!r}", where)
    _check(function, tokens, terms.losses, terms.reports, where)
    if tokens.logprobs.requires_grad and not terms.losses.requires_grad:
        raise function.fault("the losses have no gradient", where)
    return terms


@torch.no_grad()
def token_weights(function: Function, tokens: LossInputs, where: str) -> TokenWeights:
    """Returns the weights of a micro batch; raises RunFailed for a faulty function."""
    found = _called(function, tokens, where)
    weights = TokenWeights(found.detach()) if isinstance(found, Tensor) else found
    if not isinstance(weights, TokenWeights):
        raise function.fault(f"the result is neither a tensor nor TokenWeights: {found!r}", where)
    _check(function, tokens, weights.weights, weights.reports, where)
    return weights


def step_columns(algorithm: AlgorithmSection, *, has_reference: bool) -> list[Column]:
    """Returns the columns of all reports and of the faults of users' own functions, sorted.

    Each function is called with three tokens to learn its reports. Raises RunFailed if a function
    is faulty.
    """
    tokens, where = _three_tokens(has_reference=has_reference), "three tokens"
    weight, loss = function_of(algorithm, "weight"), function_of(algorithm, "loss")
    reports = {
        **token_weights(weight, tokens, where).reports,
        **token_terms(loss, tokens, where).reports,
    }
    found = {Column.of_report(name) for name in reports}
    found |= {Column(str(own), Reduce.FAULTS) for own in (weight, loss) if own.is_own}
    return sorted(found, key=lambda column: column.name)


def _three_tokens(*, has_reference: bool) -> LossInputs:
    """Returns inputs of two sequences, one of two tokens and one of one token."""
    nothing, logprobs = torch.zeros(3, dtype=torch.int32), torch.full((3,), -1.0)
    mask = torch.ones(3, dtype=torch.bool)
    return LossInputs(
        logprobs=logprobs.clone().requires_grad_(),
        proximal_logprobs=logprobs,
        behavior_logprobs=logprobs - 0.1,
        advantages=torch.tensor([1.0, 1.0, -1.0]),
        mask=mask,
        is_given=~mask,
        lags=nothing,
        versions=nothing,
        reference_logprobs=logprobs - 0.2 if has_reference else None,
        entropy=torch.ones(3),
        sequences=SequenceSums(torch.tensor([0, 0, 1]), mask, 2),
    )


def _called(function: Function, tokens: LossInputs, where: str) -> object:
    inputs = [(name, value) for name, value in vars(tokens).items() if isinstance(value, Tensor)]
    before = [value._version for _, value in inputs]
    with function.named(where):
        found: object = function.call(tokens)
    for (name, value), version in zip(inputs, before, strict=True):
        if value._version != version:
            raise function.fault(f"it changed its input {name} in place", where)
    return found


def _check(
    function: Function,
    tokens: LossInputs,
    values: Tensor,
    reports: Mapping[str, Tensor],
    where: str,
) -> None:
    wanted = tokens.logprobs
    function.check_reports(reports, where)
    for name, tensor in (
        ("result", values),
        *((f"report {name}", reports[name]) for name in reports),
    ):
        if not isinstance(tensor, Tensor) or tensor.shape != wanted.shape:
            shape = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise function.fault(f"the {name} is {shape}, not {list(wanted.shape)}", where)
    # Proofs compute in float64; a function that returns float32 there does so in a run too.
    if values.dtype not in (wanted.dtype, torch.float32):
        raise function.fault(f"the result is {values.dtype}, not {wanted.dtype}", where)

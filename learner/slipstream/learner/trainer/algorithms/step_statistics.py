"""Statistics of the tokens of a training step: the sums behind its metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from slipstream.learner.algorithms.columns import NUM_LAGS, OF_ALL_STEPS, Column, Reduce
from slipstream.learner.algorithms.inputs import LossInputs
from slipstream.learner.algorithms.losses import kl_estimate
from slipstream.learner.trainer.ranks.parallel import Ranks
from torch import Tensor


class TokenValues(NamedTuple):
    """The values of a column for the tokens in a mask, [tokens] each."""

    column: Column
    values: Tensor
    mask: Tensor


class StepStatistics:
    """Sums over a step's mini-batches and ranks, equal on all: `add` each, then `metrics`."""

    def __init__(self, epochs: int = 1, columns: Sequence[Column] = ()) -> None:
        """Takes the passes over the batch and all columns of the step, the same on all ranks."""
        self._epochs = epochs
        self._columns = [*OF_ALL_STEPS, *columns]
        self._table = _new_table(self._columns)

    def add(self, tables: Sequence[Tensor], ranks: Ranks) -> float:
        """Adds the tables of this rank's micro batches; returns their loss over all ranks.

        Collective.
        """
        own_table = _new_table(self._columns)
        if ranks.counts:
            # All are copied at once, because each copy waits for the device.
            for table in torch.stack(list(tables)).cpu():
                _add(own_table, table)
        ranks.sum(own_table[:2])
        ranks.max(own_table[2])
        _add(self._table, own_table)
        # The first column is the loss.
        return float(own_table[0, 0])

    @property
    def fault(self) -> str:
        """The first fault of a function, such as a value that is not finite, or "" if none."""
        sums_of_columns = list(self._sums_of_columns())
        for sums in sums_of_columns[len(OF_ALL_STEPS) :]:
            column = sums.column
            if column.reduce is Reduce.FAULTS and sums.total:
                return f"{column.name} gave {sums.total:.0f} tokens a value that is not finite"
            if not (math.isfinite(sums.total) and sums.largest < math.inf):
                return f"the report {column.name} is not finite"
        return ""

    def join(self, others: StepStatistics) -> None:
        """Adds the sums of other mini-batches of the same step."""
        _add(self._table, others._table)

    def metrics(self) -> dict[str, float]:
        """Returns means over the tokens and passes of the step, by the names in docs/metrics.md."""
        metrics: dict[str, float] = {}
        for sums in self._sums_of_columns():
            name = sums.column.name
            match sums.column.reduce:
                case Reduce.LARGEST if sums.largest > -math.inf:
                    metrics[name] = sums.largest
                case Reduce.NUMBER:
                    metrics[name] = sums.total / self._epochs
                case Reduce.MEAN:
                    metrics[name] = sums.total / max(1.0, sums.num_tokens)
                case Reduce.KNOWN_MEAN if sums.num_tokens:
                    metrics[name] = sums.total / sums.num_tokens
        if squared := metrics.get("effective_sample_size"):
            metrics["effective_sample_size"] = metrics["importance_weight_mean"] ** 2 / squared
        return metrics

    def _sums_of_columns(self) -> Iterator[_ColumnSums]:
        totals, numbers, largest = self._table.tolist()
        for place, column in enumerate(self._columns):
            yield _ColumnSums(
                column=column,
                total=totals[place],
                num_tokens=numbers[place],
                largest=largest[place],
            )


class _ColumnSums(NamedTuple):
    """What a step's table holds of one column."""

    column: Column
    total: float
    num_tokens: float
    largest: float


def _new_table(columns: Sequence[Column], device: torch.device | None = None) -> Tensor:
    table = torch.zeros(3, len(columns), dtype=torch.float64, device=device)
    table[2] = -math.inf
    return table


def _add(table: Tensor, other: Tensor) -> None:
    table[:2] += other[:2]
    torch.maximum(table[2], other[2], out=table[2])


@torch.no_grad()
def token_statistics(
    losses: Tensor,
    weights: Tensor,
    tokens: LossInputs,
    reports: Sequence[TokenValues],
    columns: Sequence[Column],
) -> Tensor:
    """Returns a table of a micro batch, of tokens' losses, weights and `reports`, for a step.

    It is float64 [3, columns of all steps and `columns`]: sum, number of tokens and largest value.
    """
    of_steps = list(_values_of_all_steps(losses, weights, tokens))
    # A single kernel for all columns: the host starts every kernel, for each micro batch.
    values = torch.stack([entry.values.double() for entry in of_steps])
    masks = torch.stack([entry.mask for entry in of_steps])
    all_columns = [*OF_ALL_STEPS, *columns]
    table = _new_table(all_columns, tokens.mask.device)
    table_of_steps = table[:, : len(of_steps)]
    table_of_reports = table[:, len(of_steps) :]
    table_of_steps[0] = torch.where(masks, values, 0.0).sum(1)
    table_of_steps[1] = masks.sum(1)
    table_of_steps[2] = torch.where(masks, values, -math.inf).amax(1)
    for report in reports:
        place = columns.index(report.column)
        total, number, largest = table_of_reports[:, place]
        if report.column.reduce is Reduce.LARGEST:
            masked = torch.where(report.mask, report.values, -math.inf)
            torch.maximum(largest, masked.max(), out=largest)
        else:
            masked = torch.where(report.mask, report.values, 0)
            total += masked.sum(dtype=torch.float64)
            number += report.mask.sum()
    return table


def _values_of_all_steps(
    losses: Tensor,
    weights: Tensor,
    tokens: LossInputs,
) -> Iterator[TokenValues]:
    """Yields the values of the columns that every step has, in their order."""
    mask = tokens.mask
    behavior = tokens.behavior_logprobs
    policy = tokens.logprobs
    proximal = tokens.proximal_logprobs
    reference = tokens.reference_logprobs
    if reference is None:
        reference = policy
    is_sampled = mask & ~tokens.is_given
    is_newest = is_sampled & (tokens.lags == 0)
    gaps = (proximal - behavior).abs()
    values_of = {
        "loss": (losses, mask),
        "entropy": (tokens.entropy, mask),
        "kl_reference": (
            kl_estimate(policy, reference, "k3"),
            mask,
        ),
        "trained_tokens": (mask, mask),
        "importance_weight_mean": (weights, is_sampled),
        "effective_sample_size": (
            weights.double().square(),
            is_sampled,
        ),
        # KL(behavior || policy): the behavior policy sampled the tokens.
        "kl": (
            kl_estimate(behavior, policy, "k3"),
            is_sampled,
        ),
        "logprob_gap_mean": (gaps, is_newest),
        "logprob_gap_max": (gaps, is_newest),
        "logprob_gap_tokens": (is_newest, is_newest),
        "logprob_unequal_tokens": (
            proximal != behavior,
            is_newest,
        ),
    }
    lags = tokens.lags.clamp(max=NUM_LAGS - 1)
    for lag in range(1, NUM_LAGS):
        has_lag = is_sampled & (lags == lag)
        values_of[f"logprob_gap_lag_{lag}"] = (gaps, has_lag)
    for column in OF_ALL_STEPS:
        values, column_mask = values_of[column.name]
        yield TokenValues(column, values, column_mask)

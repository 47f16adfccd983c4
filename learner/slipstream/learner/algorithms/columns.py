"""The metrics of every step of the trainer: names, and how tokens become one number.

No report of a user's own function may have one of these names.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NotRequired, Self, TypedDict


class Reduce(Enum):
    """How the values of a column's tokens become one number of a step."""

    MEAN = "mean"
    # The largest value, or no metric in a step without such a token.
    LARGEST = "largest"
    # The mean, or no metric in a step without such a token.
    KNOWN_MEAN = "known mean"
    # The number of tokens, each counted once for all passes, whose value is true.
    NUMBER = "number"
    # The number of tokens whose value is not finite: a fault of a user's function, no metric.
    FAULTS = "faults"


@dataclass(frozen=True)
class Column:
    """Numbers of tokens that a step reduces to one: a report of a function, or its faults."""

    name: str
    reduce: Reduce

    @classmethod
    def of_report(cls, name: str) -> Self:
        """Returns the column of a report, whose name says how it is reduced."""
        return cls(name, Reduce.LARGEST if name.endswith("_max") else Reduce.MEAN)


# A bin for each lag 0 to 6, and one for all larger lags.
NUM_LAGS = 8

# The columns of all steps. Where no policy sampled a token, as in a batch of demonstrations, or
# none of lag 0, numbers that compare the sampling policy are not there: 0 would say that all agree.
OF_ALL_STEPS = [
    Column("loss", Reduce.MEAN),
    Column("entropy", Reduce.MEAN),
    Column("kl_reference", Reduce.MEAN),
    Column("trained_tokens", Reduce.NUMBER),
    Column("importance_weight_mean", Reduce.KNOWN_MEAN),
    # The squares of the weights, until `StepStatistics.metrics` has the mean of the weights.
    Column("effective_sample_size", Reduce.KNOWN_MEAN),
    Column("kl", Reduce.KNOWN_MEAN),
    # The gaps between the trainer's and the engine's log-probabilities.
    Column("logprob_gap_mean", Reduce.KNOWN_MEAN),
    Column("logprob_gap_max", Reduce.LARGEST),
    Column("logprob_gap_tokens", Reduce.NUMBER),
    Column("logprob_unequal_tokens", Reduce.NUMBER),
    *(Column(f"logprob_gap_lag_{lag}", Reduce.KNOWN_MEAN) for lag in range(1, NUM_LAGS)),
]


# The end of the names of the divergences from single teachers, in the order of their tables.
_OF_TEACHER = "/kl_reference"


def teacher_columns(names: Iterable[str]) -> list[Column]:
    """Returns the columns of the divergence from each of the teachers with these names."""
    return [Column(f"teacher/{name}{_OF_TEACHER}", Reduce.KNOWN_MEAN) for name in names]


def is_of_teacher(column: Column) -> bool:
    """Whether a column is one of `teacher_columns`."""
    return column.name.endswith(_OF_TEACHER)


class UpdateMetrics(TypedDict):
    """The metrics of the updates of a step."""

    grad_norm: float
    learning_rate: float
    num_micro_batches: float
    forward_backward_s: float
    optimizer_s: float
    # With float16.
    gradient_overflows: NotRequired[float]
    loss_scale: NotRequired[float]


TAKEN = frozenset(column.name for column in OF_ALL_STEPS) | UpdateMetrics.__annotations__.keys()

"""Finds the one suspect, a group or a sample, without which a metric no longer breaks a bound.

The search leaves out halves of those that are still suspect and has the rest trained again. It is
right if one suspect is at fault. Its last trial leaves out this one alone, and so shows where
several are, or none. A suspect that any other could stand for, because the metric was close to its
bound, is told from one that stands out by what the trials say of the others.

The module knows of no model: `train` is all that it asks.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slipstream.core.recorded_metrics import MetricCondition

# Trains all but the suspects at these places; returns the metric. Raises Inconclusive.
Train = Callable[[Sequence[int]], float]
# A suspect stands out if its part of the metric is at least this many times the spread of the
# others' parts. Where few trials tell of the spread, it takes more: 1 + FEW_TRIALS times as many
# for one trial.
STANDS_OUT = 8.0
FEW_TRIALS = 16.0


class Inconclusive(Exception):  # noqa: N818
    """Raised with the reason for which a trial has no result."""


@dataclass(frozen=True)
class SearchTrial:
    """One retraining: which suspects it left out, and the metric that it gave."""

    left_out: Sequence[int]
    value: float


@dataclass(frozen=True)
class Deviation:
    """How far a trial's metric is from what it would be if all others had equal parts of it.

    The metric is taken as the mean of all parts, or as their largest. Both are scaled to the part
    of one suspect, so that trials which left out many or few can be compared.
    """

    from_mean: float
    from_largest: float


@dataclass(frozen=True)
class Culprit:
    """The suspect at `place`, without which the metric is `value`."""

    place: int
    value: float
    # The culprit's part of the metric, in spreads of the others' parts; NaN if none is known.
    prominence: float
    # Number of trials by which the spread of the others is known.
    num_trials: int

    @property
    def stands_out(self) -> bool:
        """Whether the part is beyond what the largest of many others may be by chance."""
        if not self.num_trials:
            return False
        # A spread that few trials tell of may be far larger.
        return self.prominence >= STANDS_OUT * (1 + FEW_TRIALS / self.num_trials**2)


@dataclass
class GroupSearch:
    """A search among the suspects at places 0 to n - 1, in the order in which they are trained."""

    condition: MetricCondition
    # The batch of each suspect, by any number.
    batches: Sequence[int]
    train: Train
    # Whether a trial may leave out the suspects at these places.
    may_leave_out: Callable[[Sequence[int]], bool]
    # All retrainings, in their order. The first leaves out nothing.
    trials: list[SearchTrial] = field(default_factory=list)

    def culprit(self) -> Culprit:
        """Returns the suspect whose absence alone heals the metric.

        Makes at most 1 trial more than log2(n), rounded up, besides the one that leaves out
        nothing; more only if `may_leave_out` forbids halves. Raises Inconclusive with the reason
        if there is no such suspect.
        """
        if not self.trials:
            self._try([])
        baseline = self.trials[0].value
        if not self.condition.holds(baseline):
            raise Inconclusive(
                f"trained again with all groups, {self.condition.metric} is {baseline:.6g}: the "
                "condition does not hold here"
            )
        suspects = list(range(len(self.batches)))
        while len(suspects) > 1:
            half = self._half(suspects)
            trial = self._try(half)
            is_unhealed = self.condition.holds(trial.value)
            suspects = suspects[len(half) :] if is_unhealed else half
        last = self.trials[-1]
        if list(last.left_out) != suspects:
            if not self.may_leave_out(suspects):
                raise Inconclusive("the one that is left cannot be left out: nothing would remain")
            last = self._try(suspects)
        if self.condition.holds(last.value):
            raise Inconclusive(
                f"leaving out any half, or the last suspect alone ({self.condition.metric} "
                f"{last.value:.6g}), does not heal it: several are at fault together, or what was "
                "trained before"
            )
        place = suspects[0]
        deviations = self._deviations(place, baseline, last.value)
        return Culprit(
            place=place,
            value=last.value,
            prominence=self._prominence(place, baseline, last.value, deviations),
            num_trials=len(deviations),
        )

    def _half(self, suspects: Sequence[int]) -> list[int]:
        """Returns the first half of the suspects, or as near to it as a trial allows."""
        middle = len(suspects) / 2
        lengths = sorted(
            range(1, len(suspects)),
            key=lambda length: abs(length - middle),
        )
        for length in lengths:
            half = list(suspects[:length])
            if self.may_leave_out(half):
                return half
        raise Inconclusive(
            f"{len(suspects)} suspects cannot be divided further: a step would have fewer groups "
            "than mini-batches"
        )

    def _try(self, left_out: Sequence[int]) -> SearchTrial:
        value = self.train(left_out)
        trial = SearchTrial(left_out, value)
        self.trials.append(trial)
        return trial

    def _deviations(self, place: int, baseline: float, without: float) -> list[Deviation]:
        """Returns what the trials that left out others than the culprit at `place` say of them.

        `baseline` is the metric with all suspects, `without` that without the culprit alone.
        Without k others a mean of n parts is `without` plus the excess times n / (n - k), as the
        culprit's share grows, and the largest of them is `baseline`. Without the culprit both are
        `without`. A trial deviates from that by what the k others did.
        """
        batch = self.batches[place]
        size = self.batches.count(batch)
        excess = baseline - without
        deviations: list[Deviation] = []
        for trial in self.trials:
            num_others = len(set(trial.left_out) - {place})
            if not num_others:
                continue
            num_absent = sum(self.batches[absent] == batch for absent in trial.left_out)
            num_present = max(1, size - num_absent)
            scale = math.sqrt(size * num_present / num_others)
            mean = without
            largest = without
            if place not in trial.left_out:
                mean += excess * size / num_present
                largest += excess
            deviation = Deviation(
                from_mean=scale * (trial.value - mean),
                from_largest=scale * (trial.value - largest),
            )
            deviations.append(deviation)
        return deviations

    def _prominence(
        self,
        place: int,
        baseline: float,
        without: float,
        deviations: Sequence[Deviation],
    ) -> float:
        """Returns the culprit's part of the metric in spreads of the others'; NaN without trials.

        The metric is taken as a mean of parts, or as their largest, whichever fits better. Some
        part is always the largest, and trials that leave it where it is show no spread. So the
        spread is then taken as no less than a share of what the others reach.
        """
        if not deviations:
            return math.nan
        from_mean = math.hypot(*(deviation.from_mean for deviation in deviations))
        from_largest = math.hypot(*(deviation.from_largest for deviation in deviations))
        size = self.batches.count(self.batches[place])
        spread = min(from_mean, from_largest) / math.sqrt(len(deviations))
        if from_largest <= from_mean:
            spread = max(spread, size * abs(without) / STANDS_OUT)
        part = size * abs(baseline - without)
        return part / spread if spread else math.inf

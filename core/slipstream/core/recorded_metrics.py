"""The metrics of a run's steps as its folder has them, and conditions on one of them."""

import json
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from slipstream.core.errors import ConfigError, did_you_mean, near_names
from slipstream.core.machine.files import open_regular
from slipstream.core.run_folder import METRICS

_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_CONDITION = re.compile(r"\s*([^\s<>=]+)\s*(>=|<=|>|<)\s*(\S+)\s*")


@dataclass(frozen=True)
class MetricCondition:
    """A comparison of a metric with a number, such as `loss > 3`."""

    metric: str
    comparison: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Returns the condition that `text` states; raises ConfigError for another text."""
        match = _CONDITION.fullmatch(text)
        bound = math.nan
        if match is not None:
            try:
                bound = float(match[3])
            except ValueError:
                match = None
        if match is None or not math.isfinite(bound):
            raise ConfigError(
                f"--metric must be a metric's name, >, >=, < or <=, and a number, got {text!r}"
            )
        if match[1].endswith(("_s", "_bytes")):
            raise ConfigError(
                f"--metric must be what training computes, got {match[1]}: seconds and bytes are "
                "of the machine, and differ each time"
            )
        return cls(match[1], match[2], bound)

    def holds(self, value: float) -> bool:
        return _COMPARISONS[self.comparison](value, self.bound)

    def __str__(self) -> str:
        return f"{self.metric} {self.comparison} {self.bound!r}"


def recorded_metrics(folder: Path) -> dict[int, dict[str, float]]:
    """Returns the numbers of each step by its number from 1; of a run without a file, nothing.

    Lines that are no whole row of a step are passed over, as are numbers that are not finite.
    """
    steps: dict[int, dict[str, float]] = {}
    try:
        file = open_regular(folder / METRICS)
    except FileNotFoundError:
        return steps
    except OSError as error:
        raise ConfigError(f"{folder / METRICS} cannot be read: {error.strerror}") from error
    with file:
        for line in file:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                # A controller that was killed leaves a line without its end.
                continue
            if not isinstance(row, dict) or "loss" not in row or not _is_number(row.get("step")):
                continue
            numbers = {name: float(value) for name, value in row.items() if _is_number(value)}
            steps[int(row["step"])] = numbers
    return steps


def step_of(
    condition: MetricCondition, steps: Mapping[int, Mapping[str, float]], *, step: int | None
) -> int:
    """Returns `step`, or the first step in which the condition holds.

    Raises ConfigError if the condition does not hold there, or anywhere, and for a metric that is
    recorded of no step.
    """
    names = {name for metrics in steps.values() for name in metrics}
    metric = condition.metric
    if metric not in names:
        near = near_names(metric, names)
        hint = f"; {did_you_mean(near)}" if near else ""
        raise ConfigError(f"--metric: no recorded step has the metric {metric!r}{hint}")
    if step is not None:
        value = steps.get(step, {}).get(metric)
        if value is None:
            raise ConfigError(f"--step: step {step} has no recorded {metric}")
        if not condition.holds(value):
            raise ConfigError(f"--step: {metric} of step {step} is {value:g}, not {condition}")
        return step
    for number in sorted(steps):
        value = steps[number].get(metric)
        if value is not None and condition.holds(value):
            return number
    values = [metrics[metric] for metrics in steps.values() if metric in metrics]
    raise ConfigError(
        f"--metric: {condition} holds in none of {len(values)} recorded steps, whose {metric} is "
        f"{min(values):g} to {max(values):g}"
    )


def _is_number(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)  # type: ignore[arg-type]

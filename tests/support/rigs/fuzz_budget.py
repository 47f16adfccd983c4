"""How long the fuzzing tests take: seconds in continuous integration, as long as asked by hand.

FUZZ=20 python -m pytest -k fuzzed     # twenty times as many examples, other ones each time
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("FUZZ", "0"))


@dataclass(frozen=True)
class Budget:
    """Numbers of examples: of calls, of readings of each reader, of rounds of several callers."""

    calls: Callable
    readings: Callable
    rounds: int


def _examples(number: int) -> settings:
    # The same examples each time, unless more are asked for: a change is to blame for a failure.
    return settings(
        max_examples=number * max(TIMES, 1),
        derandomize=TIMES == 0,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


BUDGET = Budget(_examples(120), _examples(120), 25 * max(TIMES, 1))

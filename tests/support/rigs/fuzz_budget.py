"""How many random examples tests try: seconds of them, or as many as asked by hand.

FUZZ=20 python -m pytest -k fuzzed     # twenty times as many examples, other ones each time
FUZZ=0.2 python -m pytest tests/unit   # a fifth, the same ones each time: `make test-fast`
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import HealthCheck, settings

_FUZZ = os.environ.get("FUZZ", "")
_TIMES = float(_FUZZ or 1)


def times(number: int) -> int:
    """The number of examples of a test that tries `number` unless FUZZ says otherwise."""
    return max(1, round(number * _TIMES))


@dataclass(frozen=True)
class Budget:
    """Numbers of examples: of calls, of readings of each reader, of rounds of several callers."""

    calls: Callable
    readings: Callable
    rounds: int


# Tests that name no number of examples try 100: the same ones each time, unless more are asked for,
# so that a change is to blame for a failure. Other work may hold any example up for a second. The
# checkout may be somebody else's, and no run depends on what an earlier one has found.
settings.register_profile(
    "fuzz",
    max_examples=times(100),
    derandomize=not _FUZZ or _TIMES < 1,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("fuzz")


# Fewer rounds than these might miss a kind of answer.
_EXAMPLES = settings(max_examples=times(120))
BUDGET = Budget(_EXAMPLES, _EXAMPLES, max(25, times(25)))

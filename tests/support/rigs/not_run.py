"""Tests that a run of pytest left out, and the target of `make` that runs them."""

import re
from collections import Counter
from collections.abc import Iterable

# Marker -> its tests, and their target.
LEFT_OUT = {
    "long": "long tests (make test-all)",
    "slow": "slow ones (make test-slow)",
    "gpu": "those on GPUs (pytest -m gpu)",
}
TARGET = re.compile(r"make test-[a-z]+")


def not_run(expression: str, causes: Iterable[str]) -> str:
    """One line on what `-m EXPRESSION` deselects and why tests were skipped; "" if all ran."""
    deselected = [
        text for mark, text in LEFT_OUT.items() if f"not {mark}" in expression
    ]
    targets = Counter(
        match[0] if (match := TARGET.search(cause)) else "" for cause in causes
    )
    num_others = targets.pop("", 0)
    skipped = [
        f"{number} skipped ({target})" for target, number in sorted(targets.items())
    ]
    if num_others:
        skipped.append(f"{num_others} skipped for the causes above")
    parts = [*deselected, *skipped]
    return f"not run: {', '.join(parts)}" if parts else ""

"""What a check of a run's files has found: faults, losses, and what was trained."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

# Exceptions that strange values of a file raise where they are compared or counted.
_STRANGE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
# Most steps that one fault names.
_MOST_STEPS = 20
# Most faults that are kept; further ones are counted.
_MOST_KEPT = 10_000


@dataclass
class Findings:
    """The faults that a run's files show, one line each, and what was trained."""

    faults: list[str] = field(default_factory=list)
    # Lines about what a crash has lost, which is no fault.
    losses: list[str] = field(default_factory=list)
    # Files, and folders with numbers of files, that no check has read.
    unchecked: list[str] = field(default_factory=list)
    num_faults: int = 0
    steps: int = 0
    # The number of trained tokens by their lag.
    lags: Counter[int] = field(default_factory=Counter)
    # The number of passes, if a client's own loop ordered the steps.
    passes: int | None = None
    # The number of the first batches, which the run has removed, as its settings say.
    removed: int = 0

    @property
    def trained(self) -> str:
        """The steps and what they trained, in words."""
        if self.passes is not None:
            text = f"{self.steps} steps of a client's own loop, {self.passes:,} passes"
        else:
            largest_lag = max(self.lags, default=0)
            num_tokens = self.lags.total()
            text = f"{self.steps} steps, {num_tokens:,} trained tokens, at most {largest_lag} late"
        if self.removed:
            text += f"; not checked: the first {self.removed} batches, which "
            text += "checkpoint.keep_batches = false has removed"
        return text

    def add(self, fault: str) -> None:
        """Notes a fault."""
        self.num_faults += 1
        if self.num_faults <= _MOST_KEPT:
            self.faults.append(fault)

    def wrong(self, text: str, *, unless: bool = False) -> None:
        """Makes a fault of `text`, unless the condition holds."""
        if not unless:
            self.add(text)

    def same(self, what: str, value: object, expected: object) -> None:
        """Makes a fault of two values that differ."""
        if value != expected:
            self.add(f"{what}: {value} and {expected}")

    def same_steps(self, what: str, steps: Iterable[int], expected: Iterable[int]) -> None:
        """Makes one fault of all steps that are missing or too many."""
        difference = Counter([*steps])
        difference.subtract([*expected])
        lacking = sorted(step for step, count in difference.items() if count < 0)
        beyond = sorted(step for step, count in difference.items() if count > 0)
        if lacking or beyond:
            self.add(f"{what}: without {lacking[:_MOST_STEPS]}, beyond {beyond[:_MOST_STEPS]}")

    @contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Makes a fault of a file that the block cannot read, or whose values are strange."""
        try:
            yield
        except OSError as error:
            self.add(f"{what} cannot be read: {error.strerror or error}")
        except _STRANGE as error:
            self.add(f"{what} is not what a run writes: {type(error).__name__} {error}")

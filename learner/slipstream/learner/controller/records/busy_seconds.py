"""The seconds that a run was watched, and those in which its parts were busy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BusySeconds:
    """Seconds of a watched window, and the parts of it in which work was done."""

    window: float = 0.0
    generation: float = 0.0
    training: float = 0.0
    both: float = 0.0

    def __add__(self, other: BusySeconds) -> BusySeconds:
        """Adds the seconds of two windows that do not overlap."""
        return BusySeconds(
            self.window + other.window,
            self.generation + other.generation,
            self.training + other.training,
            self.both + other.both,
        )

    def shares(self) -> dict[str, float]:
        """Shares of the window, between 0 and 1; 0 when the window is empty."""
        times = {"generation": self.generation, "training": self.training, "both": self.both}
        return {name: time / self.window if self.window else 0.0 for name, time in times.items()}

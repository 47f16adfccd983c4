"""Checks of an environment's arguments, each refused in one line with its name and the rule.

`Split` is made of two of them: it divides tasks into train and held out.
"""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

from slipstream.core.errors import ConfigError


def check_choice(argument: str, value: object, allowed: Iterable[str]) -> None:
    """Refuses a value that is not `allowed`, by the argument's name."""
    if value not in (allowed := tuple(allowed)):
        raise ConfigError(f"{argument} must be one of {', '.join(allowed)}, got {value!r}")


def check_at_least(argument: str, value: int | None, least: int) -> None:
    """Refuses a number below `least`, by the argument's name; None is no number."""
    if value is not None and value < least:
        raise ConfigError(f"{argument} must be at least {least}, got {value}")


def check_above_0(argument: str, value: float) -> None:
    """Refuses a number that is not above 0, or not finite, by the argument's name."""
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{argument} must be above 0, got {value}")


def check_holds(argument: str, text: str, field: str) -> None:
    """Refuses a text in which `field`, such as {question}, does not occur."""
    if field not in text:
        raise ConfigError(f"{argument} must contain {field}, got {text!r}")


@dataclass(frozen=True)
class Split:
    """Holds out one task in `heldout_one_in` by its hash, whatever the seed or order."""

    name: str
    heldout_one_in: int

    def __post_init__(self) -> None:
        """Raises ConfigError for an invalid argument."""
        check_choice("split", self.name, ("train", "heldout"))
        check_at_least("heldout_one_in", self.heldout_one_in, 2)

    def has(self, task: str) -> bool:
        """Whether a task belongs to this split."""
        digest = hashlib.blake2b(task.encode(), digest_size=8).digest()
        is_heldout = int.from_bytes(digest, "big") % self.heldout_one_in == 0
        return is_heldout == (self.name == "heldout")

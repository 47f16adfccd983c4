"""Checks of an environment's arguments, each refused in one line with its name and the rule."""

import math
from collections.abc import Iterable

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

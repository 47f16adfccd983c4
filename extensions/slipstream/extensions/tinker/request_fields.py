"""How fields of requests are read, and the error of a request that is not carried out; no I/O."""

from collections.abc import Mapping
from typing import Any, TypeAlias

Body: TypeAlias = Mapping[str, Any]


class Refused(ValueError):
    """Raised for a request that this server does not carry out; the text names what can.

    With the status 429 or 503 it is to be sent again: it waits for room, a controller or a file.
    """

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


def number(name: str, value: object, *, lowest: float, highest: float) -> float:
    """Returns `value` as a float; raises Refused unless it is a number in the range.

    JSON of the SDK has null for what is not finite; true and "0" are no numbers.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise Refused(f"{name} is a number from {lowest:g} to {highest:g}, got {value!r}")
    # NaN is in no range.
    if not lowest <= value <= highest:
        raise Refused(f"{name} is a number from {lowest:g} to {highest:g}, got {value!r}")
    return float(value)


def whole_number(name: str, value: object, *, lowest: int, highest: int) -> int:
    """Returns `value`; raises Refused unless it is an int in the range."""
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        raise Refused(f"{name} is a whole number from {lowest} to {highest}, got {value!r}")
    return value

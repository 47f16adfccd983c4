"""Predictions for a run with other settings: `slipstream status RUN --if SETTING=VALUE`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.extension import Extension, Program

if TYPE_CHECKING:
    from slipstream.core.settings.tables import Tables


def _is_on(config: Tables) -> bool:
    """Returns False: a command asks for predictions, and no run has a part of them."""
    return False


EXTENSION = Extension(
    name="what_if",
    is_on=_is_on,
    programs={"predict": Program("predict", "slipstream.extensions.what_if.predict", restarts=0)},
)

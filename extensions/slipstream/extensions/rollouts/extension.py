"""Rollouts of a run as a data set: `slipstream export RUN --rollouts FILE`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.extension import Extension, Program

if TYPE_CHECKING:
    from slipstream.core.settings.tables import Tables


def _is_on(config: Tables) -> bool:
    """Returns False: a command asks for the export, and no run has a part of it."""
    return False


EXTENSION = Extension(
    name="rollouts",
    is_on=_is_on,
    programs={
        "export": Program("rollouts", "slipstream.extensions.rollouts.export_rollouts", restarts=0)
    },
)

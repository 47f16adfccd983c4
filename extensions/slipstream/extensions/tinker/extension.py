"""A client's own loop, through an HTTP process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.extension import Extension, Program

if TYPE_CHECKING:
    from slipstream.core.settings.tables import Tables


def _is_on(config: Tables) -> bool:
    return config.controller.client_loop


EXTENSION = Extension(
    name="tinker",
    is_on=_is_on,
    rules="slipstream.extensions.tinker.settings:problems",
    after=("evaluation",),
    controller="slipstream.extensions.tinker.controller:part",
    precedes_publisher=True,
    programs={"tinker": Program("tinker", "slipstream.extensions.tinker.front", restarts=5)},
)

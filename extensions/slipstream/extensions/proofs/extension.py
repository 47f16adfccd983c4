"""Proofs of the user's own functions before a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.extension import Extension, Program

if TYPE_CHECKING:
    from slipstream.core.settings.tables import Tables


def _is_on(config: Tables) -> bool:
    return bool(config.algorithm.own_functions)


EXTENSION = Extension(
    name="proofs",
    is_on=_is_on,
    after=("reference_server",),
    checks="slipstream.extensions.proofs.launch:CHECKS",
    programs={"prove": Program("proofs", "slipstream.extensions.proofs.trainer", restarts=0)},
)

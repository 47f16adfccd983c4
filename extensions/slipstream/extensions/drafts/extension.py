"""A layer that drafts on the rollout servers and is trained beside the policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.extension import Extension

if TYPE_CHECKING:
    from slipstream.core.settings.tables import Tables


def _is_on(config: Tables) -> bool:
    return config.drafts is not None


EXTENSION = Extension(
    name="drafts",
    is_on=_is_on,
    after=("other_models",),
    trainer="slipstream.extensions.drafts.trainer:step_part",
)

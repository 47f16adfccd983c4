"""A layer that drafts on the rollout servers and is trained beside the policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.extension import Extension

if TYPE_CHECKING:
    from slipstream.core.settings.tables import Tables

# Beginning of the names of the layer's tensors among the published weights.
PREFIX = "draft."


def _is_on(config: Tables) -> bool:
    return config.drafts is not None


EXTENSION = Extension(
    name="drafts",
    is_on=_is_on,
    rules="slipstream.extensions.drafts.settings:problems",
    after=("other_models",),
    files_check="slipstream.extensions.drafts.shape:begun",
    model="slipstream.extensions.drafts.layer:DraftPart",
    trainer="slipstream.extensions.drafts.trainer:step_part",
    engine_arguments="slipstream.extensions.drafts.server:engine_arguments",
    beside_model={PREFIX: "slipstream.extensions.drafts.server:WithDrafts"},
    draft_switch="slipstream.extensions.drafts.switch:draft_switch",
)

"""A layer that drafts on the rollout servers and is trained beside the policy."""

from __future__ import annotations

from slipstream.core.extension import Extension

# Beginning of the names of the layer's tensors among the published weights.
PREFIX = "draft."


EXTENSION = Extension(
    name="drafts",
    tables={"drafts": "slipstream.extensions.drafts.settings:DraftsSection"},
    engine_settings=("drafts.tokens",),
    stores_model=True,
    allows_trials=False,
    drafts=True,
    parameters_beside_model="slipstream.extensions.drafts.shape:num_parameters",
    rules="slipstream.extensions.drafts.settings:problems",
    after=("other_models",),
    files_check="slipstream.extensions.drafts.shape:begun",
    model="slipstream.extensions.drafts.layer:DraftPart",
    trainer="slipstream.extensions.drafts.trainer:step_part",
    engine_arguments="slipstream.extensions.drafts.server:engine_arguments",
    beside_model={PREFIX: "slipstream.extensions.drafts.server:WithDrafts"},
    draft_switch="slipstream.extensions.drafts.switch:draft_switch",
)

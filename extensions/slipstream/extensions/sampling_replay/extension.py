"""The learner's probabilities are over the tokens that the engine drew from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.extension import Extension

if TYPE_CHECKING:
    from slipstream.core.settings.tables import Tables


def _is_on(config: Tables) -> bool:
    """Whether settings cut what is sampled, and none excludes records; servers agree on it all."""
    is_possible = (
        not config.has_drafts
        and not config.sampling.max_images
        and not config.controller.client_loop
        and config.algorithm.agreement == "close"
    )
    return bool(config.sampling.cuts) and is_possible


EXTENSION = Extension(
    name="sampling_replay",
    is_on=_is_on,
    after=("router_replay",),
    replays_sampling=True,
    rules="slipstream.extensions.sampling_replay.settings:problems",
    files_check="slipstream.extensions.sampling_replay.settings:check_vocabulary",
    engine_arguments="slipstream.extensions.sampling_replay.settings:engine_arguments",
    trainer="slipstream.extensions.sampling_replay.trainer:step_part",
)

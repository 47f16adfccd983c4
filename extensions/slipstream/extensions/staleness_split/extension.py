"""The ratio to the sampling policy in two factors: of the engine, and of the lag."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.extension import Extension, Need

if TYPE_CHECKING:
    from slipstream.core.settings.tables import Tables


def _is_on(config: Tables) -> bool:
    return config.algorithm.reads_versions


EXTENSION = Extension(
    name="staleness_split",
    is_on=_is_on,
    title="algorithm.weight = 'split'",
    needs=(
        Need(
            "controller.client_loop",
            only=False,
            because="a client's own loop weighs no tokens",
        ),
    ),
    after=("other_models", "router_replay"),
    scores_versions=True,
    rules="slipstream.extensions.staleness_split.settings:problems",
    checks="slipstream.extensions.staleness_split.launch:CHECKS",
    trainer="slipstream.extensions.staleness_split.trainer:VersionScores",
)

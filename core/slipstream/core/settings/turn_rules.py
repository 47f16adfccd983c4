"""The rules on learner and engines that compute in turn."""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.core.settings.sections import (
    ControllerSection,
    LearnerSection,
    RolloutServerSection,
)
from slipstream.core.settings.weights_section import WeightsSection


def turn_problems(
    controller: ControllerSection,
    learner: LearnerSection,
    server: RolloutServerSection,
    weights: WeightsSection,
) -> Iterator[str]:
    """Yields one line for each setting that `controller.turns` excludes."""
    turns = controller.turns
    if turns == "sleep" and not learner.offload.gives_memory_back:
        yield (
            'controller.turns = "sleep" needs learner.offload.gradients and optimizer = true: '
            "the learner gives its memory back to the engines"
        )
    if turns == "sleep" and weights.stage_on_server is True:
        yield (
            'weights.stage_on_server must be "auto" or false with controller.turns = "sleep", got '
            "true: engines keep the memory in which weights arrive"
        )
    if turns != "off" and server.weights_from == "storage":
        yield (
            'controller.turns must be "off" with rollout_server.weights_from = "storage", got '
            f"{turns!r}: such a server loads weights while the learner trains"
        )

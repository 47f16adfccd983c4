"""Tasks are drawn by weights, which a function of the user's makes from past results."""

from __future__ import annotations

from slipstream.core.extension import Extension, Program

EXTENSION = Extension(
    name="task_weights",
    settings="slipstream.extensions.task_weights.settings:TaskWeightsSection",
    rules="slipstream.extensions.task_weights.settings:problems",
    own_functions="slipstream.extensions.task_weights.settings:own_functions",
    after=("reference_server",),
    checks="slipstream.extensions.task_weights.launch:CHECKS",
    programs={
        "check-task-weights": Program(
            "task weights check",
            "slipstream.extensions.task_weights.functions_check",
            restarts=0,
        ),
    },
    controller="slipstream.extensions.task_weights.controller:TaskWeighing",
)

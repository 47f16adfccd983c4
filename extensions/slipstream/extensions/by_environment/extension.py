"""Environments have groups, a temperature, an estimator and a loss of their own."""

from __future__ import annotations

from slipstream.core.extension import Extension, Need

EXTENSION = Extension(
    name="by_environment",
    title="extensions.by_environment",
    settings="slipstream.extensions.by_environment.settings:ByEnvironmentSection",
    rules="slipstream.extensions.by_environment.settings:problems",
    needs=(
        Need(
            "controller.client_loop",
            only=False,
            because="a client's own loop makes its losses itself",
        ),
    ),
    checks="slipstream.extensions.by_environment.launch:CHECKS",
    group_sizes="slipstream.extensions.by_environment.settings:group_sizes_in",
    environment_rules="slipstream.extensions.by_environment.settings:rules_of",
    training_settings=(
        "environments.*.loss_weight",
        "environments.*.advantage",
        "environments.*.advantage_args",
        "environments.*.loss",
        "environments.*.loss_args",
        "environments.*.kl_coefficient",
    ),
)

"""Tells before a run which names of the table no environment of the settings has."""

from slipstream.client.launch.check import Check, Stage
from slipstream.client.launch.findings import CONTROLLER, Finding, Scene, advice
from slipstream.extensions.by_environment.settings import section_of, setting_of


def check_names(scene: Scene) -> Finding | None:
    """Looks for each environment of the table among those of the settings."""
    config = scene.config
    known_names = {environment.name for environment in config.environments}
    for name in section_of(config).environments:
        if name not in known_names:
            return advice(
                f"{setting_of(name)} holds for none of the run's [[environments]]",
                "correct the name, or submit or serve an environment of this name",
            )
    return None


CHECKS = (
    Check(
        "by environment",
        Stage.SETTINGS,
        CONTROLLER,
        check_names,
        after="algorithm",
    ),
)

"""Tells before a run what of the table has no effect, and what it leaves uncorrected."""

from slipstream.client.launch.check import Check, Stage
from slipstream.client.launch.scene import CONTROLLER, Finding, Scene, advice
from slipstream.core.environment_rules import objectives_of
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


def check_staleness(scene: Scene) -> Finding | None:
    """Looks for a loss of an environment that leaves the lag of its tokens uncorrected."""
    config = scene.config
    is_cut = bool(config.sampling.cuts) and not config.replays_sampling
    known_warning = config.algorithm.staleness_warning(is_cut=is_cut)
    for name, algorithm in objectives_of(config).items():
        warning = algorithm.staleness_warning(is_cut=is_cut)
        if name and warning is not None and warning != known_warning:
            return advice(
                f"{setting_of(name)}: {warning}",
                "or take the loss of the environment out",
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
    Check(
        "losses by environment",
        Stage.SETTINGS,
        CONTROLLER,
        check_staleness,
        after="by environment",
    ),
)

"""A check of the option before a run."""

from slipstream.client.launch.check import Check, Stage
from slipstream.client.launch.scene import CONTROLLER, Scene
from slipstream.core.errors import ConfigError

from outside_option.settings import OutsideSection


def check_factor(scene: Scene) -> str:
    """Tells the factor; a large one is refused."""
    factor = scene.config.table_of("outside", OutsideSection).factor
    if factor > 100:
        raise ConfigError(
            f"extensions.outside.factor must be at most 100, got {factor:g}"
        )
    return f"trajectories count {factor:g} times"


CHECKS = (Check("outside", Stage.SETTINGS, CONTROLLER, check_factor, after="queue"),)

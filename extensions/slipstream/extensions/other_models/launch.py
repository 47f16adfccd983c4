"""Tells before a run which names of environments in the tables of teachers have no effect."""

from slipstream.client.launch.check import Check, Stage
from slipstream.client.launch.scene import CONTROLLER, Finding, Scene, advice
from slipstream.core.settings.role_sections import teacher_setting


def check_names(scene: Scene) -> Finding | None:
    """Looks for each environment of a teacher among those of the settings."""
    config = scene.config
    known_names = {environment.name for environment in config.environments}
    teachers = config.reference.teachers if config.reference is not None else {}
    for name, teacher in teachers.items():
        for environment in teacher.environments:
            if environment not in known_names:
                return advice(
                    f"{teacher_setting(name)}.environments: the run's [[environments]] have no "
                    f"{environment}",
                    "correct the name, or submit or serve an environment of this name",
                )
    return None


CHECKS = (
    Check(
        "teachers",
        Stage.SETTINGS,
        CONTROLLER,
        check_names,
        after="algorithm",
    ),
)

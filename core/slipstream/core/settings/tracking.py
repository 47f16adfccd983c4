"""The packages that a run's trackers need, checked before the run starts."""

import importlib.util
import shlex

from slipstream.core.errors import ConfigError
from slipstream.core.settings.measurement_sections import TrackingSection

# Modules of each tracker, with the requirements that have them.
PACKAGES: dict[str, dict[str, str]] = {
    "tensorboard": {},
    "wandb": {"wandb": "wandb>=0.20,<1"},
    "mlflow": {
        "mlflow": "mlflow-skinny>=3.17,<4",
        "sqlalchemy": "sqlalchemy>=2,<3",
        "alembic": "alembic>=1.14,<2",
    },
}


def check_trackers(tracking: TrackingSection) -> None:
    """Raises ConfigError with the command to run when a tracker's package is not installed."""
    for tracker in tracking.trackers:
        for package in PACKAGES[tracker]:
            if importlib.util.find_spec(package) is None:
                raise ConfigError(
                    f"tracking.trackers has {tracker!r}, which needs the package {package}: "
                    f"pip install {shlex.join(PACKAGES[tracker].values())}"
                )

"""The packages that a run's trackers need, checked before the run starts."""

from __future__ import annotations

import importlib.util

from slipstream.core.errors import ConfigError
from slipstream.core.settings.measurement_sections import TrackingSection

# Packages of each tracker; the tracker's extra has its name.
PACKAGES: dict[str, tuple[str, ...]] = {
    "tensorboard": (),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
}


def check_trackers(tracking: TrackingSection) -> None:
    """Raises ConfigError with the command to run when a tracker's package is not installed."""
    for tracker in tracking.trackers:
        for package in PACKAGES[tracker]:
            if importlib.util.find_spec(package) is None:
                raise ConfigError(
                    f"tracking.trackers has {tracker!r}, which needs the package {package}: "
                    f"pip install 'slipstream-rl[{tracker}]'"
                )

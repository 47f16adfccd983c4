"""Which packages the trackers of a run need: checked before anything starts."""

from __future__ import annotations

import importlib.util

from slipstream.protocol.errors import ConfigError
from slipstream.protocol.settings.measurement_sections import TrackingSection

# Each has an extra of its name.
PACKAGES: dict[str, tuple[str, ...]] = {
    "tensorboard": (),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
}


def check_trackers(tracking: TrackingSection) -> None:
    """ConfigError with the command that helps when a tracker's package is not installed."""
    for tracker in tracking.trackers:
        for package in PACKAGES[tracker]:
            if importlib.util.find_spec(package) is None:
                raise ConfigError(
                    f"tracking.trackers has {tracker!r}, which needs the package {package}: "
                    f"pip install 'slipstream-rl[{tracker}]'"
                )

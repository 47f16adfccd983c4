"""TensorBoard, Weights & Biases and MLflow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.extension import Extension, Program, Tracker

if TYPE_CHECKING:
    from slipstream.core.settings.tables import Tables


def _is_on(config: Tables) -> bool:
    return bool(config.tracking.trackers)


EXTENSION = Extension(
    name="trackers",
    is_on=_is_on,
    trackers={
        "tensorboard": Tracker(
            "slipstream.extensions.trackers.controller:TensorBoardTracker",
            packages={"tensorboard": "tensorboard>=2.20,<3"},
            own_folder="tensorboard",
        ),
        "wandb": Tracker(
            "slipstream.extensions.trackers.controller:WandbTracker",
            packages={"wandb": "wandb>=0.20,<1"},
            sign_in="slipstream.extensions.trackers.sign_in:check_wandb",
        ),
        "mlflow": Tracker(
            "slipstream.extensions.trackers.controller:MlflowTracker",
            packages={
                "mlflow": "mlflow-skinny>=3.17,<4",
                "sqlalchemy": "sqlalchemy>=2,<3",
                "alembic": "alembic>=1.14,<2",
            },
        ),
    },
    programs={
        "export-metrics": Program(
            "metrics", "slipstream.extensions.trackers.export_metrics", restarts=0
        )
    },
)

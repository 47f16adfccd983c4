"""No engine starts on a GPU whose memory a step has."""

from pathlib import Path

import pytest
from slipstream.core.errors import RunFailed
from slipstream.core.machine.gpus import fill_gpus
from slipstream.core.run_folder import LOCKS
from slipstream.extensions.turns.trainer import LockedSteps
from support.fakes.small_configs import small_config


def test_no_engine_starts_while_a_step_has_the_memory_of_one(tmp_path: Path) -> None:
    config = small_config(
        run={"name": "r", "steps": 1, "dir": str(tmp_path)},
        algorithm={"groups_per_step": 1},
        controller={"turns": "sleep"},
        learner={"offload": {"gradients": True, "optimizer": True}},
    )

    def start_engine() -> None:
        with fill_gpus(config.run_dir / LOCKS, ["GPU-1"], alone=True, limit_s=0.0):
            pass

    with (
        LockedSteps(config, ["GPU-1"]).around(1),
        pytest.raises(RunFailed, match="end loading"),
    ):
        start_engine()
    start_engine()

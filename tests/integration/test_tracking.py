"""Trackers in a whole run of the controller, with servers that compute nothing."""

from __future__ import annotations

import importlib.util

import pytest
from controller_runs import make_config, play
from fake_server import FakeServer
from fake_trainer import FakeTrainer
from run_processes import empty_model, run_command, write_config

without_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is not None, reason="wandb is installed"
)


@without_wandb
async def test_a_tracker_that_cannot_be_opened_is_an_event_and_the_run_goes_on(tmp_path, caplog):
    trackers = ["wandb", "tensorboard"]
    config = make_config(tmp_path, run__steps=3, tracking__trackers=trackers)
    address = config.controller.address
    with caplog.at_level("INFO"):
        summary = await play(config, FakeServer(address), trainer=FakeTrainer(address))
    assert summary["code"] == 0
    assert summary["steps"] == 3
    told = [text for text in caplog.messages if "gets no more numbers" in text]
    assert told == [
        "tracker wandb gets no more numbers: ModuleNotFoundError: No module named 'wandb'"
    ]
    files = list((config.run_dir / "tensorboard").iterdir())
    assert sum(file.read_bytes().count(b"reward_mean") for file in files) == 3


@without_wandb
@pytest.mark.parametrize("command", ["run", "learner"])
def test_a_missing_package_is_refused_before_anything_starts(tmp_path, command):
    config = write_config(tmp_path, empty_model(tmp_path), tracking__trackers=["wandb"])
    done = run_command(command, config, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "slipstream: tracking.trackers has 'wandb', which needs the package wandb: "
        "pip install 'slipstream-rl[wandb]'\n"
    )
    assert not (tmp_path / "run").exists()

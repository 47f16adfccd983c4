"""The settings with which a run's folder is trained again."""

from pathlib import Path

from slipstream.core.configuration.config_file import dump_config, parse_config
from slipstream.core.run_folder import CONFIG
from slipstream.learner.trainer.recorded_run import load_settings


def test_settings_are_of_the_folder_where_it_lies_and_leave_its_traces_alone(
    tmp_path: Path,
) -> None:
    settings = {
        "run": {"name": "first", "steps": 4, "dir": "elsewhere"},
        "model": {"path": "nowhere"},
        "algorithm": {"learning_rate": 1e-3},
        "debug": {"profile": {"start_step": 2}},
    }
    recorded = parse_config(settings, source="test")
    folder = tmp_path / "copy"
    folder.mkdir()
    path = folder / CONFIG
    path.write_text(dump_config(recorded))

    config = load_settings(path, ["algorithm.learning_rate=2e-3"])
    assert recorded.debug.profile.start_step == 2
    assert config.debug.profile.start_step is None
    assert config.run_dir == folder
    assert config.algorithm.learning_rate == 2e-3

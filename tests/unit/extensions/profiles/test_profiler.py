import json
from pathlib import Path

import torch
from slipstream.core.settings.measurement_sections import ProfileSection
from slipstream.extensions.profiles.trainer import ProfileWindow
from slipstream.learner.trainer.step_cost import StageTimes


def run_steps(window: ProfileWindow, steps: range) -> None:
    for step in steps:
        with window.around(step):
            torch.mm(torch.ones(4, 4), torch.ones(4, 4))


def test_the_trace_holds_the_steps_of_the_window_alone(tmp_path: Path):
    section = ProfileSection(start_step=2, num_steps=2)
    run_steps(ProfileWindow(section, tmp_path / "profile", rank=0), range(6))
    (file,) = (tmp_path / "profile").iterdir()
    assert file.name == "rank-0-steps-2-3.json"
    events = json.loads(file.read_text())["traceEvents"]
    assert [event["name"] for event in events].count("aten::mm") == 2


def test_a_run_without_a_window_writes_nothing(tmp_path: Path):
    run_steps(ProfileWindow(ProfileSection(), tmp_path / "profile", rank=0), range(2))
    assert not (tmp_path / "profile").exists()


def test_a_run_that_ends_within_the_window_keeps_its_trace(tmp_path: Path):
    section = ProfileSection(start_step=1, num_steps=5)
    window = ProfileWindow(section, tmp_path, rank=3)
    run_steps(window, range(3))
    window.close()
    window.close()
    assert [file.name for file in tmp_path.iterdir()] == ["rank-3-steps-1-2.json"]


def test_stages_add_up_and_begin_anew_when_taken():
    stages = StageTimes()
    for _ in range(2):
        with stages.measure("forward"):
            pass
    first = stages.take()
    assert set(first) == {
        "waiting_s",
        "forward_s",
        "export_s",
        "publish_s",
        "checkpoint_s",
    }
    assert first["forward_s"] > 0 == first["publish_s"]
    assert stages.take()["forward_s"] == 0


def test_a_stage_that_fails_is_counted_too():
    stages = StageTimes()
    try:
        with stages.measure("reference"):
            raise ValueError
    except ValueError:
        pass
    assert stages.take()["reference_s"] > 0

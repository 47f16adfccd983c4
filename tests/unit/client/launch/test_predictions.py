"""What `slipstream status --if` refuses before it reads a run."""

from pathlib import Path

import pytest
from slipstream.client.cli import parse
from slipstream.client.launch.rollouts import predict
from slipstream.core import extension
from slipstream.core.errors import ConfigError

CHANGES = ["--if", "rollout_server.count=4", "algorithm.max_staleness=8"]


def test_all_settings_behind_the_option_are_changes() -> None:
    arguments = parse(["status", "first", *CHANGES])
    assert arguments.run == "first"
    assert arguments.changes == CHANGES[1:]
    assert parse(["status", "first"]).changes == []


@pytest.mark.parametrize(
    "words",
    [
        ["first", "--json"],
        ["first", "--server-id=s0"],
        ["--controller=127.0.0.1:1"],
    ],
)
async def test_options_of_a_live_run_are_refused(words: list[str]) -> None:
    option = words[-1].partition("=")[0]
    with pytest.raises(
        ConfigError, match=f"reads the files of a run: leave {option} out"
    ):
        await predict(parse(["status", *words, *CHANGES]))


async def test_predictions_need_a_folder_with_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name its folder, or its name in runs/"):
        await predict(parse(["status", *CHANGES]))
    with pytest.raises(ConfigError, match=str(tmp_path)):
        await predict(parse(["status", str(tmp_path), *CHANGES]))


def test_the_program_is_an_extensions() -> None:
    program = extension.program("predict")
    assert program.module == "slipstream.extensions.what_if.predict"

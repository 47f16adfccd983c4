"""Several runs of one machine, which never meet."""

import asyncio
import sys
from pathlib import Path

import pytest
from slipstream.client.launch.run_processes import RunCalls
from slipstream.client.run_folder import find_run
from slipstream.core.configuration.config_file import dump_config
from support.fakes.named_channel import OPEN, RUN_ID
from support.rigs.controller_runs import make_config
from support.rigs.live_run import LiveRun
from support.rigs.run_processes import checked, command
from support.rigs.smallest_run import SHORT, SMALLEST, plain_engine

__all__ = ["plain_engine"]

LIMIT_S = 500


async def test_a_command_ends_no_run_but_its_own(tmp_path: Path) -> None:
    with LiveRun(tmp_path) as run:
        strangers = RunCalls(run.address, OPEN, "r-0002")
        assert await strangers.stop("it failed", failed=True) == "FAILED_PRECONDITION"
        assert await strangers.look() is None
        assert await RunCalls(run.address, OPEN, RUN_ID).look() is not None
    assert (run.code, run.summary()["state"]) == (0, "finished")


async def test_a_controller_whose_address_is_taken_ends_for_good(
    tmp_path: Path,
) -> None:
    with LiveRun(tmp_path / "first") as run:
        table = {"controller__address": run.address, "run__id": "r-0002"}
        config = tmp_path / "config.toml"
        config.write_text(dump_config(make_config(tmp_path / "second", **table)))
        second = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "slipstream.learner.controller",
            "--config",
            config,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(LIMIT_S):
            _, output = await second.communicate()
        assert second.returncode == 2
        line = f"slipstream: cannot listen on {run.address}: is the port in use?"
        assert output.decode().splitlines()[-1] == line
    assert (run.code, run.summary()["state"]) == (0, "finished")


def arguments(folder: Path, model: Path, *settings: str) -> list[str]:
    return [
        "run",
        str(SMALLEST),
        f"model.path={model}",
        f"run.dir={folder}",
        *SHORT,
        *settings,
    ]


@pytest.mark.long
@pytest.mark.usefixtures("plain_engine")
async def test_three_runs_that_start_together_all_end_right(
    tmp_path, tiny_model
) -> None:
    """They have one name, as quickstarts in three folders do, and no address is set."""
    folders = [tmp_path / name for name in ("one", "two", "three")]

    async def run(folder: Path) -> None:
        async with command(
            folder, *arguments(folder, tiny_model), cwd=tmp_path
        ) as started:
            assert await started.process.wait() == 0, started.out + started.err
            assert (
                f"the run starts at {find_run(str(folder / 'smallest')).address}"
                in started.out
            )

    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as runs:
        for folder in folders:
            runs.create_task(run(folder))
    for folder in folders:
        checked(folder / "smallest")
    all_runs = [find_run(str(folder / "smallest")) for folder in folders]
    assert (
        len({run.address for run in all_runs})
        == len({run.run_id for run in all_runs})
        == 3
    )

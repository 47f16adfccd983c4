"""The folder of a run, and which command writes it."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from slipstream.client.run_folder import (
    check_run_folder,
    check_unwritten,
    end_of_lines,
    hold_folder,
    hold_run_folder,
    make_run_folder,
    write_config,
)
from slipstream.core.errors import ConfigError
from slipstream.core.run_folder import move_finals
from slipstream.learner.controller.application import begin
from slipstream.learner.controller.records.journal import Journal
from slipstream.learner.controller.run import ControlledRun
from support.fakes.small_configs import config_of, run_of
from support.rigs.journal_notes import note
from support.rigs.waiting import LIMIT_S


def test_the_folder_of_a_run_is_for_its_owner_alone(tmp_path: Path) -> None:
    config = config_of(tmp_path / "runs")
    make_run_folder(config)
    assert config.run_dir.stat().st_mode & 0o777 == 0o700
    config.run_dir.chmod(0o750)
    make_run_folder(config)
    assert config.run_dir.stat().st_mode & 0o777 == 0o750


def test_a_file_with_the_name_of_the_folder_is_told(tmp_path: Path) -> None:
    config = config_of(tmp_path / "runs")
    config.run_dir.parent.mkdir()
    config.run_dir.touch()
    with pytest.raises(
        ConfigError, match=f"{config.run_dir}/command.lock cannot be opened: Not a"
    ):
        check_run_folder(config)


def test_a_folder_that_another_command_writes_is_refused_until_that_ends(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path)
    with Journal(config.run_dir / "journal") as journal:
        journal.append(note("start"))
        journal.sync()
        write_config(config, config.run_dir)
        with pytest.raises(ConfigError, match="is written by a run that goes on"):
            check_run_folder(config)
    assert check_run_folder(config)


def test_a_folder_is_refused_before_the_other_command_has_a_journal(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path)
    goes_on = "is written by a run that goes on; wait for its end"
    with hold_run_folder(config):
        with pytest.raises(ConfigError, match=goes_on):
            check_run_folder(config)
        with pytest.raises(ConfigError, match=goes_on), hold_run_folder(config):
            pass
    with hold_run_folder(config):
        pass
    assert not check_run_folder(config)


def test_each_node_has_a_folder_of_its_own(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with (
        hold_run_folder(config),
        hold_run_folder(config, node_rank=1),
        pytest.raises(ConfigError, match="goes on"),
        hold_run_folder(config, node_rank=1),
    ):
        pass
    assert config.run_dir.stat().st_mode & 0o777 == 0o700


def test_what_another_run_left_since_the_check_is_looked_at_again(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path)
    assert not check_run_folder(config)
    other = config.algorithm.model_copy(update={"group_size": 4})
    write_config(config.model_copy(update={"algorithm": other}), config.run_dir)
    with Journal(config.run_dir / "journal") as journal:
        journal.append(note("start"))
        journal.sync()
    message = "algorithm.group_size must stay 4"
    with pytest.raises(ConfigError, match=message), hold_run_folder(config):
        pass


HOLD = """
import sys, time
from pathlib import Path
from slipstream.client.run_folder import hold_folder
with hold_folder(Path(sys.argv[1]), refusal=""):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.process
async def test_a_command_that_is_killed_leaves_its_folder_free(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLD, str(tmp_path), stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        assert await asyncio.wait_for(process.stdout.readline(), LIMIT_S) == b"held\n"
        with (
            pytest.raises(ConfigError, match="taken"),
            hold_folder(tmp_path, refusal="taken"),
        ):
            pass
    finally:
        process.kill()
        await process.wait()
    with hold_folder(tmp_path, refusal="taken"):
        pass


def test_a_folder_that_cannot_be_locked_is_told_with_the_cause(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    (config.run_dir / "command.lock").mkdir(parents=True)
    message = r"cannot lock .*command\.lock: Is a directory"
    with pytest.raises(ConfigError, match=message), hold_run_folder(config):
        pass


@pytest.mark.parametrize(
    ("state", "steps", "has_model", "goes_on"),
    [
        ("finished", 10, True, False),
        ("finished", 10, False, True),
        ("finished", 3, True, True),
        ("stopped", 10, True, True),
        ("failed", 10, True, True),
    ],
)
def test_a_run_goes_on_until_it_is_finished_and_its_model_is_exported(
    tmp_path: Path, state: str, steps: int, *, has_model: bool, goes_on: bool
) -> None:
    config = run_of(tmp_path)
    folder = config.run_dir
    summary = {"state": state, "steps": steps, "cause": "all steps are done"}
    (folder / "summary.json").write_text(json.dumps(summary))
    if has_model:
        (folder / "checkpoints" / "final").mkdir(parents=True)
    if goes_on:
        assert check_run_folder(config)
    else:
        with pytest.raises(
            ConfigError, match="is finished with 10 steps; raise run.steps"
        ):
            check_run_folder(config)


def test_the_model_of_an_earlier_end_is_not_taken_for_that_of_this_end(tmp_path):
    final, earlier = (
        tmp_path / "checkpoints" / name for name in ("final", "final-earlier")
    )
    assert not [*move_finals(tmp_path)]
    for content in ("first", "second"):
        final.mkdir(parents=True)
        (final / "model").write_text(content)
        assert [*move_finals(tmp_path)] == [earlier]
        assert (final.exists(), (earlier / "model").read_text()) == (False, content)
    final.mkdir()
    earlier.rename(tmp_path / "away")
    earlier.touch()
    with pytest.raises(ConfigError, match="final-earlier: Not a directory"):
        [*move_finals(tmp_path)]


def test_a_folder_that_cannot_be_made_is_told_with_the_cause(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    config = config_of(tmp_path / "runs")
    with pytest.raises(
        ConfigError, match=f"run.dir: cannot make {config.run_dir}: Not a dir"
    ):
        make_run_folder(config)


@pytest.mark.parametrize("journal", ["missing", "emptied"])
@pytest.mark.parametrize(
    "left",
    ["checkpoints/step-000010", "journal/batches/step-000003.pb", "metrics.jsonl"],
)
def test_a_run_that_lost_its_journal_is_refused_and_a_new_one_is_not(
    tmp_path, journal, left
):
    config = config_of(tmp_path)
    folder = config.run_dir
    (folder / "journal" / "batches").mkdir(parents=True)
    (folder / "metrics.jsonl").touch()
    if journal == "emptied":
        (folder / "journal" / "journal.log").touch()
    assert not check_run_folder(config)
    if left.startswith("checkpoints"):
        (folder / left).mkdir(parents=True)
    else:
        (folder / left).write_text("{}\n")
    run = ControlledRun(config, "r-1")
    for start in (
        lambda: check_run_folder(config),
        lambda: begin_controller(folder / "journal", run),
    ):
        with pytest.raises(
            ConfigError, match=rf"journal.log is missing or empty.*{left}"
        ) as error:
            start()
        assert "\n" not in str(error.value)


def begin_controller(folder: Path, run: ControlledRun) -> None:
    with Journal(folder) as journal:
        begin(journal, folder, run)


def test_an_export_in_the_way_of_another_says_how_to_go_on(tmp_path: Path) -> None:
    check_unwritten(tmp_path / "not" / "yet" / "hf-000002")
    with pytest.raises(
        ConfigError, match="^/proc/x/y cannot be written: /proc: .*--out"
    ):
        check_unwritten(Path("/proc/x/y"))
    with pytest.raises(
        ConfigError, match=f"^{tmp_path} exists already: remove it, or name anoth"
    ):
        check_unwritten(tmp_path)


@pytest.mark.parametrize("rest", [0, 1, 100_000])
@pytest.mark.parametrize("lines", [0, 1, 3])
def test_the_end_of_the_last_whole_line_is_found(
    tmp_path: Path, lines: int, rest: int
) -> None:
    path = tmp_path / "rows"
    assert end_of_lines(path) == 0
    path.write_bytes(b"0123456789\n" * lines + b"x" * rest)
    assert end_of_lines(path) == 11 * lines

"""Files of a run's folder that are damaged between two starts, as the command line reads them."""

import resource
from pathlib import Path

import pytest
from slipstream.client.page import write_page
from slipstream.client.run_folder import (
    check_run_folder,
    version_to_export,
    write_config,
)
from slipstream.core.configuration.config_file import dump_config, load_config
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config
from support.fakes.small_checkpoints import save_checkpoint
from support.fakes.small_configs import run_of
from support.references.page_data import given_of


def refusal(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        check_run_folder(config)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_settings_that_were_cut_at_any_line_are_refused(tmp_path: Path) -> None:
    config = run_of(tmp_path)
    path = config.run_dir / "config.toml"
    lines = path.read_bytes().splitlines(keepends=True)
    assert check_run_folder(config)
    for number in range(len(lines)):
        path.write_bytes(b"".join(lines[:number]))
        line = refusal(config)
        assert str(path) in line
        assert "from a copy of the run" in line
    # In the middle of the first line.
    path.write_bytes(lines[0][: len(lines[0]) // 2])
    assert "from a copy of the run" in refusal(config)


def damage(path: Path, kind: str) -> None:
    data = path.read_bytes()
    path.unlink()
    match kind:
        case "folder":
            path.mkdir()
        case "NUL block":
            path.write_bytes(data[:300] + bytes(512) + data[812:])
        case "no UTF-8":
            path.write_bytes(data[:300] + b"\xff" + data[301:])
        case "another value":
            assert b"group_size = 2" in data
            path.write_bytes(data.replace(b"group_size = 2", b"group_size = 4"))
        case "empty":
            path.touch()


@pytest.mark.parametrize(
    "kind", ["folder", "NUL block", "no UTF-8", "another value", "missing", "empty"]
)
def test_damaged_settings_are_refused_in_one_line_with_what_to_do(tmp_path, kind):
    config = run_of(tmp_path)
    path = config.run_dir / "config.toml"
    damage(path, kind)
    line = refusal(config)
    assert str(path) in line
    assert "from a copy of the run" in line


def test_settings_of_which_the_first_line_was_removed_are_those_of_their_user(tmp_path):
    config = run_of(tmp_path)
    path = config.run_dir / "config.toml"
    assert load_config(path) == config
    path.write_text(dump_config(config).replace("group_size = 2", "group_size = 4"))
    assert load_config(path).algorithm.group_size == 4


def test_settings_without_room_leave_those_of_the_last_start(tmp_path: Path) -> None:
    config = run_of(tmp_path)
    before = (config.run_dir / "config.toml").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(
            ConfigError, match="config.toml cannot be written: File too large"
        ):
            write_config(config, config.run_dir)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (config.run_dir / "config.toml").read_bytes() == before
    assert not list(config.run_dir.glob("*.partial"))
    assert (config.run_dir / "config.toml").stat().st_mode & 0o777 == 0o600


def test_the_page_shows_what_is_whole_of_a_run(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    metrics = folder / "metrics.jsonl"
    line = b'{"step": 1, "x": 3}\n'
    two = b'{"step": 2, "x": 4}\n'
    metrics.write_bytes(line + bytes(512) + b"\n[1]\n\xff\n{\n" + two)
    for name in ("summary.json", "trajectories.jsonl"):
        (folder / name).write_bytes(bytes(512))
    write_page([folder], tmp_path / "page.html", period_s=0)
    (run,) = given_of(tmp_path / "page.html")["runs"]
    assert run["name"] == "one"
    assert run["curves"] == {"x": [[1, 3.0], [2, 4.0]]}
    assert run["replies"] == []


def export_refusal(folder: Path, step: int | None) -> str:
    with pytest.raises(ConfigError) as caught:
        version_to_export(folder, step)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_an_export_takes_no_older_version_in_place_of_a_newer_one(
    tmp_path: Path,
) -> None:
    for step in (20, 30, 40):
        path = save_checkpoint(tmp_path / "checkpoints", step)
    assert version_to_export(tmp_path, None) == 40
    (path / "manifest.json").unlink()
    assert export_refusal(tmp_path, None) == (
        f"{path} is no whole checkpoint, it has no manifest.json (whole ones are 20, 30): give "
        "--step 30 for an older version, or put the file back from a copy of the run"
    )
    assert version_to_export(tmp_path, 30) == 30
    line = f"{tmp_path} has no checkpoint of version 40, only of 20, 30"
    assert export_refusal(tmp_path, 40) == line


def test_a_damaged_manifest_is_refused_before_anything_is_loaded(
    tmp_path: Path,
) -> None:
    config = run_of(tmp_path)
    folder = config.run_dir / "checkpoints"
    save_checkpoint(folder, 30)
    path = save_checkpoint(folder, 40)
    assert check_run_folder(config)
    (path / "manifest.json").write_text("{")
    begin = f"{path} is no whole checkpoint: manifest.json is damaged"
    remedy = "remove that folder to go on from an older checkpoint"
    for line in (
        refusal(config),
        export_refusal(config.run_dir, None),
        export_refusal(config.run_dir, 40),
    ):
        assert line.startswith(begin)
        assert remedy in line
    assert export_refusal(config.run_dir, 40).endswith("--step (there are 30)")
    assert version_to_export(config.run_dir, 30) == 30


@pytest.mark.parametrize("what", ["nothing", "file", "partial alone"])
def test_an_export_without_checkpoints_is_one_line(tmp_path: Path, what: str) -> None:
    if what == "file":
        (tmp_path / "checkpoints").touch()
    elif what == "partial alone":
        (tmp_path / "checkpoints" / "step-000010.partial").mkdir(parents=True)
    assert export_refusal(tmp_path, None) == f"{tmp_path} has no checkpoints"

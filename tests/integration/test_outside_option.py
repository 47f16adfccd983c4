"""A package of its own adds an option, with which a run trains; no file of ours knows it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.rigs.run_processes import ROOT, checked, rows_of
from support.rigs.smallest_run import SHORT, SMALLEST, own_settings

pytestmark = pytest.mark.usefixtures("nothing_survives")
PACKAGE = ROOT / "tests" / "data" / "outside"
SETTINGS = (
    "extensions.outside.factor=2.0",
    "algorithm.advantage=group_median",
    "algorithm.advantage_args.scale=0.5",
    "queue.kind=noted",
    "run.steps=2",
)


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which pip has installed the package, without a network."""
    target = tmp_path_factory.mktemp("outside")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target"]
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        *options,
        str(target),
        str(PACKAGE),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return target


def slipstream(outside: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Runs the command where the package is installed."""
    path = os.pathsep.join([str(outside), os.getenv("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "slipstream.client.cli", *map(str, words)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def test_a_run_trains_with_an_option_of_another_package(
    outside: Path,
    tmp_path: Path,
    tiny_model: Path,
) -> None:
    machine = own_settings(tmp_path, tiny_model)
    counted = "counted.earlier=100"
    run = slipstream(outside, "run", SMALLEST, *machine, *SHORT, *SETTINGS, counted)
    assert run.returncode == 0, run.stdout + run.stderr
    folder = tmp_path / "smallest"
    summary = checked(folder)
    assert summary["state"] == "finished"
    # Two groups of four episodes a step, and those of earlier runs, count twice.
    counts = [row["outside_trajectories"] for row in rows_of(folder) if "step" in row]
    assert counts == [216.0, 232.0]
    assert "[counted]\nearlier = 100\n" in (folder / "config.toml").read_text()
    notes = (folder / "noted-trajectories.txt").read_text().splitlines()
    assert len(set(notes)) >= 16
    assert summary["steps"] == 2


@pytest.mark.parametrize(
    ("setting", "cause"),
    [
        (
            "algorithm.epochs=2",
            "outside needs algorithm.epochs = 1: its part counts each trajectory once, got 2",
        ),
        (
            "extensions.outside.factor=101.0",
            "extensions.outside.factor must be at most 100",
        ),
        (
            "extensions.outside.factor=-1.0",
            "extensions.outside.factor: Input should be greater",
        ),
        (
            "counted.earlier=-1",
            "counted.earlier: input should be greater than or equal to 0",
        ),
        (
            "counted.earlierr=1",
            "unknown key 'counted.earlierr'; did you mean 'earlier'?",
        ),
        ("algorithm.group_size=1", "advantage = 'group_median' compares a group"),
    ],
)
def test_what_the_option_excludes_is_refused_in_one_line(
    outside: Path,
    tmp_path: Path,
    tiny_model: Path,
    setting: str,
    cause: str,
) -> None:
    machine = own_settings(tmp_path, tiny_model)
    dry_run = slipstream(
        outside, "run", SMALLEST, *machine, *SHORT, *SETTINGS, setting, "--dry-run"
    )
    assert dry_run.returncode == 2
    lines = dry_run.stderr.strip().splitlines()
    assert len(lines) == 1, dry_run.stderr
    assert cause in lines[0]


def test_without_the_package_its_names_are_unknown(
    tmp_path: Path, tiny_model: Path
) -> None:
    machine = own_settings(tmp_path, tiny_model)
    dry_run = slipstream(
        tmp_path, "run", SMALLEST, *machine, *SHORT, *SETTINGS, "--dry-run"
    )
    assert dry_run.returncode == 2
    assert "none or module:function, got 'group_median'" in dry_run.stderr

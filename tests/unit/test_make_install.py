"""`make install` with a Python and a pip that only talk."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from check_machine import problem

ROOT = Path(__file__).parents[2]
PLENTY = 10**12
# Stands in for `python`: it makes an environment whose pip says what a test wants.
PYTHON = """#!/bin/sh
test "$1" = -m || exit 0
mkdir -p "$3/bin"
cp "$PIP" "$3/bin/pip"
"""
PIP = """#!/bin/sh
echo "WARNING: no word for a newcomer" >&2
case "$*" in *"$BROKEN"*) echo "ERROR: no route to host" >&2; exit 1;; esac
"""


@pytest.mark.parametrize("minor", [10, 13])
def test_a_python_that_is_not_supported_is_refused_before_anything_is_loaded(minor: int) -> None:
    assert problem(3, minor, PLENTY) == (
        f"Python must be 3.11 or 3.12, got 3.{minor}: make install PYTHON=python3.12"
    )


def test_a_disk_without_room_is_refused_before_anything_is_loaded() -> None:
    assert problem(3, 11, 4_940_000_000).startswith(
        "the environment takes 5 GB, and the disk of this folder has 4.9 GB left: "
    )
    assert problem(3, 12, PLENTY) == ""


def install(folder: Path, broken: str) -> subprocess.CompletedProcess[str]:
    for name, text in (("python", PYTHON), ("pip", PIP)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    # A make that runs these tests has set MAKEFLAGS and MAKELEVEL: this one would name its folder.
    outside = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", "install", f"VENV={folder / 'venv'}", f"PYTHON={folder / 'python'}"],
        cwd=ROOT,
        env=outside | {"PIP": str(folder / "pip"), "BROKEN": broken},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.process
def test_warnings_of_pip_stay_out_of_sight(tmp_path: Path) -> None:
    done = install(tmp_path, broken="nothing is")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [
        f"installing the tested versions into {tmp_path / 'venv'}",
        "then vLLM, Megatron and the rest",
        "installed",
    ]


@pytest.mark.process
@pytest.mark.parametrize("part", ["torch==", "cpu.txt", "dev.txt", "--editable"])
def test_all_that_pip_said_is_shown_when_it_fails(tmp_path: Path, part: str) -> None:
    failed = install(tmp_path, broken=part)
    assert failed.returncode != 0
    assert "WARNING: no word for a newcomer\nERROR: no route to host\n" in failed.stderr
    assert not (tmp_path / "venv" / ".installed").exists()

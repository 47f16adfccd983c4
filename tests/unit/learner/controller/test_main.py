"""The controller's log where the disk is full."""

import logging
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from slipstream.learner.controller.__main__ import DescriptorLog


def test_a_line_that_finds_no_room_raises_nothing_and_later_ones_are_written(tmp_path):
    path = tmp_path / "controller.log"
    log = logging.Logger("x")
    with path.open("ab") as file:
        log.addHandler(DescriptorLog(file.fileno()))
        log.info("one")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, limits[1]))
        try:
            log.info("two")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        log.warning("three")
    lines = path.read_text().splitlines()
    assert [line.split()[-2:] for line in lines] == [
        ["INFO", "one"],
        ["WARNING", "three"],
    ]


@pytest.mark.process
def test_last_words_for_which_there_is_no_room_keep_their_exit_code(
    tmp_path: Path,
) -> None:
    command = [
        sys.executable,
        "-m",
        "slipstream.learner.controller",
        "--config",
        str(tmp_path),
    ]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stderr=full, check=False, timeout=100)
    assert done.returncode == 2

"""The controller's log where the disk is full."""

from __future__ import annotations

import logging
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from slipstream.learner.controller.__main__ import OwnLog


def test_lines_that_find_no_room_are_counted_and_later_ones_are_written(tmp_path: Path) -> None:
    path = tmp_path / "controller.log"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    log = logging.Logger("own")
    log.addHandler(OwnLog(descriptor))
    log.info("one")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 8, limits[1]))
    try:
        log.info("two")
        log.info("three")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    log.warning("four")
    os.close(descriptor)
    lines = path.read_text().splitlines()
    assert [line.partition(" INFO ")[2] for line in (lines[0],)] == ["one"]
    # The beginning of one may be there; no traceback is.
    assert lines[-2].endswith(" WARNING 2 lines of this log were lost: File too large")
    assert lines[-1].endswith(" WARNING four")
    assert len(lines) == 4


@pytest.mark.process
def test_last_words_for_which_there_is_no_room_keep_their_exit_code(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "slipstream.learner.controller", "--config", str(tmp_path)]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stderr=full, check=False, timeout=100)
    assert done.returncode == 2

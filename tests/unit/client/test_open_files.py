"""The limit of open files under which services run."""

import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slipstream.core.machine.process import MAX_OPEN_FILES
from support.rigs.waiting import LIMIT_S

pytestmark = pytest.mark.process

SOFT = 256
HARD = 2000


def soft_limit(pid: int) -> int:
    (matches,) = re.findall(
        r"Max open files\s+(\d+)", Path(f"/proc/{pid}/limits").read_text()
    )
    return int(matches)


def started(command: str) -> str:
    """A shell line that starts a service under a small limit; it waits for its configuration."""
    limits = f"ulimit -S -n {SOFT} && ulimit -H -n {HARD}"
    return f"{limits} && exec {sys.executable} -m slipstream.client.cli {command} /dev/stdin"


@pytest.mark.parametrize("command", ["run", "learner", "rollout-server"])
def test_a_service_opens_as_many_files_as_the_system_lets_it(command: str) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard == resource.RLIM_INFINITY or hard >= HARD
    assert HARD < MAX_OPEN_FILES
    process = subprocess.Popen(["sh", "-c", started(command)], stdin=subprocess.PIPE)
    try:
        deadline_s = time.monotonic() + LIMIT_S
        while (
            seen := soft_limit(process.pid)
        ) != HARD and time.monotonic() < deadline_s:
            assert process.poll() is None
            time.sleep(0.02)
        assert seen == HARD
    finally:
        process.kill()
        process.communicate()

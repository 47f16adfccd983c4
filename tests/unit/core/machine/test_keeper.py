"""Programs under a keeper, as real processes: nothing of them is left, however they end."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from slipstream.core.machine.process import Descendant, descendants, kill
from support.rigs.waiting import LIMIT_S, wait_until

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux"),
]

# Starts children that leave the session and lose their parents, writes their pids, then goes on.
FORKING = """
import os, sys, time
def away(depth):
    if os.fork():
        return
    os.setsid()
    if depth:
        away(depth - 1)
    with open(sys.argv[1], "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(3600)
for _ in range(3):
    away(1)
while open(sys.argv[1]).read().count("\\n") < 6:
    time.sleep(0.01)
"""


def keeper(*arguments: str, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "slipstream.core.machine.keeper", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "pids"
    path.touch()
    yield path
    survivors = [pid for pid in read(path) if is_alive(pid)]
    for pid in survivors:
        os.kill(pid, signal.SIGKILL)
    assert not survivors


def read(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()]


def all_there(path: Path) -> bool:
    return len(read(path)) == 6


@pytest.mark.parametrize(
    ("last", "code"),
    [
        ("sys.exit(0)", 0),
        ("os._exit(7)", 7),
        ("os.kill(os.getpid(), 9)", -9),
        ("os.kill(os.getpid(), 11)", -11),
    ],
)
def test_a_keeper_ends_as_its_program_and_leaves_nothing_of_it(last, code, pids):
    process = keeper("--", sys.executable, "-c", FORKING + last, str(pids))
    _, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, errors) == (code, "")
    assert not [pid for pid in read(pids) if is_alive(pid)]


@pytest.mark.parametrize("ignores", [False, True])
def test_a_keeper_that_is_told_to_end_leaves_nothing(ignores: bool, pids: Path) -> None:
    start = "import signal; signal.signal(15, signal.SIG_IGN)\n" if ignores else ""
    program = start + FORKING + "time.sleep(3600)"
    process = keeper("--", sys.executable, "-c", program, str(pids))
    wait_until(lambda: all_there(pids))
    process.terminate()
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == (-signal.SIGKILL if ignores else -signal.SIGTERM)
    assert not [pid for pid in read(pids) if is_alive(pid)]


def test_a_keeper_whose_parent_is_killed_leaves_nothing(pids: Path) -> None:
    program = FORKING + "time.sleep(3600)"
    parent = (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-m', 'slipstream.core.machine.keeper', '--', "
        "sys.executable, '-c', *sys.argv[1:]], start_new_session=True)\n"
        "time.sleep(3600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent, program, str(pids)])
    wait_until(lambda: all_there(pids))
    process.kill()
    process.wait(LIMIT_S)
    wait_until(lambda: not any(is_alive(pid) for pid in read(pids)))


def test_a_program_that_fills_memory_is_ended_with_the_cause() -> None:
    program = "import time; held = bytearray(300 << 20); time.sleep(3600)"
    limit = ["--memory-bytes", str(200 << 20), "--memory-setting", "some.setting"]
    process = keeper(*limit, "--", sys.executable, "-c", program)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == -signal.SIGKILL
    assert errors.startswith("out of memory: it took 0.")
    assert errors.endswith(" GiB, more than some.setting = 0.20\n")


def test_memory_that_processes_share_counts_once() -> None:
    program = (
        "import os, time\n"
        "held = bytearray(100 << 20)\n"
        "pids = [os.fork() or time.sleep(1.5) or os._exit(0) for _ in range(4)]\n"
        "[os.waitpid(pid, 0) for pid in pids]\n"
    )
    process = keeper(
        "--memory-bytes", str(250 << 20), "--", sys.executable, "-c", program
    )
    _, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, errors) == (0, "")


def test_a_program_with_too_many_threads_is_ended_with_the_cause() -> None:
    program = (
        "import threading, time\n"
        "for _ in range(40): threading.Thread(target=time.sleep, args=(3600,)).start()\n"
    )
    limit = ["--threads", "20", "--threads-setting", "some.setting"]
    process = keeper(*limit, "--", sys.executable, "-c", program)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == -signal.SIGKILL
    assert re.fullmatch(r"it had \d+ threads, more than some.setting = 20\n", errors)


def test_a_fork_bomb_is_ended_with_the_cause() -> None:
    # An endless bomb would hold up the whole machine if this test failed.
    bomb = "import os, time\nfor _ in range(9): os.fork()\ntime.sleep(3600)\n"
    limit = ["--processes", "40", "--processes-setting", "some.setting"]
    mark = f"a-bomb-of-{os.getpid()}"
    kept = keeper(*limit, "--", sys.executable, "-c", bomb, mark)
    _, errors = kept.communicate(timeout=LIMIT_S)
    assert kept.returncode == -signal.SIGKILL
    assert errors.endswith(" processes, more than some.setting = 40\n")
    assert not [
        process
        for process in psutil.process_iter(["cmdline"])
        if mark in (process.info["cmdline"] or [])
    ]


def test_a_program_that_waits_for_none_of_its_children_is_ended_with_the_cause() -> (
    None
):
    forks = (
        "import os, sys, time\n"
        "[os.fork() or os._exit(0) for _ in range(int(sys.argv[1]))]\n"
        "time.sleep(float(sys.argv[2]))\n"
    )
    program = ("--processes", "16", "--", sys.executable, "-c", forks)
    few = keeper(*program, "200", "1.0")
    many = keeper(*program, "600", "3600")
    _, errors = many.communicate(timeout=LIMIT_S)
    assert many.returncode == -signal.SIGKILL
    assert re.fullmatch(
        r"it had \d+ dead processes that none of its processes waits for, "
        r"more than 256\n",
        errors,
    )
    assert few.communicate(timeout=LIMIT_S)[1] == ""
    assert few.returncode == 0


def test_a_process_with_the_number_of_another_one_is_not_killed() -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    try:
        (descendant,) = [d for d in descendants(os.getpid()) if d.pid == stranger.pid]
        kill(Descendant(descendant.pid, descendant.start - 1))
        assert stranger.poll() is None
        kill(descendant)
        assert stranger.wait(LIMIT_S) == -signal.SIGKILL
    finally:
        stranger.kill()
        stranger.wait()


def test_a_program_that_is_not_there_is_told() -> None:
    process = keeper("--", "/missing/program")
    _, errors = process.communicate(timeout=LIMIT_S)
    message = "slipstream: /missing/program: No such file or directory\n"
    assert (process.returncode, errors) == (127, message)

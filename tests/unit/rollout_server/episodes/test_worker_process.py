"""Ends of workers: of one whose keeper is killed, and of one that is cancelled more than once."""

import asyncio
import os
import sys
from pathlib import Path

import pytest
from slipstream.rollout_server.episodes.worker_gateway import NO_LIMITS, WorkerProcess
from support.rigs.completed import python

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux"),
]

# Starts workers as a server does, and kills the keeper of the first one. The other's processes and
# a process of the server's own go on.
SERVER = """
import asyncio, os, signal, sys
import uvloop
from slipstream.core.machine.process import become_reaper
from slipstream.rollout_server.episodes.worker_gateway import NO_LIMITS, WorkerProcess

WORKER = '''
import os, sys, time
for generation in range(3):
    if os.fork() == 0:
        os.setsid()
        os.fork()
        open(sys.argv[1], "a").write(f"{os.getpid()}\\\\n")
        time.sleep(600)
time.sleep(600)
'''

# What outlives the server would hold its output open.
nothing = os.open(os.devnull, os.O_WRONLY)

def alive(path):
    pids = open(path).read().split()
    return sum(os.path.exists(f"/proc/{pid}") for pid in pids)

async def begin(path):
    command = [sys.executable, "-c", WORKER, path]
    worker = await WorkerProcess.start(command, limits=NO_LIMITS, token="", log=nothing)
    while not os.path.exists(path) or len(open(path).read().splitlines()) < 6:
        await asyncio.sleep(0.01)
    return worker

async def main():
    become_reaper()
    own = await asyncio.create_subprocess_exec("sleep", "600")
    killed, other = await begin("killed"), await begin("other")
    os.kill(killed._process.pid, signal.SIGKILL)
    await killed.wait()
    # A worker that starts meanwhile is none of those.
    begun = asyncio.create_task(begin("begun"))
    await killed.close()
    await begun
    print(*map(alive, ("killed", "other", "begun")), own.returncode)
    await other.close()
    await begun.result().close()
    print(*map(alive, ("killed", "other", "begun")), own.returncode)
    own.kill()
    await own.wait()

uvloop.run(main())
"""


def test_a_killed_keeper_leaves_none_of_its_workers_processes(tmp_path: Path) -> None:
    done = python(SERVER, cwd=tmp_path)
    try:
        assert done.stdout == "0 6 6 None\n0 0 0 None\n", done
    finally:
        for path in tmp_path.iterdir():
            for pid in path.read_text().split():
                if Path(f"/proc/{pid}").exists():
                    os.kill(int(pid), 9)


async def test_cancelled_twice_a_worker_has_ended_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An environment's unloading cancels a worker that its episode's end has cancelled."""
    has_begun = asyncio.Event()
    ends = WorkerProcess.end

    def end(worker: WorkerProcess) -> None:
        has_begun.set()
        ends(worker)

    monkeypatch.setattr(WorkerProcess, "end", end)
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    nothing = os.open(os.devnull, os.O_WRONLY)
    worker = await WorkerProcess.start(command, limits=NO_LIMITS, token="", log=nothing)
    os.close(nothing)
    closing = asyncio.create_task(worker.close())
    await has_begun.wait()
    closing.cancel()
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert worker._process.returncode is not None
    assert worker._process.pid not in WorkerProcess._keepers
    with pytest.raises(OSError, match="Bad file descriptor"):
        worker.calls()

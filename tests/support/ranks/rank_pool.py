"""Trainer ranks for tests: one process imports torch, Megatron and Bridge once and forks them all.

A program is a Python file with `run_rank(folder: Path, job: str) -> None`. Every rank loads it and
calls that function for each job in turn, with what torchrun puts into the environment and another
MASTER_PORT for each job; the ranks leave results as files in `folder`. Where CUDA is there the
ranks are processes of their own, one for each GPU: a forked process cannot use it.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from slipstream.protocol.machine.process import die_with_parent

from support.rigs.loopbacks import own_loopback

TAIL_CHARACTERS = 4000


class RankPool:
    """Starts its process when ranks are first asked for; `close` ends it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(
        self,
        program: Path,
        jobs: Sequence[str],
        *,
        world_size: int,
        folder: Path,
        limit_s: float = 400.0,
    ) -> None:
        """Returns when all ranks have done all jobs.

        When one fails, or the limit has passed, the others are killed at once and the test fails
        with the output of the one that failed first.
        """
        if self._process is None:
            self._process = _start()
        host = own_loopback()
        request = {
            "program": str(program),
            "host": host,
            "jobs": list(zip(jobs, _ports(host, len(jobs)), strict=True)),
            "world_size": world_size,
            "folder": str(folder),
            "limit_s": limit_s,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, "the process that forks the ranks has died"
        failure = json.loads(answer)["failure"]
        if failure:
            pytest.fail(failure, pytrace=False)

    def close(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.communicate()
        self._process = None


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


def _ports(host: str, count: int) -> list[int]:
    """Free ones, each for one job: what an earlier job listened on may be open until the end."""
    from slipstream.client.launch.preflight import free_port

    found: set[int] = set()
    while len(found) < count:
        found.add(free_port(host))
    return list(found)


def _start() -> subprocess.Popen[str]:
    # Threads of numpy or torch would not survive the forks.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    # TransformerEngine would multiply float32 matrices in a shorter format.
    precise = {"NVIDIA_TF32_OVERRIDE": "0"}
    return subprocess.Popen(
        [sys.executable, __file__],
        env=os.environ | threads | precise | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _serve() -> None:
    """One line of JSON for a request, one for its answer, until the tests are over."""
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    start = _prepare()
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps({"failure": _run(request, start)}), file=answers, flush=True)


def _prepare() -> Callable[[dict, int], int]:
    """Imports what every rank needs, if they are forked; how to start one, which gives its pid."""
    import torch

    if torch.cuda.is_available():
        return _start_plain
    from slipstream.learner.trainer.ranks import compat, cpu

    cpu.install()
    compat.install()
    import slipstream.learner.trainer.model.spec
    import slipstream.learner.trainer.step  # noqa: F401

    # Imported objects are never collected: the ranks share their memory until a rank writes to it.
    gc.freeze()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"cannot fork: the imports have started {len(threads) - 1} threads"
    return _fork


def _fork(request: dict, rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent()
        with _log(request, rank).open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.environ.update(_environment(request, rank))
        _run_rank(request)
        code = 0
    except BaseException:  # noqa: BLE001 - the exit code tells the parent
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _start_plain(request: dict, rank: int) -> int:
    with _log(request, rank).open("w") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(request)],
            env=os.environ | _environment(request, rank),
            stdout=log,
            stderr=log,
        )
    # The process was waited for by its number, like a forked one.
    process.returncode = 0
    return process.pid


def _environment(request: dict, rank: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(request["world_size"]),
        "LOCAL_WORLD_SIZE": str(request["world_size"]),
        "MASTER_ADDR": request["host"],
    }


def _log(request: dict, rank: int) -> Path:
    return Path(request["folder"]) / f"world-{request['world_size']}-rank-{rank}.log"


def _run_rank(request: dict) -> None:
    path = Path(request["program"])
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    for job, port in request["jobs"]:
        os.environ["MASTER_PORT"] = str(port)
        started_s = time.monotonic()
        module.run_rank(Path(request["folder"]), job)
        # The groups of a job lie in cycles of references, and their threads wake up all the time.
        gc.collect()
        print(f"{job}: {time.monotonic() - started_s:.1f} s", flush=True)


def _run(request: dict, start: Callable[[dict, int], int]) -> str:
    """Starts the ranks and waits for all, or for the first failure, which is the answer."""
    ranks = {start(request, rank): rank for rank in range(request["world_size"])}
    until = time.monotonic() + request["limit_s"]
    failure = ""
    watched = {os.pidfd_open(pid): pid for pid in ranks}
    poll = select.poll()
    for descriptor in watched:
        poll.register(descriptor, select.POLLIN)
    while watched and not failure:
        ended = poll.poll(max(0.0, until - time.monotonic()) * 1000)
        if not ended:
            failure = f"no end after {request['limit_s']:g} s"
        for descriptor, _ in ended:
            poll.unregister(descriptor)
            os.close(descriptor)
            pid = watched.pop(descriptor)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if code and not failure:
                failure = f"exit code {code}\n{_tail(request, ranks[pid])}"
                failure = f"rank {ranks[pid]} of {request['world_size']}: {failure}"
    if watched and failure.startswith("no end"):
        failure += "".join(f"\nrank {rank}:\n{_tail(request, rank)}" for rank in ranks.values())
    for descriptor, pid in watched.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(descriptor)
    return failure


def _tail(request: dict, rank: int) -> str:
    return _log(request, rank).read_text(errors="replace")[-TAIL_CHARACTERS:]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        die_with_parent()
        _run_rank(json.loads(sys.argv[1]))
    else:
        _serve()

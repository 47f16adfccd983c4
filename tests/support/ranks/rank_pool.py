"""Trainer ranks for tests: one process imports torch, Megatron and Bridge once and forks them all.

A program is a Python file with `run_rank(folder: Path, job: str) -> None`. Every rank loads it and
calls that function for each job in turn, with what torchrun puts into the environment and another
MASTER_PORT for each job; the ranks leave results as files in `folder`. Where CUDA is there the
ranks are processes of their own, one for each GPU: a forked process cannot use it.

`start` forks whole programs from the same process, such as a trainer that a test kills.
"""

import faulthandler
import functools
import gc
import importlib.util
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from slipstream.core.machine.process import die_with_parent

from support.rigs.forked_programs import ForkedProgram
from support.rigs.loopbacks import own_loopback

TAIL_CHARACTERS = 4000
# Not scatter: its parts are copied to the GPU first, which closes their gaps.
COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce_scatter",
    "reduce_scatter_tensor",
)


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
        if not jobs:
            return
        host = own_loopback()
        request = {
            "do": "run",
            "program": str(program),
            "host": host,
            "jobs": list(zip(jobs, _ports(host, len(jobs)), strict=True)),
            "world_size": world_size,
            "folder": str(folder),
            "limit_s": limit_s,
        }
        failure = self._ask(request)
        if failure:
            pytest.fail(str(failure), pytrace=False)

    def found(
        self,
        program: ModuleType | str,
        sizes: Mapping[str, int],
        folder: Path,
        kept: str = "{}.pt",
    ) -> dict[str, Any]:
        """Runs jobs, each with its number of ranks; returns what each of them has kept in FOLDER.

        The program is a module, or the path of one. `kept` names the file of a job; with a second
        place for a rank, each rank has kept something.
        """
        import torch

        path = Path(program if isinstance(program, str) else str(program.__file__))
        for size in sorted(set(sizes.values())):
            jobs = [job for job, job_size in sizes.items() if job_size == size]
            self.run(path, jobs, world_size=size, folder=folder)

        def load(job: str, rank: int) -> Any:
            return torch.load(folder / kept.format(job, rank), weights_only=True)

        if kept.count("{") == 1:
            return {job: load(job, 0) for job in sizes}
        return {
            job: [load(job, rank) for rank in range(size)]
            for job, size in sizes.items()
        }

    def start(
        self, module: str, *arguments: object, environ: Mapping[str, str], log: Path
    ) -> ForkedProgram:
        """Starts `python -m module arguments` with these variables; its output goes to `log`.

        What a rank imports is already imported, with the OMP_NUM_THREADS of the pool, which is 1.
        """
        request = {
            "do": "start",
            "module": module,
            "arguments": [str(argument) for argument in arguments],
            "environ": dict(environ),
            "log": str(log),
        }
        return ForkedProgram(int(self._ask(request)), self._code_of)

    def _code_of(self, pid: int) -> int:
        return int(self._ask({"do": "reap", "pid": pid}))

    def _ask(self, request: dict) -> str | int:
        if self._process is None:
            self._process = _start()
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, "the process that forks the ranks has died"
        return json.loads(answer)

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


Rank = subprocess.Popen[bytes] | ForkedProgram


def start_ranks(
    config: Path,
    world_size: int,
    environ: Mapping[str, str] = {},
    *,
    pool: RankPool | None = None,
) -> list[Rank]:
    """The ranks of a trainer, forked from the pool or, without one, started as users do.

    Rank n writes its output to `rank-n.log` beside the settings.
    """
    # Not in the process that forks, which runs this file.
    from slipstream.core.machine.address import free_port

    host = own_loopback()
    shared = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(free_port(host)),
        "OMP_NUM_THREADS": "1",
    }
    program = ("slipstream.learner.trainer", "--config", str(config))
    processes: list[Rank] = []
    for rank in range(world_size):
        environ_of_rank = (
            os.environ
            | dict(environ)
            | shared
            | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        log = config.with_name(f"rank-{rank}.log")
        if pool is not None:
            processes.append(pool.start(*program, environ=environ_of_rank, log=log))
            continue
        with log.open("w") as file:
            command = [sys.executable, "-m", *program]
            processes.append(
                subprocess.Popen(command, env=environ_of_rank, stdout=file, stderr=file)
            )
    return processes


def chosen_jobs(
    request: pytest.FixtureRequest, known: Iterable[str], *, parameter: str = "job"
) -> list[str]:
    """Those of `known` that are the value of `parameter` in a test that will run."""
    calls = [
        item.callspec for item in request.session.items if hasattr(item, "callspec")
    ]
    names = [call.params.get(parameter) for call in calls]
    return [job for job in known if job in names]


def jobs_of_file(request: pytest.FixtureRequest, known: Iterable[str]) -> list[str]:
    """Returns all of `known`; without a long test those alone that the file's `long_but` names."""
    items = [item for item in request.session.items if item.path == request.path]
    if any(item.get_closest_marker("long") for item in items):
        return list(known)
    short = [name for mark in items[0].iter_markers("long_but") for name in mark.args]
    return [job for job in known if job in short]


def each_job(
    known: Iterable[str], slow: Collection[str], long: Collection[str] = ()
) -> list[object]:
    """Parameters of a test; those of `slow` and of `long` have the mark."""

    def marks(job: str) -> list[pytest.MarkDecorator]:
        return [pytest.mark.slow] * (job in slow) + [pytest.mark.long] * (job in long)

    return [pytest.param(job, marks=marks(job)) for job in known]


def _ports(host: str, count: int) -> list[int]:
    """Free ones, each for one job: what an earlier job listened on may be open until the end."""
    from slipstream.core.machine.address import free_port

    places: set[int] = set()
    while len(places) < count:
        places.add(free_port(host))
    return list(places)


def _start() -> subprocess.Popen[str]:
    # Threads of numpy or torch would not survive the forks.
    threads = dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
    )
    # TransformerEngine would multiply float32 matrices in a shorter format.
    precise = {"NVIDIA_TF32_OVERRIDE": "0"}
    return subprocess.Popen(
        [sys.executable, __file__],
        env=os.environ | threads | precise | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


# How a process starts that runs a request, with a log and these variables; it returns its pid.
Start = Callable[[dict, Path, Mapping[str, str]], int]


def _serve() -> None:
    """One line of JSON for a request, one for its answer, until the tests are over."""
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    start = _prepare()
    for line in sys.stdin:
        request: dict = json.loads(line)
        answer: str | int = ""
        match request["do"]:
            case "start":
                answer = start(request, Path(request["log"]), request["environ"])
            case "reap":
                answer = os.waitstatus_to_exitcode(os.waitpid(request["pid"], 0)[1])
            case "run":
                answer = _run(request, start)
        print(json.dumps(answer), file=answers, flush=True)


def _prepare() -> Start:
    """Imports what every rank needs, if they are forked; returns how to start one."""
    import torch

    if torch.cuda.is_available():
        return _start_plain
    from slipstream.learner.trainer.__main__ import preload

    # Imported objects are never collected: the ranks share their memory until a rank writes to it.
    preload()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, (
        f"cannot fork: the imports have started {len(threads) - 1} threads"
    )
    return _fork


def _fork(request: dict, log: Path, environ: Mapping[str, str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code: object = 1
    try:
        die_with_parent()
        with log.open("w") as file, open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.environ.clear()
        os.environ.update(environ)
        _do(request)
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:  # noqa: BLE001 - the exit code tells the parent
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _start_plain(request: dict, log: Path, environ: Mapping[str, str]) -> int:
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(request)],
            env=environ,
            stdout=file,
            stderr=file,
        )
    # The process was waited for by its number, like a forked one.
    process.returncode = 0
    return process.pid


def _do(request: dict) -> None:
    if request["do"] == "run":
        _run_rank(request)
    else:
        sys.argv = [request["module"], *request["arguments"]]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def _log(request: dict, rank: int) -> Path:
    return Path(request["folder"]) / f"world-{request['world_size']}-rank-{rank}.log"


def _refuse_what_nccl_refuses() -> None:
    """Makes gloo refuse tensors with gaps: these ranks stand for ranks with GPUs."""
    import torch
    import torch.distributed as dist

    def checked(collective: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(collective)
        def call(*args: object, **named: object) -> object:
            for value in (*args, *named.values()):
                for item in value if isinstance(value, list) else [value]:
                    if isinstance(item, torch.Tensor) and not item.is_contiguous():
                        raise ValueError(
                            f"{collective.__name__}: tensors must be contiguous"
                        )
            return collective(*args, **named)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, checked(getattr(dist, name)))


def _run_rank(request: dict) -> None:
    _refuse_what_nccl_refuses()
    path = Path(request["program"])
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    # A rank that hangs says where, before it is killed.
    faulthandler.dump_traceback_later(max(0.5, request["limit_s"] - 1.0))
    for job, port in request["jobs"]:
        os.environ["MASTER_PORT"] = str(port)
        started_s = time.monotonic()
        module.run_rank(Path(request["folder"]), job)
        # The groups of a job lie in cycles of references, and their threads wake up all the time.
        gc.collect()
        # A module that a job has imported stays: no later collection, Megatron's own too, looks at
        # it again.
        gc.freeze()
        print(f"{job}: {time.monotonic() - started_s:.1f} s", flush=True)
    faulthandler.cancel_dump_traceback_later()


def _run(request: dict, start: Start) -> str:
    """Starts the ranks and waits for all, or for the first failure, which is the answer."""
    world_size = str(request["world_size"])
    shared = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    shared |= {"MASTER_ADDR": request["host"]}
    ranks = {}
    for rank in range(request["world_size"]):
        environ_of_rank = (
            os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        ranks[start(request, _log(request, rank), environ_of_rank)] = rank
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
        failure += "".join(
            f"\nrank {rank}:\n{_tail(request, rank)}" for rank in ranks.values()
        )
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
        _do(json.loads(sys.argv[1]))
    else:
        _serve()

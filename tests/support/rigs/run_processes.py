"""Starts commands as a user does, finds their processes, and reads what a run leaves."""

import asyncio
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import tomli_w
from slipstream.client import Client
from slipstream.client.status import Event, RunStatus
from slipstream.client.verify import examine
from slipstream.core.machine.address import free_port
from slipstream.core.run_folder import TOKEN
from slipstream.learner.controller.records.journal import read_records
from slipstream.learner.trainer.tiny_model import make_tokenizer
from slipstream.protocol.access.security import Credentials, open_channel
from slipstream.v1 import trainer_pb2, trajectory_pb2

from support.fakes.model_folders import write_loadable_files
from support.fakes.tiny_models import make_model_folder
from support.rigs.batch_messages import stored_batch
from support.rigs.completed import completed
from support.rigs.forked_programs import AwaitedProgram, Forks

ROOT = Path(__file__).parents[3]
# The first line of a start, and what is told when it takes three seconds, as it may where other
# work takes the machine.
SLOW = re.compile(
    r"(run \S+ is checked: its files, this machine, its environments"
    r"|environment [a-z-]+ is checked, each call within \d+ s"
    r"|waiting for the controller at \S+, for up to [\d.]+ s)\n"
)
QUICKSTART = ROOT / "deploy" / "configs" / "quickstart.toml"
EXAMPLE_ENVIRONMENTS = ROOT / "tests" / "support" / "fakes" / "example_environments.py"
PLAIN_LOOP = ROOT / "tests" / "support" / "references" / "plain_loop.py"
PROGRAM = Path(sys.executable).with_name("slipstream")
# There is no script if the packages are only on PYTHONPATH.
COMMAND = (
    [str(PROGRAM)]
    if PROGRAM.exists()
    else [sys.executable, "-m", "slipstream.client.cli"]
)
# A command's own imports take half a second.
COMMANDS = Forks(
    "slipstream.client.cli",
    "slipstream.client.client",
    "slipstream.client.launch.launcher",
    "slipstream.client.terminal",
    entry="slipstream.client.cli:main",
)
# Marks of whole runs with all real parts.
LONG_RUN = [pytest.mark.long, pytest.mark.usefixtures("nothing_survives")]
SLOW_RUN = [pytest.mark.slow, pytest.mark.usefixtures("nothing_survives")]
START_LIMIT_S = 120.0
# Processes of a run, by what stands in their command line.
CONTROLLER = "slipstream.learner.controller"
TRAINER = "slipstream.learner.trainer"
ROLLOUT_SERVER = "slipstream.rollout_server"
WORKER = "slipstream.client.worker"

_PR_SET_CHILD_SUBREAPER = 36
_NO_CREDENTIALS = Credentials()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def nothing_survives() -> Iterator[None]:
    """Fails when a process that the tests of the module started is still there after them."""
    # A process that loses its parent becomes a child of this process instead of the system's.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = set(descendants(os.getpid()))
    yield
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    now = [p for p in descendants(os.getpid()) if p.pid != COMMANDS.pid]
    survivors = {p: describe(p) for p in now if p not in before}
    for process in survivors:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert not survivors, f"still running: {list(survivors.values())}"


def empty_model(folder: Path) -> Path:
    """A model folder that passes all checks of its files, and whose weights nothing can load."""
    model = folder / "empty-model"
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    write_loadable_files(model)
    make_tokenizer(model)
    return model


def write_config(
    folder: Path, model: Path, *, base: Path = QUICKSTART, **changes: object
) -> Path:
    """The settings of `base` as a file in `folder`; `algorithm__max_staleness=0` changes one.

    The run lies in `folder`/run, its controller listens at a free port.
    """
    table = tomllib.loads(base.read_text())
    table["run"] |= {"name": "run", "dir": str(folder)}
    table["model"]["path"] = str(model)
    table["controller"] = {"address": f"127.0.0.1:{free_port('127.0.0.1')}"}
    for name, value in changes.items():
        *sections, key = name.split("__")
        place = table
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.toml"
    path.write_text(tomli_w.dumps(table))
    return path


def address_of(config: Path) -> str:
    return tomllib.loads(config.read_text())["controller"]["address"]


def token_of(config: Path) -> Path:
    """The file of the run's token, in the run's folder as `write_config` names it."""
    run = tomllib.loads(config.read_text())["run"]
    return Path(run["dir"], run["name"], TOKEN)


def copy_environments(folder: Path) -> Path:
    """A working directory with `user_environments.py` in it, which no other path leads to."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(EXAMPLE_ENVIRONMENTS, folder / "user_environments.py")
    return folder


def run_command(
    *arguments: object, cwd: Path | None = None, limit_s: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """A command from its start to its end, forked where its imports are done."""
    return COMMANDS.run([*map(str, arguments)], cwd=cwd, limit_s=limit_s)


def succeed(
    *arguments: object, cwd: Path | None = None, limit_s: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """`run_command` whose exit code must be 0."""
    result = run_command(*arguments, cwd=cwd, limit_s=limit_s)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def run_with_logs(folder: Path, *, limit_s: float) -> None:
    """Runs config.toml in `folder`; a failure shows the ends of all logs."""
    result = run_command("run", "config.toml", cwd=folder, limit_s=limit_s)
    if result.returncode != 0:
        for log in sorted((folder / "run" / "logs").glob("*.log")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}")
    assert result.returncode == 0, result.stdout + result.stderr


def trained_trajectories(run: Path) -> list[trajectory_pb2.Trajectory]:
    """All trajectories of the batches in a run's journal."""
    return [
        trajectory for batch in batches_of(run) for trajectory in batch.trajectories
    ]


@dataclass(eq=False)
class Command:
    process: AwaitedProgram
    folder: Path

    @property
    def out(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "stderr").read_text()

    async def wait(self, limit_s: float) -> int:
        """The command's exit code; fails the test with its output if it exceeds `limit_s`."""
        try:
            async with asyncio.timeout(limit_s):
                return await self.process.wait()
        except TimeoutError:
            pytest.fail(f"still running after {limit_s:g} s:\n{self.out}\n{self.err}")

    def find(self, *texts: str) -> list[psutil.Process]:
        """The processes below it whose command line or name has all of `texts`.

        Not those that such a process forked: they have its command line until they rename
        themselves.
        """
        processes = [
            process
            for process in descendants(self.process.pid)
            if all(text in describe(process) for text in texts)
        ]
        pids = {process.pid for process in processes}
        return [process for process in processes if parent_pid(process) not in pids]

    def engines(self) -> list[psutil.Process]:
        """vLLM's own processes: all below the rollout servers but environment workers.

        Not by their title: it has room only where the server's environment is large enough.
        """
        return [
            process
            for server in self.find(ROLLOUT_SERVER)
            for process in descendants(server.pid)
            if WORKER not in describe(process)
        ]


@asynccontextmanager
async def command(
    folder: Path, *arguments: object, cwd: Path, forks: Forks = COMMANDS
) -> AsyncIterator[Command]:
    """A command whose output goes to `folder`; at the end of the block it is killed."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        words = [*map(str, arguments)]
        process = forks.start(words, out=out.fileno(), err=err.fileno(), cwd=cwd)
    try:
        yield Command(process, folder)
    finally:
        if process.returncode is None:
            below = descendants(process.pid)
            process.kill()
            await process.wait()
            for each in below:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            await until_gone(below)


@asynccontextmanager
async def connection(config: Path, started: Command) -> AsyncIterator[Client]:
    """A client of the run, as soon as its controller answers."""
    address = address_of(config)
    async with open_channel(address, _NO_CREDENTIALS) as channel:
        ready = asyncio.ensure_future(channel.channel_ready())
        ended = asyncio.ensure_future(started.process.wait())
        try:
            async with asyncio.timeout(START_LIMIT_S):
                await asyncio.wait((ready, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
            ended.cancel()
    assert started.process.returncode is None, started.err
    async with Client(address, token_file=token_of(config)) as client:
        yield client


async def until_event(
    client: Client, accept: Callable[[Event], bool], *, limit_s: float = START_LIMIT_S
) -> Event:
    """The first event, old or new, that `accept` takes."""
    seen = []
    try:
        async with asyncio.timeout(limit_s):
            async for event in client.watch():
                if accept(event):
                    return event
                seen.append(event.text)
    except TimeoutError:
        seen.append(f"nothing more for {limit_s:g} s")
    pytest.fail("\n".join(seen))


async def until_step(
    client: Client, step: int, *, limit_s: float = START_LIMIT_S
) -> Event:
    """The event of the first step that makes version `step` or a later one."""
    return await until_event(client, lambda event: event.step >= step, limit_s=limit_s)


async def until_status(
    client: Client,
    accept: Callable[[RunStatus], bool],
    *,
    limit_s: float = START_LIMIT_S,
) -> RunStatus:
    """The first status that `accept` takes; asked for again after each moment's pause."""
    async with asyncio.timeout(limit_s):
        while not accept(status := await client.status()):
            await asyncio.sleep(0.1)
    return status


async def until_gone(
    processes: list[psutil.Process], *, limit_s: float = START_LIMIT_S
) -> None:
    """Waits until all are gone; fails with those that are left."""
    until_s = time.monotonic() + limit_s
    while alive := [describe(p) for p in processes if is_alive(p)]:
        assert time.monotonic() < until_s, f"after {limit_s:g} s: {alive}"
        await asyncio.sleep(0.05)


def descendants(pid: int) -> list[psutil.Process]:
    """The processes below `pid` that have not ended."""
    try:
        below = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [process for process in below if is_alive(process)]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def parent_pid(process: psutil.Process) -> int | None:
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return None


def describe(process: psutil.Process) -> str:
    """The command line of `process`, or its name if it has none."""
    try:
        return f"{process.name()} {' '.join(process.cmdline())}"
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def kill(process: psutil.Process) -> None:
    process.send_signal(signal.SIGKILL)


def summary_of(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


def rows_of(run: Path) -> list[dict]:
    """The lines of metrics.jsonl."""
    return [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]


def records_of(run: Path, kind: str = "") -> list[dict]:
    """The records of one kind in a run's journal, or of all."""
    return [r for r in read_records(run / "journal") if kind in ("", r["kind"])]


def batches_of(run: Path) -> list[trainer_pb2.RecordedBatch]:
    """The batches of a run in which none was set aside."""
    return [
        stored_batch(run / "journal", record) for record in records_of(run, "batch")
    ]


def check_finished(run: Path, *, steps: int) -> None:
    """A run that has learned trained every step and group once, and lost no token."""
    summary = checked(run)
    assert (summary["state"], summary["steps"]) == ("finished", steps)
    assert summary["reward_heldout"] > 0.7 > summary["reward_heldout_first"]


def check_refused(
    result: subprocess.CompletedProcess[str], *parts: str, code: int = 2
) -> None:
    """A command is refused in one line, which has these parts."""
    assert result.returncode == code, (result.stdout, result.stderr)
    assert SLOW.sub("", result.stdout) == ""
    line, *more = result.stderr.splitlines()
    assert not more, result.stderr
    assert line.startswith("slipstream: ")
    for part in parts:
        assert part in line


def checked(run: Path) -> dict:
    """The summary of a run that has ended with no token on its way and none without its end.

    `slipstream verify` finds no fault in its files either.
    """
    summary = summary_of(run)
    assert summary["ledger"]["queued"] == summary["ledger"]["in_flight"] == 0, summary[
        "ledger"
    ]
    assert examine(run).faults == []
    return summary


def check_replay(run: Path, *, cwd: Path | None = None, limit_s: float = 400.0) -> None:
    """The journal alone makes the weights of each step again, to the last bit."""
    replay = succeed("replay", run, cwd=cwd, limit_s=limit_s)
    assert replay.stdout.count("as recorded") == summary_of(run)["steps"]


def plain_loop(*arguments: object) -> list[dict]:
    """What `plain_loop.py` prints, from a fresh process."""
    result = completed([sys.executable, str(PLAIN_LOOP), *map(str, arguments)])
    assert result.returncode == 0, result.stderr[-3000:]
    return [
        json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")
    ]

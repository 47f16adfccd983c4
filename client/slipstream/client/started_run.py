"""Starts a run from Python, and plays the environments of the calling process for it.

    python -m slipstream.client.started_run PARENT SETTINGS.toml

This program is `slipstream run` for the process PARENT, and stops the run when PARENT ends.

Consumes: metrics.jsonl of the run. Produces: its rows. All runs of a process share two threads: one
answers the commands of their rollout servers, and environments may block it. The other starts the
runs' commands and waits for them; it lives as long as the process does, as `die_with_parent` needs.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import inspect
import io
import math
import os
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import tomli_w
from pydantic import JsonValue
from slipstream.client.audit import Audit
from slipstream.client.audit_report import AuditFinding, findings
from slipstream.client.client import LOOK_S, Client, NoController
from slipstream.client.environment import AnyEnvironment, Environment
from slipstream.client.environment_loader import running_place
from slipstream.client.episode_host import EpisodeHost
from slipstream.client.launch.preflight import CHECKED_CALLS, RUN_AUDIT_S, SLOW_S, limits_of
from slipstream.client.page import PAGE
from slipstream.client.run_folder import FoundRun, end_of_lines, parsed, read_summary
from slipstream.client.status import RunStatus
from slipstream.client.terminal import complain
from slipstream.core.arguments import Count, checked, kind_of, of_kind
from slipstream.core.configuration.automatic import add_names
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.configuration.toml_text import check_values
from slipstream.core.errors import (
    FAILED,
    USAGE_ERROR,
    ConfigError,
    EnvironmentFailed,
    RunFailed,
)
from slipstream.core.logs import as_text
from slipstream.core.machine.files import OwnedFolder
from slipstream.core.machine.process import die_with_parent, send_signal
from slipstream.core.run_folder import ADDRESS, METRICS
from slipstream.core.settings.config import Config
from slipstream.core.settings.sections import EnvironmentSection
from slipstream.core.template_values import plain
from slipstream.protocol.access.run_token import run_security
from slipstream.v1 import environment_pb2 as pb

SOURCE = "slipstream.run"
COMMAND = (sys.executable, "-m", "slipstream.client.started_run")
# Options of an environment of this process, as `Client.serve` has them, and the class's arguments.
OPTIONS = (
    "name",
    "args",
    "weight",
    "timeout_s",
    "episodes",
    "chat_template_kwargs",
    "adapter",
    "reference",
)
# Seconds in which runs end in order when their process exits; then Linux ends them.
EXIT_LIMIT_S = 120.0
# Seconds in which the thread of environments must answer for a status, and close them at the end of
# their run.
BLOCKED_S = 30.0
TAIL_CHARACTERS = 8192
# Names of the two threads.
COMMANDS = "slipstream-commands"
ENVIRONMENTS = "slipstream"

Result = TypeVar("Result")


@checked
def run(*, environments: object = None, show: bool = True, **settings: object) -> Run:
    """Starts a run on this machine, plays its own objects before, and returns its handle.

    `settings` are the tables of a configuration file: `model={"path": "models/tiny"}`.
    `environments` is one environment or a list, or None if a client brings some: an instance of a
    class, a class that needs no arguments, or a table as in a file. The `reference` of a table may
    be such an object, too. These objects stay in this process, and their methods are called in a
    thread of it. Other options of their tables are those of `Client.serve`, and `args` for a class.
    `show` prints what the command `slipstream run` would print.

    The run ends in order when the handle is garbage or the process ends: keep the handle. Raises
    ConfigError for wrong settings, and for an object that `slipstream check` refuses.
    """
    tables: list[object] = []
    served: list[_Served] = []
    listed = environments if isinstance(environments, list | tuple) else [environments]
    if not listed:
        raise ConfigError(f"{SOURCE}: environments is an empty list: name an environment")
    for entry in () if environments is None else listed:
        table = dict(entry) if isinstance(entry, Mapping) else {"reference": entry}
        if isinstance(table.get("reference"), str):
            tables.append(table)
        else:
            served.append(_Served.of(table))
    own_table = _table(settings | {"environments": tables})
    for player in served:
        options = {key: value for key, value in player.options.items() if key != "episodes"}
        tables.append({"name": player.name, "reference": "__main__:Environment", **options})
    whole_table = _table(settings | {"environments": tables})
    add_names(whole_table)
    # The run has by default the names of all environments, wherever they are.
    if isinstance(stated := own_table.setdefault("run", {}), dict):
        stated.setdefault("name", whole_table["run"]["name"])
    # Names, weights and limits of objects, too.
    sections = parse_config(whole_table, source=SOURCE, complete=False).environments[-len(served) :]
    config = parse_config(own_table, source=SOURCE, complete=False)
    plan = _Plan(own_table, config, tuple(map(_Served.checked, served, sections)), show, Path.cwd())
    for player in plan.served:
        _audit(player, plan)
    return Run(plan)


class Run:
    """A run that this process has started.

    Iterating yields each row of its metrics once, as a dict, as soon as its step is done: the first
    iteration begins with the first row of this start. The iteration ends with the run, and raises
    what `wait` raises. A KeyboardInterrupt while a method waits stops the run in order. At the end
    of a `with` block the run is stopped.
    """

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan
        # A torn last line is removed when the run goes on.
        self._offset = end_of_lines(self.folder / METRICS)
        self._begin()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<slipstream.Run {self.folder}: {'ended' if self._end.done() else 'goes on'}>"

    @property
    def folder(self) -> Path:
        return self._plan.folder

    @property
    def page(self) -> Path:
        """The page with curves and replies, which is written anew while the run goes on."""
        return self.folder / PAGE

    def status(self) -> RunStatus:
        """Returns the state of the run at this moment; raises ConfigError unless it goes on.

        Raises NoController if an environment of this process blocks its thread.
        """

        async def ask(plan: _Plan) -> RunStatus:
            async with plan.client() as client:
                return await client.status()

        # The calls of a process have one loop, as gRPC likes it.
        answer = _awaited(_submit(ask(self._plan), ENVIRONMENTS), BLOCKED_S)
        if answer.cancel():
            raise NoController(
                "an environment of this process blocks the thread that would ask the controller"
            )
        return answer.result()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        path = self.folder / METRICS
        is_last = False
        while not is_last:
            is_last = self._end.done()
            with path.open("rb") if path.is_file() else io.BytesIO() as file:
                if file.seek(0, os.SEEK_END) < self._offset:
                    # The file was cut or removed meanwhile.
                    self._offset = 0
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._offset += len(line)
                    if isinstance(row := parsed(line), dict):
                        yield row
            if not is_last:
                self._look()
        self.wait()

    def wait(self) -> dict[str, Any]:
        """Waits for the end of the run and returns its summary, as summary.json has it.

        Raises ConfigError if this machine cannot carry out the run, and RunFailed with the cause
        and its log if the run failed.
        """
        while not self._end.done():
            self._look()
        self._end.result()
        return read_summary(self.folder) or {}

    def stop(self) -> None:
        """Ends the run after the current step and waits; a KeyboardInterrupt ends it at once."""
        self._start.ask_end()
        try:
            _awaited(self._end)
        except KeyboardInterrupt:
            self._start.ask_end(signal.SIGINT)
            _awaited(self._end)
            raise

    def resume(self) -> None:
        """Starts the ended run again, from its newest checkpoint, or raises ConfigError."""
        if not self._end.done():
            raise ConfigError(f"{self.folder} is a run that goes on; stop it before it is resumed")
        self._begin()

    def _begin(self) -> None:
        starting = _submit(_start(self._plan))
        try:
            self._start, self._end = _awaited(starting).result()
        except KeyboardInterrupt:
            starting.add_done_callback(lambda started: started.result()[0].ask_end())
            raise
        self._finalizer = weakref.finalize(self, self._start.ask_end)
        self._finalizer.atexit = False

    def _look(self) -> None:
        try:
            concurrent.futures.wait([self._end], LOOK_S)
        except KeyboardInterrupt:
            self.stop()
            raise


@dataclass(frozen=True)
class _Served:
    environment: AnyEnvironment
    name: str
    # Arguments of `Client.serve`.
    options: Mapping[str, Any]

    def checked(self, section: EnvironmentSection) -> _Served:
        """Returns it with the options as its section of the settings has checked them."""
        what = f"{SOURCE}: environments: episodes of {self.name}"
        number = of_kind(what, self.options.get("episodes", 64), kind_of(Count))
        values = section.model_dump(include={*OPTIONS} - {"args", "reference"}, exclude_none=True)
        return _Served(self.environment, self.name, values | {"episodes": number})

    @staticmethod
    def of(table: dict[str, Any]) -> _Served:
        """Returns the environment of a table whose `reference` is an object."""
        for key in table:
            if key not in OPTIONS:
                raise ConfigError(
                    f"{SOURCE}: environments: an environment of this process has no option {key}, "
                    f"only {', '.join(OPTIONS)}"
                )
        reference = table.pop("reference", None)
        args = table.pop("args", {})
        if isinstance(reference, type) and issubclass(reference, Environment):
            try:
                inspect.signature(reference).bind(**args)
            except TypeError as error:
                name = reference.__name__
                raise ConfigError(f"{SOURCE}: environments: args of {name}: {error}") from None
            reference = reference(**args)
        elif args:
            raise ConfigError(f"{SOURCE}: environments: args are for a class, got {reference!r}")
        if not isinstance(reference, Environment):
            hint = "; a function judges questions: Questions(rows, judge=function)"
            raise ConfigError(
                f"{SOURCE}: environments must be classes or instances of "
                f"slipstream.client.Environment, got {reference!r}{hint * callable(reference)}"
            )
        return _Served(reference, table.pop("name", type(reference).__name__.lower()), table)


@dataclass(frozen=True)
class _Plan:
    # The settings as given.
    table: Mapping[str, JsonValue]
    config: Config
    served: tuple[_Served, ...]
    show: bool
    # The working directory of the call: paths stay below it, wherever the process goes.
    cwd: Path

    @property
    def folder(self) -> Path:
        return self.cwd / self.config.run_dir

    @property
    def address(self) -> tuple[int, str]:
        """When the address of the controller was written, and the address; (0, "") without it."""
        path = self.folder / ADDRESS
        try:
            return path.stat().st_mtime_ns, path.read_text()
        except FileNotFoundError:
            return 0, ""

    def client(self) -> Client:
        address = self.address[1].strip()
        if not address:
            raise NoController(f"{self.folder} has no controller yet")
        security = self.config.security
        paths = {name: self.cwd / value for name, value in security if isinstance(value, Path)}
        security = run_security(security.model_copy(update=paths), address, self.folder)
        return Client.of_run(FoundRun(address, security))


@dataclass(frozen=True, eq=False)
class _Start:
    process: asyncio.subprocess.Process
    # Signals that somebody has sent to end the run.
    signals: list[signal.Signals] = field(default_factory=list)

    def ask_end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Sends a signal to the command unless it has ended or got the same one before."""
        if number not in self.signals:
            self.signals.append(number)
            _loop(COMMANDS).call_soon_threadsafe(send_signal, self.process, number)


async def _start(plan: _Plan) -> tuple[_Start, concurrent.futures.Future[None]]:
    """Starts the command; returns it with what its end will be."""
    before = plan.address
    folder = OwnedFolder("notebook")
    settings = folder.path / "settings.toml"
    stderr = folder.path / "stderr"
    settings.write_bytes(tomli_w.dumps(plan.table).encode())
    with stderr.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            str(os.getpid()),
            str(settings),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=None if plan.show else asyncio.subprocess.DEVNULL,
            stderr=file,
            cwd=plan.cwd,
            # An interrupted cell interrupts its process group.
            start_new_session=True,
        )
    start = _Start(process)

    async def conduct() -> None:
        with contextlib.closing(folder):
            over: concurrent.futures.Future[None] = concurrent.futures.Future()
            loop = _loop(ENVIRONMENTS)
            served = asyncio.run_coroutine_threadsafe(_serve(plan, before, over), loop)
            serving = asyncio.wrap_future(served)
            ended = asyncio.ensure_future(process.wait())
            await asyncio.wait((serving, ended), return_when=asyncio.FIRST_COMPLETED)
            failure = None if ended.done() else serving.exception()
            if failure is not None:
                # The run cannot go on without the environments of this process.
                send_signal(process, signal.SIGTERM)
            await ended
            over.set_result(None)
            closing = asyncio.wait_for(serving, BLOCKED_S)
            await asyncio.gather(closing, return_exceptions=True)
            if served.cancelled():
                # An environment may block its thread for ever: those of later runs get another one.
                if _loops.get(ENVIRONMENTS) is loop:
                    del _loops[ENVIRONMENTS]
                warnings.warn(
                    f"an environment was not closed within {BLOCKED_S:g} s of its run's end: a "
                    "call that blocks its thread holds up all environments of this process",
                    stacklevel=1,
                )
            # A number above 128 is that of a signal, after which the run was stopped in order.
            code = process.returncode or 0
            if failure is not None:
                raise failure
            if code and not start.signals and code <= 128:
                lines = stderr.read_text(errors="replace").splitlines()
                output = "\n".join(map(as_text, lines))
                cause = output[-TAIL_CHARACTERS:].rpartition("slipstream: ")[2].strip()
                if code not in (FAILED, USAGE_ERROR):
                    cause = f"the command ended with code {code}: {cause}"
                raise (ConfigError if code == USAGE_ERROR else RunFailed)(cause)

    end = _submit(conduct())
    _ends[end] = start
    end.add_done_callback(_ends.pop)
    return start, end


async def _serve(
    plan: _Plan, before: tuple[int, str], over: concurrent.futures.Future[None]
) -> None:
    """Serves the environments of this process until `over` is done; raises what ends it before."""
    if plan.served:
        serving = asyncio.ensure_future(_serve_all(plan, before))
        end = asyncio.wrap_future(over)
        await asyncio.wait((serving, end), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def _serve_all(plan: _Plan, before: tuple[int, str]) -> None:
    while plan.address[0] == before[0] or not plan.address[1].endswith("\n"):
        await asyncio.sleep(LOOK_S)
    async with plan.client() as client:

        async def serve(player: _Served) -> None:
            try:
                await client.serve(player.environment, connect_timeout_s=math.inf, **player.options)
            except EnvironmentFailed as error:
                # The run goes on with its other environments, or fails.
                complain(str(error))

        try:
            async with asyncio.TaskGroup() as group:
                for player in plan.served:
                    group.create_task(serve(player))
        except BaseExceptionGroup as errors:
            first, *further_errors = errors.exceptions
            for error in further_errors:
                complain(str(error))
            raise first from None


def _audit(player: _Served, plan: _Plan) -> None:
    """Plays an environment for a second, as a command does; raises ConfigError to refuse it."""

    async def audited() -> list[AuditFinding]:
        # An environment without tasks is refused here.
        host = EpisodeHost(player.environment)
        config = plan.config
        loaded = pb.Loaded(num_tasks=host.num_tasks, digest=host.digest())
        try:
            ask = lambda **command: host.answer(pb.WorkerCommand(**command))  # noqa: E731
            # One host plays the episodes of all servers.
            limits = limits_of(config, num_workers=1)
            audit = Audit(host, ask, loaded=loaded, limit_s=RUN_AUDIT_S, limits=limits)
            return findings(await audit.run())
        finally:
            await host.close_all()

    auditing = _submit(audited(), ENVIRONMENTS)
    subject = f"environment {player.name}"
    limit_s = CHECKED_CALLS * player.options["timeout_s"]
    if not _awaited(auditing, SLOW_S).done() and plan.show:
        print(f"{subject} is checked, within {limit_s:g} s", flush=True)
    if _awaited(auditing, limit_s).cancel():
        threads = [thread for thread in threading.enumerate() if thread.name == ENVIRONMENTS]
        thread = threads[-1]
        place = running_place(cast(int, thread.ident))
        # The thread may be blocked for ever: later environments get another one.
        _loops.pop(ENVIRONMENTS, None)
        raise ConfigError(f"{subject}: its check did not end within {limit_s:g} s ({place})")
    try:
        audit_findings = auditing.result()
    except ConfigError as error:
        raise ConfigError(f"{subject}: {error}") from None
    for finding in audit_findings:
        if finding.is_refused and plan.config.run.audit == "refuse":
            raise ConfigError(f"{subject}: {finding.text}")
        if plan.show and not finding.is_of_time:
            complain(f"warning: {subject}: {finding.text}")


def _table(settings: Mapping[str, object]) -> dict[str, Any]:
    """Returns a copy of settings as TOML could write them; raises ConfigError if it could not."""
    table = _plain(settings, SOURCE)
    check_values(table, SOURCE)
    return cast(dict[str, Any], table)


def _plain(value: object, place: str) -> JsonValue:
    """Returns a copy of a setting with lists for tuples and texts for paths."""
    value = plain(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(entry, f"{place}: {key}") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, place) for entry in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str | bool | int | float):
        return value
    raise ConfigError(f"{place} must be a text, number, list or table, got {value!r}")


# Starts that have not ended, by the futures of their ends.
_ends: dict[concurrent.futures.Future[None], _Start] = {}
# The loops of the threads, from the first start on, and the lock of whoever makes them.
_loops: dict[str, asyncio.AbstractEventLoop] = {}
_making = threading.Lock()


def _loop(thread: str) -> asyncio.AbstractEventLoop:
    with _making:
        if not _loops:
            atexit.register(end_all)
        if thread not in _loops:
            _loops[thread] = asyncio.new_event_loop()
            threading.Thread(target=_loops[thread].run_forever, name=thread, daemon=True).start()
        return _loops[thread]


def _leave_to_parent() -> None:
    """Forgets the runs and the threads of the process that has forked this one."""
    for start in _ends.values():
        start.signals.extend((signal.SIGTERM, signal.SIGINT))
    _ends.clear()
    _loops.clear()
    _making.release()


# No fork finds the lock in the hands of a thread that the child does not have.
os.register_at_fork(
    before=_making.acquire, after_in_parent=_making.release, after_in_child=_leave_to_parent
)


def _awaited(
    future: concurrent.futures.Future[Result], limit_s: float = math.inf
) -> concurrent.futures.Future[Result]:
    """Waits until `future` is done, at most `limit_s`, and returns it.

    Looks up now and then: Linux may give a signal to another thread, which wakes no thread that
    waits for a lock, so a KeyboardInterrupt would come at the end of the run.
    """
    end = time.monotonic() + limit_s
    while not future.done() and time.monotonic() < end:
        concurrent.futures.wait([future], LOOK_S)
    return future


def _submit(
    call: Coroutine[Any, Any, Result], thread: str = COMMANDS
) -> concurrent.futures.Future[Result]:
    return asyncio.run_coroutine_threadsafe(call, _loop(thread))


def end_all() -> None:
    """Ends all runs of this process in order."""
    for start in tuple(_ends.values()):
        start.ask_end()
    concurrent.futures.wait(tuple(_ends), EXIT_LIMIT_S)


def main() -> int:
    """Runs the command for the process that started this one; returns its exit code."""
    parent, settings = sys.argv[1:]
    die_with_parent(signal.SIGTERM)
    if os.getppid() != int(parent):
        return FAILED
    # The command says by this how a run is resumed.
    sys.argv = ["resume()"]
    from slipstream.client.cli import main as command

    return command(["run", settings])


if __name__ == "__main__":
    sys.exit(main())

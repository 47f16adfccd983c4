"""Runs any program as an agent, which finds the model by its environment variables."""

import contextlib
import json
import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field
from slipstream.client.environment import AgentEnvironment, AgentOutcome, Endpoint
from slipstream.core.arguments import AboveZero, NotNegative, checked
from slipstream.core.errors import ConfigError
from slipstream.core.machine.files import OwnedFolder, read_regular
from slipstream.core.machine.process import open_variables
from slipstream.environments.arguments import FIELD, check_filled, filled
from slipstream.environments.question_files import Row, named_rows
from slipstream.environments.sandbox.kept_program import ProgramEnd, run_program
from slipstream.environments.sandbox.plan import Limits, Plan
from slipstream.environments.sandbox.sandbox import launched, why_not

MAX_SCORE_BYTES = 64 << 10
GIB = 1 << 30
ADDRESS_SPACE_BYTES = 1 << 47
# Of a program in the sandbox, on average.
THREADS_A_PROCESS = 256
# Keeps Python from importing what the judged program left, in its folder or its home.
ISOLATED = {"PYTHONNOUSERSITE": "1", "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
# Hint for a program that was killed in the sandbox without a message.
REFUSED = (
    " (the sandbox refuses /proc/self and every other path that `readable` does not name: "
    "docs/guides/agents.md#in-the-sandbox)"
)


class Command(AgentEnvironment[Row]):
    """Runs a program for each task, in a folder of its own, and scores the result.

    A task is an object; a text stands for an object with the text in the field `task`. In
    `command`, `files`, `variables` and `score_command`, {NAME} is replaced by the task's field
    NAME; other braces stay as they are. {NAME} may also name a variable of the endpoint, except in
    `score_command`. The program's environment variables are PATH, LANG, the endpoint's variables,
    HOME and TMPDIR (folders of the episode) and `variables`.

    `score_command` runs in the program's folder, with a HOME and a TMPDIR of its own. Its Python
    imports nothing from that folder; in the sandbox it cannot write there.

    The reward is the last line that `score_command` prints, or the content of `score_file`: a
    number, or a JSON object with `reward` and metrics; one of both must be given, since exit status
    0 is no score. A program that reaches a limit is ended, and scored like any other.

    If `relay`, the endpoint is a unix socket, for a `command` that is a sandbox without network:
    it mounts {SLIPSTREAM_SOCKET} and {SLIPSTREAM_RELAY}, and begins with the relay inside.

    If `remote`, the endpoint is an address that other hosts reach, by `agents.listen`.
    """

    @checked
    def __init__(
        self,
        command: Sequence[str],
        tasks: str | Path | Sequence[Any],
        *,
        files: Mapping[str, str] | None = None,
        variables: Mapping[str, str] | None = None,
        score_command: Sequence[str] | None = None,
        score_file: str | None = None,
        limit_s: AboveZero = 600.0,
        score_limit_s: AboveZero = 60.0,
        max_output_mib: AboveZero = 16.0,
        memory_gib: Annotated[float, Field(ge=0)] = 0.0,
        max_processes: NotNegative = 0,
        sandbox: bool = False,
        readable: Sequence[str | Path] = (),
        relay: bool = False,
        remote: bool = False,
    ) -> None:
        """`tasks` is a list, or the path of a .jsonl or .parquet file.

        `files` are written before the program starts. The limits hold for the program and all
        processes that it starts; 0 for `memory_gib` or `max_processes` means no limit. If
        `sandbox`, the program and `score_command` run in sandlock, and may also read the paths
        `readable`. Raises ConfigError for arguments that cannot work.
        """
        if (score_command is None) == (score_file is None):
            raise ConfigError("give score_command or score_file, one of them: it has the reward")
        if score_file in (files or {}):
            raise ConfigError(f"score_file {score_file} is among files: it would be its own score")
        for program in (command, score_command):
            if program is not None:
                _check_program(program)
        if relay:
            _check_relay(command, variables or {}, sandbox=sandbox)
        if relay and remote:
            raise ConfigError("relay and remote exclude each other: a socket is of this host alone")
        self.needs_socket = relay
        self.needs_url = remote
        self._command = tuple(command)
        self._score_command = tuple(score_command or ())
        self._score_file = _inside(score_file or "")
        self._files = {_inside(name): text for name, text in (files or {}).items()}
        self._variables = dict(variables or {})
        self._tasks = _read_tasks(tasks)
        self._check_fields()
        bounds = {
            "memory_bytes": round(memory_gib * GIB),
            "processes": max_processes,
            "threads": max_processes * THREADS_A_PROCESS if sandbox else 0,
        }
        output_bytes = round(max_output_mib * (1 << 20))
        self._limits = Limits(seconds=limit_s, output_bytes=output_bytes, **bounds)
        score_bounds = bounds if sandbox else dict.fromkeys(bounds, 0)
        self._score_limits = Limits(
            seconds=score_limit_s, output_bytes=MAX_SCORE_BYTES, **score_bounds
        )
        if sandbox and not (memory_gib > 0 and max_processes > 0):
            raise ConfigError("sandbox = true needs memory_gib and max_processes above 0")
        self._confined = _confined(self._limits) if sandbox else None
        self._readable = [os.path.abspath(path) for path in readable]

    def tasks(self) -> list[Row]:
        return self._tasks

    async def run(self, task: Row, endpoint: Endpoint) -> AgentOutcome:
        """Runs the program for `task`, and returns its score as the reward.

        Raises ValueError if scoring gives no reward.
        """
        with contextlib.closing(OwnedFolder("agent")) as owned:
            folder = owned.path / "work"
            fields = {**endpoint.variables(), **task}
            folder.mkdir()
            for name, text in self._files.items():
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(filled(text, fields), encoding="utf-8")
            variables = _with_home(owned.path)
            task_variables = {name: filled(text, fields) for name, text in self._variables.items()}
            port = urlsplit(endpoint.anthropic_url).port or 0
            ended = await run_program(
                self._confine(
                    [filled(part, fields) for part in self._command],
                    owned.path,
                    cwd=folder,
                    port=port,
                ),
                folder=folder,
                variables=variables | endpoint.variables() | task_variables,
                limits=self._limits,
            )
            if ended.cause:
                hint = REFUSED if self._confined is not None and ended.status < 0 else ""
                what = f"{self._command[0]}: {ended.cause}{hint}; the end of its output:"
                print(what, file=sys.stderr)
                print(ended.output, file=sys.stderr)
            score = await self._score(task, folder, ended)
        metrics = {"ended_by_limit": float(bool(ended.limit)), "exit_0": float(ended.status == 0)}
        return AgentOutcome(score.pop("reward"), metrics | score)

    def _confine(
        self,
        command: list[str],
        writable: Path,
        *,
        cwd: Path,
        port: int = 0,
        readable: Sequence[Path] = (),
    ) -> list[str]:
        """Returns the command, wrapped in the sandbox if a sandbox is used.

        The sandbox allows writing below `writable` only, and connections to `port` only, or to no
        port if `port` is 0. It also allows reading `readable`.
        """
        if self._confined is None:
            return command
        paths = [*self._readable, *map(str, readable)]
        plan = Plan("sandlock", str(writable), paths, self._confined, 1, cwd=str(cwd), port=port)
        return launched(plan, command)

    async def _score(self, task: Row, folder: Path, ended: ProgramEnd) -> dict[str, float]:
        """Returns the metrics, with the reward as "reward". Raises ValueError without a reward."""
        if self._score_command:
            with contextlib.closing(OwnedFolder("agent")) as score_folder:
                judged = await run_program(
                    self._confine(
                        [filled(part, task) for part in self._score_command],
                        score_folder.path,
                        cwd=folder,
                        readable=[folder.parent],
                    ),
                    folder=folder,
                    variables=_with_home(score_folder.path) | ISOLATED,
                    limits=self._score_limits,
                    with_errors=False,
                )
            if judged.cause:
                raise ValueError(f"score_command failed: {judged.cause}: {judged.last_line}")
            return _score_of(judged.last_line, "the last line of score_command")
        path = folder / self._score_file
        try:
            if not path.resolve().is_relative_to(folder.resolve()):
                raise OSError("it leads out of the folder")
            text = read_regular(path, most_bytes=MAX_SCORE_BYTES, follow_link=False).decode()
        except (OSError, UnicodeDecodeError) as error:
            how = ended.cause or "exit status 0"
            what = f"no score in {self._score_file} ({error}) after {how}"
            raise ValueError(f"{what}: {ended.last_line}") from error
        return _score_of(text, self._score_file)

    def _check_fields(self) -> None:
        templates = (*self._command, *self._files.values(), *self._variables.values())
        check_filled("command, files or variables", templates, self._tasks)
        check_filled("score_command", self._score_command, self._tasks)
        used_fields = {name for text in templates for name in FIELD.findall(text)}
        if not any(used_fields & task.keys() for task in self._tasks):
            fields = ", ".join(list(self._tasks[0])[:20])
            raise ConfigError(
                f"nothing of a task reaches the program: name one of its fields ({fields}) as "
                f"{{FIELD}} in command, files or variables"
            )


def _read_tasks(tasks: str | Path | Sequence[Any]) -> list[Row]:
    """Returns the tasks as objects; raises ConfigError without any, or for one of another type."""
    rows: list[Any]
    if isinstance(tasks, str | Path):
        rows = [row for _, row in named_rows(Path(tasks))]
    else:
        rows = [{"task": task} if isinstance(task, str) else task for task in tasks]
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise ConfigError(f"task {number} must be a text or an object, got {row!r}")
    if not rows:
        raise ConfigError("there must be at least one task")
    return rows


def _confined(limits: Limits) -> Limits:
    """Returns the sandbox's limits of a program; raises ConfigError without a sandbox."""
    if reason := why_not("sandlock"):
        allows = "which can allow the one port of the endpoint"
        raise ConfigError(f"sandbox = true needs sandlock, {allows}: {reason}")
    return replace(
        limits,
        # The keeper and the time limit bound the processor time.
        processor_s=math.ceil(limits.seconds) * (os.cpu_count() or 1),
        # The keeper bounds used memory. Sandlock would count memory that is reserved but not used,
        # such as the 137 GB of the runtime of Claude Code.
        memory_bytes=ADDRESS_SPACE_BYTES,
        open_files=1024,
        file_bytes=GIB,
        folder_bytes=GIB,
        folder_files=100_000,
    )


def _with_home(folder: Path) -> dict[str, str]:
    """Makes two folders in `folder`; returns variables of a program, which name them."""
    folders = {"HOME": folder / "home", "TMPDIR": folder / "tmp"}
    for path in folders.values():
        path.mkdir()
    return open_variables(os.environ) | {name: str(path) for name, path in folders.items()}


def _check_program(command: Sequence[str]) -> None:
    if not command:
        raise ConfigError("a command must name a program, got []")
    program = command[0]
    # A relative path leads into the folder of the episode, which does not exist yet.
    is_known = FIELD.search(program) is None and ("/" not in program or program.startswith("/"))
    if is_known and shutil.which(program) is None:
        where = "" if program.startswith("/") else " in PATH"
        raise ConfigError(f"there is no program {program!r}{where}")


def _check_relay(command: Sequence[str], variables: Mapping[str, str], *, sandbox: bool) -> None:
    """Raises ConfigError for a program that cannot reach its model through a socket."""
    if sandbox:
        raise ConfigError(
            "relay = true is for a command that is a sandbox itself; with sandbox = true the "
            "program reaches its endpoint and nothing else: leave relay out"
        )
    templates = [*command, *variables.values()]
    fields = {name for text in templates for name in FIELD.findall(text)}
    if "SLIPSTREAM_SOCKET" not in fields:
        raise ConfigError(
            "relay = true needs {SLIPSTREAM_SOCKET} in command: the sandbox must mount the socket, "
            "which is its only way to the model"
        )


def _inside(name: str) -> str:
    path = Path(name)
    if path.is_absolute() or ".." in path.parts:
        raise ConfigError(f"files are inside the folder of the episode, got {name!r}")
    return name


def _score_of(text: str, where: str) -> dict[str, float]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    metrics = {"reward": value} if is_number else value
    if isinstance(metrics, dict) and "reward" in metrics:
        return metrics
    raise ValueError(
        f"{where} must be a number, or a JSON object with `reward` and metrics, "
        f"got {text.strip()[:100]!r}"
    )

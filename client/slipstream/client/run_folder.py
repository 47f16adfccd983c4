"""Checks whether a run may begin or resume in a folder, and locks the folder for one command."""

import contextlib
import fcntl
import json
import math
import os
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import JsonValue
from slipstream.client.resumed_settings import check_resumable
from slipstream.core.configuration.config_file import (
    REMEDY,
    dump_config,
    load_config,
    parse_section,
    with_first_line,
)
from slipstream.core.configuration.toml_text import parse_toml
from slipstream.core.errors import CheckpointError, ConfigError
from slipstream.core.machine.files import open_regular, read_regular, replace_file
from slipstream.core.run_folder import (
    ADDRESS,
    CHECKPOINTS,
    CONFIG,
    FINAL_ADAPTERS,
    FINAL_MODEL,
    JOURNAL,
    JOURNAL_LOG,
    METRICS,
    SUMMARY,
    check_journal_not_lost,
    journal_logs,
    journaled_run_id,
)
from slipstream.core.settings.config import Config
from slipstream.core.settings.sections import SecuritySection
from slipstream.protocol.access.run_token import make_run_token, run_security
from slipstream.protocol.access.security import is_loopback
from slipstream.protocol.checkpoints import (
    MANIFEST_NAME,
    check_newest,
    checkpoint_path,
    complete_steps,
    passed_over,
    read_manifest,
)

LOCK = "command.lock"
# The end of metrics.jsonl in which the newest step is looked for.
TAIL_BYTES = 1 << 20
# Most bytes of a file of settings or of a summary.
MOST_TABLE_BYTES = 4 << 20


def check_run_folder(config: Config) -> bool:
    """Whether the folder holds a run to resume; raises ConfigError if no run may start there."""
    # A command that holds the folder may not yet have a journal.
    _check_not_held(config.run_dir / LOCK, config.run_dir)
    return _check_contents(config)


def _check_contents(config: Config) -> bool:
    folder = config.run_dir
    resume = config.run.resume
    _check_not_held(folder / JOURNAL / JOURNAL_LOG, folder)
    if not any(log.stat().st_size for log in journal_logs(folder / JOURNAL)):
        check_journal_not_lost(folder)
        if resume in ("must", "changed"):
            raise ConfigError(f"run.resume is {resume}, but {folder} holds no run to go on with")
        return False
    if resume == "never":
        raise ConfigError(
            f"{folder} holds a run already; choose another run.name or remove the folder"
        )
    settings = folder / CONFIG
    if not _is_file(settings):
        raise ConfigError(
            f"{settings} is missing or no file, and a run does not go on without the settings "
            f"that it had: {REMEDY}, or begin anew with another run.name"
        )
    check_resumable(load_config(settings), config)
    try:
        check_newest(folder / CHECKPOINTS)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    values = read_summary(folder)
    final = FINAL_ADAPTERS if config.lora.adapters else FINAL_MODEL
    lacks_model = config.learner.export_final and not (folder / CHECKPOINTS / final).is_dir()
    if values is None or values.get("state") != "finished" or lacks_model:
        return True
    # The run may have done all that the settings ask for.
    if values["steps"] >= config.run.steps:
        raise ConfigError(
            f"{folder} is finished with {values['steps']} steps; raise run.steps to go on, or "
            "choose another run.name"
        )
    return True


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Returns the summary of a run, or None if the file is missing or damaged."""
    try:
        values: Any = parsed(read_regular(folder / SUMMARY, most_bytes=MOST_TABLE_BYTES))
    except OSError:
        return None
    is_whole = (
        isinstance(values, dict)
        and isinstance(values.get("state"), str)
        and isinstance(values.get("steps"), int)
    )
    return values if is_whole else None


def _is_file(path: Path) -> bool:
    """Whether there is such a file; raises ConfigError for a folder that may not be looked at."""
    try:
        return path.is_file()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def _check_not_held(path: Path, folder: Path) -> None:
    """Raises ConfigError while a process holds the lock of `path`, which may be missing."""
    try:
        with open_regular(path, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return
    except BlockingIOError:
        raise ConfigError(_held(folder)) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be opened: {error.strerror}") from error


def _held(folder: Path) -> str:
    return (
        f"{folder} is written by a run that goes on; wait for its end, or choose another run.name"
    )


def _no_run(path: Path, runs: Path = Path("runs")) -> str:
    """Says what to name in place of `path`, which is no folder."""
    if not path.is_file():
        return "no such folder"
    if _is_file(path.parent / CONFIG):
        return f"a file, name its folder {path.parent}"
    names = sorted(place.parent.name for place in runs.glob(f"*/{CONFIG}"))
    there = f"one of {', '.join(names)}" if names else "its folder, or its name in runs/"
    return f"a file, name a run: {there}"


def settings_of(folder: Path) -> Path:
    """Returns a run folder's settings file; raises ConfigError if there is none."""
    path = folder / CONFIG
    if _is_file(path):
        return path
    if not folder.is_dir():
        raise ConfigError(f"{folder}: {_no_run(folder)}")
    runs = sorted(str(config_file.parent) for config_file in folder.glob(f"*/{CONFIG}"))
    hint = f"; runs there are {', '.join(runs)}" if runs else ""
    raise ConfigError(f"{folder} is no run's folder: it has no {CONFIG}{hint}")


def check_unwritten(target: Path, *, another: str = "another folder by --out") -> None:
    """Raises ConfigError when an export to `target` would overwrite something, or cannot begin.

    `another` says what to name in its place.
    """
    if target.exists():
        raise ConfigError(f"{target} exists already: remove it, or name {another}")
    place, fault = nearest_folder(target)
    if fault:
        raise ConfigError(f"{target} cannot be written: {place}: {fault}; name {another}")


def nearest_folder(path: Path) -> tuple[Path, str]:
    """Returns `path` or the folder above it that is there, and why it cannot be written or ""."""
    place = next(
        candidate for candidate in (path.absolute(), *path.absolute().parents) if candidate.exists()
    )
    try:
        # Permissions do not show root that a mount is read-only.
        with tempfile.TemporaryFile(dir=place):
            return place, ""
    except OSError as error:
        return place, f"{error.strerror}"


def version_to_export(folder: Path, step: int | None) -> int:
    """Returns `step`, or else the newest version; raises ConfigError unless it is whole."""
    checkpoints = folder / CHECKPOINTS
    steps = complete_steps(checkpoints)
    over = passed_over(checkpoints)
    choices = f"whole ones are {', '.join(map(str, steps))}" if steps else "there is no whole one"
    if step is None and over:
        older = f"give --step {steps[-1]} for an older version, or " if steps else ""
        raise ConfigError(
            f"{over[-1]} is no whole checkpoint, it has no {MANIFEST_NAME} ({choices}): {older}put "
            "the file back from a copy of the run"
        )
    if not steps:
        raise ConfigError(f"{folder} has no checkpoints")
    version = steps[-1] if step is None else step
    if version not in steps:
        raise ConfigError(
            f"{folder} has no checkpoint of version {version}, only of {', '.join(map(str, steps))}"
        )
    try:
        read_manifest(checkpoint_path(checkpoints, version))
    except CheckpointError as error:
        other_steps = ", ".join(str(other) for other in steps if other != version) or "none"
        raise ConfigError(f"{error}, or give another --step (there are {other_steps})") from None
    return version


def node_folder(config: Config, node_rank: int) -> Path:
    """Returns the folder of this node's settings file and lock: on node 0 the run's folder."""
    return config.run_dir / f"node-{node_rank}" if node_rank else config.run_dir


@contextlib.contextmanager
def hold_run_folder(config: Config, *, node_rank: int = 0) -> Iterator[None]:
    """Makes the run's folder and locks it on this node for the block; raises ConfigError."""
    make_run_folder(config)
    with hold_folder(node_folder(config, node_rank), refusal=_held(config.run_dir)):
        if node_rank == 0:
            _check_contents(config)
        yield


@contextlib.contextmanager
def hold_folder(folder: Path, *, refusal: str) -> Iterator[None]:
    """Makes `folder` and holds its lock in the block; raises ConfigError(`refusal`) if it is held.

    The lock ends with this process at the latest: children do not inherit it.
    """
    path = make_folder(folder) / LOCK
    with contextlib.ExitStack() as stack:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(refusal) from None
        except OSError as error:
            raise ConfigError(f"run.dir: cannot lock {path}: {error.strerror}") from error
        yield


def make_run_folder(config: Config) -> None:
    """Makes the run's folder, for its owner alone; raises ConfigError if that fails."""
    make_folder(config.run_dir, mode=0o700)


def make_folder(path: Path, *, mode: int = 0o777) -> Path:
    """Makes `path` and the folders above it, and returns it; raises ConfigError if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=mode)
    except OSError as error:
        raise ConfigError(f"run.dir: cannot make {path}: {error.strerror}") from error
    return path


@dataclass(frozen=True)
class FormerSettings:
    """The file of settings in `folder`, as the run's last start left it; None if it had none."""

    folder: Path
    content: bytes | None

    def restore(self) -> None:
        """Writes the file again, if there was one; call it if the run has not begun since."""
        if self.content is not None:
            replace_file(self.folder / CONFIG, self.content, mode=0o600)


def former_settings(folder: Path) -> FormerSettings:
    """Reads the settings that the next `write_config` replaces."""
    try:
        return FormerSettings(folder, read_regular(folder / CONFIG, most_bytes=MOST_TABLE_BYTES))
    except OSError:
        # A reader that needs the file says what is wrong with it.
        return FormerSettings(folder, None)


def write_config(config: Config, folder: Path) -> Path:
    """Writes settings for the owner alone; returns their path, or raises ConfigError."""
    path = make_folder(folder) / CONFIG
    try:
        # The file may hold the password of the queue.
        replace_file(path, with_first_line(dump_config(config)), mode=0o600)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    return path


@dataclass(frozen=True)
class FoundRun:
    """What a client needs to call the controller of a run."""

    address: str
    security: SecuritySection = SecuritySection()
    # The run's id, or None if it is not known yet.
    run_id: str | None = None
    # The text that its files tell; the run may go on since.
    told: str = field(default="", compare=False)


def named_folder(run: str | Path, runs: Path = Path("runs")) -> Path:
    """Returns the folder of the run `run`: a run's folder, or else a name below `runs`."""
    # Unlike Path's, these methods raise nothing where a folder may not be read.
    is_name = not os.path.isfile(Path(run, CONFIG)) and os.path.isdir(runs / run)
    return runs / run if is_name else Path(run)


def find_run(run: str | Path | None, runs: Path = Path("runs")) -> FoundRun:
    """Returns the run whose folder, or name below `runs`, is `run`.

    None means the only run of a command that goes on there. Raises ConfigError if there is no such
    run, or its folder lacks the controller's address.
    """
    if run is None:
        going = dict[Path, Path]()
        for path in sorted(runs.glob(f"*/{ADDRESS}")):
            try:
                _check_not_held(path.with_name(LOCK), path.parent)
            except ConfigError:
                # Links such as `latest` are further names of a run.
                going[path.parent.resolve()] = path.parent
        if len(going) != 1:
            names = ", ".join(folder.name for folder in going.values())
            many = f"the runs {names} go on in {runs}/"
            seen = many if going else f"no run goes on in {runs}/"
            raise ConfigError(f"{seen}: name a run, or give --controller HOST:PORT")
        (folder,) = going.values()
    else:
        folder = named_folder(run, runs)
    path = settings_of(folder)
    try:
        settings: dict[str, Any] = parse_toml(read_regular(path).decode())
    except ValueError as error:
        raise ConfigError(f"{path} is no TOML: {error}") from error
    try:
        address = read_regular(folder / ADDRESS).decode().strip()
    except OSError as error:
        raise ConfigError(
            f"{folder / ADDRESS}: {error.strerror}; give --controller HOST:PORT"
        ) from error
    # A run of an earlier version may have had other settings, too.
    stated = settings.get("security", {})
    security_values = {
        name: stated[name] for name in SecuritySection.model_fields if name in stated
    }
    security = run_security(parse_section(SecuritySection, security_values), address, folder)
    return FoundRun(address, security, journaled_run_id(folder), _told_by_files(folder, address))


def _told_by_files(folder: Path, address: str) -> str:
    """Returns what the files of a run tell when its controller does not answer."""
    if summary := read_summary(folder):
        return f"{folder} is {summary['state']} with {summary['steps']} steps"
    if not is_loopback(address):
        # Locks of another machine may not show here.
        return ""
    try:
        _check_not_held(folder / LOCK, folder)
    except ConfigError:
        return f"{folder} goes on, and its controller may be starting"
    step = 0
    at = ""
    with contextlib.suppress(OSError), open_regular(folder / METRICS) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        for row in map(parsed, lines_of(file)):
            logged_step = row.get("step") if isinstance(row, dict) else None
            step = int(logged_step) if isinstance(logged_step, int | float) else step
        at = f" at {datetime.fromtimestamp(os.fstat(file.fileno()).st_mtime):%Y-%m-%d %H:%M:%S}"
    return f"{folder} was cut off after step {step}{at}, and the same command resumes it"


def begin_run(config: Config, address: str) -> str:
    """Returns the id of the run that begins or goes on; writes down address and token.

    Raises ConfigError if another run goes on here, or a file cannot be written.
    """
    folder = config.run_dir
    run_id = journaled_run_id(folder) or config.run.id
    run_id = run_id or f"{config.run.name}-{secrets.token_hex(4)}"
    if config.run.id not in (None, run_id):
        raise ConfigError(f"run.id must stay {run_id} when a run goes on, got {config.run.id}")
    make_run_token(config)
    try:
        (folder / ADDRESS).write_text(f"{address}\n")
    except OSError as error:
        raise ConfigError(f"{folder / ADDRESS} cannot be written: {error.strerror}") from error
    return run_id


def identified(config: Config, address: str, run_id: str) -> Config:
    """Returns the settings with the controller's address and the id of the run."""
    controller = config.controller.model_copy(update={"address": address})
    run = config.run.model_copy(update={"id": run_id})
    return config.model_copy(update={"controller": controller, "run": run})


def identity_overrides(config: Config) -> list[str]:
    """Returns the overrides that `identified` makes, for programs that read the run's settings."""
    return [f'controller.address="{config.controller.address}"', f'run.id="{config.run.id}"']


LINE_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 16


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Yields the lines of a file with their newlines; of a line beyond `LINE_BYTES` its parts."""
    while line := file.readline(LINE_BYTES):
        yield line


def end_of_lines(path: Path) -> int:
    """Returns the byte behind the last newline of a file, or 0 if it has none or is missing."""
    if not path.is_file():
        return 0
    with open_regular(path) as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            begin = max(0, end - _BLOCK_BYTES)
            file.seek(begin)
            place = file.read(end - begin).rfind(b"\n")
            if place >= 0:
                return begin + place + 1
            end = begin
    return 0


def parsed(data: bytes) -> JsonValue:
    """Returns the parsed JSON, or None if it is invalid; NaN and infinities become None."""
    try:
        value: JsonValue = json.loads(data, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return None
    return value


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None

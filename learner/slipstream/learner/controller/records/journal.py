"""The journal of a run: its leases, batches and ends of trajectories.

Each start of a controller writes one log: the first one `journal.log`, the next `journal-2.log`,
and so on. Each line is a CRC-32 in hexadecimal, a space and a JSON object, which contains the
line's number, counted from 1 through all logs. The batch of each step is a separate file. Appended
records are on disk when `sync` returns or the future of `durable` is done.

A new log ends all older ones (fencing): an older controller that still runs stops writing, and
readers ignore its lines after the first line of the newer log. So the journal stays correct on a
shared file system whose locks other machines do not see.
"""

import asyncio
import contextlib
import errno
import fcntl
import json
import math
import os
import re
import threading
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Self, cast

import msgspec
from pydantic import JsonValue
from pydantic_core import from_json
from slipstream.core.errors import ConfigError, ProtocolError, RunFailed
from slipstream.core.machine.files import open_regular, sync_folder
from slipstream.core.run_folder import (
    BATCHES,
    JOURNAL_LOG,
    journal_logs,
    log_number,
    newest_log_number,
)
from slipstream.core.types import GroupId, Trajectory
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.batch_files import (
    BatchContents,
    StoredBatch,
    write_batch_file,
)
from slipstream.learner.controller.records.file_beginnings import (
    TAIL_BYTES,
    prefix_crc32,
    tail_crc32,
)
from slipstream.learner.controller.records.history import REMEDY, settled_by
from slipstream.learner.controller.records.kinds import Record, ServerTokens, fields_of
from slipstream.learner.controller.records.recorded_steps import RecordedBatch, attempt_of
from slipstream.learner.controller.records.state import RunState
from slipstream.protocol.queue.base import Tally
from slipstream.v1 import trajectory_pb2

FENCED = "a controller that was started later writes the journal of this run; this one ends"
# Field with the number of a record's line, from 1; journals of earlier versions lack it.
LINE = "line"
# `json.dumps` would make an encoder for each record.
_ENCODER = json.JSONEncoder(separators=(",", ":"))


class Journal:
    """A context manager that writes the journal of a run; its log continues the earlier logs.

    with Journal(folder) as journal:
        record = journal.write_batch(batch)       # blocks until the file of a batch is durable
        journal.append(record)                    # in memory only
        await journal.durable()                   # on disk

    The first failed write is final: each later `sync` raises its error and `trouble` names it.
    Raises ConfigError while another process of this machine writes the journal of this folder, or
    when the folder is not writable.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with contextlib.ExitStack() as opened_files:
            self._file, self._lock_file = _begun_logs(folder, opened_files)
            # From here on the journal closes them itself.
            opened_files.pop_all()
        self._path = Path(str(self._file.name))
        # The number of the last line of all logs, and of the last one that is durable.
        self._num_lines = self.num_durable = _count_lines(folder)
        # The state that each appended record changes; None if nobody follows the records.
        self.state: RunState | None = None
        # A thread writes records while the event loop appends others.
        self._lock, self._syncing = threading.Lock(), threading.Lock()
        # The trajectories that ended or are in a batch, according to the records.
        self.settled = Tally()
        self._pending: list[bytes] = []
        # The first failure. It is final: a later sync may succeed although records are lost.
        self._failure: RunFailed | None = None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown()
        try:
            self.sync()
        finally:
            self._file.close()
            self._lock_file.close()

    def append(self, record: Record) -> None:
        """Adds one record in memory without waiting, and applies it to `state`.

        The next sync writes it to disk. Raises ProtocolError, and adds nothing, if the record
        contradicts the records before it.
        """
        if self.state is not None:
            self.state.apply(record)
        with self._lock:
            self._num_lines += 1
            self.settled = settled_by(self.settled, record)
            if isinstance(record, kinds.Servers):
                # The next controller compares its own count up to here.
                record = msgspec.structs.replace(record, settled=tuple(self.settled))
            self._pending.append(encoded(self._num_lines, fields_of(record)))

    def sync(self) -> None:
        """Makes all records durable; blocks on the disk.

        Raises RunFailed if the disk fails, and again at each later call.
        """
        with self._syncing:
            if self._failure is not None:
                raise self._failure
            try:
                with self._lock:
                    pending = b"".join(self._pending)
                    self._pending = []
                    num_lines = self._num_lines
                while pending:
                    pending = pending[self._file.write(pending) :]
                if num_lines > self.num_durable:
                    os.fsync(self._file.fileno())
                    self.num_durable = num_lines
            except OSError as error:
                self._failure = _unwritten(self._path, error)
                raise self._failure from error
            # After the write: a controller that begins a log later has read this record.
            self._check_fence()

    def durable(self) -> asyncio.Future[None]:
        """Returns a future that is done when all records appended so far are durable.

        Callers share the future and must not cancel it. The future is never done after a failed
        write; `trouble` names the failure, and the run's watch ends the run.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        synced = loop.run_in_executor(self._executor, self.sync)
        synced.add_done_callback(partial(_settle, done))
        return done

    def trouble(self) -> str:
        """Returns why records cannot be written, or "" if they can; does not wait for a sync."""
        # A sync in its thread may fail meanwhile.
        if self._failure is None and (gone := self._vanished()) is not None:
            self._failure = gone
        return "" if self._failure is None else str(self._failure)

    @property
    def is_fenced(self) -> bool:
        """Whether a controller that started later has begun a newer log, which ends this log."""
        return newest_log_number(self._folder) > log_number(self._path.name)

    def _check_fence(self) -> None:
        if self.is_fenced:
            self._failure = RunFailed(FENCED)
            raise self._failure

    def _vanished(self) -> RunFailed | None:
        logs = ((self._path, self._file), (self._folder / JOURNAL_LOG, self._lock_file))
        for path, file in logs:
            try:
                there = os.path.samestat(os.stat(path), os.fstat(file.fileno()))
            except OSError:
                there = False
            if not there:
                return RunFailed(f"{path} was removed or replaced while the run wrote it; {REMEDY}")
        if self.is_fenced:
            return RunFailed(FENCED)
        if not (self._folder / BATCHES).is_dir():
            return RunFailed(
                f"{self._folder / BATCHES} was removed while the run wrote it; {REMEDY}"
            )
        return None

    def write_batch(self, batch: BatchContents) -> kinds.StepBatch:
        """Makes the file of a batch durable; returns its record, which the caller appends.

        Blocks on the disk. Holds one trajectory at a time. Raises RunFailed if the disk or the
        folder fails, and for a batch that nobody could read again.
        """
        header = batch.header
        path = self.path(header.step, attempt_of(header.batch_id))
        groups: dict[GroupId, None] = {}
        rewards: dict[str, tuple[float, float]] = {}
        tokens: Counter[tuple[str, int]] = Counter()
        num_trajectories = 0

        def note(trajectory: trajectory_pb2.Trajectory) -> None:
            nonlocal num_trajectories
            num_trajectories += 1
            groups[GroupId(trajectory.group_id)] = None
            reward = trajectory.reward
            earned = rewards.get(trajectory.environment, (reward, reward))
            rewards[trajectory.environment] = (min(*earned, reward), max(*earned, reward))
            _count_tokens(tokens, trajectory)

        with self._syncing:
            try:
                if path.exists():
                    # The file has no record: it was written ahead, or by a controller that ended.
                    self._check_fence()
                    path.unlink()
                # A fenced controller must not replace the file of its successor.
                with path.open("xb") as file:
                    try:
                        written = write_batch_file(file, batch, note)
                    except RunFailed:
                        path.unlink()
                        raise
                    file.flush()
                    os.fsync(file.fileno())
                sync_folder(path.parent)
            except OSError as error:
                self._failure = self._failure or self._vanished() or _unwritten(path, error)
                raise self._failure from error
        return kinds.StepBatch(
            step=header.step,
            batch_id=header.batch_id,
            crc32=written.crc32,
            num_bytes=written.num_bytes,
            groups=list(groups),
            trajectories=num_trajectories,
            tokens=_sorted_tokens(tokens),
            seen=rewards,
        )

    def read_batch(self, batch: RecordedBatch) -> StoredBatch:
        """Returns a batch in this journal's folder; see the module's function `read_batch`."""
        return read_batch(self._folder, batch.step, batch.crc32, batch.attempt)

    def read_steps(self, steps: Set[int]) -> dict[int, kinds.Step]:
        """Reads the newest durable record of each step of `steps`; blocks on the disk."""
        records = (r for r in read_records(self._folder) if r["kind"] == "step")
        records_of_steps = (kinds.parsed(r) for r in records if r["step"] in steps)
        return {
            record.step: record for record in records_of_steps if isinstance(record, kinds.Step)
        }

    def path(self, step: int, attempt: int = 0) -> Path:
        """Returns the path of a batch file in this journal's folder; see `batch_path`."""
        return batch_path(self._folder, step, attempt)

    def kept_batches(self) -> set[tuple[int, int]]:
        """Returns the (step, attempt) of each batch file that still exists; see `batch_path`."""
        paths = (self._folder / BATCHES).glob("step-*.pb")
        names = [path.stem.removeprefix("step-") for path in paths]
        matches = [re.fullmatch(r"([0-9]{6,18})(?:-([0-9]{1,9}))?", name) for name in names]
        return {(int(match[1]), int(match[2] or 0)) for match in matches if match}

    def remove_batches(self, *, before: int) -> int:
        """Removes the files of batches of steps below `before`, oldest first; returns how many.

        A crash leaves the newest of them, which the next call removes. Raises OSError.
        """
        old = sorted(place for place in self.kept_batches() if place[0] < before)
        for place in old:
            self.path(*place).unlink(missing_ok=True)
        return len(old)


def tokens_by_server(trajectories: Iterable[Trajectory]) -> list[ServerTokens]:
    """Returns (name, epoch, sampled tokens) of each server that sampled the trajectories."""
    tokens: Counter[tuple[str, int]] = Counter()
    for trajectory in trajectories:
        _count_tokens(tokens, trajectory)
    return _sorted_tokens(tokens)


def _count_tokens(
    tokens: Counter[tuple[str, int]], trajectory: Trajectory | trajectory_pb2.Trajectory
) -> None:
    server = (trajectory.server_id, trajectory.server_epoch)
    tokens[server] += sum(trajectory.run_lengths[1::2])


def _sorted_tokens(tokens: Counter[tuple[str, int]]) -> list[ServerTokens]:
    return [(name, epoch, number) for (name, epoch), number in sorted(tokens.items())]


def encoded(number: int, record: Mapping[str, JsonValue]) -> bytes:
    """Returns a record as a line of the log with the given line number, counted from 1."""
    text = _ENCODER.encode({LINE: number, **record}).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def read_records(folder: Path) -> Iterator[dict[str, JsonValue]]:
    """Yields all records in order, as a `JournalReader` does from the beginning."""
    return iter(JournalReader(folder))


@dataclass(frozen=True, slots=True)
class LogPart:
    """The beginning of a log, up to the end of a line."""

    name: str
    num_bytes: int
    num_lines: int
    crc32: int


class JournalReader:
    """Yields the records behind those of `logs` in order, without a torn last line.

    Yields nothing if there is no journal. Line numbers are checked and removed from the records.
    Raises ProtocolError for damage. With `last_line` it ends before the next line.
    """

    def __init__(
        self,
        folder: Path,
        logs: Sequence[LogPart] = (),
        *,
        line: int = 0,
        last_line: float = math.inf,
    ) -> None:
        """Takes what was read before: parts of `logs`, oldest first, with `line` lines in all."""
        self._folder = folder
        # The last part goes on; the records of the others have all been read.
        self._earlier = {part.name for part in logs[:-1]}
        self._parts = {part.name: part for part in logs}
        self._last_line = last_line
        # Number of the last record that was yielded.
        self.line = line

    @property
    def logs(self) -> list[LogPart]:
        """The parts of the logs that have been read, oldest first."""
        return list(self._parts.values())

    def __iter__(self) -> Iterator[dict[str, JsonValue]]:
        for path, end in _logs(self._folder):
            if path.name in self._earlier:
                continue
            if self.line >= self._last_line:
                # A log that is behind it has not been read at all.
                return
            part = self._parts.get(path.name) or LogPart(path.name, 0, 0, 0)
            self._parts[path.name] = part
            with open_regular(path) as file:
                file.seek(part.num_bytes)
                for line in file:
                    text = _whole_record(line)
                    is_torn = text is None and not line.endswith(b"\n")
                    if self.line + 1 >= end or self.line >= self._last_line or is_torn:
                        break
                    place = part.num_lines + 1
                    if text is None:
                        raise ProtocolError(f"{path}: line {place} is damaged; {REMEDY}")
                    record = _parse(text)
                    if record is None:
                        raise ProtocolError(f"{path}: line {place} is no record; {REMEDY}")
                    number = self.line + 1
                    written = record.pop(LINE, number)
                    if written != number:
                        raise ProtocolError(
                            f"{path}: line {number} was written as line {written}: lines before it "
                            f"are missing, twice or elsewhere; {REMEDY}"
                        )
                    part = LogPart(
                        name=path.name,
                        num_bytes=part.num_bytes + len(line),
                        num_lines=place,
                        crc32=zlib.crc32(line, part.crc32),
                    )
                    self._parts[path.name] = part
                    self.line = number
                    yield record

    def tails(self) -> list[int | None]:
        """Returns the CRC-32 of the last `TAIL_BYTES` of each part of `logs`; reads no more."""
        return [tail_crc32(self._folder / part.name, part.num_bytes) for part in self.logs]

    def is_as_read(self, tails: Sequence[int | None] | None = None) -> bool:
        """Whether the logs still begin with what was read, and no later log takes its place.

        With `tails`, which that method returned, only these bytes are read again.
        """
        if not self._is_placed():
            return False
        if tails is not None:
            return self.tails() == list(tails)
        for part in self.logs:
            crc32 = prefix_crc32(self._folder / part.name, part.num_bytes)
            if crc32 != part.crc32:
                return False
        return True

    def _is_placed(self) -> bool:
        """Whether the logs that were read are the first ones, as far as they were read."""
        ends = {path.name: (path, end) for path, end in _logs(self._folder)}
        names = [path.name for path in journal_logs(self._folder)]
        parts = self.logs
        if names[: len(parts)] != [part.name for part in parts]:
            return False
        for part in parts:
            path, end = ends[part.name]
            # The last line may lack its newline: a writer goes on in a log of its own.
            if self.line >= end and part is parts[-1]:
                return False
            if path.stat().st_size < part.num_bytes:
                return False
        return True


def _parse(text: bytes) -> dict[str, JsonValue] | None:
    # `from_json` takes half the time, but rejects text with half a surrogate pair.
    for parse in (from_json, json.loads):
        with contextlib.suppress(ValueError, RecursionError):
            record = parse(text)
            is_record = isinstance(record, dict) and isinstance(record.get("kind"), str)
            return record if is_record else None
    return None


def _whole_record(line: bytes) -> bytes | None:
    """Returns the JSON text of a line, or None if its checksum is wrong.

    The newline of the last line may be missing or damaged: the checksum shows whether the line is
    whole.
    """
    for end in (line[:-1],) if line.endswith(b"\n") else (line, line[:-1]):
        checksum, _, text = end.partition(b" ")
        if checksum == b"%08x" % zlib.crc32(text):
            return text
    return None


def _begun_logs(folder: Path, opened_files: contextlib.ExitStack) -> tuple[FileIO, FileIO]:
    """Returns the log of a new controller and the file whose lock it holds, both open.

    `opened_files` closes them. Raises ConfigError as `Journal` does.
    """
    try:
        (folder / BATCHES).mkdir(parents=True, exist_ok=True)
        for path in journal_logs(folder):
            # Not a folder, and nothing that blocks.
            open_regular(path).close()
        later = [path for path in journal_logs(folder) if log_number(path.name) > 1]
        if later and not os.path.lexists(folder / JOURNAL_LOG):
            # A new one would be fenced.
            raise ConfigError(
                f"{folder / JOURNAL_LOG} is missing, the first of the logs that "
                f"{later[-1].name} continues; {REMEDY}"
            )
        log = _begin_log(folder / JOURNAL_LOG)
        if log is not None:
            opened_files.callback(log.close)
        lock_file = cast(FileIO, open_regular(folder / JOURNAL_LOG, "r+b", buffering=0))
        opened_files.callback(lock_file.close)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ConfigError(f"{folder} is written by another controller") from None
    try:
        # Other controllers are fenced now, so the logs hold all records that they acknowledged.
        while log is None:
            log = _begin_log(folder / f"journal-{newest_log_number(folder) + 1}.log")
        opened_files.callback(log.close)
        sync_folder(folder)
        # The log continues the earlier logs, so their last lines must outlive a loss of power.
        for path in journal_logs(folder)[:-1]:
            with open_regular(path) as earlier:
                os.fsync(earlier.fileno())
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}") from None
    return log, lock_file


def _begin_log(path: Path) -> FileIO | None:
    """Creates a log file; returns None if it exists already."""
    try:
        return path.open("xb", buffering=0)
    except FileExistsError:
        return None


def _logs(folder: Path) -> list[tuple[Path, float]]:
    """Returns the logs, oldest first, each with the line number at which a later log begins.

    The number is infinite if no later log has a line.
    """
    logs = []
    end = math.inf
    for path in reversed(journal_logs(folder)):
        logs.append((path, end))
        end = min(end, _first_number(path) or math.inf)
    return logs[::-1]


def _first_number(path: Path) -> int | None:
    """Returns the line number in a log's first line, or None if it is damaged or missing."""
    with open_regular(path) as file:
        text = _whole_record(file.readline())
    record = None if text is None else _parse(text)
    number = 1 if record is None else record.get(LINE, 1)
    return number if record is not None and isinstance(number, int) else None


def _count_lines(folder: Path) -> int:
    """Returns the number of the last line of all logs, or 0 if there is none."""
    for path, end in reversed(_logs(folder)):
        first = _first_number(path)
        if first is not None:
            last = _last_number(path)
            if last is None:
                with open_regular(path) as file:
                    num_records = sum(
                        line.endswith(b"\n") or _whole_record(line) is not None for line in file
                    )
                last = first + num_records - 1
            return min(last, int(min(end - 1, last)))
    return 0


def _last_number(path: Path) -> int | None:
    """Returns the line number of a log's last whole record, or None if its end does not show it."""
    with open_regular(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        # The first line of these bytes may lack its beginning.
        lines = file.read().splitlines(keepends=True)
    for line in reversed(lines):
        text = _whole_record(line)
        record = None if text is None else _parse(text)
        number = None if record is None else record.get(LINE)
        if isinstance(number, int):
            return number
        if line.endswith(b"\n"):
            break
    return None


def read_batch(folder: Path, step: int, crc32: int, attempt: int = 0) -> StoredBatch:
    """Returns the batch of a step, whose file is read when its contents are used.

    `attempt` is the number of earlier batches of this step that were set aside.
    """
    return StoredBatch(batch_path(folder, step, attempt), crc32)


def batch_path(folder: Path, step: int, attempt: int = 0) -> Path:
    """Returns the path of a batch of `step` after `attempt` earlier batches were set aside."""
    suffix = f"-{attempt}" if attempt else ""
    return folder / BATCHES / f"step-{step:06d}{suffix}.pb"


def _unwritten(path: Path, error: OSError) -> RunFailed:
    remedy = "run the same command again when the disk works"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "make room and run the same command again"
    return RunFailed(f"{path} cannot be written: {error.strerror}; {remedy}")


def _settle(done: asyncio.Future[None], synced: asyncio.Future[None]) -> None:
    if done.cancelled() or synced.cancelled():
        return
    error = synced.exception()
    if error is None:
        done.set_result(None)
    elif not isinstance(error, RunFailed):
        done.set_exception(error)

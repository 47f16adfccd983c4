"""Opens the trackers that the settings name, and reads and writes the result files of a run.

Each tracker has a thread that passes it the run's numbers. Consumes: numbers of steps and rounds.
Produces: calls of the trackers. Waits for: the next numbers. Unblocked by: numbers, `close`. Only
`close` waits for trackers, and for a limited time.

No decision depends on result files, so a fault causes a warning and does not end the run.
metrics.jsonl is read line by line, since a long run's file does not fit into memory.
"""

import functools
import json
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeAlias

import msgspec
from slipstream.core.machine.files import open_regular, replace_file
from slipstream.core.settings.config import Config
from slipstream.core.settings.measurement_sections import tracker_named

# Takes a warning about a file or a tracker, in one line.
Tell: TypeAlias = Callable[[str], None]

# Columns that the row of every step has.
COLUMNS = (
    "step",
    "reward_mean",
    "lag_mean",
    "lag_max",
    "generated_tokens_per_s",
    "trained_tokens_per_s",
)
# Bytes of a file that are read at once in search of its last whole line.
BLOCK_BYTES = 1 << 16
# No run writes a larger number; sums of such numbers would overflow.
MAX_NUMBER = 1e30


class ResultFile:
    """A file to which whole records are appended; a record that cannot be written is lost.

    The first lost record causes a warning. The next record that can be written causes another
    warning, with the number of lost records. Each record opens the file, so a removed file is
    created again.
    """

    def __init__(self, path: Path, tell: Tell) -> None:
        self.path = path
        self._tell = tell
        self._num_lost = 0
        self.append(b"")

    def append(self, record: bytes) -> None:
        """Writes one record whole, or counts it as lost."""
        try:
            with open_regular(self.path, "ab", buffering=0) as file:
                size = file.tell()
                unwritten = record
                try:
                    while unwritten:
                        unwritten = unwritten[file.write(unwritten) :]
                except OSError:
                    file.truncate(size)
                    raise
        except OSError as error:
            if not self._num_lost:
                text = f"{self.path} cannot be written: {error.strerror}"
                self._tell(f"{text}; what comes is lost until it can")
            self._num_lost += bool(record)
            return
        if self._num_lost and record:
            self._tell(f"{self.path} is written again; {self._num_lost} records were lost")
            self._num_lost = 0

    def close(self) -> None:
        """Warns of the records that were lost since the last successful write, if any."""
        if self._num_lost:
            self._tell(f"{self.path}: the last {self._num_lost} records were lost")
            self._num_lost = 0


def write_result(path: Path, data: bytes, tell: Tell) -> None:
    """Replaces a whole file; on an error the old file stays, and `tell` gets a warning."""
    try:
        replace_file(path, data)
    except OSError as error:
        tell(f"{path} cannot be written: {error.strerror}")


def parse_row(line: bytes) -> dict[str, float] | None:
    """Returns the numbers of a line of metrics.jsonl, null as NaN; None if it is invalid."""
    try:
        numbers = msgspec.json.decode(line, type=dict[str, float | None])
    except ValueError:
        return None
    row = {name: math.nan if value is None else value for name, value in numbers.items()}
    is_too_large = any(abs(value) > MAX_NUMBER for value in row.values())
    if is_too_large or math.isnan(row.get("wall_s", math.nan)):
        return None
    if (step := row.get("step")) is None:
        return row
    has_columns = "passes" in row or row.keys() >= set(COLUMNS)
    return row if step.is_integer() and step >= 1 and has_columns else None


def drop_torn_line(path: Path, tell: Tell) -> None:
    """Removes an incomplete last line, left by a crash, so that the file ends with a whole line."""
    if not path.is_file():
        return
    try:
        with open_regular(path, "r+b") as file:
            end = file.seek(0, os.SEEK_END)
            newline = -1
            while end > 0 and newline < 0:
                start = max(0, end - BLOCK_BYTES)
                file.seek(start)
                newline = file.read(end - start).rfind(b"\n")
                end = start + newline + 1
            file.truncate(end)
    except OSError as error:
        tell(f"{path} cannot be read: {error.strerror}")


def lines_from_end(path: Path) -> Iterator[bytes]:
    """Yields the lines of a file without their ends, the last one first; reads no more than needed.

    Yields nothing if the file is missing. Raises OSError.
    """
    if not path.is_file():
        return
    with open_regular(path) as file:
        place = file.seek(0, os.SEEK_END)
        block_bytes = BLOCK_BYTES
        # Bytes behind `place` that belong to a line whose beginning is not read yet.
        rest = b""
        while place > 0:
            start = max(0, place - block_bytes)
            file.seek(start)
            rest, *lines = (file.read(place - start) + rest).split(b"\n")
            yield from filter(None, reversed(lines))
            # A line of many blocks is not copied for each of them.
            block_bytes = BLOCK_BYTES if lines else 2 * block_bytes
            place = start
        if rest:
            yield rest


def count_last(path: Path, step: int) -> int:
    """Returns how many lines of `step` are the last ones of a file; raises OSError."""
    number = 0
    for line in lines_from_end(path):
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not isinstance(row, dict) or row.get("step") != step:
            break
        number += 1
    return number


def read_rows(
    path: Path, tell: Tell = lambda _: None, *, begin: int = 0
) -> Iterator[dict[str, float]]:
    """Yields the numbers of each line of metrics.jsonl; yields nothing if the file is missing.

    The first line begins at the byte `begin`, from which on lines are counted. Damaged lines are
    skipped; one call of `tell` then names the first damaged line and their number.
    """
    if not path.is_file():
        return
    damaged: list[int] = []
    try:
        with open_regular(path) as file:
            file.seek(begin)
            for number, line in enumerate(file, start=1):
                if (row := parse_row(line)) is not None:
                    yield row
                else:
                    damaged.append(number)
    except OSError as error:
        tell(f"{path} cannot be read: {error.strerror}")
    if damaged:
        tell(f"{path}: line {damaged[0]} is damaged; {len(damaged)} such lines are passed over")


MAX_WAITING = 10_000
CLOSE_LIMIT_S = 60.0
log = logging.getLogger(__name__)
# Lines of trajectories.jsonl or groups.jsonl.
Lines: TypeAlias = Sequence[Mapping[str, Any]]


class RunTracker(Protocol):
    """A tracking service that logs one run. One thread calls it, and calls may block.

    An error ends this tracker, never the run.
    """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs the finite numbers of one step or version."""

    def samples(self, step: int, episodes: Lines, groups: Lines) -> None:
        """Logs some episodes of a step as text, and the numbers of all of its groups."""

    def close(self) -> None:
        """Sends the remaining numbers and closes the tracker."""


# A call of a tracker.
_Entry: TypeAlias = Callable[[RunTracker], None]
# Opens a tracker; raises the errors of the tracker's package.
OpenTracker: TypeAlias = Callable[[], RunTracker]


class Trackers:
    """All trackers of a run; if a tracker fails, only that tracker ends, with one warning."""

    def __init__(self, opened: Mapping[str, OpenTracker], complain: Tell) -> None:
        """Opens each tracker in its own thread, so that a slow service delays nothing.

        A tracker for which more than `MAX_WAITING` entries wait is abandoned. `complain` gets the
        warnings, on any thread.
        """
        self._complain = complain
        self._writers = [_Writer(name, open_, complain) for name, open_ in opened.items()]
        for writer in self._writers:
            writer.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Gives the finite numbers of one step or version to all trackers."""
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        self._put(lambda tracker: tracker.log(step, finite))

    def samples(self, step: int, episodes: Lines, groups: Lines) -> None:
        """Gives the samples of one step to all trackers."""
        self._put(lambda tracker: tracker.samples(step, episodes, groups))

    def _put(self, entry: _Entry) -> None:
        for writer in self._writers:
            writer.put(entry)

    def close(self) -> None:
        """Waits until all trackers have taken all numbers, at most `CLOSE_LIMIT_S` in total."""
        until = time.monotonic() + CLOSE_LIMIT_S
        for writer in self._writers:
            writer.put(None)
        for writer in self._writers:
            writer.join(max(0.0, until - time.monotonic()))
            if writer.is_alive():
                self._complain(
                    f"tracker {writer.name} was not done {CLOSE_LIMIT_S:g} s after the run"
                )
        self._writers = []


class _Writer(threading.Thread):
    def __init__(self, name: str, open_: OpenTracker, complain: Tell) -> None:
        # A service that never answers must not keep the controller alive.
        super().__init__(name=name, daemon=True)
        self._open = open_
        self._complain = complain
        self._entries: queue.Queue[_Entry | None] = queue.Queue(MAX_WAITING)
        self._ended = False

    def put(self, entry: _Entry | None) -> None:
        if self._ended:
            return
        try:
            self._entries.put_nowait(entry)
        except queue.Full:
            self._abandon(f"it is {self._entries.maxsize} entries behind")

    def run(self) -> None:
        try:
            tracker = self._open()
            while not self._ended:
                entry = self._entries.get()
                if entry is None:
                    break
                entry(tracker)
            tracker.close()
        except (Exception, SystemExit) as error:
            # A thread that ends by SystemExit says nothing.
            log.exception("tracker %s", self.name)
            self._abandon(f"{type(error).__name__}: {str(error).split(chr(10), 1)[0]}")

    def _abandon(self, cause: str) -> None:
        if not self._ended:
            self._ended = True
            self._complain(f"tracker {self.name} gets no more numbers: {cause}")


RUN_IDS = "tracking.json"
_RunId = Annotated[str, msgspec.Meta(max_length=200, pattern=r"\A[^\x00-\x1f\x7f-\x9f]+\Z")]


class RunIds:
    """The ids of this run at tracking services, kept in a file for a resumed run."""

    def __init__(self, folder: Path, complain: Tell) -> None:
        """Reads the file; if it is damaged, warns and starts without ids.

        The services then begin new runs.
        """
        self._path = folder / RUN_IDS
        self._complain = complain
        self._lock = threading.Lock()
        self._ids: dict[str, str] = {}
        if self._path.is_file():
            try:
                self._ids = msgspec.json.decode(self._path.read_bytes(), type=dict[str, _RunId])
            except ValueError:
                complain(f"{self._path} is damaged: trackers begin new runs")

    def get(self, tracker: str) -> str:
        """Returns the id under which `tracker` logs this run, or "" if it has none yet."""
        return self._ids.get(tracker, "")

    def keep(self, tracker: str, run_id: str) -> None:
        """Writes the run's id at `tracker` into the file; may be called from any thread."""
        with self._lock:
            self._ids[tracker] = run_id
            text = json.dumps(self._ids, indent=2)
            write_result(self._path, f"{text}\n".encode(), self._complain)


def open_trackers(config: Config, folder: Path, complain: Tell) -> Trackers:
    """Opens the trackers of `config`; `complain` gets their failures, on any thread.

    A tracker is a class that takes the settings, the run's folder and the ids of the run.
    """
    ids = RunIds(folder, complain)

    def open_(name: str) -> RunTracker:
        tracker: RunTracker = tracker_named(name).load()(config, folder, ids)
        return tracker

    names = config.tracking.trackers
    return Trackers({name: functools.partial(open_, name) for name in names}, complain)

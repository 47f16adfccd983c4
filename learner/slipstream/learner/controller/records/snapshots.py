"""Snapshots of a run's state, so that a start reads only what the journal got since the last one.

    "slipstream snapshot 1", a line
    BLAKE2b of the rest, 16 bytes
    the release and the source that wrote it; the logs up to there, with checksums; the state

The journal alone decides: a snapshot of other logs, of another release, or a damaged one is told,
and the journal is read whole. The first snapshot that a start writes reads all logs again.

Consumes: durable records. Produces: the file `journal/snapshot`. Waits for: time. Unblocked by: the
clock.
"""

import asyncio
import collections
import hashlib
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from slipstream.core.errors import ProtocolError
from slipstream.core.machine.files import read_regular, replace_file
from slipstream.learner.controller.events import EventLog
from slipstream.learner.controller.records.history import (
    GroupSteps,
    RunHistory,
    SeenIds,
    read_history,
)
from slipstream.learner.controller.records.journal import Journal, JournalReader, LogPart
from slipstream.learner.controller.records.recorded_steps import BatchTable, StepTable
from slipstream.learner.controller.records.task_table import TaskTable
from slipstream.learner.controller.servers import server_epochs
from slipstream.learner.controller.servers.server_epochs import ServerEpochs
from slipstream.protocol.release import RELEASE

# Classes that encode their content themselves.
_STORED = (BatchTable, GroupSteps, SeenIds, ServerEpochs, StepTable, TaskTable)
# Takes a warning in one line.
Tell: TypeAlias = Callable[[str], None]
NAME = "snapshot"
# A start reads about as many records behind the newest snapshot.
EVERY_LINES = 10_000
# Time between two looks at the number of records.
LOOK_S = 10.0
_MAGIC = b"slipstream snapshot 1\n"
_DIGEST_BYTES = 16


class Snapshot(msgspec.Struct, array_like=True):
    """The state after a number of lines of the logs."""

    release: str
    source: str
    line: int
    logs: list[LogPart]
    # Checksums of the last bytes of these parts.
    tails: list[int | None]
    # The encoded history, which only the same source reads.
    history: bytes


def _source_digest() -> str:
    """Returns a digest of the modules that say what a history is."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    folder = Path(__file__).parent
    names = (
        "history.py",
        "kinds.py",
        "recorded_steps.py",
        "snapshots.py",
        "state.py",
        "task_table.py",
    )
    for path in [*(folder / name for name in names), Path(server_epochs.__file__)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


# Read once: the files may be replaced while this process runs.
_SOURCE = _source_digest()


def encode_history(history: RunHistory) -> bytes:
    """Returns a history as bytes, for `decode_history`."""
    return msgspec.msgpack.encode(history, enc_hook=_plain)


def decode_history(data: bytes) -> RunHistory:
    """Returns the history that `encode_history` encoded; raises ValueError for other bytes."""
    return msgspec.msgpack.decode(data, type=RunHistory, dec_hook=_typed)


def _plain(value: object) -> object:
    if isinstance(value, _STORED):
        return value.stored()
    raise NotImplementedError(type(value).__name__)


def _typed(kind: Any, stored: Any) -> object:  # noqa: ANN401 - a type as msgspec has it
    if kind in _STORED:
        return kind.restored(stored)
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin is collections.Counter:
        return collections.Counter(msgspec.convert(stored, dict[arguments[0], int]))  # type: ignore[valid-type]
    if origin is collections.defaultdict:
        values = msgspec.convert(stored, dict[arguments[0], arguments[1]])  # type: ignore[valid-type]
        return collections.defaultdict(arguments[1], values)
    raise NotImplementedError(str(kind))


def open_history(
    folder: Path, tell: Tell, *, is_start: bool = True
) -> tuple[RunHistory, JournalReader]:
    """Returns the state of the newest snapshot, and a reader of the records behind it.

    A start recognises the logs by the last bytes that the snapshot knows, so that a long run starts
    as soon as a short one; without `is_start` their whole checksums are compared.

    Without a snapshot of these logs the state is empty, and the reader begins at the first record;
    `tell` gets the cause if there is one that cannot be used.
    """
    whole_journal = RunHistory(), JournalReader(folder)
    path = folder / NAME
    if not path.exists():
        return whole_journal
    try:
        snapshot = _read(path)
        reader = JournalReader(folder, snapshot.logs, line=snapshot.line)
        is_same = reader.is_as_read(snapshot.tails if is_start else None)
        problem = "" if is_same else "it is of another journal than the one beside it"
    except OSError as error:
        problem = f"it cannot be read: {error.strerror}"
    except ValueError as error:
        problem = str(error)
    if problem:
        tell(f"{path} is not used, and the journal is read whole: {problem}")
        return whole_journal
    return decode_history(snapshot.history), reader


def _read(path: Path) -> Snapshot:
    """Reads a snapshot of this release; raises OSError, and ValueError with the cause."""
    data = read_regular(path)
    begin = len(_MAGIC) + _DIGEST_BYTES
    digest = data[len(_MAGIC) : begin]
    if data[: len(_MAGIC)] != _MAGIC or digest != _digest(data[begin:]):
        raise ValueError("it is damaged")
    try:
        snapshot = msgspec.msgpack.decode(data[begin:], type=Snapshot)
    except msgspec.ValidationError:
        raise ValueError("another release wrote it") from None
    if (snapshot.release, snapshot.source) != (RELEASE, _SOURCE):
        raise ValueError(f"release {snapshot.release} wrote it")
    return snapshot


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def write_snapshot(folder: Path, last_line: int, tell: Tell) -> None:
    """Writes the state after `last_line` lines, from that of the snapshot before; blocks.

    Raises ProtocolError if the journal is damaged, and OSError if the file cannot be written.
    """
    history, reader = open_history(folder, tell, is_start=False)
    behind = JournalReader(folder, reader.logs, line=reader.line, last_line=last_line)
    history = read_history(behind, history, line=reader.line)
    snapshot = Snapshot(
        release=RELEASE,
        source=_SOURCE,
        line=behind.line,
        logs=behind.logs,
        tails=behind.tails(),
        history=encode_history(history),
    )
    data = msgspec.msgpack.encode(snapshot)
    replace_file(folder / NAME, _MAGIC + _digest(data) + data)


async def write_snapshots(journal: Journal, folder: Path, events: EventLog) -> None:
    """Writes a snapshot whenever `EVERY_LINES` are durable behind the last one, until cancelled.

    The first one of a start is written soon. The first failure is told.
    """
    line = 0
    has_failed = False
    loop = asyncio.get_running_loop()

    def tell(text: str) -> None:
        loop.call_soon_threadsafe(events.warn, text)

    while True:
        await asyncio.sleep(LOOK_S)
        last_line = journal.num_durable
        if last_line - line < EVERY_LINES or journal.is_fenced:
            continue
        # Whether it succeeds or not, the next attempt is as many lines later.
        line = last_line
        try:
            await asyncio.to_thread(write_snapshot, folder, last_line, tell)
        except (OSError, ProtocolError) as error:
            cause = getattr(error, "strerror", None) or error
            if not has_failed:
                text = f"{folder / NAME} cannot be written, and starts take longer: {cause}"
                events.warn(text)
            has_failed = True

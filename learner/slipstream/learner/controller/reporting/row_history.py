"""What a start needs of the rows of earlier starts, so that it reads only the newest of them.

    "slipstream rows 1", a line
    BLAKE2b of the rest, 16 bytes
    the release and the source that wrote it; how far metrics.jsonl was read; the state

The file `journal/rows` is one of a run whose rows nobody has changed: if the last bytes that it
knows are others, it is told, and all rows are read.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import msgspec
from pydantic import JsonValue
from slipstream.core.machine.files import read_regular, replace_file
from slipstream.core.run_folder import JOURNAL, METRICS, SERVER_SHARES, TRAINER_PARTS
from slipstream.learner.controller.records.file_beginnings import tail_crc32
from slipstream.learner.controller.reporting import learning
from slipstream.learner.controller.reporting.learning import LearningState
from slipstream.protocol.release import RELEASE

NAME = "rows"
# A start reads at most about as many rows.
EVERY_ROWS = 1000
EDGE_STEPS = 5
_MAGIC = b"slipstream rows 1\n"
_DIGEST_BYTES = 16
# Takes a warning in one line.
Tell: TypeAlias = Callable[[str], None]


@dataclass
class RunFacts:
    """Counts and sums of a run, restored from the rows of its metrics."""

    first_rewards: list[float] = field(default_factory=list)
    last_rewards: list[float] = field(default_factory=list)
    # Seconds of all steps and of each activity, and of the steps in which servers have reported.
    spent_s: dict[str, float] = field(default_factory=dict)
    reported_s: float = 0.0
    gap_sum: float = 0.0
    gap_tokens: float = 0.0
    gap_max: float = 0.0
    gradient_overflows: int = 0

    def edge_rewards(self, steps: int) -> tuple[list[float], list[float]]:
        """Returns the mean rewards of the first and of the last of `steps`, up to five of each.

        No step is in both lists, except in a run of one step.
        """
        half = steps // 2
        num_edge = max(1, min(EDGE_STEPS, half))
        first = self.first_rewards[:num_edge]
        last = self.last_rewards[-num_edge:]
        return first, last

    def time_shares(self) -> dict[str, JsonValue]:
        """Returns the share of time of each activity, for "trainer" and "servers".

        Leaves out the trainer or the servers if there is no data about them.
        """
        shares: dict[str, JsonValue] = {}
        if step_s := self.spent_s.get("step_s"):
            trainer: dict[str, JsonValue] = {}
            other = 1.0
            for name, words in TRAINER_PARTS.items():
                share = self.spent_s[name] / step_s
                trainer[words] = share
                other -= share
            trainer["other"] = max(0.0, other)
            shares["trainer"] = trainer
        if self.reported_s:
            servers: dict[str, JsonValue] = {}
            for name in SERVER_SHARES:
                activity = name.split("_")[1]
                servers[activity] = self.spent_s[name] / self.reported_s
            shares["servers"] = servers
        return shares

    def count_row(self, row: Mapping[str, float]) -> None:
        """Adds the row of one step to the counts and sums of the run."""
        step_s = row.get("step_s", 0.0)
        if SERVER_SHARES[0] in row:
            self.reported_s += step_s
        for name in ("step_s", *TRAINER_PARTS):
            self._add_seconds(name, row.get(name, 0.0))
        for name in SERVER_SHARES:
            share = row.get(name, 0.0)
            self._add_seconds(name, share * step_s)
        self.gradient_overflows += int(row.get("gradient_overflows", 0))
        # A step that a client has ordered has no rewards here.
        if "reward_mean" in row:
            reward = row["reward_mean"]
            self.last_rewards.append(reward)
            del self.last_rewards[:-EDGE_STEPS]
            if len(self.first_rewards) < EDGE_STEPS:
                self.first_rewards.append(reward)
        tokens = row.get("logprob_gap_tokens", math.nan)
        mean = row.get("logprob_gap_mean", math.nan)
        largest = row.get("logprob_gap_max", math.nan)
        # A step without tokens of the newest version has none of the three.
        if not math.isnan(tokens + mean + largest):
            self.gap_sum += mean * tokens
            self.gap_tokens += tokens
            self.gap_max = max(self.gap_max, largest)

    def _add_seconds(self, name: str, seconds: float) -> None:
        spent_s = self.spent_s.get(name, 0.0)
        if math.isfinite(seconds):
            spent_s += seconds
        self.spent_s[name] = spent_s


@dataclass
class RowHistory:
    """The state after the rows of a run so far."""

    facts: RunFacts = field(default_factory=RunFacts)
    learning: LearningState = field(default_factory=LearningState)
    # Names of what the user was told of steps: each is told once.
    noticed: set[str] = field(default_factory=set)
    # The row of the newest step.
    newest: dict[str, float] = field(default_factory=dict)
    # The newest version of whose step a row is written, and earlier ones without a row.
    newest_version: int = 0
    lacking: set[int] = field(default_factory=set)
    wall_s: float = 0.0

    def has_row(self, version: int) -> bool:
        """Whether the row of the step that makes version `version` is already written."""
        return 0 < version <= self.newest_version and version not in self.lacking

    def note(self, row: dict[str, float]) -> None:
        """Takes the row of a step."""
        version = int(row["step"])
        self.lacking.update(range(self.newest_version + 1, version))
        self.lacking.discard(version)
        self.newest_version = max(self.newest_version, version)
        self.newest = row
        self.facts.count_row(row)


class _StoredRows(msgspec.Struct, array_like=True):
    release: str
    source: str
    # How much of metrics.jsonl the state has, and the CRC-32 of the last bytes of that.
    num_bytes: int
    tail_crc32: int | None
    history: RowHistory


def _source_digest() -> str:
    """Returns a digest of the modules that say what a history of rows is."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for path in (__file__, learning.__file__):
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()


# Read once: the files may be replaced while this process runs.
_SOURCE = _source_digest()


def open_rows(folder: Path, tell: Tell) -> tuple[RowHistory, int]:
    """Returns the state of the newest file in a run's folder, and the bytes that it has read.

    Without one of these rows the state is empty; `tell` gets the cause if there is one that cannot
    be used.
    """
    path = folder / JOURNAL / NAME
    if not path.exists():
        return RowHistory(), 0
    try:
        stored = _read(path)
        num_bytes = stored.num_bytes
        is_same = tail_crc32(folder / METRICS, num_bytes) == stored.tail_crc32
        problem = "" if is_same else f"it is of other rows than those of {METRICS}"
    except OSError as error:
        problem = f"it cannot be read: {error.strerror}"
    except ValueError as error:
        problem = str(error)
    if problem:
        tell(f"{path} is not used, and {METRICS} is read whole: {problem}")
        return RowHistory(), 0
    return stored.history, num_bytes


def write_rows(folder: Path, history: RowHistory, tell: Tell) -> None:
    """Writes the state after all rows of metrics.jsonl; `tell` gets a warning if it cannot."""
    try:
        num_bytes = (folder / METRICS).stat().st_size
        tail = tail_crc32(folder / METRICS, num_bytes)
        stored = _StoredRows(
            RELEASE,
            _SOURCE,
            num_bytes,
            tail,
            history,
        )
        data = msgspec.msgpack.encode(stored)
        path = folder / JOURNAL / NAME
        path.parent.mkdir(exist_ok=True)
        replace_file(path, _MAGIC + _digest(data) + data)
    except OSError as error:
        tell(f"{error.filename} cannot be written, and starts take longer: {error.strerror}")


def _read(path: Path) -> _StoredRows:
    """Reads the file of this release; raises OSError, and ValueError with the cause."""
    data = read_regular(path)
    magic = data[: len(_MAGIC)]
    begin = len(_MAGIC) + _DIGEST_BYTES
    digest = data[len(_MAGIC) : begin]
    content = data[begin:]
    if magic != _MAGIC or digest != _digest(content):
        raise ValueError("it is damaged")
    try:
        stored = msgspec.msgpack.decode(content, type=_StoredRows)
    except msgspec.ValidationError:
        raise ValueError("another release wrote it") from None
    if (stored.release, stored.source) != (RELEASE, _SOURCE):
        raise ValueError(f"release {stored.release} wrote it")
    return stored


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()

"""Checks a finished run by its files only: its journal, its batches and its summary.

The oracle shares no code with the controller that wrote the journal, so one error cannot hide in
both.
"""

import json
import math
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from slipstream.core.configuration.config_file import load_config
from slipstream.core.run_folder import BATCHES, CONFIG, JOURNAL, SUMMARY, journal_logs
from slipstream.core.settings.config import Config
from slipstream.v1 import trainer_pb2

Record = dict[str, Any]
# Kinds of records that end a leased group without training it.
_CLOSES = ("closed", "set_aside")


@dataclass
class Findings:
    """The faults that a run's files show, and the largest lag of a trained token."""

    # What is missing in the run's history, and what is there twice.
    lost: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    # Tokens of versions that were too old, and counts that disagree.
    stale: list[str] = field(default_factory=list)
    unequal: list[str] = field(default_factory=list)
    # Damaged lines and batches; tokens of versions that were never made.
    torn: list[str] = field(default_factory=list)
    max_lag: int = 0

    @property
    def all(self) -> list[str]:
        """All faults, one line each."""
        return [*self.lost, *self.duplicated, *self.stale, *self.unequal, *self.torn]


def examine(folder: Path) -> Findings:
    """Returns the faults found in the files of the finished run in `folder`."""
    found = Findings()
    oracle = _Oracle(folder, load_config(folder / CONFIG), found)
    for record in _records(journal_logs(folder / JOURNAL), found):
        oracle.take(record)
    oracle.conclude()
    return found


def _records(paths: Sequence[Path], found: Findings) -> Iterator[Record]:
    """Yields the run's records from the logs of all its controllers; adds damaged lines to `found`.

    A restarted controller continues after the last line that it has read of earlier logs. Lines
    that an earlier controller wrote after that line are left out.
    """
    logs = [_whole_lines(path, found) for path in paths]
    number = 0
    for place, (path, lines) in enumerate(zip(paths, logs, strict=True)):
        # Lines that a controller wrote after a later one had begun are not part of the run.
        end = min((later[0]["line"] for later in logs[place + 1 :] if later), default=math.inf)
        for record in lines:
            if record["line"] >= end:
                break
            number += 1
            if record["line"] != number:
                found.torn.append(f"{path}: line {record['line']} stands in place {number}")
                number = record["line"]
            yield record


def _whole_lines(path: Path, found: Findings) -> list[Record]:
    records = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        checksum, _, text = line.rstrip(b"\n").partition(b" ")
        if checksum == b"%08x" % zlib.crc32(text):
            records.append(json.loads(text))
        elif line.endswith(b"\n"):
            found.torn.append(f"{path}: line {number} of the file is damaged")
    return records


class _Oracle:
    """Checks a journal record by record; `conclude` compares it with the batches and summary."""

    def __init__(self, folder: Path, config: Config, found: Findings) -> None:
        self._folder, self._config, self._found = folder, config, found
        # Deadline of each leased group, the open groups, and the ends of untrained trajectories.
        self._deadlines: dict[str, int] = {}
        self._open: set[str] = set()
        self._ends: dict[str, str] = {}
        self._gave_up: dict[str, set[int]] = {}
        self._batches: dict[int, Record] = {}
        self._versions: set[tuple[int, int]] = {(0, 0)}
        # The number of trained tokens by their lag, and the trained members of groups.
        self._lags = Counter[int]()
        self._members: set[tuple[str, int]] = set()

    def take(self, record: Record) -> None:
        """Checks the next record, and adds its faults to the findings."""
        kind, found = record["kind"], self._found
        if kind == "lease":
            self._lease(record)
        elif kind in _CLOSES:
            self._close(record["group"], kind)
        elif kind == "gave_up":
            self._gave_up.setdefault(record["group"], set()).update(record["members"])
        elif kind == "end":
            name = record["id"]
            if name in self._ends:
                found.duplicated.append(f"{name} ended twice, {self._ends[name]}")
            self._ends[name] = f"as {record.get('end', 'superseded')}"
        elif kind == "batch":
            if record["step"] in self._batches:
                found.duplicated.append(f"step {record['step']} has two batches")
            self._batches[record["step"]] = record
            for group in record["groups"]:
                self._close(group, f"trained in step {record['step']}")
        elif kind == "batch_set_aside":
            del self._batches[record["step"]]
            self._open.update(group for group, *_ in record["put_back"])
            self._ends.update(dict.fromkeys(record["ids"], "as set aside"))
        elif kind == "step":
            if record["step"] not in self._batches:
                found.lost.append(f"step {record['step']} was trained without a batch")
            self._versions.add(tuple(record["version"]))

    def _lease(self, record: Record) -> None:
        group = record["group"]
        if group not in self._deadlines:
            if int(group[1:]) != len(self._deadlines):
                self._found.lost.append(f"group {group} came after {len(self._deadlines)} groups")
            self._deadlines[group] = record["deadline"]
            self._open.add(group)
            self._open.discard(record.get("replaces", ""))
        elif group not in self._open:
            self._found.duplicated.append(f"{group} was leased after its end")

    def _close(self, group: str, how: str) -> None:
        if group not in self._open:
            self._found.duplicated.append(f"{group} is {how} and was not open")
        self._open.discard(group)

    def conclude(self) -> None:
        """Reads the batches and the summary, and compares them with the records."""
        found, num_steps = self._found, len(self._batches)
        if sorted(self._batches) != list(range(num_steps)):
            found.lost.append(f"the steps of batches are {sorted(self._batches)}")
        made = {step for _, step in self._versions}
        found.lost += [
            f"version {n + 1} was not made" for n in range(num_steps) if n + 1 not in made
        ]
        # A group may be open at the end of the run if its deadline is the last step or later.
        found.lost += [
            f"{group} was to be trained by step {self._deadlines[group]}"
            for group in sorted(self._open)
            if self._deadlines[group] < num_steps - 1
        ]
        for step, record in sorted(self._batches.items()):
            batch = self._read(step, record)
            if batch is not None:
                self._check_batch(step, record, batch)
        found.max_lag = max(self._lags, default=0)
        self._check_summary()

    def _read(self, step: int, record: Record) -> trainer_pb2.RecordedBatch | None:
        attempt = record["batch_id"].partition("-")[2]
        name = f"step-{step:06d}{f'-{attempt}' if attempt else ''}.pb"
        path = self._folder / JOURNAL / BATCHES / name
        try:
            data = path.read_bytes()
            if zlib.crc32(data) == record["crc32"]:
                return trainer_pb2.RecordedBatch.FromString(data)
        except FileNotFoundError:
            self._found.lost.append(f"{path} is not there")
            return None
        except DecodeError:
            pass
        self._found.torn.append(f"{path} is not what the journal says")
        return None

    def _check_batch(self, step: int, record: Record, batch: trainer_pb2.RecordedBatch) -> None:
        found, sizes, tokens = self._found, Counter[str](), 0
        for each in batch.trajectories:
            name = f"{each.group_id}.{each.member}.{each.attempt}.{each.server_epoch:x}"
            place = (each.group_id, each.member)
            if name in self._ends:
                found.duplicated.append(f"{name} is in step {step} and ended {self._ends[name]}")
            if place in self._members:
                found.duplicated.append(f"{name} is in step {step} and was trained before")
            self._members.add(place)
            sizes[each.group_id] += 1
            sampled = sum(each.run_lengths[1::2])
            tokens += sampled
            if sampled != sum(span.length for span in each.version_spans):
                found.unequal.append(f"{name}: tokens and versions differ in length")
            for span in each.version_spans:
                self._lags[step - span.version.step] += span.length
                if not 0 <= step - span.version.step <= self._config.algorithm.max_staleness:
                    found.stale.append(f"{name}: version {span.version.step} in step {step}")
                if (span.version.incarnation, span.version.step) not in self._versions:
                    found.torn.append(f"{name}: no step made its version")
        if set(sizes) != set(record["groups"]) or batch.header.step != step:
            found.unequal.append(f"the batch of step {step} has other groups than its record")
        for group, size in sizes.items():
            whole = self._config.algorithm.group_size - len(self._gave_up.get(group, ()))
            if size != whole:
                found.lost.append(f"{group} has {size} of {whole} members in step {step}")
        if tokens != sum(count for *_, count in record["tokens"]):
            found.unequal.append(f"the tokens of step {step} differ from its record")

    def _check_summary(self) -> None:
        try:
            summary = json.loads((self._folder / SUMMARY).read_text())
        except (OSError, ValueError):
            self._found.lost.append("there is no summary")
            return
        ledger = dict(summary["ledger"])
        generated, difference = ledger.pop("generated"), ledger.pop("difference")
        gaps = ledger.pop("gaps")
        told = {int(lag): count for lag, count in summary["tokens_by_lag"].items()}
        for what, one, other in (
            ("the ledger's difference", difference, 0),
            ("the ledger's gaps", gaps, []),
            ("the ledger's tokens", generated, sum(ledger.values())),
            ("the trained tokens", summary["trained_tokens"], self._lags.total()),
            ("the tokens by lag", told, dict(self._lags)),
            ("the steps", summary["steps"], len(self._batches)),
        ):
            if one != other:
                self._found.unequal.append(f"{what}: {one} and {other}")

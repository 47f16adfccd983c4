"""Checks a run by the files in its folder alone, which may be a copy from a stranger.

The checks share no code with the controller that wrote the files, so one error cannot hide in
both. They load no model: only a replay shows that a recorded digest is that of the weights. The
journal is read once, and each batch with the rows of its step when its version was made; what is in
memory grows by some hundred bytes a step.
"""

import fcntl
import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from slipstream.client.batch_reader import Content, read_contents
from slipstream.client.findings import Findings
from slipstream.client.run_folder import LOCK, lines_of, parsed, settings_of
from slipstream.client.terminal import plain, say
from slipstream.client.verified_batch import StepNumbers, TrajectoryCheck, check_batch
from slipstream.client.verified_files import check_files
from slipstream.client.verified_journal import JournalCheck, PendingBatch, Record
from slipstream.client.verified_manifests import check_growing_manifests, unchecked_files
from slipstream.client.verified_results import MOST_BYTES, ResultsCheck, Row
from slipstream.core import run_folder
from slipstream.core.configuration.config_file import check_whole
from slipstream.core.configuration.toml_text import parse_toml
from slipstream.core.errors import DONE, FAILED, ConfigError
from slipstream.core.group_sizes import recorded_group_sizes
from slipstream.core.machine.files import open_regular, read_regular
from slipstream.core.run_folder import CONFIG, SUMMARY
from slipstream.v1 import trainer_pb2

# Most faults that are printed, and most characters of one.
MOST_FAULTS = 100
MOST_CHARACTERS = 500
# Most steps that one fault names.
_MOST_STEPS = 20


def run_verify(folder: Path) -> int:
    """Prints a line for each fault; returns 1 for any; raises ConfigError for no ended run."""
    settings_of(folder)
    with suppress(OSError), open_regular(folder / LOCK) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{folder} is written by a run that goes on; end it first") from None
    findings = examine(folder)
    for text in [
        *findings.faults[:MOST_FAULTS],
        *findings.losses[:MOST_FAULTS],
    ]:
        say(
            plain(
                text.replace(
                    "\n",
                    " ",
                )
            )[:MOST_CHARACTERS]
        )
    if findings.unchecked:
        say(plain(f"not checked: {', '.join(findings.unchecked)}")[:MOST_CHARACTERS])
    say(f"{folder}: {findings.trained}; faults: {findings.num_faults}")
    return FAILED if findings.num_faults else DONE


def examine(folder: Path) -> Findings:
    """Returns the faults in the files of an ended run."""
    findings = Findings()
    table: dict[str, Any] = {}
    with findings.reading(CONFIG):
        data = read_regular(folder / CONFIG, most_bytes=MOST_BYTES)
        check_whole(folder / CONFIG, data)
        settings: Any = parse_toml(data.decode())
        for name in ("max_staleness", "group_size", "groups_per_step"):
            int(settings["algorithm"][name])
        settings["run"].get("steps")
        recorded_group_sizes(settings)
        table = settings
    if table:
        _Examination(folder, findings, table).run()
    return findings


class _Examination:
    """One pass over the journal, the batches and the rows of a run."""

    def __init__(self, folder: Path, findings: Findings, table: Mapping[str, Any]) -> None:
        self._folder = folder
        self._findings = findings
        self._algorithm = table["algorithm"]
        self._group_sizes = recorded_group_sizes(table)
        self._removes_batches = (
            table.get(
                "checkpoint",
                {},
            ).get("keep_batches")
            is False
        )
        self._journal = JournalCheck(findings)
        self._results = ResultsCheck(
            folder,
            findings,
            self._journal,
            table,
        )
        # Steps whose batch has no file.
        self._lacking: list[int] = []
        # Names of the files of batches that were read.
        self._read_batches: set[str] = set()

    def run(self) -> None:
        findings = self._findings
        for _, _, record in read_journal(
            self._folder,
            findings,
        ):
            with findings.reading(f"record {record['line']} of the journal"):
                batch = self._journal.take(record)
                if batch is not None:
                    self._check_step(batch)
        with findings.reading("the journal"):
            for batch in self._journal.untrained():
                self._read_batch(batch, {})
            self._journal.check_end()
            self._check_lacking()
        with findings.reading("the rows"):
            self._results.check_rest()
        with findings.reading(run_folder.CHECKPOINTS):
            check_files(self._folder, findings, self._journal)
            check_growing_manifests(self._folder, findings)
        with findings.reading(SUMMARY):
            self._results.check_summary()
        findings.steps = len(self._journal.steps)
        with findings.reading("the folder"):
            findings.unchecked += unchecked_files(self._folder, self._read_batches.__contains__)

    def _check_step(self, batch: PendingBatch) -> None:
        """Checks the batch of a version, and the rows of its step."""
        step = batch.record["step"]
        rows: list[Row] = []
        samples: dict[str, Row] = {}
        with self._findings.reading(f"the rows of step {step + 1}"):
            rows, samples = self._results.take_rows(step + 1)
        assert batch.lags is not None
        self._findings.lags.update(batch.lags)
        self._read_batch(batch, samples, rows)

    def _read_batch(
        self, batch: PendingBatch, samples: Mapping[str, Row], rows: list[Row] | None = None
    ) -> None:
        """Checks a batch; `rows` are those of its step, None if no version was made from it."""
        findings = self._findings
        record = batch.record
        step = record["step"]
        ended: dict[str, str] = {}
        for leased in batch.groups.values():
            ended.update(leased.ended)
        check = TrajectoryCheck(
            step,
            findings,
            run_id=self._journal.run_ids[0],
            tasks={name: group.task for name, group in batch.groups.items()},
            ended=ended,
            versions=self._journal.weights,
            max_staleness=int(self._algorithm["max_staleness"]),
        )
        with findings.reading(f"the batch of step {step}"):
            contents = read_batch(self._folder, record)
            try:
                header, numbers = check_batch(contents, set(samples), check)
            except FileNotFoundError:
                # Old ones may have been removed for room: one line tells of all.
                self._lacking.append(step)
                if rows is not None:
                    self._results.take_removed(step + 1, rows)
                return
            self._compare_with_record(batch, header, numbers)
            self._check_seen(record, numbers.rewards_by_environment)
            if rows is not None:
                self._journal.trained(numbers.rewards)
                self._results.take_batch(step + 1, rows, samples, numbers)

    def _compare_with_record(
        self, batch: PendingBatch, header: trainer_pb2.BatchHeader, numbers: StepNumbers
    ) -> None:
        """Compares a batch's file, by its header and numbers, with the batch in the journal."""
        findings = self._findings
        record = batch.record
        step = record["step"]
        path = batch_path(self._folder, record)
        self._read_batches.add(path.name)
        findings.same(f"batch {step}", (header.step, header.batch_id), (step, record["batch_id"]))
        # An older release wrote no number.
        if record.get("num_bytes"):
            findings.same(f"bytes of batch {step}", path.stat().st_size, record["num_bytes"])
        if "trajectories" in record and not numbers.is_ordered:
            findings.same(
                f"trajectories of step {step}", len(numbers.rewards), record["trajectories"]
            )
        names = sorted(numbers.groups)
        findings.same(f"groups of step {step}", names, sorted(record["groups"]))
        expected_groups = int(self._algorithm["groups_per_step"])
        if numbers.is_ordered:
            # A client has ordered the step, with passes in place of groups.
            expected_groups = 0
            num_passes = header.given.num_passes
            findings.same(f"passes of step {step}", numbers.num_passes, num_passes)
            findings.passes = (findings.passes or 0) + numbers.num_passes
        findings.same(f"number of groups of step {step}", len(names), expected_groups)
        for name, group in numbers.groups.items():
            num_expected = self._group_sizes.of(group.environment)
            if name in batch.groups:
                num_expected -= len(batch.groups[name].gave_up)
            num_members = len(group.rewards)
            findings.same(f"members of {name} in step {step}", num_members, num_expected)
        num_tokens = sum(count for *_, count in record["tokens"])
        findings.same(f"tokens of step {step}", numbers.lags.total(), num_tokens)
        if batch.lags is not None:
            findings.same(f"lags of step {step}", numbers.lags, batch.lags)

    def _check_seen(self, record: Record, rewards: Mapping[str, list[float]]) -> None:
        if "seen" in record:
            seen = {
                name: [
                    min(values),
                    max(values),
                ]
                for name, values in rewards.items()
            }
            what = f"the lowest and highest rewards of step {record['step']}"
            self._findings.same(
                what,
                record["seen"],
                seen,
            )

    def _check_lacking(self) -> None:
        lacking = sorted(self._lacking)
        num_covered = min(
            len(lacking),
            self._journal.saved,
        )
        if self._removes_batches and lacking == [*range(num_covered)]:
            self._findings.removed = len(lacking)
            return
        text = f"files of {len(lacking)} batches are missing, of the steps {lacking[:_MOST_STEPS]}"
        self._findings.wrong(text, unless=not lacking)


def read_journal(folder: Path, findings: Findings) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yields the records of a run's journal, each with the number of its log and its end there.

    A restarted controller continues after the last line that it has read of earlier logs. Lines
    that an earlier controller wrote after that line are left out. Damaged lines are faults.
    """
    number = 0
    paths = run_folder.journal_logs(folder / run_folder.JOURNAL)
    for place, path in enumerate(paths):
        with findings.reading(path.name), open_regular(path) as file:
            # Lines that a controller wrote after a later one had begun are not part of the run.
            stop = min(
                map(_first_line, paths[place + 1 :]),
                default=math.inf,
            )
            end = 0
            for line in lines_of(file):
                record = _record(line)
                end = end + len(line)
                if record is not None and record["line"] >= stop:
                    break
                number += record is not None
                if record is not None and record["line"] != number:
                    findings.add(f"{path.name}: line {record['line']} is in place {number}")
                    number = record["line"]
                if record is not None:
                    yield run_folder.log_number(path.name), end, record
                elif line.endswith(b"\n"):
                    findings.add(f"{path.name}: a line behind {number} is damaged")


def _first_line(path: Path) -> float:
    with open_regular(path) as file:
        record = next(
            map(_record, lines_of(file)),
            None,
        )
    return math.inf if record is None else int(record["line"])


def _record(line: bytes) -> dict[str, Any] | None:
    checksum, _, text = line.rstrip(b"\n").partition(b" ")
    record = parsed(text) if checksum == b"%08x" % zlib.crc32(text) else None
    return (
        record
        if isinstance(
            record,
            dict,
        )
        and type(record.get("line")) is int
        else None
    )


def read_batch(folder: Path, record: Record) -> Iterator[Content]:
    """Yields the header and the contents of a record's batch, as `read_contents` does."""
    return read_contents(
        batch_path(folder, record),
        record["crc32"],
    )


def batch_path(folder: Path, record: Record) -> Path:
    """Returns the path of a record's batch in a run's folder."""
    attempt = record["batch_id"].partition("-")[2]
    name = f"step-{int(record['step']):06d}{f'-{int(attempt)}' if attempt else ''}.pb"
    return folder / run_folder.JOURNAL / run_folder.BATCHES / name

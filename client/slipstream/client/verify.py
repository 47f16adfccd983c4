"""Checks a run by the files in its folder alone, which may be a copy from a stranger.

The oracle shares no code with the controller that wrote the files, so one error cannot hide in
both. It loads no model: only a replay shows that a recorded digest is that of the weights.
"""

import fcntl
import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.client.batch_reader import Content, read_contents
from slipstream.client.run_folder import LOCK, lines_of, parsed, settings_of
from slipstream.client.terminal import plain, say
from slipstream.core import run_folder
from slipstream.core.configuration.config_file import check_whole
from slipstream.core.configuration.toml_text import parse_toml
from slipstream.core.errors import DONE, FAILED, ConfigError
from slipstream.core.machine.files import open_regular, read_regular
from slipstream.core.run_folder import CONFIG, GROUPS, METRICS, SAMPLES, SUMMARY
from slipstream.protocol.bounds import shown
from slipstream.protocol.release import unknown_fact
from slipstream.v1 import trainer_pb2, trajectory_pb2

Record = Mapping[str, Any]
# Most bytes of a file that is read whole.
MOST_BYTES = 64 << 20
# Most faults that are printed, and most characters of one.
MOST_FAULTS, MOST_CHARACTERS = 100, 500
# Most steps that one fault names.
_MOST_STEPS = 20
_START = (0, 0)
# Kinds of records whose facts no other file has.
UNCHECKED = ("start", "queue", "servers", "submitted", "unsubmitted", "head_start", "tasks")
# Where generated tokens end, as journal and summary have it; what the summary alone knows.
_ENDS = ("filtered", "failed", "cancelled", "quarantined", "evaluated", "set_aside")
_OTHERS = ("trained", "queued", "in_flight", "lost", "difference")
# What strange values of a file raise where they are compared or counted.
_STRANGE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@dataclass
class Findings:
    """The faults that a run's files show, one line each, and what was trained."""

    faults: list[str] = field(default_factory=list)
    steps: int = 0
    # The number of trained tokens by their lag.
    lags: Counter[int] = field(default_factory=Counter)
    # The number of passes, if a client's own loop ordered the steps.
    passes: int | None = None
    # The number of the first batches, which the run has removed, as its settings say.
    removed: int = 0
    # Lines about what a crash has lost, which is no fault.
    losses: list[str] = field(default_factory=list)

    @property
    def trained(self) -> str:
        """The steps and what they trained, in words."""
        if self.passes is not None:
            told = f"{self.steps} steps of a client's own loop, {self.passes:,} passes"
        else:
            late = max(self.lags, default=0)
            told = f"{self.steps} steps, {self.lags.total():,} trained tokens, at most {late} late"
        what = f"; not checked: the first {self.removed} batches, which checkpoint.keep_batches = "
        return told + (f"{what}false has removed" if self.removed else "")

    @contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Makes a fault of a file that the block cannot read, or whose values are strange."""
        try:
            yield
        except OSError as error:
            self.faults.append(f"{what} cannot be read: {error.strerror or error}")
        except _STRANGE as error:
            cause = f"{type(error).__name__} {error}"
            self.faults.append(f"{what} is not what a run writes: {cause}")


def run_verify(folder: Path) -> int:
    """Prints a line for each fault; returns 1 for any; raises ConfigError for no ended run."""
    settings_of(folder)
    with suppress(OSError), open_regular(folder / LOCK) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{folder} is written by a run that goes on; end it first") from None
    found = examine(folder)
    for text in found.faults[:MOST_FAULTS]:
        say(plain(text.replace("\n", " "))[:MOST_CHARACTERS])
    for text in found.losses[:MOST_FAULTS]:
        say(plain(text.replace("\n", " "))[:MOST_CHARACTERS])
    say(f"{folder}: {found.trained}; faults: {len(found.faults)}")
    return FAILED if found.faults else DONE


def examine(folder: Path) -> Findings:
    """Returns the faults in the files of an ended run."""
    found, bounds = Findings(), list[int]()
    with found.reading(CONFIG):
        data = read_regular(folder / CONFIG, most_bytes=MOST_BYTES)
        check_whole(folder / CONFIG, data)
        table: Any = parse_toml(data.decode())
        names = ("max_staleness", "group_size", "groups_per_step")
        bounds = [int(table["algorithm"][name]) for name in names]
    if not bounds:
        return found
    removes = table.get("checkpoint", {}).get("keep_batches") is False
    oracle = _Oracle(folder, bounds, found, removes_batches=removes)
    for *_, record in read_journal(folder, found):
        with found.reading(f"record {record['line']} of the journal"):
            oracle.take(record)
    for what, check in {
        "the journal": oracle.check_order,
        METRICS: oracle.check_metrics,
        SAMPLES: oracle.check_samples,
        GROUPS: oracle.check_groups,
        "checkpoints": oracle.check_checkpoints,
        SUMMARY: oracle.check_summary,
    }.items():
        with found.reading(what):
            check()
    found.steps = len(oracle.steps)
    return found


def read_journal(folder: Path, found: Findings) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yields the records of a run's journal, each with the number of its log and its end there.

    A restarted controller continues after the last line that it has read of earlier logs. Lines
    that an earlier controller wrote after that line are left out. Damaged lines are faults.
    """
    number, paths = 0, run_folder.journal_logs(folder / run_folder.JOURNAL)
    for place, path in enumerate(paths):
        with found.reading(path.name), open_regular(path) as file:
            # Lines that a controller wrote after a later one had begun are not part of the run.
            stop, end = min(map(_first_line, paths[place + 1 :]), default=math.inf), 0
            for line in lines_of(file):
                record, end = _record(line), end + len(line)
                if record is not None and record["line"] >= stop:
                    break
                number += record is not None
                if record is not None and record["line"] != number:
                    found.faults.append(f"{path.name}: line {record['line']} is in place {number}")
                    number = record["line"]
                if record is not None:
                    yield run_folder.log_number(path.name), end, record
                elif line.endswith(b"\n"):
                    found.faults.append(f"{path.name}: a line behind {number} is damaged")


def _first_line(path: Path) -> float:
    with open_regular(path) as file:
        record = next(map(_record, lines_of(file)), None)
    return math.inf if record is None else int(record["line"])


def _record(line: bytes) -> dict[str, Any] | None:
    checksum, _, text = line.rstrip(b"\n").partition(b" ")
    record = parsed(text) if checksum == b"%08x" % zlib.crc32(text) else None
    return record if isinstance(record, dict) and type(record.get("line")) is int else None


def read_batch(folder: Path, record: Record) -> Iterator[Content]:
    """Yields the header and the contents of a record's batch, as `read_contents` does."""
    attempt = record["batch_id"].partition("-")[2]
    name = f"step-{int(record['step']):06d}{f'-{int(attempt)}' if attempt else ''}.pb"
    path = folder / run_folder.JOURNAL / run_folder.BATCHES / name
    return read_contents(path, record["crc32"])


class _Oracle:
    """Takes a journal record by record; the checks then compare it with all other files."""

    def __init__(
        self, folder: Path, bounds: Sequence[int], found: Findings, *, removes_batches: bool
    ) -> None:
        self._folder, self._found, self._removes_batches = folder, found, removes_batches
        self._max_staleness, self._group_size, self._groups_per_step = bounds
        self._run_ids: list[str] = []
        # The first lease of each group, the open groups, and how untrained trajectories ended.
        self._leases: dict[str, Record] = {}
        self._open: set[str] = set()
        self._evaluating: set[str] = set()
        self._ends: dict[str, str] = {}
        self._end_tokens: Counter[str] = Counter()
        self._gave_up: defaultdict[str, set[int]] = defaultdict(set)
        self._batches: dict[int, Record] = {}
        # The newest record of each step, and the weights of each version (incarnation, step).
        self.steps: dict[int, Record] = {}
        self._weights: dict[tuple[int, ...], str] = {}
        self._evaluations: dict[int, float | None] = {}
        # The newest version with a checkpoint.
        self._saved = 0
        # The reward of each trajectory, and those of groups with their tasks, by version.
        self._rewards: dict[int, dict[str, float]] = {}
        self._groups: dict[int, Counter[tuple[str, int, tuple[float, ...]]]] = {}
        self._members: set[tuple[str, int]] = set()
        # Steps that were trained when a controller began: a crash may have cut their rows off.
        self._cut_off: set[int] = set()

    def _wrong(self, text: str, *, unless: bool = False) -> None:
        if not unless:
            self._found.faults.append(text)

    def _same(self, what: str, one: object, other: object) -> None:
        self._wrong(f"{what}: {one} and {other}", unless=one == other)

    def _same_steps(self, what: str, found: Iterable[float], wanted: Iterable[float]) -> None:
        one, other = Counter([*found]), Counter([*wanted])
        lacking, beyond = sorted((other - one).elements()), sorted((one - other).elements())
        told = f"without {lacking[:_MOST_STEPS]}, beyond {beyond[:_MOST_STEPS]}"
        self._wrong(f"{what}: {told}", unless=one == other)

    def _same_weights(self, what: str, version: tuple[int, ...], digest: str) -> None:
        # Nobody records the weights with which a run begins.
        told = digest if version == _START else self._weights.get(version)
        self._same(f"weights of version {version} in {what}", digest, told)

    def take(self, record: Record) -> None:
        kind, group = record["kind"], record.get("group", "")
        if kind == "start":
            if self._run_ids:
                # The record of the newest step may have been lost, and not its rows.
                self._cut_off.update((len(self.steps), len(self.steps) + 1))
            self._run_ids.append(record["run_id"])
        self._wrong(f"the journal has {kind} before a start", unless=bool(self._run_ids))
        if kind == "lease":
            first = self._leases.setdefault(group, record)
            if first is record:
                self._same(f"the place of {group}", int(group[1:]), len(self._leases) - 1)
                self._open.add(group)
                self._open.discard(record.get("replaces", ""))
            self._wrong(f"{group} was leased after its end", unless=group in self._open)
            self._same(f"the task of {group}", _task(first), _task(record))
        elif kind == "evaluation_lease":
            self._evaluating.add(group)
        elif kind in ("closed", "set_aside"):
            if group not in self._evaluating:
                self._close(group, kind)
        elif kind == "gave_up":
            self._gave_up[group].update(record["members"])
        elif kind == "end":
            self._end(record["id"], record.get("end", "superseded"), record.get("tokens", 0))
        elif kind == "batch":
            step = record["step"]
            self._wrong(f"step {step} has two batches", unless=step not in self._batches)
            self._batches[step] = record
            for name in record["groups"]:
                self._close(name, f"trained in step {step}")
        elif kind == "batch_set_aside":
            del self._batches[record["step"]]
            self._open.update(name for name, *_ in record["put_back"])
            for name in record["ids"]:
                self._end(name, "set_aside", 0)
            self._end_tokens["set_aside"] += record["tokens"]
        elif kind == "step":
            step, version = record["step"], tuple(record["version"])
            self._wrong(f"step {step} was trained without a batch", unless=step in self._batches)
            self._same(f"the version of step {step}", version[1], step + 1)
            self._weights.setdefault(version, record["digest"])
            self._same_weights(f"step {step}", version, record["digest"])
            self.steps[step] = record
        elif kind == "checkpoint":
            self._same_weights("a checkpoint", tuple(record["version"]), record["digest"])
            self._saved = max(self._saved, record["version"][1])
        elif kind == "evaluation":
            self._evaluations[record["version"]] = record["reward_mean"]
        elif kind not in UNCHECKED:
            what, fact = f"record {record['line']} of the journal", f"a record {shown(kind)}"
            self._wrong(unknown_fact(what, fact))

    def _close(self, group: str, how: str) -> None:
        self._wrong(f"{group} is {how} and was not open", unless=group in self._open)
        self._open.discard(group)

    def _end(self, name: str, how: str, tokens: int) -> None:
        self._wrong(f"{name} ended twice, as {how}", unless=name not in self._ends)
        self._ends[name] = how
        self._end_tokens[how] += tokens

    def check_order(self) -> None:
        self._same("the runs of the journal", len(set(self._run_ids)), 1)
        num, trained = len(self._batches), len(self.steps)
        self._same_steps("steps of batches", self._batches, range(num))
        self._same_steps("trained steps", self.steps, range(trained))
        # The run may have ended before the trainer took its last batch.
        self._wrong(f"{num} batches made {trained} versions", unless=num - 1 <= trained <= num)
        for group in sorted(self._open):
            deadline = self._leases[group]["deadline"]
            # A group may be open at the end if its deadline is the last step or later.
            text = f"{group} was to be trained by step {deadline}"
            self._wrong(text, unless=deadline >= num - 1)
        lacking = []
        for step, record in sorted(self._batches.items()):
            told = Counter(dict(self.steps[step]["lags"]) if step in self.steps else {})
            self._found.lags += told
            with self._found.reading(f"the batch of step {step}"):
                try:
                    lags = self._batch(step, record, read_batch(self._folder, record))
                except FileNotFoundError:
                    # Old ones may have been removed for room: one line tells of all.
                    lacking.append(step)
                    continue
                self._same(f"lags of step {step}", lags if step in self.steps else told, told)
        if self._removes_batches and lacking == [*range(min(len(lacking), self._saved))]:
            self._found.removed = len(lacking)
            return
        text = f"files of {len(lacking)} batches are missing, of the steps {lacking[:_MOST_STEPS]}"
        self._wrong(text, unless=not lacking)

    def _batch(self, step: int, record: Record, batch: Iterator[Content]) -> Counter[int]:
        """Checks a batch; returns the number of its sampled tokens by their lag."""
        # Before all else, for the file may be missing.
        header = next(batch)
        lags, groups = Counter[int](), defaultdict[str, list[float]](list)
        rewards = self._rewards[step + 1] = {}
        assert isinstance(header, trainer_pb2.BatchHeader)
        client_passes = set()
        for each in batch:
            if isinstance(each, trainer_pb2.Pass):
                client_passes.add(each.id)
                continue
            assert isinstance(each, trajectory_pb2.Trajectory)
            name = f"{each.group_id}.{each.member}.{each.attempt}.{each.server_epoch:x}"
            member = (each.group_id, each.member)
            what = f"{name} of step {step}"
            self._wrong(f"{what} ended as {self._ends.get(name)}", unless=name not in self._ends)
            self._wrong(f"{what} was trained before", unless=member not in self._members)
            self._members.add(member)
            lease = self._leases.get(each.group_id, {})
            task = (each.environment, each.task_index, each.seed)
            self._same(f"task and lease of {what}", task, _task(lease))
            self._same(f"the run of {what}", each.run_id, self._run_ids[0])
            sampled = sum(each.run_lengths[1::2])
            spanned = sum(span.length for span in each.version_spans)
            self._same(f"tokens and versions of {what}", sampled, spanned)
            for span in each.version_spans:
                version = (span.version.incarnation, span.version.step)
                lag = step - version[1]
                is_made = version == _START or version in self._weights
                self._wrong(f"{what} has lag {lag}", unless=0 <= lag <= self._max_staleness)
                self._wrong(f"{what}: no step made version {version}", unless=is_made)
                lags[lag] += span.length
            rewards[name] = each.reward
            groups[each.group_id].append(each.reward)
        self._same(f"batch {step}", (header.step, header.batch_id), (step, record["batch_id"]))
        self._same(f"groups of step {step}", sorted(groups), sorted(record["groups"]))
        wanted = self._groups_per_step
        if header.HasField("given"):
            # A client has ordered the step, with passes in place of groups.
            wanted = 0
            passes = len(client_passes)
            self._same(f"passes of step {step}", passes, header.given.num_passes)
            self._found.passes = (self._found.passes or 0) + passes
        self._same(f"number of groups of step {step}", len(groups), wanted)
        for group, members in groups.items():
            whole = self._group_size - len(self._gave_up[group])
            self._same(f"members of {group} in step {step}", len(members), whole)
        tokens = sum(count for *_, count in record["tokens"])
        self._same(f"tokens of step {step}", lags.total(), tokens)
        tasks = {group: _task(self._leases[group])[:2] for group in groups}
        self._groups[step + 1] = Counter((*tasks[g], tuple(sorted(groups[g]))) for g in groups)
        return lags

    def _rows(self, name: str) -> Iterator[dict[str, Any]]:
        with open_regular(self._folder / name) as file:
            for number, line in enumerate(lines_of(file), start=1):
                row = parsed(line)
                if isinstance(row, dict):
                    yield row
                else:
                    self._wrong(f"{name}: line {number} is damaged")

    def check_metrics(self) -> None:
        steps, heldout = Counter[int](), dict[int, float | None]()
        for row in self._rows(METRICS):
            if "step" not in row:
                heldout[row["evaluation_step"]] = row["reward_heldout"]
                continue
            steps[row["step"]] += 1
            if "passes" in row:
                continue
            rewards = self._rewards.get(row["step"], {}).values() or [row["reward_mean"]]
            mean = math.fsum(rewards) / len(rewards)
            is_close = math.isclose(row["reward_mean"], mean, abs_tol=1e-12)
            told = f"{METRICS} has reward {row['reward_mean']} at step {row['step']}"
            self._wrong(f"{told}, its batch {mean}", unless=is_close)
        self._same_steps(f"steps of {METRICS}", steps.elements(), (step + 1 for step in self.steps))
        for version, reward in heldout.items():
            # A crash may have lost the record of a round.
            lost = reward if len(self._run_ids) > 1 else math.nan
            recorded = self._evaluations.get(version, lost)
            self._same(f"reward_heldout of version {version} in {METRICS}", reward, recorded)

    def check_samples(self) -> None:
        seen = set()
        for row in self._rows(SAMPLES):
            step, name = row["step"], row["trajectory_id"]
            self._wrong(f"{SAMPLES} has {name} twice", unless=(step, name) not in seen)
            seen.add((step, name))
            told = self._rewards.get(step, {name: row["reward"]} if step - 1 in self.steps else {})
            self._same(f"reward of {name}, step {step} in {SAMPLES}", row["reward"], told.get(name))

    def check_groups(self) -> None:
        found = defaultdict[int, Counter[Any]](Counter)
        for row in self._rows(GROUPS):
            key = (row["environment"], row["task_index"], tuple(sorted(row["rewards"])))
            found[row["step"]][key] += 1
        for step, groups in found.items():
            expected = self._groups.get(step, groups)
            self._wrong(f"{GROUPS} has other groups than step {step}", unless=groups <= expected)
            num_lacking = (expected - groups).total()
            if num_lacking:
                text = (
                    f"{GROUPS} lacks {num_lacking} of the {expected.total()} groups of step {step}"
                )
                is_lost = step in self._cut_off and step < len(self.steps)
                if is_lost:
                    self._found.losses.append(f"{text}, lost in a crash")
                else:
                    self._wrong(text)

    def check_checkpoints(self) -> None:
        for path in sorted(self._folder.glob("checkpoints/step-*/manifest.json")):
            name = path.parent.name
            with self._found.reading(f"the manifest of {name}"):
                manifest: Any = parsed(read_regular(path, most_bytes=MOST_BYTES))
                version = (manifest["incarnation"], manifest["step"])
                self._same("a checkpoint", name, f"step-{version[1]:06d}")
                self._same_weights(name, version, manifest["weight_digest"])
                for entry in manifest["files"]:
                    file = path.parent / Path(entry["path"])
                    is_inside = ".." not in file.parts and file.is_relative_to(path.parent)
                    size = file.stat().st_size if is_inside and file.is_file() else None
                    self._same(f"bytes of {name}/{entry['path']}", size, entry["num_bytes"])

    def check_summary(self) -> None:
        summary: Any = parsed(read_regular(self._folder / SUMMARY, most_bytes=MOST_BYTES))
        ledger, lags = summary["ledger"], self._found.lags
        self._same("the ledger's difference", ledger["difference"], 0)
        self._same("the ledger's gaps", ledger["gaps"], [])
        tokens = sum(ledger[name] for name in (*_ENDS, *_OTHERS))
        self._same("the ledger's tokens", ledger["generated"], tokens)
        for name in _ENDS:
            self._same(f"the ledger's {name} tokens", ledger[name], self._end_tokens[name])
        for number in (ledger["trained"], summary["trained_tokens"]):
            self._same("the trained tokens", number, lags.total())
        by_lag = {int(lag): count for lag, count in summary["tokens_by_lag"].items()}
        self._same("the tokens by lag", by_lag, dict(lags))
        self._same("the steps", summary["steps"], len(self.steps))
        if summary["state"] == "finished" and self.steps:
            last = [self.steps[step]["version"] for step in sorted(self.steps)]
            self._same("the order of versions", last, sorted(last))
            weights = self._weights.get(tuple(last[-1]))
            self._same("the last weights", summary["weight_digest"], weights)


def _task(lease: Record) -> tuple[Any, ...]:
    return tuple(lease.get(name) for name in ("environment", "task", "seed"))

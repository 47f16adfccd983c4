"""Compares a run's result files with what its batches and its journal say.

The rows of each file are in the order of their steps, so that each step's rows are read when its
batch is.
"""

import hashlib
import json
import math
import zlib
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slipstream.client.findings import Findings
from slipstream.client.run_folder import lines_of, parsed
from slipstream.client.verified_batch import GroupNumbers, StepNumbers
from slipstream.client.verified_journal import JournalCheck, Record
from slipstream.core import run_folder
from slipstream.core.group_sizes import recorded_group_sizes
from slipstream.core.machine.files import open_regular, read_regular
from slipstream.core.run_folder import (
    FILE_DIGEST_BYTES,
    GROUPS,
    HELDOUT,
    JOURNAL,
    METRICS,
    SAMPLES,
    SERVER_SHARES,
    SUMMARY,
    TRAINER_PARTS,
)

Row = dict[str, Any]
# Most bytes of a file that is read whole.
MOST_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 20
# Places of folders that a copy may leave out, or that have gone since.
_LEFT_OUT = (f"{run_folder.CHECKPOINTS}/", f"{run_folder.EXPORTS}/")
# Fates of generated tokens that the journal has, and those that the summary alone knows.
RECORDED_FATES = ("filtered", "failed", "cancelled", "quarantined", "evaluated", "set_aside")
OTHER_FATES = ("trained", "queued", "in_flight", "lost", "difference")
# Steps at each end of a run whose rewards the summary has.
_EDGE_STEPS = 5
_STATES = ("finished", "stopped", "failed")
# Cause of the end of a run that has finished, and of no other one.
_DONE = "all steps are done"
# Learner and server round a mean of float32 differently.
_SURPRISAL_ERROR = 1e-4


class StepRows:
    """The rows of a file whose steps do not fall; a row in another place is a fault."""

    def __init__(self, path: Path, findings: Findings) -> None:
        self._name = path.name
        self._findings = findings
        self._rows = self._read(path)
        self._next: Row | None = None
        # Rows without a step, in their order.
        self.others: list[Row] = []

    def _read(self, path: Path) -> Iterator[Row]:
        with self._findings.reading(self._name), open_regular(path) as file:
            for number, line in enumerate(lines_of(file), start=1):
                row = parsed(line)
                if not isinstance(row, dict):
                    self._findings.add(f"{self._name}: line {number} is damaged")
                elif "step" not in row:
                    self.others.append(row)
                elif isinstance(row["step"], (int, float)):
                    yield row
                else:
                    self._findings.add(f"{self._name}: the step of line {number} is no number")

    def take(self, step: float) -> list[Row]:
        """Returns the rows of a step; those of earlier ones before them are out of their place."""
        rows: list[Row] = []
        while True:
            row = self._next or next(self._rows, None)
            self._next = row
            if row is None or row["step"] > step:
                return rows
            self._next = None
            if row["step"] == step:
                rows.append(row)
            else:
                self._out_of_place(row)

    def finish(self) -> None:
        """Makes a fault of each row behind those that were taken."""
        for row in [
            *([self._next] if self._next else []),
            *self._rows,
        ]:
            self._out_of_place(row)

    def _out_of_place(self, row: Row) -> None:
        name = row.get("trajectory_id", "a row")
        self._findings.add(f"{name} of step {row['step']} in {self._name} is not in its place")


class ResultsCheck:
    """Takes the steps of a run in their order; then checks the summary."""

    def __init__(
        self, folder: Path, findings: Findings, journal: JournalCheck, table: Mapping[str, Any]
    ) -> None:
        """Takes the `journal`, as far as it was read, and the `table` of the run's settings."""
        self._folder = folder
        self._findings = findings
        self._journal = journal
        self._group_sizes = recorded_group_sizes(table)
        self._max_staleness = int(table["algorithm"]["max_staleness"])
        self._num_steps = table["run"].get("steps")
        self.metrics = StepRows(folder / METRICS, findings)
        self.samples = StepRows(folder / SAMPLES, findings)
        self.groups = StepRows(folder / GROUPS, findings)
        # Steps of which rows of groups are missing, in words.
        self._lacking: dict[int, str] = {}
        self._first_rewards: list[float] = []
        self._last_rewards: deque[float] = deque(maxlen=_EDGE_STEPS)
        # The computed columns of the first row, which all others have too.
        self._columns: set[str] | None = None
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._gap_sum = 0.0
        self._gap_tokens = 0.0
        self._gap_max = 0.0
        self._num_overflows = 0

    def take_rows(self, step: int) -> tuple[list[Row], dict[str, Row]]:
        """Returns the rows of metrics of the step that makes version `step`, and its samples."""
        rows = self.metrics.take(step)
        if len(rows) != 1:
            what = "without" if not rows else f"with {len(rows)} rows of"
            self._findings.add(f"steps of {METRICS}: {what} [{step}]")
        samples: dict[str, Row] = {}
        for row in self.samples.take(step):
            name = str(row["trajectory_id"])
            self._findings.wrong(f"{SAMPLES} has {name} twice", unless=name not in samples)
            samples[name] = row
        for row in rows[:1]:
            self._count(row)
        return rows, samples

    def _count(self, row: Row) -> None:
        step_s = row.get("step_s") or 0.0
        if SERVER_SHARES[0] in row:
            self._seconds["reported"] += step_s
        for name in ("step_s", *TRAINER_PARTS):
            self._seconds[name] += row.get(name) or 0.0
        for name in SERVER_SHARES:
            self._seconds[name] += (row.get(name) or 0.0) * step_s
        self._num_overflows += int(row.get("gradient_overflows") or 0)
        gap = [
            row.get(f"logprob_gap_{name}")
            for name in (
                "mean",
                "tokens",
                "max",
            )
        ]
        mean, tokens, largest = gap
        if mean is not None and tokens is not None and largest is not None:
            self._gap_sum += mean * tokens
            self._gap_tokens += tokens
            self._gap_max = max(self._gap_max, largest)

    def take_batch(
        self, step: int, rows: list[Row], samples: Mapping[str, Row], numbers: StepNumbers
    ) -> None:
        """Compares the rows of a step with its batch."""
        if numbers.is_ordered:
            for row in rows:
                passes = float(numbers.num_passes)
                self._findings.same(f"passes of step {step} in {METRICS}", row["passes"], passes)
            return
        expected = numbers.row(self._group_sizes)
        self._note_reward(expected["reward_mean"])
        for row in rows:
            self._check_row(step, row, expected, numbers)
        for name, row in samples.items():
            self._check_sample(step, name, row, numbers)
        self._check_groups(
            step,
            self.groups.take(step),
            list(numbers.groups.values()),
        )

    def take_removed(self, step: int, rows: list[Row]) -> None:
        """Notes the rows of a step whose batch was removed."""
        for row in rows[:1]:
            if "reward_mean" in row:
                self._note_reward(row["reward_mean"])
        self.groups.take(step)

    def _note_reward(self, reward: float) -> None:
        self._last_rewards.append(reward)
        if len(self._first_rewards) < _EDGE_STEPS:
            self._first_rewards.append(reward)

    def _check_row(
        self, step: int, row: Row, expected: Mapping[str, float], numbers: StepNumbers
    ) -> None:
        findings = self._findings
        for name, value in expected.items():
            if name in row and not _is_close(row[name], value):
                label = "reward" if name == "reward_mean" else name
                findings.add(f"{METRICS} has {label} {row[name]} at step {step}, its batch {value}")
        columns = row.keys() & expected.keys()
        if self._columns is None:
            self._columns = {name for name in columns if "/" not in name}
        lacking = sorted(self._columns - columns)
        findings.wrong(f"{METRICS} lacks {lacking} at step {step}", unless=not lacking)
        difference = row.get("ledger_difference", 0.0)
        findings.same(f"ledger_difference of step {step} in {METRICS}", difference, 0.0)
        step_s = row.get("step_s") or 0.0
        rate = row.get("trained_tokens_per_s")
        num_tokens = row.get("trained_tokens", 0.0)
        if rate is not None and step_s:
            expected_rate = num_tokens / step_s
            findings.wrong(
                f"{METRICS} has trained_tokens_per_s {rate} at step {step}, not {expected_rate}",
                unless=_is_close(rate, expected_rate),
            )
        trained = row.get("trained_tokens")
        if trained is not None:
            num_sampled = numbers.lags.total()
            recorded = f"{METRICS} has trained_tokens {trained} at step {step}"
            text = f"{recorded}, its batch at most {num_sampled}"
            findings.wrong(
                text,
                unless=0 <= trained <= num_sampled and trained == int(trained),
            )

    def _check_sample(self, step: int, name: str, row: Row, numbers: StepNumbers) -> None:
        episode = numbers.episodes.get(name)
        if episode is None:
            self._findings.add(f"{name} is not in the batch of step {step} in {SAMPLES}")
            return
        for key, value in episode.items():
            recorded = row.get(key)
            if not (recorded == value or _is_close(recorded, value)):
                what = f"{key} of {name}, step {step} in {SAMPLES}"
                self._findings.add(f"{what}: {str(recorded)[:60]} and {str(value)[:60]}")

    def _check_groups(self, step: int, rows: list[Row], groups: list[GroupNumbers]) -> None:
        if not rows:
            return
        findings = self._findings
        lacking = list(groups)
        for row in rows:
            match = next(
                (group for group in lacking if _is_group(row, group)),
                None,
            )
            if match is None:
                findings.add(f"{GROUPS} has other groups than step {step}")
                return
            lacking.remove(match)
        if not lacking:
            return
        text = f"{GROUPS} lacks {len(lacking)} of the {len(groups)} groups of step {step}"
        self._lacking[step] = text

    def check_rest(self) -> None:
        """Checks rows of no step, and those of evaluations."""
        for rows in (self.metrics, self.samples, self.groups):
            rows.finish()
        for step, text in self._lacking.items():
            # A later start of the controller shows whether one died in this step.
            if step in self._journal.cut_off:
                self._findings.losses.append(f"{text}, lost in a crash")
            else:
                self._findings.add(text)
        recorded = {record["version"]: record for record in self._journal.evaluations}
        # The last row of a round that a crash repeated is the one that the journal knows.
        rounds = {row["evaluation_step"]: row for row in self.metrics.others}
        # A crash may have lost the record of a round, or its row.
        is_lost = len(self._journal.run_ids) > 1
        for version, row in rounds.items():
            what = f"of version {version:.0f} in {METRICS}"
            record = recorded.get(version)
            if record is None:
                self._findings.wrong(f"a round {what} is not in the journal", unless=is_lost)
                continue
            expected = {
                "reward_heldout": record["reward_mean"],
                "num_episodes": record["episodes"],
                "num_failed": record["failed"],
            }
            for evaluation, values in record.get(
                "evaluations",
                {},
            ).items():
                for name, value in values.items():
                    expected[f"{evaluation}/{name}"] = value
            for name, value in expected.items():
                if name in row and not _is_close(row[name], value):
                    self._findings.add(f"{name} {what}: {row[name]} and {value}")
        for version in sorted(recorded.keys() - rounds.keys()):
            text = f"the round of version {version} is not in {METRICS}"
            self._findings.wrong(text, unless=is_lost)
        self._check_heldout(recorded, is_lost=is_lost)

    def _check_heldout(self, recorded: Mapping[int, Record], *, is_lost: bool) -> None:
        """Compares the checksums of a round's kept replies with those of its record."""
        findings = self._findings
        # Of a round that a crash repeated, the last reply to each task.
        checksums: defaultdict[int, dict[tuple[str, int], int]] = defaultdict(dict)
        path = self._folder / HELDOUT
        has_replies = any(record.get("replies_crc32") for record in recorded.values())
        if not path.exists() and not has_replies:
            return
        with findings.reading(HELDOUT), open_regular(path) as file:
            for line in lines_of(file):
                row: Any = parsed(line)
                place = (row["evaluation"], row["task_index"])
                checksums[row["evaluation_step"]][place] = zlib.crc32(line)
        for version, replies in checksums.items():
            text = f"{HELDOUT} has replies of version {version}, whose round is not in the journal"
            findings.wrong(text, unless=version in recorded or is_lost)
            expected = recorded.get(version, {}).get("replies_crc32")
            text = f"replies of version {version} in {HELDOUT} are not those of its round"
            is_same = expected is None or sorted(replies.values()) == sorted(expected)
            findings.wrong(text, unless=is_same)
        for version, record in recorded.items():
            text = f"the replies of version {version} are not in {HELDOUT}"
            is_there = version in checksums or not record.get("replies_crc32")
            findings.wrong(text, unless=is_there or is_lost)

    def check_summary(self) -> None:
        """Compares the summary with the journal, the batches and the rows."""
        findings = self._findings
        journal = self._journal
        data = read_regular(self._folder / SUMMARY, most_bytes=MOST_BYTES)
        summary: Any = parsed(data)
        self._check_own_digest(summary, data)
        ledger = summary["ledger"]
        num_steps = len(journal.steps)
        findings.same("the ledger's difference", ledger["difference"], 0)
        findings.same("the ledger's gaps", ledger["gaps"], [])
        tokens = sum(
            ledger[name]
            for name in (
                *RECORDED_FATES,
                *OTHER_FATES,
            )
        )
        findings.same("the ledger's tokens", ledger["generated"], tokens)
        findings.same("the generated tokens", summary["generated_tokens"], ledger["generated"])
        for name in RECORDED_FATES:
            what = f"the ledger's {name} tokens"
            findings.same(what, ledger[name], journal.end_tokens[name])
        for number in (ledger["trained"], summary["trained_tokens"]):
            findings.same("the trained tokens", number, findings.lags.total())
        by_lag = {int(lag): count for lag, count in summary["tokens_by_lag"].items()}
        findings.same("the tokens by lag", by_lag, dict(findings.lags))
        findings.same("the steps", summary["steps"], num_steps)
        self._check_state(summary, num_steps)
        for name, value in self._expected(num_steps).items():
            if name in summary and not (
                summary[name] == value
                or _is_close(
                    summary[name],
                    value,
                )
            ):
                findings.add(f"{name} in {SUMMARY}: {summary[name]} and {value}")
        self._check_time(summary.get("time", {}))
        lines = summary.get("journal_lines")
        if lines is not None:
            text = f"the journal ends at line {journal.num_lines}, {SUMMARY} was written at {lines}"
            findings.wrong(text, unless=journal.num_lines >= lines)

    def _check_own_digest(self, summary: Row, data: bytes) -> None:
        others = dict(summary)
        digest_there = others.pop("digest", None)
        content = json.dumps(others, sort_keys=True).encode()
        digest = hashlib.blake2b(content, digest_size=FILE_DIGEST_BYTES)
        written = f"{json.dumps(summary, indent=2)}\n"
        is_own = digest_there == digest.hexdigest() and data == written.encode()
        self._findings.wrong(
            f"{SUMMARY} is not what the run wrote, by its digest",
            unless=is_own,
        )
        for name, (num_bytes, expected) in summary["files"].items():
            path = self._folder / name
            is_inside = ".." not in path.parts and path.is_relative_to(self._folder)
            text = f"{name} is not what it was when {SUMMARY} was written"
            may_be_absent = is_inside and name.startswith(_LEFT_OUT)
            if may_be_absent and not path.parent.exists():
                absent = f"{Path(name).parent} (absent)"
                self._findings.unchecked.append(absent)
                continue
            with self._findings.reading(name):
                is_same = is_inside and self._is_same(path, num_bytes, expected)
                self._findings.wrong(text, unless=is_same)
        self._check_logs(summary)

    def _check_logs(self, summary: Row) -> None:
        """Looks at logs of the journal that were not there when the summary was written."""
        for path in run_folder.journal_logs(self._folder / JOURNAL):
            name = f"{JOURNAL}/{path.name}"
            if name in summary["files"]:
                continue
            with self._findings.reading(name), open_regular(path) as file:
                first_line = next(lines_of(file), b"")
                _, _, text = first_line.partition(b" ")
                is_behind = not text
                if text:
                    record: Any = parsed(text)
                    is_behind = record["line"] > summary["journal_lines"]
                if is_behind:
                    loss = f"{name} is of a start behind {SUMMARY}"
                    self._findings.losses.append(loss)
                else:
                    fault = f"{name} was not there when {SUMMARY} was written"
                    self._findings.add(fault)

    def _is_same(self, path: Path, num_bytes: int, expected: str) -> bool:
        """Whether the file's bytes have the digest; logs of the journal may have grown since."""
        digest = hashlib.blake2b(digest_size=FILE_DIGEST_BYTES)
        num_left = num_bytes
        with open_regular(path) as file:
            while block := file.read(min(_BLOCK_BYTES, num_left)):
                digest.update(block)
                num_left -= len(block)
            is_grown = bool(file.read(1))
        may_grow = path.parent.name == JOURNAL
        is_whole = num_left == 0 and (may_grow or not is_grown)
        return is_whole and digest.hexdigest() == expected

    def _check_time(self, shares: Mapping[str, Mapping[str, float]]) -> None:
        seconds = self._seconds
        trainer = shares.get("trainer", {})
        for name, words in TRAINER_PARTS.items():
            if words in trainer and seconds["step_s"]:
                share = seconds[name] / seconds["step_s"]
                is_close = _is_close(trainer[words], share, 1e-6)
                text = f"time of the trainer for {words} in {SUMMARY}: {trainer[words]} and {share}"
                self._findings.wrong(text, unless=is_close)
        servers = shares.get("servers", {})
        for name in SERVER_SHARES:
            activity = name.split("_")[1]
            if activity in servers and seconds["reported"]:
                share = seconds[name] / seconds["reported"]
                is_close = _is_close(servers[activity], share, 1e-6)
                text = f"time of servers {activity} in {SUMMARY}: {servers[activity]} and {share}"
                self._findings.wrong(text, unless=is_close)

    def _check_state(self, summary: Row, num_steps: int) -> None:
        findings = self._findings
        journal = self._journal
        state = summary["state"]
        findings.wrong(
            f"the state {state!r} is none of a run that has ended", unless=state in _STATES
        )
        cause = summary["cause"]
        is_finished = state == "finished"
        text = f"the run is {state} with the cause {str(cause)!r}"
        findings.wrong(
            text,
            unless=bool(cause) and (cause == _DONE) == is_finished,
        )
        if not is_finished:
            return
        if self._num_steps is not None:
            findings.same("the steps of a finished run", num_steps, self._num_steps)
        if num_steps:
            versions = [
                (
                    journal.steps[step],
                    step + 1,
                )
                for step in sorted(journal.steps)
            ]
            findings.same("the order of versions", versions, sorted(versions))
            weights = journal.weights.get(versions[-1])
            findings.same(
                "the last weights",
                summary["weight_digest"],
                weights and weights.hex(),
            )

    def _expected(self, num_steps: int) -> dict[str, Any]:
        journal = self._journal
        num_edge = max(1, min(_EDGE_STEPS, num_steps // 2))
        last_rewards = [*self._last_rewards][-num_edge:]
        rounds = journal.evaluations
        expected: dict[str, Any] = {
            "reward_first": _mean(self._first_rewards[:num_edge]),
            "reward_last": _mean(last_rewards),
            "reward_steps": len(last_rewards),
            "reward_heldout_first": rounds[0]["reward_mean"] if rounds else None,
            "reward_heldout": rounds[-1]["reward_mean"] if rounds else None,
            "reward_heldout_first_step": rounds[0]["version"] if rounds else None,
            "reward_heldout_step": rounds[-1]["version"] if rounds else None,
            "evaluations": rounds[-1].get(
                "evaluations",
                {},
            )
            if rounds
            else {},
            "max_staleness": self._max_staleness,
            "max_lag_seen": max(journal.lags, default=0),
            "trajectories_with_several_versions": journal.num_with_several_versions,
            "filtered_groups": journal.num_filtered,
            "set_aside_batches": journal.num_set_aside,
            "gradient_overflows": self._num_overflows,
            "logprob_gap_tokens": self._gap_tokens,
            "logprob_gap_mean": None,
            "logprob_gap_max": None,
        }
        if self._gap_tokens:
            expected["logprob_gap_mean"] = self._gap_sum / self._gap_tokens
            expected["logprob_gap_max"] = self._gap_max
        return expected


def _is_group(row: Row, group: GroupNumbers) -> bool:
    plain = (
        row["environment"],
        row["task_index"],
        row["rewards"],
        row["sampled_tokens"],
    )
    expected = (
        group.environment,
        group.task_index,
        group.rewards,
        group.sampled_tokens,
    )
    if plain != expected or len(row["surprisal"]) != len(group.surprisal):
        return False
    pairs = zip(row["surprisal"], group.surprisal, strict=True)
    return all(_is_close(recorded, value, _SURPRISAL_ERROR) for recorded, value in pairs)


def _is_close(value: object, expected: object, error: float = 1e-9) -> bool:
    """Whether two numbers differ by rounding alone; None stands for one that is not finite."""
    if isinstance(expected, float) and not math.isfinite(expected):
        expected = None
    if value is None or expected is None:
        return value is None and expected is None
    if not isinstance(value, (int, float)) or not isinstance(
        expected,
        (int, float),
    ):
        return value == expected
    return math.isclose(
        value,
        expected,
        rel_tol=error,
        abs_tol=max(error * 1e-3, 1e-12),
    )


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None

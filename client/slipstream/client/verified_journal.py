"""Follows a run's journal record by record, and says which batches can be checked.

What a record needs of earlier ones is kept only as long as a later one may need it, so that a run
of a hundred thousand steps takes few bytes a step.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.client.findings import Findings
from slipstream.client.verified_batch import Task
from slipstream.protocol.bounds import shown
from slipstream.protocol.release import unknown_fact

Record = Mapping[str, Any]
_START = (0, 0)
# Kinds of records whose facts no other file has.
UNCHECKED = (
    "start",
    "queue",
    "servers",
    "submitted",
    "unsubmitted",
    "head_start",
    "tasks",
    "task_weights",
)
# Bits of a trajectory's name that are kept of those that are over.
_NAME_BITS = (1 << 64) - 1


@dataclass
class VerifiedGroup:
    """A group that no version was made from yet."""

    task: Task
    deadline: int
    is_open: bool = True
    gave_up: set[int] = field(default_factory=set)
    # Whether the journal has the rewards of its task.
    has_result: bool = False
    # How those of its trajectories ended that no batch took.
    ended: dict[str, str] = field(default_factory=dict)


@dataclass
class PendingBatch:
    """A batch that waits to be checked, with its groups by name, and its lags if it was trained."""

    record: Record
    groups: dict[str, VerifiedGroup]
    lags: Counter[int] | None = None


class JournalCheck:
    """Takes the records of a run in order."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self.run_ids: list[str] = []
        # Groups without an end, and those of batches that no version was made from.
        self._groups: dict[str, VerifiedGroup] = {}
        self._num_groups = 0
        self._evaluating: set[str] = set()
        # Hashes of the names of trajectories that ended, and of those that were trained.
        self._ended: set[int] = set()
        self._trained = array("Q")
        self.end_tokens: Counter[str] = Counter()
        self._pending: dict[int, PendingBatch] = {}
        # Steps that have a batch, in the order of their first one.
        self._batches: set[int] = set()
        # The incarnation of the newest version of each step, and the weights of each version.
        self.steps: dict[int, int] = {}
        self.weights: dict[tuple[int, int], bytes] = {}
        self.evaluations: list[Record] = []
        self.num_with_several_versions = 0
        self.num_set_aside = 0
        self.num_filtered = 0
        self.lags: Counter[int] = Counter()
        # The newest version with a checkpoint.
        self.saved = 0
        # Steps at which a controller began again: a crash may have cut their rows off.
        self.cut_off: set[int] = set()
        self.num_lines = 0

    def same_weights(self, what: str, version: tuple[int, int], digest: str) -> None:
        """Makes a fault of weights of a version that differ from those of its step."""
        # The weights with which a run begins are not recorded.
        recorded = self.weights.get(version)
        expected = digest if version == _START else recorded and recorded.hex()
        self._findings.same(f"weights of version {version} in {what}", digest, expected)

    def take(self, record: Record) -> PendingBatch | None:
        """Takes a record; returns the batch from which it made the first version, if it did."""
        self.num_lines = record["line"]
        kind = record["kind"]
        group = record.get("group", "")
        findings = self._findings
        if kind == "start":
            if self.run_ids:
                # The record of the newest step may have been lost, and not its rows.
                self.cut_off.update(
                    (
                        len(self.steps),
                        len(self.steps) + 1,
                    )
                )
            self.run_ids.append(record["run_id"])
        findings.wrong(
            f"the journal has {kind} before a start",
            unless=bool(self.run_ids),
        )
        match kind:
            case "lease":
                self._lease(group, record)
            case "evaluation_lease":
                self._evaluating.add(group)
            case "closed" | "set_aside":
                self.num_filtered += record.get("how") == "filtered"
                if group in self._evaluating:
                    self._evaluating.discard(group)
                else:
                    self._close(group, kind)
                    self._groups.pop(group, None)
            case "gave_up":
                if group in self._groups:
                    self._groups[group].gave_up.update(record["members"])
            case "end":
                how = record.get("end", "superseded")
                self._end(
                    record["id"],
                    how,
                    record.get("tokens", 0),
                )
            case "batch":
                self._batch(record)
            case "batch_set_aside":
                self._set_aside(record)
            case "step":
                return self._step(record)
            case "checkpoint":
                incarnation, step = record["version"]
                self.same_weights(
                    "a checkpoint",
                    (incarnation, step),
                    record["digest"],
                )
                self.saved = max(self.saved, step)
            case "task_result":
                self._task_result(group, record)
            case "evaluation":
                self.evaluations.append(record)
            case _ if kind not in UNCHECKED:
                what = f"record {record['line']} of the journal"
                findings.add(unknown_fact(what, f"a record {shown(kind)}"))
        return None

    def _task_result(self, name: str, record: Record) -> None:
        group = self._groups.get(name)
        is_first = group is not None and group.is_open and not group.has_result
        self._findings.wrong(f"{name} has a result twice or was not open", unless=is_first)
        if group is not None:
            group.has_result = True
        passed = record["passed"]
        episodes = record["episodes"]
        self._findings.wrong(
            f"{name} has {passed} passed of {episodes} episodes",
            unless=0 <= passed <= episodes and episodes >= 1,
        )

    def _lease(self, name: str, record: Record) -> None:
        task = tuple(
            record.get(key)
            for key in (
                "environment",
                "task",
                "seed",
            )
        )
        group = self._groups.get(name)
        place = int(name[1:])
        if group is None and place < self._num_groups:
            self._findings.add(f"{name} was leased after its end")
            return
        if group is None:
            self._findings.same(
                f"the place of {name}",
                place,
                self._num_groups,
            )
            self._num_groups += 1
            self._groups[name] = VerifiedGroup(
                task,
                record["deadline"],
            )
            # A group in place of one that was given up; that one has no other end.
            self._groups.pop(
                record.get("replaces", ""),
                None,
            )
            return
        self._findings.wrong(
            f"{name} was leased after its end",
            unless=group.is_open,
        )
        self._findings.same(
            f"the task of {name}",
            group.task,
            task,
        )

    def _close(self, name: str, how: str) -> None:
        group = self._groups.get(name)
        is_open = group is not None and group.is_open
        self._findings.wrong(f"{name} is {how} and was not open", unless=is_open)
        if group is not None:
            group.is_open = False

    def _end(self, name: str, how: str, tokens: int) -> None:
        number = hash(name) & _NAME_BITS
        self._findings.wrong(
            f"{name} ended twice, as {how}",
            unless=number not in self._ended,
        )
        self._ended.add(number)
        self.end_tokens[how] += tokens
        group = self._groups.get(name.partition(".")[0])
        if group is not None:
            group.ended[name] = how

    def _batch(self, record: Record) -> None:
        step = record["step"]
        is_first = step not in self._batches
        self._findings.wrong(f"step {step} has two batches", unless=is_first)
        for name in record["groups"]:
            self._close(name, f"trained in step {step}")
        if is_first:
            self._batches.add(step)
            groups = {name: self._groups[name] for name in record["groups"] if name in self._groups}
            self._pending[step] = PendingBatch(
                record,
                groups,
            )

    def _set_aside(self, record: Record) -> None:
        step = record["step"]
        self._batches.remove(step)
        batch = self._pending.pop(step)
        put_back = {name for name, *_ in record["put_back"]}
        for name, group in batch.groups.items():
            group.is_open = name in put_back
            if not group.is_open:
                self._groups.pop(name, None)
        for name in record["ids"]:
            self._end(name, "set_aside", 0)
        self.end_tokens["set_aside"] += record["tokens"]
        self.num_set_aside += 1

    def _step(self, record: Record) -> PendingBatch | None:
        step = record["step"]
        incarnation, version_step = record["version"]
        version = (incarnation, version_step)
        has_batch = step in self._batches
        self._findings.wrong(f"step {step} was trained without a batch", unless=has_batch)
        self._findings.same(
            f"the version of step {step}",
            version_step,
            step + 1,
        )
        self.weights.setdefault(
            version,
            bytes.fromhex(record["digest"]),
        )
        self.same_weights(
            f"step {step}",
            version,
            record["digest"],
        )
        if step not in self.steps:
            self.num_with_several_versions += record.get("several", 0)
            self.lags.update(dict(record["lags"]))
        self.steps[step] = incarnation
        batch = self._pending.pop(step, None)
        if batch is not None:
            batch.lags = Counter(dict(record["lags"]))
            for name in batch.groups:
                self._groups.pop(name, None)
        return batch

    def trained(self, names: Iterable[str]) -> None:
        """Notes the trajectories of a batch from which a version was made."""
        self._trained.extend(hash(name) & _NAME_BITS for name in names)

    def untrained(self) -> list[PendingBatch]:
        """Returns the batches from which no version was made."""
        return [batch for _, batch in sorted(self._pending.items())]

    def check_end(self) -> None:
        """Checks what only the whole journal shows."""
        findings = self._findings
        findings.same(
            "the runs of the journal",
            len(set(self.run_ids)),
            1,
        )
        num_batches = len(self._batches)
        num_trained = len(self.steps)
        findings.same_steps(
            "steps of batches",
            self._batches,
            range(num_batches),
        )
        findings.same_steps(
            "trained steps",
            self.steps,
            range(num_trained),
        )
        # The run may have ended before the trainer took its last batch.
        is_ended = num_batches - 1 <= num_trained <= num_batches
        findings.wrong(f"{num_batches} batches made {num_trained} versions", unless=is_ended)
        for name, group in sorted(self._groups.items()):
            # A group may be open at the end if its deadline is the last step or later.
            is_due = group.is_open and group.deadline < num_batches - 1
            text = f"{name} was to be trained by step {group.deadline}"
            findings.wrong(text, unless=not is_due)
        late = self._ended.intersection(self._trained)
        text = f"{len(late)} trajectories were trained and ended otherwise behind that"
        findings.wrong(text, unless=not late)

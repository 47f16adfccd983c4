"""A start reads a snapshot and what came behind it, or the journal whole."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from slipstream.core.types import TrajectoryId
from slipstream.learner.controller.events import EventLog
from slipstream.learner.controller.records import kinds, snapshots
from slipstream.learner.controller.records.history import RunHistory, read_history
from slipstream.learner.controller.records.journal import Journal, encoded, read_records
from slipstream.learner.controller.records.kinds import fields_of
from slipstream.learner.controller.records.snapshots import (
    NAME,
    open_history,
    write_snapshot,
)
from support.fakes.journal_records import batch_record, lease_record
from support.references.history_state import different_field
from support.rigs.counted_work import num_lines
from support.rigs.waiting import until

STEPS = 12
PER_STEP = 3


def records(first: int, steps: int) -> list[dict]:
    """Leases, ends, batches and steps of a run, from step `first` on."""
    journaled = []
    for step in range(first, first + steps):
        groups = [f"g{PER_STEP * step + place:06d}" for place in range(PER_STEP)]
        journaled += [
            lease_record(
                name,
                number,
                server="s",
                epoch=7,
                seed=number,
                deadline=step + 2,
            )
            for number, name in enumerate(groups, PER_STEP * step)
        ]
        end = kinds.End(
            id=TrajectoryId(f"{groups[0]}.0.1.7"),
            end=kinds.TrajectoryEnd.FAILED,
            cause="",
            tokens=3,
            server="s",
            epoch=7,
        )
        version = {
            "version": [0, step + 1],
            "digest": f"{step:032x}",
            "lags": [[0, 5]],
        }
        journaled += [
            dict(fields_of(end)),
            batch_record(step, *groups),
            {"kind": "step", "step": step, "several": 0} | version,
        ]
    return journaled


def append(
    folder: Path, *, starts: bool = True, first: int = 0, steps: int = STEPS
) -> None:
    """Writes a log as a start of a controller does."""
    with Journal(folder) as journal:
        if starts:
            start = kinds.Start(
                format=1,
                run_id="r",
                key="00",
                unix_s=0.0,
            )
            journal.append(start)
        for record in records(first, steps):
            journal.append(kinds.parsed(record))


def whole(folder: Path) -> RunHistory:
    return read_history(read_records(folder))


def restored(folder: Path, warnings: list[str] | None = None) -> tuple[RunHistory, int]:
    """What a start knows, and how many records it has read behind the snapshot."""
    history, reader = open_history(
        folder,
        ([] if warnings is None else warnings).append,
    )
    line = reader.line
    history = read_history(reader, history, line=line)
    return history, reader.line - line


def check_equal(folder: Path, history: RunHistory) -> None:
    assert different_field(history, whole(folder)) == ""


def num_records(folder: Path) -> int:
    return sum(1 for _ in read_records(folder))


def test_a_start_reads_what_is_behind_the_newest_snapshot(tmp_path):
    append(tmp_path)
    number = num_records(tmp_path)
    for line in (1, 9, 9, number - 4):
        write_snapshot(tmp_path, line, pytest.fail)
        history, num_read = restored(tmp_path)
        assert num_read == number - line
        check_equal(tmp_path, history)
    append(tmp_path, first=STEPS)
    history, num_read = restored(tmp_path)
    assert num_read == num_records(tmp_path) - number + 4
    check_equal(tmp_path, history)
    # Over the border of the two logs, too.
    write_snapshot(tmp_path, number + 5, pytest.fail)
    history, num_read = restored(tmp_path)
    assert num_read == num_records(tmp_path) - number - 5
    check_equal(tmp_path, history)


def test_a_snapshot_that_ends_before_a_later_log_leaves_the_rest_of_its_own(tmp_path):
    append(tmp_path)
    number = num_records(tmp_path)
    append(tmp_path, first=STEPS)
    write_snapshot(tmp_path, number - 4, pytest.fail)
    history, num_read = restored(tmp_path)
    assert num_read == num_records(tmp_path) - number + 4
    check_equal(tmp_path, history)


def test_a_group_that_was_put_back_is_the_same_after_a_snapshot(tmp_path):
    aside = kinds.BatchSetAside(
        step=0,
        batch_id="b000000",
        by="trainer",
        groups=[],
        put_back=[("g000000", "e", 0, 0)],
        ids=[],
        tokens=0,
        put_back_trajectories=1,
        put_back_tokens=[("s", 7, 5)],
    )
    append(tmp_path, steps=0)
    with Journal(tmp_path) as journal:
        lease = kinds.parsed(records(0, 1)[0])
        for record in (lease, kinds.parsed(batch_record(0, "g000000")), aside):
            journal.append(record)
    write_snapshot(tmp_path, num_records(tmp_path), pytest.fail)
    with Journal(tmp_path) as journal:
        journal.append(msgspec.structs.replace(lease, epoch=8))
        journal.append(kinds.GaveUp(group="g000000", members=[1]))
    history, num_read = restored(tmp_path)
    assert num_read == 2
    check_equal(tmp_path, history)


def test_a_restart_costs_as_much_after_many_steps_as_after_few(tmp_path):
    costs = []
    for name, steps in (("few", 20), ("many", 200)):
        folder = tmp_path / name
        append(folder, steps=steps)
        write_snapshot(folder, num_records(folder) - 10, pytest.fail)
        costs.append(num_lines(lambda: restored(folder)))  # noqa: B023
    assert costs[1] < 1.5 * costs[0]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def remove_lines(path: Path, number: int) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-number]))


DAMAGES = {
    "damaged": lambda folder: flip(folder / NAME),
    "cut off": lambda folder: (folder / NAME).write_bytes(
        (folder / NAME).read_bytes()[:-9]
    ),
    "empty": lambda folder: (folder / NAME).write_bytes(b""),
    "of another journal": lambda folder: remove_lines(folder / "journal.log", 20),
    "a folder": lambda folder: (
        (folder / NAME).unlink(),
        (folder / NAME).mkdir(),
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_snapshot_that_cannot_be_used_is_told_and_the_journal_read_whole(
    tmp_path, damage
):
    append(tmp_path)
    write_snapshot(tmp_path, num_records(tmp_path), pytest.fail)
    DAMAGES[damage](tmp_path)
    warnings: list[str] = []
    history, num_read = restored(tmp_path, warnings)
    assert num_read == num_records(tmp_path)
    check_equal(tmp_path, history)
    (line,) = warnings
    assert line.startswith(
        f"{tmp_path / NAME} is not used, and the journal is read whole: it "
    )


def test_a_snapshot_of_another_release_is_told(tmp_path, monkeypatch):
    append(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(snapshots, "RELEASE", "0.0.9 (protocol 00)")
        write_snapshot(tmp_path, num_records(tmp_path), pytest.fail)
    warnings: list[str] = []
    _, num_read = restored(tmp_path, warnings)
    assert num_read == num_records(tmp_path)
    assert warnings[0].endswith(": release 0.0.9 (protocol 00) wrote it")


def test_lines_of_a_fenced_controller_are_in_no_snapshot_that_is_used(tmp_path):
    append(tmp_path)
    number = num_records(tmp_path)
    # The first controller goes on and writes a snapshot, although a later one has read less.
    write_snapshot(tmp_path, number, pytest.fail)
    later = [{"kind": "queue", "added": place} for place in range(6)]
    lines = [
        encoded(place, record)
        for place, record in enumerate(
            later,
            number - 3,
        )
    ]
    (tmp_path / "journal-2.log").write_bytes(b"".join(lines))
    warnings: list[str] = []
    history, num_read = restored(tmp_path, warnings)
    assert num_read == num_records(tmp_path) == number - 4 + len(later)
    check_equal(tmp_path, history)
    assert warnings[0].endswith("it is of another journal than the one beside it")


async def test_a_controller_writes_a_snapshot_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshots, "LOOK_S", 0.01)
    monkeypatch.setattr(snapshots, "EVERY_LINES", 10)
    events = EventLog()
    with Journal(tmp_path) as journal:
        task = asyncio.create_task(snapshots.write_snapshots(journal, tmp_path, events))
        journal.append(
            kinds.Start(
                format=1,
                run_id="r",
                key="00",
                unix_s=0.0,
            )
        )
        for record in records(0, 1):
            journal.append(kinds.parsed(record))
        journal.sync()
        # Fewer records than a snapshot is worth.
        await asyncio.sleep(0)
        assert not (tmp_path / NAME).exists()
        for record in records(1, 2):
            journal.append(kinds.parsed(record))
        journal.sync()
        await until((tmp_path / NAME).exists)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert list(events.kept()) == []
    assert restored(tmp_path)[1] == 0

import asyncio
import contextlib
import errno
import os
import resource
import signal
import zlib
from pathlib import Path

import pytest
from slipstream.core.errors import ConfigError, ProtocolError, RunFailed
from slipstream.core.types import (
    GroupId,
    TrajectoryId,
)
from slipstream.learner.controller.records.history import RunHistory
from slipstream.learner.controller.records.journal import (
    Journal,
    batch_path,
    read_batch,
    read_records,
)
from slipstream.learner.controller.records.recorded_steps import RecordedBatch
from slipstream.learner.controller.trajectories.inspection import EarlierIds
from slipstream.protocol.codec import trajectory_to_pb
from slipstream.v1 import trainer_pb2, trajectory_pb2
from support.fakes.plain_trajectory import plain_trajectory
from support.fakes.slow_disk import SlowDisk, several_turns
from support.rigs.batch_messages import in_one_message
from support.rigs.journal_notes import note


def test_every_flipped_bit_is_noticed(tmp_path):
    with Journal(tmp_path) as journal:
        journal.append(note("a", number=1))
    path = tmp_path / "journal.log"
    data = path.read_bytes()
    for position in range(len(data) - 1):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            path.write_bytes(damaged)
            try:
                records = list(read_records(tmp_path))
            except ProtocolError:
                continue
            assert records == []


def three_lines(folder):
    with Journal(folder) as journal:
        for kind in ("a", "b", "c"):
            journal.append(note(kind))
    log = folder / "journal.log"
    return log, log.read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize(
    ("order", "line"),
    [
        ((0, 2), 2),
        ((1, 2), 1),
        ((0, 1, 1, 2), 3),
        ((0, 2, 1), 2),
    ],
)
def test_a_line_that_is_missing_or_twice_or_elsewhere_is_noticed(tmp_path, order, line):
    path, lines = three_lines(tmp_path)
    path.write_bytes(b"".join(lines[number] for number in order))
    with pytest.raises(
        ProtocolError, match=rf"journal.log: line {line} .*from a copy"
    ) as error:
        list(read_records(tmp_path))
    assert "\n" not in str(error.value)


def test_a_journal_of_a_version_without_numbers_is_read_and_goes_on_with_them(tmp_path):
    lines = [
        b"%08x %s\n" % (zlib.crc32(text), text)
        for text in (b'{"kind":"a"}', b'{"kind":"b"}')
    ]
    path = tmp_path / "journal.log"
    path.write_bytes(b"".join(lines))
    assert list(read_records(tmp_path)) == [{"kind": "a"}, {"kind": "b"}]
    with Journal(tmp_path) as journal:
        journal.append(note("c"))
    assert list(read_records(tmp_path)) == [{"kind": "a"}, {"kind": "b"}, {"kind": "c"}]
    path.write_bytes(path.read_bytes().removeprefix(lines[0]))
    with pytest.raises(ProtocolError, match="line 2 was written as line 3"):
        list(read_records(tmp_path))


@pytest.mark.parametrize("end", [b"", b"\x0b", b"\x8a"])
def test_a_whole_last_record_without_its_newline_is_kept(tmp_path, end):
    path, _ = three_lines(tmp_path)
    path.write_bytes(path.read_bytes()[:-1] + end)
    assert [record["kind"] for record in read_records(tmp_path)] == ["a", "b", "c"]
    with Journal(tmp_path) as journal:
        journal.append(note("d"))
    assert [record["kind"] for record in read_records(tmp_path)] == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    "text", [b"[1]", b"7", b'"x"', b"{}", b"{", b"\xff", b'{"kind":1}']
)
def test_a_right_checksum_before_what_is_no_record_is_one_line(tmp_path, text):
    (tmp_path / "journal.log").write_bytes(b"%08x %s\n" % (zlib.crc32(text), text))
    with pytest.raises(
        ProtocolError, match="journal.log: line 1 is no record"
    ) as error:
        list(read_records(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["journal.log", "batches"])
def test_what_stands_in_the_place_of_the_journal_is_named(tmp_path, name):
    if name == "batches":
        (tmp_path / name).touch()
    else:
        (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=f"{name} cannot be written: ") as error:
        Journal(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("how", ["removed", "replaced", "without batches"])
def test_a_journal_that_vanishes_while_it_is_written_records_no_more(tmp_path, how):
    batch = trainer_pb2.RecordedBatch(
        header=trainer_pb2.BatchHeader(step=0, batch_id="b0")
    )
    journal = Journal(tmp_path)
    journal.append(note("a"))
    journal.sync()
    assert not journal.trouble()
    if how == "without batches":
        (tmp_path / "batches").rmdir()
    else:
        (tmp_path / "journal.log").rename(tmp_path / "elsewhere")
    if how == "replaced":
        (tmp_path / "journal.log").touch()
    if how == "without batches":
        with pytest.raises(
            RunFailed, match="batches was removed while the run wrote it"
        ):
            journal.write_batch(batch)
    assert "was removed" in journal.trouble()
    assert "\n" not in journal.trouble()
    with pytest.raises(RunFailed, match="was removed"):
        journal.sync()
    with pytest.raises(RunFailed), journal:
        pass


@pytest.fixture
def no_locks(monkeypatch):
    """Takes from the machine what some shared file systems lack: locks that others see."""
    monkeypatch.setattr("fcntl.flock", lambda *_: None)


@pytest.fixture
def open_journal(tmp_path):
    """Opens journals of one folder, and closes them after the test, fenced ones too."""
    with contextlib.ExitStack() as opened_journals:

        def opened() -> Journal:
            opened_journals.enter_context(contextlib.suppress(RunFailed))
            return opened_journals.enter_context(Journal(tmp_path))

        yield opened


def batch_of(step, text=""):
    header = trainer_pb2.BatchHeader(step=step, batch_id=f"b{step:06d}")
    return trainer_pb2.RecordedBatch(
        header=header, trajectories=[trajectory_pb2.Trajectory(group_id=text)]
    )


def test_a_second_controller_on_the_machine_is_refused_and_fences_nobody(tmp_path):
    with Journal(tmp_path) as journal:
        journal.append(note("a"))
        with pytest.raises(ConfigError, match="is written by another controller"):
            Journal(tmp_path)
        journal.sync()
        assert not journal.trouble()
    assert [path.name for path in tmp_path.glob("*.log")] == ["journal.log"]


@pytest.mark.usefixtures("no_locks")
def test_a_controller_of_another_machine_acknowledges_nothing_after_a_later_one_began(
    tmp_path,
):
    old = Journal(tmp_path)
    old.append(note("start"))
    old.sync()
    # Written and not synced when the other one begins; this one may stand still for long.
    old.append(note("unseen"))
    with Journal(tmp_path) as new:
        new.append(note("start"))
        new.sync()
        with pytest.raises(RunFailed, match="was started later"):
            old.sync()
        assert old.is_fenced and not new.is_fenced
        assert "was started later" in old.trouble() and not new.trouble()
        new.append(note("b"))
        new.sync()
        with pytest.raises(RunFailed, match="was started later"):
            old.__exit__()
    kinds = [record["kind"] for record in read_records(tmp_path)]
    assert kinds == ["start", "start", "b"]
    with Journal(tmp_path) as third:
        third.append(note("c"))
    assert [record["kind"] for record in read_records(tmp_path)] == [*kinds, "c"]


@pytest.mark.usefixtures("no_locks")
def test_a_fenced_controller_replaces_no_batch_of_its_successor(open_journal):
    old = open_journal()
    new = open_journal()
    crc32 = new.write_batch(batch_of(0, "new")).crc32
    with pytest.raises(RunFailed, match="was started later"):
        old.write_batch(batch_of(0, "old"))
    assert (
        next(new.read_batch(RecordedBatch(0, "b000000", crc32)).trajectories).group_id
        == "new"
    )


@pytest.mark.usefixtures("no_locks")
def test_the_file_of_a_batch_that_a_fenced_controller_left_is_written_anew(
    tmp_path, open_journal
):
    old = open_journal()
    new = open_journal()
    # The fenced controller forms its batch before it knows.
    old.append(old.write_batch(batch_of(0, "old")))
    with pytest.raises(RunFailed, match="was started later"):
        old.sync()
    assert new.path(0).is_file()
    record = new.write_batch(batch_of(0, "new"))
    new.append(record)
    new.sync()
    assert (
        next(
            new.read_batch(RecordedBatch(0, "b000000", record.crc32)).trajectories
        ).group_id
        == "new"
    )
    assert [record["kind"] for record in read_records(tmp_path)] == ["batch"]


def test_a_batch_is_recorded_with_the_lowest_and_highest_reward_of_each_environment(
    tmp_path,
):
    earned = [("a", 3.0), ("b", -1.0), ("a", 10.0), ("a", 5.0)]
    batch = trainer_pb2.RecordedBatch(header=batch_of(0).header)
    for name, reward in earned:
        batch.trajectories.add(environment=name, reward=reward)
    with Journal(tmp_path) as journal:
        journal.append(journal.write_batch(batch))
        journal.sync()
    (record,) = read_records(tmp_path)
    assert record["seen"] == {"a": [3.0, 10.0], "b": [-1.0, -1.0]}


def test_of_two_that_begin_at_once_the_one_with_the_newest_log_goes_on(
    tmp_path, no_locks, open_journal
):
    with Journal(tmp_path) as first:
        first.append(note("a"))
    slow = open_journal()
    quick = open_journal()
    quick.append(note("b"))
    quick.sync()
    slow.append(note("c"))
    with pytest.raises(RunFailed, match="was started later"):
        slow.sync()
    assert [record["kind"] for record in read_records(tmp_path)] == ["a", "b"]


def test_a_batch_is_a_file_and_a_record_that_names_its_checksum(tmp_path):
    batch = trainer_pb2.RecordedBatch(
        header=trainer_pb2.BatchHeader(step=3, batch_id="b3")
    )
    with Journal(tmp_path) as journal:
        journal.append(journal.write_batch(batch))
    (record,) = read_records(tmp_path)
    assert in_one_message(read_batch(tmp_path, 3, record["crc32"])) == batch
    path = batch_path(tmp_path, 3)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(ProtocolError, match="damaged"):
        in_one_message(read_batch(tmp_path, 3, record["crc32"]))


def test_a_batch_file_is_held_to_the_bounds_of_messages(tmp_path):
    batch = trainer_pb2.RecordedBatch(
        header=trainer_pb2.BatchHeader(step=3, batch_id="b3")
    )
    batch.trajectories.add(max_reply_tokens=2**31)
    path = batch_path(tmp_path, 3)
    path.parent.mkdir()
    path.write_bytes(data := batch.SerializeToString())
    with pytest.raises(
        ProtocolError, match=r"pb is damaged: .*\[0\].max_reply_tokens must be between"
    ):
        in_one_message(read_batch(tmp_path, 3, zlib.crc32(data)))


@pytest.mark.parametrize("place", ["the batch", "a trajectory"])
def test_a_batch_with_a_fact_of_another_release_is_not_trained_without_it(
    tmp_path, place
):
    batch = trainer_pb2.RecordedBatch(
        header=trainer_pb2.BatchHeader(step=3, batch_id="b3")
    )
    # Field 1999 with the value 7.
    unknown = b"\xf8\x7c\x07"
    if place == "a trajectory":
        batch.trajectories.add(group_id="g000001").MergeFromString(unknown)
    data = batch.SerializeToString() + unknown * (place == "the batch")
    path = batch_path(tmp_path, 3)
    path.parent.mkdir()
    path.write_bytes(data)
    with pytest.raises(ProtocolError) as caught:
        in_one_message(read_batch(tmp_path, 3, zlib.crc32(data)))
    line = f"{path} is of another release: a field is not known to slipstream-rl "
    assert str(caught.value).startswith(line)
    assert "damaged" not in str(caught.value)


def test_a_writer_goes_on_behind_the_last_whole_record(tmp_path):
    with Journal(tmp_path) as journal:
        journal.append(note("a"))
        journal.append(note("b"))
    path = tmp_path / "journal.log"
    path.write_bytes(path.read_bytes()[:-3])
    with Journal(tmp_path) as journal:
        journal.append(note("c"))
    assert [record["kind"] for record in read_records(tmp_path)] == ["a", "c"]


def test_a_disk_that_is_full_at_the_start_is_named_in_one_line(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(
            ConfigError, match="cannot be written: No space left on device"
        ):
            Journal(tmp_path)
    # The first journal has given the lock back.
    with Journal(tmp_path) as journal:
        journal.append(note("a"))
    assert [record["kind"] for record in read_records(tmp_path)] == ["a"]


def test_a_batch_that_the_disk_does_not_take_is_named_in_one_line(
    tmp_path, monkeypatch
):
    disk = SlowDisk(monkeypatch)
    journal = Journal(tmp_path)
    disk.fails = errno.EFBIG
    for _ in range(2):
        with pytest.raises(
            RunFailed, match="step-000000.pb cannot be written: .* again when"
        ) as e:
            journal.write_batch(batch_of(0))
        assert "\n" not in str(e.value)
    with pytest.raises(RunFailed, match="step-000000.pb cannot be written"), journal:
        pass


async def test_records_are_appended_while_the_disk_syncs_those_before(
    tmp_path, monkeypatch
):
    disk = SlowDisk(monkeypatch)
    with Journal(tmp_path) as journal:
        num_syncs = disk.num_syncs
        disk.hold()
        journal.append(note("a"))
        first = journal.durable()
        await asyncio.to_thread(disk.wait_begun)
        journal.append(note("b"))
        second = journal.durable()
        third = journal.durable()
        await several_turns()
        assert not (first.done() or second.done() or third.done())
        disk.go_on()
        await asyncio.gather(first, second, third)
        assert [record["kind"] for record in read_records(tmp_path)] == ["a", "b"]
        # The second sync serves all that came during the first one.
        assert disk.num_syncs == num_syncs + 2
        await journal.durable()
        assert disk.num_syncs == num_syncs + 2


@pytest.mark.parametrize(
    ("number", "line"),
    [
        (
            errno.EIO,
            "Input/output error; run the same command again when the disk works",
        ),
        (
            errno.ENOSPC,
            "No space left on device; make room and run the same command again",
        ),
    ],
)
async def test_what_the_disk_once_did_not_take_is_never_durable(
    tmp_path, monkeypatch, number, line
):
    disk = SlowDisk(monkeypatch)
    journal = Journal(tmp_path)
    journal.append(note("a"))
    disk.fails = number
    with pytest.raises(RunFailed, match=line):
        journal.sync()
    # The system says an error once, and that all is well from then on.
    disk.fails = 0
    journal.append(note("b"))
    durable = journal.durable()
    with pytest.raises(RunFailed, match=line):
        await asyncio.to_thread(journal.sync)
    assert line in journal.trouble()
    assert not durable.done()
    with pytest.raises(RunFailed, match=line), journal:
        pass
    # The first journal has released the folder.
    with Journal(tmp_path):
        pass


def test_a_sync_that_fails_while_somebody_asks_for_trouble_is_not_forgotten(
    tmp_path, monkeypatch
):
    disk = SlowDisk(monkeypatch)
    journal = Journal(tmp_path)
    looks = journal._vanished

    def fails_meanwhile() -> RunFailed | None:
        journal.append(note("a"))
        with pytest.raises(RunFailed):
            journal.sync()
        return looks()

    disk.fails = errno.EIO
    monkeypatch.setattr(journal, "_vanished", fails_meanwhile)
    assert "Input/output error" in journal.trouble()
    # The system says an error once: a later sync must not succeed.
    disk.fails = 0
    with pytest.raises(RunFailed, match="Input/output error"), journal:
        pass


def test_what_an_earlier_controller_journaled_needs_no_other_record(tmp_path):
    """Redis delivers again what ended or was trained just before the crash."""
    trained = plain_trajectory(
        range(3),
        (1, 2),
        group_id=GroupId("g000001"),
        attempt=1,
    )
    message = trainer_pb2.RecordedBatch(
        header=trainer_pb2.BatchHeader(step=0, batch_id="b0")
    )
    message.trajectories.append(trajectory_to_pb(trained))
    history = RunHistory(
        ended={TrajectoryId("g000002.0.0.7")}, trained_in={trained.group_id: 0}
    )
    with Journal(tmp_path) as journal:
        crc32 = journal.write_batch(message).crc32
        history.batches[0] = RecordedBatch(0, "b0", crc32)
        earlier = EarlierIds(history, journal)
        assert earlier.holds(GroupId("g000002"), TrajectoryId("g000002.0.0.7"))
        assert earlier.holds(trained.group_id, trained.trajectory_id)
        # A different attempt at the same place was neither trained nor ended.
        assert not earlier.holds(trained.group_id, TrajectoryId("g000001.0.9.7"))
        assert not earlier.holds(GroupId("g000003"), TrajectoryId("g000003.0.0.7"))
        # The batch was set aside, and the next one of the step has a file of its own.
        header = trainer_pb2.BatchHeader(step=0, batch_id="b000000-1")
        next_crc32 = journal.write_batch(trainer_pb2.RecordedBatch(header=header)).crc32
        assert journal.kept_batches() == {(0, 0), (0, 1)}
        assert (
            journal.read_batch(RecordedBatch(0, "b000000-1", next_crc32)).header
            == header
        )
        earlier = EarlierIds(history, journal)
        before = history.batches[0]
        history.batches[0] = RecordedBatch(0, "b000000-1", next_crc32)
        assert earlier.holds(trained.group_id, trained.trajectory_id)
        assert not earlier.holds(trained.group_id, TrajectoryId("g000001.0.9.7"))
        history.batches[0] = before
        journal.path(0).unlink()
        # A checkpoint covers it: it was acknowledged long ago.
        assert EarlierIds(history, journal).holds(
            trained.group_id, TrajectoryId("g000001.0.9.7")
        )


def write_batches(journal: Journal, number: int) -> None:
    for step in range(number):
        header = trainer_pb2.BatchHeader(step=step, batch_id="b")
        journal.write_batch(trainer_pb2.RecordedBatch(header=header))


def test_a_removal_that_is_killed_anywhere_leaves_the_newest_and_ends_the_next_time(
    tmp_path, monkeypatch
):
    unlink = Path.unlink
    left = 0

    def kill(path: Path, missing_ok: bool = False) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        unlink(path, missing_ok)

    with Journal(tmp_path) as journal:
        for killed_at in range(4):
            write_batches(journal, 6)
            (tmp_path / "batches" / "step-000002-1.pb").touch()
            with monkeypatch.context() as patch:
                patch.setattr(Path, "unlink", kill)
                left = killed_at
                with pytest.raises(KeyboardInterrupt):
                    journal.remove_batches(before=4)
            kept_batches = sorted(journal.kept_batches())
            assert (
                kept_batches
                == [(0, 0), (1, 0), (2, 0), (2, 1), (3, 0), (4, 0), (5, 0)][killed_at:]
            )
            assert journal.remove_batches(before=4) == 5 - killed_at
            assert journal.kept_batches() == {(4, 0), (5, 0)}


def test_a_batch_that_goes_while_it_is_looked_for_is_covered_by_a_checkpoint(
    tmp_path, monkeypatch
):
    history = RunHistory(trained_in={GroupId("g000001"): 0})
    with Journal(tmp_path) as journal:
        write_batches(journal, 1)
        history.batches[0] = RecordedBatch(0, "b", 0)
        read = journal.read_batch

        def remove_and_read(batch: RecordedBatch) -> trainer_pb2.RecordedBatch:
            journal.remove_batches(before=1)
            return read(batch)

        earlier = EarlierIds(history, journal)
        with pytest.raises(ProtocolError, match="is damaged"):
            earlier.holds(GroupId("g000001"), TrajectoryId("g000001.0.0.7"))
        monkeypatch.setattr(journal, "read_batch", remove_and_read)
        assert earlier.holds(GroupId("g000001"), TrajectoryId("g000001.0.0.7"))


def test_stray_files_beside_the_batches_are_no_batches(tmp_path):
    with Journal(tmp_path) as journal:
        journal.write_batch(
            trainer_pb2.RecordedBatch(
                header=trainer_pb2.BatchHeader(step=3, batch_id="b")
            )
        )
        for name in (
            "step-.pb",
            "step-copy.pb",
            "step-000003 (1).pb",
            "step-\u0663.pb",
            "x",
        ):
            (tmp_path / "batches" / name).touch()
        assert journal.kept_batches() == {(3, 0)}


def test_a_first_log_that_is_missing_is_named_and_no_new_one_begun(tmp_path):
    for _ in range(3):
        with Journal(tmp_path) as journal:
            journal.append(note("a"))
    (tmp_path / "journal.log").unlink()
    with pytest.raises(ConfigError) as caught:
        Journal(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / 'journal.log'} is missing, the first of the logs that journal-3.log "
        "continues; put it back from a copy of the run, or begin anew with another run.name"
    )
    assert not (tmp_path / "journal.log").exists()
    assert not (tmp_path / "journal-4.log").exists()


def test_a_full_disk_is_one_line_and_the_journal_goes_on_when_there_is_room(tmp_path):
    number = 0
    batch = trainer_pb2.RecordedBatch(
        header=trainer_pb2.BatchHeader(step=0, batch_id="b")
    )
    batch.trajectories.add(group_id="g", reply_text="a" * 9000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    journal = Journal(tmp_path)
    try:
        journal.append(note("a"))
        journal.sync()
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        with pytest.raises(
            RunFailed, match="step-000000.pb cannot be written: .* again when"
        ) as error:
            journal.write_batch(batch)
        assert "\n" not in str(error.value)
        journal.append(note("b"))
        with pytest.raises(RunFailed), journal:
            pass
        with Journal(tmp_path) as journal:
            for number in range(3):
                journal.append(note("c", text="x" * 1000, number=number))
            journal.sync()
            journal.append(note("d", text="x" * 4000))
            with pytest.raises(
                RunFailed, match="journal.log cannot be written: .* again when"
            ):
                journal.sync()
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    except RunFailed:
        pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    with Journal(tmp_path) as journal:
        journal.append(note("e"))
    assert [record["kind"] for record in read_records(tmp_path)] == [
        "a",
        "c",
        "c",
        "c",
        "e",
    ]

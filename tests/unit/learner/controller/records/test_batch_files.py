"""The files of batches: streams of bounded records, which two readers read by themselves."""

import dataclasses
import io
import zlib
from pathlib import Path

import numpy as np
import pytest
from slipstream.client.batch_reader import read_contents
from slipstream.core.errors import ProtocolError, RunFailed
from slipstream.core.types import RoutedExperts, VersionSpan
from slipstream.learner.controller.records import batch_files
from slipstream.learner.controller.records.batch_files import (
    HEAD,
    MAGIC,
    StoredBatch,
    write_batch_file,
)
from slipstream.learner.controller.records.journal import (
    Journal,
    batch_path,
    read_records,
)
from slipstream.protocol.codec import trajectory_to_pb
from slipstream.protocol.release import RELEASE
from slipstream.v1 import trainer_pb2, trajectory_pb2
from support.fakes.fake_controller import make_batch
from support.rigs.batch_messages import in_one_message, write_stored

TRAJECTORIES = make_batch(
    2, num_groups=2, group_size=3, vocab_size=9, max_tokens=12
).trajectories


@pytest.fixture
def batch() -> trainer_pb2.RecordedBatch:
    header = trainer_pb2.BatchHeader(
        step=2, batch_id="b000002", num_groups=2, num_trajectories=6
    )
    return trainer_pb2.RecordedBatch(
        header=header,
        trajectories=map(trajectory_to_pb, TRAJECTORIES),
        passes=[trainer_pb2.Pass(id="p")],
    )


def by_verify(path: Path, crc32: int) -> trainer_pb2.RecordedBatch:
    """What the reader of `slipstream verify` makes of a file."""
    header, *contents = read_contents(path, crc32)
    batch = trainer_pb2.RecordedBatch(header=header)
    for message in contents:
        is_pass = isinstance(message, trainer_pb2.Pass)
        (batch.passes if is_pass else batch.trajectories).append(message)
    return batch


def by_controller(path: Path, crc32: int) -> trainer_pb2.RecordedBatch:
    return in_one_message(StoredBatch(path, crc32))


READERS = pytest.mark.parametrize("read", [by_controller, by_verify])


@READERS
def test_a_file_gives_back_what_was_written(batch, read, tmp_path):
    path = tmp_path / "file"
    assert read(path, write_stored(path, batch)) == batch


@READERS
def test_a_file_of_an_earlier_release_is_read(batch, read, tmp_path):
    data = batch.SerializeToString(deterministic=True)
    path = tmp_path / "file"
    path.write_bytes(data)
    assert read(path, zlib.crc32(data)) == batch


@READERS
def test_a_file_that_ends_anywhere_before_its_end_is_damaged(batch, read, tmp_path):
    path = tmp_path / "file"
    crc32 = write_stored(path, batch)
    data = path.read_bytes()
    for num_bytes in range(0, len(data), 7):
        path.write_bytes(data[:num_bytes])
        # The records tell it, too, if the checksum of the whole file does not.
        renewed = [zlib.crc32(data[:num_bytes])] if num_bytes >= len(MAGIC) else []
        for checksum in (crc32, *renewed):
            with pytest.raises((ProtocolError, ValueError)):
                read(path, checksum)


@READERS
def test_every_changed_byte_of_a_file_is_noticed(batch, read, tmp_path):
    path = tmp_path / "file"
    crc32 = write_stored(path, batch)
    data = path.read_bytes()
    for place in range(0, len(data), 5):
        changed = bytearray(data)
        changed[place] ^= 4
        path.write_bytes(changed)
        with pytest.raises((ProtocolError, ValueError)):
            read(path, crc32)


@READERS
def test_a_file_in_place_of_another_one_is_noticed(batch, read, tmp_path):
    path = tmp_path / "file"
    crc32 = write_stored(path, batch)
    del batch.trajectories[1]
    write_stored(path, batch)
    with pytest.raises((ProtocolError, ValueError), match="checksum|journal names"):
        read(path, crc32)


def record(kind: int, data: bytes) -> bytes:
    return HEAD.pack(kind, len(data), zlib.crc32(data)) + data


def start() -> bytes:
    return record(1, trainer_pb2.BatchFileStart().SerializeToString())


def end(num_records: int) -> bytes:
    return record(
        4, trainer_pb2.BatchFileEnd(num_records=num_records).SerializeToString()
    )


@READERS
@pytest.mark.parametrize(
    "data",
    [
        MAGIC,
        MAGIC + end(0),
        MAGIC + start() + end(2),
        MAGIC + start() + start() + end(2),
        MAGIC + start() + end(1) + end(2),
        MAGIC + start() + end(1) + record(2, b""),
        MAGIC + start() + record(2, b"\xff") + end(2),
        MAGIC + start() + HEAD.pack(2, 1 << 31, 0) + end(2),
        MAGIC + record(2, b"") + end(1),
    ],
)
def test_records_out_of_their_order_are_told(data, read, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises((ProtocolError, ValueError)):
        read(path, zlib.crc32(data))


@pytest.mark.parametrize(
    ("data", "fact"),
    [
        (
            MAGIC.replace(b"2", b"3") + start() + end(1),
            "the format b'slipstream batch 3",
        ),
        (MAGIC + start() + record(9, b"") + end(2), "a record of kind 9"),
        (MAGIC + start() + record(2, b"\xf8\x7c\x07") + end(2), "a field"),
    ],
)
def test_a_fact_of_another_release_is_no_damage(data, fact, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(ProtocolError) as caught:
        by_controller(path, zlib.crc32(data))
    assert str(caught.value).startswith(f"{path} is of another release: {fact}")
    assert "damaged" not in str(caught.value)


def test_a_file_names_the_release_that_wrote_it(batch, tmp_path):
    path = tmp_path / "file"
    write_stored(path, batch)
    data = path.read_bytes()
    _, num_bytes, _ = HEAD.unpack_from(data, len(MAGIC))
    begin = len(MAGIC) + HEAD.size
    message = trainer_pb2.BatchFileStart.FromString(data[begin : begin + num_bytes])
    assert (message.release, message.header) == (RELEASE, batch.header)


@pytest.mark.parametrize("fault", ["too many bytes", "beyond a bound"])
def test_what_no_reader_would_take_is_refused_before_it_is_trained(
    batch, fault, tmp_path, monkeypatch
):
    if fault == "beyond a bound":
        batch.trajectories[4].max_reply_tokens = 2**31
        cause = "breaks a bound: Trajectory.max_reply_tokens"
    else:
        largest = max(trajectory.ByteSize() for trajectory in batch.trajectories)
        batch.trajectories[4].reply_text = "a" * largest
        monkeypatch.setattr(batch_files, "MAX_RECORD_BYTES", largest)
        cause = f"bytes, more than the {largest} of a record"
    with Journal(tmp_path) as journal:
        with pytest.raises(RunFailed) as caught:
            journal.write_batch(batch)
        text = str(caught.value)
        assert text.startswith(
            "batch b000002 of step 3 is not trained, because nobody could read"
        )
        assert f"member 1 of group {batch.trajectories[4].group_id}" in text
        assert cause in text
        # The disk is well, and the journal goes on.
        journal.sync()
    assert not batch_path(tmp_path, 2).exists()


def test_the_journal_has_the_bytes_of_a_file_as_a_fact_that_older_releases_lack(
    batch, tmp_path
):
    with Journal(tmp_path) as journal:
        journal.append(journal.write_batch(batch))
    (batch_record,) = read_records(tmp_path)
    assert batch_record["num_bytes"] == batch_path(tmp_path, 2).stat().st_size


class Counted(io.BytesIO):
    """A file that knows the largest piece that was written at once."""

    largest = 0

    def write(self, data: bytes) -> int:
        self.largest = max(self.largest, len(data))
        return super().write(data)


def test_no_more_than_one_trajectory_is_encoded_at_once(batch):
    encoded = []

    class Contents:
        header = batch.header
        passes = ()

        @property
        def trajectories(self):
            for message in batch.trajectories:
                encoded.append(message)
                # All that was made before is written.
                assert (
                    file.getvalue().count(message.group_id.encode())
                    >= len(encoded) - 1 - 3
                )
                yield message

    file = Counted()
    write_batch_file(file, Contents(), lambda _: None)
    assert file.largest <= max(
        trajectory.ByteSize() for trajectory in batch.trajectories
    )
    assert len(encoded) == len(batch.trajectories)


@pytest.mark.slow
def test_a_batch_above_the_bytes_of_a_protobuf_message_is_read_again(tmp_path):
    shape = (16_384, 48, 8)
    experts = RoutedExperts(np.zeros(shape, dtype=np.uint8), 128)
    tokens = np.zeros(shape[0], dtype=np.uint32)
    first = TRAJECTORIES[0]
    long = dataclasses.replace(
        first,
        token_ids=tokens,
        run_lengths=(len(tokens) - 1, 1),
        behavior_logprobs=first.behavior_logprobs[:1],
        version_spans=(VersionSpan(1, first.version_spans[0].version),),
        routed_experts=experts,
    )
    message = trajectory_to_pb(long)
    number = (1 << 31) // message.ByteSize() + 1

    class Contents:
        header = trainer_pb2.BatchHeader(step=0, batch_id="b0", num_trajectories=number)
        passes = ()
        trajectories = (message for _ in range(number))

    with Journal(tmp_path) as journal:
        journal.append(written := journal.write_batch(Contents()))
    assert written.num_bytes > 1 << 31
    path = batch_path(tmp_path, 0)
    for contents in (
        StoredBatch(path, written.crc32).trajectories,
        trajectories_by_verify(path),
    ):
        number_read = 0
        for trajectory in contents:
            assert trajectory.checksum == message.checksum
            number_read += 1
        assert number_read == number


def trajectories_by_verify(path: Path):
    (batch_record,) = read_records(path.parents[1])
    return (
        message
        for message in read_contents(path, batch_record["crc32"])
        if isinstance(message, trajectory_pb2.Trajectory)
    )

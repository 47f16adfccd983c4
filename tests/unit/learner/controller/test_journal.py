from __future__ import annotations

import pytest
from slipstream.learner.controller.journal import Journal, batch_path, read_batch, read_records
from slipstream.protocol.errors import ConfigError, ProtocolError
from slipstream.v1 import trainer_pb2


def test_records_come_back_in_order(tmp_path):
    with Journal(tmp_path) as journal:
        journal.append("lease", group="g1", members=[0, 1])
        journal.append("end", id="x", end="failed", cause="line\nbreak and ä")
    assert list(read_records(tmp_path)) == [
        {"kind": "lease", "group": "g1", "members": [0, 1]},
        {"kind": "end", "id": "x", "end": "failed", "cause": "line\nbreak and ä"},
    ]


def test_a_torn_last_line_is_left_out(tmp_path):
    with Journal(tmp_path) as journal:
        journal.append("a")
        journal.append("b")
    path = tmp_path / "journal.log"
    path.write_bytes(path.read_bytes()[:-3])
    assert [record["kind"] for record in read_records(tmp_path)] == ["a"]


def test_every_flipped_bit_is_noticed(tmp_path):
    with Journal(tmp_path) as journal:
        journal.append("a", number=1)
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


def test_a_batch_is_a_file_and_a_record_that_names_its_checksum(tmp_path):
    batch = trainer_pb2.RecordedBatch(header=trainer_pb2.BatchHeader(step=3, batch_id="b3"))
    with Journal(tmp_path) as journal:
        journal.write_batch(batch)
    (record,) = read_records(tmp_path)
    assert read_batch(tmp_path, 3, record["crc32"]) == batch
    path = batch_path(tmp_path, 3)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(ProtocolError, match="damaged"):
        read_batch(tmp_path, 3, record["crc32"])


def test_a_writer_goes_on_behind_the_last_whole_record(tmp_path):
    with Journal(tmp_path) as journal:
        journal.append("a")
        journal.append("b")
    path = tmp_path / "journal.log"
    path.write_bytes(path.read_bytes()[:-3])
    with Journal(tmp_path) as journal:
        journal.append("c")
    assert [record["kind"] for record in read_records(tmp_path)] == ["a", "c"]


def test_a_journal_has_one_writer(tmp_path):
    with Journal(tmp_path), pytest.raises(ConfigError, match="is written by another controller"):
        Journal(tmp_path)
    with Journal(tmp_path) as journal:
        journal.append("a")

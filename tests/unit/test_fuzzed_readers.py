"""Damaged, made up and honest bytes for everything that reads bytes of others.

A reader raises its own errors, in one line, and takes no long time. What once broke that stays as
an example. `make fuzz` reads more of them.
"""

import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from slipstream.core.errors import ProtocolError
from slipstream.learner.controller.reporting.trackers import COLUMNS
from slipstream.v1 import fleet_pb2, status_pb2, trainer_pb2, trajectory_pb2
from support.rigs.counted_work import counted
from support.rigs.fuzz_budget import BUDGET
from support.rigs.fuzz_files import RECORDS, file_readers, journal_bytes
from support.rigs.fuzz_readers import (
    MOST_LINES,
    Reader,
    message_readers,
    request_readers,
    sample,
)
from support.rigs.fuzz_results import json_lines, result_readers

ALL = (request_readers, message_readers, file_readers, result_readers)
READERS = {reader.name: reader for readers in ALL for reader in readers()}
DEEP = b"[" * 100_000


def rows(changed: dict) -> bytes:
    """Lines of eleven steps in which some numbers are others."""
    row = dict.fromkeys(COLUMNS, 1.0) | {"wall_s": 2.0}
    return json_lines(*({**row, "step": step, **changed} for step in range(1, 12)))


# Bytes on which a reader raised something else, or with more than one line.
ONCE_BROKEN = [
    ("lease", fleet_pb2.Lease(group_id="g000001").SerializeToString()),
    ("status of a run", status_pb2.RunStatus(state=99).SerializeToString()),
    ("event", status_pb2.Event(severity=77).SerializeToString()),
    ("status of an environment", b"\x0a\x03\x1a\x01{"),
    ("record of calls", b'[["g1.0"'),
    ("record of calls", b"[1, 2, 3]\n"),
    ("record of calls", b"\xff\xfe\n"),
    ("record of calls", DEEP),
    (
        "chunk to the trainer",
        trainer_pb2.Directive(
            chunk=trainer_pb2.TrajectoryChunk(
                trajectories=[trajectory_pb2.Trajectory(group_id="a\nb", checksum=1)]
            )
        ).SerializeToString(),
    ),
    ("journal", journal_bytes([{"kind": "start", "format": 1}])),
    ("journal", journal_bytes([{**RECORDS[0], "key": "zz"}])),
    ("journal", journal_bytes([RECORDS[0], {"kind": "servers", "generated": None}])),
    (
        "journal",
        journal_bytes([*RECORDS[:4], {**RECORDS[4], "epoch": 2**70}, *RECORDS[5:]]),
    ),
    ("journal", journal_bytes([RECORDS[0], {"kind": "checkpoint", "version": [1]}])),
    ("batch", b"\xff\xff"),
    ("summary of a run", b"\xff"),
    ("summary of a run", b"[]"),
    ("summary of a run", b'{"steps": 3}'),
    ("page metrics.jsonl", b"\xb8\n[1]\n{\n"),
    ("page summary.json", b"\xb8"),
    *(
        ("results metrics.jsonl", rows(changed))
        for changed in (
            {"servers_serving": None},
            {"servers_serving": 10**400},
            {"logprob_gap_tokens": 3.0},
            {"reward_mean": 1e308},
            {"trained_tokens_per_s": math.inf, "lag_max": -1e308},
            {"training_s": None, "trainer_rss_bytes": None},
            {"e/equal_rewards_fraction": 1.0},
            {"step": 1.5},
        )
    ),
    ("results trajectories.jsonl", b"\xff\n[1]\n"),
    ("tracking.json", b'{"wandb": null, "mlflow": {}}'),
    ("tracking.json", b'{"wandb": "a\\nb"}'),
    *(
        (f"page {name}", b'{"step": %s, "x": [1e400, -Infinity]}\n' % step)
        for name in ("trajectories.jsonl", "metrics.jsonl", "summary.json")
        for step in (b"NaN", b"1e400", b"1" + b"0" * 400)
    ),
    *((name, DEEP) for name in ("journal", "summary of a run", "page summary.json")),
    *((f"verify {name}", DEEP) for name in ("metrics.jsonl", "summary.json")),
    *((name, DEEP) for name in ("manifest", "model", "batch")),
    ("config.toml", b"a = " + DEEP),
    # Messages of the attacks on a live run.
    (
        "trajectory",
        trajectory_pb2.Trajectory(reward=1e308, status=1).SerializeToString(),
    ),
    ("trajectory", trajectory_pb2.Trajectory(attempt=2**32 - 1).SerializeToString()),
    (
        "trajectory",
        trajectory_pb2.Trajectory(group_id="g" * (1 << 24)).SerializeToString(),
    ),
    (
        "trajectory",
        trajectory_pb2.Trajectory(
            purpose=1,
            status=1,
            branches=[trajectory_pb2.Branch(num_runs=2, share=float("nan"))] * 4096,
        ).SerializeToString(),
    ),
    (
        "trajectory",
        trajectory_pb2.Trajectory(
            purpose=1,
            status=1,
            run_lengths=[0] * 131072,
            branches=[trajectory_pb2.Branch(num_runs=32)] * 4096,
        ).SerializeToString(),
    ),
    ("claim", bytes.fromhex("8a0100") * 1_000_000),
    ("request Join", b"\x12\x0b\x08" + b"\xff" * 9 + b"\x01"),
    ("request SubmitEnvironment", b"\x0a\x80\x80\x04\x1a\xfc\xff\x03" + b"[" * 65532),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("files")


def check(reader: Reader, data: bytes, folder: Path) -> None:
    with counted() as work:
        try:
            reader.read(data, folder)
        except reader.errors as error:
            assert "\n" not in str(error)
    assert work.num_lines < MOST_LINES


@pytest.mark.parametrize("name", READERS)
def test_whatever_the_bytes_are_a_reader_raises_its_own_errors(
    folder: Path, name: str
) -> None:
    @given(seed=st.integers(0, 2**32))
    @BUDGET.readings
    def read(seed: int) -> None:
        check(READERS[name], sample(READERS[name], random.Random(seed)), folder)

    read()


@pytest.mark.parametrize(("name", "data"), ONCE_BROKEN)
def test_bytes_that_once_broke_a_reader_do_not(
    folder: Path, name: str, data: bytes
) -> None:
    check(READERS[name], data, folder)


@pytest.mark.parametrize("name", READERS)
def test_what_is_honest_is_read(folder: Path, name: str) -> None:
    for data in READERS[name].honest:
        if name not in ("batch",):
            READERS[name].read(data, folder)


@example(data=b"\x82\x01" + b"\x00" * 2)
@given(data=st.binary(max_size=200))
@BUDGET.calls
def test_random_bytes_are_no_trajectory(data: bytes) -> None:
    try:
        READERS["trajectory"].read(data, Path())
    except ProtocolError as error:
        assert "\n" not in str(error)


def test_a_record_of_another_shape_is_named(folder: Path) -> None:
    records = [*RECORDS[:3], {**RECORDS[3], "task": "first"}]
    with pytest.raises(ProtocolError) as caught:
        READERS["journal"].read(journal_bytes(records), folder)
    assert str(caught.value) == (
        "line 4 of the journal is no record 'lease': task = 'first': Expected `int`, got `str`; "
        "put it back from a copy of the run, or begin anew with another run.name"
    )
    assert json.loads(journal_bytes(records).splitlines()[3][9:])["task"] == "first"

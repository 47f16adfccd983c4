"""Files of results that are damaged at a start: told in one line, and fatal to no run."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slipstream.core.errors import ProtocolError
from slipstream.learner.controller.events import EventLog
from slipstream.learner.controller.records.history import RunHistory
from slipstream.learner.controller.reporting.metrics import RunRecorder
from slipstream.learner.controller.reporting.result_files import read_rows
from slipstream.learner.controller.reporting.trackers.tracker import Trackers
from slipstream.learner.controller.trajectories.batch import from_record
from slipstream.protocol.codec import trajectory_to_pb
from slipstream.v1 import trainer_pb2
from support.fakes.fake_controller import make_batch
from support.fakes.small_configs import config_of

FILES = ("metrics.jsonl", "trajectories.jsonl")


def row(step: int) -> bytes:
    numbers = {
        "step": step,
        "wall_s": step,
        "reward_mean": 0.5,
        "lag_mean": 0.0,
        "lag_max": 0.0,
        "generated_tokens_per_s": 1.0,
        "trained_tokens_per_s": 1.0,
    }
    return json.dumps(numbers).encode() + b"\n"


WHOLE = row(1) + row(2)
# What stands between the second and the third line, and the line that the event names.
DAMAGES = {
    "a NUL block": bytes(512) + b"\n",
    "a list": b"[1]\n",
    "no UTF-8": b'{"step": 3, "\xff": 1}\n',
    "half a line": row(9)[:20] + b"\n",
    "an empty line": b"\n",
    "a deep list": b"[" * 100_000 + b"\n",
}
METRICS_ALONE = {
    "a text for a number": row(3).replace(b"0.5", b'"a"'),
    "no seconds": b'{"step": 3}\n',
    "no step": row(3).replace(b'"step": 3', b'"step": null'),
    "an absurd step": row(3).replace(b'"step": 3', b'"step": 1e300'),
    "a negative step": row(3).replace(b'"step": 3', b'"step": -3'),
}


def opened(folder: Path) -> tuple[RunRecorder, list[str]]:
    """A recorder as each start makes it, and its warnings."""
    events = EventLog()
    recorder = RunRecorder(folder, config_of(folder), Trackers({}, lambda text: None), None, events)
    return recorder, [event.text for event in events.kept()]


@pytest.mark.parametrize(
    ("name", "damage"),
    [(name, damage) for name in FILES for damage in DAMAGES.values()]
    + [("metrics.jsonl", damage) for damage in METRICS_ALONE.values()],
    ids=[f"{name}-{kind}" for name in FILES for kind in DAMAGES]
    + [f"metrics.jsonl-{kind}" for kind in METRICS_ALONE],
)
def test_whole_lines_around_a_damaged_one_are_kept(
    tmp_path: Path, name: str, damage: bytes
) -> None:
    path = tmp_path / name
    path.write_bytes(WHOLE + damage + row(4))
    recorder, told = opened(tmp_path)
    assert path.read_bytes() == WHOLE + row(4)
    assert (tmp_path / f"{name}.damaged-1").read_bytes() == WHOLE + damage + row(4)
    assert told == [
        f"{path}: line 3 is damaged; the file lies in {name}.damaged-1 now, and its 3 whole lines "
        "were kept"
    ]
    recorder.close()
    # The next damage overwrites nothing.
    path.write_bytes(damage)
    recorder, told = opened(tmp_path)
    assert (tmp_path / f"{name}.damaged-2").read_bytes() == damage
    assert path.read_bytes() == b""
    recorder.close()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("torn", [row(3)[:20], bytes(512)])
def test_a_last_line_that_a_crash_tore_is_taken_away_without_a_word(
    tmp_path: Path, name: str, torn: bytes
) -> None:
    (tmp_path / name).write_bytes(WHOLE + torn)
    recorder, told = opened(tmp_path)
    assert (tmp_path / name).read_bytes() == WHOLE
    assert told == []
    recorder.close()


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_whole_stays_as_it_is(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(WHOLE)
    node = (tmp_path / name).stat().st_ino
    recorder, told = opened(tmp_path)
    assert (tmp_path / name).read_bytes() == WHOLE
    assert (tmp_path / name).stat().st_ino == node
    assert told == []
    recorder.close()


def test_a_row_that_a_crash_left_ahead_of_its_journal_record_is_not_written_twice(
    tmp_path: Path,
) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(WHOLE)
    recorder, _ = opened(tmp_path)
    made = make_batch(1, num_groups=1, group_size=2, vocab_size=8, max_tokens=9)
    message = trainer_pb2.RecordedBatch(
        header=trainer_pb2.BatchHeader(step=1, batch_id="b000001"),
        trajectories=[trajectory_to_pb(trajectory) for trajectory in made.trajectories],
    )
    batch = from_record(message)
    recorder.step(batch, {}, training=(0.0, 1.0), generated_tokens=0, gauges={})
    recorder.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == WHOLE
    assert recorder.facts.steps == 2


def folder(path: Path) -> None:
    path.mkdir()
    (path / "x").touch()


def dangling(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere" / "x")


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("name", [*FILES, "summary.json", "suspended.json"])
@pytest.mark.parametrize("spoil", [folder, dangling, device])
def test_what_is_no_file_is_set_aside(
    tmp_path: Path, name: str, spoil: Callable[[Path], None]
) -> None:
    path = tmp_path / name
    spoil(path)
    recorder, told = opened(tmp_path)
    recorder.close()
    if name in FILES:
        assert path.is_file()
        assert path.read_bytes() == b""
        assert not path.is_symlink()
    else:
        assert not path.exists()
    assert len(told) == (name in FILES or spoil is folder)
    for line in told:
        assert f"{path} is no file that can be written" in line
        assert f"{name}.damaged-1" in line


def test_a_link_to_a_file_elsewhere_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for name in FILES:
        (tmp_path / name).symlink_to(tmp_path / "elsewhere" / name)
    recorder, told = opened(tmp_path)
    recorder.close()
    assert told == []
    assert all((tmp_path / name).is_symlink() for name in FILES)
    assert all((tmp_path / "elsewhere" / name).is_file() for name in FILES)


def test_a_damaged_line_of_metrics_is_named_by_whoever_reads_it_later(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(WHOLE + b"[1]\n")
    with pytest.raises(ProtocolError, match=r"metrics.jsonl: line 3 is damaged"):
        list(read_rows(path))


@pytest.fixture
def common_user() -> Iterator[Path]:
    """A folder of a user whom the modes of files bind, as they do not bind root."""
    nobody = 65534
    with tempfile.TemporaryDirectory() as name:
        if os.geteuid() != 0:
            yield Path(name)
            return
        os.chown(name, nobody, nobody)
        os.seteuid(nobody)
        try:
            yield Path(name)
        finally:
            os.seteuid(0)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("mode", [0o000, 0o200, 0o400])
def test_a_file_that_may_not_be_read_or_written_is_set_aside(
    common_user: Path, name: str, mode: int
) -> None:
    path = common_user / name
    path.write_bytes(WHOLE)
    path.chmod(mode)
    recorder, told = opened(common_user)
    recorder.restore(RunHistory())
    recorder.close()
    assert path.read_bytes() == b""
    assert told == [
        f"{path} is no file that can be written; what was there lies in {name}.damaged-1 now"
    ]
    (common_user / f"{name}.damaged-1").chmod(0o600)
    assert (common_user / f"{name}.damaged-1").read_bytes() == WHOLE

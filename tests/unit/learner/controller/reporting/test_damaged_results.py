"""Files of results that are damaged at a start: told in one line, and fatal to no run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from slipstream.learner.controller.events import EventLog
from slipstream.learner.controller.records.history import RunHistory
from slipstream.learner.controller.reporting.metrics import RunRecorder
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
# The third line, which the event names, and the last one.
DAMAGES = {
    "a NUL block": bytes(512) + b"\n",
    "a list": b"[1]\n",
    "no UTF-8": b'{"step": 3, "\xff": 1}\n',
    "half a line": row(9)[:20] + b"\n",
    "an empty line": b"\n",
    "a deep list": b"[" * 100_000 + b"\n",
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


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_line_is_passed_over_and_told_once(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(WHOLE + damage + row(4) + damage)
    recorder, told = opened(tmp_path)
    assert told == [f"{path}: line 3 is damaged; 2 such lines are passed over"]
    assert [version for version in range(9) if recorder.has_row(version)] == [1, 2, 4]
    assert recorder.newest["step"] == 4
    assert path.read_bytes() == WHOLE + damage + row(4) + damage
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


def step(recorder: RunRecorder, number: int) -> None:
    made = make_batch(number, num_groups=1, group_size=2, vocab_size=8, max_tokens=9)
    message = trainer_pb2.RecordedBatch(
        header=trainer_pb2.BatchHeader(step=number, batch_id=f"b{number:06d}"),
        trajectories=[trajectory_to_pb(trajectory) for trajectory in made.trajectories],
    )
    batch = from_record(message)
    metrics = {"reward_mean": 0.5, "lag_mean": 0.0, "lag_max": 0.0}
    recorder.step(batch, metrics, training=(0.0, 1.0), generated_tokens=0, gauges={})


def test_a_row_that_a_crash_left_ahead_of_its_journal_record_is_not_written_twice(
    tmp_path: Path,
) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(WHOLE)
    recorder, _ = opened(tmp_path)
    step(recorder, 1)
    recorder.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == WHOLE
    assert recorder.facts.steps == 2


def folder(path: Path) -> None:
    path.mkdir()


def dangling(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere" / "x")


def device(path: Path) -> None:
    path.symlink_to("/dev/full")


@pytest.mark.parametrize("spoil", [folder, dangling, device])
def test_what_is_no_file_is_one_warning(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    for name in (*FILES, "summary.json", "suspended.json"):
        spoil(tmp_path / name)
    recorder, told = opened(tmp_path)
    recorder.restore(RunHistory())
    step(recorder, 0)
    recorder.close()
    assert [line.split(" cannot be")[0] for line in told] in (
        [str(tmp_path / name) for name in FILES],
        [],
    )


def test_a_link_to_a_file_elsewhere_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for name in FILES:
        (tmp_path / name).symlink_to(tmp_path / "elsewhere" / name)
    recorder, told = opened(tmp_path)
    recorder.close()
    assert told == []
    assert all((tmp_path / name).is_symlink() for name in FILES)
    assert all((tmp_path / "elsewhere" / name).is_file() for name in FILES)

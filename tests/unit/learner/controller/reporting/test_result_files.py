"""Files of results that are damaged, vanish, or find no room; the facts of a summary."""

import dataclasses
import json
import math
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from slipstream.core.types import ServerId
from slipstream.learner.controller.events import EventLog
from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.records.history import RunHistory
from slipstream.learner.controller.reporting import trackers
from slipstream.learner.controller.reporting.metrics import GenerationRate, RunRecorder
from slipstream.learner.controller.reporting.row_history import EVERY_ROWS, RunFacts
from slipstream.learner.controller.reporting.trackers import (
    ResultFile,
    RunIds,
    Trackers,
    lines_from_end,
    write_result,
)
from slipstream.learner.controller.servers.session import ServerKey
from slipstream.learner.controller.trajectories.formed_batch import FormedBatch
from slipstream.v1 import fleet_pb2
from support.fakes.fake_trajectories import GOOD, plain_group
from support.fakes.small_configs import config_of


@pytest.fixture
def full() -> Callable[[int], AbstractContextManager[None]]:
    """While the block runs, no file grows beyond `num_bytes`: the system refuses each write."""

    @contextmanager
    def limited(num_bytes: int) -> Iterator[None]:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    return limited


def test_lines_for_which_there_is_no_room_are_counted_and_later_ones_are_written(
    tmp_path, full
):
    messages: list[str] = []
    path = tmp_path / "metrics.jsonl"
    file = ResultFile(path, messages.append)
    file.append(b'"one"\n')
    with full(10):
        file.append(b'"two"\n')
        file.append(b'"three"\n')
    assert path.read_bytes() == b'"one"\n'
    assert messages == [
        f"{path} cannot be written: File too large; what comes is lost until it can"
    ]
    file.append(b'"four"\n')
    assert path.read_bytes() == b'"one"\n"four"\n'
    assert messages[1:] == [f"{path} is written again; 2 records were lost"]
    with full(10):
        file.append(b'"five"\n')
    file.close()
    assert messages[2:] == [
        f"{path} cannot be written: File too large; what comes is lost until it can",
        f"{path}: the last 1 records were lost",
    ]


def test_the_folder_of_a_run_that_was_removed_does_not_come_back(tmp_path):
    messages: list[str] = []
    run = tmp_path / "run"
    run.mkdir()
    path = run / "metrics.jsonl"
    file = ResultFile(path, messages.append)
    shutil.rmtree(run)
    for _ in range(3):
        file.append(b"1\n")
    assert not run.exists()
    assert (
        len([line for line in messages if "cannot be written" in line])
        == len(messages)
        == 1
    )
    run.mkdir()
    file.append(b"2\n")
    assert messages[1:] == [f"{path} is written again; 3 records were lost"]
    file.close()


def test_a_whole_file_without_room_leaves_the_old_one(tmp_path, full):
    messages: list[str] = []
    path = tmp_path / "summary.json"
    write_result(path, b"{}\n", messages.append)
    with full(10):
        write_result(path, bytes(100), messages.append)
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
    assert path.read_bytes() == b"{}\n"
    assert messages == [f"{path} cannot be written: File too large"]


BAD_IDS = (b'{"wandb": null}', b'{"wandb": 1}', b'{"mlflow": "a\\nb"}')


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[1]", bytes(512), b"\xff", b'"a"', *BAD_IDS],
)
def test_damaged_names_of_tracking_services_begin_new_runs(tmp_path, damage):
    messages: list[str] = []
    path = tmp_path / "tracking.json"
    path.write_bytes(damage)
    assert RunIds(tmp_path, messages.append).get("wandb") == ""
    RunIds(tmp_path, messages.append).keep("wandb", "abc")
    assert RunIds(tmp_path, messages.append).get("wandb") == "abc"
    assert messages == [f"{path} is damaged: trackers begin new runs"] * 2


GROUP = plain_group(size=1, finished={GOOD.member: GOOD})


def step(
    recorder: RunRecorder,
    number: int,
    groups: tuple[Group, ...] = (GROUP,),
    **metrics: float,
):
    """The row of a step, which made 1000 tokens of all."""
    return recorder.step(
        FormedBatch(number, f"b{number:06d}", groups),
        metrics,
        training_s=1.0,
        generated_tokens=1000,
        gauges={},
    )


def test_a_report_with_the_name_of_a_metric_of_the_run_is_told_once(tmp_path):
    events = EventLog()
    no_trackers = Trackers({}, lambda text: None)
    recorder = RunRecorder(tmp_path, config_of(tmp_path), no_trackers, None, events)
    for number in range(3):
        row = step(recorder, number, reward_std=9.0, mine=9.0, **{"e/reward": 9.0})
        assert row.items() >= {
            ("reward_std", 0.0),
            ("e/reward", GOOD.reward),
            ("mine", 9.0),
        }
    recorder.close()
    assert [event.text for event in events.kept()] == [
        "the algorithm reports e/reward, reward_std, which the run measures itself: name the "
        "report otherwise, it is left out"
    ]


def warnings_of_gaps(folder: Path, *steps: int) -> list[str]:
    """The warnings of a start of the run, in whose steps engine and learner differ."""
    gap = {
        "logprob_gap_mean": 0.3,
        "logprob_gap_tokens": 64.0,
    }
    events = EventLog()
    config = config_of(folder)
    trackers = Trackers({}, print)
    recorder = RunRecorder(
        folder,
        config,
        trackers,
        None,
        events,
    )
    for number in steps:
        step(recorder, number, **gap)
    recorder.close()
    return [event.text for event in events.kept()]


def test_an_invariant_that_steps_break_is_told_once_a_run(tmp_path: Path) -> None:
    (text,) = warnings_of_gaps(tmp_path, 0, 1)
    assert text.startswith(
        "step 1: engine and learner give 64 tokens that the newest weights"
    )
    # A later start of the run reads it from the rows.
    assert warnings_of_gaps(tmp_path, 2, 3) == []


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_clock_that_is_set_changes_no_length_of_time(tmp_path, monkeypatch, jump_s):
    recorder, _ = opened(tmp_path)
    report = fleet_pb2.ServerReport(busy_s=1.0)
    recorder.rate.began(time.monotonic() - report.busy_s)
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + jump_s)
    row = step(recorder, 0, trained_tokens=9.0)
    assert 0 <= row["wall_s"] < 600
    assert 1e-7 < row["step_s"] < 600
    assert 1 < row["generated_tokens_per_s"] <= 1000
    recorder.close()


def test_a_step_that_was_lost_after_its_row_was_written_has_one_row(tmp_path):
    # A controller is killed before the record of the step is in the journal: the step comes again.
    for number in (0, 0, 1):
        recorder, _ = opened(tmp_path)
        step(recorder, number)
        # The journal has none of the steps before: all that is counted comes from this one.
        assert len(recorder.facts.first_rewards) == number + 1
        recorder.close()
    rows = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2]


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
    "an absurd number": row(3).replace(b"0.5", b"-1e31"),
    "a negative step": row(3).replace(b'"step": 3', b'"step": -3'),
}


def opened(folder: Path) -> tuple[RunRecorder, list[str]]:
    """A recorder as each start makes it, and its warnings."""
    events = EventLog()
    recorder = RunRecorder(
        folder, config_of(folder), Trackers({}, lambda text: None), None, events
    )
    return recorder, [event.text for event in events.kept()]


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_line_is_passed_over_and_told_once(
    tmp_path: Path, damage: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(WHOLE + damage + row(4) + damage)
    recorder, messages = opened(tmp_path)
    assert messages == [f"{path}: line 3 is damaged; 2 such lines are passed over"]
    assert [version for version in range(9) if recorder.has_row(version)] == [1, 2, 4]
    assert recorder.newest["step"] == 4
    assert path.read_bytes() == WHOLE + damage + row(4) + damage
    recorder.close()


def test_a_start_reads_at_most_a_thousand_rows_of_a_run_that_was_killed(
    tmp_path: Path,
) -> None:
    recorder, _ = opened(tmp_path)
    for number in range(EVERY_ROWS + 2):
        step(recorder, number, gradient_overflows=1.0)
    metrics = tmp_path / "metrics.jsonl"
    content = metrics.read_bytes()
    # Nobody reads the first rows again.
    metrics.write_bytes(content[:1000].replace(b"1", b"2") + content[1000:])
    later, messages = opened(tmp_path)
    assert messages == []
    assert [later.has_row(version) for version in (0, 1, EVERY_ROWS + 2)] == [
        False,
        True,
        True,
    ]
    assert later.facts.gradient_overflows == EVERY_ROWS + 2
    assert later.newest["step"] == EVERY_ROWS + 2
    for opened_recorder in (recorder, later):
        opened_recorder.close()


def test_what_is_no_file_is_one_warning(tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).mkdir()
    recorder, messages = opened(tmp_path)
    recorder.close()
    assert [line.split(" cannot be")[0] for line in messages] == [
        str(tmp_path / n) for n in FILES
    ]


@pytest.mark.parametrize(
    ("rewards", "first", "last"),
    [
        ([], [], []),
        ([0.5], [0.5], [0.5]),
        ([0.0, 1.0], [0.0], [1.0]),
        ([0.0, 0.5, 1.0], [0.0], [1.0]),
        (
            [*range(9)],
            [0, 1, 2, 3],
            [5, 6, 7, 8],
        ),
        (
            [*range(10)],
            [0, 1, 2, 3, 4],
            [5, 6, 7, 8, 9],
        ),
        (
            [*range(99)],
            [0, 1, 2, 3, 4],
            [94, 95, 96, 97, 98],
        ),
    ],
)
def test_first_and_last_rewards_are_those_of_other_steps(rewards, first, last):
    facts = RunFacts()
    for reward in rewards:
        facts.count_row({"reward_mean": reward})
    assert facts.edge_rewards(len(rewards)) == (first, last)


def test_the_time_of_a_run_is_that_of_its_steps() -> None:
    facts = RunFacts()
    assert facts.time_shares() == {}
    facts.count_row(
        {"step_s": 6.0, "training_s": 3.0, "groups_wait_s": 1.0, "publish_s": math.nan}
    )
    shares = {
        "servers_sampling_share": 0.5,
        "servers_paused_share": 0.1,
        "servers_idle_share": 0.4,
    }
    facts.count_row(
        {"step_s": 4.0, "training_s": 1.0, "groups_wait_s": 2.0, "publish_s": 1.0}
        | shares
    )
    time_shares = facts.time_shares()
    assert time_shares["trainer"] == pytest.approx(
        {
            "training": 0.4,
            "waiting for groups": 0.3,
            "publish": 0.1,
            "checkpoint": 0.0,
            "digests": 0.0,
            "other": 0.2,
        }
    )
    # No server had reported in the first step.
    assert time_shares["servers"] == pytest.approx(
        {"sampling": 0.5, "paused": 0.1, "idle": 0.4}
    )


def test_time_before_the_first_generation_and_tokens_of_earlier_starts_do_not_count() -> (
    None
):
    rate = GenerationRate()
    assert rate.at(50.0, 0) == 0.0
    rate.earlier = 10_000
    rate.began(100.0)
    rate.began(101.0)
    assert rate.at(102.0, 10_500) == pytest.approx(250.0)


def test_the_rate_is_that_of_the_newest_seconds() -> None:
    rate = GenerationRate()
    rate.began(0.0)
    assert rate.at(2.0, 200) == pytest.approx(100.0)
    assert rate.at(4.0, 400) == pytest.approx(100.0)
    # The rate counts from 4 s: the newest point at least 5 s back.
    assert rate.at(10.0, 4000) == pytest.approx(600.0)


SAMPLED = ("trajectories.jsonl", "groups.jsonl")


def sampled_files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in SAMPLED}


@pytest.mark.parametrize("killed_in", SAMPLED)
def test_samples_that_a_death_cut_off_are_written_when_the_step_comes_again(
    tmp_path: Path, killed_in: str
) -> None:
    groups = tuple(
        plain_group(
            size=1, finished={0: dataclasses.replace(GOOD, group_id=name, member=0)}
        )
        for name in ("g000001", "g000002", "g000003")
    )
    recorder, _ = opened(tmp_path)
    for number in (0, 10):
        step(recorder, number, groups)
    recorder.close()
    files = sampled_files(tmp_path)
    other_lines = files[killed_in].count(b"\n") // 2
    earlier = sum(map(len, files[killed_in].splitlines(keepends=True)[:other_lines]))
    for num_bytes in range(earlier, len(files[killed_in]) + 1, 23):
        (tmp_path / killed_in).write_bytes(files[killed_in][:num_bytes])
        if killed_in == SAMPLED[0]:
            # The other file is written behind this one.
            lines = files[SAMPLED[1]].splitlines(keepends=True)
            (tmp_path / SAMPLED[1]).write_bytes(b"".join(lines[:3]))
        for _ in range(2):
            recorder, _ = opened(tmp_path)
            # Only the step that the earlier start was in can lack lines.
            step(recorder, 0, groups)
            step(recorder, 10, groups)
            recorder.close()
            assert sampled_files(tmp_path) == files


def test_lines_are_found_from_the_end_of_a_file(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "file"
    assert list(lines_from_end(path)) == []
    monkeypatch.setattr(trackers, "BLOCK_BYTES", 3)
    for lines in (
        [],
        [b"a"],
        [b"a" * 50, b"b", b"cc" * 9, b"d"],
        [b"1"] * 20,
    ):
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        assert list(lines_from_end(path)) == lines[::-1]


def test_a_run_that_goes_on_knows_what_its_earlier_starts_generated(
    tmp_path: Path,
) -> None:
    recorder, _ = opened(tmp_path)
    history = RunHistory()
    # The second had delivered more than its last heartbeat said.
    for epoch, reported, received in ((1, 700, 600), (2, 100, 300)):
        count = history.servers.join(ServerKey(ServerId("a"), epoch))
        count.reported = reported
        count.received = received
    history.servers.all_died()
    recorder.rate.earlier = history.servers.generated
    report = fleet_pb2.ServerReport()
    before_s = time.monotonic()
    report.busy_s = 100.0
    recorder.rate.began(time.monotonic() - report.busy_s)
    after_s = time.monotonic()
    # A moment passed between the two clocks.
    slowest = 25_000 / (100.0 + after_s - before_s)
    assert slowest - 0.1 < recorder.rate.at(after_s, 26_000) < 250.1
    recorder.close()

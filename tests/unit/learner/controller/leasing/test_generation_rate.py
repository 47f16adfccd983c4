"""The rate of generation in metrics and on the screen."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from slipstream.core.types import ServerId
from slipstream.learner.controller.events import EventLog
from slipstream.learner.controller.records.history import RunHistory
from slipstream.learner.controller.reporting.metrics import RunRecorder
from slipstream.learner.controller.reporting.run_facts import GenerationRate
from slipstream.learner.controller.reporting.trackers.tracker import Trackers
from slipstream.learner.controller.servers.server_states import ServerKey
from slipstream.v1 import fleet_pb2
from support.fakes.small_configs import config_of


def test_the_time_before_the_first_generation_does_not_count() -> None:
    rate = GenerationRate()
    assert rate.at(50.0, 0) == 0.0
    rate.began(100.0)
    rate.began(101.0)
    assert rate.at(102.0, 500) == pytest.approx(250.0)


def test_the_tokens_of_earlier_starts_do_not_count() -> None:
    rate = GenerationRate()
    rate.earlier = 10_000
    rate.began(100.0)
    assert rate.at(102.0, 10_500) == pytest.approx(250.0)


def test_the_rate_is_that_of_the_newest_seconds() -> None:
    rate = GenerationRate()
    rate.began(0.0)
    assert rate.at(2.0, 200) == pytest.approx(100.0)
    assert rate.at(4.0, 400) == pytest.approx(100.0)
    # The rate counts from 4 s: the newest point at least 5 s back.
    assert rate.at(10.0, 4000) == pytest.approx(600.0)


def test_a_run_that_goes_on_knows_what_its_earlier_starts_generated(tmp_path: Path) -> None:
    trackers = Trackers({}, lambda text: None)
    recorder = RunRecorder(tmp_path, config_of(tmp_path), trackers, None, EventLog())
    history = RunHistory()
    # The second had delivered more than its last heartbeat said.
    for epoch, reported, received in ((1, 700, 600), (2, 100, 300)):
        count = history.servers.join(ServerKey(ServerId("a"), epoch))
        count.reported, count.received = reported, received
    history.servers.all_died()
    recorder.restore(history)
    report = fleet_pb2.ServerReport()
    before_s, now_s = time.monotonic(), time.time()
    report.busy_intervals.add(start_s=now_s - 100.0, end_s=now_s)
    recorder.server_report(report)
    after_s = time.monotonic()
    # A moment passed between the two clocks.
    slowest = 25_000 / (100.0 + after_s - before_s)
    assert slowest - 0.1 < recorder.rate.at(after_s, 26_000) < 250.1
    recorder.close()


def test_a_server_whose_clock_is_ahead_makes_no_rate_without_bounds(tmp_path: Path) -> None:
    recorder = RunRecorder(
        tmp_path, config_of(tmp_path), Trackers({}, lambda text: None), None, EventLog()
    )
    report = fleet_pb2.ServerReport()
    before_s = time.monotonic()
    report.busy_intervals.add(start_s=time.time() + 60.0, end_s=time.time() + 61.0)
    recorder.server_report(report)
    after_s = time.monotonic()
    slowest = 200 / (2.0 + after_s - before_s)
    assert slowest - 0.1 < recorder.rate.at(after_s + 2.0, 200) < 100.1
    recorder.close()

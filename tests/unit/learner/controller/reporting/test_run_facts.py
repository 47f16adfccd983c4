"""The facts of a run's summary: times, resources and the rate of generation."""

import math
import time
from pathlib import Path

import pytest
from slipstream.core.types import ServerId
from slipstream.learner.controller.events import EventLog
from slipstream.learner.controller.records.history import RunHistory
from slipstream.learner.controller.reporting.metrics import RunRecorder
from slipstream.learner.controller.reporting.run_facts import GenerationRate, RunFacts
from slipstream.learner.controller.reporting.trackers import Trackers
from slipstream.learner.controller.servers.server_states import ServerKey
from slipstream.v1 import fleet_pb2
from support.fakes.small_configs import config_of


@pytest.mark.parametrize(
    ("rewards", "first", "last"),
    [
        ([], [], []),
        ([0.5], [0.5], [0.5]),
        ([0.0, 1.0], [0.0], [1.0]),
        ([0.0, 0.5, 1.0], [0.0], [1.0]),
        ([*range(9)], [0, 1, 2, 3], [5, 6, 7, 8]),
        ([*range(10)], [0, 1, 2, 3, 4], [5, 6, 7, 8, 9]),
        ([*range(99)], [0, 1, 2, 3, 4], [94, 95, 96, 97, 98]),
    ],
)
def test_first_and_last_rewards_are_those_of_other_steps(rewards, first, last):
    facts = RunFacts()
    for reward in rewards:
        facts.steps += 1
        facts.count_row({"reward_mean": reward})
    assert facts.edge_rewards() == (first, last)


def test_the_time_of_a_run_is_that_of_its_steps() -> None:
    time = RunFacts().totals
    assert time.shares() == {}
    time.add({"step_s": 6.0, "training_s": 3.0, "groups_wait_s": 1.0, "publish_s": math.nan})
    shares = {"servers_sampling_share": 0.5, "servers_paused_share": 0.1, "servers_idle_share": 0.4}
    time.add({"step_s": 4.0, "training_s": 1.0, "groups_wait_s": 2.0, "publish_s": 1.0} | shares)
    found = time.shares()
    assert found["trainer"] == pytest.approx(
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
    assert found["servers"] == pytest.approx({"sampling": 0.5, "paused": 0.1, "idle": 0.4})


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
    before_s, report.busy_s = time.monotonic(), 100.0
    recorder.server_report(report)
    after_s = time.monotonic()
    # A moment passed between the two clocks.
    slowest = 25_000 / (100.0 + after_s - before_s)
    assert slowest - 0.1 < recorder.rate.at(after_s, 26_000) < 250.1
    recorder.close()

"""Where the time of a step went."""

import dataclasses

import pytest
from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.results import StepTimes
from slipstream.v1 import fleet_pb2
from support.fakes.fake_trajectories import GOOD, plain_group

NO_REPORT = fleet_pb2.ServerReport()
NOTHING = dict.fromkeys(
    ("staleness", "slots", "server", "environment", "queue", "nothing"), 0.0
)


def report(busy_s: float, paused_s: float, uptime_s: float) -> fleet_pb2.ServerReport:
    return fleet_pb2.ServerReport(busy_s=busy_s, paused_s=paused_s, uptime_s=uptime_s)


def group_of(*back_s: float, leased_s: float = 100.0) -> Group:
    """A group whose members came back then, each with 2 s in the engine and 0.5 beside it."""
    group = plain_group(size=len(back_s), leased_s=leased_s)
    for member, at_s in enumerate(back_s):
        group.finished[member] = dataclasses.replace(
            GOOD, member=member, generation_s=2.0, environment_s=0.5
        )
        group.back_s[member] = at_s
    return group


def test_the_time_of_servers_is_split_between_two_steps() -> None:
    times = StepTimes()
    first_report = report(4.0, 1.0, 10.0)
    times.report(NO_REPORT, first_report)
    times.report(NO_REPORT, report(5.0, 0.0, 10.0))
    first = times.step([], 0.0, waited_s=1.5, lease_waits_s=NOTHING | {"slots": 2.0})
    assert first["groups_wait_s"] == 1.5
    assert first["lease_wait_slots_s"] == 2.0
    # (4 + 5) of 20 s: busy seconds have no pauses.
    assert first["servers_sampling_share"] == pytest.approx(0.45)
    assert first["servers_paused_share"] == pytest.approx(0.05)
    assert first["servers_idle_share"] == pytest.approx(0.5)
    times.report(first_report, report(14.0, 1.0, 20.0))
    second = times.step([], 0.0, waited_s=1.75, lease_waits_s=NOTHING | {"slots": 2.0})
    assert second["groups_wait_s"] == 0.25
    assert second["lease_wait_slots_s"] == 0.0
    assert second["servers_sampling_share"] == pytest.approx(1.0)
    # Without a report since then the shares are not known.
    third = times.step([], 0.0, waited_s=1.75, lease_waits_s=NOTHING)
    assert "servers_sampling_share" not in third


def test_pauses_without_requests_leave_the_time_of_sampling_as_it_is() -> None:
    times = StepTimes()
    # Learner and engine in turn: 4 s of sampling, then 5 s of rest in which no request is open.
    times.report(NO_REPORT, report(4.0, 5.0, 10.0))
    step_times = times.step([], 0.0, waited_s=0.0, lease_waits_s=NOTHING)
    shares = [
        step_times[f"servers_{name}_share"] for name in ("sampling", "paused", "idle")
    ]
    assert shares == pytest.approx([0.4, 0.5, 0.1])


def test_the_queue_is_the_time_from_the_last_member_to_the_batch() -> None:
    step_times = StepTimes().step(
        [group_of(103.0, 106.0)], 110.0, waited_s=0, lease_waits_s=NOTHING
    )
    assert step_times["queue_s_mean"] == pytest.approx(4.0)
    # 1 and 4 s beside the engine, half a second of each in the environment.
    assert step_times["episode_rest_s_mean"] == pytest.approx(2.0)
    # A controller before this one had leased the group.
    restored = [group_of(103.0, leased_s=0.0)]
    step_times = StepTimes().step(restored, 110.0, waited_s=0, lease_waits_s=NOTHING)
    assert step_times["episode_rest_s_mean"] == 0.0

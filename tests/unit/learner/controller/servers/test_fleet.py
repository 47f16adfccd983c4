import pytest
from slipstream.core.types import PolicyVersion
from slipstream.learner.controller.servers.fleet import MAX_DEPARTED, Fleet
from slipstream.learner.controller.servers.session import (
    DEAD,
    LEFT,
    LOADING,
    SERVING,
    STALE,
)
from slipstream.v1 import fleet_pb2
from support.rigs.publishing_scene import joined, run_of

SHARED = {"kind": "redis", "redis_url": "redis://127.0.0.1:6379/0"}


@pytest.mark.parametrize(("queue", "waiting"), [({"kind": "grpc"}, 700), (SHARED, 400)])
async def test_bytes_of_a_queue_that_all_servers_share_are_counted_once(queue, waiting):
    fleet = Fleet(run_of(queue=queue))
    # A shared queue counts once, with the newer of the two reports.
    for name, num_bytes in (("a", 300), ("b", 400)):
        joined(fleet, name).report.queued_bytes = num_bytes
    assert fleet.queued_bytes == waiting
    assert fleet.gauges()["queued_bytes"] == waiting


def test_a_server_that_takes_weights_works_and_one_that_is_stale_or_drains_does_not() -> (
    None
):
    fleet = Fleet(run_of())
    states = (LOADING, SERVING, STALE, LEFT)
    sessions = [joined(fleet, str(state)) for state in states]
    for session, state in zip(sessions, states, strict=True):
        session.state = state
    assert fleet.working() == sessions[:2]


def test_drafts_of_all_servers_are_added_up() -> None:
    fleet = Fleet(run_of())
    for name, drafted, accepted in (("a", 100, 60), ("b", 11, 7)):
        report = joined(fleet, name).report
        report.drafted_tokens = drafted
        report.accepted_tokens = accepted
    gauges = fleet.gauges()
    assert (gauges["drafted_tokens"], gauges["accepted_tokens"]) == (111, 67)


@pytest.mark.parametrize(
    ("last", "state", "cause"),
    [
        (fleet_pb2.ServerMessage(drained=fleet_pb2.ServerReport()), LEFT, "new driver"),
        (
            fleet_pb2.ServerMessage(heartbeat=fleet_pb2.ServerReport()),
            DEAD,
            "its stream ended",
        ),
    ],
)
def test_a_server_has_left_only_if_it_said_goodbye(last, state, cause):
    fleet = Fleet(run_of())
    session = joined(fleet, "a")
    fleet.order_drain(session, "new driver", finish=True)
    fleet.receive(session, last)
    fleet.remove(session, "its stream ended")
    gone = fleet.departed[session.key.server_id]
    assert (gone.state, gone.cause) == (state, cause)
    assert session.is_leaving
    # A further life of the server begins anew.
    joined(fleet, "a")
    assert not fleet.departed


def test_the_status_shows_the_newest_of_those_that_left() -> None:
    fleet = Fleet(run_of())
    for number in range(MAX_DEPARTED + 20):
        fleet.remove(joined(fleet, f"s{number}"), "its stream ended")
    assert list(fleet.departed) == [
        f"s{number}" for number in range(20, MAX_DEPARTED + 20)
    ]


def test_the_last_server_does_not_leave_without_a_warning() -> None:
    run = run_of(controller={"stall_timeout_s": 90.0})
    fleet = Fleet(run)
    first = joined(fleet, "a")
    last = joined(fleet, "b")
    fleet.order_drain(first, "new driver", finish=True)
    assert fleet.warn_without(first) == ""
    fleet.drains(last, "SIGTERM")
    warning = fleet.warn_without(last)
    assert warning.startswith(
        "no rollout server stays when b has left: the run waits for another"
    )
    assert "fails after 90 s without (controller.stall_timeout_s)" in warning
    messages = [event.text for event in run.events.kept() if event.text == warning]
    assert messages == [warning]


def test_servers_that_leave_at_the_end_of_a_run_are_missed_by_nobody() -> None:
    run = run_of()
    fleet = Fleet(run)
    session = joined(fleet, "a")
    run.progress.stop("enough")
    fleet.order_drain(session, "enough", finish=False)
    assert fleet.warn_without(session) == ""


def test_the_idle_time_of_a_run_stands_still_while_no_server_serves(
    monkeypatch,
) -> None:
    run = run_of()
    now_s = 0.0
    monkeypatch.setattr(run.clock, "now_s", lambda: now_s)
    session = joined(Fleet(run), "a")
    idle_s = []
    session.version = PolicyVersion(0, 0)
    for state in (None, LOADING, SERVING, STALE):
        if state is not None:
            session.become(state)
        now_s += 10.0
        idle_s.append(run.progress.idle_s)
    assert idle_s == [0.0, 0.0, 10.0, 10.0]
    run.progress.moved()
    assert run.progress.idle_s == 0.0


def test_refused_calls_of_agents_are_told_at_first_and_when_they_are_ten_times_more() -> (
    None
):
    run = run_of()
    fleet = Fleet(run)
    session = joined(fleet, "a")
    num_told: list[int] = []
    for num_refused in (0, 1, 5, 9, 10, 99, 130):
        report = fleet_pb2.ServerReport(refused_agents=num_refused)
        fleet.receive(session, fleet_pb2.ServerMessage(heartbeat=report))
        texts = [
            event.text for event in run.events.kept() if "agents.listen" in event.text
        ]
        num_told.append(len(texts))
    assert num_told == [0, 1, 1, 1, 2, 2, 3]
    assert texts[0].startswith(
        "rollout server a has refused 1 call of agents at agents.listen"
    )
    assert "refused 130 calls" in texts[-1]

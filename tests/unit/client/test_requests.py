"""What `slipstream status` shows to people."""

import pytest
from slipstream.client.requests import (
    environment_lines,
    find_fault,
    status_lines,
    time_lines,
)
from slipstream.client.status import environment_from_pb, run_from_pb
from slipstream.core.run_folder import LEASE_WAITS
from slipstream.v1 import environment_pb2, fleet_pb2, status_pb2, trajectory_pb2

METRICS = {
    "step_s": 2.0,
    "reward_mean": 0.5,
    "training_s": 1.0,
    "groups_wait_s": 0.5,
    "publish_s": 0.25,
    "servers_sampling_share": 0.9,
    "servers_paused_share": 0.0,
    "servers_idle_share": 0.1,
    "lease_wait_slots_s": 1.5,
    "lease_wait_staleness_s": 0.5,
    "queue_s_mean": 3.0,
    "generation_s_mean": 4.0,
    "environment_s_mean": 1.5,
    "episode_rest_s_mean": 0.25,
}


def environment(
    name: str, state: int, num_tasks: int
) -> environment_pb2.EnvironmentStatus:
    return environment_pb2.EnvironmentStatus(
        spec=environment_pb2.EnvironmentSpec(name=name, weight=1.0),
        state=environment_pb2.EnvironmentState.Name(state),
        num_tasks=num_tasks,
    )


def cells(lines: list[str], first: str) -> list[str]:
    (line,) = [line for line in lines if line.split(" ")[0] == first]
    return line.split("  ")


def test_what_is_not_known_yet_is_a_dash() -> None:
    run = status_pb2.RunStatus(
        run_id="r-1",
        state=status_pb2.RUN_STATE_RUNNING,
        servers=[
            status_pb2.ServerStatus(
                server_id="new", state=fleet_pb2.SERVER_STATE_JOINING
            ),
            status_pb2.ServerStatus(
                server_id="old", state=fleet_pb2.SERVER_STATE_SERVING
            ),
        ],
        environments=[
            environment("pending", environment_pb2.ENVIRONMENT_STATE_PENDING, 0),
            environment("endless", environment_pb2.ENVIRONMENT_STATE_READY, 0),
            environment("many", environment_pb2.ENVIRONMENT_STATE_READY, 1234),
        ],
    )
    lines = status_lines(run_from_pb(run))
    rows = {
        name: [c.strip() for c in cells(lines, name) if c.strip()]
        for name in ("new", "old")
    }
    assert rows["new"][1:3] == ["joining", "-"]
    assert rows["old"][1:3] == ["serving", "0"]
    tasks = {
        name: [c.strip() for c in cells(lines, name) if c.strip()][2]
        for name in ("pending", "endless", "many")
    }
    assert tasks == {"pending": "-", "endless": "no end", "many": "1,234"}


def test_a_server_shows_how_many_of_its_drafts_were_accepted() -> None:
    reports = {
        "with": fleet_pb2.ServerReport(drafted_tokens=400, accepted_tokens=301),
        "without": fleet_pb2.ServerReport(generated_tokens=9),
    }
    servers = [
        status_pb2.ServerStatus(server_id=n, report=r) for n, r in reports.items()
    ]
    lines = status_lines(run_from_pb(status_pb2.RunStatus(servers=servers)))
    shown = {
        name: [c.strip() for c in cells(lines, name) if c.strip()] for name in reports
    }
    assert shown["with"][6] == "75% accepted"
    assert shown["without"][5:7] == ["9", "-"]


def test_a_feature_that_engines_do_without_is_one_line_for_each_cause() -> None:
    slow = {"fast steps": "the engine has drafts"}
    servers = [
        status_pb2.ServerStatus(
            server_id=f"s{number}",
            state=fleet_pb2.SERVER_STATE_SERVING,
            disabled_features=slow,
        )
        for number in range(6)
    ]
    servers[1].disabled_features["fast steps"] = "another vLLM"
    servers[2].disabled_features["kernel"] = "no GPU"
    gone = status_pb2.ServerStatus(
        server_id="gone", state=fleet_pb2.SERVER_STATE_DEAD, disabled_features=slow
    )
    lines = status_lines(run_from_pb(status_pb2.RunStatus(servers=[*servers, gone])))
    assert [line for line in lines if "is off" in line] == [
        "fast steps is off on s1: another vLLM",
        "fast steps is off on s0, s2, s3, s4 and 1 more: the engine has drafts",
        "kernel is off on s2: no GPU",
    ]


def test_a_server_is_healthy_while_it_loads_serves_or_drains_in_any_of_its_epochs() -> (
    None
):
    states = {
        "a": ["DEAD", "SERVING"],
        "b": ["LOADING"],
        "c": ["DRAINING"],
        "d": ["SERVING", "LEFT"],
    }
    states |= {"e": ["STALE"], "f": ["JOINING"], "g": ["LEFT"]}
    run = status_pb2.RunStatus(
        run_id="r-1",
        servers=[
            status_pb2.ServerStatus(server_id=name, state=f"SERVER_STATE_{state}")
            for name, several in states.items()
            for state in several
        ],
    )
    faults = {name: find_fault(run_from_pb(run), name) for name in (*states, "h")}
    assert [name for name, fault in faults.items() if fault is None] == [
        "a",
        "b",
        "c",
        "d",
    ]
    assert faults["g"] == "rollout server g is not there to work: left"
    assert faults["h"] == "the controller does not know rollout server h"
    run.state = status_pb2.RUN_STATE_FAILED
    run.cause = "no disk"
    assert find_fault(run_from_pb(run), "a") == "run r-1 failed: no disk"


def test_the_reward_stands_above_all_numbers_once_there_is_one() -> None:
    run = status_pb2.RunStatus(run_id="r", step=3, num_steps=9, uptime_s=5.0)
    assert status_lines(run_from_pb(run))[1] == "version 3 of 9, up for 5 s"
    run.metrics["reward_mean"] = 0.25
    assert (
        status_lines(run_from_pb(run))[1] == "reward 0.250, version 3 of 9, up for 5 s"
    )


def test_the_newest_step_of_a_clients_own_loop_shows_its_passes() -> None:
    lines = status_lines(run_from_pb(status_pb2.RunStatus(metrics={"passes": 3.0})))
    assert "passes of the newest step: 3" in lines


def test_a_suspended_environment_shows_its_cause() -> None:
    entry = environment("broken", environment_pb2.ENVIRONMENT_STATE_SUSPENDED, 3)
    entry.cause = "KeyError: 'a'"
    assert environment_from_pb(entry).state == "suspended"
    run = status_pb2.RunStatus(state=status_pb2.RUN_STATE_FAILED, environments=[entry])
    lines = status_lines(run_from_pb(run))
    assert lines[-1].endswith("KeyError: 'a'")


def test_evaluations_show_what_their_newest_round_measured() -> None:
    trained = environment("trained", environment_pb2.ENVIRONMENT_STATE_READY, 3)
    trained.spec.purpose = trajectory_pb2.EPISODE_PURPOSE_TRAINING
    served, new, failed = (
        environment(name, environment_pb2.ENVIRONMENT_STATE_READY, 3)
        for name in ("held", "new", "failed")
    )
    for entry in (served, new, failed):
        entry.spec.purpose = trajectory_pb2.EPISODE_PURPOSE_EVALUATION
    served.newest_round.step = 50
    numbers = {"reward_mean": 0.25, "pass_at_10": 0.75, "pass_at_2": 0.5}
    served.newest_round.numbers.update(
        numbers | {"num_episodes": 1256, "num_failed": 3}
    )
    failed.newest_round.numbers.update({"num_episodes": 0, "num_failed": 4})
    entries = [environment_from_pb(entry) for entry in (served, trained, new, failed)]
    lines = [" ".join(line.split()) for line in environment_lines(entries)]
    assert lines[1] == "trained ready 3 1 0 0 -"
    assert lines[2] == ""
    assert (
        lines[3]
        == "evaluation state tasks version reward pass@2 pass@10 episodes failed cause"
    )
    assert lines[4] == "held ready 3 50 0.250 0.500 0.750 1,256 3"
    assert lines[5] == "new ready 3 - - - - - -"
    # No episode has a reward.
    assert lines[6] == "failed ready 3 0 - - - 0 4"
    alone = environment_lines(entries[:1])
    assert (len(alone), alone[0].split()[0]) == (2, "evaluation")
    trained.groups_accepted = 1
    assert environment_lines([environment_from_pb(trained)])[1].split()[-1] == "0.000"


def test_the_time_of_a_step_is_told_by_cause() -> None:
    told = [
        "a step takes 2.00 s: the trainer waits for the servers, which are full",
        "  trainer: training 50%, waiting for groups 25%, publish 12%, other 12%",
        "  servers: sampling 90%, idle 10%",
        "  the next lease waits for a step, by max_staleness 25%, a free place on a server 75%",
        "  queue: a complete group waits 3.00 s for its step",
        "  episode: engine 4.00 s, environment 1.50 s, rest 0.25 s",
    ]
    assert time_lines(METRICS) == told
    lines = status_lines(run_from_pb(status_pb2.RunStatus(metrics=METRICS)))
    first = lines.index(told[0])
    assert lines[first : first + len(told)] == told


def test_no_time_is_told_before_a_step_and_of_an_older_controller() -> None:
    assert time_lines({}) == []
    assert time_lines({"step_s": 2.0}) == []


@pytest.mark.parametrize(
    ("waited_s", "cause", "words"),
    [
        (0.0, "staleness", "the servers wait for the trainer"),
        (0.0, "slots", "nobody waits long"),
        (0.5, "slots", "the trainer waits for the servers, which are full"),
        (0.5, "staleness", "long replies"),
        (0.5, "queue", "room in the queue"),
        (0.5, None, "the trainer waits for groups"),
    ],
)
def test_the_words_say_which_fleet_waits(
    waited_s: float, cause: str | None, words: str
) -> None:
    waits = {f"lease_wait_{name}_s": float(name == cause) for name in LEASE_WAITS}
    metrics = {"step_s": 1.0, "groups_wait_s": waited_s, "reward_mean": 0.5, **waits}
    head, *_ = time_lines(metrics)
    assert words in head


def test_the_trainer_of_a_clients_own_loop_waits_for_the_client() -> None:
    assert time_lines({"step_s": 1.0, "groups_wait_s": 0.75, "training_s": 0.25})[
        :2
    ] == [
        "a step takes 1.00 s: the trainer waits for the client",
        "  trainer: training 25%, waiting for the client 75%",
    ]

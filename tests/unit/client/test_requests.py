"""What `slipstream status` shows to people."""

from slipstream.client.requests import environment_lines, find_fault, status_lines
from slipstream.client.status import environment_from_pb, run_from_pb
from slipstream.v1 import environment_pb2, fleet_pb2, status_pb2, trajectory_pb2


def environment(name: str, state: int, num_tasks: int) -> environment_pb2.EnvironmentStatus:
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
            status_pb2.ServerStatus(server_id="new", state=fleet_pb2.SERVER_STATE_JOINING),
            status_pb2.ServerStatus(server_id="old", state=fleet_pb2.SERVER_STATE_SERVING),
        ],
        environments=[
            environment("pending", environment_pb2.ENVIRONMENT_STATE_PENDING, 0),
            environment("endless", environment_pb2.ENVIRONMENT_STATE_READY, 0),
            environment("many", environment_pb2.ENVIRONMENT_STATE_READY, 1234),
        ],
    )
    lines = status_lines(run_from_pb(run))
    rows = {name: [c.strip() for c in cells(lines, name) if c.strip()] for name in ("new", "old")}
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
    servers = [status_pb2.ServerStatus(server_id=n, report=r) for n, r in reports.items()]
    lines = status_lines(run_from_pb(status_pb2.RunStatus(servers=servers)))
    shown = {name: [c.strip() for c in cells(lines, name) if c.strip()] for name in reports}
    assert shown["with"][6] == "75% accepted"
    assert shown["without"][5:7] == ["9", "-"]


def test_a_server_is_healthy_while_it_loads_serves_or_drains_in_any_of_its_epochs() -> None:
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
    assert [name for name, fault in faults.items() if fault is None] == ["a", "b", "c", "d"]
    assert faults["g"] == "rollout server g is not there to work: left"
    assert faults["h"] == "the controller does not know rollout server h"
    run.state, run.cause = status_pb2.RUN_STATE_FAILED, "no disk"
    assert find_fault(run_from_pb(run), "a") == "run r-1 failed: no disk"


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
    held, new, failed = (
        environment(name, environment_pb2.ENVIRONMENT_STATE_READY, 3)
        for name in ("held", "new", "failed")
    )
    for entry in (held, new, failed):
        entry.spec.purpose = trajectory_pb2.EPISODE_PURPOSE_EVALUATION
    held.newest_round.step = 50
    numbers = {"reward_mean": 0.25, "pass_at_10": 0.75, "pass_at_2": 0.5}
    held.newest_round.numbers.update(numbers | {"num_episodes": 1256, "num_failed": 3})
    failed.newest_round.numbers.update({"num_episodes": 0, "num_failed": 4})
    entries = [environment_from_pb(entry) for entry in (held, trained, new, failed)]
    lines = [" ".join(line.split()) for line in environment_lines(entries)]
    assert lines[1] == "trained ready 3 1 0 0 -"
    assert lines[2] == ""
    assert lines[3] == "evaluation state tasks version reward pass@2 pass@10 episodes failed cause"
    assert lines[4] == "held ready 3 50 0.250 0.500 0.750 1,256 3"
    assert lines[5] == "new ready 3 - - - - - -"
    # No episode has a reward.
    assert lines[6] == "failed ready 3 0 - - - 0 4"
    alone = environment_lines(entries[:1])
    assert (len(alone), alone[0].split()[0]) == (2, "evaluation")
    trained.groups_accepted = 1
    assert environment_lines([environment_from_pb(trained)])[1].split()[-1] == "0.000"

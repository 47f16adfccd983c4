"""Random messages into every method of a controller in the middle of a run.

Whatever comes, the answer is a status that callers know, in one line, and the run goes on to its
end. A case that once broke that stays as an example. `make fuzz` says more of them.
"""

import asyncio
import json
import random
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from slipstream.core.types import Branch
from slipstream.v1 import environment_pb2, fleet_pb2, trainer_pb2, trajectory_pb2
from support.rigs.fuzz_budget import BUDGET
from support.rigs.fuzz_calls import (
    FATAL,
    METHODS,
    Answers,
    Case,
    answered,
    delivery,
    honest_trajectory,
    honest_tree,
    random_case,
    registered,
)
from support.rigs.live_run import LiveRun

CALLS = tuple(name for name in METHODS if name not in FATAL)
# A run that ends takes no calls; one whose controller has ended has no port.
ENDED = ("UNAVAILABLE",)


@pytest.fixture(scope="module")
def live(tmp_path_factory) -> Iterator[LiveRun]:
    """A run that all these calls share; it must come to its own end behind them."""
    with LiveRun(tmp_path_factory.mktemp("live")) as run:
        yield run
    assert run.code == 0
    summary = run.summary()
    # The claims of liars on their own tokens are in the ledger; the trained ones are the honest
    # server's.
    assert (summary["steps"], summary["ledger"]["trained"]) == (
        6,
        6 * 16 * run.server.reply_tokens,
    )
    assert run.complaints.lines == []


def cases(names: tuple[str, ...]) -> st.SearchStrategy[Case]:
    seeds = st.integers(0, 2**32)
    return seeds.map(lambda seed: random_case(random.Random(seed), names))


def said(method: str, *messages, is_opened: bool = True) -> Case:
    return Case(method, is_opened, tuple(m.SerializeToString() for m in messages))


def delivered(*trajectories: bytes) -> Case:
    return Case("Deliver", True, tuple(map(delivery, trajectories)))


def changed(**fields) -> bytes:
    message = trajectory_pb2.Trajectory.FromString(honest_trajectory())
    for name, value in fields.items():
        setattr(message, name, value)
    return message.SerializeToString()


def submitted(**fields) -> Case:
    spec = {
        "name": "x",
        "reference": "m:E",
        "weight": 1.0,
        "timeout_s": 1.0,
        "num_workers": 1,
    }
    environment = environment_pb2.EnvironmentSpec(purpose=1, **(spec | fields))
    return said(
        "SubmitEnvironment", environment_pb2.SubmitEnvironmentRequest(spec=environment)
    )


def reported(**fields) -> Case:
    return said("Join", fleet_pb2.ServerMessage(**fields))


EMPTY = trajectory_pb2.Trajectory()
SPANS = trajectory_pb2.Trajectory(
    version_spans=[trajectory_pb2.VersionSpan()] * 100_000
)
NAMES = trajectory_pb2.Trajectory(
    metrics={f"a\x1b[2J{n}": float("nan") for n in range(10_000)}
)


@given(case=cases(CALLS))
# Rewards that no loss survives, tokens beyond the episode's limit, an empty trajectory.
@example(case=delivered(changed(reward=1e308)))
@example(case=delivered(changed(reward=-1e308)))
@example(case=delivered(changed(token_ids=bytes(400_000))))
@example(case=delivered(EMPTY.SerializeToString()))
# More branches than a run takes, and one without a sampled token.
@example(
    case=delivered(
        honest_trajectory(run_lengths=(3, 5) + (0,) * 34, branches=(Branch(2),) * 18)
    )
)
@example(
    case=delivered(
        honest_trajectory(run_lengths=(1, 5, 2, 0), branches=(Branch(2),) * 2)
    )
)
@example(case=delivered(honest_tree()))
# A message that ended the controller.
@example(case=Case("Deliver", False, (delivery(b"junk", "ä" * 150),)))
@example(
    case=reported(environment=fleet_pb2.EnvironmentReport(environment="e", num_tasks=2))
)
@example(
    case=reported(
        lease=fleet_pb2.LeaseReport(
            group_id="g000001", closed=True, next_attempt=2**32 - 1
        )
    )
)
@example(case=delivered(changed(attempt=2**32 - 1, status=3)))
# Absurd counters.
@example(case=reported(heartbeat=fleet_pb2.ServerReport(generated_tokens=2**64 - 1)))
# A message that stopped the loop, and names without a bound.
@example(case=delivered(SPANS.SerializeToString()))
@example(case=delivered(NAMES.SerializeToString()))
@example(case=delivered(changed(group_id="g" * (1 << 20))))
@example(case=delivered(changed(reply_text="y" * (8 << 20))))
# Junk under the name of another server.
@example(case=Case("Deliver", False, (delivery(b"junk", "g000001.0.0.1"),)))
# A failure of a trainer that the controller does not know.
@example(
    case=said(
        "ReportFailure", trainer_pb2.TrainerFailure(message="made up", final=True)
    )
)
# Clients.
@example(case=submitted(num_workers=2**32 - 1))
@example(case=submitted(num_workers=0))
@example(case=submitted(weight=5e-324))
@example(case=submitted(name=".."))
@example(case=submitted(args_json="[" * 60_000))
@example(case=submitted(args_json="a" * (1 << 20)))
@BUDGET.calls
def test_any_message_gets_a_known_answer(live: LiveRun, case: Case):
    answers = Answers()
    answers.note(case, *live.do(lambda channel: answered(channel, case)), also=())
    assert answers.broken == []


def test_many_callers_at_once_get_known_answers(live: LiveRun):
    answers = Answers()
    draw = random.Random("many")

    async def call(channel) -> None:
        for _ in range(BUDGET.rounds):
            case = random_case(draw, CALLS)
            answers.note(case, *await answered(channel, case), also=())

    async def all_of_them(channel) -> None:
        await asyncio.gather(*(call(channel) for _ in range(16)))

    live.do(all_of_them)
    assert answers.broken == []
    assert answers.messages > 16 * BUDGET.rounds
    # After the first checks, too.
    assert {
        f"{name} OK" for name in ("Join", "Deliver", "ServeEpisodes")
    } <= answers.codes.keys()


@pytest.mark.parametrize(
    "names", [("StopRun",), ("DrainServer",), ("Register",), tuple(METHODS)]
)
def test_a_run_that_its_callers_may_end_ends_in_order(tmp_path, names):
    answers = Answers()
    draw = random.Random("/".join(names))
    epochs = [0]
    goodbye = said("Finish", trainer_pb2.TrainerGoodbye(export_path="x"))
    with LiveRun(tmp_path) as run:

        async def call(channel) -> None:
            for number in range(BUDGET.rounds):
                case = random_case(draw, names)
                if number % 4 == 1:
                    epochs.append((await registered(channel))[0] or epochs[-1])
                answers.note(
                    case, *await answered(channel, case, epochs[-1]), also=ENDED
                )

        run.do(call)
        # A fuzzed call may have taken the trainer's place; that trainer leaves in order.
        newest = 0 if run.is_over else run.do(registered)[0]
        if not run.is_over:
            run.stop()
            run.do(lambda channel: answered(channel, goodbye, newest))
    assert answers.broken == []
    assert run.complaints.lines == []
    assert json.loads((run.config.run_dir / "summary.json").read_text())["state"] in (
        "finished",
        "stopped",
        "failed",
    )

"""Engines rest while the learner trains on their device, as the controller orders it."""

import asyncio
import functools

import pytest
from slipstream.extensions.turns.controller import EngineTurns, shares
from slipstream.learner.controller.servers.fleet import Fleet
from slipstream.learner.controller.servers.session import (
    DRAINING,
    LOADING,
    SERVING,
    STALE,
    ServerSession,
)
from slipstream.v1 import fleet_pb2
from slipstream.v1.weights_pb2 import Place
from support.rigs.publishing_scene import joined, nothing, place, run_of, sent
from support.rigs.waiting import LIMIT_S


class Scene:
    """Two servers that serve; `lost` is the name of each that is gone."""

    def __init__(
        self, turns: str | None = "pause", join_deadline_s: float = 20.0, count: int = 1
    ) -> None:
        offload = {"offload": {"gradients": True, "optimizer": True}}
        self.run = run_of(
            controller={"turns": turns} if turns else {},
            learner=offload,
            weights={"join_deadline_s": join_deadline_s},
            rollout_server={"count": count},
        )
        self.fleet = Fleet(self.run)
        self.turns = EngineTurns(self.fleet, self.run)
        self.fleet.listeners = [self.turns]
        self.sessions = [self.serving("a"), self.serving("b")]

    def serving(self, name: str) -> ServerSession:
        session = joined(self.fleet, name)
        session.become(LOADING)
        session.become(SERVING)
        return session

    def compute_on(self, rank: str, *servers: str) -> None:
        """Tells the GPU of the trainer's rank and those of the servers; "": a CPU."""
        self.run.progress.trainer_registered((place("here", *filter(None, [rank])),))
        for session, gpu in zip(self.sessions, servers, strict=True):
            session.hello.place.gpus[:] = filter(None, [gpu])

    @property
    def said(self) -> list[str]:
        return [event.text for event in self.run.events.kept() if "turns" in event.text]

    async def begin(self, *answering: ServerSession) -> list[fleet_pb2.Rest]:
        """Begins a step; these servers say at once that their engines rest."""
        beginning = asyncio.create_task(self.turns.before_batch())
        await asyncio.sleep(0)
        orders = []
        for session in answering:
            order = session.outbox.pop()
            assert isinstance(order, fleet_pb2.ControllerMessage)
            orders.append(order.rest)
            self.turns.rested(session, fleet_pb2.Rested(number=order.rest.number))
        await asyncio.wait_for(beginning, LIMIT_S)
        return orders


@pytest.mark.parametrize(("turns", "give_back"), [("pause", False), ("sleep", True)])
async def test_a_step_begins_when_all_engines_rest_and_its_end_wakes_them(
    turns, give_back
):
    scene = Scene(turns)
    orders = await scene.begin(*scene.sessions)
    assert [order.give_back for order in orders] == [give_back, give_back]
    scene.turns.trainer_asks(())
    assert [sent(session) for session in scene.sessions] == [["wake"], ["wake"]]
    scene.turns.trainer_asks(())
    assert [sent(session) for session in scene.sessions] == [[], []]


async def test_the_time_of_leases_stands_still_while_an_engine_rests() -> None:
    scene = Scene()

    def counts() -> list[bool]:
        return [
            bool(s.served.total_s(1e9 + 1) - s.served.total_s(1e9))
            for s in scene.sessions
        ]

    assert counts() == [True, True]
    await scene.begin(*scene.sessions)
    assert counts() == [False, False]
    scene.turns.trainer_asks(())
    assert counts() == [True, True]


async def test_a_server_that_is_sent_weights_now_is_woken_by_them() -> None:
    scene = Scene()
    await scene.begin(*scene.sessions)
    scene.turns.trainer_asks(["a"])
    assert [sent(session) for session in scene.sessions] == [[], ["wake"]]
    # Had the publish come to nothing, this order alone would wake it.
    scene.turns.trainer_asks(())
    assert [sent(session) for session in scene.sessions] == [["wake"], []]


async def test_a_server_whose_engine_does_not_rest_in_time_is_sent_away() -> None:
    scene = Scene(join_deadline_s=0.05)
    quick, _ = scene.sessions
    await scene.begin(quick)
    assert list(scene.fleet.sessions.values()) == [quick]
    *_, event = scene.run.events.kept()
    assert event.text == (
        "rollout server b is gone: its engine did not rest within 0.05 s (weights.join_deadline_s)"
    )


async def test_the_loss_of_a_server_ends_the_wait_for_it() -> None:
    scene = Scene()
    beginning = asyncio.create_task(scene.turns.before_batch())
    await asyncio.sleep(0)
    for session in scene.sessions:
        scene.fleet.remove(session, "its stream ended")
    await asyncio.wait_for(beginning, LIMIT_S)
    scene.turns.trainer_asks(())


async def test_an_answer_to_an_earlier_order_does_not_count() -> None:
    scene = Scene(join_deadline_s=0.05)
    (first, _) = await scene.begin(*scene.sessions)
    beginning = asyncio.create_task(scene.turns.before_batch())
    await asyncio.sleep(0)
    scene.turns.rested(scene.sessions[0], fleet_pb2.Rested(number=first.number))
    await beginning
    assert scene.fleet.sessions == {}


async def test_engines_go_on_when_the_trainer_is_lost() -> None:
    scene = Scene()
    await scene.begin(*scene.sessions)
    scene.turns.trainer_away()
    assert [sent(session) for session in scene.sessions] == [["wake"], ["wake"]]


async def test_engines_give_their_memory_to_a_trainer_that_loads_again() -> None:
    scene = Scene("sleep")
    scene.turns.trainer_away()
    assert [sent(session) for session in scene.sessions] == [["rest"], ["rest"]]
    # The new trainer asks for its first order.
    scene.turns.trainer_asks(())
    assert [sent(session) for session in scene.sessions] == [["wake"], ["wake"]]


@pytest.mark.parametrize(("turns", "rests"), [("pause", []), ("sleep", ["rest"])])
async def test_engines_without_weights_and_those_that_leave_give_their_memory_back_too(
    turns: str, rests: list[str]
) -> None:
    scene = Scene(turns)
    joining, (stale, leaving) = joined(scene.fleet, "c"), scene.sessions
    stale.become(STALE)
    leaving.become(DRAINING)
    scene.turns.trainer_away()
    beginning = asyncio.create_task(scene.turns.before_batch())
    await asyncio.sleep(0)
    # Once for the trainer that loads, once for its step.
    assert [sent(session) for session in (joining, stale, leaving)] == [2 * rests] * 3
    beginning.cancel()


@pytest.mark.parametrize(("turns", "rests"), [("pause", []), ("sleep", ["rest"])])
async def test_a_server_that_joins_in_the_turn_of_the_learner_gives_its_memory_back(
    turns, rests
):
    scene = Scene(turns)
    orders = []
    # The turn lasts from the loss of a trainer until the next one asks for its first order.
    asks = functools.partial(scene.turns.trainer_asks, ())
    for name, event in (("a", scene.turns.trainer_away), ("b", asks), ("c", nothing)):
        session = joined(scene.fleet, f"new-{name}")
        orders.append(sent(session))
        event()
    assert orders == [[], rests, []]


async def test_engines_on_other_machines_never_rest_and_the_run_says_so_once() -> None:
    scene = Scene()
    scene.run.progress.trainer_registered((place("elsewhere"),))
    await scene.begin()
    await scene.begin()
    assert [sent(session) for session in scene.sessions] == [[], []]
    assert scene.said == [
        'controller.turns = "pause" has no effect: no rollout server computes on a device of the '
        "learner"
    ]


async def test_turns_are_not_said_to_have_no_effect_before_all_servers_of_the_run_serve() -> (
    None
):
    scene = Scene(count=3)
    scene.run.progress.trainer_registered((place("elsewhere"),))
    await scene.begin()
    assert scene.said == []
    scene.serving("c")
    await scene.begin()
    assert len(scene.said) == 1


@pytest.mark.parametrize(
    ("rank", "servers", "said"),
    [
        ("", ("", ""), []),
        (
            "0",
            ("1", "2"),
            ["off, because no rollout server shares a GPU with the learner"],
        ),
        (
            "0",
            ("1", "0"),
            ["pause, because rollout server b shares a GPU with the learner"],
        ),
    ],
    ids=["CPUs", "own GPUs", "a shared GPU"],
)
async def test_by_default_engines_on_the_learners_gpus_rest_and_no_others(
    rank, servers, said
):
    scene = Scene(None)
    scene.compute_on(rank, *servers)
    resting = [
        session
        for session, gpu in zip(scene.sessions, servers, strict=True)
        if gpu == "0"
    ]
    for _ in range(2):
        orders = await scene.begin(*resting)
        assert [order.give_back for order in orders] == [False] * len(resting)
        scene.turns.trainer_asks(())
        sents = [sent(session) for session in scene.sessions]
        assert sents == [
            ["wake"] if session in resting else [] for session in scene.sessions
        ]
    assert list(filter(scene.turns.are_taken_by, scene.sessions)) == resting
    assert scene.said == [f"turns: {line}" for line in said]


async def test_the_log_corrects_itself_when_a_server_joins_on_the_learners_gpu() -> (
    None
):
    scene = Scene(None)
    scene.compute_on("0", "1", "1")
    await scene.begin()
    scene.compute_on("0", "1", "0")
    await scene.begin(scene.sessions[1])
    scene.compute_on("0", "1", "1")
    await scene.begin()
    assert [line.split(",")[0] for line in scene.said] == ["turns: off", "turns: pause"]


@pytest.mark.parametrize(
    ("server", "rank", "shared"),
    [
        (place("h"), place("h"), True),
        (place("h"), place("i"), False),
        (place("h", "0", "1"), place("h", "1"), True),
        (place("h", "0"), place("h", "1"), False),
        (place("h", "0"), place("i", "0"), False),
        (place("h", "0"), place("h"), False),
    ],
)
def test_a_device_is_shared_within_one_host_only(
    server: Place, rank: Place, shared: bool
) -> None:
    assert shares(server, rank) is shared

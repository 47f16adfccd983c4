"""Calls to environments that clients serve: no client waits for another that does not read."""

import asyncio
from collections.abc import AsyncIterator

from slipstream.learner.controller.loop_clock import LoopClock
from slipstream.learner.controller.tasks.relay import ClientSession, Relay
from slipstream.v1 import environment_pb2 as pb
from slipstream.v1 import fleet_pb2
from support.rigs.waiting import LIMIT_S, until


class Stream:
    """One direction of a stream, written by the test."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue = asyncio.Queue()

    def say(self, message: object) -> None:
        self._messages.put_nowait(message)

    async def __aiter__(self) -> AsyncIterator:
        while True:
            yield await self._messages.get()


class Clients:
    """A relay with clients, each known by the environment that it serves."""

    def __init__(self, **limits: int) -> None:
        self.left: list[str] = []
        self.relay = Relay(
            lambda client: "",
            lambda client: self.left.append(client.spec.name),
            LoopClock(),
            **limits,
        )
        self.said: dict[str, Stream] = {}

    async def come(self, name: str) -> AsyncIterator[pb.WorkerCommand]:
        """The commands for a client, which reads when they are asked for."""
        said = self.said[name] = Stream()
        spec = pb.EnvironmentSpec(name=name)
        said.say(pb.WorkerMessage(hello=pb.WorkerHello(spec=spec, num_tasks=1, max_episodes=4)))
        commands = self.relay.serve_episodes(aiter(said), None)  # type: ignore[arg-type]
        first = asyncio.ensure_future(anext(commands))
        await until(lambda: name in self.relay._clients)
        self.first = first
        return commands


def call(name: str, number: int) -> fleet_pb2.EnvironmentCall:
    command = pb.WorkerCommand(call_id=number, ping=pb.PingCommand())
    return fleet_pb2.EnvironmentCall(environment=name, command=command)


async def test_a_client_that_does_not_read_holds_up_no_other() -> None:
    clients, calls = Clients(max_messages=3), Stream()
    await clients.come("frozen")
    frozen = clients.first
    await clients.come("alive")
    answers = clients.relay.call_environments(aiter(calls))
    calls.say(call("frozen", 1))
    answer_comes = asyncio.ensure_future(anext(answers))
    async with asyncio.timeout(LIMIT_S):
        await frozen
    # The relay reads no more: three messages wait, the rest finds no room.
    for number in range(2, 7):
        calls.say(call("frozen", number))
    calls.say(call("alive", 7))
    async with asyncio.timeout(LIMIT_S):
        refused = [await answer_comes, await anext(answers)]
        command = await clients.first
    assert [answer.message.call_id for answer in refused] == [5, 6]
    assert {answer.message.failure.message for answer in refused} == {
        "the client that serves frozen does not read"
    }
    clients.said["alive"].say(pb.WorkerMessage(call_id=command.call_id, pong=pb.Pong()))
    async with asyncio.timeout(LIMIT_S):
        answer = await anext(answers)
    assert answer.message.call_id == 7
    assert answer.message.WhichOneof("message") == "pong"


async def test_a_client_that_leaves_is_reported_though_a_server_does_not_read() -> None:
    clients, calls = Clients(max_messages=2), Stream()
    commands = await clients.come("leaving")
    answers = clients.relay.call_environments(aiter(calls))
    waiting = asyncio.ensure_future(anext(answers))
    async with asyncio.timeout(LIMIT_S):
        calls.say(call("leaving", 1))
        await clients.first
        for number in (2, 3):
            calls.say(call("leaving", number))
            await anext(commands)
        # Three open calls fail, and there is room for two answers.
        await commands.aclose()  # type: ignore[attr-defined]
        first = await waiting
        rest = [answer async for answer in answers]
    assert clients.left == ["leaving"]
    assert first.message.failure.message == "the client that served leaving left"
    assert len(rest) == 1


def test_a_client_has_an_outbox_of_its_own() -> None:
    one, other = (ClientSession(pb.EnvironmentSpec(), 1, 1) for _ in range(2))
    assert one.outbox.put(pb.WorkerCommand())
    assert other.outbox.pop() is None


async def test_an_agent_is_followed_by_one_call_and_its_last_parts_leave_none_open() -> None:
    clients, calls = Clients(), Stream()
    commands = await clients.come("agent")
    answers = clients.relay.call_environments(aiter(calls))
    for number, command in enumerate(
        (
            pb.WorkerCommand(follow_agent=pb.FollowAgentCommand(episode_key="e")),
            pb.WorkerCommand(reply_part=pb.ReplyPart(episode_key="e", is_last=True)),
        ),
        start=4,
    ):
        command.call_id = number
        calls.say(fleet_pb2.EnvironmentCall(environment="agent", command=command))
    comes = asyncio.ensure_future(anext(answers))
    async with asyncio.timeout(LIMIT_S):
        followed = await clients.first
        assert (await anext(commands)).reply_part.is_last
    assert len(clients.relay._calls) == 1
    for answer in (
        pb.WorkerMessage(agent_call=pb.AgentCall(call=1)),
        pb.WorkerMessage(agent_call=pb.AgentCall(call=2)),
        pb.WorkerMessage(agent_result=pb.AgentResult(reward=1.0)),
    ):
        answer.call_id = followed.call_id
        clients.said["agent"].say(answer)
    async with asyncio.timeout(LIMIT_S):
        came = [(await comes).message, *[(await anext(answers)).message for _ in range(2)]]
    assert [message.call_id for message in came] == [4, 4, 4]
    assert [message.agent_call.call for message in came] == [1, 2, 0]
    assert came[-1].agent_result.reward == 1.0
    assert not clients.relay._calls


async def test_an_agent_whose_last_part_finds_no_room_is_told_as_lost() -> None:
    clients, calls = Clients(max_messages=3), Stream()
    await clients.come("frozen")
    answers = clients.relay.call_environments(aiter(calls))
    follow = pb.WorkerCommand(call_id=1, follow_agent=pb.FollowAgentCommand(episode_key="e"))
    calls.say(fleet_pb2.EnvironmentCall(environment="frozen", command=follow))
    answer_comes = asyncio.ensure_future(anext(answers))
    async with asyncio.timeout(LIMIT_S):
        await clients.first
    for number in range(2, 5):
        calls.say(call("frozen", number))
    last = pb.WorkerCommand(call_id=5, reply_part=pb.ReplyPart(episode_key="e", is_last=True))
    calls.say(fleet_pb2.EnvironmentCall(environment="frozen", command=last))
    async with asyncio.timeout(LIMIT_S):
        lost = [await answer_comes, await anext(answers)]
    assert [answer.message.call_id for answer in lost] == [5, 1]
    assert {answer.message.failure.message for answer in lost} == {
        "the client that serves frozen does not read"
    }

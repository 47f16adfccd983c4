"""The calls of an agent that one command follows, from a stream that the test plays."""

import asyncio

import pytest
from slipstream.core.errors import EnvironmentFailed
from slipstream.rollout_server.episodes.calls import CallTable, StreamSession
from slipstream.v1 import environment_pb2 as pb
from slipstream.v1 import trajectory_pb2
from support.rigs.waiting import LIMIT_S

LOST = trajectory_pb2.FAILURE_KIND_INFRASTRUCTURE


class Stream:
    """A session, and the commands that it has sent."""

    def __init__(self) -> None:
        self.sent: list[pb.WorkerCommand] = []
        self.table = CallTable(self.sent.append)

        async def raised(error: EnvironmentFailed) -> EnvironmentFailed:
            return error

        self.session = StreamSession(
            self.table, "e", LIMIT_S, on_timeout=raised, on_close=lambda _: None
        )

    def say(self, **answer: object) -> None:
        """Answers the command that follows the agent."""
        (follow,) = [
            message for message in self.sent if message.HasField("follow_agent")
        ]
        self.table.answered(pb.WorkerMessage(call_id=follow.call_id, **answer))

    async def follow(self) -> None:
        """Waits for the first call."""
        waiting = asyncio.ensure_future(self.next())
        await asyncio.sleep(0)
        self.say(agent_call=pb.AgentCall(call=1))
        assert (await waiting).call == 1

    async def next(self) -> pb.AgentCall | pb.AgentResult:
        async with asyncio.timeout(LIMIT_S):
            return await self.session.next_call()


async def test_one_command_brings_all_calls_of_an_agent_and_its_result() -> None:
    stream = Stream()
    await stream.follow()
    stream.say(agent_call=pb.AgentCall(call=2))
    stream.say(agent_call=pb.AgentCall(call=3))
    assert [(await stream.next()).call for _ in range(2)] == [2, 3]
    stream.say(agent_result=pb.AgentResult(reward=0.5))
    assert await stream.next() == pb.AgentResult(reward=0.5)
    assert len(stream.sent) == 1


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_failure_behind_calls_is_raised_behind_them(is_lost: bool) -> None:
    stream = Stream()
    await stream.follow()
    stream.say(agent_call=pb.AgentCall(call=2))
    if is_lost:
        stream.table.end(LOST, "the worker is gone")
    else:
        stream.say(
            failure=trajectory_pb2.Failure(kind=LOST, message="the worker is gone")
        )
    assert (await stream.next()).call == 2
    with pytest.raises(EnvironmentFailed, match="the worker is gone") as caught:
        await stream.next()
    assert caught.value.kind == LOST


async def test_calls_that_nobody_takes_end_the_episode_and_not_the_memory() -> None:
    stream = Stream()
    await stream.follow()
    for number in range(2, 3000):
        stream.say(agent_call=pb.AgentCall(call=number))
    stream.table.end(LOST, "the worker is gone")
    for number in range(2, 1025):
        assert (await stream.next()).call == number
    with pytest.raises(EnvironmentFailed, match="1024 calls of an agent wait"):
        await stream.next()


async def test_the_last_part_of_a_reply_waits_for_no_answer() -> None:
    stream = Stream()
    first = asyncio.ensure_future(
        stream.session.reply_part(1, pb.ReplyPart(body=b"a", status=200))
    )
    await asyncio.sleep(0)
    assert not first.done()
    stream.table.answered(
        pb.WorkerMessage(call_id=stream.sent[-1].call_id, pong=pb.Pong())
    )
    async with asyncio.timeout(LIMIT_S):
        await first
        await stream.session.reply_part(1, pb.ReplyPart(body=b"b", is_last=True))
    assert [command.reply_part.body for command in stream.sent] == [b"a", b"b"]
    stream.table.end(LOST, "the worker is gone")
    with pytest.raises(EnvironmentFailed, match="the worker is gone"):
        await stream.session.reply_part(2, pb.ReplyPart(body=b"c", is_last=True))


@pytest.mark.parametrize("is_agent", [False, True])
async def test_a_session_in_which_the_environment_failed_by_itself_has_its_answer(
    is_agent,
) -> None:
    closed: list[bool] = []
    failure = trajectory_pb2.Failure(
        kind=trajectory_pb2.FAILURE_KIND_ENVIRONMENT, message="why"
    )

    def fail(command: pb.WorkerCommand) -> None:
        answer = pb.WorkerMessage(call_id=command.call_id, failure=failure)
        asyncio.get_running_loop().call_soon(table.answered, answer)

    table = CallTable(fail)
    session = StreamSession(table, "e", LIMIT_S, on_close=closed.append)
    with pytest.raises(EnvironmentFailed, match="why"):
        await (session.next_call() if is_agent else session.step("x", truncated=False))
    session.close()
    assert closed == [True]


async def test_a_call_that_is_over_is_forgotten() -> None:
    stream = Stream()
    await stream.follow()
    stream.say(agent_result=pb.AgentResult())
    task = asyncio.create_task(stream.session.reset(0, 0))
    await asyncio.sleep(0)
    answer = pb.WorkerMessage(
        call_id=stream.sent[-1].call_id, observation=pb.Observation()
    )
    stream.table.answered(answer)
    await task
    # The call is answered too late, or twice.
    stream.table.answered(answer)
    ping = pb.WorkerCommand(ping=pb.PingCommand(episode_key="e"))
    with pytest.raises(EnvironmentFailed, match="no answer to ping"):
        await stream.table.call(ping, timeout_s=0.0)
    assert not stream.table._open


@pytest.mark.parametrize(
    ("reply_bytes", "num_metrics", "message"),
    [
        (9 << 20, 0, "and judge_group() gets at most 16777216: lower group_size or"),
        (1, 2000, "judge_group() cannot get its group: "),
    ],
)
async def test_a_group_that_no_message_holds_is_refused_before_it_is_sent(
    reply_bytes: int,
    num_metrics: int,
    message: str,
) -> None:
    stream = Stream()
    reply = pb.StepCommand(reply="a" * reply_bytes)
    metrics = {f"metric {number}": 1.0 for number in range(num_metrics)}
    episode = pb.FinishedEpisode(
        replies=[reply],
        metrics=metrics,
    )
    with pytest.raises(EnvironmentFailed) as fault:
        await stream.session.judge_group([episode, episode])
    assert message in str(fault.value)
    assert stream.sent == []


async def test_calls_beside_an_episode_fail_and_its_own_and_pings_stay_open() -> None:
    sent: list[pb.WorkerCommand] = []
    table = CallTable(sent.append)
    own = table.follow(pb.WorkerCommand(step={"episode_key": "a"}))
    other = table.follow(pb.WorkerCommand(step={"episode_key": "b"}))
    agent = table.follow(pb.WorkerCommand(follow_agent={"episode_key": "c"}))
    ping = table.follow(pb.WorkerCommand(ping={"episode_key": "b"}))
    load = table.follow(pb.WorkerCommand(load={}))
    bystander = EnvironmentFailed(trajectory_pb2.FAILURE_KIND_BYSTANDER, "held up")
    table.fail_beside("a", bystander)
    assert not agent.empty()
    for waiting in (own, ping, load):
        assert waiting.empty()
    failure = other.get_nowait()
    assert str(failure) == "held up"
    assert failure.kind == bystander.kind
    # An answer that comes too late is dropped, and later calls pass.
    late_id = sent[1].call_id
    table.answered(pb.WorkerMessage(call_id=late_id))
    assert other.empty()
    later = table.follow(pb.WorkerCommand(step={"episode_key": "b"}))
    later_id = sent[-1].call_id
    table.answered(pb.WorkerMessage(call_id=later_id))
    assert not later.empty()


@pytest.mark.parametrize("kind", [trajectory_pb2.FAILURE_KIND_BYSTANDER, LOST])
async def test_an_episode_that_another_one_holds_up_was_not_judged(kind: int) -> None:
    sent: list[pb.WorkerCommand] = []
    judged: list[bool] = []
    table = CallTable(sent.append)
    session = StreamSession(table, "b", LIMIT_S, on_close=judged.append)
    waiting = asyncio.ensure_future(session.step("x", truncated=False))
    await asyncio.sleep(0)
    failure = EnvironmentFailed(kind, "held up")
    table.fail_beside("a", failure)
    with pytest.raises(EnvironmentFailed, match="^held up$"):
        await waiting
    session.close()
    assert judged == [kind == LOST]

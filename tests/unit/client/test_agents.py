import asyncio
import contextlib
import json
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator

import numpy as np
import pytest
from slipstream.client import (
    AgentEnvironment,
    AgentOutcome,
    Endpoint,
    agent_episodes,
    episode_host,
)
from slipstream.client.agent_episodes import AgentEpisode
from slipstream.client.agent_exchange import MAX_OPEN_CALLS, CallExchange
from slipstream.client.agent_gateway import MAX_BODY_BYTES, Gateway
from slipstream.client.environment_loader import CallTracker
from slipstream.client.episode_host import EpisodeHost, answer_commands
from slipstream.protocol.running_calls import RunningCalls
from slipstream.v1 import environment_pb2 as pb
from slipstream.v1 import trajectory_pb2
from support.fakes.scripted_server import (
    Episode,
    Handler,
    answers,
    as_json,
    chat_chunk,
    chat_reply,
    event,
    never,
)
from support.rigs.waiting import LIMIT_S, until

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

ENVIRONMENT = trajectory_pb2.FAILURE_KIND_ENVIRONMENT


class Agent(AgentEnvironment[str]):
    """The tasks of all agents here."""

    def tasks(self) -> list[str]:
        return ["one", "two", "three"]


def chat(endpoint: Endpoint) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0
    )


async def say(client: openai.AsyncOpenAI, text: str) -> str:
    messages = [{"role": "user", "content": text}]
    reply = await client.chat.completions.create(model="policy", messages=messages)
    return reply.choices[0].message.content


@contextlib.asynccontextmanager
async def episode_of(agent: Agent, handler: Handler = never, **fields: object):
    host = EpisodeHost(agent, tracker=fields.pop("tracker", None))
    try:
        async with asyncio.timeout(LIMIT_S):
            yield Episode(host, handler, **fields)
    finally:
        await host.close_all()


async def played(
    agent: Agent, handler=None, **fields: object
) -> tuple[Episode, pb.WorkerMessage]:
    async with episode_of(agent, handler or answers(str.upper), **fields) as play:
        return play, await play.run()


def request(
    url: str, key: str, body: bytes = b"{}", **headers: str
) -> tuple[int, dict, bytes]:
    request = urllib.request.Request(
        url, body, {"Authorization": f"Bearer {key}", **headers}
    )
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


async def test_an_async_agent_talks_through_openais_client_and_is_scored() -> None:
    class Asks(Agent):
        async def run(self, task, endpoint):
            async with chat(endpoint) as client:
                replies = [await say(client, word) for word in (task, "again")]
            return AgentOutcome(
                reward=float(replies == ["TWO", "AGAIN"]),
                metrics={"turns": len(replies)},
                shares={"reviewer": 0.5},
                rewards={"player-1": -2.0},
                reply_rewards={"a": True, "b": np.array([0.5, 1.0])},
            )

    play, answer = await played(Asks(), task_index=1)
    result = answer.agent_result
    assert result.reward == 1.0
    assert dict(result.metrics) == {"turns": 2.0}
    assert dict(result.shares) == {"reviewer": 0.5}
    assert dict(result.rewards) == {"player-1": -2.0}
    assert [
        (r.reply_id, r.reward, [*r.token_rewards]) for r in result.reply_rewards
    ] == [
        ("a", 1.0, []),
        ("b", 0.0, [0.5, 1.0]),
    ]
    assert [call.call for call in play.calls] == [1, 2]
    first = play.calls[0]
    assert (first.method, first.path, first.branch) == (
        "POST",
        "/v1/chat/completions",
        "",
    )
    assert json.loads(first.body)["messages"] == [{"role": "user", "content": "two"}]
    names = {header.name for header in first.headers}
    assert "content-type" in names
    assert not names & {"authorization", "x-api-key", "cookie"}


async def test_parts_of_a_streamed_reply_pass_as_they_come() -> None:
    went_on = asyncio.Event()

    class Streams(Agent):
        async def run(self, task, endpoint):
            async with chat(endpoint) as client:
                messages = [{"role": "user", "content": task}]
                stream = await client.chat.completions.create(
                    model="m", messages=messages, stream=True
                )
                words = []
                async for chunk in stream:
                    words.append(chunk.choices[0].delta.content)
                    # The server sends the second part only now.
                    went_on.set()
            return float("".join(words) == "a b")

    async def halting(call):
        yield event(chat_chunk("a"), first=True)
        await went_on.wait()
        yield event(chat_chunk(" b"))
        yield event(chat_chunk("", "stop"))
        yield event("[DONE]", last=True)

    _, answer = await played(Streams(), halting)
    assert answer.agent_result.reward == 1.0


@pytest.mark.parametrize("name", ["", "a/b", "x" * 65, "ä"])
def test_a_branch_has_a_plain_name(name: str) -> None:
    with pytest.raises(ValueError, match="a branch has 1 to 64 letters"):
        Endpoint("http://127.0.0.1:1/t", "k").branch(name)


async def test_many_episodes_at_once_do_not_see_each_other() -> None:
    class Counts(Agent):
        async def run(self, task, endpoint):
            async with chat(endpoint) as client:
                replies = await asyncio.gather(
                    *(say(client, f"{self.seed}-{i}") for i in range(3))
                )
            return float(sorted(replies) == [f"{self.seed}-{i}" for i in range(3)])

    host = EpisodeHost(Counts())

    async def play(seed: int) -> float:
        episode = Episode(host, answers(str), key=f"e{seed}")
        command = pb.ResetCommand(episode_key=episode.key, seed=seed)
        await episode.command(reset=command)
        replies = []
        while (answer := await episode.next()).HasField("agent_call"):
            assert json.loads(answer.agent_call.body)["messages"][0][
                "content"
            ].startswith(f"{seed}-")
            replies.append(asyncio.create_task(episode.reply(answer.agent_call)))
        await asyncio.gather(*replies)
        await episode.close()
        return answer.agent_result.reward

    assert await asyncio.gather(*map(play, range(20))) == [1.0] * 20
    await host.close_all()


async def test_calls_without_the_secret_of_an_open_episode_are_refused() -> None:
    seen: dict[str, int] = {}
    endpoints: list[Endpoint] = []

    class Tries(Agent):
        def run(self, task, endpoint):
            endpoints.append(endpoint)
            url = f"{endpoint.base_url}/chat/completions"
            seen["right"] = request(url, endpoint.api_key)[0]
            seen["wrong"] = request(url, "sk-slipstream-guess")[0]
            seen["none"] = request(url, "")[0]
            other = endpoint.anthropic_url.rpartition("/")[0] + "/guess/v1/models"
            seen["path"] = request(other, endpoint.api_key)[0]
            seen["outside"] = request(
                f"{endpoint.anthropic_url}/admin", endpoint.api_key
            )[0]
            body = {"Content-Encoding": "gzip"}
            seen["packed"] = request(url, endpoint.api_key, **body)[0]
            seen["branch"] = request(
                f"{endpoint.anthropic_url}/b/a%20b/v1/x", endpoint.api_key
            )[0]
            return 0.0

    async def fine(call):
        yield as_json(chat_reply("x"))

    async with episode_of(Tries(), fine) as episode:
        assert (await episode.run()).agent_result.reward == 0.0
        assert seen == {
            "right": 200, "wrong": 401, "none": 401, "path": 401, "outside": 404, "packed": 415,
            "branch": 404,
        }  # fmt: skip
        url = f"{endpoints[0].base_url}/chat/completions"
        status, _, body = await asyncio.to_thread(request, url, endpoints[0].api_key)
    assert status == 401
    error = json.loads(body)
    assert (error["type"], error["error"]["type"]) == ("error", "authentication_error")
    assert len(episode.calls) == 1


async def test_a_body_that_is_too_large_is_refused_as_clients_know_it() -> None:
    class Huge(Agent):
        async def run(self, task, endpoint):
            async with chat(endpoint) as client:
                try:
                    await say(client, "x" * MAX_BODY_BYTES)
                except openai.APIStatusError as error:
                    return float(
                        error.status_code == 413 and error.type == "request_too_large"
                    )
            return 0.0

    class HugeChunks(Agent):
        async def run(self, task, endpoint):
            async def body():
                for _ in range(9):
                    yield b"x" * (1 << 20)

            async with chat(endpoint) as client:
                answer = await client._client.post(
                    f"{endpoint.base_url}/responses",
                    content=body(),
                    headers={"authorization": f"Bearer {endpoint.api_key}"},
                )
                assert await say(client, "x") == "X"
            return float(answer.status_code == 413)

    for agent in (Huge(), HugeChunks()):
        _, answer = await played(agent)
        assert answer.agent_result.reward == 1.0


async def test_a_flood_of_calls_is_held_back() -> None:
    released = asyncio.Event()

    class Floods(Agent):
        async def run(self, task, endpoint):
            async with chat(endpoint) as client:
                calls = [
                    asyncio.create_task(say(client, "x")) for _ in range(MAX_OPEN_CALLS)
                ]
                await until(lambda: len(play.calls) >= MAX_OPEN_CALLS)
                with pytest.raises(openai.RateLimitError) as refused:
                    await say(client, "one more")
                assert refused.value.response.headers["retry-after"] == "1"
                released.set()
                await asyncio.gather(*calls)
                assert await say(client, "x") == "X"
            return 1.0

    async def held(call):
        await released.wait()
        async for part in answers(str.upper)(call):
            yield part

    async with episode_of(Floods(), held) as play:
        answer = await play.run()
    assert answer.agent_result.reward == 1.0, answer
    assert len(play.calls) == MAX_OPEN_CALLS + 1


async def test_the_server_is_told_of_a_client_that_hangs_up() -> None:
    class Impatient(Agent):
        async def run(self, task, endpoint):
            async with chat(endpoint) as client:
                asking = asyncio.create_task(say(client, "x"))
                await until(lambda: play.calls)
                asking.cancel()
                await asyncio.wait([asking])
            await until(lambda: play.abandoned)
            return 1.0

    async with episode_of(Impatient()) as play:
        assert (await play.run()).agent_result.reward == 1.0
    assert play.abandoned == [1]


async def test_an_agent_that_returns_with_open_calls_ends_them() -> None:
    class Leaves(Agent):
        async def run(self, task, endpoint):
            async def ask() -> None:
                async with chat(endpoint) as client:
                    with pytest.raises(openai.AuthenticationError):
                        await say(client, "x")

            lefts.append(asyncio.create_task(ask()))
            await until(lambda: play.calls)
            return 0.5

    lefts: list[asyncio.Task[None]] = []
    async with episode_of(Leaves()) as play:
        assert (await play.run()).agent_result.reward == 0.5
        await lefts[0]


class Gives(Agent):
    """Returns an outcome, or raises it."""

    def __init__(self, outcome: object) -> None:
        self._outcome = outcome

    def _end(self) -> object:
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    async def run(self, task, endpoint):
        return self._end()


class GivesPlainly(Gives):
    def run(self, task, endpoint):
        return self._end()


class Refused(Agent):
    async def run(self, task, endpoint):
        async with chat(endpoint) as client:
            return float(await say(client, task))


@pytest.mark.parametrize(
    ("agent", "cause"),
    [
        (Gives(KeyError("x")), "KeyError: 'x' (test_agents.py:"),
        (Gives(SystemExit(3)), "SystemExit: 3 (test_agents.py:"),
        (
            Gives(BaseExceptionGroup("g", [SystemExit()])),
            "SystemExit (test_agents.py:",
        ),
        (
            Gives(asyncio.CancelledError()),
            "its own code has cancelled the call: CancelledError (test_agents.py:",
        ),
        (Gives(None), "run() must return a number or an AgentOutcome, got None"),
        (Gives(float("nan")), "the reward must be a finite number, got nan"),
        (
            Gives(AgentOutcome(1.0, shares={"a/b": 1.0})),
            "shares are of branches, with names of 1 ",
        ),
        (
            Gives(AgentOutcome(1.0, shares=[("a", 1.0)])),
            "shares must map branches to numbers, got",
        ),
        (
            Gives(AgentOutcome(1.0, rewards={"a/b": 1.0})),
            "rewards are of branches, with names of ",
        ),
        (
            Gives(AgentOutcome(1.0, reply_rewards={"a": "good"})),
            "the reward of reply 'a' must be a finite number, got 'good'",
        ),
        (
            Gives(AgentOutcome(1.0, reply_rewards={"a": [0.0, float("nan")]})),
            "number 2 of the reward of reply 'a' must be a finite number, got nan",
        ),
        (Refused(), "BadRequestError: Error code: 400"),
        (GivesPlainly(KeyError("x")), "KeyError: 'x' (test_agents.py:"),
        (GivesPlainly(SystemExit(3)), "SystemExit: 3 (test_agents.py:"),
        (GivesPlainly(GeneratorExit()), "GeneratorExit (test_agents.py:"),
        (GivesPlainly(StopIteration()), "StopIteration (test_agents.py:"),
        (Agent(), "NotImplementedError: Agent must define run()"),
    ],
)
async def test_a_run_that_goes_wrong_fails_its_episode_alone(
    agent: Agent, cause: str
) -> None:
    async def refuse(call):
        yield as_json(
            {"error": {"message": "no", "type": "invalid_request_error"}}, 400
        )

    _, answer = await played(agent, refuse)
    assert answer.failure.kind == ENVIRONMENT
    assert answer.failure.message.startswith(cause)
    assert "\n" not in answer.failure.message


async def test_an_error_of_a_library_is_placed_in_the_agents_code() -> None:
    async def refuse(call):
        yield as_json({"error": {"message": "no"}}, 400)

    _, answer = await played(Refused(), refuse)
    assert answer.failure.message.endswith(" in say)")


@pytest.mark.parametrize("is_plain", [False, True])
async def test_closing_an_episode_interrupts_its_run(is_plain: bool) -> None:
    ended: list[str] = []

    class Waits(Agent):
        async def run(self, task, endpoint):
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("run")

        async def close(self) -> None:
            ended.append("close")

    class Spins(Waits):
        def run(self, task, endpoint):
            try:
                while True:
                    time.sleep(0.001)
            finally:
                ended.append("run")

    async with episode_of(Spins() if is_plain else Waits()) as episode:
        await episode.reset()
        waiting = asyncio.create_task(episode.next())
        place = ""
        while not place:
            place = (
                await episode.command(ping={"episode_key": episode.key})
            ).pong.place
            await asyncio.sleep(0.005)
        assert place.startswith("test_agents.py:")
        await episode.close()
        assert (await waiting).failure.message == "the episode was closed"
    assert ended == ["run", "close"]


async def test_a_thread_with_the_number_of_one_that_has_ended_is_not_interrupted() -> (
    None
):
    """Linux gives the number again, and the loop may not have heard of the end."""

    class Plain(Agent):
        def run(self, task, endpoint):
            return 1.0

    gateway = Gateway()
    ended = AgentEpisode(Plain(), "one", gateway, on_busy=lambda *_: None)
    waiting = asyncio.create_task(ended.next())
    # Once for `next`, once for the run that it starts.
    for _ in range(2):
        await asyncio.sleep(0)
    waiting.cancel()
    ended._thread.join()
    stop = threading.Event()
    raised = []

    def other() -> None:
        try:
            while not stop.is_set():
                time.sleep(0.001)
        except SystemExit as error:
            raised.append(error)

    threads: list[threading.Thread] = []
    while not any(thread.ident == ended._thread.ident for thread in threads):
        assert len(threads) < 50
        threads.append(threading.Thread(target=other))
        threads[-1].start()
    assert await ended.end()
    time.sleep(0.1)
    stop.set()
    for thread in threads:
        thread.join()
    assert not raised
    await gateway.close()


async def test_an_agent_is_in_a_call_while_its_own_code_runs_not_while_it_waits() -> (
    None
):
    seen: dict[str, tuple[str, ...]] = {}
    record = os.memfd_create("calls")

    class Looks(Agent):
        async def run(self, task, endpoint):
            seen["before"] = RunningCalls.read(record).running
            async with chat(endpoint) as client:
                await say(client, task)
            seen["after"] = RunningCalls.read(record).running
            return 0.0

    async def look(call):
        seen["waiting"] = RunningCalls.read(record).running
        yield as_json(chat_reply("x"))

    async with episode_of(Looks(), look, tracker=CallTracker(record)) as episode:
        assert (await episode.run()).HasField("agent_result")
    assert seen == {"before": ("a",), "waiting": (), "after": ("a",)}
    assert RunningCalls.read(record).running == ()


async def test_no_part_of_an_answer_waits_for_the_acknowledgement_of_another() -> None:
    gateway = Gateway()
    url = gateway.open(CallExchange(on_waiting=lambda _: None)).anthropic_url
    port = int(url.split(":")[2].partition("/")[0])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await until(lambda: gateway._server.server_state.connections, LIMIT_S)
    (connection,) = gateway._server.server_state.connections
    accepted = connection.transport.get_extra_info("socket")
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    writer.close()
    await writer.wait_closed()
    await gateway.close()


async def test_runs_that_do_not_end_are_named_and_bounded(capsys, monkeypatch):
    for module in (agent_episodes, episode_host):
        monkeypatch.setattr(module, "END_LIMIT_S", 0.2)
    monkeypatch.setattr(episode_host, "MAX_LEFT_RUNS", 2)
    released = threading.Event()

    class Stays(Agent):
        def run(self, task, endpoint):
            while not released.is_set():
                try:
                    released.wait(0.01)
                except SystemExit:
                    continue

    host = EpisodeHost(Stays())
    for key in ("a", "b"):
        episode = Episode(host, never, key=key)
        await episode.reset()
        following = asyncio.create_task(episode.next())
        await until(lambda key=key: "test_agents.py" in host.place(key))
        await episode.close()
        assert (await following).failure.message == "the episode was closed"
        errors = capsys.readouterr().err
        assert errors.startswith(
            f"the run of episode {key} did not end within 0.2 s (test_agents.py"
        )
    reset = pb.WorkerCommand(reset=pb.ResetCommand(episode_key="c"))
    cause = "2 runs go on after the end of their episodes, the limit is 2: run() must end when"
    assert (await host.answer(reset)).failure.message.startswith(cause)
    released.set()
    async with asyncio.timeout(LIMIT_S):
        while (await host.answer(reset)).HasField("failure"):
            await host.answer(pb.WorkerCommand(close=pb.CloseCommand(episode_key="c")))
            await asyncio.sleep(0.005)
    await host.close_all()


async def test_a_worker_follows_an_agent_and_does_not_answer_the_last_parts() -> None:
    class Asks(Agent):
        async def run(self, task, endpoint):
            async with chat(endpoint) as client:
                return float(await say(client, "2") + await say(client, "5"))

    sent: asyncio.Queue[pb.WorkerMessage] = asyncio.Queue()

    async def commands() -> AsyncIterator[pb.WorkerCommand]:
        yield pb.WorkerCommand(call_id=1, reset=pb.ResetCommand(episode_key="a"))
        assert (await sent.get()).observation.is_agent
        yield pb.WorkerCommand(
            call_id=2, follow_agent=pb.FollowAgentCommand(episode_key="a")
        )
        for number, text in enumerate("34", start=1):
            message = await sent.get()
            assert (message.call_id, message.agent_call.call) == (2, number)
            part = as_json(chat_reply(text))
            part.episode_key = "a"
            part.call = number
            yield pb.WorkerCommand(call_id=2 + number, reply_part=part)
        result.append(await sent.get())

    result: list[pb.WorkerMessage] = []
    await asyncio.wait_for(
        answer_commands(EpisodeHost(Asks()), commands(), sent.put), LIMIT_S
    )
    assert (result[0].call_id, result[0].agent_result.reward) == (2, 34.0)
    assert sent.empty()


async def test_commands_that_do_not_fit_are_refused() -> None:
    async with episode_of(Gives(1.0)) as episode:
        assert (await episode.next()).failure.message == "episode a is not open"
        await episode.reset()
        # A part for a call that is over takes nothing and is answered.
        for key in "ab":
            answer = await episode.command(reply_part={"episode_key": key, "call": 7})
            assert answer.HasField("pong")
        await episode.close()

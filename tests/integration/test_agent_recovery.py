"""Agents that lose their worker, server or controller: real workers, an engine with a script."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from slipstream.core.settings.role_sections import AgentsSection
from slipstream.core.types import FailureKind, Status, Trajectory
from slipstream.v1 import fleet_pb2, trajectory_pb2
from support.fakes.agent_rig import agent_config, script, scripted_engine
from support.fakes.chat_models import make_chat_model
from support.rigs.episode_server import SAMPLING, EpisodeServer, recorded, serving
from support.rigs.waiting import until

pytestmark = [
    pytest.mark.long,
    pytest.mark.asyncio(loop_scope="module"),
]

AGENTS = ("Turns", "Streaming", "Parallel", "Diverging", "Raising", "Waiting")
TURNS = 6


@pytest.fixture(scope="module")
def marks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("marks")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(
    tmp_path_factory: pytest.TempPathFactory, marks: Path
) -> AsyncIterator[EpisodeServer]:
    folder = make_chat_model(tmp_path_factory.mktemp("model"), with_weights=False)
    agents = AgentsSection(recover=True)
    config = agent_config(folder).model_copy(update={"agents": agents})
    engine = scripted_engine(config, script)
    logs = tmp_path_factory.mktemp("logs")
    async with serving(
        config,
        engine,
        logs,
        heartbeat_timeout_s=0.5,
    ) as server:
        for agent in AGENTS:
            args = json.dumps({"marks": str(marks)})
            server.load("recovered_agents", f"{agent}Agent", args_json=args)
        yield server


@pytest.fixture(autouse=True)
def quiet(server: EpisodeServer, marks: Path) -> None:
    server.engine.samples.clear()
    for mark in marks.iterdir():
        mark.unlink()


def sampled_once(server: EpisodeServer, trajectory: Trajectory) -> bool:
    """Whether a trajectory has each reply that the engine gave, and has it once."""
    return sorted(recorded(trajectory)) == sorted(server.samples())


async def test_a_program_whose_worker_is_killed_goes_on_at_its_next_call(
    server,
) -> None:
    failed, ended = await server.run("TurnsAgent", max_attempts=2)
    assert failed.failure.kind is FailureKind.ENVIRONMENT
    assert "SIGKILL" in failed.failure.message
    assert (ended.status, ended.num_turns) == (Status.COMPLETED, TURNS)
    assert ended.reward == 1.0
    assert sampled_once(server, ended)
    num_tokens = failed.num_sampled_tokens
    assert ended.metrics["recovered_calls"] == 3
    assert ended.metrics["recovered_tokens"] == num_tokens
    # Prompts have the ids of tool calls: other ids would be other tokens, and another branch.
    assert ended.branches == () or len(ended.branches) == 1
    assert "unasked_calls" not in ended.metrics
    recovered_logprobs = ended.behavior_logprobs[:num_tokens]
    assert recovered_logprobs.tolist() == failed.behavior_logprobs.tolist()


async def test_streams_of_all_apis_are_told_again_in_the_same_bytes(
    server, marks: Path
) -> None:
    failed, ended = await server.run("StreamingAgent", max_attempts=2)
    assert (ended.status, ended.num_turns) == (Status.COMPLETED, TURNS)
    assert sampled_once(server, ended)
    assert failed.num_turns == 3
    assert ended.metrics["recovered_calls"] == 3
    streams = [path.read_bytes() for path in marks.glob("stream-*")]
    first, second = sorted(streams, key=len)
    assert b"data: " in first
    assert b"message_start" in first
    assert second.startswith(first)


async def test_calls_that_are_open_together_are_found_by_what_they_ask(server) -> None:
    failed, ended = await server.run("ParallelAgent", max_attempts=2)
    assert failed.failure is not None
    assert (ended.status, ended.num_turns) == (Status.COMPLETED, 12)
    assert ended.metrics["recovered_calls"] > 0
    assert "unasked_calls" not in ended.metrics
    trained_replies = {tuple(reply) for _, reply in recorded(ended)}
    sampled_replies = {tuple(reply) for _, reply in server.samples()}
    assert len(ended.branches) == 4
    assert trained_replies <= sampled_replies
    # The calls that were open when the worker ended had no answer, and were sampled again.
    num_recovered = ended.metrics["recovered_calls"]
    num_again = len(server.samples()) - 12
    assert 0 <= num_again < 4
    assert failed.num_turns - num_recovered == num_again


async def test_a_program_that_asks_something_else_leaves_what_was_behind_it(
    server,
) -> None:
    failed, ended = await server.run("DivergingAgent", max_attempts=2)
    assert (failed.num_turns, ended.num_turns) == (3, TURNS)
    assert ended.metrics["recovered_calls"] == 2
    assert ended.metrics["unasked_calls"] == 1
    behind = server.samples()[2]
    assert behind not in recorded(ended)
    assert behind in recorded(failed)


async def test_an_attempt_that_failed_by_itself_is_played_anew(server) -> None:
    failed, ended = await server.run("RaisingAgent", max_attempts=2)
    assert "a bad day" in failed.failure.message
    assert ended.status is Status.COMPLETED
    assert "recovered_calls" not in ended.metrics
    assert len(server.samples()) == 2 + 3


async def rejoined(server: EpisodeServer, version: int) -> None:
    """Breaks the controller's stream, and serves weights to the server in its next epoch."""
    server.connection.hang_up()
    server.connection = await server.fleet.joined()
    await server.connection.serve_version(version)


def lease_again(server: EpisodeServer, group: str, environment: str) -> None:
    server.connection.lease(
        group,
        environment,
        members=[0],
        sampling=fleet_pb2.SamplingSettings(**SAMPLING),
        timeout_s=20.0,
        first_attempt=1,
        max_attempts=2,
    )


async def test_the_next_epoch_answers_what_a_lost_one_has_kept(
    server, marks: Path
) -> None:
    group = server.lease("WaitingAgent")
    calls = server.fleet.calls
    await until(
        lambda: (
            len(
                calls.get(
                    (group, 0),
                    (),
                )
            )
            == 3
        )
    )
    await rejoined(server, 2)
    (cancelled,) = await server.ended(group)
    assert (cancelled.status, cancelled.num_turns) == (Status.CANCELLED, 3)
    (marks / "go").touch()
    lease_again(server, group, "WaitingAgent")
    _, ended = await server.ended(group, 2)
    assert (ended.status, ended.num_turns) == (Status.COMPLETED, TURNS)
    assert sampled_once(server, ended)
    assert ended.metrics["recovered_calls"] == 3
    # The tokens keep the versions that sampled them.
    assert [span.version.step for span in ended.version_spans] == [
        1,
        2,
    ]


async def test_a_reply_that_no_controller_could_take_is_kept_at_the_next_join(
    server, marks
):
    server.fleet.takes_calls.clear()
    group = server.lease("WaitingAgent")
    await until(lambda: len(server.engine.samples) == 1)
    before = server.connection
    server.connection.hang_up()
    (cancelled,) = await server.ended(group)
    assert (cancelled.status, cancelled.num_turns) == (Status.CANCELLED, 1)
    # While the controller does not take the call, the server does not join it.
    await asyncio.sleep(1.0)
    assert server.fleet.connections.empty()
    server.fleet.takes_calls.set()
    server.connection = await server.fleet.joined()
    assert server.connection is not before
    assert len(server.fleet.calls[group, 0]) == 1
    await server.connection.serve_version(3)
    (marks / "go").touch()
    lease_again(server, group, "WaitingAgent")
    _, ended = await server.ended(group, 2)
    assert (ended.status, ended.num_turns) == (Status.COMPLETED, TURNS)
    assert sampled_once(server, ended)
    assert ended.metrics["recovered_calls"] == 1


async def test_episodes_of_an_evaluation_are_not_kept(server, marks: Path) -> None:
    (marks / "go").touch()
    group = server.lease(
        "WaitingAgent", purpose=trajectory_pb2.EPISODE_PURPOSE_EVALUATION
    )
    (ended,) = await server.ended(group)
    assert ended.status is Status.COMPLETED
    assert (group, 0) not in server.fleet.calls

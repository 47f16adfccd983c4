"""Episodes of agents from lease to trajectory: real workers and SDKs, an engine with a script."""

from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
from slipstream.core.types import Branch, Failure, FailureKind, PolicyVersion, Status
from slipstream.v1 import fleet_pb2
from support.fakes.agent_rig import agent_config, script, scripted_engine
from support.fakes.chat_models import make_chat_model
from support.rigs.episode_server import SAMPLING, EpisodeServer, recorded, serving
from support.rigs.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

AGENTS = ("Tool", "Plain", "Silent", "Hanging", "Raising", "Greedy", "Rewarding")
AGENTS += ("Stranger", "Miscounting", "Overpaid")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[EpisodeServer]:
    config = agent_config(
        make_chat_model(tmp_path_factory.mktemp("model"), with_weights=False)
    )
    engine = scripted_engine(config, script)
    logs = tmp_path_factory.mktemp("logs")
    async with serving(config, engine, logs) as server:
        server.load("example_agents", *(f"{agent}Agent" for agent in AGENTS))
        yield server


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def ledger(server: EpisodeServer) -> AsyncIterator[None]:
    yield
    server.engine.may_end.set()
    await server.check_ledger()


async def test_an_agent_with_tools_and_a_reviewer_becomes_one_trajectory(
    server,
) -> None:
    server.engine.samples.clear()
    (trajectory,) = await server.run("ToolAgent")
    assert (trajectory.status, trajectory.failure) == (Status.COMPLETED, None)
    assert trajectory.reward == 1.0
    assert trajectory.metrics == {"total": 3 + 4 + 5, "ignored/temperature": 5}
    assert trajectory.num_turns == 5
    assert trajectory.branches == (
        Branch(6),
        Branch(2, 0.5, "reviewer"),
        Branch(2, 0.5, "reviewer"),
    )
    assert sorted(recorded(trajectory)) == sorted(server.samples())
    assert trajectory.prompt_text.startswith("<|im_start|>system")
    assert trajectory.version_spans[0].version == server.engine.version


async def test_an_agent_has_many_replies_where_the_settings_say_nothing(server) -> None:
    (trajectory,) = await server.run("ToolAgent", max_turns=0)
    assert (trajectory.status, trajectory.num_turns) == (Status.COMPLETED, 5)
    (trajectory,) = await server.run("ToolAgent", max_turns=1)
    assert "sampling.max_turns = 1" in trajectory.failure.message
    assert trajectory.num_turns == 1
    assert trajectory.reply_text.strip()


async def test_rewards_of_replies_stand_at_their_tokens_whatever_api_gave_them(
    server,
) -> None:
    (trajectory,) = await server.run("RewardingAgent")
    assert (trajectory.reward, trajectory.failure) == (15.5, None)
    reviewer = Branch(2, name="reviewer", reward=48.0)
    assert trajectory.branches == (*[Branch(2)] * 3, reviewer, Branch(2))
    # A metric that the agent gave for all stands at the end of each side.
    assert trajectory.turn_rewards() == [1.0, 2.0, 4.0, 48.0, 8.5]
    ends = [part.sampled.stop - 1 for part in trajectory.sequences]
    assert np.flatnonzero(trajectory.token_rewards).tolist() == ends


async def test_rewards_of_no_reply_too_many_tokens_or_a_large_sum_fail_their_episode(
    server,
):
    (stranger,) = await server.run("StrangerAgent", max_attempts=1)
    message = "reply_rewards names no reply of the episode: 'chatcmpl-nobody'"
    assert stranger.failure == Failure(FailureKind.ENVIRONMENT, message)
    (overpaid,) = await server.run("OverpaidAgent", max_attempts=1)
    assert (
        "rewards of an episode add up to 1.00002e+06, which must"
        in overpaid.failure.message
    )
    (miscounting,) = await server.run("MiscountingAgent", max_attempts=1)
    size = miscounting.num_sampled_tokens
    assert miscounting.failure.message.endswith(
        f"': token_rewards needs a number for each token of its reply: {size}, got 50"
    )


async def test_the_members_of_a_group_run_side_by_side(server) -> None:
    trajectories = await server.run("ToolAgent", members=8)
    assert [trajectory.status for trajectory in trajectories] == [Status.COMPLETED] * 8
    assert {len(trajectory.branches) for trajectory in trajectories} == {3}


async def test_an_agent_that_blocks_its_thread_is_served(server) -> None:
    (trajectory,) = await server.run("PlainAgent")
    assert (trajectory.status, trajectory.reward) == (Status.COMPLETED, 3.0)


async def test_an_agent_without_a_reply_of_the_model_has_failed(server) -> None:
    (trajectory,) = await server.run("SilentAgent")
    assert trajectory.failure.kind is FailureKind.ENVIRONMENT
    assert "without any reply of the model" in trajectory.failure.message


async def test_an_agent_that_hangs_fails_after_its_limit(server) -> None:
    (failed,) = await server.run("HangingAgent", timeout_s=5.0)
    assert failed.failure.kind is FailureKind.TIMEOUT
    assert "within 5 s, the environment's timeout_s" in failed.failure.message
    assert "example_agents.py" in failed.failure.message
    assert failed.num_sampled_tokens > 0


async def test_an_agent_that_raises_fails_with_its_words(server) -> None:
    first, second = await server.run("RaisingAgent", max_attempts=2)
    assert (first.will_retry, second.will_retry) == (True, False)
    assert "task 3 is bad" in second.failure.message


async def test_an_episode_that_reached_a_limit_is_truncated_and_keeps_its_reward(
    server,
) -> None:
    (trajectory,) = await server.run("GreedyAgent")
    assert (trajectory.status, trajectory.reward) == (Status.TRUNCATED, 1.0)
    assert all(
        trajectory.token_ids[sequence.tokens].size <= SAMPLING["max_episode_tokens"]
        for sequence in trajectory.sequences
    )


async def test_a_cancelled_lease_ends_open_calls_and_keeps_what_was_sampled(
    server,
) -> None:
    server.engine.may_end.clear()
    group = server.lease("ToolAgent")
    await until(lambda: server.engine.num_open)
    server.connection.send(cancel=fleet_pb2.CancelLease(group_id=group))
    (trajectory,) = await server.ended(group)
    assert trajectory.status is Status.CANCELLED
    assert server.engine.num_open == 0


async def test_new_weights_in_the_middle_of_a_call_show_in_its_versions(server) -> None:
    server.engine.may_end.clear()
    group = server.lease("PlainAgent")
    await until(lambda: server.engine.num_open)
    await server.connection.serve_version(2)
    server.engine.may_end.set()
    (trajectory,) = await server.ended(group)
    assert trajectory.version_spans[-1].version == PolicyVersion(0, 2)
    assert trajectory.status is Status.COMPLETED

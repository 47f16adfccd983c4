"""An episode whose agent calls the model itself.

Consumes: an opened session, the agent's calls. Produces: the branches of the recording, a status.
Waits for: the agent, and the answers to its calls. Unblocked by: the agent's result, the
environment's limit, or the task's cancellation.
"""

import asyncio
import contextlib
import dataclasses
import logging
import math
from functools import partial

from slipstream.core.errors import EnvironmentFailed
from slipstream.core.settings.sections import MAX_TURNS
from slipstream.core.template_values import read_values
from slipstream.core.types import (
    IGNORED,
    RECOVERED_CALLS,
    RECOVERED_TOKENS,
    UNASKED_CALLS,
    Purpose,
    Status,
)
from slipstream.rollout_server.agents.agent_api import Answering
from slipstream.rollout_server.agents.call_records import EpisodeName, EpisodeRecord
from slipstream.rollout_server.agents.recorder import Recorder
from slipstream.rollout_server.episodes.calls import StreamSession, check_sum, misused, whole_reward
from slipstream.rollout_server.episodes.play import EpisodeAttempt
from slipstream.v1 import environment_pb2, trajectory_pb2

log = logging.getLogger(__name__)


async def answer_calls(
    session: StreamSession, answering: Answering, recorder: Recorder, *, timeout_s: float
) -> environment_pb2.AgentResult:
    """Answers the calls of one agent until it returns its result; leaves none of them open.

    Raises EnvironmentFailed if the agent fails, or if it neither calls nor returns within
    `timeout_s` while it has no open call.
    """
    calls: dict[int, asyncio.Task[None]] = {}
    last_call = 0

    async def answer(message: environment_pb2.AgentCall) -> None:
        async with contextlib.aclosing(answering.answer(recorder, message)) as parts:
            async for part in parts:
                try:
                    await session.reply_part(message.call, part)
                except EnvironmentFailed as error:
                    if error.kind != trajectory_pb2.FAILURE_KIND_TIMEOUT:
                        raise
                    log.warning("call %d of an agent is not read: %s", message.call, error)
                    return

    waiting = asyncio.ensure_future(session.next_call())
    try:
        while True:
            done, _ = await asyncio.wait(
                {waiting, *calls.values()},
                timeout=None if calls else timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not done:
                late = (
                    f"the agent neither called the model nor returned a result within "
                    f"{timeout_s:g} s, the environment's timeout_s"
                )
                kind = trajectory_pb2.FAILURE_KIND_TIMEOUT
                raise await session.examine(EnvironmentFailed(kind, late))
            for number, answered in list(calls.items()):
                if answered.done():
                    del calls[number]
                    if not answered.cancelled():
                        answered.result()
            if not waiting.done():
                continue
            message = waiting.result()
            if isinstance(message, environment_pb2.AgentResult):
                return message
            if message.is_abandoned:
                if message.call in calls:
                    calls[message.call].cancel()
            elif message.call > last_call:
                last_call = message.call
                calls[last_call] = asyncio.ensure_future(answer(message))
            else:
                raise misused(
                    f"calls of an agent are counted up, got {message.call} behind {last_call}"
                )
            waiting = asyncio.ensure_future(session.next_call())
    finally:
        recorder.cancel()
        open_tasks = [waiting, *calls.values()]
        for task in open_tasks:
            task.cancel()
        await asyncio.wait(open_tasks)
        await recorder.settled()


async def serve_agent(
    play: EpisodeAttempt, session: StreamSession, opening: environment_pb2.Observation
) -> Status:
    """Answers the agent's calls until it returns, then records its conversations.

    Returns how the episode ended. Raises EnvironmentFailed if the agent fails.
    """
    lease = play.lease
    recording = play.recording
    api = await play.ask(play.model.agents.api())
    values = read_values(lease.template_values)
    reply_limit = min(opening.max_reply_tokens or math.inf, lease.sampling.max_reply_tokens)
    turns = lease.sampling.max_turns or MAX_TURNS
    record = await _record_of(play)
    recorder = Recorder(
        play.model.engine.requests,
        play.key,
        dataclasses.replace(lease.sampling, max_reply_tokens=int(reply_limit), max_turns=turns),
        sampled=play.count,
        template_values=values,
        record=record,
    )
    shares: dict[str, float] = {}
    rewards: dict[str, float] = {}
    try:
        end = await play.ask(answer_calls(session, api, recorder, timeout_s=lease.timeout_s))
        shares = dict(end.shares)
        recording.reward, rewards = _earned(recorder, end)
        for total in (recording.reward, *rewards.values()):
            check_sum(total)
        recording.metrics.update(end.metrics)
    except EnvironmentFailed as error:
        is_late = error.kind == trajectory_pb2.FAILURE_KIND_TIMEOUT
        play.was_lost = session.is_lost and not is_late
        raise
    finally:
        recording.generation_s = recorder.clock.busy_s
        recording.environment_s = max(0.0, recording.environment_s - recording.generation_s)
        recording.take_branches(recorder.conversations, shares, rewards)
        ignored = {IGNORED + name: number for name, number in recorder.ignored.items()}
        recording.counts.update(ignored)
        if record is not None:
            play.num_kept_calls = record.num_kept
            if record.num_recovered:
                recording.counts[RECOVERED_CALLS] = record.num_recovered
                recording.counts[RECOVERED_TOKENS] = record.num_recovered_tokens
    # A program that was lost again may not have come to all of its calls.
    if record is not None and record.num_unasked:
        recording.counts[UNASKED_CALLS] = record.num_unasked
    if not recording.num_sampled:
        raise misused("the agent returned a result without any reply of the model")
    return Status.TRUNCATED if recorder.is_truncated else Status.COMPLETED


async def _record_of(play: EpisodeAttempt) -> EpisodeRecord | None:
    """Returns the record of an episode that is trained, or None where calls are not kept."""
    call_records = play.services.call_records
    if call_records is None or play.lease.purpose is not Purpose.TRAINING:
        return None
    episode = EpisodeName(
        group_id=play.lease.group_id,
        member=play.member,
        attempt=play.attempt,
        server_epoch=play.identity.server_epoch,
    )
    earlier = await play.ask(call_records.begin(episode, anew=play.begins_anew))
    return EpisodeRecord(partial(call_records.keep, episode), earlier)


def _earned(recorder: Recorder, end: environment_pb2.AgentResult) -> tuple[float, dict[str, float]]:
    """Returns the rewards of the episode and of branch names, with those of their replies.

    If replies have rewards, all are placed at the tokens that earned them: what an agent told of
    the episode, or of a name, at the last of its tokens. Raises EnvironmentFailed for a reply that
    is unknown or has another number of tokens.
    """
    branches = recorder.conversations.branches
    reward = end.reward
    rewards = dict(end.rewards)
    if not end.reply_rewards:
        return reward, rewards
    # The branch that ends last of each side.
    last = {branch.name if branch.name in rewards else None: branch for branch in branches}
    for branch in branches:
        for reply in range(len(branch.sampled)):
            is_end = branch in last.values() and reply == len(branch.sampled) - 1
            branch.earn(reply, rewards.get(branch.name, reward) if is_end else 0.0)
    turns = recorder.turns()
    for reply_reward in end.reply_rewards:
        turn = turns.get(reply_reward.reply_id)
        if turn is None:
            raise misused(
                f"reply_rewards names no reply of the episode: {reply_reward.reply_id[:80]!r}"
            )
        try:
            turn.branch.earn(turn.reply, reply_reward.reward, reply_reward.token_rewards)
        except ValueError as error:
            raise misused(f"reply_rewards of {reply_reward.reply_id[:80]!r}: {error}") from None
        if turn.branch.name in rewards:
            rewards[turn.branch.name] += whole_reward(reply_reward)
        else:
            reward += whole_reward(reply_reward)
    return reward, rewards

"""Runs all members of a leased group at once; repeats failed attempts, delivers all attempts.

`Dispatcher` consumes leases and produces trajectories in the queue, and one report when a lease is
over. It waits for a free slot, the episode, a verdict on the weights, room in the queue. Unblocked
by: an episode's end, `WeightOrders`, an acknowledgement from the controller.

`run_episode` runs one attempt: environment and model take turns until the environment or a limit
ends it. It consumes a session of an environment and an engine, and produces one trajectory, unless
the engine dies. It waits for the environment, or the agent's calls, and the engine. Unblocked by:
their answers, the environment's limit, `EpisodeAttempt.cancel`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from slipstream.core.errors import ConfigError, EnvironmentFailed, TrajectoryQueueFull
from slipstream.core.kept_tokens import KeptTokens
from slipstream.core.types import (
    MAX_EXCUSED_ATTEMPTS,
    Failure,
    FailureKind,
    GroupId,
    RoutedExperts,
    Status,
    Trajectory,
)
from slipstream.core.waits import within
from slipstream.protocol.codec import encode_trajectory, merge_spans, pack_tokens
from slipstream.protocol.queue.base import TrajectorySender, seal
from slipstream.rollout_server.engine_interface import EngineDied, GenerationFailed
from slipstream.rollout_server.episodes.calls import MAX_MESSAGE_CHARACTERS
from slipstream.rollout_server.episodes.episode_kinds import talk
from slipstream.rollout_server.episodes.group_judge import (
    EndedPlay,
    ask_verdicts,
    sampled_replies,
    take_verdict,
)
from slipstream.rollout_server.episodes.play import (
    Cancelled,
    EpisodeAttempt,
    EpisodeLease,
    EpisodeServices,
    Identity,
    PromptTooLong,
    ServiceFailed,
    reply_alone,
)
from slipstream.rollout_server.episodes.recording import Recording
from slipstream.rollout_server.episodes.renderer import RenderingFailed
from slipstream.rollout_server.usage import EpochCounters
from slipstream.v1 import fleet_pb2

log = logging.getLogger(__name__)

_QUEUE_WARNING_S = 10.0
# Seconds between two attempts after an infrastructure failure, so that a lost client or controller
# can come back before all attempts have failed. Longer than the default heartbeat_timeout_s, after
# which the controller removes a silent server.
RETRY_S = 10.0
# Failures that are no fault of an agent's program: like one whose worker is gone, it goes on where
# it was, if its calls are kept.
LOSSES = (FailureKind.INFRASTRUCTURE, FailureKind.BYSTANDER)
# Attempts in a row that were lost before they had a new call; then the next one begins anew.
MAX_STUCK_ATTEMPTS = 2


class Dispatcher:
    """Runs the leases of one server epoch.

    A lease begins with `start`. Its episodes run, and their trajectories are put into the queue;
    then `closed(report)` is called. `cancel` ends a lease earlier. For new weights, `hold` makes
    trajectories wait until `settle(passed=...)`. At the end call `drain`, then wait for `idle`, or
    call `cancel_all` and, if the queue stays full, `abandon`.
    """

    def __init__(
        self,
        group: asyncio.TaskGroup,
        identity: Identity,
        services: EpisodeServices,
        counters: EpochCounters,
        sender: TrajectorySender,
        *,
        max_episodes: int,
        closed: Callable[[fleet_pb2.LeaseReport], None],
    ) -> None:
        """Runs its tasks in `group`; calls `closed` with the report on each lease that is over."""
        self._tasks = group
        self._identity = identity
        self._services = services
        self._counters = counters
        self._sender = sender
        self._slots = asyncio.Semaphore(max_episodes)
        self._closed = closed
        self._groups: dict[GroupId, _Group] = {}
        self._draining = False
        # Set while no lease is open; all trajectories are then in the queue.
        self.idle = asyncio.Event()
        self.idle.set()
        # Set while new weights wait for their verdict; its result is whether they passed.
        self._verdict: asyncio.Future[bool] | None = None

    def start(self, lease: EpisodeLease) -> None:
        """Starts a lease; if its group is leased here already, that lease continues unchanged."""
        if lease.group_id in self._groups:
            log.warning("group %s is leased twice", lease.group_id)
            return
        group = _Group(lease, set(lease.members), lease.first_attempt)
        self._groups[lease.group_id] = group
        self.idle.clear()
        group.task = self._tasks.create_task(self._run_group(group))

    async def cancel(self, group_id: GroupId) -> None:
        """Ends the episodes of a lease, if it is still open; they are delivered as cancelled."""
        group = self._groups.get(group_id)
        if group is None:
            return
        group.cancelled.set()
        for episode in tuple(group.episodes):
            await episode.cancel()

    def drain(self) -> None:
        """Stops starting attempts; running episodes may end, other members go to another server."""
        self._draining = True

    async def cancel_all(self) -> None:
        """Cancels all open leases; see `cancel`."""
        for group_id in tuple(self._groups):
            await self.cancel(group_id)

    def abandon(self) -> None:
        """Drops trajectories that still wait for room in the queue: they are lost."""
        for group in self._groups.values():
            group.task.cancel()
        if self._groups:
            log.warning("trajectories of %d groups found no room and are lost", len(self._groups))

    def hold(self) -> None:
        """Makes trajectories wait until `settle` says whether the new weights passed the probe."""
        if self._verdict is None:
            self._verdict = asyncio.get_running_loop().create_future()

    def settle(self, *, passed: bool) -> None:
        """Ends `hold`: delivers the held trajectories.

        With `passed` False, these trajectories are marked as cancelled.
        """
        for group in self._groups.values():
            group.is_spoiled = group.is_spoiled or (not passed and bool(group.waiting))
        if self._verdict is not None:
            self._verdict.set_result(passed)
            self._verdict = None

    async def _run_group(self, group: _Group) -> None:
        async with asyncio.TaskGroup() as members:
            for member in group.lease.members:
                members.create_task(self._run_member(group, member))
        await self._judge(group)
        del self._groups[group.lease.group_id]
        report = fleet_pb2.LeaseReport(
            group_id=group.lease.group_id,
            closed=True,
            unfinished=sorted(group.unfinished),
            next_attempt=group.next_attempt,
        )
        self._closed(report)
        if not self._groups:
            self.idle.set()

    async def _run_member(self, group: _Group, member: int) -> None:
        attempt = group.lease.first_attempt
        # An attempt that ended because of another episode in its worker (BYSTANDER) does not count,
        # up to MAX_EXCUSED_ATTEMPTS of them.
        limit = group.lease.max_attempts
        max_attempts = group.lease.max_attempts + MAX_EXCUSED_ATTEMPTS
        begins_anew = False
        num_stuck = 0
        while True:
            ended = await self._run_episode(group, member, attempt, begins_anew=begins_anew)
            if ended is None:
                return
            trajectory = ended.trajectory
            attempt += 1
            failure = trajectory.failure
            # An episode that fails by itself, or is lost at one call again and again, takes another
            # course.
            if ended.play.was_lost:
                num_stuck = 0 if ended.play.num_kept_calls else num_stuck + 1
            was_lost = failure is not None and (failure.kind in LOSSES or ended.play.was_lost)
            begins_anew = not was_lost or num_stuck >= MAX_STUCK_ATTEMPTS
            if failure is not None and failure.kind is FailureKind.BYSTANDER:
                limit = min(limit + 1, max_attempts)
            will_retry = (
                failure is not None
                and failure.kind is not FailureKind.PROMPT_TOO_LONG
                and attempt < limit
            )
            trajectory = dataclasses.replace(trajectory, will_retry=will_retry)
            is_cancelled = trajectory.status is Status.CANCELLED
            if group.judges and not will_retry and not is_cancelled:
                # The environment compares all members once they have ended.
                group.waiting[member] = EndedPlay(ended.play, trajectory)
                self._counters.delivering[trajectory.trajectory_id] = trajectory.num_sampled_tokens
                return
            end = await self._deliver(trajectory)
            if not will_retry:
                if end is not Status.CANCELLED:
                    group.unfinished.discard(member)
                return
            if failure is not None and failure.kind is FailureKind.INFRASTRUCTURE:
                await within(RETRY_S, group.cancelled.wait())
            if group.cancelled.is_set() or self._draining:
                # The next attempt is another server's.
                return

    async def _run_episode(
        self, group: _Group, member: int, attempt: int, *, begins_anew: bool
    ) -> EndedPlay | None:
        """Runs one attempt; returns None if a cancel or a drain came before the attempt began."""
        self._counters.waiting_episodes += 1
        try:
            await self._slots.acquire()
        finally:
            self._counters.waiting_episodes -= 1
        try:
            if group.cancelled.is_set() or self._draining:
                return None
            group.next_attempt = max(group.next_attempt, attempt + 1)
            episode = EpisodeAttempt(
                self._identity,
                group.lease,
                member,
                attempt,
                self._services,
                self._counters,
                begins_anew=begins_anew,
            )
            group.episodes.add(episode)
            try:
                trajectory = await run_episode(episode)
            finally:
                group.episodes.discard(episode)
            group.judges = group.judges or episode.recording.judges_group
            return EndedPlay(episode, trajectory)
        finally:
            self._slots.release()

    async def _judge(self, group: _Group) -> None:
        """Lets the environment compare the waiting members of a group; delivers all, failures last.

        Those that ended with a reward are cancelled, and run again elsewhere, unless all members of
        the lease have ended: only members that were compared with each other are trained together.
        """
        waiting = [group.waiting[member] for member in sorted(group.waiting)]
        finished = [ended for ended in waiting if ended.trajectory.has_reward]
        failure = None
        is_whole = len(waiting) == len(group.lease.members) and not group.is_over
        if is_whole and finished:
            failure = await self._ask_verdicts(group, finished)
        for ended in sorted(waiting, key=lambda play: not play.trajectory.has_reward):
            trajectory = ended.trajectory
            if trajectory.has_reward:
                if failure is not None:
                    trajectory = trajectory_of(ended.play, Status.FAILED, failure)
                elif not is_whole or group.is_over:
                    trajectory = _cancelled(trajectory)
                else:
                    trajectory = trajectory_of(ended.play, trajectory.status, None)
            if await self._deliver(trajectory) is not Status.CANCELLED:
                group.unfinished.discard(ended.play.member)

    async def _ask_verdicts(self, group: _Group, finished: Sequence[EndedPlay]) -> Failure | None:
        """Adds the environment's verdicts to `finished`; returns why there are none, or None.

        It is asked as often as an episode is attempted. A cancel ends the wait.
        """
        lease = group.lease
        limit = lease.max_attempts - lease.first_attempt
        most_attempts = limit + MAX_EXCUSED_ATTEMPTS
        attempt = 0
        while True:
            place = f"{lease.first_attempt + attempt}.{self._identity.server_epoch:x}"
            key = f"{lease.group_id}.judge.{place}"
            verdicts = ask_verdicts(self._services.environments, lease, key, finished)
            asking = asyncio.ensure_future(verdicts)
            over = asyncio.ensure_future(group.cancelled.wait())
            try:
                await asyncio.wait({asking, over}, return_when=asyncio.FIRST_COMPLETED)
                if group.cancelled.is_set():
                    return None
                for ended, verdict in zip(finished, asking.result(), strict=True):
                    take_verdict(ended.play, verdict)
            except Exception as error:  # noqa: BLE001 - told as the failure of each episode
                failure = _failure(error)
            else:
                return None
            finally:
                over.cancel()
                asking.cancel()
            attempt += 1
            log.warning("group %s was not judged: %s", lease.group_id, failure.message)
            if failure.kind is FailureKind.BYSTANDER:
                limit = min(limit + 1, most_attempts)
            if attempt >= limit:
                return Failure(failure.kind, f"judge_group: {failure.message}")
            if failure.kind is FailureKind.INFRASTRUCTURE:
                await within(RETRY_S, group.cancelled.wait())
            if group.cancelled.is_set() or self._draining:
                group.cancelled.set()
                return None

    async def _deliver(self, trajectory: Trajectory) -> Status:
        """Puts a trajectory into the queue; returns the status under which it was delivered."""
        name = trajectory.trajectory_id
        tokens = trajectory.num_sampled_tokens
        self._counters.delivering[name] = tokens
        if self._verdict is not None and not await asyncio.shield(self._verdict):
            trajectory = _cancelled(trajectory)
        data = seal(self._identity.delivery_key, name, encode_trajectory(trajectory))
        while True:
            try:
                await self._sender.put(name, data, timeout_s=_QUEUE_WARNING_S, tokens=tokens)
            except TrajectoryQueueFull as error:
                log.warning("trajectories wait for the controller: %s", error)
            else:
                del self._counters.delivering[name]
                return trajectory.status


@dataclass(eq=False)
class _Group:
    lease: EpisodeLease
    # Members without a final trajectory; a cancelled trajectory is not final.
    unfinished: set[int]
    # The first attempt that no member has begun.
    next_attempt: int
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    episodes: set[EpisodeAttempt] = field(default_factory=set)
    # Whether the environment compares the members once all have ended, and those that wait for it.
    judges: bool = False
    waiting: dict[int, EndedPlay] = field(default_factory=dict)
    # Whether new weights did not pass while members waited.
    is_spoiled: bool = False
    # Runs its members; set by `start`.
    task: asyncio.Task[None] = field(init=False)

    @property
    def is_over(self) -> bool:
        """Whether its members are cancelled."""
        return self.is_spoiled or self.cancelled.is_set()


def _cancelled(trajectory: Trajectory) -> Trajectory:
    """Returns the trajectory of an episode that is never trained."""
    return dataclasses.replace(
        trajectory,
        status=Status.CANCELLED,
        failure=None,
        will_retry=False,
        reward=0.0,
        routed_experts=None,
        reference=None,
    )


async def run_episode(play: EpisodeAttempt) -> Trajectory:
    """Runs an episode to its end; returns the trajectory, with the cause of a failure.

    `EpisodeAttempt.cancel` ends it early, with the tokens sampled so far. Raises only EngineDied
    and ConfigError, which end the server.
    """
    counters = play.counters
    counters.open_episodes += 1
    status = Status.FAILED
    failure = None
    try:
        status = await _played(play)
    except Cancelled:
        status = Status.CANCELLED
    except (EngineDied, ConfigError):
        counters.is_broken_off = True
        raise
    except Exception as error:  # noqa: BLE001 - logged, and told as the episode's failure
        failure = _failure(error)
    except BaseException:
        counters.is_broken_off = True
        raise
    counters.ended(play.recording.num_sampled)
    try:
        return trajectory_of(play, status, failure)
    except Exception as error:  # noqa: BLE001 - as above; the ledger shows the lost tokens
        play.recording = Recording()
        return trajectory_of(play, Status.FAILED, _failure(error))


async def _played(play: EpisodeAttempt) -> Status:
    """Plays an episode: alone, against its environment or with its agent; returns how it ended."""
    lease = play.lease
    services = play.services
    recording = play.recording
    session = None
    if lease.prompt:
        return await reply_alone(play)
    try:
        opened = services.environments.open(
            lease.environment, play.key, lease.task_index, lease.timeout_s
        )
        session = await play.ask(opened)
        opening = await play.ask(session.reset(lease.task_index, lease.seed))
        recording.max_reply_tokens = opening.max_reply_tokens
        recording.expected_answer = opening.expected_answer
        recording.judges_group = opening.judges_group
        status = await talk(play, session, opening)
        if opening.judges_group:
            renderer = play.model.renderer
            recording.replies = session.replies or sampled_replies(recording, renderer)
        references = services.references
        environment = play.lease.environment
        if references is not None and references.score(environment) and play.is_trained(status):
            recording.close()
            before_s = recording.environment_s
            scored = references.logprobs(environment, recording.reference_sequences())
            recording.reference = await play.ask(scored)
            recording.environment_s = before_s
        return status
    finally:
        if session is not None:
            session.close()


_FAILURES = {
    RenderingFailed: FailureKind.ENVIRONMENT,
    PromptTooLong: FailureKind.PROMPT_TOO_LONG,
    GenerationFailed: FailureKind.ENGINE,
    ServiceFailed: FailureKind.INFRASTRUCTURE,
}


def _failure(error: Exception) -> Failure:
    """Returns the failure of an episode that ended with `error`, which is logged if unexpected.

    An unexpected error counts against the environment: one that fails all episodes ends the run.
    """
    message = str(error)
    if isinstance(error, EnvironmentFailed):
        kind = FailureKind(error.kind)
    elif kinds := [kind for cause, kind in _FAILURES.items() if isinstance(error, cause)]:
        kind = kinds[0]
    else:
        log.error("an episode ended with an unexpected error", exc_info=error)
        kind = FailureKind.ENVIRONMENT
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno} in {last.name}"
        message = (
            f"unexpected error of the rollout server: {type(error).__name__}: {message} ({place})"
        )
    # Texts of models and templates may have what no message can carry.
    clean = message.encode(errors="replace").decode()
    return Failure(kind, clean[:MAX_MESSAGE_CHARACTERS])


def trajectory_of(play: EpisodeAttempt, status: Status, failure: Failure | None) -> Trajectory:
    """Closes the recording, and returns the trajectory of the attempt."""
    lease = play.lease
    recording = play.recording
    identity = play.identity
    renderer = play.model.renderer
    recording.close()
    prompt_end, reply_end = (sum(recording.run_lengths[:runs]) for runs in (1, 2))
    prompt = tuple(recording.token_ids[:prompt_end])
    if len(recording.sampled) > 1:
        reply_text = renderer.decode_all(recording.token_ids[prompt_end:])
    else:
        first_reply = recording.token_ids[prompt_end:reply_end]
        reply_text = recording.last_text or renderer.decode(first_reply)
    is_trained = play.is_trained(status)
    num_tokens = len(recording.token_ids)
    routed_experts = None
    if is_trained and recording.expert_ids:
        # Only training replays the experts, and they take more bytes than all else.
        routed_experts = RoutedExperts.of_parts(
            recording.expert_ids, play.model.engine.num_experts, num_tokens=num_tokens
        )
    kept_tokens = b""
    if is_trained:
        kept_tokens = KeptTokens.joined(recording.kept_tokens).packed()
    teacher_prompt = np.array(recording.teacher_prompt if is_trained else [], dtype=np.uint32)
    sampled: dict[str, Any] = recording.sampled_arrays
    return Trajectory(
        run_id=identity.run_id,
        group_id=lease.group_id,
        member=play.member,
        attempt=play.attempt,
        server_id=identity.server_id,
        server_epoch=identity.server_epoch,
        environment=lease.environment,
        task_index=lease.task_index,
        seed=lease.seed,
        purpose=lease.purpose,
        status=status,
        failure=failure,
        will_retry=False,
        token_ids=np.asarray(recording.token_ids, dtype=np.uint32),
        run_lengths=tuple(recording.run_lengths),
        **sampled,
        version_spans=merge_spans(recording.spans),
        reward=recording.reward if failure is None else 0.0,
        metrics=recording.short_metrics,
        num_turns=len(recording.sampled),
        generation_s=recording.generation_s,
        environment_s=recording.environment_s,
        prompt_text=recording.clip(renderer.decode_prompt(prompt)),
        reply_text=recording.clip(reply_text),
        routed_experts=routed_experts,
        branches=recording.branches,
        is_given=recording.is_given,
        reference=recording.reference if is_trained else None,
        images=tuple(recording.images),
        image_places=tuple(recording.image_places),
        adapter=lease.sampling.adapter,
        max_reply_tokens=recording.max_reply_tokens,
        expected_answer=recording.expected_answer,
        prompt_logprobs=recording.prompt_logprobs,
        kept_tokens=kept_tokens,
        judged_lease=recording.judged_lease,
        teacher_prompt=pack_tokens(teacher_prompt),
    )

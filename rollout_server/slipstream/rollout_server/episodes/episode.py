"""One episode: environment and model take turns until the environment or a limit ends it.

An agent calls the model itself (`AgentTalk`). Consumes: a session of an environment, an engine.
Produces: one trajectory, unless the engine dies. Waits for: the environment, or the agent's calls,
and the engine. Unblocked by: their answers, the environment's limit, `cancel`.
"""

import asyncio
import contextlib
import dataclasses
import logging
import math
import time
import traceback
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from slipstream.core.errors import ConfigError, EnvironmentFailed
from slipstream.core.settings.sections import MAX_TURNS
from slipstream.core.template_values import read_values
from slipstream.core.types import IGNORED, Failure, FailureKind, Status, Trajectory, VersionSpan
from slipstream.rollout_server.agents.agent_api import Answering
from slipstream.rollout_server.agents.limits import MAX_JUDGE_CALLS, HttpCall, judge_sampling
from slipstream.rollout_server.agents.recorder import Recorder
from slipstream.rollout_server.chat import TemplateInputs
from slipstream.rollout_server.engine_interface import (
    Engine,
    EngineDied,
    FinishReason,
    Generation,
    GenerationFailed,
)
from slipstream.rollout_server.episodes.calls import (
    MAX_MESSAGE_CHARACTERS,
    AgentEnd,
    StreamSession,
    misused,
)
from slipstream.rollout_server.episodes.environment_talk import EnvironmentTalk, PromptTooLong
from slipstream.rollout_server.episodes.environments import Environments
from slipstream.rollout_server.episodes.epoch_counters import EpochCounters
from slipstream.rollout_server.episodes.lease import EpisodeTask, trajectory_of
from slipstream.rollout_server.episodes.recording import Recording
from slipstream.rollout_server.episodes.renderer import Renderer, RenderingFailed
from slipstream.rollout_server.episodes.server_traces import NO_TRACES, ServerTraces
from slipstream.rollout_server.reference_server import ReferenceFailed, ReferenceServer
from slipstream.rollout_server.vllm.agents.agent_services import Agents
from slipstream.v1 import environment_pb2, trajectory_pb2

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
# Requests under this prefix go to the initial model, which is frozen.
JUDGE_PATH = "/judge/"


class AgentTalk:
    """Serves one agent; `run` may be called once, and leaves no call of the agent open."""

    def __init__(
        self,
        session: StreamSession,
        answering: Answering,
        recorder: Recorder,
        *,
        judge: Recorder | None,
        timeout_s: float,
    ) -> None:
        """`judge` records the judge's calls; None if the engine does not keep the initial model.

        `timeout_s` limits the time that the agent takes while it has no open call.
        """
        self._session, self._answering = session, answering
        self._recorder, self._judge = recorder, judge
        self.recorders = [recorder] if judge is None else [recorder, judge]
        self._num_judge_calls = 0
        self._timeout_s = timeout_s
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._last_call = 0

    async def run(self) -> AgentEnd:
        """Answers calls until the agent returns its result.

        Raises EnvironmentFailed if the agent fails, or neither calls nor returns within
        `timeout_s`.
        """
        waiting = asyncio.ensure_future(self._session.next_call())
        try:
            while True:
                limit_s = None if self._calls else self._timeout_s
                done, _ = await asyncio.wait(
                    {waiting, *self._calls.values()},
                    timeout=limit_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not done:
                    late = (
                        f"the agent neither called the model nor returned a result within "
                        f"{self._timeout_s:g} s, the environment's timeout_s"
                    )
                    kind = trajectory_pb2.FAILURE_KIND_TIMEOUT
                    raise await self._session.examine(EnvironmentFailed(kind, late))
                self._forget_answered()
                if not waiting.done():
                    continue
                message = waiting.result()
                if isinstance(message, AgentEnd):
                    return message
                self._take(message)
                waiting = asyncio.ensure_future(self._session.next_call())
        finally:
            for recorder in self.recorders:
                recorder.cancel()
            open_tasks = [waiting, *self._calls.values()]
            for task in open_tasks:
                task.cancel()
            await asyncio.wait(open_tasks)
            for recorder in self.recorders:
                await recorder.settled()

    def _take(self, message: environment_pb2.AgentCall) -> None:
        if message.is_abandoned:
            for recorder in self.recorders:
                recorder.hang_up(message.call)
            if message.call in self._calls:
                self._calls[message.call].cancel()
            return
        if message.call <= self._last_call:
            raise misused(
                f"calls of an agent are counted up, got {message.call} behind {self._last_call}"
            )
        self._last_call = message.call
        self._calls[message.call] = asyncio.ensure_future(self._answer(message))

    def _judge_of_call(self) -> Recorder:
        """Returns the judge's recorder for one more call.

        Raises EnvironmentFailed if there is no judge, or the judge was called too often. The same
        call would fail again, so the episode ends with the cause.
        """
        if self._judge is None:
            raise misused(
                "endpoint.judge() needs lora.publish = adapters: without adapters a server holds "
                "the newest version alone; name a judge with an address of its own"
            )
        self._num_judge_calls += 1
        if self._num_judge_calls > MAX_JUDGE_CALLS:
            raise misused(f"an episode may ask its judge {MAX_JUDGE_CALLS} times, it asked again")
        return self._judge

    def _forget_answered(self) -> None:
        """Drops calls that have ended; raises the error of a call that failed."""
        for number, task in list(self._calls.items()):
            if task.done():
                del self._calls[number]
                if not task.cancelled():
                    task.result()

    async def _answer(self, message: environment_pb2.AgentCall) -> None:
        recorder, path = self._recorder, message.path
        if path.startswith(JUDGE_PATH):
            recorder, path = self._judge_of_call(), f"/{path.removeprefix(JUDGE_PATH)}"
        http = HttpCall(message.call, message.method, path, message.body, message.branch)
        async with contextlib.aclosing(self._answering.answer(recorder, http)) as parts:
            async for part in parts:
                try:
                    await self._session.reply_part(message.call, part)
                except EnvironmentFailed as error:
                    if error.kind != trajectory_pb2.FAILURE_KIND_TIMEOUT:
                        raise
                    log.warning("call %d of an agent is not read: %s", message.call, error)
                    return


@dataclass(frozen=True)
class EpisodeServices:
    """The parts of a server that its episodes share."""

    engine: Engine
    environments: Environments
    renderer: Renderer
    agents: Agents
    # The server of the reference model; None if the run has none.
    reference: ReferenceServer | None = None
    traces: ServerTraces = NO_TRACES


class _Cancelled(Exception):
    pass


_KINDS = {
    RenderingFailed: FailureKind.ENVIRONMENT,
    PromptTooLong: FailureKind.PROMPT_TOO_LONG,
    GenerationFailed: FailureKind.ENGINE,
    ReferenceFailed: FailureKind.INFRASTRUCTURE,
}


def _failure(error: Exception) -> Failure:
    """Returns the failure of an episode that ended with `error`, which is logged if unexpected.

    An unexpected error counts against the environment: one that fails all episodes ends the run.
    """
    said = str(error)
    if isinstance(error, EnvironmentFailed):
        kind = FailureKind(error.kind)
    elif type(error) in _KINDS:
        kind = _KINDS[type(error)]
    else:
        log.error("an episode ended with an unexpected error", exc_info=error)
        kind, last = FailureKind.ENVIRONMENT, traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno} in {last.name}"
        said = f"unexpected error of the rollout server: {type(error).__name__}: {said} ({place})"
    # Texts of models and templates may have what no message can carry.
    clean = said.encode(errors="replace").decode()
    return Failure(kind, clean[:MAX_MESSAGE_CHARACTERS])


class Episode:
    """One attempt of a group's member; `run` may be called once, and `cancel` ends it early."""

    def __init__(self, task: EpisodeTask, services: EpisodeServices, ledger: EpochCounters) -> None:
        self._task, self._lease = task, task.lease
        self._services, self._ledger = services, ledger
        self._recording = Recording()
        self._cancelled = False
        # The call to the environment that is being awaited.
        self._waiting: asyncio.Future[Any] | None = None
        self._generating = False
        self._num_calls = 0

    async def run(self) -> Trajectory:
        """Runs the episode to its end; returns the trajectory, with the cause of a failure.

        Raises only EngineDied and ConfigError, which end the server.
        """
        self._ledger.open_episodes += 1
        status, failure = Status.FAILED, None
        try:
            status = await self._play()
        except _Cancelled:
            status = Status.CANCELLED
        except (EngineDied, ConfigError):
            self._ledger.is_broken_off = True
            raise
        except Exception as error:  # noqa: BLE001 - logged, and told as the episode's failure
            failure = _failure(error)
        except BaseException:
            self._ledger.is_broken_off = True
            raise
        self._ledger.ended(self._recording.num_sampled)
        try:
            return self._trajectory(status, failure)
        except Exception as error:  # noqa: BLE001 - as above; the ledger shows the lost tokens
            self._recording = Recording()
            return self._trajectory(Status.FAILED, _failure(error))

    def _trajectory(self, status: Status, failure: Failure | None) -> Trajectory:
        renderer, num_experts = self._services.renderer, self._services.engine.num_experts
        return trajectory_of(
            self._task, self._recording, status, failure, renderer=renderer, num_experts=num_experts
        )

    async def _play(self) -> Status:
        session: StreamSession | None = None
        try:
            session = await self._ask(
                self._services.environments.open(
                    self._lease.environment,
                    self._task.key,
                    self._lease.task_index,
                    self._task.attempt,
                    self._lease.timeout_s,
                )
            )
            status = await self._converse(session)
            await self._ask_reference(status)
            return status
        finally:
            if session is not None:
                session.close()

    async def cancel(self) -> None:
        """Makes `run` return soon, with the tokens sampled so far, unless `run` has ended."""
        self._cancelled = True
        if self._waiting is not None:
            self._waiting.cancel()
        if self._generating:
            await self._services.engine.cancel(self._task.key)

    async def _converse(self, session: StreamSession) -> Status:
        lease, services = self._lease, self._services
        opening = await self._ask(session.reset(lease.task_index, lease.seed))
        self._recording.max_reply_tokens = opening.max_reply_tokens
        self._recording.expected_answer = opening.expected_answer
        if opening.is_agent:
            return await self._serve_agent(session, opening.max_reply_tokens)
        talk = EnvironmentTalk(
            session,
            self._recording,
            lease.sampling,
            renderer=services.renderer,
            agents=services.agents,
            ask=self._ask,
            generate=self._generate,
            give=self._give,
        )
        return await talk.run(opening, TemplateInputs(opening.tools, lease.template_values))

    async def _serve_agent(self, session: StreamSession, max_reply_tokens: int) -> Status:
        """Answers the agent's calls until it returns, then records its conversations.

        Returns how the episode ended. Raises EnvironmentFailed if the agent fails.
        """
        task, lease, recording = self._task, self._lease, self._recording
        api = await self._ask(self._services.agents.api())
        engine, values = self._services.engine, read_values(lease.template_values)
        most = min(max_reply_tokens or math.inf, lease.sampling.max_reply_tokens)
        turns = lease.sampling.max_turns or MAX_TURNS
        recorder = Recorder(
            engine,
            task.key,
            dataclasses.replace(lease.sampling, max_reply_tokens=int(most), max_turns=turns),
            as_messages=api.as_messages,
            sampled=self._ledger.sampled,
            template_values=values,
        )
        recorder.on_reply = self._trace_call
        judge = None
        if engine.keeps_start:
            judge = Recorder(
                engine,
                f"judge/{task.key}",
                judge_sampling(lease.sampling),
                as_messages=api.as_messages,
                sampled=recording.judged,
                template_values=values,
                is_judge=True,
            )
        talk = AgentTalk(session, api, recorder, judge=judge, timeout_s=lease.timeout_s)
        shares: dict[str, float] = {}
        rewards: dict[str, float] = {}
        try:
            end = await self._ask(talk.run())
            recording.reward, shares, rewards = end.reward, end.shares, end.rewards
            recording.metrics.update(end.metrics)
        finally:
            recording.generation_s = recorder.clock.busy_s
            recording.environment_s = max(0.0, recording.environment_s - recording.generation_s)
            recording.take_branches(recorder.conversations, shares, rewards)
            for each in talk.recorders:
                recording.counts.update({IGNORED + name: n for name, n in each.ignored.items()})
        if not recording.num_sampled:
            raise misused("the agent returned a result without any reply of the model")
        return Status.TRUNCATED if recorder.is_truncated else Status.COMPLETED

    async def _ask_reference(self, status: Status) -> None:
        server, recording = self._services.reference, self._recording
        if server is not None and self._task.is_trained(status):
            recording.close()
            before_s = recording.environment_s
            recording.reference = await self._ask(server.logprobs(recording.sequences()))
            recording.environment_s = before_s

    async def _generate(self, max_tokens: int) -> Generation:
        if self._cancelled:
            raise _Cancelled
        engine, recording = self._services.engine, self._recording
        started_s, begun_s = time.monotonic(), time.time()
        self._generating = True
        try:
            generation = await engine.generate(
                self._task.key,
                recording.conversation,
                self._lease.sampling,
                max_tokens,
                experts_from=recording.num_routed,
                images=recording.conversation_images,
            )
        finally:
            self._generating = False
            recording.generation_s += time.monotonic() - started_s
        recording.add_reply(generation)
        self._ledger.sampled(len(generation.token_ids))
        self._trace_call(begun_s, len(generation.token_ids))
        if self._cancelled:
            raise _Cancelled
        if generation.finish_reason in (FinishReason.CANCELLED, FinishReason.FAILED):
            raise GenerationFailed(f"the engine abandoned the request: {generation.finish_reason}")
        return generation

    def _trace_call(self, begin_s: float, num_tokens: int) -> None:
        self._num_calls += 1
        traces = self._services.traces
        traces.call(self._task, self._num_calls, begin_s=begin_s, num_tokens=num_tokens)

    def _give(self, tokens: Sequence[int], finish_reason: FinishReason) -> Generation:
        """Records a reply that the environment gave in place of the model.

        The reply's log-probabilities are 0, since the environment would give the same reply again.
        Its version is the version that the engine serves now. Raises GenerationFailed before the
        first version.
        """
        version = self._services.engine.version
        if version is None:
            raise GenerationFailed("the engine has no weights yet")
        generation = Generation(
            np.asarray(tokens, dtype=np.uint32),
            np.zeros(len(tokens), dtype=np.float32),
            (VersionSpan(len(tokens), version),),
            finish_reason,
        )
        self._recording.add_reply(generation)
        self._ledger.given(len(tokens))
        return generation

    async def _ask(self, call: Awaitable[Answer]) -> Answer:
        """Awaits the answer to `call`. Raises _Cancelled if `cancel` is called meanwhile."""
        self._waiting = waiting = asyncio.ensure_future(call)
        if self._cancelled:
            waiting.cancel()
        started_s = time.monotonic()
        try:
            return await waiting
        except asyncio.CancelledError:
            if not self._cancelled:
                waiting.cancel()
                raise
            raise _Cancelled from None
        finally:
            self._waiting = None
            self._recording.environment_s += time.monotonic() - started_s

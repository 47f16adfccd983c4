"""The calls of an agent in one episode, from its observation to its result.

Consumes: calls of the agent. Produces: the answers, part by part. Waits for: calls, the model, the
agent to take a part. Unblocked by: these, the environment's limit while no call is open, or the
task's cancellation.
"""

import asyncio
import contextlib
import logging

from slipstream.core.errors import EnvironmentFailed
from slipstream.rollout_server.agents.agent_api import Answering
from slipstream.rollout_server.agents.limits import MAX_JUDGE_CALLS, HttpCall
from slipstream.rollout_server.agents.recorder import Recorder
from slipstream.rollout_server.episodes.calls import AgentEnd, StreamSession
from slipstream.v1 import environment_pb2, trajectory_pb2

log = logging.getLogger(__name__)

# Requests under this prefix go to the frozen starting model.
JUDGE_PATH = "/judge/"


class AgentTalk:
    """Serves one agent: `run` it once; when it returns, no call of the agent is open any more."""

    def __init__(
        self,
        session: StreamSession,
        answering: Answering,
        recorder: Recorder,
        *,
        judge: Recorder | None,
        timeout_s: float,
    ) -> None:
        """`judge`: recorder of judge calls; None if the server keeps no frozen version.

        `timeout_s`: how long the agent may take with no call open.
        """
        self._session, self._answering = session, answering
        self._recorder, self._judge = recorder, judge
        self._num_judge_calls = 0
        self._timeout_s = timeout_s
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._last_call = 0

    async def run(self) -> AgentEnd:
        """Answers calls until the agent returns its result.

        Raises EnvironmentFailed where it does not.
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
                    raise await self._session.examine(self._late())
                self._forget_answered()
                if not waiting.done():
                    continue
                message = waiting.result()
                if isinstance(message, AgentEnd):
                    return message
                self._take(message)
                waiting = asyncio.ensure_future(self._session.next_call())
        finally:
            recorders = [each for each in (self._recorder, self._judge) if each is not None]
            for recorder in recorders:
                recorder.cancel()
            open_tasks = [waiting, *self._calls.values()]
            for task in open_tasks:
                task.cancel()
            await asyncio.wait(open_tasks)
            for recorder in recorders:
                await recorder.settled()

    def _late(self) -> EnvironmentFailed:
        return EnvironmentFailed(
            trajectory_pb2.FAILURE_KIND_TIMEOUT,
            f"the agent neither called the model nor returned a result within "
            f"{self._timeout_s:g} s, the environment's timeout_s",
        )

    def _take(self, message: environment_pb2.AgentCall) -> None:
        if message.is_abandoned:
            task = self._calls.get(message.call)
            self._recorder.hang_up(message.call)
            if self._judge is not None:
                self._judge.hang_up(message.call)
            if task is not None:
                task.cancel()
            return
        if message.call <= self._last_call:
            raise _wrong(
                f"calls of an agent are counted up, got {message.call} behind {self._last_call}"
            )
        self._last_call = message.call
        self._calls[message.call] = asyncio.ensure_future(self._answer(message))

    def _recorder_of(self, path: str) -> Recorder:
        """Returns the recorder of a call to `path`; raises EnvironmentFailed if there is no judge.

        Trying the call again would not help, so the episode ends with the cause.
        """
        if not path.startswith(JUDGE_PATH):
            return self._recorder
        if self._judge is None:
            raise _wrong(
                "endpoint.judge() needs lora.publish = adapters: without adapters a server holds "
                "the newest version alone; name a judge with an address of its own"
            )
        self._num_judge_calls += 1
        if self._num_judge_calls > MAX_JUDGE_CALLS:
            raise _wrong(f"an episode may ask its judge {MAX_JUDGE_CALLS} times, it asked again")
        return self._judge

    def _forget_answered(self) -> None:
        """Forgets calls that are over; raises what ended one of them."""
        for number, task in list(self._calls.items()):
            if task.done():
                del self._calls[number]
                if not task.cancelled():
                    task.result()

    async def _answer(self, message: environment_pb2.AgentCall) -> None:
        recorder = self._recorder_of(message.path)
        path = message.path
        if recorder is self._judge:
            path = f"/{path.removeprefix(JUDGE_PATH)}"
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


def _wrong(what: str) -> EnvironmentFailed:
    return EnvironmentFailed(trajectory_pb2.FAILURE_KIND_ENVIRONMENT, what)

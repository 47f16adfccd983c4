"""Workers of an environment without processes, which end where a script says so."""

import asyncio
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

from slipstream.core.errors import EnvironmentFailed
from slipstream.protocol.running_calls import RunningCalls
from slipstream.rollout_server.episodes.calls import CallTable
from slipstream.rollout_server.episodes.environments import HostedEnvironment
from slipstream.rollout_server.episodes.worker_gateway import (
    WorkerGateway,
    WorkerLimits,
)
from slipstream.rollout_server.episodes.workers import EnvironmentWorker
from slipstream.v1 import environment_pb2, fleet_pb2

CAUSE = "worker exited with code 7"
# Seconds in which a worker starts, and in which a model replies.
START_S = 3.0
REPLY_S = 1.0


class ScriptedWorker(EnvironmentWorker):
    """Answers every call at once, unless the call ends the worker."""

    def __init__(self, hosted: "ScriptedEnvironment") -> None:
        super().__init__(None, hosted.spec, hosted._suspects)
        self._hosted = hosted
        self.table = CallTable(self._take)
        self._is_hung = False
        self._hung_key = ""
        self._process = self
        self.look_s = hosted.look_s

    def calls(self) -> RunningCalls:
        """The call that the worker does not answer."""
        return RunningCalls((self._hung_key,), self._hung_key, "script.py:1 in step")

    def _take(self, command: environment_pb2.WorkerCommand) -> None:
        asyncio.get_running_loop().call_soon(self._answer, command)

    def _answer(self, command: environment_pb2.WorkerCommand) -> None:
        if self._gone.is_set() or self._is_hung:
            return
        answer = environment_pb2.WorkerMessage(call_id=command.call_id)
        if command.HasField("reset"):
            answer.observation.SetInParent()
        elif command.HasField("step"):
            key = command.step.episode_key
            self._hosted.num_steps += 1
            if self._hosted.ends(self._hosted.num_steps, self.episodes[key]):
                self._is_hung = True
                self._hung_key = key
                asyncio.get_running_loop().call_later(
                    self._hosted.hang_s, self._end, key
                )
                return
            answer.verdict.reward = 1.0
        elif command.HasField("ping"):
            answer.pong.SetInParent()
        self.table.answered(answer)

    def _end(self, key: str) -> None:
        self._lose(CAUSE, [key] if self._hosted.tells else [])
        self._gone.set()

    async def run(self, index: int, loaded: Callable[[int], None]) -> EnvironmentFailed:
        self._hosted.num_starts += 1
        await asyncio.sleep(START_S)
        loaded(environment_pb2.Loaded(num_tasks=1000))
        watching = asyncio.create_task(self._watch_calls())
        await self._gone.wait()
        watching.cancel()
        return EnvironmentFailed(1, CAUSE)


class ScriptedEnvironment(HostedEnvironment):
    """An environment of one worker, which ends at the steps for which `ends` is true.

    `ends` gets the number of the step, from 1 on, and its task. `tells` says whether an end shows
    whose call was under way, and the worker answers nothing for `hang_s` seconds before it. Every
    `look_s` seconds a worker looks whether a call holds up the others.
    """

    def __init__(
        self,
        ends: Callable[[int, int], bool],
        *,
        tells: bool,
        lone_workers: int = 1,
        hang_s: float = 0.0,
        look_s: float = math.inf,
    ) -> None:
        spec = environment_pb2.EnvironmentSpec(name="scripted", num_workers=1)
        self.reports: list[fleet_pb2.EnvironmentReport] = []
        order = fleet_pb2.EnvironmentOrder(spec=spec)
        gateway = SimpleNamespace(limits=WorkerLimits(lone_workers=lone_workers))
        super().__init__(cast(WorkerGateway, gateway), order, self.reports.append)
        self.ends = ends
        self.tells = tells
        self.hang_s = hang_s
        self.look_s = look_s
        self.num_steps = self.num_starts = 0

    def _make(self, **_: object) -> ScriptedWorker:
        return ScriptedWorker(self)

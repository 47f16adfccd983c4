"""The open episodes of agents in one process, and the gateway that they share."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from slipstream.client.agent import AgentEnvironment
from slipstream.client.agents.exchange import CallExchange
from slipstream.client.agents.run import AgentRun
from slipstream.client.answers import agent_result
from slipstream.client.loading import environment_failed
from slipstream.v1 import environment_pb2 as pb

if TYPE_CHECKING:
    from slipstream.client.agents.gateway import Gateway

# Seconds that a run may take to end after it was interrupted.
END_LIMIT_S = 10.0
# Runs that did not end with their episodes; beyond this number no episode begins.
MAX_LEFT_RUNS = 256

# Told when the code of a run begins and ends to work, which it does while it waits for no reply.
OnBusy = Callable[["asyncio.Task[Any]", bool], None]


class AgentEpisode:
    """One episode: reset -> next() starts `run` -> calls and parts -> next() gives the result.

    `end` ends it at any time. The endpoint is refused as soon as `run` has returned.
    """

    def __init__(
        self,
        environment: AgentEnvironment[Any],
        task: object,
        gateway: Gateway,
        *,
        on_busy: OnBusy,
    ) -> None:
        self._environment = environment
        self._task = task
        self._gateway = gateway
        self._exchange = CallExchange(on_waiting=lambda is_waiting: self._note_busy(not is_waiting))
        self._endpoint = gateway.open(self._exchange)
        self._run: AgentRun | None = None
        self._on_busy = on_busy
        self._is_busy = False

    async def next(self) -> pb.AgentCall | pb.AgentResult:
        """Returns the agent's next call, or its result; raises what `run` raised."""
        if self._run is None:
            self._run = AgentRun(self._environment, self._task, self._endpoint)
            self._note_busy(True)
            self._run.task.add_done_callback(lambda _: self._stop_calls())
        call = await self._exchange.next()
        return call if call is not None else agent_result(self._run.result())

    async def part(self, part: pb.ReplyPart) -> None:
        """Hands a part of a reply to the agent; returns when the agent has taken it."""
        await self._exchange.part(part)

    def place(self) -> str:
        """Returns where the agent's code is; "" if that is not known."""
        return self._run.place() if self._run is not None else ""

    async def end(self, limit_s: float) -> AgentRun | None:
        """Interrupts the run; returns it if it does not end within `limit_s`."""
        self._stop_calls()
        if self._run is None or await self._run.end(limit_s):
            return None
        return self._run

    def _note_busy(self, is_busy: bool) -> None:
        is_busy = is_busy and not self._exchange.has_ended
        if self._run is not None and is_busy != self._is_busy:
            self._is_busy = is_busy
            self._on_busy(self._run.task, is_busy)

    def _stop_calls(self) -> None:
        if not self._exchange.has_ended:
            self._gateway.forget(self._endpoint)
            self._exchange.end()
            self._note_busy(False)


class AgentEpisodes:
    """Opens the episodes of one host; the first one starts the gateway."""

    def __init__(
        self, *, end_limit_s: float = END_LIMIT_S, max_left_runs: int = MAX_LEFT_RUNS
    ) -> None:
        self._end_limit_s = end_limit_s
        self._max_left_runs = max_left_runs
        self._gateway: Gateway | None = None
        # Runs whose episodes have ended.
        self._left: list[AgentRun] = []

    def open(
        self, environment: AgentEnvironment[Any], task: object, *, on_busy: OnBusy
    ) -> AgentEpisode:
        """Opens an episode; EnvironmentFailed when too many earlier runs have not ended."""
        self._left = [run for run in self._left if run.is_alive]
        if len(self._left) >= self._max_left_runs:
            raise environment_failed(
                f"{len(self._left)} runs go on after the end of their episodes, the limit is "
                f"{self._max_left_runs}: run() must end when its calls are refused"
            )
        if self._gateway is None:
            # Its HTTP server takes as long to import as all else in a worker.
            from slipstream.client.agents.gateway import Gateway

            self._gateway = Gateway()
        return AgentEpisode(environment, task, self._gateway, on_busy=on_busy)

    async def end(self, episode: AgentEpisode, key: str) -> None:
        """Ends an episode; a run that does not end is left alone, and named on stderr."""
        left = await episode.end(self._end_limit_s)
        if left is not None:
            self._left.append(left)
            place = left.place()
            where = f" ({place})" if place else ""
            print(
                f"the run of episode {key} did not end within {self._end_limit_s:g} s{where}",
                file=sys.stderr,
            )

    async def close(self) -> None:
        """Closes the gateway; the next episode starts another one."""
        gateway, self._gateway = self._gateway, None
        if gateway is not None:
            await gateway.close()

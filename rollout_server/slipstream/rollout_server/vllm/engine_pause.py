"""Pauses vLLM's engine, and holds the requests that arrive during a pause.

Consumes: orders to pause and to resume. Waits for: the engine's answers; held requests wait for
their admission. Unblocked by: these, or the limit of an answer, after which the engine
counts as hung. A held request is unblocked by `resume`, `pause` or `release`.
"""

import asyncio
import time
from collections.abc import Awaitable

from slipstream.core.types import PolicyVersion
from slipstream.rollout_server.engine_interface import EngineDied, answered
from slipstream.rollout_server.usage import UseClock
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

# Seconds after which an engine that has not answered an order to pause or resume counts as hung. A
# step or two, and the calls before the order, take less.
ANSWER_LIMIT_S = 120.0


class EnginePause:
    """Pauses and resumes one engine, and holds requests that arrive in between.

    Order of calls for an engine with requests: `pause_for_update`, the update, `resume(version)`.
    For an idle engine: `hold_requests`, the update and `resume_idle(version)` at the same time,
    then `resume(version)`. For rejected weights: `pause`, after which requests wait in the engine.
    If the learner trains on the engine's GPU: `rest`, then either `wake_weights` and an update, or
    `resume` with the previous version.
    """

    def __init__(self, llm: AsyncLLM, *, recompute_context: bool) -> None:
        """`recompute_context` is the setting of that name in `rollout_server`."""
        self._llm = llm
        self._recompute = recompute_context
        # The version of the newest `resume`.
        self.version: PolicyVersion | None = None
        # Paused from the order to pause, or to hold requests, to the answer of `resume`.
        self.clock = UseClock()
        self._lets_in = True
        # Requests that are held, in the order in which they came.
        self._held: dict[str, asyncio.Future[None]] = {}
        # The version of an engine that was resumed while its requests are held.
        self._ahead: PolicyVersion | None = None
        # Whether the engine has freed its memory, which `wake_weights` and `resume` allocate again.
        self._gave_back = False

    @property
    def salt(self) -> str | None:
        """The `cache_salt` of vLLM for new requests, or None if they may use any cached prefix.

        A request uses only prefixes that were cached under its own salt.
        """
        if self._recompute or self.version is None:
            return None
        return _stamp(self.version)

    async def pause(self) -> None:
        """Pauses like `Engine.pause`; held requests are admitted, and wait in the engine.

        The engine discards all cached prefixes: the weights that computed them may not be used.
        """
        await self._pause(0.0, clear_cache=True)
        self._let_all_in()

    async def resume(self, version: PolicyVersion) -> None:
        if self._ahead != version:
            await self._call(self._resuming(version))
        self.version = version
        self._gave_back = False
        self.clock.resume()
        self._let_all_in()

    async def pause_for_update(self, update_limit_s: float) -> float:
        """Pauses all requests; drops their KV cache if the new weights are to recompute it.

        Returns the seconds that the pause took.

        `update_limit_s` is the time limit of an update that is ordered at the same time, since the
        engine may execute the update first.
        """
        if not self._recompute:
            # Later requests belong to the new weights and must not get the salt of the old ones.
            self._lets_in = False
        begun_s = time.monotonic()
        await self._pause(update_limit_s, clear_cache=self._recompute)
        return time.monotonic() - begun_s

    async def _pause(self, update_limit_s: float, *, clear_cache: bool) -> None:
        # Does what vLLM's `pause_generation` does, without its sleep of 20 ms: late tokens carry
        # the version that the engine process stamped on them.
        self._ahead = None
        self.clock.pause()
        core = self._llm.engine_core
        pausing = core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)
        await self._call(pausing, update_limit_s)

    async def rest(self, *, give_back: bool) -> None:
        """Pauses like `Engine.rest`; requests that come meanwhile wait in the engine."""
        if not give_back:
            await self._pause(0.0, clear_cache=False)
            return
        self._ahead = None
        self._gave_back = True
        self.clock.pause()
        await self._call(self._llm.engine_core.sleep_async(1, "keep"))

    async def wake_weights(self) -> None:
        """Allocates the memory of the weights again, if it was freed; the engine stays paused."""
        if self._gave_back:
            await self._call(self._llm.engine_core.wake_up_async(["weights"]))

    def hold_requests(self) -> None:
        """Holds every new request; call it only while the engine has no running request."""
        self.clock.pause()
        self._lets_in = False

    async def resume_idle(self, version: PolicyVersion, update_limit_s: float) -> None:
        """Gives an idle engine its new version at once; requests stay held until `resume`.

        The engine need not be paused: a pause would wait for all work on the device, buckets too.
        An engine that rests is paused, and has kept what it cached: all that the weights before
        have computed is discarded here. For `update_limit_s` see `pause_for_update`.
        """
        self._ahead = version
        # What a tower has seen is stamped with its version by vLLM.
        discarding = asyncio.ensure_future(
            self._llm.engine_core.reset_prefix_cache_async(True, True)
        )
        # The engine takes calls in the order in which they are begun.
        calls = asyncio.gather(discarding, self._resuming(version))
        await self._call(calls, update_limit_s)

    async def let_in(self, request_id: str) -> None:
        """Waits until the engine may get requests, or until `release(request_id)` is called."""
        if self._lets_in:
            return
        admission = self._held[request_id] = asyncio.get_running_loop().create_future()
        try:
            await admission
        finally:
            del self._held[request_id]

    def release(self, request_id: str) -> None:
        """Ends the wait of a request, if it is held."""
        admission = self._held.get(request_id)
        if admission is not None and not admission.done():
            admission.set_result(None)

    def _let_all_in(self) -> None:
        self._lets_in = True
        for request_id in self._held:
            self.release(request_id)

    def _resuming(self, version: PolicyVersion) -> Awaitable[object]:
        """Returns the two calls to resume as one, in the order in which the engine takes them."""
        stamping = self._llm.update_weight_version(_stamp(version))
        if self._gave_back:
            # Resumes as soon as all memory is there.
            return asyncio.gather(stamping, self._llm.engine_core.wake_up_async(None))
        return asyncio.gather(stamping, self._llm.resume_generation())

    async def _call(self, call: Awaitable[object], update_limit_s: float = 0.0) -> None:
        complaint = "vLLM's engine neither paused nor resumed"
        try:
            async with answered(ANSWER_LIMIT_S + update_limit_s, complaint):
                await call
        except EngineDeadError as error:
            raise EngineDied(str(error)) from error


def _stamp(version: PolicyVersion) -> str:
    return f"{version.incarnation}:{version.step}"

"""Whether vLLM's engine runs its requests, and what it is told for that.

Consumes: orders to stand still and to go on. Waits for: the engine's answers; requests wait to be
let in. Unblocked by: the answers, or their limit: then the engine hangs; `resume`, `pause` or
`release`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from slipstream.protocol.types import PolicyVersion
from slipstream.rollout_server.inference.generation import EngineDied
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError


class Standstill:
    """Of one engine."""

    def __init__(
        self, llm: AsyncLLM, *, answer_limit_s: float, recompute_context: bool = True
    ) -> None:
        """`recompute_context`: see the setting of `rollout_server`."""
        self._llm, self._answer_limit_s = llm, answer_limit_s
        self._recompute = recompute_context
        self._version: PolicyVersion | None = None
        # Between the order to stand still, or to hold back, and the answer to the one to go on.
        self.is_on = False
        self._lets_in = True
        # Requests that are held back, in the order in which they came.
        self._held: dict[str, asyncio.Future[None]] = {}
        # The version that the engine goes on with already, while nothing is let in.
        self._ahead: PolicyVersion | None = None

    @property
    def salt(self) -> str | None:
        """What a request's cached prefixes must have been computed with; None: with anything.

        For vLLM's `cache_salt`.
        """
        if self._recompute or self._version is None:
            return None
        return _stamp(self._version)

    async def pause(self) -> None:
        """See `Engine`; requests that were held back wait in the engine then.

        Whatever was computed is forgotten: the weights may be nobody's.
        """
        await self._freeze(0.0, clear_cache=True)
        self._let_all_in()

    async def resume(self, version: PolicyVersion) -> None:
        """See `Engine`."""
        if self._ahead != version:
            await self._call(asyncio.gather(*self._going_on(version)))
        self._version, self.is_on = version, False
        self._let_all_in()

    async def freeze(self, update_limit_s: float) -> None:
        """Freezes what runs for an update; its context is forgotten if it is to be computed anew.

        `update_limit_s`: of an update that is ordered with it. The engine may take that first.
        """
        if not self._recompute:
            # What comes from now on is the new weights', and is not to be salted as the old ones'.
            self._lets_in = False
        await self._freeze(update_limit_s, clear_cache=self._recompute)

    async def _freeze(self, update_limit_s: float, *, clear_cache: bool) -> None:
        # What `pause_generation` does, without its 20 ms of sleep for the look of things: late
        # tokens carry the version that the engine process stamped on them.
        self._ahead, self.is_on = None, True
        core = self._llm.engine_core
        pausing = core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)
        await self._call(pausing, update_limit_s)

    def hold_back(self) -> None:
        """Lets no request in any more; for an engine in which nothing runs."""
        self.is_on = True
        self._lets_in = False

    async def turn_over(self, version: PolicyVersion, update_limit_s: float) -> None:
        """Takes `version` and goes on with nothing to do, until `resume` lets requests in.

        For an engine that is held back and was not paused: that waits for all that the device was
        given, buckets too. Its scheduler forgets cached prefixes then. For `update_limit_s` see
        `freeze`.
        """
        self._ahead = version
        await self._call(asyncio.gather(*self._going_on(version)), update_limit_s)

    async def let_in(self, request_id: str) -> None:
        """Returns when a request may be handed to the engine, or is released."""
        if self._lets_in:
            return
        held = self._held[request_id] = asyncio.get_running_loop().create_future()
        try:
            await held
        finally:
            del self._held[request_id]

    def release(self, request_id: str) -> None:
        """Ends the waiting of a request that is held back, if it is."""
        held = self._held.get(request_id)
        if held is not None and not held.done():
            held.set_result(None)

    def _let_all_in(self) -> None:
        self._lets_in = True
        for request_id in self._held:
            self.release(request_id)

    def _going_on(self, version: PolicyVersion) -> tuple[Awaitable[None], Awaitable[None]]:
        """Taken in this order; the second does not wait for the answer to the first."""
        stamping = self._llm.update_weight_version(_stamp(version))
        return stamping, self._llm.resume_generation()

    async def _call(self, call: Awaitable[object], update_limit_s: float = 0.0) -> None:
        limit_s = self._answer_limit_s + update_limit_s
        try:
            async with asyncio.timeout(limit_s):
                await call
        except TimeoutError:
            raise EngineDied(
                f"vLLM's engine neither paused nor resumed within {limit_s:g} s"
            ) from None
        except EngineDeadError as error:
            raise EngineDied(str(error)) from error


def _stamp(version: PolicyVersion) -> str:
    return f"{version.incarnation}:{version.step}"

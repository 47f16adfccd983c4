"""Calls of `WorkerExtension`'s methods on all workers of one engine.

Consumes: a method and its arguments. Produces: the answers of all workers. Waits for: the workers.
Unblocked by: their answers, or the death of the engine.
"""

from __future__ import annotations

from typing import Any

from slipstream.core.errors import WeightSyncError
from slipstream.rollout_server.engine_interface import EngineDied
from slipstream.rollout_server.weights.direct_line import DirectLine
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

# What a thread of each worker does beside the engine's.
_BESIDE_ENGINE = ("slipstream_begin", "slipstream_finish")


class WorkerCalls:
    """Calls all workers; takes the answers of vLLM or of the direct line, whichever come first."""

    def __init__(self, llm: AsyncLLM, line: DirectLine) -> None:
        self._llm, self._line = llm, line

    async def call_all(self, method: str, arguments: tuple[Any, ...]) -> list[Any]:
        """Returns all workers' answers; EngineDied, or WeightSyncError when vLLM's call fails.

        A call once made runs to its end, also when its caller no longer waits.
        """
        # With arguments it must not overtake the order to pause, which goes through vLLM.
        if method in _BESIDE_ENGINE and not arguments and self._line.is_up:
            return await self._line.call(method)
        return await self._line.answers(
            lambda number: self._through_vllm(method, (number, *arguments))
        )

    def close(self) -> None:
        """Closes the direct line."""
        self._line.close()

    async def _through_vllm(self, method: str, arguments: tuple[Any, ...]) -> list[Any]:
        try:
            return list(await self._llm.collective_rpc(method, args=arguments))
        except EngineDeadError as error:
            raise EngineDied(str(error)) from error
        except Exception as error:
            # vLLM gives every failed call the same class.
            raise WeightSyncError(_last_line(error)) from error


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__

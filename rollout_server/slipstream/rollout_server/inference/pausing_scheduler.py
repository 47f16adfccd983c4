"""vLLM's scheduler, with short pauses: an engine stands still at every publish."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

# What another thread needs to send a short message.
ANSWER_S = 0.0002


class PausingScheduler(Scheduler):  # type: ignore[misc]
    """See vLLM's, also for which plans it makes."""

    _has_resumed = False

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:  # noqa: ANN401 - vLLM's own
        """See vLLM, which goes through every block while the engine stands still.

        Only those that are cached have anything to be reset.
        """
        pool = self.kv_cache_manager.block_pool
        every = pool.blocks
        if not pool._reuse_watchers:
            pool.blocks = list(_cached_blocks(pool))
        try:
            return bool(super().reset_prefix_cache(*args, **kwargs))
        finally:
            pool.blocks = every

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Notes the end of a pause for the next `schedule`.

        Who goes on without a pause, which forgets cached prefixes, has new weights too.
        """
        self._has_resumed = pause_state is PauseState.UNPAUSED
        if self._has_resumed and self.pause_state is PauseState.UNPAUSED:
            self.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        super().set_pause_state(pause_state)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:  # noqa: ANN401 - vLLM's own
        """See vLLM; the first plan after a pause lets the answer to who ended the pause go first.

        A plan for all requests anew may take longer than Python lets another thread wait for its
        turn, 5 ms: so long the answer would lie there, and the pause seem longer than it was.
        """
        if self._has_resumed:
            self._has_resumed = False
            time.sleep(ANSWER_S)
        return super().schedule(*args, **kwargs)


def _cached_blocks(pool: BlockPool) -> Iterator[KVCacheBlock]:
    for found in pool.cached_block_hash_to_block._cache.values():
        if isinstance(found, dict):
            yield from found.values()
        else:
            yield found

"""vLLM's scheduler with shorter pauses: an engine pauses at every publish."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

# Seconds that another thread needs to send a short message.
ANSWER_S = 0.0002


class PausingScheduler(Scheduler):  # type: ignore[misc]
    """Plans steps as vLLM's scheduler does; pauses and resumes faster."""

    _has_resumed = False

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:  # noqa: ANN401 - vLLM's own
        """See vLLM, which goes through every block while the engine is paused.

        Only cached blocks have anything to reset: vLLM is shown no others.
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

        An engine that is resumed without a pause has new weights too: cached prefixes, which a
        pause would have forgotten, are forgotten here.
        """
        self._has_resumed = pause_state is PauseState.UNPAUSED
        if self._has_resumed and self.pause_state is PauseState.UNPAUSED:
            self.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        super().set_pause_state(pause_state)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:  # noqa: ANN401 - vLLM's own
        """See vLLM; the first plan after a pause lets the answer to `resume` leave first.

        Python lets another thread wait 5 ms for its turn, and a plan for all requests may take
        longer. The answer would lie there meanwhile, and the pause would seem longer than it was.
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

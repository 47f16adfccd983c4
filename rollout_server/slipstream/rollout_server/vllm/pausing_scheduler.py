"""vLLM's scheduler with shorter pauses: an engine pauses at every publish."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slipstream.rollout_server.weights.direct_line import tell
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler


class PausingScheduler(Scheduler):  # type: ignore[misc]
    """Plans steps as vLLM's scheduler does; pauses and resumes faster."""

    _num_resumes = 0

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
        """Tells the server at once that the engine takes steps again: the mark `resumed N`.

        An engine that is resumed without a pause has new weights too: cached prefixes, which a
        pause would have forgotten, are forgotten here.
        """
        resumes = pause_state is PauseState.UNPAUSED
        if resumes and self.pause_state is PauseState.UNPAUSED:
            self.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        super().set_pause_state(pause_state)
        if resumes:
            self._num_resumes += 1
            # Here, since vLLM's answer may wait for the next plan: Python gives another thread its
            # turn after 5 ms.
            tell(f"resumed {self._num_resumes}")


def _cached_blocks(pool: BlockPool) -> Iterator[KVCacheBlock]:
    for found in pool.cached_block_hash_to_block._cache.values():
        if isinstance(found, dict):
            yield from found.values()
        else:
            yield found

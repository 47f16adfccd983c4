"""An engine without a model, for what a rollout server alone could serve."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence

import numpy as np
from rollout_engines import WORD_IDS
from slipstream.core.types import LogprobArray, PolicyVersion, VersionSpan
from slipstream.rollout_server.engine_interface import (
    EngineUse,
    FinishReason,
    Generation,
    LoadedWeights,
    Sampling,
)


class InstantEngine:
    """Answers every request at once with as many tokens as it may: an `Engine` without a model."""

    num_workers = 1
    max_model_len = 1 << 20
    vocab_size = 1 << 20
    num_experts = 0
    version = PolicyVersion(0, 1)

    def __init__(self) -> None:
        """Nothing was generated yet."""
        self._tokens = 0
        # Our engine does the same after its start.
        gc.collect()
        gc.freeze()

    def use(self) -> EngineUse:
        """See `Engine`."""
        return EngineUse(self._tokens, self._tokens, 0, 0.0, ())

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        max_tokens: int,
        *,
        experts_from: int = 0,
        images: Sequence[object] = (),
    ) -> Generation:
        """See `Engine`."""
        await asyncio.sleep(0)
        self._tokens += max_tokens
        return Generation(
            np.resize(np.asarray(WORD_IDS, dtype=np.uint32), max_tokens),
            np.zeros(max_tokens, dtype=np.float32),
            (VersionSpan(max_tokens, self.version),),
            FinishReason.LENGTH,
        )

    async def cancel(self, request_id: str) -> None:
        """See `Engine`."""

    async def pause(self) -> None:
        """See `Engine`."""

    async def prepare_weights(self, *_: object) -> None:
        """See `Engine`."""

    async def receive_weights(self, publish_id: str) -> LoadedWeights:
        """See `Engine`."""
        return LoadedWeights((), by_plan=False, pause_s=0.0, receive_s=0.0, load_s=0.0)

    async def resume(self, version: PolicyVersion) -> None:
        """See `Engine`."""

    async def teacher_forced_logprobs(
        self, sequences: Sequence[Sequence[int]], adapters: Sequence[str] = ()
    ) -> LogprobArray:
        """See `Engine`."""
        return np.zeros(0, dtype=np.float32)

    async def watch(self) -> None:
        """See `Engine`."""
        await asyncio.Event().wait()

    async def aclose(self) -> None:
        """See `Engine`."""

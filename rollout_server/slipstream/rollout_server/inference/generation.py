"""What the rollout server asks of an inference engine, whichever it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt
from slipstream.protocol.errors import SlipstreamError
from slipstream.protocol.types import LogprobArray, PolicyVersion, TokenArray, VersionSpan
from slipstream.v1 import weights_pb2


class EngineDied(SlipstreamError):
    """The inference engine is gone: nothing can be generated until the server is started again."""


class GenerationFailed(SlipstreamError):
    """The engine is alive but could not serve this request."""


class FinishReason(Enum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "abort"
    # The engine gave the request up.
    FAILED = "error"


@dataclass(frozen=True)
class Sampling:
    """How replies are sampled, and the limits of an episode.

    `temperature` 0 takes the most probable token; `top_k` 0 is no limit. `max_episode_tokens`
    counts context and sampled tokens, `max_turns` the replies; `ignore_eos` goes on after the
    end-of-text token. `max_prompt_tokens` is the limit of the context before the first reply; 0:
    what leaves room for one token of it. A reply ends with the first of `stop_token_ids`, too,
    and with the token that completes the first of the texts in `stop`.
    """

    temperature: float
    top_p: float
    top_k: int
    max_reply_tokens: int
    max_turns: int
    max_episode_tokens: int
    ignore_eos: bool = False
    max_prompt_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Generation:
    """One reply, or as much of it as there was when it was cancelled or failed.

    `logprobs` are natural logarithms after temperature and truncation of the distribution, one for
    each token; the lengths of `version_spans` add up to the number of tokens. `cached_tokens` of
    the prompt were not computed. `expert_ids` is [tokens, layers, experts per token]: which experts
    the tokens from `experts_from` on went to when each was first computed, the last one that was
    sampled left out, which never was; None from an engine that does not record them.
    """

    token_ids: TokenArray
    logprobs: LogprobArray
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    cached_tokens: int = 0
    expert_ids: npt.NDArray[np.unsignedinteger] | None = None

    @classmethod
    def unbegun(cls) -> Generation:
        """Of a request that was cancelled before the engine knew it."""
        nothing = np.empty(0, dtype=np.float32)
        return cls(nothing.astype(np.uint32), nothing, (), FinishReason.CANCELLED)


@dataclass(frozen=True)
class EngineUse:
    """What an engine did since it was started.

    `generated_tokens` is counted where the engine hands out tokens, without those of probes. Of
    them `returned_tokens` belong to generations that ended. `busy_intervals` (Unix clock) are those
    since the last look; one that goes on is cut.
    """

    generated_tokens: int
    returned_tokens: int
    open_requests: int
    busy_s: float
    busy_intervals: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class LoadedWeights:
    """How an engine took new weights.

    `by_plan`: copied as they came, not through vLLM's loader; then they came while the engine was
    still finishing what was under way, for `pause_s`. Of the time that a worker took, `receive_s`
    went by until the last bucket had come, as far as nothing was loaded meanwhile; `load_s` is the
    rest. `wire_s`: from the first broadcast's start on the worker that came last to the end of the
    last one; 0 where that cannot be timed. `already_resumed`: nothing ran, and the engine
    has taken the new version; `resume` takes no time.
    """

    bucket_digests: tuple[bytes, ...]
    by_plan: bool
    pause_s: float
    receive_s: float
    load_s: float
    wire_s: float = 0.0
    already_resumed: bool = False


class Engine(Protocol):
    """An inference engine whose weights can be replaced while its requests wait.

    It starts paused, with weights that must not be served.
    """

    @property
    def num_workers(self) -> int:
        """Ranks that it occupies in a communicator."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence."""
        ...

    def use(self) -> EngineUse:
        """The counters; it starts a new list of busy intervals."""
        ...

    @property
    def num_experts(self) -> int:
        """Of each layer of a mixture of experts; 0: there are none."""
        ...

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        max_tokens: int,
        *,
        experts_from: int = 0,
    ) -> Generation:
        """Samples at most `max_tokens` tokens; waits while the engine is paused.

        Experts, if it records them, are returned of the tokens from `experts_from` on.
        GenerationFailed when the request cannot be served, EngineDied when none can.
        """
        ...

    async def cancel(self, request_id: str) -> None:
        """Ends a generation, paused or not: it returns what was handed out, if it is still open."""
        ...

    async def pause(self) -> None:
        """Freezes all requests between two tokens and forgets every cached prefix."""
        ...

    async def prepare_weights(
        self, order: weights_pb2.PublishOrder, layout: weights_pb2.WeightLayout, first_rank: int
    ) -> None:
        """Joins the communicator and makes ready for a whole set of weights; need not be paused.

        An empty layout is that of the publish before. WeightSyncError when it failed: the weights
        are what they were.
        """
        ...

    async def receive_weights(self, publish_id: str) -> LoadedWeights:
        """Pauses, and loads what `prepare_weights` announced; nothing is sampled until `resume`.

        Weights that nobody vouches for are given back by `pause`. WeightSyncError when it failed:
        the weights are then unusable, but the next publish may try again.
        """
        ...

    async def resume(self, version: PolicyVersion) -> None:
        """Goes on; tokens sampled from now on carry `version`."""
        ...

    async def teacher_forced_logprobs(self, sequences: Sequence[Sequence[int]]) -> LogprobArray:
        """Log-probability of every token but the first of each sequence, all in one array."""
        ...

    async def watch(self) -> None:
        """Never returns; raises EngineDied."""
        ...

    async def aclose(self) -> None:
        """Stops the engine and all of its processes."""
        ...

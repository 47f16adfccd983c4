"""The interface between the rollout server and its inference engine."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from slipstream.core.errors import SlipstreamError
from slipstream.core.models.vision.placed import PlacedImage
from slipstream.core.types import LogprobArray, PolicyVersion, TokenArray, VersionSpan
from slipstream.v1 import fleet_pb2, weights_pb2


class EngineDied(SlipstreamError):
    """The inference engine has ended; nothing can be generated until the server restarts."""


class GenerationFailed(SlipstreamError):
    """The engine is alive but could not serve this request."""


class RequestRefused(GenerationFailed):
    """Raised for a request that the engine refuses as invalid: its sender is at fault."""


class FinishReason(Enum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "abort"
    # The engine abandoned the request.
    FAILED = "error"


@dataclass(frozen=True)
class Sampling:
    """How replies are sampled, and the limits of an episode.

    `temperature` 0 takes the most probable token; `top_k` 0 is no limit. `max_episode_tokens`
    counts context and sampled tokens of each branch, `total_tokens` those of all branches.
    `max_turns` counts the replies of all branches; 0 means 256. With `ignore_eos` a reply does not
    end at the end-of-text token. `max_prompt_tokens` limits the context before the first reply;
    with 0, it need only leave room for one token of that reply. A reply also ends with the first of
    `stop_token_ids`, and with the token that completes the first of the texts in `stop`. `adapter`
    names the adapter that samples, or is "" if the run has at most one.
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
    max_total_tokens: int = 0
    max_branches: int = 16
    max_images: int = 0
    max_image_bytes: int = 0
    adapter: str = ""

    @classmethod
    def from_pb(cls, message: fleet_pb2.SamplingSettings) -> Sampling:
        """Returns the settings of a message; each field is the message's field of the same name."""
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            value = getattr(message, field.name)
            is_single = isinstance(value, float | int | str)
            values[field.name] = value if is_single else tuple(value)
        return cls(**values)

    @property
    def total_tokens(self) -> int:
        """The most tokens that an episode can have, all branches together."""
        return self.max_total_tokens or self.max_episode_tokens

    @property
    def distribution(self) -> dict[str, float]:
        """The settings that decide which token is drawn, by the names of vLLM and of its API."""
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}


@dataclass(frozen=True)
class Generation:
    """One reply, or the part of it that was sampled before it was cancelled or failed.

    `logprobs` are natural logarithms after temperature and truncation of the distribution, one for
    each token; the lengths of `version_spans` add up to the number of tokens. `cached_tokens` of
    the prompt came from the prefix cache. `expert_ids` is [tokens, layers, experts per token], or
    None if the engine does not record experts. It holds the experts of each token from index
    `experts_from` on, as the token was first computed. The last sampled token was never computed
    and is left out.
    """

    token_ids: TokenArray
    logprobs: LogprobArray
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    cached_tokens: int = 0
    expert_ids: npt.NDArray[np.unsignedinteger] | None = None

    @property
    def sampled_arrays(self) -> dict[str, LogprobArray]:
        """The values of each sampled token, by the trajectory's fields of `SAMPLED_ARRAYS`."""
        return {"behavior_logprobs": self.logprobs}

    @classmethod
    def unbegun(cls) -> Generation:
        """Returns the empty reply to a request that was cancelled before it reached the engine."""
        nothing = np.empty(0, dtype=np.float32)
        return cls(nothing.astype(np.uint32), nothing, (), FinishReason.CANCELLED)


# Sizes of a streamed reply's parts: a chunk of the engine, several chunks, or one token.
PartSize: TypeAlias = Literal["chunks", "large", "tokens"]


@dataclass(frozen=True)
class TextOptions:
    """How the text of a reply is decoded, and the options of a single request.

    `stop` are stop texts besides those of `Sampling`. `num_logprobs` most probable tokens are
    returned for each position, besides the sampled token; None means none. With `is_streamed`,
    parts of the size `parts` are yielded while the reply is sampled. With `by_start` the initial
    model samples, see `Engine.keeps_start`. With `with_stop` the text includes the stop text.
    """

    is_streamed: bool = False
    parts: PartSize = "chunks"
    by_start: bool = False
    stop: tuple[str, ...] = ()
    seed: int | None = None
    num_logprobs: int | None = None
    with_stop: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True


@dataclass(frozen=True)
class TextPart:
    """A part of a reply: new tokens and their text; the last part has the whole `generation`.

    `top_logprobs` are vLLM's, one mapping for each token, if the request has `num_logprobs`.
    `stop_reason` is the stop text or token that ended the reply.
    """

    token_ids: Sequence[int]
    text: str
    top_logprobs: Any = None
    stop_reason: int | str | None = None
    generation: Generation | None = None


@dataclass(frozen=True)
class EngineUse:
    """The counters of an engine since its start.

    `generated_tokens` counts all tokens that the engine returned, without those of probes;
    `returned_tokens` those of generations that ended, `judged_tokens` those of judges' replies.
    `drafted_tokens` were proposed by speculative decoding, `accepted_tokens` of them were kept.
    `steps` counts the steps that sampled tokens.
    """

    generated_tokens: int
    returned_tokens: int
    open_requests: int
    busy_s: float
    judged_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    steps: int = 0


@dataclass(frozen=True)
class LoadedWeights:
    """How an engine loaded new weights, and how many seconds each stage took.

    `by_plan` says that a copy plan loaded the weights, not vLLM's loader. `pause_s` lasted until
    the engine had paused; with a plan, buckets arrive meanwhile. In `receive_s` a worker waited for
    buckets, idle; `load_s` is the rest of its time. `wire_s` lasted from the start of the first
    broadcast on the worker that joined last to the end of the last broadcast; 0 if it cannot be
    timed. `already_resumed` says that the engine was idle and has the new version already, so that
    `resume` takes no time. `takes_deltas` says that the next update may be a delta. `began_s` is
    the monotonic time at which the current step had ended and the copies began; 0 if unknown.
    `staged` says that all buckets had arrived before the copies began.
    """

    bucket_digests: tuple[bytes, ...]
    by_plan: bool
    pause_s: float
    receive_s: float
    load_s: float
    wire_s: float = 0.0
    already_resumed: bool = False
    takes_deltas: bool = False
    began_s: float = 0.0
    staged: bool = False

    def stages(self, prepare_s: float, paused_at_s: float | None) -> fleet_pb2.PublishStages:
        """Returns the message that reports how long each stage of the publish took.

        `prepare_s`: seconds of preparation. `paused_at_s`: monotonic time from which requests
        waited, from which the seconds until the current engine step ended are counted; None if none
        waited.
        """
        return fleet_pb2.PublishStages(
            prepare_s=prepare_s,
            pause_s=self.pause_s,
            receive_s=self.receive_s,
            load_s=self.load_s,
            copied=self.by_plan,
            wire_s=self.wire_s,
            takes_deltas=self.takes_deltas,
            staged=self.staged,
            steps_s=max(0.0, self.began_s - paused_at_s) if paused_at_s else 0.0,
        )


class Engine(Protocol):
    """An inference engine whose weights can be replaced while its requests wait.

    It starts paused, with weights that must not be served.
    """

    @property
    def num_workers(self) -> int:
        """The number of ranks that the engine occupies in a communicator."""

    @property
    def max_model_len(self) -> int:
        """The largest number of tokens of a sequence, context and reply together."""

    @property
    def version(self) -> PolicyVersion | None:
        """The version of the newest `resume`, or None before the first."""

    @property
    def keeps_start(self) -> bool:
        """Whether the engine can also sample from the initial model, without an adapter."""

    @property
    def vllm_parts(self) -> Any:  # noqa: ANN401 - the application's `VllmParts`
        """The parts that vLLM's HTTP application needs besides the engine."""

    def use(self) -> EngineUse:
        """Returns the counters since the engine's start."""

    @property
    def num_experts(self) -> int:
        """The number of experts in each mixture-of-experts layer, or 0 if the model has none."""

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        max_tokens: int,
        *,
        experts_from: int = 0,
        images: Sequence[PlacedImage] = (),
    ) -> Generation:
        """Samples at most `max_tokens` tokens; waits while the engine is paused.

        `images` are those of the prompt, in which their tokens are already inserted. An engine that
        records experts returns those of the tokens from index `experts_from` on. Raises
        GenerationFailed when this request cannot be served, EngineDied when no request can.
        """

    def stream(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        max_tokens: int,
        *,
        options: TextOptions,
        experts_from: int = 0,
        images: Sequence[PlacedImage] = (),
    ) -> AsyncGenerator[TextPart, None]:
        """Samples like `generate`, and yields tokens and text in parts; read all of them."""

    async def cancel(self, request_id: str) -> None:
        """Ends an open generation, paused or not; `generate` returns the tokens so far."""

    async def pause(self) -> None:
        """Pauses all requests between two tokens and discards all cached prefixes."""

    async def rest(self, *, give_back: bool) -> None:
        """Pauses all requests until `resume`; cached prefixes stay.

        With `give_back` the engine also frees its GPU memory, and cached prefixes with it;
        `prepare_weights` and `resume` allocate that memory again.
        """

    async def prepare_weights(
        self, order: weights_pb2.PublishOrder, layout: weights_pb2.WeightLayout, first_rank: int
    ) -> None:
        """Joins the communicator and prepares to receive a whole set of weights; may run unpaused.

        An empty `layout` means the layout of the previous publish. After a WeightSyncError the
        weights are unchanged.
        """

    async def receive_weights(self, publish_id: str) -> LoadedWeights:
        """Pauses and loads the weights of `prepare_weights`; samples nothing until `resume`.

        If these weights may not be used, call `pause` instead of `resume`. After a WeightSyncError
        the weights are unusable, but the next publish may try again.
        """

    async def resume(self, version: PolicyVersion) -> None:
        """Resumes generation; tokens sampled from now on carry `version`."""

    async def teacher_forced_logprobs(
        self, sequences: Sequence[Sequence[int]], adapters: Sequence[str] = ()
    ) -> LogprobArray:
        """Returns the log-probability of every token but each sequence's first, in one flat array.

        `adapters` names the adapter of each sequence; a missing name means "".
        """

    async def watch(self) -> None:
        """Raises EngineDied when the engine has ended or hangs; never returns."""

    async def aclose(self) -> None:
        """Stops the engine and all of its processes."""

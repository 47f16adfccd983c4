"""The interface between the rollout server and its inference engine."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
from slipstream.core.errors import SlipstreamError
from slipstream.core.kept_tokens import KeptTokens, fit_a_record
from slipstream.core.models.images import PlacedImage
from slipstream.core.types import LogprobArray, PolicyVersion, TokenArray, VersionSpan
from slipstream.v1 import fleet_pb2, weights_pb2


class EngineDied(SlipstreamError):
    """Raised if the inference engine has ended or hangs; nothing can be generated any more."""


class GenerationFailed(SlipstreamError):
    """Raised if the engine could not serve a request; other requests may succeed."""


class RequestRefused(GenerationFailed):
    """Raised if the engine refuses a request as invalid: the sender of the request is at fault."""


@contextlib.asynccontextmanager
async def answered(limit_s: float, complaint: str) -> AsyncIterator[None]:
    """Raises EngineDied with `complaint` if the block takes more than `limit_s`."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise EngineDied(f"{complaint} within {limit_s:g} s") from None


class FinishReason(Enum):
    """The reason why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "abort"
    # The engine abandoned the request.
    FAILED = "error"


@dataclass(frozen=True)
class Sampling:
    """The settings with which replies are sampled, and the limits of an episode.

    `temperature` 0 takes the most probable token; `top_k` 0 means no limit. `min_p` is the least
    probability of a token as a part of the largest. `max_episode_tokens`
    limits the context and sampled tokens of each branch. `max_total_tokens` limits the tokens of
    all branches; 0 means `max_episode_tokens`. `max_turns` limits the replies of all branches; 0
    means 256. With `ignore_eos` a reply does not end at the end-of-text token. `max_prompt_tokens`
    limits the context before the first reply; with 0, that context need only leave room for one
    token of the reply. A reply also ends at the first token in `stop_token_ids`, and at the token
    that completes one of the texts in `stop`. `adapter` names the adapter that samples, or is "" if
    the run has at most one. With `by_start` the initial model samples, which needs adapters apart.
    `prompt_logprobs` asks for `Generation.prompt_logprobs`. `seed` is that of each reply; None
    takes the engine's own random numbers.
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
    by_start: bool = False
    prompt_logprobs: bool = False
    seed: int | None = None
    min_p: float = 0.0

    @classmethod
    def from_pb(cls, message: fleet_pb2.SamplingSettings) -> Self:
        """Returns the settings in `message`, whose fields have the same names."""
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            value = getattr(message, field.name)
            is_single = isinstance(value, float | int | str)
            values[field.name] = value if is_single else tuple(value)
        if not message.HasField("seed"):
            values["seed"] = None
        return cls(**values)

    @property
    def total_tokens(self) -> int:
        return self.max_total_tokens or self.max_episode_tokens

    def check_images(self, images: Collection[bytes]) -> None:
        """Raises ValueError if an episode may not have these encoded images."""
        if len(images) > self.max_images:
            limit = f"{self.max_images} images (sampling.max_images)"
            raise ValueError(f"an episode may have {limit}, got {len(images)}")
        largest = max(map(len, images), default=0)
        if largest > self.max_image_bytes:
            limit = f"{self.max_image_bytes} bytes (sampling.max_image_bytes)"
            raise ValueError(f"an image may have {limit}, got {largest}")

    @property
    def distribution(self) -> dict[str, float]:
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
        }

    @property
    def cuts(self) -> bool:
        """Whether tokens are left out of the distribution that replies are drawn from."""
        leaves_out = self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0
        return leaves_out and self.temperature > 0.0

    def fits_a_record(self, vocabulary: int) -> bool:
        """Whether tokens are left out, and a record has room for the others.

        Runs that need records have no other settings, but their evaluations may.
        """
        return self.cuts and fit_a_record(self.top_k, vocabulary)


@dataclass(frozen=True)
class Generation:
    """One reply, or the part that was sampled before the reply was cancelled or failed.

    `logprobs` are natural logarithms after temperature and truncation of the distribution, one for
    each token; the lengths of `version_spans` add up to the number of tokens. `cached_tokens` is
    the number of prompt tokens that came from the prefix cache. `expert_ids` is [tokens, layers,
    experts per token], or None if the engine does not record experts. It has the experts of the
    tokens of prompt and reply from the request's index `experts_from` on, as they were first
    computed. The last sampled token was never computed and is left out. `prompt_logprobs` has the
    log-probability at temperature 1 of each token of the prompt but the first, if asked for.
    `stop_text` is the text that ended the reply, or "" if no text did. `kept_tokens` has the tokens
    that each token was drawn from, or is None if the engine does not record them.
    """

    token_ids: TokenArray
    logprobs: LogprobArray
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    cached_tokens: int = 0
    expert_ids: npt.NDArray[np.unsignedinteger] | None = None
    prompt_logprobs: LogprobArray | None = None
    stop_text: str = ""
    kept_tokens: KeptTokens | None = None

    @property
    def sampled_arrays(self) -> dict[str, LogprobArray]:
        return {"behavior_logprobs": self.logprobs}

    @classmethod
    def unbegun(cls) -> Self:
        """Returns the empty reply to a request that was cancelled before it reached the engine."""
        nothing = np.empty(0, dtype=np.float32)
        return cls(nothing.astype(np.uint32), nothing, (), FinishReason.CANCELLED)


@dataclass(frozen=True)
class TextOptions:
    """The options of a single request, and of the decoding of its reply's text.

    `stop` has stop texts in addition to those in `Sampling`. `num_logprobs` is the number of most
    probable tokens that are returned for each position in addition to the sampled token; with None,
    parts have no `top_logprobs`. With `is_streamed`, parts are yielded while the reply is
    sampled. With `with_stop` the text includes the stop text.
    """

    is_streamed: bool = False
    stop: tuple[str, ...] = ()
    seed: int | None = None
    num_logprobs: int | None = None
    with_stop: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True


@dataclass(frozen=True)
class TextPart:
    """A part of a reply: new tokens and their text; the last part has the whole `generation`.

    `top_logprobs` is vLLM's sequence of one mapping for each token, or None if the request has no
    `num_logprobs`. `stop_reason` is the stop text or stop token that ended the reply, or None.
    """

    token_ids: Sequence[int]
    text: str
    top_logprobs: Any = None
    stop_reason: int | str | None = None
    generation: Generation | None = None


@dataclass(frozen=True)
class EngineUse:
    """The counters of an engine since its start.

    `generated_tokens` counts all tokens that the engine returned, except for probes.
    `returned_tokens` counts only tokens of generations that ended. `busy_s` is the time with at
    least one open request, without pauses, and `paused_s` the time of pauses after the first
    `resume`. `drafted_tokens` counts the tokens that speculative decoding proposed,
    `accepted_tokens` the proposed tokens that were kept.
    """

    generated_tokens: int
    returned_tokens: int
    open_requests: int
    busy_s: float
    paused_s: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True)
class LoadedWeights:
    """New weights that an engine has loaded: the digests of their buckets, and how long it took.

    `stages` has what the engine knows. `began_s` is the monotonic time at which the engine's
    current step had ended and the copies began, or 0 if unknown.
    """

    bucket_digests: tuple[bytes, ...]
    stages: fleet_pb2.PublishStages = dataclasses.field(default_factory=fleet_pb2.PublishStages)
    began_s: float = 0.0


class Requests(Protocol):
    """The requests of an engine; they wait while the engine is paused."""

    def use(self) -> EngineUse:
        """Returns the counters since the engine's start."""

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
        """Samples at most `max_tokens` tokens.

        `images` are the images of the prompt, which already has their image tokens. An engine that
        records experts returns the experts of the tokens from index `experts_from` on. Raises
        GenerationFailed if this request cannot be served, and EngineDied if no request can be.
        """
        arguments = (request_id, prompt_token_ids, sampling, max_tokens)
        parts = self.stream(*arguments, options=None, experts_from=experts_from, images=images)
        (end,) = [part.generation async for part in parts]
        assert end is not None
        return end

    def stream(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        max_tokens: int,
        *,
        options: TextOptions | None,
        experts_from: int = 0,
        images: Sequence[PlacedImage] = (),
    ) -> AsyncGenerator[TextPart, None]:
        """Samples like `generate`; yields tokens and text in parts, all of which must be read.

        `options` None asks for a single part without a text.
        """

    async def cancel(self, request_id: str) -> None:
        """Ends an open request soon, paused or not; `generate` returns the tokens so far.

        An unknown id is ignored.
        """


class Pauses(Protocol):
    """The pauses of an engine, which begins paused, with weights that must not be served."""

    # The version that `resume` was last called with, or None before the first call.
    version: PolicyVersion | None

    async def pause(self) -> None:
        """Pauses all requests between two tokens and discards all cached prefixes."""

    async def rest(self, *, give_back: bool) -> None:
        """Pauses all requests until `resume`; cached prefixes stay.

        With `give_back` the engine also frees its GPU memory, and cached prefixes with it;
        `prepare_weights` and `resume` allocate that memory again.
        """

    async def resume(self, version: PolicyVersion) -> None:
        """Resumes generation; tokens sampled from now on carry `version`."""


class Engine(Protocol):
    """An inference engine whose weights can be replaced while its requests wait."""

    # The number of ranks that the engine's workers occupy in a weight communicator.
    num_workers: int
    # The largest number of tokens of a sequence, context and reply together.
    max_model_len: int
    # The number of experts in each mixture-of-experts layer, or 0 if the model has none.
    num_experts: int
    # Why the engine does without features of options, by their names.
    disabled_features: Mapping[str, str]

    @property
    def requests(self) -> Requests:
        """The engine's requests."""

    @property
    def pauses(self) -> Pauses:
        """The engine's pauses."""

    async def prepare_weights(
        self, order: weights_pb2.PublishOrder, layout: weights_pb2.WeightLayout, first_rank: int
    ) -> None:
        """Joins the communicator and prepares to receive new weights; requests may run meanwhile.

        An empty `layout` means the layout of the previous publish. `first_rank` is the rank of the
        engine's first worker. Raises WeightSyncError if the preparation fails; the weights are then
        unchanged.
        """

    async def receive_weights(self, publish_id: str) -> LoadedWeights:
        """Pauses and loads the weights of `prepare_weights`; samples nothing until `resume`.

        If these weights may not be used, call `pause` instead of `resume`. Raises WeightSyncError
        if the update fails; the weights are then unusable, but the next publish may try again.
        """

    async def teacher_forced_logprobs(
        self, sequences: Sequence[Sequence[int]], adapters: Sequence[str] = ()
    ) -> LogprobArray:
        """Returns the log-probability of every token but each sequence's first, in one flat array.

        `adapters` has the name of each sequence's adapter; "" or a missing name means no named
        adapter.
        """

    async def watch(self) -> None:
        """Raises EngineDied when the engine has ended or hangs; never returns."""

    async def aclose(self) -> None:
        """Stops the engine and all of its processes."""

"""The open requests of an engine at an address: sent, cancelled, read and counted.

Consumes: prompts as token ids. Produces: sampled tokens with log-probabilities and versions. Waits
for: the server. Unblocked by: its answer, a cancelled request, or the loss of the server.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import numpy as np
from prometheus_client.core import Metric
from slipstream.core.models.images import PlacedImage
from slipstream.core.types import LogprobArray, VersionSpan
from slipstream.extensions.address_engine.address import GENERATE
from slipstream.extensions.address_engine.server.connection import Connection
from slipstream.extensions.address_engine.server.pauses import AddressPauses
from slipstream.extensions.address_engine.server.stamps import Stamps
from slipstream.rollout_server.engine_interface import (
    EngineDied,
    EngineUse,
    FinishReason,
    Generation,
    GenerationFailed,
    RequestRefused,
    Requests,
    Sampling,
    TextOptions,
    TextPart,
)

PROBE_PREFIX = "probe/"
# Limit of one reply, pauses included. A server that samples nothing may answer all else.
REPLY_LIMIT_S = 3600.0
# What vLLM puts before the id of a request for tokens. An abort of the bare id answers that it was
# aborted, and the reply goes on to its end.
_ID_PREFIX = "generate-tokens-"
_ABORT = "/inference/v1/abort_requests"
# The server may get an abort before the request that it is for.
_ABORT_PERIOD_S = 0.5
_ABORT_LIMIT_S = 60.0
# The number that vLLM sends for a probability of 0.
_CLAMPED = -9999.0
_REASONS = {reason.value: reason for reason in FinishReason}
# Statuses of a server that no longer offers the route, or takes our key.
_SHUT = (401, 403, 404)
_WRONG = (400, 422)


class AddressRequests(Requests):
    """The requests to one server, by id; during a pause they wait in the server."""

    def __init__(
        self,
        connection: Connection,
        pauses: AddressPauses,
        stamps: Stamps,
        *,
        vocabulary: int,
    ) -> None:
        """`vocabulary`: the number of token ids of the model, or 0 if it is unknown."""
        self._connection = connection
        self._pauses = pauses
        self._stamps = stamps
        self._vocabulary = vocabulary
        self._num_tokens = 0
        # An event for each open request, which is set to cancel it.
        self._open: dict[str, asyncio.Event] = {}

    def use(self) -> EngineUse:
        """Returns the counters; tokens count when their reply has come."""
        clock = self._pauses.clock
        return EngineUse(
            generated_tokens=self._num_tokens,
            returned_tokens=self._num_tokens,
            open_requests=len(self._open),
            busy_s=clock.busy_s,
            paused_s=clock.paused_s,
        )

    def collect(self) -> Iterator[Metric]:
        """Yields nothing: the server at the address has metrics of its own."""
        yield from ()

    async def stream(
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
        if options is not None or images or sampling.adapter or sampling.by_start:
            raise RequestRefused(
                "an engine at an address takes tokens alone: no agent's call, image or adapter"
            )
        if sampling.cuts:
            raise RequestRefused(
                "an engine at an address samples without top_p, top_k and min_p: it does not "
                "record what they leave"
            )
        highest = max(prompt_token_ids, default=0)
        if 0 < self._vocabulary <= highest:
            raise RequestRefused(f"token {highest}: the model has {self._vocabulary} tokens")
        body = {
            "request_id": request_id,
            "token_ids": list(prompt_token_ids),
            "sampling_params": _parameters(sampling, max_tokens),
            "stream": False,
        }
        cancelled = asyncio.Event()
        self._open[request_id] = cancelled
        self._pauses.clock.enter()
        try:
            content = await self._sampled(request_id, body, cancelled)
        finally:
            del self._open[request_id]
            self._pauses.clock.leave()
        generation = self._read(content, prompt_token_ids, sampling)
        if not request_id.startswith(PROBE_PREFIX):
            self._num_tokens += len(generation.token_ids)
        yield TextPart(generation.token_ids.tolist(), "", generation=generation)

    async def cancel(self, request_id: str) -> None:
        if request_id in self._open:
            self._open[request_id].set()

    async def _sampled(
        self, request_id: str, body: dict[str, Any], cancelled: asyncio.Event
    ) -> dict[str, Any]:
        """Returns the content of the whole reply, which an abort makes come soon."""
        call = self._connection.call("POST", GENERATE, limit_s=REPLY_LIMIT_S, body=body)
        answering = asyncio.ensure_future(call)
        aborting = asyncio.ensure_future(self._abort(request_id, cancelled))
        try:
            await asyncio.wait((answering, aborting), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                # The abort ends alone by an error.
                aborting.result()
            answer = answering.result()
        finally:
            answering.cancel()
            aborting.cancel()
            await asyncio.gather(answering, aborting, return_exceptions=True)
        if answer.status_code == 200:
            return self._connection.content(answer)
        refusal = self._connection.refusal(answer)
        if answer.status_code in _SHUT:
            raise EngineDied(refusal)
        if answer.status_code in _WRONG:
            raise RequestRefused(refusal)
        raise GenerationFailed(refusal)

    async def _abort(self, request_id: str, cancelled: asyncio.Event) -> None:
        """Aborts the request once it is cancelled, again and again until its reply has come.

        Raises EngineDied if the server does not end it.
        """
        await cancelled.wait()
        body = {"request_ids": [_ID_PREFIX + request_id]}
        try:
            async with asyncio.timeout(_ABORT_LIMIT_S):
                while True:
                    answer = await self._connection.call(
                        "POST", _ABORT, limit_s=_ABORT_LIMIT_S, body=body
                    )
                    if answer.status_code != 200:
                        raise EngineDied(self._connection.refusal(answer))
                    await asyncio.sleep(_ABORT_PERIOD_S)
        except TimeoutError:
            raise EngineDied(
                f"the engine at {self._connection.url} did not end a cancelled request within "
                f"{_ABORT_LIMIT_S:g} s"
            ) from None

    def _read(
        self, content: dict[str, Any], prompt_token_ids: Sequence[int], sampling: Sampling
    ) -> Generation:
        """Returns the reply; raises GenerationFailed if it lacks anything.

        Raises EngineDied for a version that this process did not give.
        """
        try:
            (choice,) = content["choices"]
            token_ids = np.asarray(choice["token_ids"] or (), dtype=np.uint32)
            entries = (choice["logprobs"] or {}).get("content") or ()
            logprobs = _logprobs([entry["logprob"] for entry in entries])
            named_ids = [entry["token_id"] for entry in entries]
            spans = [
                (span["end"] - span["start"], span["version"])
                for span in choice["weight_versions"] or ()
            ]
            reason = _REASONS.get(choice["finish_reason"], FinishReason.FAILED)
            stop_reason = choice.get("stop_reason")
            prompt_logprobs = None
            if sampling.prompt_logprobs:
                positions = content["prompt_logprobs"]
                prompt_logprobs = _logprobs(
                    [
                        positions[place][str(prompt_token_ids[place])]["logprob"]
                        for place in range(1, len(prompt_token_ids))
                    ]
                )
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise GenerationFailed(
                f"the engine at {self._connection.url} gave a reply that cannot be read: "
                f"{type(error).__name__} {error}"
            ) from error
        versions = tuple(
            VersionSpan(length, self._stamps.version(stamp)) for length, stamp in spans
        )
        num_versioned = sum(span.length for span in versions)
        if named_ids != token_ids.tolist() or num_versioned != len(token_ids):
            raise GenerationFailed(
                f"{len(token_ids)} tokens with {len(logprobs)} log-probabilities and versions of "
                f"{num_versioned} tokens"
            )
        return Generation(
            token_ids,
            logprobs,
            versions,
            reason,
            prompt_logprobs=prompt_logprobs,
            stop_text=stop_reason if isinstance(stop_reason, str) else "",
        )


def _logprobs(values: Sequence[float]) -> LogprobArray:
    """Returns the log-probabilities; raises ValueError for one that is none."""
    for value in values:
        if not math.isfinite(value) or value <= _CLAMPED:
            raise ValueError(f"{value} is no log-probability of a token that was sampled")
    return np.asarray(values, dtype=np.float32)


def _parameters(sampling: Sampling, max_tokens: int) -> dict[str, Any]:
    """Returns vLLM's parameters of one request, every one that a default could change."""
    return {
        **sampling.distribution,
        "seed": sampling.seed,
        "max_tokens": max_tokens,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": list(sampling.stop_token_ids),
        "stop": list(sampling.stop),
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": False,
        "logprobs": 0,
        "prompt_logprobs": 0 if sampling.prompt_logprobs else None,
    }

"""A fake engine that replies what a script says, and remembers everything that it sampled."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from slipstream.core.types import PolicyVersion, VersionSpan
from slipstream.rollout_server.engine_interface import (
    FinishReason,
    Generation,
    GenerationFailed,
    Sampling,
    TextOptions,
    TextPart,
)

from support.fakes.fake_engine import FakeEngine

CHUNK = 16


@dataclass(frozen=True)
class Sample:
    """One request as the engine saw it, and what it sampled."""

    request_id: str
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    max_tokens: int
    sampling: Sampling
    options: TextOptions
    images: tuple[object, ...] = ()


class ScriptedEngine(FakeEngine):
    """Replies the text that `script` returns for the text of a prompt, then the end token."""

    def __init__(self, tokenizer: Any, script: Callable[[str], str]) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.script = script
        self.samples: list[Sample] = []
        self.version = PolicyVersion(0, 0)
        self.running.set()
        # While it is not set, replies wait before their last chunk.
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.num_open = 0
        self._numbers = itertools.count()
        self._cancelled: set[str] = set()

    async def stream(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        max_tokens: int,
        *,
        options: TextOptions,
        experts_from: int = 0,
        images: Sequence[object] = (),
    ) -> AsyncGenerator[TextPart, None]:
        if self.fail_with is not None:
            failed = self.fail_with
            raise failed if isinstance(failed, Exception) else GenerationFailed(failed)
        self.num_open += 1
        text = self.script(
            self.tokenizer.decode(prompt_token_ids, skip_special_tokens=False)
        )
        stop_text = next((stop for stop in options.stop if stop in text), None)
        if stop_text is not None:
            # The last token completes the text.
            text = text[: text.index(stop_text) + len(stop_text)]
        script_tokens = self.tokenizer.encode(text, add_special_tokens=False)
        if stop_text is None:
            script_tokens.append(2)
        tokens = script_tokens[:max_tokens]
        reason = FinishReason.STOP
        if len(script_tokens) > max_tokens:
            reason = FinishReason.LENGTH
        done: list[int] = []
        message = ""
        handed_out = 0
        spans: list[VersionSpan] = []
        try:
            for start in range(0, len(tokens), CHUNK):
                await asyncio.sleep(0)
                while not self.running.is_set():
                    await self._changed.wait()
                while start + CHUNK >= len(tokens) and not self.may_end.is_set():
                    if request_id in self._cancelled:
                        break
                    await asyncio.sleep(0.001)
                if request_id in self._cancelled:
                    break
                chunk = tokens[start : start + CHUNK]
                done += chunk
                spans.append(VersionSpan(len(chunk), self.version))
                if start + CHUNK < len(tokens) and options.is_streamed:
                    skip = options.skip_special_tokens
                    text = self.tokenizer.decode(done, skip_special_tokens=skip)
                    text = text.rstrip("\ufffd")
                    yield TextPart(chunk, text[len(message) :])
                    message = text
                    handed_out = len(done)
        finally:
            self.num_open -= 1
        if len(done) < len(tokens):
            reason = FinishReason.CANCELLED
        logprobs = [-1e-3 * next(self._numbers) for _ in done]
        self.samples.append(
            Sample(
                request_id,
                list(prompt_token_ids),
                done,
                logprobs,
                max_tokens,
                sampling,
                options,
                tuple(images),
            )
        )
        self._generated += len(done)
        self._returned += len(done)
        text = self.tokenizer.decode(
            done, skip_special_tokens=options.skip_special_tokens
        )
        text = text.removesuffix("<|im_end|>")
        is_stopped = reason is FinishReason.STOP and stop_text is not None
        if is_stopped and not options.with_stop:
            text = text.removesuffix(stop_text)
        generation = Generation(
            np.asarray(done, dtype=np.uint32),
            np.asarray(logprobs, dtype=np.float32),
            tuple(spans),
            reason,
        )
        yield TextPart(
            done[handed_out:],
            text[len(message) :],
            stop_reason=stop_text if is_stopped else None,
            generation=generation,
        )

    async def generate(self, *asked: Any, **_: object) -> Generation:
        options = TextOptions(skip_special_tokens=False)
        parts = [part async for part in self.stream(*asked, options=options)]
        assert parts[-1].generation is not None
        return parts[-1].generation

    async def cancel(self, request_id: str) -> None:
        self._cancelled.add(request_id)
        await super().cancel(request_id)

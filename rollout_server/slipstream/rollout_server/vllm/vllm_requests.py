"""Builds vLLM's sampling parameters; converts vLLM's outputs to `Generation` and to texts."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from slipstream.core.kept_tokens import MAX_KEPT_TOKENS, KeptTokens
from slipstream.core.types import LogprobArray, PolicyVersion, TokenArray, VersionSpan
from slipstream.rollout_server.engine_interface import (
    EngineDied,
    FinishReason,
    Generation,
    GenerationFailed,
    RequestRefused,
    Sampling,
    TextOptions,
)
from vllm import SamplingParams
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

# Tokens of each part of a streamed reply after its first one. vLLM's application takes 0.1 to
# 0.2 ms for a part.
PART_TOKENS = 64
# Tokens of the prompt that are decoded with the first ones of a reply.
_CONTEXT = 8
# The character that a decoder writes for bytes that are no character, or not yet.
_NO_CHARACTER = "\ufffd"
_FINISH_REASONS = {reason.value: reason for reason in FinishReason}


def parameters(
    sampling: Sampling, max_tokens: int, *, experts_from: int, options: TextOptions | None = None
) -> SamplingParams:
    """Returns vLLM's parameters of one request.

    `options` is None if no caller reads the reply's text. vLLM returns the experts of tokens from
    index `experts_from` on, if it records experts.
    """
    text = options or TextOptions(skip_special_tokens=False)
    stop = [*sampling.stop, *text.stop]
    is_streamed = text.is_streamed
    # vLLM detokenises one token at a time, and the tokens of log-probabilities too. That takes most
    # of the server's time; `ReplyText` detokenises all new tokens at once.
    is_read_by_us = text.num_logprobs is None and text.spaces_between_special_tokens
    return SamplingParams(
        **sampling.distribution,
        seed=sampling.seed if text.seed is None else text.seed,
        max_tokens=max_tokens,
        ignore_eos=sampling.ignore_eos,
        # The engine's process ends the reply at these, before it hands the tokens out.
        stop_token_ids=list(sampling.stop_token_ids),
        # vLLM looks for these in the text of each chunk, and drops the tokens after them.
        stop=stop,
        include_stop_str_in_output=text.with_stop,
        detokenize=bool(stop) or not is_read_by_us,
        skip_special_tokens=text.skip_special_tokens,
        spaces_between_special_tokens=text.spaces_between_special_tokens,
        logprobs=text.num_logprobs or 0,
        prompt_logprobs=0 if sampling.prompt_logprobs else None,
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA if is_streamed else RequestOutputKind.FINAL_ONLY,
        stream_interval=PART_TOKENS if is_streamed else None,
        skip_clone=True,
        routed_experts_prompt_start=experts_from,
    )


class ReplyRecord:
    """The reply to one request, gathered from its outputs; the last output completes it."""

    def __init__(self, *, records_kept_tokens: bool) -> None:
        self.token_ids: list[int] = []
        self._records_kept_tokens = records_kept_tokens
        self._logprobs: list[float] = []
        # The tokens that each token was drawn from; none of a token with too many.
        self._kept_sets: list[list[int]] = []

    def take(self, output: RequestOutput) -> CompletionOutput:
        """Adds an output's new tokens to the record, and returns the output's completion."""
        (completion,) = output.outputs
        self.token_ids += completion.token_ids
        if (flat := completion.logprobs) is not None:
            # The sampled token comes first at each position.
            values = flat.logprobs
            starts = flat.start_indices
            is_single = len(values) == len(starts)
            self._logprobs += values if is_single else [values[start] for start in starts]
        if self._records_kept_tokens and completion.sampling_mask is not None:
            self._kept_sets += completion.sampling_mask.token_ids
        return completion

    def generation(self, last: RequestOutput) -> Generation:
        """Returns the whole reply after its last output.

        Raises GenerationFailed if tokens or log-probabilities are missing.
        """
        (completion,) = last.outputs
        stop_reason = completion.stop_reason
        spans = []
        for span in completion.weight_versions or ():
            incarnation, _, step = span.version.partition(":")
            version = PolicyVersion(int(incarnation), int(step))
            spans.append(VersionSpan(span.end - span.start, version))
        token_ids: TokenArray = np.asarray(self.token_ids, dtype=np.uint32)
        logprobs: LogprobArray = np.asarray(self._logprobs, dtype=np.float32)
        if not len(token_ids) == len(logprobs) == sum(span.length for span in spans):
            raise GenerationFailed(
                f"{len(token_ids)} tokens with {len(logprobs)} log-probabilities, versions {spans}"
            )
        kept_tokens = self._kept_tokens()
        return Generation(
            token_ids=token_ids,
            logprobs=logprobs,
            version_spans=tuple(spans),
            finish_reason=_FINISH_REASONS.get(completion.finish_reason, FinishReason.FAILED),
            cached_tokens=last.num_cached_tokens or 0,
            expert_ids=completion.routed_experts,
            prompt_logprobs=None if last.prompt_logprobs is None else _scores(last),
            # A stop token has its id there.
            stop_text=stop_reason if isinstance(stop_reason, str) else "",
            kept_tokens=kept_tokens,
        )

    def _kept_tokens(self) -> KeptTokens | None:
        """Returns what the tokens were drawn from; raises GenerationFailed if a set is missing."""
        if not self._records_kept_tokens:
            return None
        kept_tokens = KeptTokens.of_sets(self._kept_sets)
        counts = kept_tokens.counts
        if len(counts) != len(self.token_ids):
            raise GenerationFailed(
                f"{len(self.token_ids)} tokens with {len(counts)} sets of kept tokens"
            )
        # Our samplers send an empty set in place of a large one, vLLM's sends it whole.
        has_room = (counts > 0) & (counts <= MAX_KEPT_TOKENS)
        if not has_room.all():
            place = int(np.argmin(has_room))
            raise GenerationFailed(
                f"token {place} of a reply was drawn from more than {MAX_KEPT_TOKENS} tokens, and "
                "no more are recorded: lower sampling.top_k or top_p, or raise min_p"
            )
        return kept_tokens


@contextlib.contextmanager
def as_ours() -> Iterator[None]:
    """Re-raises vLLM's errors in the block as EngineDied, RequestRefused or GenerationFailed."""
    try:
        yield
    except EngineDeadError as error:
        raise EngineDied(str(error)) from error
    except (VLLMClientError, ValueError) as error:
        raise RequestRefused(f"{type(error).__name__}: {error}") from error
    except (GracefulHTTPError, EngineGenerateError) as error:
        raise GenerationFailed(f"{type(error).__name__}: {error}") from error


def _scores(output: RequestOutput) -> LogprobArray:
    """Returns the log-probability of each token of a prompt but the first."""
    scores = output.prompt_logprobs
    prompt = output.prompt_token_ids
    values = [scores[place][prompt[place]].logprob for place in range(1, len(prompt))]
    return np.asarray(values, dtype=np.float32)


class ReplyText:
    """Detokenises one reply incrementally, to the same text that vLLM gets token by token.

    The text lacks the stop token, unless `TextOptions.with_stop` asks for it, and the bytes of an
    incomplete last character. Invalid UTF-8 inside a reply becomes U+FFFD; vLLM instead loses some
    of the text after it.
    """

    def __init__(
        self,
        tokenizer: Any,  # noqa: ANN401 - the tokenizer of vLLM
        prompt: Sequence[int],
        options: TextOptions,
    ) -> None:
        self._tokenizer = tokenizer
        self._options = options
        # Tokens before `_told` were read. Tokens from `_start` on are decoded again with the new
        # tokens, since a space before the first word is kept only after other text. `_said`
        # characters of the text of the tokens from `_told` on were returned.
        self._ids = list(prompt[-_CONTEXT:])
        self._start, self._told, self._said = 0, len(self._ids), 0

    def read(self, token_ids: Sequence[int], finish_reason: str | None) -> str:
        """Returns the text that the next tokens add to the reply.

        `finish_reason` is vLLM's value, which is None if more tokens follow.
        """
        self._ids += token_ids
        if finish_reason == "stop" and not self._options.with_stop:
            self._ids.pop()
        before = self._decoded(self._ids[self._start : self._told])
        text = self._decoded(self._ids[self._start :])
        if text.startswith(before):
            text = text[len(before) :]
        else:
            text = self._decoded(self._ids[self._told :])
        # The rest of a character may come with the next tokens.
        complete = text.rstrip(_NO_CHARACTER)
        new = complete[self._said :]
        if complete != text:
            self._said = len(complete)
            return new
        if text:
            self._start = self._told
        self._told = len(self._ids)
        self._said = 0
        return new

    def _decoded(self, ids: Sequence[int]) -> str:
        skip = self._options.skip_special_tokens
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip)
        return text

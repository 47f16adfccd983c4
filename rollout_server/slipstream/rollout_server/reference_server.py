"""Asks the server of the reference model for the log-probabilities of an episode's tokens.

Waits for: the server. Unblocked by: its answer, or `timeout_s` after the last retry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from slipstream.core.openai_client import faults_as, key_in, openai_client
from slipstream.core.reference_logprobs import ReferenceLogprobs, check_reference
from slipstream.core.settings.role_sections import ReferenceServerSection

if TYPE_CHECKING:
    from openai import AsyncOpenAI

# Largest answer: bytes of one log-probability with its token, and of all the rest.
_BYTES_PER_LOGPROB, _OTHER_BYTES = 256, 1 << 20


class ReferenceFailed(Exception):
    """The server gave no log-probabilities; the episode that asked fails with this cause."""


class ScoredSequence(NamedTuple):
    """The tokens of one sequence, and a flag for each of them: it was sampled."""

    token_ids: Sequence[int]
    is_sampled: npt.NDArray[np.bool_]


class _Logprob(msgspec.Struct):
    logprob: float
    rank: int | None = None


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[int, _Logprob] | None] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class ReferenceServer:
    """The connection to one server; all episodes of a rollout server share it.

    At most `max_open` calls are open at one time. The openai package repeats a call up to
    `max_retries` times after 408, 409, 429, 5xx, a broken connection or `timeout_s`.
    """

    def __init__(
        self, settings: ReferenceServerSection, *, top_k: int, vocab_size: int, max_tokens: int
    ) -> None:
        """Asks for `top_k` likely tokens, whose ids are below `vocab_size`; 0: it is not known.

        Sequences have at most `max_tokens`. ConfigError for a key that has no file.
        """
        self._client = openai_client(
            settings.base_url,
            api_key=key_in(settings.api_key_file, "reference.server.api_key_file"),
            timeout_s=settings.timeout_s,
            max_retries=settings.max_retries,
            most_bytes=_OTHER_BYTES + _BYTES_PER_LOGPROB * (top_k + 1) * max_tokens,
        )
        self._settings = settings
        self._top_k, self._vocab_size = top_k, vocab_size
        self._open = asyncio.Semaphore(settings.max_open)
        self.name = f"the reference model {settings.model} at {settings.base_url}"

    @property
    def client(self) -> AsyncOpenAI:
        """The client of the server's API."""
        return self._client

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._client.close()

    async def logprobs(self, sequences: Sequence[ScoredSequence]) -> ReferenceLogprobs:
        """Returns the log-probabilities of all sampled tokens, in order; ReferenceFailed."""
        try:
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(self._one(sequence)) for sequence in sequences]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        parts = [task.result() for task in asked]
        return ReferenceLogprobs(
            np.concatenate([part.logprobs for part in parts]),
            np.concatenate([part.top_ids for part in parts]),
            np.concatenate([part.top_logprobs for part in parts]),
        )

    async def _one(self, sequence: ScoredSequence) -> ReferenceLogprobs:
        settings = self._settings
        async with self._open:
            with faults_as(ReferenceFailed, self.name):
                answer = await self._client.completions.with_raw_response.create(
                    model=settings.model,
                    prompt=list(sequence.token_ids),
                    max_tokens=1,
                    temperature=0.0,
                    extra_body={"prompt_logprobs": self._top_k},
                )
        # A long episode's answer has megabytes.
        found = await asyncio.to_thread(self._read, answer.content, sequence)
        if isinstance(found, str):
            raise ReferenceFailed(f"{self.name} {found}")
        return found

    def _read(self, data: bytes, sequence: ScoredSequence) -> ReferenceLogprobs | str:
        """Returns what an answer says of the sampled tokens, or the reason why it cannot serve."""
        tokens, top_k = sequence.token_ids, self._top_k
        try:
            choices = msgspec.json.decode(data, type=_Answer).choices
        except msgspec.MsgspecError as error:
            return f"gave no completion: {error}"
        rows = choices[0].prompt_logprobs if len(choices) == 1 else None
        if rows is None or len(rows) != len(tokens):
            number = "none" if rows is None else len(rows)
            return f"must give prompt_logprobs of {len(tokens)} tokens, got {number}"
        places = np.flatnonzero(sequence.is_sampled)
        logprobs = np.zeros(len(places), dtype=np.float32)
        top_ids = np.zeros((len(places), top_k), dtype=np.uint32)
        top_logprobs = np.zeros((len(places), top_k), dtype=np.float32)
        for number, place in enumerate(places):
            # Nothing predicts the first token of a sequence.
            if place == 0:
                continue
            row = rows[place] or {}
            own = row.get(tokens[place])
            best = [(token, one) for token, one in row.items() if 1 <= (one.rank or 0) <= top_k]
            if own is None or len(best) != top_k:
                return f"must give the token and {top_k} likely ones at each position"
            logprobs[number] = own.logprob
            top_ids[number] = [token for token, _ in best]
            top_logprobs[number] = [one.logprob for _, one in best]
        if top_k and int(top_ids.max(initial=0)) >= self._vocab_size > 0:
            return f"names token {top_ids.max()}, outside the vocabulary of {self._vocab_size}"
        found = ReferenceLogprobs(logprobs, top_ids, top_logprobs)
        fault = check_reference(found, [0] if len(places) and places[0] == 0 else [])
        return f"must run with --logprobs-mode raw_logprobs: {fault}" if fault else found

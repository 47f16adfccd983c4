"""Asks the servers of reference models for the log-probabilities of an episode's tokens.

Waits for: the episode's server. Unblocked by: its answer, or `timeout_s` after the last retry.

`python -m slipstream.extensions.reference_server.server < FILE` checks the servers that the
settings name: each must have the policy's tokenizer and room for an episode, and give
log-probabilities.
"""

import asyncio
import reprlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from slipstream.core.configuration.config_file import run_check, vocabulary_size
from slipstream.core.errors import ConfigError
from slipstream.core.openai_client import faults_as, key_in, openai_client
from slipstream.core.settings.config import Config
from slipstream.core.settings.role_sections import (
    ReferenceSection,
    ReferenceServerSection,
    teacher_setting,
)
from slipstream.core.types import ReferenceLogprobs, ServerId, check_reference
from slipstream.rollout_server.episodes.play import ServiceFailed
from slipstream.rollout_server.episodes.recording import ScoredSequence
from slipstream.rollout_server.part import ServerPart

# Calls after the first one.
_MAX_RETRIES = 5
# Open calls of one rollout server.
MAX_OPEN = 16
# Largest answer: bytes for one log-probability with its token, and for all the rest.
_BYTES_PER_LOGPROB = 256
_OTHER_BYTES = 1 << 20

# Token ids that one call turns into text.
_BLOCK = 4096


class _Logprob(msgspec.Struct):
    logprob: float
    rank: int | None = None


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[int, _Logprob] | None] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class ReferenceServer:
    """The connection to a reference model's server; all episodes of a rollout server share it.

    At most `MAX_OPEN` calls are open at one time. The openai package retries a call up to
    `max_retries` times after status 408, 409, 429 or 5xx, a broken connection or `timeout_s`.
    """

    def __init__(
        self,
        settings: ReferenceServerSection,
        setting: str,
        *,
        top_k: int,
        vocab_size: int,
        max_tokens: int,
        max_retries: int = _MAX_RETRIES,
    ) -> None:
        """Opens the client; calls will ask for the `top_k` most probable tokens at each position.

        `setting` is the name of the table `settings`, such as "reference.server". Token ids in
        answers must be below `vocab_size`, unless that is 0 (unknown). Sequences have at most
        `max_tokens`. Raises ConfigError if the API key's file cannot be read.
        """
        self.client = openai_client(
            settings.base_url,
            api_key=key_in(settings.api_key_file, f"{setting}.api_key_file"),
            timeout_s=settings.timeout_s,
            max_retries=max_retries,
            most_bytes=_OTHER_BYTES + _BYTES_PER_LOGPROB * (top_k + 1) * max_tokens,
        )
        self._settings = settings
        self._top_k = top_k
        self._vocab_size = vocab_size
        self._open = asyncio.Semaphore(MAX_OPEN)
        self.name = f"the reference model {settings.model} at {settings.base_url}"

    async def aclose(self) -> None:
        await self.client.close()

    async def logprobs(self, sequences: Sequence[ScoredSequence]) -> ReferenceLogprobs:
        """Returns the log-probabilities of all sampled tokens, in the order of `sequences`.

        Raises ServiceFailed if a call fails or an answer cannot be used.
        """
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(sequence)) for sequence in sequences]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        parts = [task.result() for task in tasks]
        return ReferenceLogprobs(
            np.concatenate([part.logprobs for part in parts]),
            np.concatenate([part.top_ids for part in parts]),
            np.concatenate([part.top_logprobs for part in parts]),
        )

    async def _one(self, sequence: ScoredSequence) -> ReferenceLogprobs:
        settings = self._settings
        async with self._open:
            with faults_as(ServiceFailed, self.name):
                answer = await self.client.completions.with_raw_response.create(
                    model=settings.model,
                    prompt=list(sequence.token_ids),
                    max_tokens=1,
                    temperature=0.0,
                    extra_body={"prompt_logprobs": self._top_k},
                )
        # A long episode's answer has megabytes.
        parsed = await asyncio.to_thread(self._read, answer.content, sequence)
        if isinstance(parsed, str):
            raise ServiceFailed(f"{self.name} {parsed}")
        return parsed

    def _read(self, data: bytes, sequence: ScoredSequence) -> ReferenceLogprobs | str:
        """Returns the sampled tokens' log-probabilities, or a text that says why there are none."""
        tokens = sequence.token_ids
        top_k = self._top_k
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
            own_entry = row.get(tokens[place])
            best = [
                (token, candidate)
                for token, candidate in row.items()
                if 1 <= (candidate.rank or 0) <= top_k
            ]
            if own_entry is None or len(best) != top_k:
                return f"must give the token and {top_k} likely ones at each position"
            logprobs[number] = own_entry.logprob
            top_ids[number] = [token for token, _ in best]
            top_logprobs[number] = [candidate.logprob for _, candidate in best]
        if top_k and int(top_ids.max(initial=0)) >= self._vocab_size > 0:
            return f"names token {top_ids.max()}, outside the vocabulary of {self._vocab_size}"
        reference = ReferenceLogprobs(logprobs, top_ids, top_logprobs)
        fault = check_reference(reference, [0] if len(places) and places[0] == 0 else [])
        return f"must run with --logprobs-mode raw_logprobs: {fault}" if fault else reference


class ReferenceServers:
    """The connections to the servers of all reference models."""

    def __init__(self, reference: ReferenceSection, servers: Mapping[str, ReferenceServer]) -> None:
        """Takes the open `servers` by the settings that name them."""
        self._reference = reference
        self._servers = servers

    def score(self, environment: str) -> bool:
        return self._server_of(environment) is not None

    async def logprobs(
        self, environment: str, sequences: Sequence[ScoredSequence]
    ) -> ReferenceLogprobs:
        """Returns what `ReferenceServer.logprobs` does of the server of `environment`."""
        server = self._server_of(environment)
        assert server is not None, f"no server is the reference of {environment}"
        return await server.logprobs(sequences)

    def _server_of(self, environment: str) -> ReferenceServer | None:
        teacher = self._reference.teacher_of(environment)
        place = teacher_setting(teacher) if teacher else "reference"
        return self._servers.get(f"{place}.server")


class ReferencePart(ServerPart):
    """Connects a rollout server to the servers of reference models."""

    def __init__(self, config: Config, _: ServerId) -> None:
        self._config = config
        self._servers: dict[str, ReferenceServer] = {}

    def references(self) -> ReferenceServers:
        """Opens the connections; raises ConfigError if the file of a key cannot be read."""
        reference = self._config.reference
        assert reference is not None
        vocab_size = vocabulary_size(self._config.model.path)
        for setting, section in reference.servers.items():
            self._servers[setting] = ReferenceServer(
                section,
                setting,
                top_k=reference.top_k,
                vocab_size=vocab_size,
                max_tokens=self._config.sampling.max_episode_tokens,
            )
        return ReferenceServers(reference, self._servers)

    async def aclose(self) -> None:
        for server in self._servers.values():
            await server.aclose()


async def check_reference_servers(config: Config) -> None:
    """Checks that the reference models' servers can give log-probabilities for the run's episodes.

    Raises a ConfigError that says what a server lacks.
    """
    assert config.reference is not None
    for setting, section in config.reference.servers.items():
        await _check_server(config, section, setting)


async def _check_server(config: Config, settings: ReferenceServerSection, setting: str) -> None:
    from transformers import AutoTokenizer

    assert config.reference is not None
    top_k = config.reference.top_k
    vocab_size = vocabulary_size(config.model.path)
    max_tokens = config.sampling.max_episode_tokens
    server = ReferenceServer(
        settings,
        setting,
        top_k=top_k,
        vocab_size=vocab_size,
        max_tokens=max_tokens,
        max_retries=1,
    )
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(config.model.path), local_files_only=True)
        with faults_as(ConfigError, f"{setting}: {server.name}"):
            models = [model async for model in server.client.models.list()]
            names = [model.id for model in models]
            if settings.model not in names:
                raise ConfigError(
                    f"{setting}.model must be one of {', '.join(names)} at "
                    f"{settings.base_url}, got {settings.model}"
                )
            room = getattr(models[names.index(settings.model)], "max_model_len", None)
            if isinstance(room, int) and room <= max_tokens:
                raise ConfigError(
                    f"{setting}: {server.name} must have room for "
                    f"sampling.max_episode_tokens + 1 = {max_tokens + 1} tokens, got max_model_len "
                    f"{room}: raise its --max-model-len"
                )
            await _check_tokenizer(server, settings, setting, tokenizer)
        tokens: list[int] = tokenizer.encode("0 1 2 a b c", add_special_tokens=False)[:8]
        await server.logprobs([ScoredSequence(tokens * 2, np.ones(2 * len(tokens), np.bool_))])
    except ServiceFailed as error:
        raise ConfigError(f"{setting}: {error}") from error
    finally:
        await server.aclose()


async def _check_tokenizer(
    server: ReferenceServer,
    settings: ReferenceServerSection,
    setting: str,
    tokenizer: Any,  # noqa: ANN401 - transformers has no type for it
) -> None:
    """Raises ConfigError if the server's tokenizer decodes any token otherwise than `tokenizer`."""
    # vLLM serves this call next to /v1, not below it.
    root = settings.base_url.rstrip("/").removesuffix("/v1")
    for start in range(0, len(tokenizer), _BLOCK):
        ids = list(range(start, min(start + _BLOCK, len(tokenizer))))
        answer = await server.client.post(
            f"{root}/detokenize", body={"model": settings.model, "tokens": ids}, cast_to=object
        )
        server_text = answer.get("prompt") if isinstance(answer, dict) else None
        own_text = tokenizer.decode(ids)
        if server_text != own_text:
            here, there = (reprlib.repr(text) for text in (own_text, server_text))
            raise ConfigError(
                f"{setting}: {server.name} must have the tokenizer of model.path; tokens "
                f"{start} to {ids[-1]} are {here} here and {there} there"
            )


if __name__ == "__main__":
    sys.exit(run_check(lambda config: asyncio.run(check_reference_servers(config))))

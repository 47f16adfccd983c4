"""Checks a reference's server: `python -m slipstream.rollout_server.reference_check < FILE`.

The server must have the policy's tokenizer, room for an episode, and give log-probabilities.
"""

from __future__ import annotations

import asyncio
import sys
import tomllib
from typing import Any

import numpy as np
from slipstream.core.configuration.config_file import parse_config, vocabulary_size
from slipstream.core.errors import ConfigError
from slipstream.core.exit_codes import USAGE_ERROR
from slipstream.core.openai_client import faults_as
from slipstream.core.settings.config import Config
from slipstream.core.settings.role_sections import ReferenceServerSection
from slipstream.rollout_server.reference_server import (
    ReferenceFailed,
    ReferenceServer,
    ScoredSequence,
)

# Token ids that one call turns into text.
_BLOCK = 4096
# Characters of two texts that an error shows.
_SHOWN = 40


async def check_reference_server(config: Config, settings: ReferenceServerSection) -> None:
    """Returns if the server can answer for the reference; ConfigError says what is missing."""
    quick = settings.model_copy(update={"max_retries": 1})
    assert config.reference is not None
    top_k, vocab_size = config.reference.top_k, vocabulary_size(config)
    max_tokens = config.sampling.max_episode_tokens
    server = ReferenceServer(quick, top_k=top_k, vocab_size=vocab_size, max_tokens=max_tokens)
    try:
        tokenizer = _tokenizer(config)
        with faults_as(ConfigError, f"reference.server: {server.name}"):
            await _check_length(server, settings, max_tokens + 1)
            await _check_tokenizer(server, settings, tokenizer)
        tokens: list[int] = tokenizer.encode("0 1 2 a b c", add_special_tokens=False)[:8]
        await server.logprobs([ScoredSequence(tokens * 2, np.ones(2 * len(tokens), np.bool_))])
    except ReferenceFailed as error:
        raise ConfigError(f"reference.server: {error}") from error
    finally:
        await server.aclose()


async def _check_length(
    server: ReferenceServer, settings: ReferenceServerSection, needed: int
) -> None:
    models = [one async for one in server.client.models.list()]
    names = [one.id for one in models]
    if settings.model not in names:
        raise ConfigError(
            f"reference.server.model must be one of {', '.join(names)} at {settings.base_url}, "
            f"got {settings.model}"
        )
    room = getattr(models[names.index(settings.model)], "max_model_len", None)
    if isinstance(room, int) and room < needed:
        raise ConfigError(
            f"reference.server: {server.name} must have room for sampling.max_episode_tokens + 1 "
            f"= {needed} tokens, got max_model_len {room}: raise its --max-model-len"
        )


async def _check_tokenizer(
    server: ReferenceServer,
    settings: ReferenceServerSection,
    tokenizer: Any,  # noqa: ANN401 - transformers has no type for it
) -> None:
    """Compares the text of every token; ConfigError where one differs."""
    # These calls of vLLM's are beside /v1, not below it.
    root = settings.base_url.rstrip("/").removesuffix("/v1")
    for start in range(0, len(tokenizer), _BLOCK):
        ids = list(range(start, min(start + _BLOCK, len(tokenizer))))
        answer = await server.client.post(
            f"{root}/detokenize", body={"model": settings.model, "tokens": ids}, cast_to=object
        )
        found = answer.get("prompt") if isinstance(answer, dict) else None
        own = tokenizer.decode(ids)
        if found != own:
            raise ConfigError(
                f"reference.server: {server.name} must have the tokenizer of model.path; tokens "
                f"{start} to {ids[-1]} are {_short(own)} here and {_short(found)} there"
            )


def _short(text: object) -> str:
    shown = repr(text)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."


def _tokenizer(config: Config) -> Any:  # noqa: ANN401 - transformers has no type for it
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(config.model.path), local_files_only=True)


def main() -> int:
    """Returns 0, or 2 with the first fault as the last line of stderr."""
    config = parse_config(tomllib.loads(sys.stdin.read()), source="the resolved settings")
    settings = config.reference.server if config.reference is not None else None
    assert settings is not None, "the settings name no server of a reference"
    try:
        asyncio.run(check_reference_server(config, settings))
    except ConfigError as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return USAGE_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())

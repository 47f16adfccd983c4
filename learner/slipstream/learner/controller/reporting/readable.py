"""Episodes in a form for people: one line of trajectories.jsonl each."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

from pydantic import JsonValue
from slipstream.learner.controller.events import EventLog, Severity
from slipstream.protocol.settings.config import Config
from slipstream.protocol.types import TokenArray, Trajectory

TOKENIZER = "tokenizer.json"


class TokenTexts:
    """The texts of tokens by the model's own tokenizer, without torch and transformers."""

    def __init__(self, path: Path) -> None:
        """Reads `path`; blocks for about a second if the vocabulary is large."""
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(path))

    def text(self, token_ids: TokenArray) -> str:
        """The text of tokens, special tokens included."""
        return self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=False)


async def open_token_texts(config: Config, events: EventLog) -> TokenTexts | None:
    """Opens the tokenizer if episodes have several turns; else, or without its file, returns None.

    Warns if the file is missing.
    """
    if config.sampling.max_turns == 1:
        return None
    path = config.model.path / TOKENIZER
    if not path.is_file():
        events.add(
            f"trajectories.jsonl does not tell turns apart: {config.model.path} has no {TOKENIZER}",
            Severity.WARNING,
        )
        return None
    return await asyncio.to_thread(TokenTexts, path)


def readable(step: int, trajectory: Trajectory, texts: TokenTexts | None) -> dict[str, JsonValue]:
    """The line of an episode, see docs/metrics.md; has `turns` only with several and `texts`."""
    line: dict[str, JsonValue] = {
        "step": step,
        "trajectory_id": trajectory.trajectory_id,
        "environment": trajectory.environment,
        "task_index": trajectory.task_index,
        "prompt": trajectory.prompt_text,
        "reply": trajectory.reply_text,
        "reward": trajectory.reward,
        "status": trajectory.status.name.lower(),
        "sampled_tokens": trajectory.num_sampled_tokens,
        "versions": [[span.length, str(span.version)] for span in trajectory.version_spans],
        "metrics": dict(trajectory.metrics),
    }
    if texts is not None and len(trajectory.run_lengths) > 2:
        line["turns"] = _turns(trajectory, texts)
    return line


def _turns(trajectory: Trajectory, texts: TokenTexts) -> list[JsonValue]:
    lengths, place = trajectory.run_lengths, 0
    turns: list[JsonValue] = []
    for context, sampled in itertools.zip_longest(lengths[::2], lengths[1::2], fillvalue=0):
        middle, end = place + context, place + context + sampled
        turns.append(
            {
                "context": texts.text(trajectory.token_ids[place:middle]),
                "context_tokens": context,
                "sampled": texts.text(trajectory.token_ids[middle:end]),
                "sampled_tokens": sampled,
            }
        )
        place = end
    return turns

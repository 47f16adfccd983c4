"""Converts episodes and groups to lines of trajectories.jsonl and groups.jsonl."""

import asyncio
import bisect
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import JsonValue
from slipstream.core.settings.config import Config
from slipstream.core.types import TokenArray, TokenSequence, Trajectory
from slipstream.learner.controller.events import EventLog

TOKENIZER = "tokenizer.json"


class TokenTexts:
    """Decodes tokens with the model's own tokenizer, without torch and transformers."""

    def __init__(self, path: Path) -> None:
        """Reads the tokenizer file `path`; blocks for about a second if the vocabulary is large."""
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(path))

    def text(self, token_ids: TokenArray) -> str:
        """Returns the text of tokens, special tokens included."""
        return self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=False)


async def open_token_texts(config: Config, events: EventLog) -> TokenTexts | None:
    """Opens the tokenizer that shows episodes turn by turn.

    Returns None if `sampling.max_turns` is 1, so that it is not needed, or if its file is missing.
    Adds a warning if the file is missing and `sampling.max_turns` is above 1.
    """
    if config.sampling.max_turns == 1:
        return None
    path = config.model.path / TOKENIZER
    if not path.is_file():
        if config.sampling.max_turns > 1:
            folder = config.model.path
            events.warn(
                f"trajectories.jsonl does not tell turns apart: {folder} has no {TOKENIZER}"
            )
        return None
    return await asyncio.to_thread(TokenTexts, path)


def group_line(step: int, members: Sequence[Trajectory]) -> dict[str, JsonValue]:
    """Returns the line of a group in groups.jsonl; each list has one number per member.

    `surprisal` is the mean of -log p over the sampled tokens of a member, in nats: an estimate of
    the policy's entropy. It is None for a member without a sampled token.
    """
    return {
        "step": step,
        "environment": members[0].environment,
        "task_index": members[0].task_index,
        "rewards": [member.reward for member in members],
        "sampled_tokens": [member.num_sampled_tokens for member in members],
        "surprisal": [
            -float(member.behavior_logprobs.mean()) if member.version_spans else None
            for member in members
        ],
    }


def readable(
    step: int, trajectory: Trajectory, texts: TokenTexts | None, advantage: float | None = None
) -> dict[str, JsonValue]:
    """Returns the line of an episode in trajectories.jsonl.

    docs/guides/watching.md explains the fields. An episode of more than one turn has `turns`; one
    with branches has `branches` instead, with the turns of each branch. `texts` decodes the tokens
    of turns; if it is None, the line has no turns. `advantage` is the mean over the trained tokens,
    or None if it is unknown.
    """
    line: dict[str, JsonValue] = {
        "step": step,
        "trajectory_id": trajectory.trajectory_id,
        "environment": trajectory.environment,
        "task_index": trajectory.task_index,
        "prompt": trajectory.prompt_text,
        "reply": trajectory.reply_text,
        "answer": trajectory.expected_answer or None,
        "reward": trajectory.reward,
        "advantage": advantage,
        "lag": _mean_lag(step - 1, trajectory),
        "status": trajectory.status.name.lower(),
        "sampled_tokens": trajectory.num_sampled_tokens,
        "versions": [[span.length, str(span.version)] for span in trajectory.version_spans],
        "metrics": dict(trajectory.metrics),
    }
    if trajectory.branches:
        line["branches"] = _branches(trajectory, texts)
    elif texts is not None and len(trajectory.run_lengths) > 2:
        rewards = trajectory.turn_rewards()
        line["turns"] = _turns(trajectory.token_ids, trajectory.run_lengths, texts, rewards)
    return line


def _mean_lag(step: int, trajectory: Trajectory) -> float | None:
    """Returns the mean lag of the sampled tokens at version `step`, or None without such tokens."""
    spans = trajectory.version_spans
    total = sum(span.length * (step - span.version.step) for span in spans)
    return total / trajectory.num_sampled_tokens if spans else None


def _branches(trajectory: Trajectory, texts: TokenTexts | None) -> list[JsonValue]:
    sequences = trajectory.sequences()
    lines: list[JsonValue] = []
    for place, part in enumerate(sequences):
        after, shared = _parent(trajectory, part, sequences[:place])
        first, *rest = trajectory.run_lengths[part.runs]
        line: dict[str, JsonValue] = {
            "name": part.branch.name,
            "share": part.branch.share,
            "reward": part.branch.reward,
            "after": after,
            "sampled_tokens": part.sampled.stop - part.sampled.start,
        }
        if texts is not None:
            own = trajectory.token_ids[part.tokens.start + shared : part.tokens.stop]
            rewards = trajectory.turn_rewards()[part.runs.start // 2 : part.runs.stop // 2]
            line["turns"] = _turns(own, (first - shared, *rest), texts, rewards)
        lines.append(line)
    return lines


def _parent(
    trajectory: Trajectory, part: TokenSequence, earlier: Sequence[TokenSequence]
) -> tuple[JsonValue, int]:
    """Finds the earlier branch that shares the longest prefix of whole turns with `part`.

    Returns {"branch": its index, "turns": number of shared turns} and the number of shared tokens.
    The result is (None, 0) if the context of `part` begins with no whole turn of an earlier branch.
    """
    context = trajectory.run_lengths[part.runs.start]
    own = trajectory.token_ids[part.tokens.start : part.tokens.start + context]
    parent: JsonValue = None
    shared = 0
    for place, other in enumerate(earlier):
        theirs = trajectory.token_ids[other.tokens][:context]
        differs = np.append(own[: len(theirs)] != theirs, True)
        # Each turn ends with a sampled run.
        ends = list(itertools.accumulate(trajectory.run_lengths[other.runs]))[1::2]
        turns = bisect.bisect_right(ends, int(differs.argmax()))
        if turns and ends[turns - 1] > shared:
            parent, shared = {"branch": place, "turns": turns}, ends[turns - 1]
    return parent, shared


def _turns(
    token_ids: TokenArray, lengths: tuple[int, ...], texts: TokenTexts, rewards: Sequence[float]
) -> list[JsonValue]:
    place = 0
    turns: list[JsonValue] = []
    runs = itertools.zip_longest(lengths[::2], lengths[1::2], fillvalue=0)
    for (context, sampled), reward in itertools.zip_longest(runs, rewards):
        middle, end = place + context, place + context + sampled
        turns.append(
            {
                "context": texts.text(token_ids[place:middle]),
                "context_tokens": context,
                "sampled": texts.text(token_ids[middle:end]),
                "sampled_tokens": sampled,
                "reward": reward,
            }
        )
        place = end
    return turns

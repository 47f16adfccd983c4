"""The rows of a data set of rollouts: one for each conversation of an episode."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from slipstream.core.settings.config import Config
from slipstream.core.types import TokenSequence, Trajectory, VersionSpan
from slipstream.extensions.rollouts.messages import MessageReader, Unreadable, with_reply
from slipstream.rollout_server.chat import ChatMessage, TemplateInputs
from slipstream.rollout_server.episodes.renderer import Renderer

Row: TypeAlias = dict[str, Any]
Tokens: TypeAlias = list[int]
Messages: TypeAlias = list[ChatMessage]


class ExportedTurn(NamedTuple):
    """The tokens that the model read, and those of its reply."""

    context: Tokens
    reply: Tokens


class RowMaker:
    """Makes rows of the trajectories of one run."""

    def __init__(self, config: Config, renderer: Renderer) -> None:
        self._renderer = renderer
        # The template's values of environments that have their own, as JSON.
        self._values: dict[str, str] = {}
        for section in config.environments:
            if section.chat_template_kwargs:
                self._values[section.name] = json.dumps(section.chat_template_kwargs)
        # By the template's values: one for most runs.
        self._readers: dict[str, MessageReader] = {}
        # The members of a group share a prompt.
        self._prompt_tokens: Tokens = []
        self._prompt_messages: Messages = []

    def rows(self, step: int, trajectory: Trajectory) -> Iterator[Row]:
        """Yields the rows of a trajectory that the step `step`, counted from 1, has trained."""
        name = trajectory.trajectory_id
        status = trajectory.status.name
        metrics = [
            {
                "name": metric,
                "value": trajectory.metrics[metric],
            }
            for metric in sorted(trajectory.metrics)
        ]
        for number, part in enumerate(trajectory.sequences):
            yield {
                "step": step,
                "trajectory_id": str(name),
                "group_id": str(trajectory.group_id),
                "member": trajectory.member,
                "branch": number,
                "branch_name": part.branch.name,
                "environment": trajectory.environment,
                "task_index": trajectory.task_index,
                "status": status.lower(),
                "answer": trajectory.expected_answer or None,
                "metrics": metrics,
                **self._texts(trajectory, part),
                **_numbers(step, trajectory, part),
            }

    def _texts(self, trajectory: Trajectory, part: TokenSequence) -> Row:
        """Returns the columns of a row that the tokens give."""
        messages: list[Row] | None = None
        unreadable = ""
        try:
            messages = self._messages(trajectory, part)
        except Unreadable as error:
            unreadable = str(error)
        first_turn = next(turns_of(trajectory, part))
        return {
            "messages": messages,
            "unreadable": unreadable,
            "prompt": self._renderer.decode_all(first_turn.context),
            "replies": list(self._replies(trajectory, part)),
        }

    def _messages(self, trajectory: Trajectory, part: TokenSequence) -> list[Row]:
        """Returns the messages of a conversation; raises Unreadable."""
        if trajectory.images:
            raise Unreadable("it shows images, which have no text")
        reader = self._reader(trajectory.environment)
        turns = list(turns_of(trajectory, part))
        history = self._prompt(reader, turns[0].context)
        messages = [_read(message) for message in history]
        for turn, next_turn in itertools.zip_longest(turns, turns[1:]):
            if not turn.reply:
                # The episode ended where there was no room for one.
                break
            following: Messages = []
            if next_turn is not None:
                following = reader.following(
                    with_reply(history),
                    turn.reply[-1],
                    next_turn.context,
                )
            reply = self._reply(reader, turn.reply, history, following)
            messages.append(reply)
            messages += [_read(message) for message in following]
            history = with_reply(history)
            history += following
        return messages

    def _reply(
        self,
        reader: MessageReader,
        reply: Tokens,
        history: Messages,
        following: Messages,
    ) -> Row:
        """Returns the message of a sampled reply; raises Unreadable."""
        renderer = self._renderer
        is_whole = reply[-1] in renderer.ends.token_ids
        content = renderer.decode(reply).strip()
        # A reply that a limit cut, or that says nothing, would teach to end there.
        is_trained = is_whole and bool(content)
        if is_trained:
            content = reader.reply(reply, history, following)
        return {
            "role": "assistant",
            "content": content,
            "weight": int(is_trained),
        }

    def _prompt(self, reader: MessageReader, context: Tokens) -> Messages:
        if self._prompt_tokens != context:
            self._prompt_messages = reader.prompt(context)
            self._prompt_tokens = context
        return list(self._prompt_messages)

    def _reader(self, environment: str) -> MessageReader:
        values = self._values.get(environment, "")
        if values not in self._readers:
            inputs = TemplateInputs(values=values)
            self._readers[values] = MessageReader(self._renderer, inputs)
        return self._readers[values]

    def _replies(self, trajectory: Trajectory, part: TokenSequence) -> Iterator[Row]:
        renderer = self._renderer
        turn_rewards = trajectory.turn_rewards()
        first_turn = part.runs.start // 2
        before: Tokens = []
        for number, turn in enumerate(turns_of(trajectory, part)):
            before += turn.context
            reply = turn.reply
            text = renderer.decode(reply)
            thoughts = ""
            content = text
            parsed = renderer.told_apart(before, reply, text, None)
            if parsed is not None:
                thoughts = parsed.reasoning
                content = parsed.content
            before += reply
            reward = turn_rewards[first_turn + number] if turn_rewards else None
            yield {
                "text": renderer.decode_all(reply),
                "content": content,
                "thoughts": thoughts,
                "sampled_tokens": len(reply),
                "reward": reward,
            }


def _numbers(step: int, trajectory: Trajectory, part: TokenSequence) -> Row:
    """Returns the columns of a row that count tokens and rewards."""
    reward = part.branch.reward
    if reward is None:
        reward = trajectory.reward
    spans = list(_spans_within(trajectory.version_spans, part.sampled))
    num_sampled = part.sampled.stop - part.sampled.start
    lag: float | None = None
    if num_sampled:
        # The step trains the version before the one that it makes.
        lags = sum(span.length * (step - 1 - span.version.step) for span in spans)
        lag = lags / num_sampled
    versions = [
        {
            "tokens": span.length,
            "version": str(span.version),
        }
        for span in spans
    ]
    return {
        "reward": reward,
        "prompt_tokens": trajectory.run_lengths[part.runs.start],
        "sampled_tokens": num_sampled,
        "versions": versions,
        "lag": lag,
    }


def turns_of(trajectory: Trajectory, part: TokenSequence) -> Iterator[ExportedTurn]:
    """Yields the turns of a conversation."""
    token_ids = trajectory.token_ids.tolist()
    lengths = trajectory.run_lengths[part.runs]
    contexts = lengths[::2]
    replies = lengths[1::2]
    place = part.tokens.start
    # An episode without room for a reply ends with its context.
    for context, reply in itertools.zip_longest(contexts, replies, fillvalue=0):
        middle = place + context
        end = middle + reply
        yield ExportedTurn(
            token_ids[place:middle],
            token_ids[middle:end],
        )
        place = end


def _spans_within(spans: Sequence[VersionSpan], sampled: slice) -> Iterator[VersionSpan]:
    """Yields what lies within a slice of the sampled tokens."""
    place = 0
    for span in spans:
        end = place + span.length
        last = min(end, sampled.stop)
        first = max(place, sampled.start)
        length = last - first
        if length > 0:
            yield VersionSpan(length, span.version)
        place = end


def _read(message: ChatMessage) -> Row:
    """Returns a message that the model read: replies among them are not trained."""
    weight = 0 if message.role == "assistant" else None
    return {"role": message.role, "content": message.content, "weight": weight}


def is_wanted(row: Mapping[str, Any], min_reward: float | None) -> bool:
    """Whether a row has the reward that was asked for."""
    return min_reward is None or row["reward"] >= min_reward
